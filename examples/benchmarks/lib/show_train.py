# SPDX-License-Identifier: Apache-2.0
"""Tables and plot of the training benchmark, and the bars that were set for it (on 8 H200)."""

from tabulate import tabulate

from .tables import Group, bar, bars, groups, speedup

AUTOEP, CLASSIC, OURS_BF16 = "AutoEP bf16", "classic bf16", "ours, bf16"
HP, MXFP8 = "ours, mxfp8_wgrad_with_hp", "ours, mxfp8"
HP_CLASSIC = "ours, mxfp8_wgrad_with_hp, classic"
CONTENDERS = (CLASSIC, AUTOEP, OURS_BF16, HP, MXFP8, HP_CLASSIC)
# Tokens per second of the default recipe over AutoEP's: must reach, aim.
SPEED_BARS = {"deepseek": (1.25, 1.45), "qwen3": (1.25, 1.45), "mixtral": (1.15, 1.35)}
CLASSIC_BAR = (1.4, 1.4)
COLORS = {"attention": "tab:blue", "router": "tab:cyan", "dispatch": "tab:olive", "experts": "tab:orange",
          "combine": "tab:green", "optimizer": "tab:purple", "rest": "tab:gray", "idle": "white"}


def _accumulation(case: dict) -> int:
    """Micro-batches of a step; one in files that do not say it."""
    return case.get("accumulation", 1)


def _where(case: dict) -> str:
    accumulated = f", {_accumulation(case)} micro-batches" if _accumulation(case) > 1 else ""
    return (f"{case['size']}, ZeRO-{case['zero']}, EP {case['ep']} x DP {case['dp']}, "
            f"{'even' if case['routing'] == 'even' else 'own router'}{accumulated}")


def _head(case: dict) -> str:
    return (f"{case['size']}: {case['hidden']}x{case['ffn']}, {case['experts']} experts, top-{case['top_k']}, "
            f"{case['layers']} layers, micro-batches of {case['tokens_per_rank']} tokens on each of {case['ranks']} "
            "ranks; ms of a step, over all its micro-batches")


def _by_model(result: dict) -> dict[str, list[Group]]:
    found: dict = {}
    for group in groups(result):
        found.setdefault(_head(group.case), []).append(group)
    return found


def _gib(value: float | None) -> float | None:
    return None if value is None else value / 2**30


def _failed(result: dict, head: str) -> str:
    """The rows that a model's table lacks since their training failed, each with why."""
    lines = []
    for row in result["rows"]:
        if row.get("failure") and _head(row["case"]) == head:
            why = "out of memory" if "OutOfMemoryError" in row["failure"] else row["failure"]
            lines.append(f"\n  {row['contender']}, {_where(row['case'])}: {why}")
    return "\ndid not run to their end:" + "".join(lines) if lines else ""


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.2%}"


def train_tables(result: dict) -> list[str]:
    tables = []
    for head, cases in _by_model(result).items():
        speeds, parts = [], []
        for g in cases:
            case = g.case
            layout = [f"ZeRO-{case['zero']}", f"{case['ep']} x {case['dp']}", case["routing"]]
            for name in (name for name in CONTENDERS if g.figure(name)):
                row = g.rows[name]
                speeds.append([
                    *layout, _accumulation(case), name, row.get("experts_in"), row["tokens_per_s"],
                    *(row[f"{part}_ms"] for part in ("forward", "backward", "optimizer")), row["median_ms"],
                    row["p90_ms"], speedup(g.ratio(AUTOEP, name)), speedup(g.ratio(CLASSIC, name)),
                    _gib(row.get("peak_bytes")), _gib(row.get("staging_bytes")), _gib(case["predicted_bytes"]),
                    case["tokens_per_expert"], row["fewest_tokens"], row["most_tokens"], row["losses"][-1],
                    _percent(row.get("loss_off")), _percent(row.get("norm_off"))])
                if row.get("breakdown"):
                    parts.append([*layout, name, case["tokens_per_expert"],
                                  *(row["breakdown"].get(part) for part in COLORS)])
        if not speeds:
            tables.append(head + _failed(result, head))
            continue
        tables.append(head + "\n" + tabulate(
            speeds, ["ZeRO", "EP x DP", "routing", "micro-\nbatches", "contender", "experts\nin",
                     "tokens/s", "forward\nms", "backward\nms", "optimizer\nms", "step\nms", "p90\nms",
                     "AutoEP\nover it", "classic\nover it", "peak\nGiB", "of it\nstaging", "by\nformula",
                     "tokens per\nexpert, mean", "\nfewest", "\nmost", "last\nloss", "loss off\nat most",
                     "gradient\nnorm off"],
            floatfmt=("", ) * 6 + (".0f", ) + (".1f", ) * 5 + ("", "", ".1f", ".2f", ".1f", ".0f", "d", "d", ".4f")
            + ("", "")) + _failed(result, head))
        if parts:
            tables.append(f"{head.split(':')[0]}: where the time of a step goes, ms of kernels; those that overlap "
                          "count each\n" + tabulate(
                              parts, ["ZeRO", "EP x DP", "routing", "contender", "tokens per\nexpert", *COLORS],
                              floatfmt=("", ) * 4 + (".0f", ) + (".1f", ) * len(COLORS)))
    commits = {str(row.get("commit"))[:10] for row in result["rows"]}
    mixed = [f"rows of the commits {', '.join(sorted(commits))}"] if len(commits) > 1 else []
    return [*tables, *mixed, bars(_goals(result))]


def _goals(result: dict) -> list[list]:
    found = [g for g in groups(result) if g.case["size"] in SPEED_BARS]

    def where(g: Group) -> str:
        experts_in = g.rows.get(HP, {}).get("experts_in")
        return _where(g.case) + (f", experts in {experts_in}" if experts_in else "")

    ranks = ", ".join(sorted({f"{g.case['ranks']} ranks" for g in found}))
    goals = [bar(f"{size}: tokens/s, default recipe over AutoEP bf16{', ' * bool(ranks)}{ranks}",
                 [(g.ratio(AUTOEP, HP), where(g)) for g in found if g.case["size"] == size], *least_and_aim)
             for size, least_and_aim in SPEED_BARS.items()]
    return [*goals,
            bar("the same over classic bf16", [(g.ratio(CLASSIC, HP), where(g)) for g in found], *CLASSIC_BAR),
            bar("the same over our own bf16", [(g.ratio(OURS_BF16, HP), where(g)) for g in found]),
            bar("peak memory with staging, of AutoEP's", [(g.ratio(name, AUTOEP, "peak_bytes"),
                                                           f"{name}, {_where(g.case)}")
                                                          for g in found for name in (HP, MXFP8)], 1.0, 1.0,
                most=True)]


def train_plot(result: dict, pyplot) -> None:
    cases = groups(result)
    found = [g for g in cases if any(row.get("breakdown") for row in g.rows.values())] or cases
    columns = min(4, len(found))
    lines = -(-len(found) // columns)
    _, axes = pyplot.subplots(lines, columns, figsize=(5 * columns, 0.6 + 2.1 * lines), squeeze=False)
    for axis in axes.flat[len(found):]:
        axis.axis("off")
    for axis, g in zip(axes.flat, found, strict=False):
        names = [name for name in CONTENDERS if g.figure(name)]
        left = [0.0] * len(names)
        for part, color in COLORS.items():
            ms = [(g.rows[name].get("breakdown") or {}).get(part, 0) for name in names]
            axis.barh(names, ms, left=left, color=color, edgecolor="black", linewidth=0.2, label=part)
            left = [a + b for a, b in zip(left, ms, strict=True)]
        axis.plot([g.figure(name) for name in names], names, "k|", markersize=12, label="step, unprofiled")
        axis.set_title(_where(g.case), fontsize=8)
        axis.tick_params(labelsize=7)
        axis.invert_yaxis()
        axis.set_xlabel("ms", fontsize=7)
    axes[0, -1].legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.02, 1))


SHOWN = {"train": (train_tables, train_plot)}
