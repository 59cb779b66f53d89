# SPDX-License-Identifier: Apache-2.0
"""A checkpoint with a file that was cut short: the rank that reads the file names it, its peers quote the error."""

from datetime import timedelta

import deepspeed.comm as dist
import pytest
from autoep_models import engine, train_engine
from torch.distributed import distributed_c10d as c10d

from ds_mxfp8_moe.transport.deadline import PeerFailure


def cut_short(directory, stage, pattern):
    net = engine({"enabled": True}, stage)
    train_engine(net, [0])
    net.save_checkpoint(str(directory))
    path = next(directory.glob(f"global_step1/{pattern}"))
    dist.barrier()
    if dist.get_rank() == 0:
        path.write_bytes(path.read_bytes()[:path.stat().st_size // 2])
    dist.barrier()
    c10d._set_pg_timeout(timedelta(seconds=3), c10d._get_default_group())
    try:
        net.load_checkpoint(str(directory))
        train_engine(net, [1])
    except (RuntimeError, PeerFailure) as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize("stage, pattern, reader", [
    (2, "layer_0_expert_1_*", 0), (1, "mp_rank_00_model_states.pt", None)])
def test_the_file_is_named_on_the_rank_that_reads_it_and_on_its_peers(ranks2, tmp_path, stage, pattern, reader):
    told = ranks2.run(cut_short, tmp_path, stage, pattern)
    ranks2.close()  # their default group has a deadline of its own now
    name = str(next(tmp_path.glob(f"global_step1/{pattern}")))
    for rank, error in enumerate(told):
        assert f"the checkpoint file {name} (" in error
        if rank == reader or reader is None:
            assert "cannot be read: " in error and "load an earlier checkpoint" in error


def missing(directory):
    net = engine({"enabled": True}, 2)
    return net.load_checkpoint(str(directory))[0], engine({"enabled": False}, 2).checkpoint_engine.load.__name__


def test_a_missing_checkpoint_is_said_by_deepspeed(ranks2, tmp_path):
    assert ranks2.run(missing, tmp_path) == [(None, "load")] * 2
