# SPDX-License-Identifier: Apache-2.0
"""save_checkpoint is killed, interrupted and out of disk at random operations. The newest whole checkpoint then loads
on new ranks, and the run goes on as one that was not disturbed, bit for bit."""

import zlib
from pathlib import Path

import pytest

from ds_mxfp8_moe.checkpoint.manifest import find_damage, read_manifest
from tests.support.models import Layout, make_engine, state, train_steps
from tests.support.torture import disturbed, random_faults, run_ranks

FAULTS = 15
LAYOUT = Layout(zero=1, steps=1, config={"optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}}})


def digest(engine) -> int:
    """Of weights and of the optimizer's states."""
    crc = 0
    for name, tensor in sorted(state(engine).items()):
        crc = zlib.crc32(tensor.detach().contiguous().numpy().tobytes(), zlib.crc32(name.encode(), crc))
    return crc


def undisturbed(directory: str, steps: int) -> tuple[list[int], int]:
    """The digest after each step; and the operations of a save, the first of two checkpoints."""
    engine, digests = make_engine(LAYOUT, {"enabled": True}), []
    for step in range(steps):
        digests.append(digest(engine))
        if step in (1, 2):
            with disturbed(directory, None) as count:
                engine.save_checkpoint(directory, tag="last")
        train_steps(engine, LAYOUT, step)
    return digests, count.operations


def next_step(directory: str, fault, tag: str | None) -> tuple[int, int, int]:
    """Loads the newest checkpoint, trains one step and saves. The step that was loaded, and both digests."""
    engine = make_engine(LAYOUT, {"enabled": True})
    engine.load_checkpoint(directory)
    step, before = engine.global_steps, digest(engine)
    train_steps(engine, LAYOUT, step)
    found = step, before, digest(engine)
    write_beside(directory, found)  # for the parent, if this process is killed
    with disturbed(directory, fault):
        engine.save_checkpoint(directory, tag=tag)
    return found


def write_beside(directory: str, found: tuple) -> None:
    import deepspeed.comm as dist
    Path(f"{directory}-{dist.get_rank()}").write_text(" ".join(map(str, found)))


def read_beside(directory: Path) -> list[tuple]:
    return [tuple(map(int, Path(f"{directory}-{rank}").read_text().split())) for rank in range(2)]


def newest_whole(directory: Path) -> int:
    """The step of the newest checkpoint of which all files are as they were written."""
    folders = [path.parent for path in directory.glob("*/manifest.json")] + [
        path.parent for path in directory.glob(".*/manifest.json")]
    manifests = {folder: read_manifest(folder) for folder in folders}
    return max(manifest["step"] for folder, manifest in manifests.items()
               if find_damage(folder, manifest["files"]) is None)


def left_behind(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob(".*"))


@pytest.mark.slow
def test_the_newest_whole_checkpoint_loads_after_any_fault(tmp_path):
    directory = tmp_path / "run"
    directory.mkdir()
    ranks = run_ranks(undisturbed, str(directory), FAULTS + 3)
    assert not any(rank.error for rank in ranks), ranks
    expected = [rank.value[0] for rank in ranks]
    newest = newest_whole(directory)
    assert newest == 2
    fired = 0
    for i, fault in enumerate(random_faults(FAULTS, [rank.value[1] for rank in ranks], seed=61)):
        outcomes = run_ranks(next_step, str(directory), fault, "last" if i % 3 else None)
        for rank, (step, before, after) in enumerate(read_beside(directory)):
            assert step == newest, (fault, outcomes)
            assert (before, after) == tuple(expected[rank][step:step + 2]), (fault, outcomes)
        saved = newest_whole(directory)
        disturbed_save = any(outcome.error for outcome in outcomes)
        assert saved in (newest, newest + 1)
        assert saved == newest + 1 or disturbed_save, (fault, outcomes)
        if "save_checkpoint to" in "".join(outcome.error for outcome in outcomes):  # all ranks say that it failed
            assert saved == newest, (fault, outcomes)
        if fault.kind not in ("kill", "kill all", "cut"):
            assert not left_behind(directory), (fault, outcomes)
        newest, fired = saved, fired + disturbed_save
    assert fired > FAULTS * 2 // 3
    outcomes = run_ranks(next_step, str(directory), None, None)
    assert [outcome.value[0] for outcome in outcomes] == [newest] * 2
    assert not left_behind(directory)
