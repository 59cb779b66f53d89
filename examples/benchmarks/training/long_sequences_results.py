# SPDX-License-Identifier: Apache-2.0
"""What the result files of long_sequences.py say: the parts of peaks, the longest sequences, tables and plot."""

from typing import Any

from lib import show
from lib.show import Measure, bar

from . import memory
from .whole_model_results import AUTOEP, DEFAULT, IN_4_BITS, IN_8_BITS, LORA, MODELS

SHARED, ADAPTED, LONGEST = "shared", LORA, "longest"
TURNS, IN_TURNS = "ours, default, 4 expert turns", f"{IN_4_BITS}, 4 expert turns"
SMALLEST = "ours, default, FlashAdamW, 16 expert turns"


def states_bytes(row: dict) -> float:
    """Of a rank: weights, gradients and the optimizer's states, as guides/memory.md counts them."""
    ranks, part, experts, others = row["case"]["ranks"], row["case"]["part"], row["expert_parameters"], row[
        "other_parameters"]
    if part == ADAPTED:
        held_in = "MXFP8" if row["contender"] == IN_8_BITS else "MXFP4"
        return memory.FROZEN_EXPERTS[held_in] * experts + memory.HELD[LORA] * others
    precision = "`FlashAdamW`, masters in bf16" if row["contender"] == SMALLEST else "AdamW"
    of_expert, held, spread = memory.bytes_of(precision, 2 if part == LONGEST else 1)
    return of_expert * experts + (held + spread / ranks) * others


def split(row: dict) -> dict:
    """The peak's parts: states, what checkpoints keep on the device, and the rest of each token of a rank."""
    if "peak_bytes" not in row:
        return {}
    case = row["case"]
    tokens, on_device = case["sequence"] / case["ranks"], "host" not in case["checkpointing"]
    kept = 2 * case["layers"] * tokens * MODELS[case["model"]]["hidden_size"]
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
    longest = {}
    for contender, those in tried.items():
        fits = max((row for row in those if row.get("fits")), key=lambda row: row["case"]["sequence"], default=None)
        full = min((row["case"]["sequence"] for row in those if not row.get("fits")), default=None)
        longest[contender] = fits and fits["case"]["sequence"]
        found = {**(fits | split(fits) if fits else those[0]), "longest": longest[contender], "too_long": full,
                 "correct": all(row["correct"] for row in those)}
        if longest.get(AUTOEP) and longest[contender]:
            found["times"] = longest[contender] / longest[AUTOEP]
        rows.append({**found, "case": {**those[0]["case"], "sequence": None}})
    return rows


def plot(result: dict, pyplot: Any) -> None:
    """Peaks, by their parts."""
    panels: dict = {}
    for row in result["rows"]:
        if "states_bytes" in row:
            title = f"{row['case']['part']}, sequence of {(row.get('longest') or row['case']['sequence']) // 1024}K"
            on_device = "host" not in row["case"]["checkpointing"]
            kept = row["kept_bytes"] * on_device
            parts = {"states": row["states_bytes"], "kept by checkpoints": kept,
                     "the rest": row["peak_bytes"] - row["states_bytes"] - kept}
            panels.setdefault(title, {})[row["contender"]] = {name: n / 2**30 for name, n in parts.items()}
    show.stacked(pyplot, panels, "peak memory of a rank, GiB")


SHOWN = show.Shown(
    "long_sequences",
    [Measure(f"tokens per second: {DEFAULT} over {AUTOEP}", (DEFAULT, ), AUTOEP,
             when=lambda case: case["part"] == SHARED, bars=(bar(1.2), )),
     Measure("LoRA, peak memory, GiB", (IN_8_BITS, IN_4_BITS, IN_TURNS), figure="peak_gib", better=show.SMALLER,
             form="{:.1f}", when=lambda case: case["part"] == ADAPTED, bars=(bar(100), )),
     Measure(f"longest sequence over {AUTOEP}'s", (SMALLEST, ), figure="times", bars=(bar(2), ))],
    [("experts in", "experts_in", "{}"), ("tokens/s of a GPU", "tokens_per_s", "{}"),
     ("step, ms", "median_ms", "{:.0f}"), ("TFLOP/s", "tflops", "{:.4g}"), ("longest, tokens", "longest", "{}"),
     ("too long, tokens", "too_long", "{}"), ("peak, GiB", "peak_bytes", show.GIB),
     ("states, GiB", "states_bytes", show.GIB), ("kept by checkpoints, GiB", "kept_bytes", show.GIB),
     ("the rest, KiB a token", "rest_kib", "{:.1f}"), ("loss off", "loss_off", "{:.2%}"),
     ("commit", "commit", "{:.10}")],
    plot, wide=False, ratios=((AUTOEP, DEFAULT), ), prepare=prepare,
    note="States are computed, as in the guide to memory. The rest is the peak without them, and without what "
         "checkpoints keep unless that is on the host.")
