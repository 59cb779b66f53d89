# SPDX-License-Identifier: Apache-2.0
"""Converted layers under activation checkpointing: same gradients to the bit, same exchanges on every rank.

A recomputed forward exchanges tokens again, in the middle of backward. So each rank has to make the same collectives
in the same order, whatever it routes, receives or holds: else the job hangs.
"""

import functools

import deepspeed.comm as dist
import pytest
import torch
from torch.utils.checkpoint import CheckpointError, checkpoint

import ds_mxfp8_moe
from ds_mxfp8_moe.transport import deadline
from tests.support.checkpointed_net import WAYS
from tests.support.models import BF16, DEFAULT, HIDDEN, Block, SwiGLU, gelu_mlp, moe_layer
from tests.support.rank_pool import reset_deepspeed_groups
from tests.support.slow import slow_except

COLLECTIVES = ("all_to_all_single", "all_reduce", "all_gather", "all_gather_into_tensor", "broadcast", "barrier")


# Tokens of each rank, and whether the router sends all of them to rank 0's experts.
CASES = {
    "even": ((64, 64), False),
    "uneven": ((64, 24), False),
    "one-rank-receives-no-rows": ((64, 64), True),
    "one-rank-has-no-tokens": ((64, 0), False),
    "one-rank-has-and-receives-nothing": ((64, 0), True),
    "only-the-rank-that-receives-nothing-has-tokens": ((0, 64), True),
    "no-tokens-at-all": ((0, 0), False),
}
QUICK = "uneven", "one-rank-has-and-receives-nothing", "no-tokens-at-all"


class Recorder:
    """Notes each collective of deepspeed.comm: its name, and what does not depend on counts, width and dtype."""

    def __enter__(self):
        self.calls, self._plain = [], {name: getattr(dist, name) for name in COLLECTIVES}
        for name, plain in self._plain.items():
            setattr(dist, name, functools.partial(self._noted, name, plain))
        return self

    def _noted(self, name, plain, *args, **kwargs):
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        self.calls.append((name, *((t.dtype, *t.shape[1:]) for t in tensors)))
        return plain(*args, **kwargs)

    def __exit__(self, *_):
        for name, plain in self._plain.items():
            setattr(dist, name, plain)


def make_block(section, kind, dtype=torch.bfloat16):
    torch.manual_seed(3)
    expert, k = {"top1-gelu": (gelu_mlp(), 1), "top2-swiglu": (SwiGLU(), 2)}[kind]
    keys = {} if k == 1 else {"drop_tokens": False, "top2_2nd_expert_sampling": False}
    block = Block(moe_layer(expert, dist.get_world_size(), k=k, **keys))
    block.moe.set_deepspeed_parallelism()
    block = block.to(dtype)
    assert ds_mxfp8_moe.convert(block, section).converted == 1
    return block


def send_all_to_rank_0(block):
    """Equal scores: the first choice is expert 0, the second expert 1."""
    with torch.no_grad():
        block.moe.deepspeed_moe.gate.wg.weight.zero_()


def step(block, way, count):
    """Two blocks' worth: the same block twice in a row, each recomputed for itself."""
    for p in block.parameters():
        p.grad = None
    torch.manual_seed(11 + dist.get_rank())
    x = torch.randn(count, HIDDEN, dtype=torch.bfloat16).requires_grad_()
    weight = torch.randn(HIDDEN, dtype=torch.bfloat16)
    with Recorder() as recorder:
        y, aux = WAYS[way](block, x)
        y, aux_2 = WAYS[way](block, y)
        forward = len(recorder.calls)
        ((y * weight).float().sum() + aux + aux_2).backward()
    grads = {name: p.grad for name, p in block.named_parameters()}
    return {"tensors": {"y": y.detach(), "aux": aux.detach(), "x": x.grad, **grads}, "calls": recorder.calls,
            "forward": forward, "rows": block.moe.deepspeed_moe.exp_counts.sum().item()}


def all_ways(section, kind, counts, to_rank_0):
    reset_deepspeed_groups()
    block = make_block(section, kind)
    if to_rank_0:
        send_all_to_rank_0(block)
    return {way: step(block, way, counts[dist.get_rank()]) for way in WAYS}


@pytest.mark.parametrize("case, section, kind", slow_except(
    [*((case, "default", "top2-swiglu") for case in CASES), ("uneven", "bf16", "top1-gelu")],
    *((case, "default", "top2-swiglu") for case in QUICK)))
def test_recomputation_gives_the_same_bits_and_exchanges(ranks2, case, section, kind):
    results = ranks2.run(all_ways, {"bf16": BF16, "default": DEFAULT}[section], kind, *CASES[case])
    for run in results:
        stored = run["stored"]
        assert all(g is not None and torch.isfinite(g).all() for g in stored["tensors"].values())
        for way, again in run.items():
            for name, tensor in stored["tensors"].items():
                assert torch.equal(tensor, again["tensors"][name]), f"{way}: {name}"
            assert again["calls"] == results[0][way]["calls"], f"{way}: the ranks' exchanges differ"
            if way != "stored":  # as many again in backward as in forward, and nothing left out or done twice
                assert len(again["calls"]) == len(stored["calls"]) + stored["forward"]
    given = CASES[case][0]
    assert [run["stored"]["rows"] for run in results] == [n * (2 if kind == "top2-swiglu" else 1) for n in given]


def twice_before_backward(section, way):
    """Two calls before one backward, an unrelated no_grad call between them; and each call alone."""
    block = make_block(section, "top2-swiglu")
    call = WAYS[way]

    def run(seeds):
        for p in block.parameters():
            p.grad = None
        torch.manual_seed(5)  # no random numbers in this gate
        xs = [torch.randn(40 + s, HIDDEN, generator=torch.Generator().manual_seed(10 * s + dist.get_rank())).to(
            torch.bfloat16).requires_grad_() for s in seeds]
        ys = []
        for x in xs:
            ys.append(call(block, x)[0])
            with torch.no_grad():
                block(x.roll(1, dims=0))
        sum(y.float().square().sum() for y in ys).backward()
        return [x.grad for x in xs], {name: p.grad for name, p in block.named_parameters()}

    both, first, second = run([1, 2]), run([1]), run([2])
    assert all(map(torch.equal, both[0], first[0] + second[0]))
    return [name for name, grad in both[1].items() if not torch.equal(grad, first[1][name] + second[1][name])]


@pytest.mark.parametrize("way", ["stored", "reentrant", "non-reentrant"])
def test_two_calls_before_one_backward(ranks2, way):
    assert ranks2.run(twice_before_backward, DEFAULT, way) == [[], []]


def kept_bytes(function, *args):
    """Bytes of the tensors, parameters apart, that autograd keeps for the backward of `function(*args)`."""
    kept = {}

    def pack(tensor):
        if not isinstance(tensor, torch.nn.Parameter):
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = function(*args)
    del output
    return sum(kept.values())


def keep(kind):
    sizes = {}
    for name, section in (("bf16", BF16), ("mxfp8", DEFAULT), ("mxfp8-bf16-preactivation",
                                                               {**DEFAULT, "preactivation_dtype": "bf16"})):
        reset_deepspeed_groups()
        layer = make_block(section, kind).moe.deepspeed_moe
        x = torch.randn(4096, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
        sizes[name] = kept_bytes(layer, x, None) - kept_bytes(layer.gate, x, None, True, False)
        with torch.no_grad():
            assert kept_bytes(layer, x, None) == 0
    return sizes


@pytest.mark.parametrize("kind", ["top1-gelu", "top2-swiglu"])
def test_bytes_kept_for_backward(ranks2, kind):
    """33 bytes of MXFP8 for 64 of bf16, and per row a few bytes of routing that both keep."""
    for sizes in ranks2.run(keep, kind):
        assert sizes["mxfp8"] < 0.6 * sizes["bf16"]
        assert sizes["mxfp8"] < sizes["mxfp8-bf16-preactivation"] < 0.9 * sizes["bf16"]


def test_peers_are_not_told_that_a_recomputation_has_all_it_needs(monkeypatch):
    """Checkpointing ends it early by an exception."""
    told, ended = [], []
    monkeypatch.setattr(deadline, "_ask", told.append)
    monkeypatch.setattr(deadline.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(deadline.dist, "get_world_size", lambda: 2)

    @deadline.tell_peers_on_error
    def forward(x):
        try:
            return x.sin().exp()
        except Exception as error:
            ended.append(error)
            raise

    checkpoint(forward, torch.ones(3, requires_grad=True), use_reentrant=False).sum().backward()
    assert ended and not told
    with pytest.raises(CheckpointError):
        deadline.tell_peers_on_error(lambda: checkpointed_otherwise(torch.ones(3, requires_grad=True)))()
    assert len(told) == 1


def checkpointed_otherwise(x):
    """Recomputes a tensor of another shape."""
    sizes = iter((3, 2))
    checkpoint(lambda x: x[:next(sizes)].exp(), x, use_reentrant=False).sum().backward()
