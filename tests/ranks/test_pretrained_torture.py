# SPDX-License-Identifier: Apache-2.0
"""Kills, full disks and Ctrl-C at random moments of save_pretrained, over an earlier model of the same format and of
the other one: transformers loads the earlier model or the new one, and the next save leaves nothing else behind."""

import itertools
import os
import random
import shutil
import signal
import zlib
from unittest.mock import patch

import deepspeed.comm as dist
import pytest
import torch

import ds_mxfp8_moe
from ds_mxfp8_moe.checkpoint.gathering import Gather
from ds_mxfp8_moe.checkpoint.staging import staged
from ds_mxfp8_moe.checkpoint.writing import ShardWriter
from tests.support.autoep_models import ds_config, model
from tests.support.pretrained_models import loaded
from tests.support.torture import Fault, disturbed, run_ranks

SIZES = {"hidden_size": 128, "moe_intermediate_size": 128, "intermediate_size": 128, "num_hidden_layers": 1}
WAYS = list(itertools.product(("model", "fp8"), repeat=2))  # of the earlier model and of the new one
FATAL, OTHERS = ("kill", "kill all", "cut"), ("disk full", "ctrl-c", "ctrl-c all")  # of which a rank dies, or not


def fill(engine, value):
    """Other weights for each value, alike on all ranks but for the experts."""
    for name, parameter in engine.module.named_parameters():
        own = dist.get_rank() if ".experts." in name else -1
        generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {value} {own}".encode()))
        with torch.no_grad():
            parameter.normal_(generator=generator)


def save(engine, folder, value, weights):
    fill(engine, value)
    ds_mxfp8_moe.save_pretrained(engine, folder, weights, max_shard_size=300_000)


def saves(directory, cases):
    """Saves a model over an earlier one for each case (its folder, the two formats, what disturbs the save)."""
    config = ds_config({"enabled": True}, 1, 2, bf16={"enabled": True})
    engine = ds_mxfp8_moe.initialize(model=model("qwen3_moe", **SIZES), config=config)[0]
    found, there = [], {path.name for path in directory.iterdir()}
    dist.barrier()
    for name, (earlier, new), fault in cases:
        if name not in there:
            save(engine, directory / name, 1, earlier)
        dist.barrier()
        with disturbed(directory / name, fault) as count:
            try:
                save(engine, directory / name, 2, new)
                found.append((count.operations, ""))
            except (Exception, KeyboardInterrupt) as error:
                found.append((count.operations, f"{type(error).__name__}: {error}"))
    return found


def exports(directory):
    """Rank 1 dies while rank 0 writes what all ranks export."""
    config = ds_config({"enabled": True}, 1, 2, bf16={"enabled": True})
    engine = ds_mxfp8_moe.initialize(model=model("qwen3_moe", **SIZES), config=config)[0]
    save(engine, directory, 1, "fp8")
    dist.barrier()
    fill(engine, 2)
    pairs = ds_mxfp8_moe.export_weights(engine, "fp8", bucket_bytes=1, rank_0_only=True)
    if dist.get_rank() == 1:
        plain, calls = Gather.parts, iter(range(100))
        with patch.object(Gather, "parts", lambda *args: plain(*args) if next(calls) < 3 else
                          os.kill(os.getpid(), signal.SIGKILL)):
            list(pairs)
    with staged(directory) as folder:
        files = ShardWriter(folder, 10_000)
        for name, tensor in pairs:
            files.add(name, tensor)
        files.finish()


@pytest.mark.slow
def test_a_rank_that_dies_during_an_export(tmp_path):
    alive, dead = run_ranks(exports, tmp_path)
    assert dead.exitcode == -signal.SIGKILL and "PeerError" in alive.error
    assert loaded(tmp_path, torch.bfloat16) and not list(tmp_path.glob(".*"))


def names_in(folder) -> set[str]:
    return {path.name.replace("model-1-", "model-") for path in folder.iterdir()}


@pytest.mark.slow
def test_faults_at_random_moments(tmp_path):
    # Whole saves in each way, and two that end before they have begun and leave the earlier models.
    plain = [(f"{earlier} {new}", (earlier, new), None) for earlier, new in WAYS]
    ended = [(f"{earlier} only", (earlier, "model"), Fault("ctrl-c", 0, 1)) for earlier in ("model", "fp8")]
    first, _ = run_ranks(saves, tmp_path, plain + ended)
    assert [text for _, text in first.value] == [""] * len(plain) + ["KeyboardInterrupt: "] * len(ended)
    folders = {(1, "model"): "model only", (1, "fp8"): "fp8 only", (2, "model"): "model model", (2, "fp8"): "fp8 fp8"}
    expected = {key: loaded(tmp_path / name, torch.bfloat16).state_dict() for key, name in folders.items()}

    draw, cases = random.Random(0), []
    for i, kind in enumerate(FATAL * 2 + OTHERS * 3):
        fault = Fault(kind, 0, draw.randint(1, first.value[i % len(WAYS)][0]), draw.randint(0, 100_000))
        cases.append((f"{i} {kind}", WAYS[i % len(WAYS)], fault))
        shutil.copytree(tmp_path / folders[1, WAYS[i % len(WAYS)][0]], tmp_path / f"{i} {kind}")
    for case in cases[:len(FATAL) * 2]:
        run_ranks(saves, tmp_path, [case])
    for outcome in run_ranks(saves, tmp_path, cases[len(FATAL) * 2:]):
        assert not outcome.error and sum(bool(text) for _, text in outcome.value) > 3, outcome

    found = set()
    for name, (earlier, new), fault in cases:
        state = loaded(tmp_path / name, torch.bfloat16).state_dict()
        same = [value for value, weights in ((1, earlier), (2, new))
                if all(torch.equal(tensor, state[key]) for key, tensor in expected[value, weights].items())]
        assert len(same) == 1, (name, earlier, new, fault)
        found |= set(same)
        whole = tmp_path / folders[2, new]
        with staged(tmp_path / name) as files:
            shutil.copytree(whole, files, dirs_exist_ok=True)
        assert names_in(tmp_path / name) == names_in(whole), (name, earlier, new, fault)
    assert found == {1, 2}
