# SPDX-License-Identifier: Apache-2.0
"""What the result files of whole_model.py say: measures, derived figures, tables and plots."""

import math
from pathlib import Path

import yaml

from exchange.rates import GPUS_A_HOST, MB, ms_of
from lib import gains, results_file, show
from lib.colors import colors
from lib.gains import Gain
from lib.results_file import Group
from lib.show import Measure, bar

from . import changes
from .step_parts import ATTENTION, ELEMENTWISE, EXPERTS, GRADIENTS, IDLE, LINEARS, LOSS, OPTIMIZER, PARTS

MODELS, CASES, PUBLISHED = yaml.safe_load(Path(__file__).with_name("whole_model.yaml").read_text()).values()
FULL, LORA = "full", "LoRA"
PLAIN, AUTOEP = "transformers bf16", "AutoEP bf16"
BF16, DEFAULT, MXFP8, KEPT = "ours, bf16", "ours, default", "ours, mxfp8", "ours, default, weights kept"
NOT_KEPT, NO_GRAPHS = "ours, default, weights not kept", "ours, default, without CUDA graphs"
IN_8_BITS, IN_4_BITS = "ours, default, frozen experts in 8 bits", "ours, default, frozen experts in 4 bits"
AWARE, AWARE_IN_4_BITS = "ours, default, merge_aware", "ours, default, frozen experts in 4 bits, merge_aware"
# Keys of a case that the guide to fast training changes.
CHANGES = ("attention", "loss", "optimizer", "compiled", "timer")
# What a result file says for a value of whole_model.yaml.
LIGER_TOLD = {False: None, "loss": "Liger's loss", True: "Liger"}
CHECKPOINTING = {False: None, True: "checkpointing", "half": "checkpointing of every other layer",
                 "host": "checkpointing, kept on the host", "attention": "checkpointing, attention kept"}
IN_LAYERS = (EXPERTS, ATTENTION, LINEARS, ELEMENTWISE, IDLE)


def experts_of(model: str) -> tuple[str, int]:
    """The key of a model's config that says how many experts a layer has, and what it says."""
    return next((key, n) for key, n in MODELS[model].items()
                if key in ("num_experts", "num_local_experts", "n_routed_experts"))


# ---- derived figures ----------------------------------------------------------------------------------------------


def all_layers_ms(row: dict) -> float | None:
    """A step with all layers of the model, where fewer were measured."""
    case = row["case"]
    more = MODELS[case["model"]]["num_hidden_layers"] / case["layers"]
    if more == 1 or "busy_ms" not in row:
        return None
    outside = row["trained_outside_layers"] / row["trained"]
    return (row[f"{LOSS}_ms"] + more * sum(row[f"{name}_ms"] for name in IN_LAYERS)
            + (outside + more * (1 - outside)) * sum(row[f"{name}_ms"] for name in (GRADIENTS, OPTIMIZER)))


def exchange_ms(row: dict) -> float | None:
    """Dispatch and combine of a step's layers between the ranks of one host, one after the other. None: they were
    measured, or the ranks are not those of one host."""
    case, model = row["case"], MODELS[row["case"]["model"]]
    ranks, top_k, hidden = case["one_rank_of"], model["num_experts_per_tok"], model["hidden_size"]
    if case["ranks"] > 1 or not 1 < ranks <= GPUS_A_HOST or "experts_in" not in row:
        return None
    experts = experts_of(case["model"])[1]
    missed = math.comb(experts - experts // ranks, top_k) / math.comb(experts, top_k)  # ranks that a token skips
    mtokens = case["sequences"] * case["sequence"] / MB
    narrow = hidden * 33 / 32 + 4 * top_k if row["experts_in"] == "MXFP8" else 2 * hidden
    once = sum(ms_of(operation)((ranks - 1) * (1 - missed) * bytes_of_token * mtokens, top_k * hidden * mtokens)
               for operation, bytes_of_token in (("dispatch", narrow), ("combine", 2 * hidden)))
    passes = 2 + (case["checkpointing"] is not None)  # backward dispatches and combines too
    return once * passes * case["layers"] * case["micro_batches"]


def derived(row: dict, group: Group) -> dict:
    """What follows from a row and the other contenders of its case."""
    if "median_ms" not in row:
        return {}
    ms, exchange = row["median_ms"], exchange_ms(row)
    deepspeed = group.figure(AUTOEP) or group.figure(PLAIN)
    best = min(filter(None, map(group.figure, (BF16, DEFAULT, KEPT))), default=None)
    step_ms = {"tokens_per_s_all_layers": all_layers_ms(row), "tokens_per_s_exchange": exchange and ms + exchange}
    return {**{name: round(row["tokens_per_s"] * ms / other) for name, other in step_ms.items() if other},
            **({"over_deepspeed": deepspeed / ms} if deepspeed else {}), **({"of_best": best / ms} if best else {})}


def prepare(result: dict) -> list[dict]:
    group_of = {str(group.case): group for group in results_file.groups(result)}
    return [{**row, **derived(row, group_of[str(row["case"])])} for row in result["rows"]]


# ---- tables and plots ---------------------------------------------------------------------------------------------


def is_changed(case: dict) -> bool:
    return any(case.get(key) for key in CHANGES)


def is_full(case: dict) -> bool:
    return case["training"] == FULL and not is_changed(case)


RATE = {"figure": "tokens_per_s", "form": "{:.0f}", "when": is_full}
SHORT = {"model": "Qwen3-30B-A3B", "one_rank_of": 8, "sequences": 1, "micro_batches": 8}  # full training's case there
MEASURES = [
    Measure(f"full, tokens per second of a GPU: {DEFAULT}", (DEFAULT, ), bars=(bar(16500, liger="Liger", **SHORT), ),
            **RATE),
    Measure(f"full, tokens per second of a GPU: {MXFP8}", (MXFP8, ), bars=(bar(17000, liger="Liger", **SHORT), ),
            **RATE),
    Measure(f"full, tokens per second: {DEFAULT} over DeepSpeed, AutoEP or else transformers", (DEFAULT, ),
            figure="over_deepspeed", when=is_full, bars=(bar(1.35), )),
    Measure(f"full, tokens per second: {DEFAULT} over {AUTOEP}", (DEFAULT, ), AUTOEP, when=is_full,
            bars=(bar(1.65, liger="Liger", **SHORT), bar(1.55, liger=None, **SHORT))),
    Measure(f"LoRA, tokens per second: {DEFAULT} over {PLAIN}", (DEFAULT, ), PLAIN,
            when=lambda case: case["training"] == LORA,
            bars=(bar(1.7, model=SHORT["model"], liger=None), bar(2.0, model=SHORT["model"], liger="Liger"))),
    Measure(f"full, tokens per second: {DEFAULT} over {BF16}", (DEFAULT, ), BF16, when=is_full,
            bars=(bar(1.05, liger="Liger", **SHORT), )),
    Measure(f"full, tokens per second: {MXFP8} over {BF16}", (MXFP8, ), BF16, when=is_full,
            bars=(bar(1.08, liger="Liger", **SHORT), )),
    Measure(f"tokens per second: {DEFAULT} over the fastest of itself, {BF16}, and with weights kept", (DEFAULT, ),
            figure="of_best", when=lambda case: not is_changed(case), bars=(bar(0.99), )),
    Measure(f"peak memory: {DEFAULT}, of {AUTOEP}'s", (DEFAULT, ), AUTOEP, "peak_bytes", better=show.SMALLER,
            form="{:.1%}")]


def panels(result: dict, figure: str) -> dict[str, dict[str, dict[str, float]]]:
    keys, found = show.varying(result), {}
    groups = results_file.groups(result)
    for group in [group for group in groups if not is_changed(group.case)] or groups:
        bars = {results_file.shown_name(row): {figure: row[figure]} for row in group.rows.values() if row.get(figure)}
        if bars:
            found[show.described(group.case, keys)] = bars
    return found


def plot(result: dict, pyplot) -> None:
    """Every case as it is by default: beside the faster of AutoEP and transformers, this package in bf16 and MXFP8."""
    named = ("model", "training", "one_rank_of", "ranks", "sequences", "micro_batches", "layers")
    keys, found = [key for key in show.varying(result) if key not in named], {}
    groups = results_file.groups(result)
    for group in [group for group in groups if not is_changed(group.case)] or groups:
        rates = {name: row["tokens_per_s"] for name, row in group.rows.items() if row.get("tokens_per_s")}
        of = {experts: [rates[name] for name in (DEFAULT, BF16) if name in rates and group.rows[name]["experts_in"] ==
                        experts] for experts in ("bf16", "MXFP8")}
        if any(of.values()):
            over = max((name for name in (AUTOEP, PLAIN) if name in rates), key=rates.get, default=None)
            case = group.case
            title = (f"{'Full fine-tuning' if case['training'] == FULL else LORA}, {case['ranks']} GPU"
                     f"{'s' * (case['ranks'] > 1)} of {case['one_rank_of']}; micro-batches x sequences")
            layers = MODELS[case["model"]]["num_hidden_layers"]
            parts = [case["model"], "" if case["layers"] == layers else f"{case['layers']} of {layers} layers",
                     f"{case['micro_batches']} x {case['sequences']}", show.described(case, keys)]
            found.setdefault(title, []).append(Gain(
                ", ".join(filter(None, parts)), over, rates.get(over), *(max(of[one], default=None) for one in of),
                None))
    gains.plot(found, pyplot, absolute=True)


def plot_memory(result: dict, pyplot) -> None:
    found = panels(result, "peak_bytes")
    show.dots(pyplot, {"": {case: {name: of["peak_bytes"] / 2**30 for name, of in bars.items()}
                            for case, bars in found.items()}}, "peak memory, GiB")


def plot_parts(result: dict, pyplot) -> None:
    """One bar for each contender; a part has the same color in all of them."""
    keys, found = show.varying(result), {}
    for row in result["rows"]:
        if "busy_ms" in row:
            parts = {told: row[f"{name}_ms"] for name, told in PARTS.items()}
            found.setdefault(show.described(row["case"], keys), {})[row["contender"]] = parts
    show.stacked(pyplot, found, "ms of a step", colors(PARTS.values()))


def more_plots(result: dict) -> dict:
    plots = {"memory": ("peak_bytes", plot_memory), "parts": ("busy_ms", plot_parts)}
    return {name: draw for name, (figure, draw) in plots.items() if any(figure in row for row in result["rows"])}


def published(result: dict) -> list[str]:
    there = {row["case"]["model"] for row in result["rows"]}
    return [f"- Published for {one['model']}, with the exchange: {one['tokens_per_s']} tokens/s of a GPU by "
            f"[{one['who']}]({one['source']}), {one['how']}." for one in PUBLISHED if one["model"] in there]


# ---- single rows --------------------------------------------------------------------------------------------------

LIGER = {"liger": "Liger"}
FASTEST = LIGER | {"loss": changes.LARGE_CHUNKS}


def row_of(result: dict, contender: str, changed: dict, first: int = 0) -> dict | None:
    """The row of a case of "short", the `first` there, with what is changed in it."""
    wanted = {**dict.fromkeys((*CHANGES, "liger")), "checkpointing": False, **CASES["short"][first], **changed}
    wanted["checkpointing"] = CHECKPOINTING[wanted["checkpointing"]]
    return next((row for row in result["rows"] if row["contender"] == contender
                 and all(row["case"].get(key) == value for key, value in wanted.items())), None)


# ---- the guide to fast training -----------------------------------------------------------------------------------

# What a line is called, its contender, and how its case differs from the first one of "short".
LOSS_ALONE, COMPILED = {"liger": "Liger's loss"}, {"compiled": changes.BETWEEN}
WITHOUT_LIGER = COMPILED | {"loss": changes.IN_CHUNKS}
LARGER = FASTEST | {"sequences": 2, "micro_batches": 4}
STEPS = (("transformers with DeepSpeed", PLAIN, {}), ("AutoEP, by `expert_parallel`", AUTOEP, {}),
         ('this package, by `mxfp8_moe` with `"recipe": "bf16"`', BF16, {}),
         ("its default recipe, experts in MXFP8", DEFAULT, {}),
         ("Liger's norms, RoPE and loss", DEFAULT, LIGER), ("its loss in large chunks", DEFAULT, FASTEST),
         ('`"recipe": "mxfp8"`', MXFP8, FASTEST))
IN_BF16 = 'the same, `"recipe": "bf16"`'
INSTEAD = (('`"recipe": "bf16"`', BF16, FASTEST),
           *((changes_of["loss"], DEFAULT, FASTEST | changes_of) for changes_of in (
               {"loss": changes.IN_CHUNKS}, {"loss": changes.TILED}, {"loss": changes.OWN})),
           *((f"attention by {kind}", DEFAULT, FASTEST | {"attention": kind})
             for kind in (*changes.SDPA, "flex_attention")),
           *((kind, DEFAULT, FASTEST | {"optimizer": kind})
             for kind in (*changes.OPTIMIZERS, changes.FLASH, changes.FLASH_BF16) if kind),
           ("Liger's loss without its norms and RoPE", DEFAULT, FASTEST | LOSS_ALONE),
           ("Liger's loss alone, compiled between the MoE layers", DEFAULT, FASTEST | LOSS_ALONE | COMPILED),
           (IN_BF16, BF16, FASTEST | LOSS_ALONE | COMPILED),
           ("without Liger, loss in chunks, compiled between the MoE layers", DEFAULT, WITHOUT_LIGER),
           (IN_BF16, BF16, WITHOUT_LIGER), ('the same, `"recipe": "mxfp8"`', MXFP8, WITHOUT_LIGER),
           ("DeepSpeed's throughput timer waits for the device", DEFAULT, FASTEST | {"timer": changes.WAITS}),
           ("quantized weights not kept", NOT_KEPT, FASTEST), ("attention without CUDA graphs", NO_GRAPHS, FASTEST),
           ("4 micro-batches of 2 sequences, as many tokens a step", DEFAULT, LARGER),
           ("the same, checkpointing every other layer", DEFAULT,
            LARGER | {"checkpointing": "half"}),
           ("the same, checkpointing all layers", DEFAULT, LARGER | {"checkpointing": True}),
           ("the same, quantized weights not kept", NOT_KEPT, LARGER | {"checkpointing": True}))


def step_lines(result: dict, steps: tuple, over: dict | None = None) -> list[list]:
    """A line for each step that was measured. `over`: the row that all are compared with, in place of the last."""
    lines, last = [], over
    for told, contender, changed in steps:
        row = row_of(result, contender, changed)
        if row is not None and "median_ms" not in row:
            lines.append([told, "out of memory" if "memory" in row["failure"] else "failed", None, None])
        elif row is not None:
            lines.append([told, f"{row['tokens_per_s']}", last and f"{last['median_ms'] / row['median_ms']:.2f}x",
                          show.GIB(row["peak_bytes"]) if "peak_bytes" in row else None])
            last = over or row
    return lines


def steps_text(result: dict) -> str:
    """The tables of the guide to fast training."""
    lines = step_lines(result, STEPS)
    runs = f"[runs, commits and hosts](../benchmarks/results/{SHOWN.benchmark}.md)"
    parts = [f"Each line adds to those above. On {result['machine']}, {result['date'][:10]} ({runs}):",
             show.markdown(lines, ["script", "tokens/s of a GPU", "of the line above", "peak, GiB"])]
    fastest = row_of(result, DEFAULT, FASTEST)
    if fastest and (instead := step_lines(result, INSTEAD, fastest)):
        parts += ["The line with the loss in large chunks, with something else instead:",
                  show.markdown(instead, ["instead", "tokens/s of a GPU", "of that line", "peak, GiB"])]
    flex, eager = (row_of(result, DEFAULT, CASES["full"][0] | LIGER | changed)
                   for changed in ({}, {"attention": "eager"}))
    if flex and eager and "median_ms" in flex and "median_ms" in eager:
        parts.append(f"gpt-oss-20b with `flex_attention` has {eager['median_ms'] / flex['median_ms']:.2f} times the "
                     "tokens/s that it has with `eager`.")
    return "\n\n".join(parts)


SHOWN = show.Shown(
    "whole_model", MEASURES,
    [("experts in", "experts_in", "{}"), ("tokens/s of a GPU", "tokens_per_s", "{}"),
     ("p10", "tokens_per_s_p10", "{}"), ("p90", "tokens_per_s_p90", "{}"),
     ("all layers (derived)", "tokens_per_s_all_layers", "{}"),
     ("with its exchange (model)", "tokens_per_s_exchange", "{}"), ("TFLOP/s", "tflops", "{:.4g}"),
     ("utilization", "utilisation", "{:.1%}"), ("peak, GiB", "peak_bytes", show.GIB),
     ("step, ms", "median_ms", "{:.1f}"),
     *((f"{told}, ms", f"{name}_ms", "{:.1f}") for name, told in PARTS.items()), ("loss off", "loss_off", "{:.2%}"),
     ("gradient norm off", "norm_off", "{:.2%}"), ("commit", "commit", "{:.10}")],
    plot, wide=False, ratios=((AUTOEP, DEFAULT), (PLAIN, DEFAULT)), prepare=prepare, sentences=published,
    more_plots=more_plots)
