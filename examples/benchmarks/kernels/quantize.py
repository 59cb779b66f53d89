# SPDX-License-Identifier: Apache-2.0
"""Every kernel that casts, on one GPU: the bytes that it must move, over its time, beside a device copy's bandwidth.

    python examples/benchmarks/kernels/quantize.py              # run, store, show
    python examples/benchmarks/kernels/quantize.py --show FILE     # table and plot of a result file
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ds_mxfp8_moe import casts, mx
from ds_mxfp8_moe.activation import activate, activate_backward
from ds_mxfp8_moe.mx import MXTensor
from lib import options, results_file, show, timing
from lib.timing import device, poisoned

BF16, F32 = torch.bfloat16, torch.float32
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
    yield Kernel(case("rows, row-major scales"), lambda: casts.quantize(x, block, MODE), lambda out: [x, out],
                 rows_right)
    yield Kernel(case("columns"), lambda: casts.quantize_columns(x, block, MODE), lambda out: [x, out],
                 columns_right)
    yield Kernel(case("rows and columns"), lambda: casts.quantize_both(x, block, MODE), lambda out: [x, out],
                 lambda out: rows_right(out[0]) and columns_right(out[1]))
    yield Kernel(case("re-scale, transposed"), lambda: casts.rescale_columns(rows, MODE), lambda out: [rows, out],
                 lambda out: all(same(columns(out, part), mx.transpose_rescale(rows[part], block, MODE))
                                 for part in parts))
    yield Kernel(case("dequantise"), lambda: casts.dequantize(rows, BF16), lambda out: [rows, out],
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


def silu_gradients(t_PF: torch.Tensor, gate_PF: torch.Tensor, up_PF: torch.Tensor, weight_P: torch.Tensor) -> tuple:
    """float32 dpre [P, 2F] and dweight [P] of weight * silu(gate) * up."""
    share = torch.sigmoid(gate_PF)
    value, slope = gate_PF * share, share * (1 + gate_PF * (1 - share))
    weighted = t_PF * weight_P.unsqueeze(1)
    return torch.cat([weighted * up_PF * slope, weighted * value], 1), (t_PF * value * up_PF).sum(1)


def nearly_same(actual: MXTensor, expected: MXTensor) -> bool:
    equal = (actual.qdata.view(torch.uint8) == expected.qdata.view(torch.uint8)).float().mean().item()
    scales = (actual.scale_bytes == expected.scale_bytes).float().mean().item()
    return min(equal, scales) >= LEAST_EQUAL


def of_activation(P: int, F: int, block: int) -> Iterator[Kernel]:
    """SwiGLU between the GEMMs, with the casts of what it leaves."""
    pre_PG = torch.randn(P, 2 * F, dtype=BF16, device=device())
    t_PF = torch.randn(P, F, dtype=BF16, device=device())
    weight_P = torch.rand(P, device=device())
    formula = ("silu", "gate_up", block, MODE)
    _, kept = activate(pre_PG, weight_P, *formula, quantized=True, keep=True)
    parts = ends_of(P)

    def case(kernel):
        return {"kernel": kernel, "shape": f"{P}x{F}", "block_size": block, "dtype": "bfloat16"}

    def hidden(part):
        gate, up = pre_PG[part].float().chunk(2, dim=1)
        return mx.quantize(torch.nn.functional.silu(gate) * up * weight_P[part].unsqueeze(1), block, MODE)

    def forward_right(out):
        h, pre = out
        return all(nearly_same(h[part], hidden(part)) and
                   same(pre[part], mx.quantize(pre_PG[part].unflatten(1, (2, F)), block, MODE)) for part in parts)

    def backward_right(out):
        for part in parts:
            gate, up = mx.dequantize(kept[part], F32).unbind(1)
            dpre, dweight = silu_gradients(t_PF[part].float(), gate, up, weight_P[part])
            if not torch.allclose(out.dweight_P[part], dweight, rtol=1e-3, atol=1e-3 * F**0.5):
                return False
            if out.plain is not None and not (out.plain[part].float() - dpre).norm() < 4e-3 * dpre.norm():
                return False
            if not nearly_same(out.rows[part], mx.quantize(dpre, block, MODE)):
                return False
            if out.columns is not None and not nearly_same(columns(out.columns, part),
                                                           mx.quantize(dpre.t(), block, MODE)):
                return False
        return True

    yield Kernel(case("SwiGLU, pre-activation kept"),
                 lambda: activate(pre_PG, weight_P, *formula, quantized=True, keep=True),
                 lambda out: [pre_PG, weight_P, out], forward_right)
    for name, forms in (("rows, bf16", {"plain": True}), ("rows, columns", {"columns": True})):
        yield Kernel(case(f"SwiGLU backward, {name}"),
                     partial(activate_backward, t_PF, kept, weight_P, *formula, rows=True, **forms),
                     lambda out: [t_PF, kept, weight_P, out], backward_right)


def check(kernel: Kernel) -> dict:
    """Runs it once, on poisoned memory; `kernel.case` learns the bytes that it must move."""
    with poisoned():
        out = kernel.call()
    kernel.case["bytes"] = sum(t.nbytes for t in tensors(kernel.moved(out)))
    return {"correct": bool(kernel.correct(out))}


def families(which: str) -> list[Callable[[], Iterator[Kernel]]]:
    """Each makes its own operands, and its kernels."""
    rows, hidden, weights = TINY if which == "tiny" else (ROWS, HIDDEN, WEIGHTS)
    some, blocks = (2, (128, 32)) if which == "full" else (1, (128, ))
    return [*(partial(of_rows, *shape, block) for shape in rows[:some] for block in blocks),
            *(partial(of_weights, *shape, block, dtype) for shape in weights[:some] for block in blocks
              for dtype in (BF16, F32)),
            *(partial(of_activation, *shape, block) for shape in hidden[:some] for block in blocks)]


def run(made: list[Callable[[], Iterator[Kernel]]], budget_s: float) -> Iterator[dict]:
    with tqdm(made, unit="operand") as progress:
        for make in progress:
            for kernel in make():
                progress.set_postfix_str(f"{kernel.case['kernel']}, {kernel.case['shape']}")
                yield from timing.rows(kernel.case, {"ours": (kernel.call, partial(check, kernel))}, budget_s)


def main() -> None:
    args = results_file.parse(options.parser(__doc__))
    if args.show:
        show.show(args.show)
        return
    torch.manual_seed(0)
    made = families(args.cases)
    if args.warm_up is not None:
        for make in options.part(made, args):
            for kernel in make():
                kernel.call()
        return
    options.compile_beforehand(args)
    options.finish("quantize", chain(options.rate_rows(args), run(made, args.budget)), args)


if __name__ == "__main__":
    main()
