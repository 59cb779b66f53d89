# SPDX-License-Identifier: Apache-2.0
"""The choice of transport: for a reason, alike on every rank, made once. Machines with GPUs are played on the CPU."""

import io
from collections import Counter
from contextlib import contextmanager, redirect_stdout
from datetime import timedelta
from types import SimpleNamespace

import deepspeed.comm as dist
import pytest
from models import Block, SwiGLU, moe_layer
from torch.distributed import distributed_c10d as c10d

import ds_mxfp8_moe
from ds_mxfp8_moe.transport import choose as module
from ds_mxfp8_moe.transport.choose import MOST_RANKS, Place, choose
from ds_mxfp8_moe.transport.collective import Collective
from ds_mxfp8_moe.transport.deadline import PeerFailure
from ds_mxfp8_moe.transport.local import Local

GOOD = "its ranks share a host, and their GPUs reach each other's memory"


def gpus(*names) -> frozenset:
    return frozenset(names)


def place(rank: int, of: int = 2, **changes) -> Place:
    others = gpus(*(f"gpu{r}" for r in range(of) if r != rank))
    return Place("box 1234", f"gpu{rank}", others)._replace(**changes)


@contextmanager
def machine(**changes):
    """This rank as one of a machine with a GPU for each of two; yields how often each question was asked.

    Args:
        changes: to what this rank's Place is; `build`, a failure of its build; `staging`, one of its peer memory.
    """
    asked = Counter()
    rank = dist.get_rank()
    build, staging = changes.pop("build", ""), changes.pop("staging", "")

    def counted(name, result):
        def ask(*args):
            asked[name] += 1
            return result
        return ask

    class Memory:

        @staticmethod
        def of(group, extension):
            asked["memory"] += 1
            if staging:
                raise OSError(staging)
            return f"staging made by {extension}"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_plain_obstacle", counted("obstacle", None))
        patch.setattr(module, "_place", counted("place", place(rank, **changes)))
        patch.setattr(module.extension, "try_load", counted("build", (None if build else "the extension", build)))
        patch.setattr(module, "PeerMemory", Memory)
        patch.setattr(module, "NVLink", lambda *args: SimpleNamespace(args=args))
        yield asked


def choices(requested, changes_of_rank_1, times=1, **options):
    """What this rank gets, the errors that it meets, what it prints; and what it asked."""
    group, out, got = dist.get_world_group(), io.StringIO(), []
    module._OF_GROUP.pop(group, None)
    with machine(**(changes_of_rank_1 if dist.get_rank() == 1 else {})) as asked, redirect_stdout(out):
        for _ in range(times):
            try:
                chosen = choose(group, "block.3.moe", requested, **options)
            except RuntimeError as error:
                got.append(str(error))
            else:
                got.append(type(chosen).__name__ if isinstance(chosen, Collective) else chosen.args)
    module._OF_GROUP.pop(group, None)
    return got, out.getvalue(), dict(asked)


NVLINK = ("staging made by the extension", "block.3.moe", None, None, True, "error")


def test_nvlink_where_it_is_possible_and_the_question_asked_once(ranks2):
    zero, one = ranks2.run(choices, None, {}, times=3)
    assert zero[0] == one[0] == [NVLINK] * 3
    assert zero[1] == f"mxfp8_moe: transport nvlink between ranks [0, 1]: {GOOD}\n" and one[1] == ""
    for _, _, asked in (zero, one):
        assert asked["obstacle"] == asked["place"] == 1


def test_options_reach_the_transport(ranks2):
    for got, _, _ in ranks2.run(choices, "nvlink", {}, sms=24, capacity_factor=1.5, overlap=False,
                                    on_overflow="drop"):
        assert got == [(*NVLINK[:2], 24, 1.5, False, "drop")]


REASONS = [
    ({"host": "crate 99"}, "ranks 0 and 1 are on different hosts, box and crate", False),
    ({"host": "box 99"}, "ranks 0 and 1 are on different hosts, box and box", False),
    ({"gpu": "gpu0"}, "ranks 0 and 1 share a GPU", False),
    ({"reached": gpus()}, "the GPU of rank 1 cannot reach the memory of the GPU of rank 0", False),
    ({"build": "the extension cannot be built: error: no"}, "rank 1: the extension cannot be built: error: no", True),
    ({"staging": "no file descriptors"}, "rank 1: peer memory cannot be set up: OSError: no file descriptors", True),
]


@pytest.mark.parametrize("changes, reason, broken", REASONS, ids=lambda value: None)
def test_one_rank_that_cannot_decides_for_all(ranks2, changes, reason, broken):
    zero, one = ranks2.run(choices, None, changes, times=2)
    assert zero[0] == one[0] == ["Collective"] * 2
    warning = "WARNING: " if broken else ""
    assert zero[1].startswith(f"mxfp8_moe: {warning}transport collective between ranks [0, 1]: {reason}")
    assert one[1] == "" and zero[1].count("\n") == 1
    assert zero[2].get("build", 0) == (1 if broken else 0)  # nobody compiles what cannot be used


@pytest.mark.parametrize("changes, reason, broken", REASONS, ids=lambda value: None)
def test_what_is_requested_and_impossible_is_an_error_everywhere(ranks2, changes, reason, broken):
    for got, _, _ in ranks2.run(choices, "nvlink", changes, times=2):
        for text in got:
            assert text.startswith(f"block.3.moe: the transport nvlink cannot be used here: {reason}")
            assert '"transport": "collective" instead' in text


def test_collective_asks_nothing(ranks2):
    assert ranks2.run(choices, "collective", {}) == [(["Collective"], "", {})] * 2


def test_a_group_of_one_asks_nothing():
    for requested in (None, "collective", "nvlink"):
        chosen = choose(None, "moe", requested)
        assert isinstance(chosen, Local) and chosen.name == "moe"


def on_the_cpu():
    group, out = dist.new_group([0, 1]), io.StringIO()
    with redirect_stdout(out), pytest.raises(RuntimeError, match="there is no CUDA device"):
        choose(group, "moe", "nvlink")
    assert not out.getvalue()  # the error says it all
    group = dist.get_world_group()
    with redirect_stdout(out):
        chosen = choose(group, "moe", capacity_factor=1.5)
    with pytest.raises(RuntimeError, match="there is no CUDA device"):
        choose(group, "moe", "nvlink")
    return isinstance(chosen, Collective), out.getvalue()


def test_without_gpus(ranks2):
    said = ("mxfp8_moe: transport collective between ranks [0, 1]: there is no CUDA device\n"
            'mxfp8_moe: WARNING: "capacity_factor" has no effect: only the transport nvlink reads it\n')
    assert ranks2.run(on_the_cpu) == [(True, said), (True, "")]


def test_what_all_ranks_know_is_not_asked(monkeypatch):
    assert module._plain_obstacle(2) == "there is no CUDA device"
    monkeypatch.setattr(module, "get_accelerator", lambda: SimpleNamespace(device_name=lambda: "cuda"))
    assert module._plain_obstacle(2) is module._plain_obstacle(MOST_RANKS) is None
    assert module._plain_obstacle(16) == "the group has 16 ranks, and nvlink supports at most 8"


def test_ranks_of_one_gpu_may_share_where_all_say_so():
    shared = [place(0, reached=gpus("gpu0"))] * 3
    assert module._apart([0, 1, 2], shared) is None
    shared[2] = place(0)
    assert module._apart([4, 5, 7], shared) == "ranks 7 and 4 share a GPU"
    assert module._apart([0, 1], [place(0), place(1)]) is None


def stay_away():
    c10d._set_pg_timeout(timedelta(seconds=3), c10d._get_default_group())
    group = dist.new_group([0, 1])
    if dist.get_rank() == 1:
        return None
    with machine(), pytest.raises(PeerFailure) as caught:
        choose(group, "block.3.moe")
    return caught.value.missing, str(caught.value)


def through_the_engine(section):
    out = io.StringIO()
    with redirect_stdout(out):
        try:
            model = Block(moe_layer(SwiGLU(), ep_size=2, k=2))
            ds_mxfp8_moe.initialize(model=model, config={"train_micro_batch_size_per_gpu": 1, "mxfp8_moe": section})
        except RuntimeError as error:
            return str(error)
    return [line for line in out.getvalue().splitlines() if "transport" in line]


def test_the_engine_chooses_at_its_start(ranks2):
    said = ranks2.run(through_the_engine, {"enabled": True})
    assert said == [["mxfp8_moe: transport collective between ranks [0, 1]: there is no CUDA device"], []]
    assert ranks2.run(through_the_engine, {"enabled": True, "transport": "collective"}) == [[], []]
    for text in ranks2.run(through_the_engine, {"enabled": True, "transport": "nvlink"}):
        assert "the transport nvlink cannot be used here: there is no CUDA device" in text


def test_a_rank_that_does_not_come_is_named(ranks2):
    (missing, text), _ = ranks2.run(stay_away)
    assert missing == (1, ) and "'choice of transport' of block.3.moe" in text and "rank 1 did not come" in text
