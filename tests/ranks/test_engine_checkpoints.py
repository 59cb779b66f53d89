# SPDX-License-Identifier: Apache-2.0
"""save_checkpoint and load_checkpoint are whole or without effect, on all ranks alike."""

import errno
import os
import signal
from dataclasses import replace
from pathlib import Path
from unittest import mock

import deepspeed.comm as dist
import pytest
import torch

from ds_mxfp8_moe.checkpoint.engine_checkpoints import CheckpointError
from ds_mxfp8_moe.checkpoint.manifest import MANIFEST, find_damage, read_manifest
from ds_mxfp8_moe.transport import deadline
from tests.support.autoep_models import engine as autoep_engine
from tests.support.autoep_models import train_engine
from tests.support.models import Layout, make_engine, state, train_steps
from tests.support.rank_pool import RankFailure

LAYOUT = Layout(zero=1, steps=1)
SCRIPTS = ["zero_to_fp32.py", "zero_to_torch.py"]


def error_of(call, *args, **kwargs) -> str:
    try:
        call(*args, **kwargs)
    except CheckpointError as error:
        return str(error)
    return "nothing was raised"


def names(directory: Path) -> list[str]:
    dist.barrier()
    found = sorted(path.name for path in directory.iterdir())
    dist.barrier()
    return found


def changed_on_rank_0(change, *args) -> None:
    if dist.get_rank() == 0:
        change(*args)
    dist.barrier()


def full_disk(plain, number: int):
    """Writes half of the `number`-th file of this rank, and raises as the system does."""
    count = 0

    def save(what, path, *args, **kwargs):
        nonlocal count
        count += 1
        plain(what, path, *args, **kwargs)
        if count == number:
            raise OSError(errno.ENOSPC, "No space left on device", path)
    return save


def saves(directory: str) -> dict:
    directory, told = Path(directory), {}
    engine = make_engine(LAYOUT, {"enabled": True})
    train_steps(engine, LAYOUT)
    engine.save_checkpoint(directory, tag="a", client_state={"mine": 7})
    changed_on_rank_0((directory / "a" / "note.txt").write_text, "of the user")
    told["first"] = names(directory), (directory / "latest").read_text()
    train_steps(engine, LAYOUT, 1)
    for tag in ("a", "b"):
        with mock.patch.object(torch, "save", full_disk(torch.save, 2 if dist.get_rank() == 1 else 0)):
            told[f"full disk, {tag}"] = error_of(engine.save_checkpoint, directory, tag=tag)
    told["two tags"] = error_of(engine.save_checkpoint, directory, tag=f"of rank {dist.get_rank()}")
    manifest = read_manifest(directory / "a")
    told["after errors"] = names(directory), manifest["step"], find_damage(directory / "a", manifest["files"])
    engine.save_checkpoint(directory, tag="a", save_latest=False)
    told["over a"] = names(directory), read_manifest(directory / "a")["step"], (directory / "a/note.txt").read_text()
    engine._config.use_node_local_storage, engine.local_rank = True, 0  # as on two nodes with one rank each
    engine.config["checkpoint"] = {"use_node_local_storage": True}
    own = directory.with_name(f"node{dist.get_rank()}")
    with mock.patch.dict(os.environ, LOCAL_RANK="0"):
        engine.save_checkpoint(own)
    told["each node"] = names(own), sorted(read_manifest(own / "global_step2")["files"])
    return told


def test_a_save_that_fails_on_one_rank_fails_on_all_and_harms_nothing(ranks2, tmp_path):
    for rank, told in enumerate(ranks2.run(saves, str(tmp_path / "run"))):
        all_names = ["a", "latest", *SCRIPTS]
        assert told["first"] == (all_names, "a")
        for tag in ("a", "b"):
            error = told[f"full disk, {tag}"]
            assert "rank 1: " in error and ".pt: " in error and "No space left on device" in error
        assert "different tags: ['of rank 0', 'of rank 1']" in told["two tags"]
        assert told["after errors"] == (all_names, 1, None)
        assert told["over a"] == (all_names, 2, "of the user")
        folder, files = told["each node"]
        assert folder == ["global_step2", "latest", *(SCRIPTS if rank == 0 else [])]
        assert f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" in files
        assert f"zero_pp_rank_{1 - rank}_mp_rank_00_optim_states.pt" not in files


def killed(directory: str) -> None:
    """Rank 1 dies while it saves under the tag of an earlier checkpoint. Every moment: tests/unit/test_manifest.py."""
    engine, rank, plain, files = make_engine(LAYOUT, {"enabled": True}), dist.get_rank(), torch.save, []
    train_steps(engine, LAYOUT)
    engine.save_checkpoint(directory, tag="a")
    torch.save(state(engine), f"{directory}-{rank}")
    train_steps(engine, LAYOUT, 1)

    def save(what, path, *args, **kwargs):
        files.append(path)
        if rank == 1 and len(files) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        plain(what, path, *args, **kwargs)

    with mock.patch.object(torch, "save", save), mock.patch.object(deadline, "GRACE_SECONDS", 0.3):
        engine.save_checkpoint(directory, tag="a")


def after_a_death(directory: str) -> tuple:
    """The step that is loaded, whether its state is the one that was saved, and what is there after the next save."""
    engine = make_engine(replace(LAYOUT, seed=99), {"enabled": True})
    engine.load_checkpoint(directory)
    same = equal(engine, torch.load(f"{directory}-{dist.get_rank()}"))
    step = engine.global_steps
    engine.save_checkpoint(directory, tag="b")
    return step, same, names(Path(directory))


def test_the_earlier_checkpoint_loads_after_a_rank_was_killed(ranks2, tmp_path):
    with pytest.raises(RankFailure) as caught:
        ranks2.run(killed, str(tmp_path / "run"))
    assert "ended" in caught.value.errors[1] and "PeerError" in caught.value.errors[0]
    assert ranks2.run(after_a_death, str(tmp_path / "run")) == [(1, True, ["a", "b", "latest", *SCRIPTS])] * 2


def cut(path: Path) -> bytes:
    whole = path.read_bytes()
    path.write_bytes(whole[:len(whole) // 2])
    return whole


def equal(engine, before: dict) -> bool:
    return all(torch.equal(value, before[name]) for name, value in state(engine).items())


def loads(directory: str) -> dict:
    directory, told = Path(directory), {}
    engine = make_engine(LAYOUT, {"enabled": True})
    train_steps(engine, LAYOUT)
    engine.save_checkpoint(directory, tag="a")
    train_steps(engine, LAYOUT, 1)
    before = state(engine)

    def failed(kind: str, **arguments) -> None:
        told[kind] = error_of(engine.load_checkpoint, directory, **arguments), equal(engine, before)

    model = directory / "a/mp_rank_00_model_states.pt"
    for kind, path in {"expert": directory / "a/layer_1_expert_7_mp_rank_00_model_states.pt",
                       "optimizer": directory / "a/zero_pp_rank_1_mp_rank_00_optim_states.pt"}.items():
        whole = path.read_bytes()
        dist.barrier()
        changed_on_rank_0(cut, path)
        failed(kind)
        changed_on_rank_0(path.write_bytes, whole)
    failed("no such tag", tag="c")
    told["ranks"] = error_of(engine.load_checkpoint, directory, tag="a" if dist.get_rank() else "c")
    manifest = directory / "a" / MANIFEST
    whole = manifest.read_text()
    dist.barrier()
    changed_on_rank_0(manifest.write_text, whole.replace('"world_size": 2', '"world_size": 3'))
    failed("other world")
    changed_on_rank_0(manifest.write_text, whole)
    # What is found without a manifest.
    changed_on_rank_0((directory / "a" / MANIFEST).unlink)
    told["expert alone"] = None
    whole = (directory / "a/layer_1_expert_7_mp_rank_00_model_states.pt").read_bytes()
    dist.barrier()
    changed_on_rank_0(cut, directory / "a/layer_1_expert_7_mp_rank_00_model_states.pt")
    failed("expert alone")
    changed_on_rank_0((directory / "a/layer_1_expert_7_mp_rank_00_model_states.pt").write_bytes, whole)
    content = torch.load(model, weights_only=False)
    dist.barrier()
    content["module"]["last.weight"] = content["module"]["last.weight"][:-1]
    changed_on_rank_0(torch.save, content, model)
    failed("other shape")
    del content["module"]["last.weight"]
    changed_on_rank_0(torch.save, content, model)
    failed("other name")
    engine.load_checkpoint(directory, load_module_strict=False)
    told["steps"] = engine.global_steps
    changed_on_rank_0(cut, directory / "a/zero_pp_rank_1_mp_rank_00_optim_states.pt")
    told["mixed"] = error_of(engine.load_checkpoint, directory, load_module_strict=False)
    return told


def test_a_load_that_fails_on_one_rank_fails_on_all_and_changes_nothing(ranks2, tmp_path):
    told, other = ranks2.run(loads, str(tmp_path))
    assert told == other
    for kind, said in {"expert": "layer_1_expert_7", "optimizer": "zero_pp_rank_1",
                       "no such tag": "no folder for the tag 'c'. It has ['a']",
                       "other world": "saved by 3 ranks, and this run has 2",
                       "expert alone": "cannot be read", "other shape": "size mismatch for last.weight",
                       "other name": "last.weight"}.items():
        error, same = told[kind]
        assert said in error and "Nothing was copied" in error and same, kind
    assert "is not whole" in told["expert"][0]
    assert "the ranks find different" in told["ranks"] or "no folder for the tag 'c'" in told["ranks"]
    assert told["steps"] == 1
    assert "rank 1: " in told["mixed"] and "state is mixed" in told["mixed"]


def over_another_base_model(directory: str) -> tuple:
    def start(seed: int, ep_size: int, **keys):
        return autoep_engine({"enabled": True, "frozen_experts": "mxfp8", **keys}, 1, ep_size, frozen=".*experts.*",
                             model_changes=dict(seed=seed, num_hidden_layers=1))

    first = start(0, 2)
    train_engine(first, [0])
    first.save_checkpoint(directory)
    same = start(0, 1)  # each rank holds all experts
    return error_of(start(1, 2).load_checkpoint, directory), same.load_checkpoint(directory)[0] is not None


def test_frozen_experts_of_another_base_model_are_refused(ranks2, tmp_path):
    for error, loaded in ranks2.run(over_another_base_model, str(tmp_path)):
        assert "frozen experts of model.layers.0.mlp are not those of the run" in error and loaded


def missing(directory):
    net = autoep_engine({"enabled": True}, 2)
    return net.load_checkpoint(str(directory))[0], autoep_engine({"enabled": False}, 2).checkpoint_engine.load.__name__


def test_a_missing_checkpoint_is_said_by_deepspeed(ranks2, tmp_path):
    assert ranks2.run(missing, tmp_path) == [(None, "load")] * 2
