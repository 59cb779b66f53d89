# SPDX-License-Identifier: Apache-2.0
"""How many GPUs a training needs: bytes a parameter, and what runs of whole_model.py and from_files.py held
beside them."""

from collections.abc import Collection
from functools import lru_cache

import torch

from lib import show

from .whole_model_results import AUTOEP, DEFAULT, FULL, LORA, MODELS, PLAIN, experts_of

# Bytes of a parameter on its rank: the weight, its gradient, and three float32 numbers of Adam, which ZeRO-1 spreads
# over the ranks that hold the same parameter. Adapters have few parameters.
HELD, SPREAD = {FULL: 4, LORA: 2}, {FULL: 12, LORA: 0}
EXPERTS = {FULL: 16, LORA: 1}  # each is on one rank; with LoRA they are held in MXFP8 alone
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


def state_bytes(model: str, training: str, ranks: int, sharing: int) -> float:
    """Of a rank: weights, gradients and Adam's states. `sharing`: the ranks over which ZeRO spreads what is not an
    expert's."""
    experts, others = parameters_of(model)
    return experts / ranks * EXPERTS[training] + others * (HELD[training] + SPREAD[training] / sharing)


def gpus_needed(model: str, training: str, rest: float, gib: float) -> int | None:
    """The fewest that hold a training in which each rank holds `rest` bytes beside the states."""
    fitting = (n for n in RANKS if n <= experts_of(model)[1]
               and state_bytes(model, training, n, n) + rest < USABLE * gib * 2**30)
    return next(fitting, None)


def memory_text(rows: Collection[dict]) -> str:
    """The table of the guide to memory, from runs of all layers on one rank: those with Liger of whole_model.py, and
    all of from_files.py."""
    lines = []
    for row in rows:
        case = row["case"]
        model, training, share = case["model"], case["training"], case["one_rank_of"]
        peak = row.get("peak_bytes") or row.get("peak_gib", 0) * 2**30
        if (row["contender"] != DEFAULT or not peak or case["layers"] != MODELS[model]["num_hidden_layers"]
                or "files" not in case and (not case["liger"] or case.get("loss"))):
            continue
        rest = peak - state_bytes(model, training, share, 1)
        theirs = [other["peak_bytes"] for other in rows if other["case"] == case and "peak_bytes" in other
                  and other["contender"] in (PLAIN, AUTOEP)]
        how = ", ".join(filter(None, (f"{case['sequences']} x {case['sequence']} tokens", case["checkpointing"])))
        needed = [gpus_needed(model, training, rest, gib) for gib in GPUS.values()]
        lines.append([model, f"{training}, from files in {case['files']}" if "files" in case else training, how,
                      f"one of {share}", show.GIB(min(theirs)) if theirs else None, show.GIB(peak),
                      show.GIB(rest), *(str(n or f"over {RANKS[-1]}") for n in needed), f"{row['tokens_per_s']}"])
    return show.markdown(lines, ["model", "training", "micro-batch", "measured as rank", "peak, DeepSpeed's way, GiB",
                                 "peak, ours, GiB", "of it beside states, GiB", *(f"GPUs of {name}" for name in GPUS),
                                 "tokens/s of a GPU"])
