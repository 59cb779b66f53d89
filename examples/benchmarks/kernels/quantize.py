# SPDX-License-Identifier: Apache-2.0
"""Every kernel that casts, on one GPU: the bytes that it must move, over its time, beside a device copy's bandwidth.

    python examples/benchmarks/kernels/quantize.py              # run, store, show
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ds_mxfp8_moe.compute import casts, mx
from ds_mxfp8_moe.compute.activation import activate, activate_backward
from ds_mxfp8_moe.compute.mx import MXTensor
from lib import run, show, timing, world
from lib.show import Measure, bar
from lib.timing import Contender, poisoned
from lib.world import BF16, device

MODE = "rceil"
# All of 256 MiB and more.
ROWS = ((131072, 7168), (131072, 1408))
HIDDEN = ((131072, 2048), (131072, 1408))  # P, F
WEIGHTS = ((16, 2048, 7168), (64, 1408, 2048))  # experts, N, K
TINY = ((512, 256), ), ((512, 128), ), ((4, 256, 128), )  # the same for a CPU
CHECKED = 256  # rows at either end that are compared with mx.py; whole blocks along the rows
LEAST_EQUAL = 0.999  # bytes of what is cast after exp, whose last bits differ


class Kernel(NamedTuple):
    """One cast of one operand.

    Attributes:
        moved: what it must read and write, as tensors.
        correct: takes the call's result.
    """

    case: dict
    call: Callable
    moved: Callable[[tuple | torch.Tensor], list]
    correct: Callable[[tuple | torch.Tensor], bool]


def tensors(*values) -> list[torch.Tensor]:
    """Plain tensors among values, MXTensors, and lists and tuples of them."""
    out: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, MXTensor):
            out += [value.qdata, value.scale_bytes]
        elif isinstance(value, torch.Tensor):
            out.append(value)
        elif value is not None:
            out += tensors(*value)
    return out


def same(actual: MXTensor | torch.Tensor, expected: MXTensor | torch.Tensor) -> bool:
    if isinstance(expected, MXTensor):
        return (torch.equal(actual.qdata.view(torch.uint8), expected.qdata.view(torch.uint8))
                and torch.equal(actual.scale_bytes, expected.scale_bytes))
    return torch.equal(actual, expected)


def ends_of(size: int) -> list[slice]:
    """The rows at either end that are compared."""
    return [slice(0, min(CHECKED, size)), slice(max(size - CHECKED, 0), size)]


def columns(x: MXTensor, part: slice) -> MXTensor:
    """Columns of an MXTensor that begin and end between blocks."""
    blocks = slice(part.start // x.block_size, -(-part.stop // x.block_size))
    return x.with_parts(x.qdata[:, part], x.scale[:, blocks])


def of_rows(P: int, K: int, block: int) -> Iterator[Kernel]:
    """Casts of activations."""
    x = torch.randn(P, K, dtype=BF16, device=device())
    rows = casts.quantize(x, block, MODE, scale_k_major=True)
    parts = ends_of(P)

    def case(kernel):
        return {"kernel": kernel, "shape": f"{P}x{K}", "block_size": block, "dtype": "bfloat16"}

    def rows_right(out):
        return all(same(out[part], mx.quantize(x[part], block, MODE)) for part in parts)

    def columns_right(out):
        return all(same(columns(out, part), mx.quantize(x[part].t(), block, MODE)) for part in parts)

    yield Kernel(case("rows"), lambda: casts.quantize(x, block, MODE, scale_k_major=True), lambda out: [x, out],
                 rows_right)
    yield Kernel(case("columns"), lambda: casts.quantize_columns(x, block, MODE), lambda out: [x, out],
                 columns_right)
    yield Kernel(case("rows and columns"), lambda: casts.quantize_both(x, block, MODE), lambda out: [x, out],
                 lambda out: rows_right(out[0]) and columns_right(out[1]))
    if block != mx.TILE:  # the GEMM of Hopper's weight gradient re-scales rows itself
        yield Kernel(case("re-scale, transposed"), lambda: casts.rescale_columns(rows, MODE), lambda out: [rows, out],
                     lambda out: all(same(columns(out, part), mx.transpose_rescale(rows[part], block, MODE))
                                     for part in parts))
    yield Kernel(case("dequantize"), lambda: casts.dequantize(rows, BF16), lambda out: [rows, out],
                 lambda out: all(same(out[part], mx.dequantize(rows[part], BF16)) for part in parts))


def of_weights(E: int, N: int, K: int, block: int, dtype: torch.dtype) -> Iterator[Kernel]:
    """Casts of weights: stacked, and as gate and up parameters that lie anywhere."""
    w_ENK = torch.randn(E, N, K, dtype=dtype, device=device())
    in_order, shuffled = list(range(E)), torch.randperm(E).tolist()
    scattered = [[w_ENK[e, :N // 2] for e in shuffled], [w_ENK[e, N // 2:] for e in shuffled]]

    def right(out, order, transposed):
        for at in (0, E - 1):
            w = w_ENK[order[at]]
            if block == mx.TILE:
                expected = mx.quantize_tiles(w, MODE)
                if transposed:
                    expected = expected.with_parts(expected.qdata.t(), expected.scale.t())
            else:
                expected = mx.quantize(w.t() if transposed else w, block, MODE)
            if not same(out[at], expected):
                return False
        return True

    for name, parts, order, transposed in (("weights", [w_ENK], in_order, False),
                                           ("weights, transposed", [w_ENK], in_order, True),
                                           ("weights, scattered", scattered, shuffled, False),
                                           ("weights, scattered, transposed", scattered, shuffled, True)):
        case = {"kernel": name, "shape": f"{E}x{N}x{K}", "block_size": block, "dtype": str(dtype)[6:]}
        yield Kernel(case, partial(casts.quantize_weights, parts, block, MODE, transposed),
                     lambda out: [w_ENK, out], partial(right, order=order, transposed=transposed))
    if block == mx.TILE and dtype == BF16:  # frozen weights that are held in MXFP8, for the input gradient
        tiles = casts.quantize_weights([w_ENK], block, MODE)
        yield Kernel({"kernel": "tiles, transposed", "shape": f"{E}x{N}x{K}", "block_size": block, "dtype": "e4m3"},
                     lambda: casts.transpose_tiles(tiles), lambda out: [tiles, out],
                     partial(right, order=in_order, transposed=True))


def nearly_same(actual: torch.Tensor | None, expected: torch.Tensor | None) -> bool:
    """Whether a GPU's result is that of the CPU, whose exp differs in its last bits."""
    if expected is None:
        return actual is None
    if isinstance(expected, MXTensor):
        parts = ((actual.qdata.view(torch.uint8), expected.qdata.view(torch.uint8)),
                 (actual.scale_bytes, expected.scale_bytes))
        return all((one.cpu() == other).float().mean().item() >= LEAST_EQUAL for one, other in parts)
    return bool((actual.float().cpu() - expected.float()).norm() <= 4e-3 * expected.float().norm())


def of_activation(P: int, F: int, block: int) -> Iterator[Kernel]:
    """SwiGLU between the GEMMs, with the casts of what it leaves. On the CPU, the same functions are plain PyTorch."""
    pre_PG = torch.randn(P, 2 * F, dtype=BF16, device=device())
    t_PF = torch.randn(P, F, dtype=BF16, device=device())
    weight_P = torch.rand(P, device=device())
    formula = ("silu", "gate_up", block, MODE)
    _, kept = activate(pre_PG, weight_P, *formula, quantized=True, keep=True)

    def case(kernel):
        return {"kernel": kernel, "shape": f"{P}x{F}", "block_size": block, "dtype": "bfloat16"}

    def forward_right(out):
        return all(nearly_same(x[part], expected) for part in ends_of(P) for x, expected in zip(out, activate(
            pre_PG[part].cpu(), weight_P[part].cpu(), *formula, quantized=True, keep=True), strict=True))

    def backward_right(out, forms):
        for part in ends_of(P):
            expected = activate_backward(t_PF[part].cpu(), kept[part].cpu(), weight_P[part].cpu(), *formula, **forms)
            got = (out.dweight_P[part], None if out.plain is None else out.plain[part], out.rows[part],
                   None if out.columns is None else columns(out.columns, part))
            wanted = (expected.dweight_P, expected.plain, expected.rows, expected.columns)
            if not all(map(nearly_same, got, wanted)):
                return False
        return True

    yield Kernel(case("SwiGLU, pre-activation kept"),
                 lambda: activate(pre_PG, weight_P, *formula, quantized=True, keep=True),
                 lambda out: [pre_PG, weight_P, out], forward_right)
    for name, form in (("rows, bf16", "plain"), ("rows, columns", "columns")):
        forms = {"rows": True, form: True}
        yield Kernel(case(f"SwiGLU backward, {name}"),
                     partial(activate_backward, t_PF, kept, weight_P, *formula, **forms),
                     lambda out: [t_PF, kept, weight_P, out], partial(backward_right, forms=forms))


def check(kernel: Kernel) -> dict:
    """Runs it once, on poisoned memory; `kernel.case` learns the bytes that it must move."""
    with poisoned():
        out = kernel.call()
    kernel.case["bytes"] = sum(t.nbytes for t in tensors(kernel.moved(out)))
    return {"correct": bool(kernel.correct(out))}


def families(which: str) -> dict[str, Callable[[], Iterator[Kernel]]]:
    """By name. Each makes its own operands, and its kernels."""
    rows, hidden, weights = TINY if which == "tiny" else (ROWS, HIDDEN, WEIGHTS)
    some, blocks = (2, (128, 32)) if which == "full" else (1, (128, ))
    made = [*((of_rows, *shape, block) for shape in rows[:some] for block in blocks),
            *((of_weights, *shape, block, dtype) for shape in weights[:some] for block in blocks
              for dtype in (BF16, torch.float32)),
            *((of_activation, *shape, block) for shape in hidden[:some] for block in blocks)]
    return {" ".join(map(str, (make.__name__, *sizes))): partial(make, *sizes) for make, *sizes in made}


def name_of(case: dict) -> str:
    return f"{case['kernel']}, {case['shape']}, {case['dtype']}, blocks of {case['block_size']}"


def measured_rows(args: argparse.Namespace) -> Iterator[list[dict]]:
    torch.manual_seed(0)
    yield timing.rate_rows(args.cases == "tiny")
    made = families(args.cases)
    for name in world.in_time(made, args.seconds):
        for kernel in made[name]():
            world.say(name_of(kernel.case))
            contender = Contender({"cast": kernel.call}, partial(check, kernel))
            yield timing.rows(kernel.case, {"ours": contender}, args.budget)


# ---- how results are shown ------------------------------------------------------------------------------------------


def bytes_per_ms(row: dict) -> float | None:
    return row["case"]["bytes"] / row["median_ms"] if "median_ms" in row else None


def prepare(result: dict) -> list[dict]:
    """Every cast with its bandwidth, over that of the device copy too, as far as both have a time."""
    copied = next(bytes_per_ms(row) for row in result["rows"] if row["contender"] == "copy_")
    rows = []
    for row in result["rows"]:
        if "kernel" in row["case"]:
            figures = {}
            if rate := bytes_per_ms(row):
                figures = {"mib": row["case"]["bytes"] / 2**20, "tb_per_s": rate / 1e9,
                           "share": rate / copied if copied else None}
            rows.append({**row, **figures})
    return rows


def share_of_copy(what: str, fused: bool) -> Measure:
    return Measure(f"{what}, of the bandwidth of a device copy", ("ours", ), figure="share", form="{:.1%}",
                   when=lambda case: ("SwiGLU" in case["kernel"]) == fused, bars=(bar(0.85), ))


MEASURES = [share_of_copy("casts", False), share_of_copy("SwiGLU with its casts", True)]


def plot(result: dict, pyplot) -> None:
    table: dict = {}
    for row in result["rows"]:
        case = row["case"]
        if row.get("share"):
            of = f"{case['dtype']}, blocks of {case['block_size']}"
            table.setdefault(f"{case['kernel']}, {case['shape']}", {})[of] = row["share"]
    show.dots(pyplot, {"": table}, "share of the bandwidth of a device copy")


SHOWN = show.Shown("quantize", MEASURES, [("MiB moved", "mib", "{:.0f}"), show.MS, ("TB/s", "tb_per_s", "{:.2f}"),
                                          ("of the copy", "share", "{:.1%}")], plot, prepare=prepare)


# ---- command line ---------------------------------------------------------------------------------------------------


def main() -> None:
    run.main(SHOWN, run.timed_parser(__doc__, budget=0.1), measured_rows)


if __name__ == "__main__":
    main()
