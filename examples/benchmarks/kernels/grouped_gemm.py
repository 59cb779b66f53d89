# SPDX-License-Identifier: Apache-2.0
"""Grouped GEMMs of one rank's experts on one GPU: forward, input gradient, weight gradient.

MXFP8 and our bf16 beside torch._grouped_mm, a loop of cuBLAS calls over the experts, and (forward)
torch._scaled_grouped_mm with one FP8 scale a row. Weight gradients include what brings MXFP8 rows into the form that
they take. Where a group is no whole number of tiles, ours run on padded rows and torch's on the tokens alone.

    python examples/benchmarks/kernels/grouped_gemm.py [--cases short]     # run, store, show
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ds_mxfp8_moe.compute import casts
from ds_mxfp8_moe.compute import grouped_gemm as ours
from kernels import shapes
from kernels.shapes import Case, ends, padded, padded_rows, starts
from lib import results_file, run, show, timing
from lib.show import Measure, bar
from lib.timing import poisoned
from lib.world import BF16, device, on_gpu

OPERATIONS = ("forward", "dgrad", "wgrad")
TORCH, LOOP, ROWWISE = "torch._grouped_mm", "cuBLAS loop", "torch rowwise fp8"
OURS_BF16, FROM_MXFP8, MXFP8 = "ours, bf16", "ours, bf16 from MXFP8", "ours, MXFP8"
BF16_GEMMS = (TORCH, LOOP, OURS_BF16)
BLOCK, MODE = 128, "rceil"
# Against torch._grouped_mm in bf16. Two roundings to bf16 leave about 52 dB, two MXFP8 operands 24 to 28 dB.
LEAST_SQNR_DB, LEAST_SQNR_FP8_DB = 45, 20


class Contender(NamedTuple):
    """One way to compute an operation: out[rows of e] = a[rows of e] b[e]^T, or for wgrad out[e] = a^T b there.

    Attributes:
        starts: where the groups' rows begin in its operands.
    """

    name: str
    call: Callable[[], torch.Tensor]
    starts: tuple


def rowwise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 data and one float32 scale a row."""
    scale = x.abs().amax(-1).float() / 448
    return (x / scale.unsqueeze(-1).to(x.dtype)).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def compared(operation: str, case: Case, way: Contender, out: torch.Tensor) -> torch.Tensor:
    """Some rows of a result; of weight gradients those of the smallest and of the last group that has rows."""
    counts = case.counts()
    if operation == "wgrad":
        groups = shapes.filled(counts)
        return torch.stack([out[groups[-1]], out[max(groups)]]).float()
    return out[shapes.some_rows(counts, way.starts)].float()


def stray(operation: str, case: Case, way: Contender, out: torch.Tensor) -> bool:
    """Whether something stands where zeros belong: in padding rows, in the gradient of an expert without rows."""
    counts = case.counts()
    if operation == "wgrad":
        parts = [out[e] for e, count in enumerate(counts) if count == 0]
    else:
        parts = [out[start + count:start + whole] for start, count, whole in
                 zip(way.starts, counts, padded(counts), strict=True) if whole > count]
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
        if on_gpu():  # torch has it nowhere else
            self.x_rowwise, self.w_rowwise = rowwise(self.x_PK), rowwise(self.w_ENK)


def contenders(shape: Shape, case: Case) -> dict[str, list[Contender]]:
    """For each operation; torch's first."""
    counts, E = case.counts(), case.experts
    total, sizes = sum(counts), padded(counts)
    tokens_E, rows_E = (torch.tensor(ends(c), dtype=torch.int32, device=device()) for c in (counts, sizes))
    spans = list(zip(range(E), starts(counts), ends(counts), strict=True))
    tokens, rows = starts(counts), starts(sizes)
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
        Contender(TORCH, lambda: torch._grouped_mm(x, w_t, offs=tokens_E), tokens),
        Contender(LOOP, loop(y, lambda e, s, t: torch.mm(x[s:t], w_t[e], out=y[s:t])), tokens),
        Contender(OURS_BF16, lambda: ours.grouped_mm(padded_x, w, rows_E), rows),
        Contender(MXFP8, lambda: ours.grouped_mm(mx_x, mx_w, rows_E), rows)]
    if on_gpu():
        (x_data, x_scale), (w_data, w_scale) = shape.x_rowwise, shape.w_rowwise
        forward.append(Contender(ROWWISE, lambda: torch._scaled_grouped_mm(
            x_data[:total], w_data[:E].transpose(1, 2), x_scale[:total], w_scale[:E], offs=tokens_E, out_dtype=BF16,
            use_fast_accum=True), tokens))
    return {
        "forward": forward,
        "dgrad": [
            Contender(TORCH, lambda: torch._grouped_mm(g, w, offs=tokens_E), tokens),
            Contender(LOOP, loop(dx, lambda e, s, t: torch.mm(g[s:t], w[e], out=dx[s:t])), tokens),
            Contender(OURS_BF16, lambda: ours.grouped_mm(padded_g, w_t, rows_E), rows),
            Contender(MXFP8, lambda: ours.grouped_mm(mx_g, mx_w_t, rows_E), rows)],
        "wgrad": [
            Contender(TORCH, lambda: torch._grouped_mm(g.t(), x, offs=tokens_E), tokens),
            Contender(LOOP, loop(dw, lambda e, s, t: torch.mm(g[s:t].t(), x[s:t], out=dw[e])), tokens),
            Contender(OURS_BF16, lambda: ours.grouped_mm_wgrad(padded_g, padded_x, rows_E), rows),
            Contender(FROM_MXFP8, lambda: ours.grouped_mm_wgrad_rows(mx_g, mx_x, rows_E, BF16), rows),
            Contender(MXFP8, lambda: ours.grouped_mm_wgrad_rows(mx_g, mx_x, rows_E, BF16, MODE), rows)],
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


def check(operation: str, case: Case, torchs: Contender, way: Contender) -> dict:
    """Runs it once, on poisoned memory, and compares with torch's way."""
    expected = compared(operation, case, torchs, torchs.call())
    with poisoned():
        out = way.call()
    least = LEAST_SQNR_DB if way.name in BF16_GEMMS else LEAST_SQNR_FP8_DB
    found = timing.close({"out": expected}, {"out": compared(operation, case, way, out)}, least)
    found["correct"] &= not (way.name.startswith("ours") and stray(operation, case, way, out))
    return found


def measure(shape: Shape, case: Case, budget_s: float) -> list[dict]:
    """The rows of one case."""
    rows = []
    for operation, ways in contenders(shape, case).items():
        timed = {way.name: timing.Contender({operation: way.call}, partial(check, operation, case, ways[0], way))
                 for way in ways}
        rows += timing.rows({**asdict(case), **least_work(operation, case)}, timed, budget_s)
    return rows


def measured_rows(args: argparse.Namespace) -> Iterator[list[dict]]:
    torch.manual_seed(0)
    yield timing.rate_rows(args.cases == "tiny")
    for shape, case in shapes.with_buffers(shapes.cases(args.cases, bytes_needed), Shape, args.seconds):
        yield measure(shape, case, args.budget)
        del shape


# ---- how results are shown ------------------------------------------------------------------------------------------


FASTEST, ROOFLINE = "fastest bf16", "roofline"
CONTENDERS = (TORCH, LOOP, ROWWISE, OURS_BF16, FROM_MXFP8, MXFP8, ROOFLINE)


def prepare(result: dict) -> list[dict]:
    """Every row with TFLOP/s; and for each GEMM the fastest in bf16, and the roofline: its FLOPs at the rate of
    cuBLAS' FP8 product, or its bytes at the rate of a device copy. No version is faster. Without these rates there is
    none."""
    timed = {row["case"]["operation"]: row for row in result["rows"] if "median_ms" in row}
    copy, product = timed.get("device copy"), timed.get("fp8 product")
    rows = []
    for group in results_file.groups(result, *OPERATIONS):
        case, found = group.case, dict(group.rows)
        bf16 = [found[name] for name in BF16_GEMMS if name in found]
        if bf16:
            found[FASTEST] = {**min(bf16, key=lambda row: row["median_ms"]), "contender": FASTEST}
        if copy and product:
            bound_ms = max(case["least_bytes"] * copy["median_ms"] / copy["case"]["bytes"],
                           case["flops"] * product["median_ms"] / product["case"]["flops"])
            found[ROOFLINE] = {"case": case, "contender": ROOFLINE, "median_ms": bound_ms, "correct": True}
        rows += [{**row, "tflops": case["flops"] / row["median_ms"] / 1e9} for row in found.values()]
    return rows + [row for row in result["rows"] if not row["correct"]]


def is_large(*operations: str) -> Callable[[dict], bool]:
    return lambda case: (case["operation"] in operations and case["tokens_per_expert"] == 16384
                         and (case["dim"], case["hidden"]) in shapes.SEED_SHAPES)


MEASURES = [
    Measure("forward and dgrad of large layers: MXFP8 over torch._grouped_mm", (MXFP8, ), TORCH,
            when=is_large("forward", "dgrad"), bars=(bar(1.55), )),
    Measure("forward and dgrad of large layers: MXFP8 over the fastest bf16", (MXFP8, ), FASTEST,
            when=is_large("forward", "dgrad"), bars=(bar(1.3), )),
    Measure("wgrad of large layers: bf16 from MXFP8 over torch._grouped_mm", (FROM_MXFP8, ), TORCH,
            when=is_large("wgrad"), bars=(bar(0.87), )),
    Measure("wgrad of large layers: MXFP8 over bf16 from MXFP8", (MXFP8, ), FROM_MXFP8, when=is_large("wgrad"),
            bars=(bar(1.25), )),
    Measure("all GEMMs: MXFP8 over the fastest bf16", (MXFP8, ), FASTEST)]


def plot(result: dict, pyplot) -> None:
    panels: dict = {}
    for group in results_file.groups(result):
        case = group.case
        if shapes.plotted(case):
            row = {name: group.figure(name, "tflops") for name in CONTENDERS if group.figure(name, "tflops")}
            name = f"{case['dim']} x {case['hidden']}, {case['tokens_per_expert']} an expert"
            panels.setdefault(case["operation"], {})[name] = row
    show.dots(pyplot, panels, "TFLOP/s", ROOFLINE)


SHOWN = show.Shown("grouped_gemm", MEASURES, [("TFLOP/s", "tflops", "{:.0f}")], plot, contenders=CONTENDERS,
                   ratios=((TORCH, MXFP8), (FASTEST, MXFP8)), prepare=prepare)


# ---- command line ---------------------------------------------------------------------------------------------------


def main() -> None:
    run.main(SHOWN, run.timed_parser(__doc__, budget=0.1), measured_rows)


if __name__ == "__main__":
    main()
