# SPDX-License-Identifier: Apache-2.0
"""Tables and plots of the benchmarks of several GPUs, and the bars that were set for them (on 8 H200)."""

from tabulate import tabulate

from .tables import Group, bar, bars, groups, legends, speedup


def _on(case: dict) -> str:
    return f"{case['ranks']} ranks"


def _found(result: dict, operation: str, **case) -> Group:
    """The rows of that operation of the case with these values; without any, an empty group."""
    return next((g for g in groups(result, operation) if all(g.case.get(key) == case[key] for key in case)),
                Group(case, []))


def _over_cases(result: dict, *keys: str) -> list[dict]:
    """The different values of `keys` among the rows, in the order of the file."""
    return list({tuple(row["case"].get(key) for key in keys): {key: row["case"].get(key) for key in keys}
                 for row in result["rows"]}.values())


# ---- ep_pipeline --------------------------------------------------------------------------------------------------

NCCL_BF16, NCCL_MXFP8_GEMM, OURS_BF16 = "NCCL bf16", "NCCL bf16, MXFP8 GEMM", "ours, bf16"
HP, MXFP8 = "ours, mxfp8_wgrad_with_hp", "ours, mxfp8"
PIPELINES = {NCCL_BF16: "tab:gray", NCCL_MXFP8_GEMM: "tab:olive", OURS_BF16: "tab:blue", HP: "tab:orange",
             MXFP8: "tab:red"}
PARTS = ("forward", "backward", "total")
# Forward, backward, total: what torchao's tutorial states for 8 B200, over bf16 and over the second contender.
TORCHAO = {(8192, 5120): ((1.49, 1.40, 1.43), (1.16, 1.13, 1.14)),
           (7168, 2048): ((1.46, 1.34, 1.38), (1.29, 1.22, 1.25)),
           (2048, 1408): ((1.14, 1.29, 1.22), (1.13, 1.27, 1.21))}
PIPELINE_BARS = {(8192, 5120): ((1.43, 1.65), (1.6, 1.9), (1.2, 1.35)),
                 (7168, 2048): ((1.5, 1.8), (1.75, 2.1), (1.4, 1.6)),
                 (2048, 1408): ((1.5, 1.8), (1.9, 2.2), (1.45, 1.7))}


def pipeline_floor_ms(result: dict, case: dict, contender: str) -> dict[str, float]:
    """Of forward, backward and their total: bytes at the rate of the all-to-all, FLOPs at the GEMMs' own, perfectly
    overlapped, neither cast nor padding counted. Empty where a rate is missing, or links."""
    dims = {"dim": case["dim"], "hidden": case["hidden"]}
    wgrad = "mxfp8" if contender == MXFP8 else "bf16"
    link = _found(result, "all-to-all", **dims)
    gemm_ms = [_found(result, f"{name} GEMM", **dims).figure(dtype)
               for name, dtype in (("forward", "mxfp8"), ("dgrad", "mxfp8"), ("wgrad", wgrad))]
    if link.figure(NCCL_BF16) is None or None in gemm_ms or case["ranks"] == 1:
        return {}
    # Bytes a value: dispatch, combine, its gradient's way out, the way home.
    mxfp8 = 1 + 1 / case["block_size"]
    wires = (mxfp8, ) * 4 if contender == MXFP8 else (mxfp8, 2, mxfp8, 2)
    values_ms = case["rows"] * (case["ranks"] - 1) / case["ranks"] * link.figure(NCCL_BF16) / link.case["bytes"]
    moves_ms = [values_ms * case[width] * each for width, each in zip(("dim", "hidden", "hidden", "dim"), wires,
                                                                    strict=True)]
    forward, backward = max(sum(moves_ms[:2]), gemm_ms[0]), max(sum(moves_ms[2:]), sum(gemm_ms[1:]))
    return {"forward": forward, "backward": backward, "total": forward + backward}


def pipeline_tables(result: dict) -> list[str]:
    lines, goals = [], []
    for case in _over_cases(result, "dim", "hidden", "rows", "ranks", "block_size"):
        dims = case["dim"], case["hidden"]
        theirs = TORCHAO.get(dims, ((None, ) * 3, ) * 2)
        floors = {name: pipeline_floor_ms(result, case, name) for name in (HP, MXFP8)}
        for i, part in enumerate(PARTS):
            g = _found(result, part, **case)
            lines.append([f"{dims[0]}x{dims[1]}", part, *(g.figure(name) for name in PIPELINES),
                          *(floors[name].get(part) for name in floors),
                          *(speedup(g.ratio(NCCL_BF16, name)) for name in (OURS_BF16, HP, MXFP8)),
                          speedup(theirs[0][i]), speedup(g.ratio(NCCL_MXFP8_GEMM, HP)), speedup(theirs[1][i])])
        where = f"{dims[0]}x{dims[1]}"
        pairs = ((f"{where}: default recipe over NCCL bf16", NCCL_BF16, HP),
                 (f"{where}: all MXFP8 over NCCL bf16", NCCL_BF16, MXFP8),
                 (f"{where}: default recipe over bf16 all-to-all and MXFP8 GEMM", NCCL_MXFP8_GEMM, HP))
        goals += [bar(what, [(g.ratio(over, name), _on(case))], *goal) for (what, over, name), goal
                  in zip(pairs, PIPELINE_BARS.get(dims, ()), strict=False)]
    transports = {row["transport"] for row in result["rows"] if "transport" in row}
    table = tabulate(lines, ["dim x hidden", "ms of", "NCCL\nbf16", "a2a bf16,\nMXFP8 GEMM", "our\nbf16", "hp",
                             "mxfp8", "floor\nhp", "floor\nmxfp8", "bf16 over\nour bf16", "bf16\nover hp",
                             "bf16 over\nmxfp8", "torchao,\nB200", "MXFP8 GEMM\nover hp", "torchao,\nB200"],
                     floatfmt=("", "") + (".3f", ) * 7 + ("", ) * 6)
    return [f"{table}\nours over {', '.join(sorted(transports))}; even routing, known to all beforehand: plans and "
            "splits are not timed", bars(goals)]


def pipeline_plot(result: dict, pyplot) -> None:
    cases = _over_cases(result, "dim", "hidden", "rows", "ranks", "block_size")
    _, axes = pyplot.subplots(1, len(cases), figsize=(4.2 * len(cases), 4), squeeze=False)
    for axis, case in zip(axes[0], cases, strict=True):
        for i, (name, color) in enumerate(PIPELINES.items()):
            parts = [_found(result, part, **case).figure(name) or 0 for part in PARTS[:2]]
            floor = pipeline_floor_ms(result, case, name).get("total") if name in (HP, MXFP8) else None
            axis.bar(i, parts[0], color=color, label=name)
            axis.bar(i, parts[1], bottom=parts[0], color=color, alpha=0.6)
            if floor is not None:
                axis.hlines(floor, i - 0.4, i + 0.4, color="black", label="floor" if name == HP else None)
        axis.set(title=f"{case['dim']}x{case['hidden']}, {_on(case)}", xticks=[])
    axes[0, 0].set(ylabel="ms: forward, on it backward")
    legends(axes[0, -1:])


# ---- latency ------------------------------------------------------------------------------------------------------

A2A_E4M3, A2A_BF16 = "AllToAll, e4m3 in", "AllToAll, bf16 in"
NCCL_EXACT, NCCL_PADDED = "NCCL, exact splits", "NCCL, padded"
GEMM_ALONE, GEMM_BETWEEN = "a GEMM alone", "the GEMM between send and receive"
LATENCIES = {A2A_E4M3: "tab:red", A2A_BF16: "tab:orange", NCCL_EXACT: "tab:blue", NCCL_PADDED: "tab:gray"}
# us of dispatch and combine by experts and tokens: 8 ranks, this kind of machine, measured earlier in another run.
PPLX = {(256, 1): (25.8, 23.7), (256, 8): (25.9, 21.9), (256, 32): (35.2, 41.4), (256, 128): (65.0, 91.9),
        (64, 1): (26.4, 18.4), (64, 128): (51.8, 40.8)}


def _pplx_us(case: dict) -> dict[str, float]:
    if (case["experts"], case["top_k"], case["hidden"]) not in ((64, 6, 2048), (256, 8, 7168)):
        return {}
    return dict(zip(("dispatch", "combine"), PPLX.get((case["experts"], case["tokens"]), ()), strict=False))


def _us(ms: float | None) -> float | None:
    return None if ms is None else 1e3 * ms


def latency_tables(result: dict) -> list[str]:
    lines, shares = [], {}
    for case in _over_cases(result, "experts", "top_k", "hidden", "tokens", "ranks"):
        for part in ("dispatch", "combine"):
            by_launch = {launch: _found(result, part, launch=launch, **case) for launch in ("eager", "graph")}
            pplx = _pplx_us(case).get(part)
            lines.append([case["experts"], case["top_k"], case["hidden"], case["tokens"], part,
                          *(_us(by_launch[launch].figure(name)) for name in LATENCIES for launch in by_launch),
                          _us(by_launch["graph"].figure(A2A_BF16, "p90_ms")), pplx])
            for launch, g in by_launch.items():
                for name in (A2A_E4M3, A2A_BF16):
                    if pplx and g.figure(name):
                        where = f"{part}, {case['experts']} experts, {case['tokens']} tokens, {_on(case)}"
                        shares.setdefault((name, launch), []).append((_us(g.figure(name)) / pplx, where))
    table = tabulate(lines, ["experts", "top-k", "hidden", "tokens", "us of", "e4m3 in\neager", "\ngraph",
                             "bf16 in\neager", "\ngraph", "NCCL exact\neager", "\ngraph", "NCCL padded\neager",
                             "\ngraph", "bf16 in\ngraph, p90", "pplx-kernels,\n8 ranks,\nearlier run"],
                     floatfmt=("d", ) * 4 + ("", ) + (".1f", ) * 10)
    goals = [bar(f"{name}, {launch}: of pplx-kernels' time", shares.get((name, launch), ()), 1.0, 0.6, most=True)
             for name in (A2A_E4M3, A2A_BF16) for launch in ("eager", "graph")]
    hidden = []
    for g in groups(result, "send, GEMM, receive"):
        alone, gemm, both = (g.figure(name) for name in (A2A_E4M3, GEMM_ALONE, GEMM_BETWEEN))
        if None not in (alone, gemm, both):
            hidden.append([g.case["experts"], g.case["tokens"], _us(alone), _us(gemm), _us(both),
                           f"{(alone + gemm - both) / alone:.0%}"])
    overlap = tabulate(hidden, ["experts", "tokens", "dispatch\nus", "GEMM\nus", "send, GEMM,\nreceive us",
                                "hidden"], floatfmt=("d", "d", ".1f", ".1f", ".1f", ""))
    return [table, *([overlap] if hidden else []), bars(goals)]


def latency_plot(result: dict, pyplot) -> None:
    configs = _over_cases(result, "experts", "top_k", "hidden", "ranks")
    _, axes = pyplot.subplots(2, len(configs), figsize=(5 * len(configs), 7), squeeze=False, sharex=True)
    for column, config in zip(axes.T, configs, strict=True):
        for axis, part in zip(column, ("dispatch", "combine"), strict=True):
            for name, color in LATENCIES.items():
                for launch, style in (("eager", "-"), ("graph", ":")):
                    points = [(g.case["tokens"], _us(g.figure(name))) for g in groups(result, part)
                              if g.figure(name) and g.case["launch"] == launch
                              and all(g.case[key] == config[key] for key in config)]
                    if points:
                        axis.plot(*zip(*points, strict=True), style, color=color, marker=".",
                                  label=f"{name}, {launch}")
            pplx = [(tokens, both[part == "combine"]) for (experts, tokens), both in PPLX.items()
                    if experts == config["experts"]]
            if pplx:
                axis.plot(*zip(*pplx, strict=True), "k+", label="pplx-kernels, 8 ranks, earlier run")
            axis.set(title=f"{part}, {config['experts']} experts, top-{config['top_k']}, {config['hidden']}",
                     xscale="log", yscale="log")
        column[-1].set(xlabel=f"tokens a rank, {_on(config)}")
    axes[0, 0].set(ylabel="us")
    legends(axes[0, :1])


# ---- dispatch_combine ---------------------------------------------------------------------------------------------

TODAY = "today, NCCL bf16"
EXCHANGES = {TODAY: "tab:gray", "collective, bf16": "tab:cyan", "collective, mxfp8": "tab:olive",
             "nvlink, bf16": "tab:blue", "nvlink, mxfp8": "tab:red"}
PLANS = (TODAY, "collective", "nvlink")
BIG = {"tokens": 16384, "hidden": 7168, "top_k": 8, "experts": 256, "routing": "random"}  # what the bars speak of


def _gb_per_s(g: Group, name: str) -> float | None:
    ms = g.figure(name)
    return g.rows[name]["bytes"] / ms / 1e6 if ms else None


def exchange_tables(result: dict) -> list[str]:
    keys = ("tokens", "hidden", "top_k", "experts", "routing", "ranks")
    lines, plans = [], []
    for case in _over_cases(result, *keys):
        described = [case[key] for key in keys[:5]]
        for part in ("dispatch", "combine"):
            g = _found(result, part, **case)
            lines.append([*described, part, *(g.figure(name) for name in EXCHANGES),
                          *(_gb_per_s(g, name) for name in list(EXCHANGES)[3:]),
                          *(speedup(g.ratio(TODAY, name)) for name in ("collective, mxfp8", "nvlink, mxfp8"))])
        plan = _found(result, "plan", **case)
        plans.append([*described, *(plan.figure(name) for name in PLANS)])
    case_headers = ["tokens", "hidden", "top-k", "experts", "routing"]
    table = tabulate(lines, [*case_headers, "ms of", "today\nbf16", "collective\nbf16", "\nmxfp8", "nvlink\nbf16",
                             "\nmxfp8", "GB/s\nnvlink bf16", "\nmxfp8", "today over\ncollective mxfp8",
                             "today over\nnvlink mxfp8"],
                     floatfmt=("d", ) * 4 + ("", "") + (".3f", ) * 5 + (".0f", ) * 2 + ("", ""))
    plan_table = tabulate(plans, [*case_headers, "plan, ms\ntoday", "\ncollective", "\nnvlink"],
                          floatfmt=("d", ) * 4 + ("", ) + (".3f", ) * 3)
    dispatch = _found(result, "dispatch", **BIG)
    where = ", ".join(str(value) for value in BIG.values())
    where += f", {_on(dispatch.case)}" if "ranks" in dispatch.case else ""
    ratio = dispatch.ratio(TODAY, "nvlink, mxfp8")
    return [table, plan_table, bars([
        bar("dispatch, nvlink MXFP8 over today's NCCL bf16", [(ratio, where)], 3.0, 3.5)])]


def exchange_plot(result: dict, pyplot) -> None:
    found = {part: groups(result, part) for part in ("dispatch", "combine")}
    names = [", ".join(str(g.case[key]) for key in ("tokens", "hidden", "top_k", "experts", "routing"))
             for g in found["dispatch"]]
    _, axes = pyplot.subplots(1, 2, figsize=(12, 1.5 + 0.35 * len(names)), sharey=True, squeeze=False)
    for axis, (part, cases) in zip(axes[0], found.items(), strict=True):
        for name, color in EXCHANGES.items():
            points = [(g.figure(name), i) for i, g in enumerate(cases) if g.figure(name)]
            if points:
                axis.plot(*zip(*points, strict=True), ".", color=color, label=name)
        axis.set(title=part, xlabel="ms", xscale="log", yticks=range(len(names)), yticklabels=names)
        axis.tick_params(labelsize=7)
        axis.invert_yaxis()
    legends(axes[0, :1])


# ---- moe_layer ----------------------------------------------------------------------------------------------------

AUTOEP, CLASSIC, DROPLESS = "AutoEP bf16", "classic bf16, drops", "classic bf16, dropless"
HP_EXACT, HP_STATIC = "nvlink, mxfp8_wgrad_with_hp", "nvlink, mxfp8_wgrad_with_hp, static"
BF16_EXACT = "nvlink, bf16"
IN_A_ROW = "steps in a row"
LAYER_BAR_CASE = {"tokens": 8192, "dim": 2048, "hidden": 1408, "experts": 64, "top_k": 6}


def _layers(result: dict) -> list[tuple[dict, list[str]]]:
    """Each case with the names of its contenders."""
    return [(case, [row["contender"] for row in result["rows"] if row["case"]["operation"] == "total"
                    and all(row["case"][key] == case[key] for key in case)])
            for case in _over_cases(result, *LAYER_BAR_CASE, "ranks")]


def layer_tables(result: dict) -> list[str]:
    tables, goals = [], []
    for case, names in _layers(result):
        parts = [_found(result, part, **case) for part in PARTS]
        total, in_a_row = parts[-1], _found(result, IN_A_ROW, **case)

        def gib(name, figure, total=total):
            value = total.figure(name, figure)
            return None if value is None else value / 2**30

        lines = [[name, *(g.figure(name) for g in parts), total.figure(name, "host_ms"),
                  speedup(total.ratio(AUTOEP, name)), speedup(total.ratio(DROPLESS, name)),
                  in_a_row.figure(name), speedup(in_a_row.ratio(AUTOEP, name)), gib(name, "peak_bytes"),
                  gib(name, "staging_bytes"), *(total.figure(name, waits) for waits in (
                      "counted_waits", "synchronising_calls", "copies_to_host"))] for name in names]
        tables.append(", ".join(f"{key} {value}" for key, value in case.items()) + "\n" + tabulate(
            lines, ["layer", "forward\nms", "backward\nms", "total\nms", "host\nms", "AutoEP\nover it",
                    "dropless\nover it", "in a row\nms", "AutoEP\nover it", "peak\nGiB", "staging\nGiB",
                    "counted\nhost waits", "synchronising\nCUDA calls", "copies\nto host"],
            floatfmt=("", ) + (".3f", ) * 4 + ("", "", ".3f", "", ".2f", ".2f", "d", "d", "d")))
        if all(case[key] == value for key, value in LAYER_BAR_CASE.items()):
            on = _on(case)
            goals += [bar("nvlink, default recipe over AutoEP bf16", [(total.ratio(AUTOEP, HP_EXACT), on)], 1.55, 2.2),
                      bar("the same over dropless classic bf16", [(total.ratio(DROPLESS, HP_EXACT), on)], 2.2, 3.0),
                      bar("the same over our own bf16", [(total.ratio(BF16_EXACT, HP_EXACT), on)]),
                      bar("steps in a row: over AutoEP bf16", [(in_a_row.ratio(AUTOEP, HP_EXACT), on)]),
                      bar("steps in a row: over our own bf16", [(in_a_row.ratio(BF16_EXACT, HP_EXACT), on)]),
                      bar("host waits, exact", [(total.figure(HP_EXACT, "counted_waits"), on)], 1, 1, most=True),
                      bar("host waits, static", [(total.figure(HP_STATIC, "counted_waits"), on)], 0, 0, most=True),
                      bar("synchronising CUDA calls of both",
                          [(total.figure(name, "synchronising_calls"), f"{name}, {on}")
                           for name in (HP_EXACT, HP_STATIC)], 0, 0, most=True)]
    return [*tables, *([bars(goals)] if goals else [])]


def layer_plot(result: dict, pyplot) -> None:
    layers = _layers(result)
    _, axes = pyplot.subplots(1, len(layers), figsize=(8 * len(layers), 4), squeeze=False)
    for axis, (case, names) in zip(axes[0], layers, strict=True):
        forward, backward = ([_found(result, part, **case).figure(name) or 0 for name in names] for part in PARTS[:2])
        axis.barh(names, forward, color="tab:blue", label="forward")
        axis.barh(names, backward, left=forward, color="tab:orange", label="backward")
        axis.invert_yaxis()
        axis.set(xlabel=f"ms, {_on(case)}, {case['tokens']} tokens, {case['dim']}x{case['hidden']}, {case['experts']} "
                        f"experts, top-{case['top_k']}")
    legends(axes[0])


SHOWN = {"ep_pipeline": (pipeline_tables, pipeline_plot), "latency": (latency_tables, latency_plot),
         "dispatch_combine": (exchange_tables, exchange_plot), "moe_layer": (layer_tables, layer_plot)}
