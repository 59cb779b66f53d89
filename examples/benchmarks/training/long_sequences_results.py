# SPDX-License-Identifier: Apache-2.0
"""What the result files of long_sequences.py say: the parts of peaks, the longest sequences, tables and plot."""

from typing import Any

from lib import show
from lib.show import Measure, bar

from . import changes, memory
from .whole_model_results import AUTOEP, CHECKPOINTING, DEFAULT, FULL, IN_4_BITS, IN_8_BITS, LORA, MODELS

SHARED, ADAPTED, LONGEST = "shared", LORA, "longest"
TURNS, IN_TURNS = "ours, default, 4 expert turns", f"{IN_4_BITS}, 4 expert turns"
HOST_MEMORY = "host memory"
ATTENTION_KEPT = CHECKPOINTING["attention"]
SMALLEST = "ours, default, FlashAdamW, 16 expert turns"
OF_ADAPTER = memory.HELD[FULL] + memory.SPREAD[None]  # bytes of a parameter, with AdamW


def states_bytes(row: dict) -> float:
    """Of a rank: weights, gradients and the optimizer's states, as guides/memory.md counts them, and adapters."""
    case, ranks = row["case"], row["case"]["ranks"]
    if case["part"] == ADAPTED:
        held_in = "MXFP8" if row["contender"] == IN_8_BITS else "MXFP4"
        return memory.state_bytes(case["model"], LORA, ranks, ranks, held_in=held_in) + row["trained"] * OF_ADAPTER
    precision = "`FlashAdamW`, masters in bf16" if row["contender"] == SMALLEST else "AdamW"
    of_expert, held, spread = memory.bytes_of(precision, 2 if case["part"] == LONGEST else 1)
    return of_expert * row["expert_parameters"] + (held + spread / ranks) * row["other_parameters"]


def split(row: dict) -> dict:
    """The peak's parts: states, what checkpoints keep on the device, and the rest of each token of a rank."""
    if "peak_bytes" not in row:
        return {}
    case = row["case"]
    tokens, on_device = case["sequence"] / case["ranks"], "host" not in case["checkpointing"]
    keys = MODELS[case["model"]]
    sizes = [keys["hidden_size"]]
    if case["checkpointing"] == ATTENTION_KEPT:
        sizes.append(keys["num_attention_heads"] * keys["head_dim"])
    kept = 2 * case["layers"] * tokens * sum(sizes)
    states = states_bytes(row)
    rest = row["peak_bytes"] - states - on_device * kept
    return {"peak_gib": row["peak_bytes"] / 2**30, "states_bytes": states, "kept_bytes": kept,
            "rest_kib": rest / tokens / 2**10}


def prepare(result: dict) -> list[dict]:
    """Rows with the parts of their peaks. Those of lengths that were tried are one row for each contender."""
    rows, tried = [], {}
    for row in result["rows"]:
        if row["case"]["part"] == LONGEST:
            tried.setdefault(row["contender"], []).append(row)
        else:
            rows.append(row | split(row))
    longest = {name: of_tried(those) for name, those in tried.items()}
    of_autoep = longest.get(AUTOEP, {}).get("longest")
    return rows + [row | ({"times": row["longest"] / of_autoep} if of_autoep and row["longest"] else {})
                   for row in longest.values()]


def of_tried(rows: list[dict]) -> dict:
    """The row of the longest sequence that fits, with the shortest one that does not, and the peaks of all."""
    rows = sorted((row | split(row) for row in rows), key=lambda row: row["case"]["sequence"])
    fits, full = ([row for row in rows if row.get("fits", False) is fit] for fit in (True, False))
    return {**(fits[-1] if fits else full[0]), "case": {**rows[0]["case"], "sequence": None},
            "longest": fits[-1]["case"]["sequence"] if fits else None,
            "too_long": full[0]["case"]["sequence"] if full else None,
            "lacking": (HOST_MEMORY if full[0].get("why") == HOST_MEMORY else "the device's memory") if full else None,
            "rests": {row["case"]["sequence"]: row["rest_kib"] for row in fits if "rest_kib" in row},
            "correct": all(row["correct"] for row in rows)}


def sentences(result: dict) -> list[str]:
    return [f"- {row['contender']}, the rest by the length of the sequence: " + ", ".join(
        f"{kib:.1f} KiB a token at {length // 1024}K" for length, kib in row["rests"].items()) + "."
        for row in result["rows"] if row.get("rests")]


def plot(result: dict, pyplot: Any) -> None:
    """Peaks, by their parts."""
    panels: dict = {}
    for row in result["rows"]:
        if "states_bytes" in row:
            on_device = "host" not in row["case"]["checkpointing"]
            title = (f"{row['case']['part']}, {(row.get('longest') or row['case']['sequence']) // 1024}K tokens"
                     f"{'' if on_device else ', checkpoints on the host'}")
            kept = row["kept_bytes"] * on_device
            parts = {"states": row["states_bytes"], "kept by checkpoints": kept,
                     "the rest": row["peak_bytes"] - row["states_bytes"] - kept}
            panels.setdefault(title, {})[row["contender"]] = {name: n / 2**30 for name, n in parts.items()}
    show.stacked(pyplot, panels, "peak memory of a rank, GiB")


# ---- the guide to long context ------------------------------------------------------------------------------------

LENGTHS, RANKS = {"32K": 2**15, "128K": 2**17, "1M": 2**20}, (1, 2, 4, 8)
# What the guide calls a contender, with the training, the optimizer and the format of frozen experts that it has.
PLANS = {SMALLEST: ("full finetuning, FlashAdamW, checkpoints on the host, 16 expert turns", FULL, changes.FLASH_BF16,
                    None),
         IN_8_BITS: ("LoRA, experts in 8 bits", LORA, None, "MXFP8"),
         IN_4_BITS: ("LoRA, experts in 4 bits", LORA, None, "MXFP4")}


def needed_bytes(row: dict, sequence: int, ranks: int) -> float:
    """Of a rank, if `ranks` share a sequence and the experts of a row's training: the guide's formula."""
    _, training, optimizer, held_in = PLANS[row["contender"]]
    model, tokens = row["case"]["model"], sequence / ranks
    keys, on_device = MODELS[model], "host" not in row["case"]["checkpointing"]
    states = memory.state_bytes(model, training, ranks, ranks, optimizer, held_in or "MXFP8")
    if training == LORA:
        states += row["trained"] * OF_ADAPTER / ranks
    kept = 2 * keys["num_hidden_layers"] * keys["hidden_size"] * on_device
    return states + tokens * (kept + 2**10 * row["rest_kib"])


def guide_text(result: dict) -> str:
    """How many GPUs a sequence needs by the formula, with `r` as the longest one has it."""
    found: dict[str, dict[int, dict]] = {name: {} for name in PLANS}
    for row in map(lambda row: row | split(row), result["rows"]):
        if "rest_kib" in row and row["contender"] in PLANS and row["case"]["checkpointing"] != ATTENTION_KEPT:
            found[row["contender"]][row["case"]["sequence"]] = row
    lines = []
    for name, rows in found.items():
        if rows:
            of_lengths = [[next((n for n in RANKS if needed_bytes(rows[max(rows)], sequence, n)
                                 < memory.USABLE * gib * 2**30), None) for gib in memory.GPUS.values()]
                          for sequence in LENGTHS.values()]
            lines.append([PLANS[name][0],
                          ", ".join(f"{row['rest_kib']:.0f} at {n // 1024}K" for n, row in sorted(rows.items())),
                          *(" / ".join(str(n or f"over {RANKS[-1]}") for n in of) for of in of_lengths)])
    return show.markdown(lines, ["Qwen3-30B-A3B", "r, KiB a token, with tokens in all", *(
        f"{length}: GPUs of {' / '.join(memory.GPUS)}" for length in LENGTHS)])


SHOWN = show.Shown(
    "long_sequences",
    [Measure(f"tokens per second: {DEFAULT} over {AUTOEP}", (DEFAULT, ), AUTOEP,
             when=lambda case: case["part"] == SHARED, bars=(bar(1.2, sequence=2**17), )),
     Measure("LoRA, peak memory, GiB", (IN_8_BITS, IN_4_BITS, IN_TURNS), figure="peak_gib", better=show.SMALLER,
             form="{:.1f}", when=lambda case: case["part"] == ADAPTED, bars=(bar(100), )),
     Measure(f"longest sequence over {AUTOEP}'s", (SMALLEST, ), figure="times", bars=(bar(2), ))],
    [("experts in", "experts_in", "{}"), ("tokens/s of a GPU", "tokens_per_s", "{}"),
     ("step, ms", "median_ms", "{:.0f}"), ("TFLOP/s", "tflops", "{:.4g}"), ("longest, tokens", "longest", "{}"),
     ("too long, tokens", "too_long", "{}"),
     ("for lack of", "lacking", "{}"), ("peak, GiB", "peak_bytes", show.GIB),
     ("states, GiB", "states_bytes", show.GIB), ("kept by checkpoints, GiB", "kept_bytes", show.GIB),
     ("the rest, KiB a token", "rest_kib", "{:.1f}"), ("loss off", "loss_off", "{:.2%}"),
     ("commit", "commit", "{:.10}")],
    plot, wide=False, ratios=((AUTOEP, DEFAULT), ), prepare=prepare,
    sentences=sentences,
    note="States are computed, as in the guide to memory. The rest is the peak without them, and without what "
         "checkpoints keep unless that is on the host.")
