# SPDX-License-Identifier: Apache-2.0
"""Ranks wait for rank 0 for as long as its files grow, and no longer."""

import time

import deepspeed.comm as dist
import pytest
import torch

from ds_mxfp8_moe.transport import rank_0
from ds_mxfp8_moe.transport.deadline import PeerError
from ds_mxfp8_moe.transport.rank_0 import RankZeroWrites

DEADLINE_SECONDS = 0.25


def writing(folder, monkeypatch):
    monkeypatch.setattr(rank_0, "set_deadline", lambda group, device: DEADLINE_SECONDS)
    monkeypatch.setattr(rank_0, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(rank_0, "GRACE_SECONDS", 0.2)
    return RankZeroWrites("save", "not saved", folder, torch.device("cpu"))


def slow(folder):
    """Seconds that rank 0 wrote, and seconds until this rank went on."""
    start, order = time.monotonic(), []
    with pytest.MonkeyPatch.context() as patch, writing(folder, patch) as whole:
        for step in range(2):
            for part in range(4 if dist.get_rank() == 0 else 0):
                (folder / f"{step}{part}").write_text("some bytes")
                time.sleep(DEADLINE_SECONDS)
            whole.step()
            order.append(len(list(folder.iterdir())))
    return order, time.monotonic() - start


def test_files_that_grow_for_longer_than_the_deadline(ranks2, tmp_path):
    (first, _), (second, seconds) = ranks2.run(slow, tmp_path)
    assert first == [4, 8] and second[0] >= 4 and second[1] == 8 and seconds > 7 * DEADLINE_SECONDS


def failing(folder):
    found = []
    for error in OSError(28, "No space left on device", str(folder / "model.safetensors")), None:
        dist.barrier()
        try:
            with pytest.MonkeyPatch.context() as patch, writing(folder, patch):
                if dist.get_rank() == 0 and error:
                    raise error
                if dist.get_rank() == 0:
                    time.sleep(5 * DEADLINE_SECONDS)
            found.append("saved")
        except RuntimeError as raised:
            assert isinstance(raised, PeerError) == (error is None)
            found.append(str(raised))
    return found


def test_an_error_is_raised_on_every_rank_and_a_rank_that_writes_nothing_is_named(ranks2, tmp_path):
    (mine, saved), (theirs, waited) = ranks2.run(failing, tmp_path)
    assert mine == theirs == (f"not saved: rank 0 raised OSError: [Errno 28] No space left on device: "
                              f"'{tmp_path / 'model.safetensors'}'")
    assert saved == "saved" and "rank 1 waited for rank 0 in save: for " in waited
    assert f"2 deadlines, its files in {tmp_path} have not grown" in waited and "DEEPSPEED_TIMEOUT" in waited
