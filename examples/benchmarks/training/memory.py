# SPDX-License-Identifier: Apache-2.0
"""How many GPUs a training needs: bytes a parameter, and what runs of whole_model.py and from_files.py held
beside them."""

from collections.abc import Collection
from functools import lru_cache

import torch

from lib import show

from . import changes
from .whole_model_results import AUTOEP, DEFAULT, FULL, IN_4_BITS, LORA, MODELS, PLAIN, experts_of

# Bytes of a parameter on its rank: the weight and its gradient in bf16, and what ZeRO-1 spreads over the ranks that
# hold the same parameter: the master and Adam's two moments. Moments of flashoptim have 8 bits, and a scale of 2 bytes
# for each 32 of them. Masters in bf16 are the weights, with 8 or 16 bits of correction. Adapters have few parameters.
IN_8_BITS = 2 * (1 + 2 / 32)
HELD, SPREAD = {FULL: 4, LORA: 2}, {None: 4 + 8, changes.FLASH: 4 + IN_8_BITS, changes.FLASH_BF16: 1 + IN_8_BITS}
# What the guide calls them -> these bytes, and those of masters that are no tensors of their own in ZeRO-1 and 2.
PRECISIONS = {"AdamW": (SPREAD[None], 0), "`FlashAdamW`": (SPREAD[changes.FLASH], 0),
              "`FlashAdamW`, masters in bf16": (SPREAD[changes.FLASH_BF16], 2),
              "the same, `\"master_weight_bits\": 32`": (2 + IN_8_BITS, 2)}
FROZEN_EXPERTS = {"MXFP8": 1, "MXFP4": 17 / 32}  # with LoRA, in this format alone
GPUS = {"80 GiB": 80, "141 GB": 131}  # of memory, as sold, and in GiB
USABLE = 0.95
RANKS = (1, 2, 4, 8, 16, 32, 64)


@lru_cache
def parameters_of(model: str) -> tuple[int, int]:
    """Those of its routed experts, and all others."""
    from transformers import AutoConfig, AutoModelForCausalLM
    keys = dict(MODELS[model])
    with torch.device("meta"):
        net = AutoModelForCausalLM.from_config(AutoConfig.for_model(keys.pop("model_type"), **keys))
    of_experts = sum(p.numel() for name, p in net.named_parameters() if ".experts." in name)
    return of_experts, sum(p.numel() for p in net.parameters()) - of_experts


def state_bytes(model: str, training: str, ranks: int, sharing: int, optimizer: str | None = None,
                held_in: str = "MXFP8") -> float:
    """Bytes of a rank's weights, gradients and Adam's states.

    Args:
        held_in: the format of frozen experts.
        sharing: the ranks over which ZeRO spreads the states of all but the experts, each of which is on one rank.
        optimizer: a case's.
    """
    experts, others = parameters_of(model)
    spread = SPREAD[optimizer] if training == FULL else 0
    of_expert = HELD[FULL] + spread if training == FULL else FROZEN_EXPERTS[held_in]
    return experts / ranks * of_expert + others * (HELD[training] + spread / sharing)


def bytes_of(precision: str, stage: int) -> tuple[float, float, float]:
    """Bytes of a parameter in full finetuning: of an expert that one rank has; of all others, on each rank, and to be
    spread over the ranks. tests/support/held_bytes.py measures them."""
    spread, in_weights = PRECISIONS[precision]
    whole, gradient = HELD[FULL] + spread, 2
    if stage == 3:
        return whole + in_weights, 0, whole + in_weights
    return (whole, HELD[FULL], spread) if stage == 1 else (whole, HELD[FULL] - gradient, gradient + spread)


def bytes_text() -> str:
    """The table of bytes_of."""

    def rounded(count: float) -> str:
        return f"{count:.1f}".removesuffix(".0")

    lines = []
    for precision in PRECISIONS:
        expert, *others = zip(*(bytes_of(precision, stage) for stage in (1, 2, 3)), strict=True)
        lines.append([precision, rounded(expert[0]), rounded(expert[2]),
                      *(" + ".join([rounded(each)] * bool(each) + [f"{rounded(spread)} / N"])
                        for each, spread in zip(*others, strict=True))])
    return show.markdown(lines, ["full finetuning with", "expert, ZeRO-1 and 2", "expert, ZeRO-3",
                                 *(f"others, ZeRO-{stage}" for stage in (1, 2, 3))])


def gpus_needed(model: str, training: str, rest: float, gib: float, optimizer: str | None = None,
                held_in: str = "MXFP8") -> int | None:
    """The fewest that hold a training in which each rank holds `rest` bytes beside the states."""
    fitting = (n for n in RANKS if n <= experts_of(model)[1]
               and state_bytes(model, training, n, n, optimizer, held_in) + rest < USABLE * gib * 2**30)
    return next(fitting, None)


def memory_text(rows: Collection[dict]) -> str:
    """The table of the guide to memory: runs of all layers on one rank, with Liger or from a checkpoint's files.

    Args:
        rows: of whole_model.py and from_files.py, each with the "machine" of its result file.
    """
    lines = []
    for row in rows:
        case = row["case"]
        model, training, share = case["model"], case["training"], case["one_rank_of"]
        optimizer, held_in = case.get("optimizer"), row.get("held_in", "MXFP8")
        peak = row.get("peak_bytes") or row.get("peak_gib", 0) * 2**30
        as_advised = "files" in case or case["liger"] and case.get("loss") == (
            changes.LARGE_CHUNKS if optimizer == changes.FLASH_BF16 else None)
        as_named = row["contender"] == DEFAULT or "files" in case and row["contender"] == IN_4_BITS
        if (not as_named or not peak or case["layers"] != MODELS[model]["num_hidden_layers"]
                or optimizer not in SPREAD or not as_advised):
            continue
        rest = peak - state_bytes(model, training, share, 1, optimizer, held_in)
        theirs = [other["peak_bytes"] for other in rows if other["case"] == case and "peak_bytes" in other
                  and other["contender"] in (PLAIN, AUTOEP)]
        how = ", ".join(filter(None, (f"{case['sequences']} x {case['sequence']} tokens", case["checkpointing"])))
        gpu = row["machine"].split(" x NVIDIA ")[-1].removesuffix(" 80GB HBM3")
        place = f"one of {share}, {gpu}" if case["ranks"] == 1 else f"{share} x {gpu}"
        needed = [gpus_needed(model, training, rest, gib, optimizer, held_in) for gib in GPUS.values()]
        what = [training, optimizer, f"from files in {case['files']}" if "files" in case else None,
                "experts in 4 bits" if held_in == "MXFP4" else None]
        lines.append([model, ", ".join(filter(None, what)), how, place, row["experts_in"],
                      show.GIB(min(theirs)) if theirs else None, show.GIB(peak), show.GIB(rest),
                      *(str(n or f"over {RANKS[-1]}") for n in needed), f"{row['tokens_per_s']}"])
    return show.markdown(lines, ["model", "training", "micro-batch", "measured as rank", "experts in",
                                 "peak, DeepSpeed's way, GiB", "peak, ours, GiB", "of it beside states, GiB",
                                 *(f"GPUs of {name}" for name in GPUS), "tokens/s of a GPU"])
