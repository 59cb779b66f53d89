# SPDX-License-Identifier: Apache-2.0
"""The figures of the README: how much faster trainings run, in bf16 and in MXFP8, and what was measured.

Every figure says what the experts ran in, and is refused where a result file says otherwise: with few tokens for each
expert, a recipe in MXFP8 runs its experts in bf16.
"""

import json
import statistics
import textwrap
from collections.abc import Iterable

from lib import results_file, show
from lib.gains import Gain

from . import changes, convergence_results, train
from .whole_model_results import (
    AUTOEP,
    BF16,
    CASES,
    DEFAULT,
    FASTEST,
    FULL,
    IN_4_BITS,
    LIGER,
    LORA,
    MODELS,
    PLAIN,
    WITHOUT_LIGER,
    experts_of,
    row_of,
)

OVER = {AUTOEP: "DeepSpeed AutoEP", PLAIN: "Transformers"}
# Cases of full finetuning in the picture, by what their script has.
SCRIPTS = {"Liger kernels": FASTEST, "torch.compile": WITHOUT_LIGER, "as in Transformers": {}}
SHAPES = {"deepseek": "DeepSeek-V2-Lite", "qwen3": "Qwen3-30B-A3B", "mixtral": "Mixtral-8x7B"}  # of train.py
ADAPTED = ("Mixtral-8x7B", "gpt-oss-20b", "OLMoE-1B-7B")  # LoRA without Liger
HOW = ("one H200 as one rank of 8, no all-to-all", "4 x H200, with the all-to-all", "one H200, whole models")



def rate(row: dict, experts_in: str) -> float:
    """A row's tokens per second and GPU, to be shown as those of experts in bf16 or in MXFP8.

    Raises:
        ValueError: they ran in something else.
    """
    if row["experts_in"] != experts_in:
        raise ValueError(f"{row['contender']!r} in {row['case']} ran its experts in {row['experts_in']}: "
                         f"this row cannot be shown as {experts_in}")
    return _of_a_gpu(row)


def _of_a_gpu(row: dict) -> float:
    """train.py counts those of all ranks."""
    return row["tokens_per_s"] / (row["case"]["ranks"] if "size" in row["case"] else 1)


def gain(what: str, over: str, base: dict, bf16: dict | None, mxfp8: dict | None) -> Gain:
    """Of rows of one case."""
    peaks = [row.get("peak_bytes") for row in (base, mxfp8 or bf16)]
    return Gain(what, over, _of_a_gpu(base), bf16 and rate(bf16, "bf16"), mxfp8 and rate(mxfp8, "MXFP8"),
                peaks[1] / peaks[0] if all(peaks) else None)


def whole_models(result: dict) -> tuple[list[Gain], list[Gain]]:
    """Full finetuning over AutoEP, and LoRA over transformers."""
    model, found = CASES["short"][0]["model"], ([], [])
    for told, changed in SCRIPTS.items():
        rows = [row_of(result, name, changed) for name in (AUTOEP, BF16, DEFAULT)]
        found[0].append(gain(f"{model}, {told}", AUTOEP, *rows))
    rows = [row_of(result, name, FASTEST, 1) for name in (PLAIN, BF16, DEFAULT)]
    found[1].append(gain(f"{model}, Liger kernels", PLAIN, *rows))
    for group in results_file.groups(result):
        case = group.case
        if case["model"] in ADAPTED and case["training"] == LORA and PLAIN in group.rows:
            rows = [group.rows.get(name) for name in (PLAIN, BF16, DEFAULT)]
            found[1].append(gain(case["model"], PLAIN, *rows))
    return found


def with_exchange(result: dict) -> list[Gain]:
    """GPT-MoEs over AutoEP: even routing, one micro-batch in a step. A recipe that ran in bf16 adds no MXFP8."""
    found = []
    for group in results_file.groups(result):
        case, rows = group.case, group.rows
        if (case["routing"], case["accumulation"], case["zero"]) == ("even", 1, 1) and train.OURS_BF16 in rows:
            mxfp8 = rows[train.HP] if rows[train.HP]["experts_in"] == "MXFP8" else None
            found.append(gain(f"{SHAPES[case['size']]} shapes, {case['layers']} layers", train.AUTOEP,
                              rows[train.AUTOEP], rows[train.OURS_BF16], mxfp8))
    return found


def _spread(gains: Iterable[Gain], which: str) -> str:
    values = sorted(getattr(one, which) / one.base for one in gains if getattr(one, which))
    return " to ".join(dict.fromkeys(f"{value:.2f}x" for value in (values[0], values[-1])))


def lead(full: list[Gain], exchanged: list[Gain], adapted: list[Gain], from_files: Iterable[dict],
         added: list[float]) -> str:
    """The README's bullets.

    Args:
        from_files: rows of from_files.py.
        added: what `added_by_mxfp8` returns.
    """
    first, lora, model = full[0], adapted[0], CASES["short"][0]["model"]
    *large, last = _peaks(from_files)
    split = f"in bf16 {lora.times(lora.bf16)} the speed of {OVER[lora.over]}, " if lora.bf16 else ""
    apart = "" if lora.bf16 else "; this package in bf16 was not measured"
    bf16_alone = [one.what.split(" shapes")[0] for one in exchanged if not one.mxfp8]
    bullets = [
        f"**Full fine-tuning of {model}**, one H200 acting as 1 of 8 ranks, no all-to-all: in bf16 "
        f"{first.times(first.bf16)} the tokens per second of {OVER[first.over]}, **with MXFP8 experts "
        f"{first.times(first.mxfp8)}**, at {first.memory:.0%} of AutoEP's peak memory.",
        f"**Expert parallelism on 4 x H200, with the all-to-all**: in bf16 {_spread(exchanged, 'bf16')} the speed of "
        f"{OVER[exchanged[0].over]}, **with MXFP8 experts {_spread(exchanged, 'mxfp8')}**. Synthetic GPT-MoEs with "
        f"three models' layer shapes; {' and '.join(bf16_alone)}'s experts get too few tokens for MXFP8 and run in "
        "bf16.",
        f"**LoRA of {model}**, the whole model on one H200, no all-to-all: {split}**with MXFP8 experts "
        f"{lora.times(lora.mxfp8)}**, at {lora.memory:.0%} of its peak memory{apart}. LoRA peaks at "
        f"{', '.join(large)} and {last}.",
        f"**MXFP8's own share**: {added[0]:+.0%} to {added[-1]:+.0%} (median {statistics.median(added):+.0%}) over "
        f"this package's bf16, in {len(added)} trainings on H200s that ran both."]
    return "\n".join(textwrap.fill(bullet, 119, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False)
                     for bullet in bullets)


def added_by_mxfp8(results: Iterable[dict]) -> list[float]:
    """The default recipe's speed over bf16's, less 1, ascending: where both ran, and experts did run in MXFP8."""
    found = []
    for result in results:
        for group in results_file.groups(result):
            for recipe, bf16 in ((DEFAULT, BF16), (train.HP, train.OURS_BF16)):
                rows = [group.rows.get(recipe, {}), group.rows.get(bf16, {})]
                if all(row.get("correct") for row in rows) and rows[0]["experts_in"] == "MXFP8":
                    found.append(rows[0]["tokens_per_s"] / rows[1]["tokens_per_s"] - 1)
    return sorted(found)


def _peaks(from_files: Iterable[dict]) -> list[str]:
    """The lowest peak of each model of more than 100 billion parameters, the least first."""
    found: dict = {}
    for row in sorted((row for row in from_files if "peak_gib" in row), key=lambda row: row["peak_gib"]):
        ranks, size = row["case"]["ranks"], (row["parameters"] - row["trained"]) / 1e9
        what = [f"{size:.0f}B", "4-bit experts" if row.get("held_in") == "MXFP4" else "",
                f"on each of {ranks} GPUs" if ranks > 1 else ""]
        if size > 100:
            found.setdefault(row["case"]["model"], f"{row['peak_gib']:.0f} GiB for {row['case']['model']} "
                                                   f"({', '.join(filter(None, what))})")
    return [*found.values()]


# ---- what was measured ----------------------------------------------------------------------------------------------


def hardware_lines(rows: Iterable[dict], adapted: set[int]) -> list[list[str]]:
    """What hardware full finetuning and LoRA were measured on.

    Args:
        rows: of the result files of trainings, each with its file's machine.
        adapted: the numbers of H200s of LoRA.
    """
    rows = [row for row in rows if row["contender"] in (DEFAULT, train.HP) and row["correct"]]

    def told(counts: set[int]) -> str:
        return f"✔ {', '.join(map(str, sorted(counts)))} GPU{'s of one host' * (max(counts) > 1)}"

    def trained(gpu: str) -> str:
        found = [row for row in rows if gpu in row["machine"]]
        in_bf16 = all(row["experts_in"] == "bf16" for row in found)
        used = {min(row["case"]["ranks"], int(row["machine"].split(" x ")[0])) for row in found}  # or ranks share one
        return told(used) + ", experts in bf16" * in_bf16

    return [["H200", trained("H200"), told(adapted)], ["H100", trained("H100"), "no"],
            ["Blackwell", "no: kernels compile, but have not been run", "no"]]


def models_table(trainings: Iterable[dict], found: Iterable[dict], from_files: Iterable[dict]) -> str:
    """Lines for hardware, and one for each model with its speed over DeepSpeed's own way and MXFP8 experts.

    Args:
        trainings: rows of the result files of trainings, each with its file's machine.
        found: prepared results of whole_model.py.
        from_files: rows of from_files.py.
    """
    cells: dict = {}
    rows = [row for result in found for row in result["rows"] if row["contender"] == DEFAULT]
    rows += [row for row in from_files if row["contender"] in (DEFAULT, IN_4_BITS)]
    rows = [row for row in rows if row["correct"] and row["experts_in"] == "MXFP8"]
    for row in rows:
        case = row["case"]
        values = cells.setdefault(case["model"], {}).setdefault(case["training"], {}).setdefault(_where(case), [])
        values += [row["over_deepspeed"]] if "over_deepspeed" in row else []
    lines = [[model, *("; ".join(f"✔ {where}{_range(values)}" for where, values in of.get(kind, {}).items()) or "no"
                       for kind in (FULL, LORA))] for model, of in cells.items()]
    hardware = hardware_lines(trainings, {row["case"]["ranks"] for row in rows if row["case"]["training"] == LORA})
    return show.markdown([*hardware, *lines], ["hardware or model", "full fine-tuning", "LoRA"])


def _where(case: dict) -> str:
    one_of = f" as one of {case['one_rank_of']}" if case["ranks"] == 1 < case["one_rank_of"] else ""
    layers, experts = MODELS[case["model"]]["num_hidden_layers"], experts_of(case["model"])[1]
    held = experts // case["one_rank_of"] * case["ranks"]
    parts = [f"{case['ranks']} x H200{one_of}", "all-to-all" if case["ranks"] > 1 else "",
             "" if case["layers"] == layers else f"{case['layers']} of {layers} layers",
             "" if one_of or held >= experts else f"{held} of {experts} experts",
             f"loaded from {case['files']} files" if "files" in case else ""]
    return ", ".join(filter(None, parts))


def _range(values: list[float]) -> str:
    ends = dict.fromkeys(f"{value:.2f}x" for value in (min(values), max(values))) if values else ()
    return f": {' to '.join(ends)}" if ends else ""


def quality(study: dict) -> str:
    """The paired study of convergence.py in one sentence, of the default recipe. `study`: its result, prepared."""
    found = [row for row in convergence_results.compared(study) if row["contender"] == "default_128"]
    told = ", ".join(f"{row['difference']:+.2%} [{row['low']:+.2%}, {row['high']:+.2%}] at {row['case']['size']}"
                     for row in found)
    return (f"[Quality](examples/guides/quality.md), {found[0]['pairs']} paired runs of each size: held-out loss "
            f"differed from bf16 by {told} parameters (95% intervals).")


def skew(result: dict) -> str:
    """How much longer a step takes where the busiest rank gets 3 times the mean. `result`: of train.py."""
    slowdowns = []
    by_case = {json.dumps(group.case, sort_keys=True): group for group in results_file.groups(result)}
    for group in by_case.values():
        if group.case["routing"] == "fullest rank 3x":
            even = by_case[json.dumps({**group.case, "routing": "even"}, sort_keys=True)]
            ours, theirs = (group.figure(name) / even.figure(name) for name in (train.HP, train.AUTOEP))
            slowdowns.append(f"{ours:.2f}x as long for {SHAPES[group.case['size']]}'s shapes "
                             f"({group.rows[train.HP]['experts_in']}; AutoEP {theirs:.2f}x)")
    return f"When one of 4 H200s gets 3 times the mean load, a step takes {' and '.join(slowdowns)}."


def own_rates(fastest: dict, smallest: dict, in_4_bits: dict) -> str:
    """This package's own figures for the table of others.

    Args:
        fastest: of whole_model.py, prepared, as the others.
        smallest: of its cases "memory".
        in_4_bits: with frozen experts in 4 bits.
    """
    small = FASTEST | {"optimizer": changes.FLASH_BF16}
    full, less = row_of(fastest, DEFAULT, FASTEST), row_of(smallest, DEFAULT, small)
    other = row_of(smallest, DEFAULT, small | {"model": CASES["memory"][-1]["model"]})
    lora = [row["peak_bytes"] / 2**30 for row in (row_of(fastest, DEFAULT, FASTEST, 1),
                                                  row_of(in_4_bits, IN_4_BITS, LIGER, 1))]

    def told(row: dict) -> str:
        return f"{rate(row, 'MXFP8'):,.0f}"

    return textwrap.fill(
        f"Ours were measured on one H200 acting as 1 of 8 ranks, with MXFP8 experts and without the all-to-all. "
        f"{full['case']['model']} trains at {told(full)} tokens/s ({full['tokens_per_s_exchange']:,} with a modeled "
        f"all-to-all), or with 8-bit moments at {told(less)} in {less['peak_bytes'] / 2**30:.0f} GiB. "
        f"{other['case']['model']} trains at {told(other)} ({other['tokens_per_s_exchange']:,}). "
        f"LoRA of the whole {full['case']['model']} takes {lora[0]:.0f} GiB, or "
        f"{lora[1]:.0f} with 4-bit experts.", 119, break_on_hyphens=False)
