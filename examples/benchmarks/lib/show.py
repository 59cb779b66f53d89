# SPDX-License-Identifier: Apache-2.0
"""Tables and plots of the benchmarks, out of their result files; show_ranks.py has those of several GPUs,
show_convergence.py those of whole trainings.

    python examples/benchmarks/show.py FILE...     # prints each file's tables and draws its plot beside it
"""

import argparse
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from tabulate import tabulate

from . import shapes, show_convergence, show_ranks, show_train
from .tables import Group, bar, bars, groups, legends, read, speedup

WGRAD_FROM_MXFP8 = "ours, bf16 from MXFP8"
GEMMS = ("torch._grouped_mm", "cuBLAS loop", "torch rowwise fp8", "ours, bf16", WGRAD_FROM_MXFP8, "ours, MXFP8")
BF16_GEMMS = ("torch._grouped_mm", "cuBLAS loop", "ours, bf16")
PLAIN, HP, KEPT_IN_BF16 = "plain torch", "mxfp8_wgrad_with_hp", "mxfp8_wgrad_with_hp, pre-activation bf16"
COLORS = {"torch._grouped_mm": "tab:gray", "cuBLAS loop": "black", "torch rowwise fp8": "tab:olive",
          "ours, bf16": "tab:blue", WGRAD_FROM_MXFP8: "tab:orange", "ours, MXFP8": "tab:red", "floor": "tab:green",
          PLAIN: "tab:gray", "bf16": "tab:blue", HP: "tab:orange", KEPT_IN_BF16: "tab:purple", "mxfp8": "tab:red"}


def rates(result: dict) -> tuple[float, float]:
    """Bytes and FP8 FLOPs a ms that the run measured."""
    copy, = groups(result, "device copy")
    product, = groups(result, "fp8 product")
    return (copy.case["bytes"] / copy.figure("copy_"),
            product.case["flops"] / product.figure("torch._scaled_mm"))


def floor_ms(case: dict, bytes_per_ms: float, flops_per_ms: float) -> float:
    """No version is faster: FLOPs at the best FP8 rate, or bytes at a copy's bandwidth."""
    return max(case["flops"] / flops_per_ms, case["least_bytes"] / bytes_per_ms)


def _shape(case: dict) -> list:
    return [f"{case['dim']}x{case['hidden']}", case["experts"], case["tokens_per_expert"], case["split"]]


SHAPE_HEADERS = ["dim x hidden", "experts", "tokens\neach", "split"]


def _bar(what: str, found: Iterable[tuple[float | None, dict]], least: float, aim: float, most: bool = False) -> list:
    """tables.bar with cases in place of their descriptions."""
    return bar(what, ((value, ", ".join(map(str, _shape(case) if "dim" in case else (case["kernel"], case["shape"]))))
                      for value, case in found), least, aim, most)


# ---- grouped_gemm -------------------------------------------------------------------------------------------------


def gemm_tables(result: dict) -> list[str]:
    per_ms = rates(result)
    lines = []
    found = groups(result, "forward", "dgrad", "wgrad")
    for group in found:
        rows = [group.tflops(c) for c in GEMMS]
        floor = floor_ms(group.case, *per_ms)
        ours = group.figure("ours, MXFP8")
        lines.append([group.case["operation"], *_shape(group.case), *rows, group.case["flops"] / floor / 1e9,
                      ours, speedup(group.ratio("torch._grouped_mm", "ours, MXFP8")),
                      speedup(group.ratio(group.fastest(BF16_GEMMS), "ours, MXFP8")),
                      f"{floor / ours:.0%}" if ours else ""])
    table = tabulate(lines, ["TFLOP/s of", *SHAPE_HEADERS, "torch", "cuBLAS\nloop", "rowwise\nfp8", "our\nbf16",
                             "bf16 from\nMXFP8", "MXFP8", "floor", "MXFP8\nms", "over\ntorch", "over best\nbf16",
                             "of\nfloor"], floatfmt=("", "", "d", "d", "") + (".0f", ) * 7 + (".3f", "", "", ""))

    def seeds(*operations):
        return [g for g in found if g.case["operation"] in operations and g.case["tokens_per_expert"] == 16384
                and (g.case["dim"], g.case["hidden"]) in shapes.SEED_SHAPES]

    def worst(what, operations, over, contender, least, aim):
        return _bar(what, ((g.ratio(over(g), contender), g.case) for g in seeds(*operations)), least, aim)

    products, name = ("forward", "dgrad"), "16384 tokens each, seed shapes: "
    return [table, bars([
        worst(name + "forward, dgrad over torch", products, lambda g: "torch._grouped_mm", "ours, MXFP8", 1.55, 1.75),
        worst(name + "the same over the fastest bf16", products, lambda g: g.fastest(BF16_GEMMS), "ours, MXFP8", 1.3,
              1.5),
        worst(name + "wgrad, bf16 from MXFP8, over torch", ("wgrad", ), lambda g: "torch._grouped_mm",
              WGRAD_FROM_MXFP8, 0.87, 0.95),
        worst(name + "wgrad, MXFP8, over the row above", ("wgrad", ), lambda g: WGRAD_FROM_MXFP8, "ours, MXFP8", 1.25,
              1.5)])]


def _one_split(found: list) -> list:
    """Even splits; those that there are, if there are none."""
    return [g for g in found if g.case["split"] == "even"] or found


def gemm_plot(result: dict, pyplot) -> None:
    per_ms = rates(result)
    operations = ("forward", "dgrad", "wgrad")
    found = _one_split(groups(result, *operations))
    dims = list(dict.fromkeys((g.case["dim"], g.case["hidden"]) for g in found))
    _, axes = pyplot.subplots(3, len(dims), figsize=(3.6 * len(dims), 9), squeeze=False, sharex=True, sharey="row")
    for row, operation in zip(axes, operations, strict=True):
        for axis, (dim, hidden) in zip(row, dims, strict=True):
            here = _most_alike([g for g in found if g.case["operation"] == operation
                                and (g.case["dim"], g.case["hidden"]) == (dim, hidden)])
            for name in GEMMS:
                _line(axis, here, lambda g, name=name: g.tflops(name), name)
            _line(axis, here, lambda g: g.case["flops"] / floor_ms(g.case, *per_ms) / 1e9, "floor", linestyle=":")
            axis.set(title=f"{operation}, {dim}x{hidden}, {here[0].case['experts']} experts" if here else operation,
                     xscale="log")
    for axis in axes[:, 0]:
        axis.set(ylabel="TFLOP/s")
    for axis in axes[-1]:
        axis.set(xlabel="tokens per expert")
    legends(axes[:, 0])


def _most_alike(found: list[Group]) -> list[Group]:
    """Those with one number of experts, 8 if there are any: a line over tokens."""
    experts = {g.case["experts"] for g in found}
    one = 8 if 8 in experts else max(experts, default=0)
    return sorted((g for g in found if g.case["experts"] == one), key=lambda g: g.case["tokens_per_expert"])


def _line(axis, found: list[Group], figure: Callable, name: str, **style) -> None:
    points = [(g.case["tokens_per_expert"], figure(g)) for g in found if figure(g) is not None]
    if points:
        axis.plot(*zip(*points, strict=True), label=name, color=COLORS[name], marker=".", **style)


# ---- quantize -----------------------------------------------------------------------------------------------------


def _cast_shares(result: dict) -> list[tuple[float | None, dict]]:
    bytes_per_ms, _ = rates(result)
    return [(g.case["bytes"] / g.figure("ours") / bytes_per_ms if g.figure("ours") else None, g.case)
            for g in groups(result) if "kernel" in g.case]


def cast_tables(result: dict) -> list[str]:
    bytes_per_ms, _ = rates(result)
    lines = [[g.case["kernel"], g.case["shape"], g.case["dtype"], g.case["block_size"], g.case["bytes"] / 2**20,
              g.figure("ours"), g.case["bytes"] / g.figure("ours") / 1e9, share]
             for g, (share, _) in zip((g for g in groups(result) if "kernel" in g.case), _cast_shares(result),
                                      strict=True) if share is not None]
    return [tabulate(lines, ["kernel", "shape", "dtype", "block", "MiB moved", "ms", "TB/s", "of copy"],
                     floatfmt=("", "", "", "d", ".0f", ".3f", ".2f", ".1%"))
            + f"\ndevice copy: {bytes_per_ms / 1e9:.2f} TB/s",
            bars([_bar(f"{what}, of the copy's bandwidth",
                        [found for found in _cast_shares(result) if ("SwiGLU" in found[1]["kernel"]) == fused], 0.85,
                        0.95) for what, fused in (("casts", False), ("SwiGLU with its casts", True))])]


def cast_plot(result: dict, pyplot) -> None:
    shares = [(share, case) for share, case in _cast_shares(result) if share is not None]
    names = [f"{case['kernel']}, {case['shape']}, {case['dtype']}, {case['block_size']}" for _, case in shares]
    _, axis = pyplot.subplots(figsize=(9, 1 + 0.22 * len(names)))
    axis.barh(names[::-1], [share for share, _ in shares][::-1], color="tab:red")
    for share in (0.85, 0.95):
        axis.axvline(share, color="black", linewidth=0.7, linestyle=":")
    axis.set(xlabel="bytes that must move / time, of the device copy's bandwidth")
    axis.tick_params(labelsize=7)


# ---- expert_ffn ---------------------------------------------------------------------------------------------------


def ffn_tables(result: dict) -> list[str]:
    found = groups(result, "forward and backward")
    lines = [[*_shape(g.case), *(g.figure(c) for c in (PLAIN, "bf16", HP, "mxfp8")),
              *(speedup(g.ratio(over, c)) for over, c in ((PLAIN, "bf16"), ("bf16", HP), ("bf16", "mxfp8"))),
              *(speedup(g.ratio(c, "bf16", "held_bytes")) for c in (HP, KEPT_IN_BF16)),
              *(speedup(g.ratio(c, "bf16", "peak_bytes")) for c in (HP, "mxfp8")), g.figure(HP, "host_ms")]
             for g in found]
    table = tabulate(lines, [*SHAPE_HEADERS, "plain\nms", "bf16\nms", "hp\nms", "mxfp8\nms", "bf16\nover plain",
                             "hp\nover bf16", "mxfp8\nover bf16", "held\nhp", "held\npre bf16", "peak\nhp",
                             "peak\nmxfp8", "host ms\nhp"],
                     floatfmt=("", "d", "d", "") + (".3f", ) * 4 + ("", ) * 7 + (".2f", ))
    firsts = [[r["contender"], *_shape(r["case"]), r["first_s"]] for r in result["rows"] if "first_s" in r]
    first_table = tabulate(firsts, ["first step of a process", *SHAPE_HEADERS, "s"], floatfmt=".2f")

    def dims(case):
        return case["dim"], case["hidden"]

    def worst(what, contenders, chosen, least, aim):
        return _bar(what, ((g.ratio("bf16", c), g.case) for g in found if chosen(g.case) for c in contenders), least,
                    aim)

    def memory(what, contenders, figure, least, aim):
        return _bar(what, ((g.ratio(c, "bf16", figure), g.case) for g in found for c in contenders
                           if not g.figure(c, "unquantized")), least, aim, most=True)

    def big(case):
        return case["tokens_per_expert"] == 16384 and dims(case) in ((8192, 5120), (7168, 2048))

    both = (HP, "mxfp8")
    return [table, *([first_table] if firsts else []), bars([
        worst("8192x5120, 7168x2048, 16384 tokens each: default recipe over bf16", (HP, ), big, 1.2, 1.35),
        worst("the same: all MXFP8", ("mxfp8", ), big, 1.35, 1.6),
        worst("other shapes from 2048 tokens each: both", both, lambda case: case["tokens_per_expert"] >= 2048
              and dims(case) not in ((8192, 5120), (7168, 2048)), 1.1, 1.25),
        worst("every shape and count, with the selection on: both", both,
              lambda case: case.get("min_tokens_per_expert") is None, 0.98, 0.98),
        _bar("our bf16 over plain torch", ((g.ratio(PLAIN, "bf16"), g.case) for g in found), 1.0, 1.0),
        memory("held, over bf16: pre-activation in MXFP8", both, "held_bytes", 0.55, 0.5),
        memory("held, over bf16: pre-activation in bf16", (KEPT_IN_BF16, ), "held_bytes", 0.8, 0.75),
        memory("peak, over bf16", both, "peak_bytes", 1.0, 0.8),
        _bar("first step of a process, s", ((r["first_s"], r["case"]) for r in result["rows"] if "first_s" in r), 5, 2,
             most=True)])]


def ffn_plot(result: dict, pyplot) -> None:
    found = _one_split(groups(result, "forward and backward"))
    dims = list(dict.fromkeys((g.case["dim"], g.case["hidden"]) for g in found))
    _, axes = pyplot.subplots(2, len(dims), figsize=(3.6 * len(dims), 6.5), squeeze=False, sharex=True, sharey="row")
    for column, (dim, hidden) in zip(axes.T, dims, strict=True):
        here = _most_alike([g for g in found if (g.case["dim"], g.case["hidden"]) == (dim, hidden)])
        for name in (PLAIN, HP, "mxfp8"):
            _line(column[0], here, lambda g, name=name: g.ratio("bf16", name), name)
        for name in (PLAIN, HP, KEPT_IN_BF16, "mxfp8"):
            _line(column[1], here, lambda g, name=name: g.ratio(name, "bf16", "held_bytes"), name)
        column[0].set(title=f"{dim}x{hidden}, {here[0].case['experts']} experts", xscale="log")
        column[1].set(xlabel="tokens per expert")
        for axis in column:
            axis.axhline(1, color=COLORS["bf16"], linewidth=0.7)
    axes[0, 0].set(ylabel="speed over our bf16")
    axes[1, 0].set(ylabel="bytes held, over our bf16")
    legends(axes[:, 0])


SHOWN = {"grouped_gemm": (gemm_tables, gemm_plot), "quantize": (cast_tables, cast_plot),
         "expert_ffn": (ffn_tables, ffn_plot), **show_ranks.SHOWN, **show_train.SHOWN, **show_convergence.SHOWN}


def draw(path: Path, result: dict) -> None:
    """The plot of a result file, beside it."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    _, plot = SHOWN[result["benchmark"]]
    plot(result, pyplot)
    pyplot.tight_layout()
    pyplot.savefig(path.with_suffix(".png"), dpi=75, bbox_inches="tight")
    pyplot.close()


def show(path: Path) -> bool:
    """Draws the plot of a result file beside it and prints its tables; whether every row of it is correct."""
    result = read(path)
    if result["benchmark"] not in SHOWN:
        sys.exit(f"{path} has results of {result['benchmark']}; shown here: {', '.join(SHOWN)}")
    tables, _ = SHOWN[result["benchmark"]]
    draw(path, result)
    wrong = [row for row in result["rows"] if not row["correct"]]
    for row in wrong:
        print("WRONG:", row["contender"], row["case"], row.get("failure") or row.get("error") or row.get("sqnr_db"))
    print(f"\n{result['machine']}, commit {result['commit']}, {result['date']}; plot: {path.with_suffix('.png')}")
    print("\n\n".join(tables(result)))
    return not wrong


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    if not all([show(path) for path in parser.parse_args(arguments).files]):
        sys.exit("some results are wrong")


if __name__ == "__main__":
    main()
