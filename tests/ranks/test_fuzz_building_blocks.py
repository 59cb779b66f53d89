# SPDX-License-Identifier: Apache-2.0
"""Random arguments for the building blocks: a clear error that names an argument, or the right result.

Each call begins with arguments that fit together, of which up to two are then replaced. An error has to be a TypeError
or ValueError that the package raises itself. A result has to be the one of a loop over rows in plain torch. Between
ranks, an argument that differs has to be a PeerError on both, after which the group goes on.
"""

import random
import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import ds_mxfp8_moe
from ds_mxfp8_moe.all_to_all import AllToAll
from ds_mxfp8_moe.compute.mx import MXTensor, quantize, quantize_tiles, sqnr_db
from ds_mxfp8_moe.ep import (
    a2a_combine_hp_fwd_mxfp8_bwd,
    a2a_dispatch_mxfp8_fwd_hp_bwd,
    generate_permute_indices,
    permute_mxfp8_fwd_hp_bwd,
    unpermute_hp_fwd_mxfp8_bwd,
)
from ds_mxfp8_moe.parallel_style import MXFP8ExpertParallel
from ds_mxfp8_moe.scaled_grouped_mm import _to_mxfp8_then_scaled_grouped_mm
from ds_mxfp8_moe.transport.deadline import PeerError

PACKAGE = str(Path(ds_mxfp8_moe.__file__).parent)
DTYPES = torch.bfloat16, torch.float16, torch.float32


class Call(NamedTuple):
    """A call whose arguments fit together.

    Attributes:
        arguments: by name.
        is_right: whether a result is right for these arguments, or for others that replaced some of them.
    """

    function: Callable
    arguments: dict
    is_right: Callable[..., bool]


# ---- plain results ----------------------------------------------------------------------------------------------


def plain(x: torch.Tensor) -> torch.Tensor:
    return x.dequantize(torch.float32) if isinstance(x, MXTensor) else x.detach().float()


def close(expected: torch.Tensor, found: torch.Tensor, least_db: float = 24) -> bool:
    return expected.shape == found.shape and (expected.numel() == 0 or sqnr_db(expected, plain(found)) >= least_db)


def values_of(qdata, scale, block_size=32, orig_dtype=torch.bfloat16, tiled=False) -> torch.Tensor:
    power = torch.exp2(scale.view(torch.uint8).double() - 127)
    rows, columns = qdata.shape[-2] if qdata.dim() > 1 else 0, qdata.shape[-1]
    if tiled:
        power = power.repeat_interleave(128, dim=-2)[..., :rows, :]
    return (qdata.double() * power.repeat_interleave(block_size, dim=-1)[..., :columns]).float()


def order_of(counts: list, experts: int, ranks: int, alignment: int, size: int) -> tuple[list, list]:
    """The arrived row at each place of the layout, -1 for padding; and the padded sizes."""
    firsts = [sum(counts[:i]) for i in range(len(counts))]
    order, sizes = [], []
    for expert in range(experts):
        group = [first + i for first, count in list(zip(firsts, counts, strict=True))[expert::experts]
                 for i in range(count)]
        padded = max(-(-len(group) // alignment), 1) * alignment
        order += group + [-1] * (padded - len(group))
        sizes.append(padded)
    return order + [-1] * (size - len(order)), sizes


def taken(rows: torch.Tensor, order: list) -> torch.Tensor:
    return torch.stack([rows[i] if i >= 0 else torch.zeros_like(rows[0]) for i in order]) if len(rows) else (
        rows.new_zeros(len(order), rows.shape[1]))


def permuted(result, mx_tensor, num_tokens_per_expert, ep_degree, num_local_experts, group_size_multiple_of,
             use_mxfp8) -> bool:
    shape, rows, indices, sizes, ends = result
    order, expected = order_of(num_tokens_per_expert.tolist(), num_local_experts, ep_degree, group_size_multiple_of,
                               len(rows))
    return (isinstance(rows, MXTensor) == bool(use_mxfp8) and indices.tolist() == order and sizes.tolist() == expected
            and ends.tolist() == [sum(expected[:i + 1]) for i in range(len(expected))]
            and tuple(shape) == (mx_tensor.shape[0] + 1, mx_tensor.shape[1])
            and torch.equal(plain(rows), taken(plain(mx_tensor), order)))


def unpermuted(result, input, permuted_indices, padded_shape) -> bool:
    expected = input.new_zeros(padded_shape[0] - 1, input.shape[1])
    for row, index in zip(input, permuted_indices.tolist(), strict=True):
        if index >= 0:
            expected[index] = row
    return torch.equal(result, expected)


def multiplied(result, A, B_t, offs, bias, out_dtype, kernel_preference, wgrad_with_hp, scale_calculation_mode,
               block_size) -> bool:
    expected, start = torch.zeros(A.shape[0], B_t.shape[2]), 0
    for expert, end in enumerate(offs.tolist()):
        expected[start:end] = plain(A)[start:end] @ B_t[expert].float()
        if bias is not None:
            expected[start:end] += (bias if bias.dim() == 1 else bias[expert]).float()
        start = end
    return result.dtype == out_dtype and close(expected, result)


# ---- arguments --------------------------------------------------------------------------------------------------


def tensors(g: random.Random) -> list:
    """Tensors of which few fit anywhere."""
    rows = torch.randn(4, 64)
    return [torch.tensor(1.0), torch.zeros(0), rows.double(), rows.int(), rows > 0, rows.to(torch.complex64),
            rows.to_sparse(), rows.to("meta"), rows.half(), rows.bfloat16(), rows[0], rows[None], rows[:, :48],
            rows[:0], rows.t(), rows[:1].expand(4, 64), torch.full((4, 64), float("nan")), quantize(rows),
            quantize(rows, 128), quantize_tiles(torch.randn(128, 64)), quantize(rows).qdata, quantize(rows).scale,
            torch.arange(4), torch.arange(4, dtype=torch.int32), torch.tensor([1, -1, 2, 0]),
            torch.tensor([2**62] * 4), torch.zeros(4, dtype=torch.uint8), torch.randint(-3, 9, (6, ))]


def others(g: random.Random) -> list:
    return [None, "x", 1.5, 32.0, True, -1, 0, 1, 2, 3, 7, 128, [], [1.0, 3.0], [2, 2], (1, 3), [4], [-1, 5],
            [2, None], {}, object(), torch.float64, torch.float32, torch.bfloat16, "rceil", "floor", "emulated",
            torch.Size((5, 64)), torch.Size(()), float("nan")]


def nearby(g: random.Random, value: Any) -> Any:
    """A value of the same kind, which often does not fit."""
    if isinstance(value, MXTensor):
        return g.choice([value[1:], value[:0], value.to(torch.float32), value.dequantize(), value[:1]])
    if isinstance(value, torch.Tensor):
        if value.dtype.is_floating_point and value.dtype.itemsize > 1:
            return g.choice([value[1:], value[:0], value[..., :32], value.to(g.choice(DTYPES)), value.double(),
                             value.clone().requires_grad_(), torch.cat([value, value])])
        if value.dtype.is_floating_point or value.numel() == 0:
            return value[1:]
        other = value.clone()
        other.view(-1)[g.randrange(value.numel())] += g.choice([-1, 1, 3])
        return g.choice([other, value[1:], value.long(), value.int(), value.float(), value.to("meta")])
    if isinstance(value, list):
        other = list(value)
        other[g.randrange(len(other))] += g.choice([-1, 1])
        return g.choice([other, other + [0], tuple(value), [float(n) for n in value], torch.tensor(value)])
    return g.choice(others(g))


def changed(g: random.Random, call: Call) -> tuple[dict, list]:
    """Arguments of which none, one or two are replaced, and the names of those."""
    names = g.sample(sorted(call.arguments), min(g.choice([0, 1, 1, 1, 2]), len(call.arguments)))
    arguments = dict(call.arguments)
    for name in names:
        value = arguments[name]
        if isinstance(value, bool) and call.function is not MXTensor:
            arguments[name] = g.choice([None, 0, 1, False, True])
            continue
        pool = tensors(g) + others(g) if g.random() < 0.3 else tensors(g) if isinstance(value, torch.Tensor) else (
            others(g))
        arguments[name] = nearby(g, value) if g.random() < 0.5 else g.choice(pool)
    return arguments, names


def rows(g: random.Random, count: int, columns: int = 64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(g.randrange(10**6))
    return torch.randn(count, columns, generator=generator).to(g.choice(DTYPES))


def calls(g: random.Random) -> list[Call]:
    """One call of each function, with random arguments that fit."""
    ranks, experts, alignment = g.choice([1, 2, 3]), g.choice([1, 2, 4]), g.choice([1, 4, 32])
    counts = [g.choice([0, 1, 2, 5]) for _ in range(ranks * experts)]
    num_rows, block = sum(counts) + g.choice([0, 0, 3]), g.choice([32, 128])
    counts_RE = torch.tensor(counts, dtype=g.choice([torch.int32, torch.int64, torch.uint8]))
    plain_rows = rows(g, num_rows)
    _, indices, *_ = permute_mxfp8_fwd_hp_bwd(plain_rows, counts_RE, ranks, experts, alignment, False)[1:]
    size = len(indices)
    mx = quantize(rows(g, 6, g.choice([32, 64, 160])), block)
    tiles = quantize_tiles(rows(g, 160, 96))
    parts = g.choice([(mx, {}), (tiles, {"tiled": True})])[0]
    ends = sorted(g.randrange(13) for _ in range(3))
    return [
        Call(quantize, {"x": rows(g, 5), "block_size": block, "scaling_mode": g.choice(["rceil", "floor"])},
             lambda result, x, **_: close(plain(x), result) or bool(plain(x).isnan().any())),
        Call(MXTensor, {"qdata": parts.qdata, "scale": parts.scale, "block_size": parts.block_size,
                        "orig_dtype": parts.orig_dtype, "tiled": parts.tiled},
             lambda result, **parts: torch.equal(result.dequantize(torch.float32), values_of(**parts))),
        Call(permute_mxfp8_fwd_hp_bwd,
             {"mx_tensor": quantize(plain_rows), "num_tokens_per_expert": counts_RE, "ep_degree": ranks,
              "num_local_experts": experts, "group_size_multiple_of": alignment, "use_mxfp8": True}, permuted),
        Call(generate_permute_indices,
             {"tokens_per_expert_group": counts_RE, "experts_per_rank": experts, "num_ranks": ranks, "max_len": size,
              "alignment": alignment},
             lambda result, tokens_per_expert_group, experts_per_rank, num_ranks, max_len, alignment:
             result[0].tolist() == order_of(tokens_per_expert_group.tolist(), experts_per_rank, num_ranks, alignment,
                                            max_len)[0]),
        Call(unpermute_hp_fwd_mxfp8_bwd, {"input": rows(g, size), "permuted_indices": indices,
                                          "padded_shape": torch.Size((num_rows + 1, 64))}, unpermuted),
        Call(_to_mxfp8_then_scaled_grouped_mm,
             {"A": g.choice([rows(g, 12), quantize(rows(g, 12))]), "B_t": rows(g, 3 * 64, 96).view(3, 64, 96),
              "offs": torch.tensor(ends, dtype=torch.int32),
              "bias": g.choice([None, rows(g, 3, 96), rows(g, 1, 96)[0]]),
              "out_dtype": g.choice(DTYPES), "kernel_preference": "auto", "wgrad_with_hp": g.random() < 0.5,
              "scale_calculation_mode": "rceil", "block_size": None}, multiplied),
        Call(MXFP8ExpertParallel, {"group_size_multiple_of": alignment, "block_size": block, "scaling_mode": "floor",
                                   "mxfp8_bwd": True},
             lambda result, group_size_multiple_of, block_size, scaling_mode, mxfp8_bwd:
             type(group_size_multiple_of) is int and group_size_multiple_of > 0 and block_size in (32, 128)
             and scaling_mode in ("rceil", "floor")),
    ]


def problem(error: Exception, call: Call) -> str | None:
    """What is wrong with an error. None: it is clear, and of the package."""
    raised_in = traceback.extract_tb(error.__traceback__)[-1]
    if not isinstance(error, (TypeError, ValueError)) or not raised_in.filename.startswith(PACKAGE):
        return f"{type(error).__name__} in {raised_in.filename}:{raised_in.lineno}: {error}"
    return None if re.search(rf"\b({'|'.join(call.arguments)})\b", str(error)) else f"no argument is named: {error}"


def tried(call: Call, arguments: dict) -> str | None:
    """What is wrong with the outcome of a call. None: it is an error that names an argument, or the right result."""
    try:
        result = call.function(**arguments)
    except Exception as error:
        return problem(error, call)
    if any(isinstance(value, torch.Tensor) and value.is_meta for value in arguments.values()):
        return None  # shapes alone
    try:
        right = call.is_right(result, **arguments)
    except Exception as error:
        return f"accepted; plain torch says {type(error).__name__}: {error}"
    return None if right else "a wrong result"


def described(arguments: dict, names: list) -> str:
    def short(x):
        return f"{type(x).__name__} {x.dtype} {tuple(x.shape)}" if isinstance(x, torch.Tensor) else repr(x)

    return ", ".join(f"{name}={short(arguments[name])}" for name in names)


@pytest.mark.slow
def test_calls_in_one_process():
    g, failed = random.Random(61), []
    for _ in range(30):
        for call in calls(g):
            arguments, names = changed(g, call)
            if wrong := tried(call, arguments):
                failed.append(f"{call.function.__name__}({described(arguments, names)}): {wrong}")
    assert not failed, "\n".join(failed)


# ---- between ranks ----------------------------------------------------------------------------------------------

SPLITS = [None, "x", 1.5, torch.tensor([2, 2]), [1.0, 3.0], [2], [2, 2, 2], [-1, 5], {}, [None, 1]]
# For each argument, values that fit no call.
NEVER = {
    "input": [None, [1.0], torch.tensor(1.0), torch.zeros(4, 64).double(), torch.zeros(4, 64).int(),
              torch.zeros(4, 64).to_sparse(), torch.zeros(4, 64, device="meta"), quantize(torch.zeros(4, 64)),
              torch.zeros(1, 4, 64), torch.zeros(64), torch.zeros(9, 64), torch.zeros(4, 48)],
    "output_splits": SPLITS, "input_splits": SPLITS, "group_name": [5, "no such group", object(), -100, ["x"]],
    "block_size": [64, 32.0, None, "32", True], "scaling_mode": ["even", None, 1, ["rceil"]],
    "num_tokens_per_expert": [None, [2, 2], torch.zeros(4), torch.zeros(3, dtype=torch.int64), torch.tensor(4),
                              torch.tensor([-1, 2, 2, 1]), torch.zeros(4, dtype=torch.int64, device="meta")],
} | {name: [None, "4", 4.0, -1, 5.5, [4]] for name in (
    "max_num_tokens", "num_experts", "experts_per_token", "rank", "world_size", "dp_size", "hidden_dim",
    "hidden_dim_bytes", "hidden_dim_scale_bytes")}
# What rank 1 changes so that its call does not fit to the one of rank 0.
DIFFERENT = {
    "input": lambda call: call["input"].to({torch.float16: torch.bfloat16}.get(call["input"].dtype, torch.float16)),
    "columns": lambda call: torch.cat([call["input"], call["input"]], dim=1),
    "output_splits": lambda call: [call["output_splits"][0] + 1, call["output_splits"][1]],
    "block_size": lambda call: 160 - call["block_size"],
    "scaling_mode": lambda call: "floor" if call["scaling_mode"] == "rceil" else "rceil",
    "mxfp8_bwd": lambda call: not call["mxfp8_bwd"],
}


class Echo(torch.nn.Module):
    """Four experts that return their rows."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(4, 32))

    def forward(self, x, num_tokens_per_expert):
        return x.dequantize()


def call_between_ranks(g: random.Random, echo: torch.nn.Module) -> Call:
    """A call that both ranks make, with the arguments of this rank."""
    rank, dtype, columns = dist.get_rank(), g.choice(DTYPES), g.choice([32, 64, 160])
    sent = [[g.choice([0, 1, 3]) for _ in range(2)] for _ in range(2)]
    of_ranks = [rows(g, sum(sent[sender]), columns).to(dtype) for sender in range(2)]
    formats = {"block_size": g.choice([32, 128]), "scaling_mode": g.choice(["rceil", "floor"])}
    arrived = torch.cat([of_ranks[sender].split(sent[sender])[rank] for sender in range(2)])
    exchange = {"input": of_ranks[rank], "output_splits": [sent[sender][rank] for sender in range(2)],
                "input_splits": sent[rank], "group_name": g.choice([None, dist.group.WORLD.group_name]), **formats}
    counts = torch.tensor([n for split in sent[rank] for n in (split, 0)])
    sizes = {"max_num_tokens": 8, "num_experts": 4, "experts_per_token": 2, "rank": rank, "world_size": 2,
             "dp_size": 1, "hidden_dim": 64, "hidden_dim_bytes": 64, "hidden_dim_scale_bytes": 2}
    return g.choice([
        Call(a2a_dispatch_mxfp8_fwd_hp_bwd, exchange,
             lambda result, **_: torch.equal(plain(result), plain(quantize(arrived, **formats)))),
        Call(a2a_combine_hp_fwd_mxfp8_bwd, exchange | {"mxfp8_bwd": True},
             lambda result, **_: torch.equal(result, arrived)),
        Call(echo, {"input": of_ranks[rank], "num_tokens_per_expert": counts},
             lambda result, **_: torch.equal(plain(result), plain(quantize(of_ranks[rank])))),
        Call(AllToAll.intranode, sizes, lambda result, **_: False)])


def fuzz_between_ranks(seed: int, cases: int) -> list[str]:
    """Problems that this rank sees in calls of which all are made by both ranks."""
    g, odd, failed = random.Random(seed), dist.get_rank() == 1, []
    mesh = init_device_mesh("cpu", (2, ), mesh_dim_names=("ep", ))
    style = parallelize_module(Echo(), mesh, MXFP8ExpertParallel())

    def echo(input, num_tokens_per_expert):
        return style(input, num_tokens_per_expert)

    for _ in range(cases):
        call = call_between_ranks(g, echo)
        arguments, how = dict(call.arguments), g.choice(["fits", "never", "differs"])
        name = g.choice(sorted(set(arguments) & set(NEVER)))
        never, different = g.choice(NEVER[name]), g.choice(sorted(DIFFERENT))
        target = "input" if different == "columns" else different
        if how == "differs" and target in arguments:
            if odd:
                arguments[target] = DIFFERENT[different](arguments)
            with_peer = f"{call.function.__name__}, of which rank 1 changes {different}"
            try:
                call.function(**arguments)
                failed.append(f"{with_peer}: accepted")
            except PeerError:
                pass
            except Exception as error:
                failed.append(f"{with_peer}: {type(error).__name__}: {error}")
        elif how == "never":
            arguments[name] = never
            if wrong := tried(call, arguments):
                failed.append(f"{call.function.__name__}({described(arguments, [name])}): {wrong}")
        elif call.function is not AllToAll.intranode:  # which needs GPUs
            if wrong := tried(call, arguments):
                failed.append(f"{call.function.__name__}: {wrong}")
    return failed


@pytest.mark.slow
def test_calls_between_ranks(ranks2):
    failed = sum(ranks2.run(fuzz_between_ranks, 61, 120), [])
    assert not failed, "\n".join(failed)
