# SPDX-License-Identifier: Apache-2.0
"""The functions of ds_mxfp8_moe.ep in a row, compared with plain indexing."""

import torch
import torch.distributed as dist

from ds_mxfp8_moe.compute.mx import sqnr_db
from ds_mxfp8_moe.ep import (
    a2a_combine_hp_fwd_mxfp8_bwd,
    a2a_dispatch_mxfp8_fwd_hp_bwd,
    permute_mxfp8_fwd_hp_bwd,
    unpermute_hp_fwd_mxfp8_bwd,
)
from ds_mxfp8_moe.scaled_grouped_mm import _to_mxfp8_then_scaled_grouped_mm

D, N, LOCAL_EXPERTS = 256, 160, 3


def counts_table(world: int, kind: str) -> torch.Tensor:
    """int64 [world, world * LOCAL_EXPERTS]: rows that each rank sends to each global expert."""
    table = torch.randint(0, 40, (world, world * LOCAL_EXPERTS), generator=torch.Generator().manual_seed(7))
    if kind == "idle sender":
        table[0] = 0
    elif kind == "idle receiver":
        table[:, -LOCAL_EXPERTS:] = 0
    elif kind == "all to one":
        table[:, 1:] = 0
    elif kind == "nothing":
        table[:] = 0
    return table


def rows_of(rank: int, n: int, columns: int, dtype, salt: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(1000 * salt + rank)
    return torch.randn(n, columns, generator=g).to(dtype)


def weights(world: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(5)
    return (torch.randn(world * LOCAL_EXPERTS, N, D, generator=g) * 0.05).bfloat16()


def splits_of(table: torch.Tensor, rank: int) -> tuple:
    """output_splits, input_splits and the rank-major counts of what arrives, for one rank."""
    world = table.shape[0]
    arriving = table[:, rank * LOCAL_EXPERTS:(rank + 1) * LOCAL_EXPERTS]
    sent = table[rank].view(world, LOCAL_EXPERTS).sum(1)
    return arriving.sum(1).tolist(), sent.tolist(), arriving.reshape(-1)


def chain(kind, dtype, block_size, mode, wgrad_with_hp=True, alignment=32, mxfp8_bwd=True, backward=None,
          device="cpu"):
    """Dispatch, permute, one grouped GEMM, unpermute, combine on every rank; returns all that can be compared."""
    rank, world = dist.get_rank(), dist.get_world_size()
    table = counts_table(world, kind)
    output_splits, input_splits, arriving = splits_of(table, rank)
    x = rows_of(rank, sum(input_splits), D, dtype).to(device).requires_grad_()
    w = weights(world)[rank * LOCAL_EXPERTS:(rank + 1) * LOCAL_EXPERTS].clone().to(device).requires_grad_()
    cast = dict(scaling_mode=mode, block_size=block_size)
    dispatched = a2a_dispatch_mxfp8_fwd_hp_bwd(x, output_splits, input_splits, **cast)
    shape, rows, indices, sizes, ends = permute_mxfp8_fwd_hp_bwd(dispatched, arriving.to(device), world,
                                                                 LOCAL_EXPERTS, group_size_multiple_of=alignment)
    out = _to_mxfp8_then_scaled_grouped_mm(rows, w.transpose(-2, -1), offs=ends, wgrad_with_hp=wgrad_with_hp,
                                           scale_calculation_mode=mode)
    seen = []
    if out.requires_grad:
        out.register_hook(lambda g: seen.append(type(g).__name__))
    back = unpermute_hp_fwd_mxfp8_bwd(out, indices, shape)
    y = a2a_combine_hp_fwd_mxfp8_bwd(back, input_splits, output_splits, mxfp8_bwd=mxfp8_bwd, **cast)
    if backward == "sum":  # an expanded gradient, no two values in memory
        y.sum().backward()
    else:
        y.backward(rows_of(rank, y.shape[0], N, y.dtype, salt=1).to(device))
    tensors = dict(x=x.detach(), y=y.detach(), dx=x.grad, dw=w.grad, dispatched=dispatched.detach(),
                   rows=rows.detach(), indices=indices, sizes=sizes, ends=ends)
    return {name: t.cpu() for name, t in tensors.items()} | {"shape": tuple(shape), "grad_type": seen}


def reference(kind: str, world: int, results: list) -> tuple:
    """The chain as a float32 loop over experts, on the rows of all ranks; lists by rank of y, dx and dw."""
    table = counts_table(world, kind)
    w_all = weights(world).float().requires_grad_()
    xs = [r["x"].float().requires_grad_() for r in results]
    ys = [torch.cat([part @ w_all[e].t() for e, part in enumerate(x.split(table[r].tolist()))])
          for r, x in enumerate(xs)]
    torch.autograd.backward(ys, [rows_of(r, y.shape[0], N, torch.bfloat16, salt=1).float() for r, y in enumerate(ys)])
    return ys, [x.grad for x in xs], w_all.grad.split(LOCAL_EXPERTS)


KINDS = ("uneven", "idle sender", "idle receiver", "all to one", "nothing")


def check_chain(world, results, kind, bars):
    """Bars in dB over the concatenation of all ranks (a rank may have nothing to compare)."""
    for name, expected in zip(("y", "dx", "dw"), reference(kind, world, results), strict=True):
        actual = torch.cat([r[name].float() for r in results])
        assert sqnr_db(torch.cat(list(expected)), actual) >= bars[name], name
