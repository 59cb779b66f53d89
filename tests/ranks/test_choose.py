# SPDX-License-Identifier: Apache-2.0
"""The choice of transport: for a reason, alike on every rank, made once. Machines with GPUs are played on the CPU."""

import io
import json
from collections import Counter
from contextlib import contextmanager, redirect_stdout
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import deepspeed.comm as dist
import pytest
import torch

import ds_mxfp8_moe
from ds_mxfp8_moe.config import MXFP8MoEConfig
from ds_mxfp8_moe.layers import settings
from ds_mxfp8_moe.transport import choose as module
from ds_mxfp8_moe.transport import deadline
from ds_mxfp8_moe.transport.choose import MOST_RANKS, Asked, Choice, Place, choose, in_words
from ds_mxfp8_moe.transport.collective import Collective
from ds_mxfp8_moe.transport.deadline import PeerError
from ds_mxfp8_moe.transport.local import Local
from ds_mxfp8_moe.transport.nvlink import MOST_MULTIPROCESSORS
from ds_mxfp8_moe.transport.releases import own_code
from tests.support.models import Block, SwiGLU, moe_layer
from tests.support.rank_pool import set_timeout

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
                chosen = choose(group, "block.3.moe", MXFP8MoEConfig(transport=requested, **options))
            except RuntimeError as error:
                got.append(str(error))
            else:
                got.append(type(chosen).__name__ if isinstance(chosen, Collective) else chosen.args)
    module._OF_GROUP.pop(group, None)
    return got, out.getvalue(), dict(asked)


NVLINK = ("staging made by the extension", "block.3.moe", MOST_MULTIPROCESSORS, None, "error")


def test_nvlink_where_it_is_possible_and_the_question_asked_once(ranks2):
    zero, one = ranks2.run(choices, None, {}, times=3)
    assert zero[0] == one[0] == [NVLINK] * 3
    assert zero[1] == f"mxfp8_moe: transport nvlink between ranks [0, 1]: {GOOD}\n" and one[1] == ""
    for _, _, asked in (zero, one):
        assert asked["obstacle"] == asked["place"] == 1


def test_options_reach_the_transport(ranks2):
    for got, _, _ in ranks2.run(choices, "nvlink", {}, nvlink_sms=24, capacity_factor=1.5,
                                    on_overflow="drop"):
        assert got == [(*NVLINK[:2], 24, 1.5, "drop")]


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
    for got, said, _ in ranks2.run(choices, "nvlink", changes, times=2):  # what is requested
        for text in got:
            assert text.startswith(f"block.3.moe: the transport nvlink cannot be used here: {reason}")
            assert '"transport": "collective" instead' in text
        assert not said


def test_collective_asks_nothing(ranks2):
    assert ranks2.run(choices, "collective", {}) == [(["Collective"], "", {})] * 2


def test_a_group_of_one_asks_nothing():
    for requested in (None, "collective", "nvlink"):
        chosen = choose(None, "moe", MXFP8MoEConfig(transport=requested))
        assert isinstance(chosen, Local) and chosen.name == "moe"


def on_the_cpu():
    group, out = dist.new_group([0, 1]), io.StringIO()
    with redirect_stdout(out), pytest.raises(RuntimeError, match="there is no CUDA device"):
        choose(group, "moe", MXFP8MoEConfig(transport="nvlink"))
    assert not out.getvalue()  # the error says it all
    group = dist.get_world_group()
    with redirect_stdout(out):
        chosen = choose(group, "moe", MXFP8MoEConfig(capacity_factor=1.5))
    with pytest.raises(RuntimeError, match="there is no CUDA device"):
        choose(group, "moe", MXFP8MoEConfig(transport="nvlink"))
    return isinstance(chosen, Collective), out.getvalue()


# ---------------------------------------------------------------- two hops

TWO_BY_TWO, ONE_HOST = ["a 1", "a 1", "b 2", "b 2"], ["a 1"] * 4
NO_GPU = "there is no CUDA device"
HOPS, THREE_AND_ONE = "2 nodes of 2 ranks, wire host", (
    "its nodes have different numbers of ranks: ranks [3] are one node and ranks [0, 1, 2] another")
TWO_HOPS = {"transport": "hierarchical"}


def decided(monkeypatch, hosts: list, keys: dict, nvlink: bool = False, device: str = "cpu") -> Choice:
    """The verdict on four ranks, of which rank i runs on hosts[i]. `nvlink`: it is possible between all of them."""
    asked = Asked(**keys)
    monkeypatch.setattr(module, "answers_of_all", lambda *_: [(own_code(), asked, Place(host, "", gpus()))
                                                              for host in hosts])
    monkeypatch.setattr(module, "ranks_of", lambda group: [0, 1, 2, 3])
    monkeypatch.setattr(module, "_place", lambda: None)
    monkeypatch.setattr(module.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(module, "get_accelerator", lambda: SimpleNamespace(device_name=lambda: device))
    if nvlink:
        monkeypatch.setattr(module, "_nvlink", lambda *_: Choice("nvlink"))
    return module._decide(None, "moe", asked)


@pytest.mark.parametrize("hosts, keys, transport, sentence", [
    (TWO_BY_TWO, {}, "hierarchical", f"{HOPS}. No nvlink, because {NO_GPU}"),
    (TWO_BY_TWO, TWO_HOPS, "hierarchical", HOPS),
    (ONE_HOST, TWO_HOPS | {"node_size": 2}, "hierarchical", HOPS),
    (ONE_HOST, {"node_size": 2}, "hierarchical", f"{HOPS}. No nvlink, because {NO_GPU}"),
    (ONE_HOST, {}, "collective", NO_GPU),
    (ONE_HOST, TWO_HOPS, "collective", f"all ranks are on one node. No nvlink, because {NO_GPU}"),
    *((hosts, keys | more, "collective", sentence)
      for hosts, keys, obstacle in [
          (["a 1", "a 1", "a 1", "b 2"], {}, THREE_AND_ONE),
          (["a 1", "b 2"] * 2, {}, "the ranks of a node are not consecutive in the group: [0, 2] and [1, 3]"),
          (["a 1", "b 2", "c 3", "d 4"], {}, "there is one rank a node"),
          (ONE_HOST, {"node_size": 1}, "there is one rank a node"),
          (ONE_HOST, {"node_size": 3}, THREE_AND_ONE)]
      for more, sentence in [({}, f"{NO_GPU}. No hierarchical, because {obstacle}"),
                             (TWO_HOPS, f"{obstacle}. No nvlink, because {NO_GPU}")])])
def test_without_nvlink(monkeypatch, hosts, keys, transport, sentence):
    verdict = decided(monkeypatch, hosts, keys)
    assert verdict.transport == transport and in_words(verdict) == sentence
    if transport == "hierarchical":
        assert (verdict.nodes, verdict.node_size, verdict.wires) == (2, 2, ("host", "host"))


@pytest.mark.parametrize("keys, transport, sentence", [
    ({}, "nvlink", GOOD), ({"node_size": 2}, "nvlink", GOOD), ({"transport": "nvlink"}, "nvlink", GOOD),
    (TWO_HOPS | {"node_size": 2}, "hierarchical", HOPS),
    (TWO_HOPS | {"node_size": 3}, "nvlink", f"{GOOD}. No hierarchical, because {THREE_AND_ONE}")])
def test_nvlink_comes_before_two_hops_unless_these_are_requested(monkeypatch, keys, transport, sentence):
    verdict = decided(monkeypatch, ONE_HOST, keys, nvlink=True)
    assert verdict.transport == transport and in_words(verdict) == sentence


@pytest.mark.parametrize("most, silent", [(8, "hierarchical"), (1, "collective")])
def test_between_many_nodes_two_hops_are_not_chosen_unless_asked_for(monkeypatch, most, silent):
    monkeypatch.setattr(module, "MOST_NODES", most)
    assert decided(monkeypatch, TWO_BY_TWO, TWO_HOPS, device="cuda").transport == "hierarchical"
    verdict = decided(monkeypatch, TWO_BY_TWO, {}, device="cuda")
    assert verdict.transport == silent
    assert ("not faster between more than 1 nodes" in in_words(verdict)) == (silent == "collective")


def on_two_nodes(*requests) -> list:
    """What this rank of two nodes gets for each request (keys of the config), and what it prints."""
    group, got = dist.get_world_group(), []
    module._OF_GROUP.pop(group, None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_place", lambda: Place(TWO_BY_TWO[dist.get_rank()], "", gpus()))
        for keys in requests:
            with redirect_stdout(io.StringIO()) as out:
                try:
                    chosen = choose(group, "moe", MXFP8MoEConfig(**keys))
                except ValueError as error:
                    chosen = error
            got.append((type(chosen).__name__, str(chosen) if isinstance(chosen, ValueError) else out.getvalue()))
    module._OF_GROUP.pop(group, None)
    return got


def test_two_nodes(ranks4):
    """Rank 0 prints a line once. Two hops refuse a capacity on every rank."""
    refused = ('moe: "capacity_factor" is 1.5, but the transport is hierarchical, since ranks [0, 1, 2, 3] are 2 '
               'nodes of 2 ranks. Only nvlink supports "capacity_factor": leave it out, or keep expert-parallel '
               "groups inside a node")
    ranks, no_nvlink = "between ranks [0, 1, 2, 3]", f". No nvlink, because {NO_GPU}\n"
    said = [f"mxfp8_moe: transport hierarchical {ranks}: {HOPS}{no_nvlink}",
            f"mxfp8_moe: transport hierarchical {ranks}: {HOPS}\n", "", "",
            f"mxfp8_moe: WARNING: transport collective {ranks}: {THREE_AND_ONE}{no_nvlink}"]
    requests = ({}, TWO_HOPS, TWO_HOPS, {"transport": "collective"}, TWO_HOPS | {"node_size": 3},
                {"capacity_factor": 1.5})
    for rank, answers in enumerate(ranks4.run(on_two_nodes, *requests)):
        names, texts = zip(*answers, strict=True)
        assert names == ("Hierarchical", "Hierarchical", "Hierarchical", "Collective", "Collective", "ConfigError")
        assert list(texts) == [*(said if rank == 0 else [""] * 5), refused]


def ask_differently(keys: list) -> list:
    group = dist.get_world_group()
    module._OF_GROUP.pop(group, None)
    with pytest.raises(ValueError) as caught:
        choose(group, "moe", MXFP8MoEConfig(**keys[dist.get_rank()]))
    assert group not in module._OF_GROUP or not module._OF_GROUP[group]
    return str(caught.value)


@pytest.mark.parametrize("key, one, two", [("node_size", 2, 1), ("transport", "hierarchical", None),
                                           ("wire", "nvshmem", "host")])
def test_ranks_that_ask_for_different_nodes_raise_everywhere(ranks2, key, one, two):
    keys = [{"transport": "hierarchical", "node_size": 2, key: value} for value in (one, two)]
    values = [json.dumps(value) for value in (two, one)]
    said = f'moe: "{key}" is {values[0]} on rank 1 and {values[1]} on rank 0: give every rank the same config'
    assert ranks2.run(ask_differently, keys) == [said] * 2


def test_without_gpus(ranks2):
    said = ("mxfp8_moe: transport collective between ranks [0, 1]: there is no CUDA device\n"
            'mxfp8_moe: WARNING: "capacity_factor" has no effect: read by nvlink alone\n')
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
    set_timeout(timedelta(seconds=1.5))
    group = dist.new_group([0, 1])
    if dist.get_rank() == 1:
        return None
    with machine(), mock.patch.object(deadline, "GRACE_SECONDS", 0.5), pytest.raises(PeerError) as caught:
        choose(group, "block.3.moe")
    return caught.value.missing, str(caught.value)


def calls_of_choose(section: dict) -> tuple:
    """How often layers choose at the engine's start, and in two steps."""
    with mock.patch.object(settings, "choose", side_effect=choose) as called:
        model = Block(moe_layer(SwiGLU(), ep_size=2, k=2))
        engine = ds_mxfp8_moe.initialize(model=model, config={"train_micro_batch_size_per_gpu": 1,
                                                              "mxfp8_moe": section})[0]
        at_start = called.call_count
        for _ in range(2):
            engine(torch.randn(2, 4, 64))
    return at_start, called.call_count


def test_a_layer_chooses_once(ranks2):
    assert ranks2.run(calls_of_choose, {"enabled": True}) == [(1, 1)] * 2


def test_a_rank_that_does_not_come_is_named(ranks2):
    (missing, text), _ = ranks2.run(stay_away)
    assert missing == (1, ) and "'choice of transport' of block.3.moe" in text and "rank 1 did not come" in text
