# SPDX-License-Identifier: Apache-2.0
"""Grouped GEMMs of one rank's experts on one GPU: forward, input gradient, weight gradient.

MXFP8 and our bf16 beside torch._grouped_mm, a loop of cuBLAS calls over the experts, and (forward)
torch._scaled_grouped_mm with one FP8 scale a row. Weight gradients include what brings MXFP8 rows into the form that
they take. Where a group is no whole number of tiles, ours run on padded rows and torch's on the tokens alone.

    python examples/benchmarks/kernels/grouped_gemm.py [--cases short]     # run, store, show
    python examples/benchmarks/kernels/grouped_gemm.py --show FILE         # table and plot of a result file
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, groupby, product
from pathlib import Path
from typing import NamedTuple

import torch
from deepspeed.accelerator import get_accelerator
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ds_mxfp8_moe import casts
from ds_mxfp8_moe import grouped_gemm as ours
from ds_mxfp8_moe.mx import MXTensor
from lib import options, results_file, show, timing
from lib.shapes import TILE, Case, ends, padded, padded_rows, starts
from lib.timing import device, on_gpu, poisoned

BF16 = torch.bfloat16
BLOCK, MODE = 128, "rceil"
SAMPLED = 64  # rows and columns of a result that are compared
MOST_ERROR = 4e-3  # of the norm: results are rounded to bf16
MOST_ERROR_FAST = 2e-2  # with use_fast_accum, FP8 wgmma's short accumulator is never promoted


class Rowwise(NamedTuple):
    """FP8 data with one float32 scale a row."""

    data: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def of(x: torch.Tensor) -> "Rowwise":
        scale = x.abs().amax(-1).float() / 448
        return Rowwise((x / scale.unsqueeze(-1).to(x.dtype)).clamp(-448, 448).to(torch.float8_e4m3fn), scale)


class Contender(NamedTuple):
    """One way to compute an operation: out[rows of e] = a[rows of e] b[e]^T, or for wgrad out[e] = a^T b there.

    Attributes:
        a, b: the operands as the GEMM sees them: bf16, MXTensor or Rowwise; those of wgrad lie as rows.
        counts, starts: the groups' rows in them.
    """

    name: str
    call: Callable[[], torch.Tensor]
    a: torch.Tensor | Rowwise
    b: torch.Tensor | Rowwise
    counts: tuple
    starts: tuple


def values(x: torch.Tensor | Rowwise, rows: torch.Tensor | slice, columns: torch.Tensor) -> torch.Tensor:
    """float64 values of some rows and columns of what a GEMM takes."""
    if isinstance(x, MXTensor):
        data = _bytes(x.qdata)[rows][:, columns].view(torch.float8_e4m3fn).double()
        if x.tiled:
            rows = torch.div(rows, TILE, rounding_mode="floor")
        scale = x.scale_bytes[rows][:, torch.div(columns, x.block_size, rounding_mode="floor")]
        return data * torch.exp2(scale.double() - 127)
    if isinstance(x, Rowwise):
        return _bytes(x.data)[rows][:, columns].view(torch.float8_e4m3fn).double() * x.scale[rows].double()[:, None]
    return x[rows][:, columns].double()


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8)  # what indexes float8 is not there on every device


def _of_expert(x: torch.Tensor | Rowwise, e: int) -> torch.Tensor | Rowwise:
    return Rowwise(x.data[e], x.scale[e]) if isinstance(x, Rowwise) else x[e]


def spread(first: int, size: int, most: int = SAMPLED) -> torch.Tensor:
    """Indices from `first` on, the first and last of `size` among them."""
    return torch.linspace(first, first + size - 1, min(size, most), dtype=torch.float64).round().long().to(device())


def error_of_rows(contender: Contender, out: torch.Tensor) -> float:
    """|out - expected| / |expected| on some rows and columns of the first, largest and last group."""
    filled = [e for e, count in enumerate(contender.counts) if count]
    wrong = norm = 0.0
    for e in {filled[0], max(filled, key=contender.counts.__getitem__), filled[-1]}:
        rows = spread(contender.starts[e], contender.counts[e])
        columns, along = spread(0, out.shape[1]), torch.arange(_width(contender.a), device=out.device)
        expected = values(contender.a, rows, along) @ values(_of_expert(contender.b, e), columns, along).t()
        wrong += (out[rows][:, columns].double() - expected).square().sum().item()
        norm += expected.square().sum().item()
    return (wrong / norm)**0.5


def error_of_wgrad(contender: Contender, out: torch.Tensor) -> float:
    """The same for the weight gradient of the smallest group that has rows, and of the last."""
    filled = [e for e, count in enumerate(contender.counts) if count]
    wrong = norm = 0.0
    for e in {min(filled, key=contender.counts.__getitem__), filled[-1]}:
        rows = slice(contender.starts[e], contender.starts[e] + contender.counts[e])
        n, k = spread(0, out.shape[1], 16), spread(0, out.shape[2], 16)
        expected = values(contender.a, rows, n).t() @ values(contender.b, rows, k)
        wrong += (out[e][n][:, k].double() - expected).square().sum().item()
        norm += expected.square().sum().item()
    return (wrong / norm)**0.5


def _width(x: torch.Tensor | Rowwise) -> int:
    return (x.data if isinstance(x, Rowwise) else x).shape[-1]


def stray(operation: str, contender: Contender, out: torch.Tensor) -> bool:
    """Whether something stands where zeros belong: in padding rows, in the gradient of an expert without rows."""
    if operation == "wgrad":
        parts = [out[e] for e, count in enumerate(contender.counts) if count == 0]
    else:
        parts = [out[start + count:start + whole] for start, count, whole in
                 zip(contender.starts, contender.counts, padded(contender.counts), strict=True) if whole > count]
    return any(bool(part.count_nonzero()) for part in parts)


class Shape:
    """The operands of one shape, for the most rows and experts of its cases: each case takes a slice."""

    def __init__(self, cases: list[Case]):
        K, N = cases[0].dim, cases[0].hidden
        P, E = max(case.rows() for case in cases), max(case.experts for case in cases)
        self.x_PK = torch.randn(P, K, dtype=BF16, device=device())
        self.g_PN = torch.randn(P, N, dtype=BF16, device=device())
        self.w_ENK = torch.randn(E, N, K, dtype=BF16, device=device()) / K**0.5
        self.mx_ENK, self.mx_EKN = (casts.quantize_weights([self.w_ENK], BLOCK, MODE, transposed=transposed)
                                    for transposed in (False, True))
        self.has_rowwise = on_gpu()  # torch has it nowhere else
        if self.has_rowwise:
            self.x_rowwise, self.w_rowwise = Rowwise.of(self.x_PK), Rowwise.of(self.w_ENK)


def contenders(shape: Shape, case: Case) -> dict[str, list[Contender]]:
    """For each operation; torch's first."""
    counts, E = case.counts(), case.experts
    total, sizes = sum(counts), padded(counts)
    tokens_E, rows_E = (torch.tensor(ends(c), dtype=torch.int32, device=device()) for c in (counts, sizes))
    spans = list(zip(range(E), starts(counts), ends(counts), strict=True))
    tokens, rows = (counts, starts(counts)), (counts, starts(sizes))
    x, g, w = shape.x_PK[:total], shape.g_PN[:total], shape.w_ENK[:E]
    w_t = w.transpose(1, 2)
    mx_w, mx_w_t = shape.mx_ENK[:E], shape.mx_EKN[:E]
    padded_x, padded_g = padded_rows(x, counts), padded_rows(g, counts)
    mx_x, mx_g = (casts.quantize(rows_PN, BLOCK, MODE, scale_k_major=True) for rows_PN in (padded_x, padded_g))
    y, dx, dw = torch.empty_like(g), torch.empty_like(x), torch.zeros_like(w)

    def loop(out, product):
        def call():
            for e, start, end in spans:
                if start < end:
                    product(e, start, end)
            return out
        return call

    forward = [
        Contender("torch._grouped_mm", lambda: torch._grouped_mm(x, w_t, offs=tokens_E), x, w, *tokens),
        Contender("cuBLAS loop", loop(y, lambda e, s, t: torch.mm(x[s:t], w_t[e], out=y[s:t])), x, w, *tokens),
        Contender("ours, bf16", lambda: ours.grouped_mm(padded_x, w, rows_E, covered=True), padded_x, w, *rows),
        Contender("ours, MXFP8", lambda: ours.grouped_mm(mx_x, mx_w, rows_E), mx_x, mx_w, *rows)]
    if shape.has_rowwise:
        x8 = Rowwise(shape.x_rowwise.data[:total], shape.x_rowwise.scale[:total])
        w8 = Rowwise(shape.w_rowwise.data[:E], shape.w_rowwise.scale[:E])
        forward.insert(2, Contender(
            "torch rowwise fp8",
            lambda: torch._scaled_grouped_mm(x8.data, w8.data.transpose(1, 2), x8.scale, w8.scale, offs=tokens_E,
                                             out_dtype=BF16, use_fast_accum=True), x8, w8, *tokens))
    return {
        "forward": forward,
        "dgrad": [
            Contender("torch._grouped_mm", lambda: torch._grouped_mm(g, w, offs=tokens_E), g, w_t, *tokens),
            Contender("cuBLAS loop", loop(dx, lambda e, s, t: torch.mm(g[s:t], w[e], out=dx[s:t])), g, w_t, *tokens),
            Contender("ours, bf16", lambda: ours.grouped_mm(padded_g, w_t, rows_E, covered=True), padded_g, w_t,
                      *rows),
            Contender("ours, MXFP8", lambda: ours.grouped_mm(mx_g, mx_w_t, rows_E), mx_g, mx_w_t, *rows)],
        "wgrad": [
            Contender("torch._grouped_mm", lambda: torch._grouped_mm(g.t(), x, offs=tokens_E), g, x, *tokens),
            Contender("cuBLAS loop", loop(dw, lambda e, s, t: torch.mm(g[s:t].t(), x[s:t], out=dw[e])), g, x, *tokens),
            Contender("ours, bf16", lambda: ours.grouped_mm_wgrad(padded_g, padded_x, rows_E), padded_g, padded_x,
                      *rows),
            Contender("ours, bf16 from MXFP8",
                      lambda: ours.grouped_mm_wgrad_rows(mx_g, mx_x, rows_E, BF16), mx_g, mx_x, *rows),
            Contender("ours, MXFP8",
                      lambda: ours.grouped_mm_wgrad_rows(mx_g, mx_x, rows_E, BF16, MODE), mx_g, mx_x, *rows)],
    }


def least_work(operation: str, case: Case) -> dict:
    """FLOPs of the tokens, and the fewest bytes: MXFP8 operands read once, bf16 results written once."""
    K, N, counts = case.dim, case.hidden, case.counts()
    rows, filled = sum(counts), sum(count > 0 for count in counts)
    scales = 1 + 1 / BLOCK
    least_bytes = {"forward": rows * K * scales + filled * N * K + rows * N * 2,
                   "dgrad": rows * N * scales + filled * N * K + rows * K * 2,
                   "wgrad": rows * (N + K) * scales + case.experts * N * K * 2}[operation]
    return {"flops": 2 * rows * N * K, "least_bytes": int(least_bytes)}


def bytes_needed(case: Case) -> float:
    return 6 * case.rows() * (case.dim + case.hidden) + 12 * case.experts * case.dim * case.hidden


def check(operation: str, way: Contender) -> dict:
    """Runs it once, on poisoned memory."""
    with poisoned():
        out = way.call()
    error = (error_of_wgrad if operation == "wgrad" else error_of_rows)(way, out)
    most = MOST_ERROR_FAST if isinstance(way.a, Rowwise) else MOST_ERROR
    right = error < most and not (way.name.startswith("ours") and stray(operation, way, out))
    return {"correct": right, "error": error if error == error else None}


def measure(shape: Shape, case: Case, budget_s: float) -> list[dict]:
    """The rows of one case."""
    rows = []
    for operation, ways in contenders(shape, case).items():
        described = {"operation": operation, **case.as_dict(), **least_work(operation, case)}
        rows += timing.rows(described, {way.name: (way.call, partial(check, operation, way)) for way in ways},
                            budget_s)
    return rows


def run(cases: list[Case], budget_s: float) -> Iterator[dict]:
    """The rows of all cases; a shape's buffers are freed before the next one's are made."""
    with tqdm(total=len(cases), unit="case") as progress:
        for _, group in groupby(cases, key=lambda case: (case.dim, case.hidden)):
            same = list(group)
            shape = Shape(same)
            for case in same:
                progress.set_postfix_str(str(case))
                yield from measure(shape, case, budget_s)
                progress.update()
            del shape
            get_accelerator().empty_cache()


def warm_up(dims: tuple[int, int], experts: int) -> None:
    """Calls every kernel once; compiled ones differ with the shape, and between few and many experts."""
    case = Case(*dims, experts, TILE, "even")
    for ways in contenders(Shape([case]), case).values():
        for way in ways:
            way.call()


def main() -> None:
    parser = options.parser(__doc__)
    options.add_shapes(parser)
    args = results_file.parse(parser)
    if args.show:
        show.show(args.show)
        return
    torch.manual_seed(0)
    cases = options.chosen(args, bytes_needed)
    if args.warm_up is not None:
        for dims, experts in options.part(product({(case.dim, case.hidden): None for case in cases}, (4, 32)), args):
            warm_up(dims, experts)
        return
    options.compile_beforehand(args)
    options.finish("grouped_gemm", chain(options.rate_rows(args), run(cases, args.budget)), args)


if __name__ == "__main__":
    main()
