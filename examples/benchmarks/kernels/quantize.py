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

from ds_mxfp8_moe.compute import casts, mx, mxfp4
from ds_mxfp8_moe.compute.activation import activate, activate_backward
from ds_mxfp8_moe.compute.mx import MXTensor
from ds_mxfp8_moe.compute.mxfp4 import MXFP4Weights
from lib import run, show, timing, world
from lib.show import Measure, bar
from lib.timing import Contender, poisoned
from lib.world import BF16, device

MODE = "rceil"
# All of 256 MiB and more.
ROWS = ((131072, 7168), (131072, 1408))
HIDDEN = ((131072, 2048), (131072, 1408))  # P, F
WEIGHTS = ((16, 2048, 7168), (64, 1408, 2048))  # experts, N, K
UNPACKED = ((128, 1536, 2048), (128, 2048, 768))  # a layer of Qwen3-30B-A3B
TINY = ((512, 256), ), ((512, 128), ), ((4, 256, 128), ), ((4, 256, 128), )  # the same for a CPU
CHECKED = 256  # rows at either end that are compared; whole blocks along the rows
LEAST_SQNR_DB = 28  # one rounding to e4m3 leaves 31 to 32 dB; tests/gpu compares every byte


class Kernel(NamedTuple):
    """One cast of one operand.

    Attributes:
        reads: what it must read.
        compared: takes the call's result: (values that it must have, those that it has) of each part of it.
    """

    case: dict
    call: Callable
    reads: list
    compared: Callable[[tuple | torch.Tensor], list[tuple[torch.Tensor, torch.Tensor]]]


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


def at_the_ends(x: torch.Tensor) -> torch.Tensor:
    """The first and the last rows, in float32."""
    return torch.cat([(part.dequantize() if isinstance(part, MXTensor) else part).float()
                      for part in (x[:CHECKED], x[-CHECKED:])])


def of_columns(x: MXTensor) -> torch.Tensor:
    """The values at the ends of rows that were cast to columns."""
    return at_the_ends(x.dequantize().t())


def of_rows(P: int, K: int, block: int) -> Iterator[Kernel]:
    """Casts of activations."""
    x = torch.randn(P, K, dtype=BF16, device=device())
    rows = casts.quantize(x, block, MODE, scale_k_major=True)
    wanted, of_cast = at_the_ends(x), at_the_ends(rows)

    def case(kernel):
        return {"kernel": kernel, "shape": f"{P}x{K}", "block_size": block, "dtype": "bfloat16"}

    yield Kernel(case("rows"), lambda: casts.quantize(x, block, MODE, scale_k_major=True), [x],
                 lambda out: [(wanted, at_the_ends(out))])
    yield Kernel(case("columns"), lambda: casts.quantize_columns(x, block, MODE), [x],
                 lambda out: [(wanted, of_columns(out))])
    yield Kernel(case("rows and columns"), lambda: casts.quantize_both(x, block, MODE), [x],
                 lambda out: [(wanted, at_the_ends(out[0])), (wanted, of_columns(out[1]))])
    if block != mx.TILE:  # the GEMM of Hopper's weight gradient re-scales rows itself
        yield Kernel(case("re-scale, transposed"), lambda: casts.rescale_columns(rows, MODE), [rows],
                     lambda out: [(of_cast, of_columns(out))])
    yield Kernel(case("dequantize"), lambda: casts.dequantize(rows, BF16), [rows],
                 lambda out: [(of_cast, at_the_ends(out))])


def of_weights(E: int, N: int, K: int, block: int, dtype: torch.dtype) -> Iterator[Kernel]:
    """Casts of weights: stacked, and as gate and up parameters that lie anywhere."""
    w_ENK = torch.randn(E, N, K, dtype=dtype, device=device())
    in_order, shuffled = list(range(E)), torch.randperm(E).tolist()
    scattered = [[w_ENK[e, :N // 2] for e in shuffled], [w_ENK[e, N // 2:] for e in shuffled]]

    def compared(out, order, transposed):
        return [((w_ENK[order[at]].t() if transposed else w_ENK[order[at]]).float(), out[at].dequantize().float())
                for at in (0, E - 1)]

    for name, parts, order, transposed in (("weights", [w_ENK], in_order, False),
                                           ("weights, transposed", [w_ENK], in_order, True),
                                           ("weights, scattered", scattered, shuffled, False),
                                           ("weights, scattered, transposed", scattered, shuffled, True)):
        case = {"kernel": name, "shape": f"{E}x{N}x{K}", "block_size": block, "dtype": str(dtype)[6:]}
        yield Kernel(case, partial(casts.quantize_weights, parts, block, MODE, transposed), [w_ENK],
                     partial(compared, order=order, transposed=transposed))
    if block == mx.TILE and dtype == BF16:  # frozen weights that are held in MXFP8, for the input gradient
        tiles = casts.quantize_weights([w_ENK], block, MODE)
        yield Kernel({"kernel": "tiles, transposed", "shape": f"{E}x{N}x{K}", "block_size": block, "dtype": "e4m3"},
                     lambda: casts.transpose_tiles(tiles), [tiles],
                     partial(compared, order=in_order, transposed=True))


def of_unpacking(E: int, N: int, K: int) -> Iterator[Kernel]:
    """Frozen weights that are held in MXFP4, for a GEMM of forward and for one of the input gradient."""
    one = mxfp4.quantize(torch.randn(N, K, dtype=BF16, device=device()))
    packed = MXFP4Weights(*(part.expand(E, *part.shape).contiguous() for part in one.buffers), one.dtype)
    for name, transposed in (("MXFP4, unpacked", False), ("MXFP4, unpacked and transposed", True)):
        wanted = one.values().t() if transposed else one.values()
        yield Kernel({"kernel": name, "shape": f"{E}x{N}x{K}", "block_size": mx.TILE, "dtype": "e2m1"},
                     partial(casts.unpack_tiles, packed, transposed), [*packed.buffers],
                     lambda out, wanted=wanted: [(wanted, out[at].dequantize().float()) for at in (0, E - 1)])


def of_activation(P: int, F: int, block: int) -> Iterator[Kernel]:
    """SwiGLU between the GEMMs, with the casts of what it leaves."""
    pre_PG = torch.randn(P, 2 * F, dtype=BF16, device=device())
    t_PF = torch.randn(P, F, dtype=BF16, device=device())
    weight_P = torch.rand(P, device=device())
    formula = ("silu", "gate_up", block, MODE)
    _, kept = activate(pre_PG, weight_P, *formula, quantized=True, keep=True)

    def case(kernel):
        return {"kernel": kernel, "shape": f"{P}x{F}", "block_size": block, "dtype": "bfloat16"}

    def plain(pre, weight):
        gate, up = pre.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up * weight.unsqueeze(1)

    pre, weight = at_the_ends(pre_PG), at_the_ends(weight_P)
    leaves = at_the_ends(kept).flatten(1).requires_grad_(), weight.clone().requires_grad_()
    dpre, dweight = torch.autograd.grad(plain(*leaves), leaves, at_the_ends(t_PF))

    def backward_compared(out):
        found = [(dweight, at_the_ends(out.dweight_P)), (dpre, at_the_ends(out.rows))]
        return found + [(dpre, at_the_ends(out.plain) if out.columns is None else of_columns(out.columns))]

    yield Kernel(case("SwiGLU, pre-activation kept"),
                 lambda: activate(pre_PG, weight_P, *formula, quantized=True, keep=True), [pre_PG, weight_P],
                 lambda out: [(plain(pre, weight), at_the_ends(out[0])), (pre, at_the_ends(out[1]).flatten(1))])
    for name, form in (("rows, bf16", "plain"), ("rows, columns", "columns")):
        yield Kernel(case(f"SwiGLU backward, {name}"), partial(
            activate_backward, t_PF, kept, weight_P, *formula, rows=True, **{form: True}), [t_PF, kept, weight_P],
            backward_compared)


def check(kernel: Kernel) -> dict:
    """Runs it once, on poisoned memory; `kernel.case` learns the bytes that it must move."""
    with poisoned():
        out = kernel.call()
    kernel.case["bytes"] = sum(t.nbytes for t in tensors(kernel.reads, out))
    wanted, got = zip(*kernel.compared(out), strict=True)
    return timing.close(dict(enumerate(wanted)), dict(enumerate(got)), LEAST_SQNR_DB)


def families(which: str) -> dict[str, Callable[[], Iterator[Kernel]]]:
    """By name. Each makes its own operands, and its kernels."""
    rows, hidden, weights, unpacked = TINY if which == "tiny" else (ROWS, HIDDEN, WEIGHTS, UNPACKED)
    some, blocks = (2, (128, 32)) if which == "full" else (1, (128, ))
    made = [*((of_rows, *shape, block) for shape in rows[:some] for block in blocks),
            *((of_weights, *shape, block, dtype) for shape in weights[:some] for block in blocks
              for dtype in (BF16, torch.float32)),
            *((of_unpacking, *shape) for shape in unpacked),
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
