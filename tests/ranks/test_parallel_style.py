# SPDX-License-Identifier: Apache-2.0
"""MXFP8ExpertParallel on gloo ranks, alone and under fully_shard, against a float32 loop over all experts."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from ds_mxfp8_moe.compute.mx import MXTensor, sqnr_db
from ds_mxfp8_moe.parallel_style import MXFP8ExpertParallel
from ds_mxfp8_moe.scaled_grouped_mm import _to_mxfp8_then_scaled_grouped_mm as mxfp8_mm
from ds_mxfp8_moe.transport.deadline import PeerError, absence

EXPERTS, D, HIDDEN = 8, 128, 96
BARS = {"y": 23, "dx": 22.5, "w1": 22.5, "w2": 22.5, "w3": 22.5}  # SwiGLU: three products, each two casts


class GroupedExperts(nn.Module):
    """SwiGLU experts with 3-D weights; rows sorted by expert."""

    def __init__(self):
        super().__init__()
        g = torch.Generator().manual_seed(3)
        for name, shape in (("w1", (HIDDEN, D)), ("w2", (D, HIDDEN)), ("w3", (HIDDEN, D))):
            weight = torch.randn(EXPERTS, *shape, generator=g) * shape[1]**-0.5
            self.register_parameter(name, nn.Parameter(weight.bfloat16()))

    def forward(self, x, num_tokens_per_expert):
        assert isinstance(x, MXTensor)
        w1, w2, w3 = (w.to_local() if isinstance(w, DTensor) else w for w in (self.w1, self.w2, self.w3))
        offs = num_tokens_per_expert.cumsum(0, dtype=torch.int32)
        gate = F.silu(mxfp8_mm(x, w1.transpose(-2, -1), offs=offs, wgrad_with_hp=True))
        h = gate * mxfp8_mm(x, w3.transpose(-2, -1), offs=offs, wgrad_with_hp=True)
        return mxfp8_mm(h, w2.transpose(-2, -1), offs=offs, wgrad_with_hp=True, block_size=x.block_size).type_as(x)


class Block(nn.Module):

    def __init__(self):
        super().__init__()
        self.experts = GroupedExperts()

    def forward(self, x, num_tokens_per_expert):
        return self.experts(x, num_tokens_per_expert)


def batch(rank: int, call: int = 0) -> tuple:
    """x, counts and the output's gradient of one rank's call; rank 1 of the second call has no rows."""
    g = torch.Generator().manual_seed(100 * call + rank)
    counts = torch.randint(0, 30, (EXPERTS, ), generator=g)
    if call == 1 and rank == 1:
        counts[:] = 0
    rows = int(counts.sum())
    return torch.randn(rows, D, generator=g).bfloat16(), counts, torch.randn(rows, D, generator=g).bfloat16()


def reference(ranks: int, calls=(0, )) -> tuple:
    """{call: ([y by rank], [dx by rank])} and the weight gradients summed over calls and ranks, in float32."""
    experts = GroupedExperts().float()
    out = {}
    for call in calls:
        ys, dxs = [], []
        for rank in range(ranks):
            x, counts, grad = batch(rank, call)
            x = x.float().requires_grad_()
            parts = []
            for e, part in enumerate(x.split(counts.tolist())):
                h = F.silu(part @ experts.w1[e].t()) * (part @ experts.w3[e].t())
                parts.append(h @ experts.w2[e].t())
            y = torch.cat(parts)
            y.backward(grad.float())
            ys.append(y.detach())
            dxs.append(x.grad)
        out[call] = (ys, dxs)
    return out, {name: p.grad for name, p in experts.named_parameters()}


def full(tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def grads(experts) -> dict:
    return {name: full(p.grad) for name, p in experts.named_parameters()}


def train_step(experts, calls=(0, ), how=None) -> tuple:
    """Runs all calls forward, then backward in reverse; returns {call: (y, dx)} and the full weight gradients."""
    done = {}
    for call in calls:
        x, counts, grad = batch(dist.get_rank(), call)
        x.requires_grad_()
        done[call] = (x, how(experts, x, counts) if how else experts(x, counts), grad)
    for _, y, grad in reversed(done.values()):
        y.backward(grad)
    return {call: (y.detach(), x.grad) for call, (x, y, _) in done.items()}, grads(experts)


def expert_parallel(**kwargs):
    mesh = init_device_mesh("cpu", (dist.get_world_size(), ), mesh_dim_names=("ep", ))
    return parallelize_module(GroupedExperts(), mesh, MXFP8ExpertParallel(**kwargs))


def assert_near_the_loop(results, ranks, calls=(0, ), scale=1.0, less=0.0):
    expected, dw = reference(ranks, calls)
    for call in calls:
        for i, name in enumerate(("y", "dx")):
            actual = torch.cat([outs[call][i].float() for outs, _ in results])
            assert sqnr_db(torch.cat(expected[call][i]), actual) >= BARS[name] - less, (call, name)
    for _, actual in results:
        for name, gradient in dw.items():
            assert sqnr_db(gradient * scale, actual[name]) >= BARS[name] - less, name


def plain_step(calls=(0, ), **kwargs):
    return train_step(expert_parallel(**kwargs), calls)


@pytest.mark.parametrize("ranks, kwargs", (
    ("ranks2", {}), ("ranks2", dict(group_size_multiple_of=128, block_size=128)), ("ranks2", dict(mxfp8_bwd=False)),
    ("ranks2", dict(scaling_mode="floor")), ("ranks4", {})), ids=str)
def test_output_and_gradients(request, ranks, kwargs):
    pool = request.getfixturevalue(ranks)
    assert_near_the_loop(pool.run(plain_step, **kwargs), pool.world_size, less=1.5 if "scaling_mode" in kwargs else 0)


def test_called_twice_before_backward(ranks2):
    """Microbatches in flight; in the second call one rank has no rows."""
    assert_near_the_loop(ranks2.run(plain_step, (0, 1)), 2, calls=(0, 1))


def variants():
    """The same step through checkpointing (both kinds), torch.compile and deepcopy: all bits equal."""
    expected = train_step(expert_parallel())
    failed = []

    def same(name, actual):
        for a, b in zip((*expected[0][0], *expected[1].values()), (*actual[0][0], *actual[1].values()), strict=True):
            if not torch.equal(a, b):
                failed.append(name)

    for reentrant in (True, False):
        same(f"reentrant={reentrant}", train_step(
            expert_parallel(), how=lambda m, x, n, r=reentrant: checkpoint(m, x, n, use_reentrant=r)))
    compiled = expert_parallel()
    same("compile", train_step(compiled, how=torch.compile(lambda m, x, n: m(x, n), backend="aot_eager")))
    torch._dynamo.reset()
    original = expert_parallel()
    copied = copy.deepcopy(original)
    same("deepcopy", train_step(copied))
    if original.w1.grad is not None or type(copied) is not type(original):
        failed.append("deepcopy shares state")
    return failed


@pytest.mark.slow
def test_recomputation_compile_and_deepcopy_give_the_same_bits(ranks2):
    assert ranks2.run(variants) == [[], []]


def sharded(calls):
    """dp x ep: the experts' parameters sharded over both; what reaches the optimizer is the mean over dp."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    model = Block()
    parallelize_module(model.experts, mesh["ep"], MXFP8ExpertParallel())
    fully_shard(model.experts, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    done, gradients = train_step(model, calls=calls)
    return done, {name.removeprefix("experts."): g for name, g in gradients.items()}


def test_fully_shard_on_a_dp_x_ep_mesh(ranks4):
    assert_near_the_loop(ranks4.run(sharded, (0, 1)), 4, calls=(0, 1), scale=0.5)


def state_dict_round_trip():
    experts = expert_parallel()
    state = {name: full(t) for name, t in experts.state_dict().items()}
    return [torch.equal(t, state[name]) for name, t in GroupedExperts().state_dict().items()], list(state)


def test_state_dict_keeps_its_keys(ranks2):
    assert ranks2.run(state_dict_round_trip) == [([True] * 3, ["w1", "w2", "w3"])] * 2


def disagreements() -> list:
    """Rank 1 gives rows of another width, then another dtype, then has another style: what this rank raises."""
    odd, texts = dist.get_rank() == 1, []
    counts = torch.tensor([4] + [0] * (EXPERTS - 1))
    for rows, style in (((4, D // 2), {}), ((4, D), {}), ((4, D), {"mxfp8_bwd": False})):
        experts = expert_parallel(**(style if odd else {}))
        x = torch.ones(rows if odd else (4, D), dtype=torch.bfloat16 if style or not odd else torch.float16)
        with pytest.raises(PeerError) as caught:
            experts(x, counts)
        texts.append(str(caught.value))
    return texts


def test_ranks_that_disagree_raise_on_every_rank(ranks2):
    for rank, texts in enumerate(ranks2.run(disagreements)):
        assert all(f"rank {rank} is in MXFP8ExpertParallel with rows [., " in text for text in texts), texts


def bad_use() -> list:
    """Rank 0 alone makes each mistake: nothing may wait for the other one. The ones that are not told."""
    mesh = init_device_mesh("cpu", (2, ), mesh_dim_names=("ep", ))
    both = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "ep"))
    style, counts = MXFP8ExpertParallel(), torch.tensor([4] + [0] * (EXPERTS - 1))
    experts = style._apply(GroupedExperts(), mesh)
    if dist.get_rank() == 1:
        return []
    odd = nn.ParameterDict({"w": torch.zeros(3, 32, 32)})
    calls = {
        "pass mesh['ep']": lambda: style._apply(GroupedExperts(), both),
        "a multiple of the 2 ranks; got w [3, 32, 32]": lambda: style._apply(odd, mesh),
        "distributed already": lambda: style._apply(experts, mesh),
        "integers [8]": lambda: experts(torch.zeros(4, D), torch.tensor([4, 0])),
        "sum to 4, but the input has 5 rows": lambda: experts(torch.zeros(5, D), counts),
        "multiple of 32": lambda: experts(torch.zeros(4, D - 8), counts),
        "block_size is 64": lambda: MXFP8ExpertParallel(block_size=64),
    }
    missed = []
    for text, call in calls.items():
        with pytest.raises((TypeError, ValueError)) as error:
            call()
        if text not in str(error.value):
            missed.append((text, str(error.value)))
    if "multiple of 32" not in absence(0):  # what peers would quote
        missed.append(absence(0))
    return missed


def test_bad_use_raises_before_the_collective(ranks2):
    assert ranks2.run(bad_use) == [[], []]
