# SPDX-License-Identifier: Apache-2.0
"""Training on long sequences: tokens per second, memory, and the longest sequence that fits, of AutoEP and ours.

Three parts, with the model, its share of experts ("one rank of") and Liger's kernels as in whole_model.py, one
sequence a step, and activation checkpointing:

- shared: two ranks share a sequence of 128K tokens by DeepSpeed's Ulysses, and its layers' experts. 12 layers, full
  finetuning, ZeRO-1, fused AdamW. Also 32K tokens, and 128K with what checkpoints keep in host memory.
- LoRA: one rank trains the whole model on a sequence of 128K or 32K tokens, its experts frozen in 8 or 4 bits. With 4
  bits, checkpoints may keep attention's results, too.
- longest: how long may a sequence of two ranks be in full finetuning of all layers? By powers of two and the middle
  between two of them, in ZeRO-2, with what checkpoints keep in host memory. AutoEP has torch's fused AdamW; ours has
  FlashAdamW with masters in bf16, and `"expert_turns": 16`. No optimizer is offloaded. Tokens attend to those of their
  block alone, which takes the memory of attention without its time. So these steps have no time that counts.

By itself, AutoEP takes the ranks of Ulysses' mpu for tensor parallelism, and refuses them. Here it gets the wrapper
around the mpu that our engines get (compat/sequences.py).

Kernels are compiled in two steps with short sequences, whose loss is compared, too. Then a shared sequence has one
step that is not timed and two that are; LoRA has one, and a length that is tried has one.

    torchrun --nproc-per-node 2 examples/benchmarks/training/long_sequences.py   # shared, longest
    python examples/benchmarks/training/long_sequences.py                        # LoRA

Rows are added to what the result file has. Where a rank of several runs out of memory, the others wait for it in an
exchange: it writes this down and ends all ranks with status 1. So run it again until the status is 0:

    for i in 1 2 3 4 5 6; do torchrun --nproc-per-node 2 .../long_sequences.py --parts longest && break; done

On the host, what checkpoints keep may be more than a container allows, which nobody can see from inside: --host-gib.
"""

import argparse
import math
import os
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed.comm as dist
import psutil
import torch
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ds_mxfp8_moe.compat.sequences import for_autoep
from lib import models, results_file, run, trainings, world
from lib.world import device, on_gpu
from training import changes
from training.long_sequences_results import (
    ADAPTED,
    HOST_MEMORY,
    IN_TURNS,
    LONGEST,
    SHARED,
    SHOWN,
    SMALLEST,
    TURNS,
)
from training.whole_model import (
    AUTOEP,
    CHECKPOINTING,
    DEFAULT,
    FULL,
    IN_4_BITS,
    IN_8_BITS,
    LORA,
    MODELS,
    Case,
    Training,
    engine_config,
    model_of,
    without_liger,
)

# The keys of each contender's section; None: AutoEP has none. One sequence of this length fills the device between two
# launches of the host, so that attention in CUDA graphs would gain nothing, and would hold its activations.
LONG = {"graph_attention": False}
SECTIONS: dict[str, dict[str, dict | None]] = {
    SHARED: {AUTOEP: None, DEFAULT: {}, TURNS: {"expert_turns": 4}},
    ADAPTED: {IN_8_BITS: LONG | {"frozen_experts": "mxfp8"}, IN_4_BITS: LONG | {"frozen_experts": "mxfp4"},
              IN_TURNS: LONG | {"frozen_experts": "mxfp4", "expert_turns": 4}},
    LONGEST: {AUTOEP: None, SMALLEST: {"expert_turns": 16, "keep_quantized_weights": False}}}
START, MOST = 2, 32  # the first and the longest length to try, as multiples of the sequence of the other parts
BLOCK = 4096  # tokens that attend to each other where attention's time is left out
SHORT, COMPILES = 4096, 2  # tokens of a rank in the steps that compile kernels, and their number
UNTIMED, TIMED = {SHARED: 1, ADAPTED: 0}, {SHARED: 2, ADAPTED: 1}
HOST = 0.9  # of the host's free memory, for what checkpoints keep


@dataclass(frozen=True)
class Long(Case):
    """A case of one sequence a step, which `ranks` share.

    Attributes:
        sequence: tokens of the whole sequence.
        part: SHARED, ADAPTED or LONGEST.
    """

    part: str = SHARED

    def __str__(self) -> str:
        return f"{self.part}, {self.sequence} tokens on {self.ranks} ranks, {CHECKPOINTING[self.checkpointing]}"

    @property
    def tokens(self) -> int:
        """Of a rank."""
        return self.sequence // self.ranks

    @property
    def host_bytes(self) -> int:
        """Of all ranks: the input of each layer. torch rounds each piece of pinned memory up to a power of two."""
        of_layer = 2 * self.tokens * MODELS[self.model]["hidden_size"]
        return self.ranks * self.layers * 2**(of_layer - 1).bit_length()

    def row(self, contender: str) -> dict:
        return {"case": self.described(), "contender": contender}


def cases(model: str) -> dict[Long, Collection[str]]:
    """Those of this many ranks and their contenders, of Qwen3-30B-A3B or of the tiny model. What matters most comes
    first."""
    tiny, ranks = model == "tiny", world.size()
    case = Long(model, FULL, 2 if tiny else 8, 1, 1, MODELS[model]["num_hidden_layers"], ranks,
                sequence=128 if tiny else 2**17, checkpointing=True,
                liger=not without_liger(MODELS[model]["model_type"]))
    if ranks == 1:
        adapted = replace(case, part=ADAPTED, training=LORA, one_rank_of=1)
        return {adapted: SECTIONS[ADAPTED], replace(adapted, sequence=case.sequence // 4): (IN_8_BITS, IN_4_BITS),
                replace(adapted, checkpointing="attention"): (IN_4_BITS, )}
    shared = replace(case, part=SHARED, layers=1 if tiny else 12)
    return {shared: SECTIONS[SHARED], replace(case, part=LONGEST, checkpointing="host"): SECTIONS[LONGEST],
            replace(shared, sequence=case.sequence // 4): (AUTOEP, DEFAULT),
            replace(shared, checkpointing="host"): (DEFAULT, ),
            replace(shared, checkpointing="attention"): (AUTOEP, DEFAULT)}


def ds_config(case: Long, contender: str) -> dict:
    section = SECTIONS[case.part][contender]
    smallest = case.part == LONGEST and section is not None
    config = engine_config(replace(case, optimizer=changes.FLASH_BF16 if smallest else None),
                           AUTOEP if section is None else DEFAULT, 1)
    if section is not None:
        config["mxfp8_moe"] |= section
    if case.part == LONGEST:
        config["zero_optimization"] = {"stage": 2}
    return config


def in_blocks(module: nn.Module, query_BNSD: torch.Tensor, key_BMSD: torch.Tensor, value_BMSD: torch.Tensor,
              *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
    """In the place of transformers' sdpa: causal attention inside blocks. It reads, saves and returns tensors of the
    same sizes. Heads of keys and values are other ones than those of the model."""
    block = math.gcd(BLOCK, query_BNSD.shape[2])
    blocks = [x.reshape(len(x), -1, block, x.shape[-1]) for x in (query_BNSD, key_BMSD, value_BMSD)]
    out = F.scaled_dot_product_attention(*blocks, is_causal=True, enable_gqa=True)
    return out.reshape(query_BNSD.shape).transpose(1, 2).contiguous(), None


@contextmanager
def ulysses(case: Long) -> Iterator[Any]:
    """The mpu of ranks that share sequences, or None. Meanwhile attention exchanges heads between them."""
    if case.ranks == 1:
        yield None
        return
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    plain = ALL_ATTENTION_FUNCTIONS["sdpa"]
    if case.part == LONGEST:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = in_blocks
    try:
        mpu = UlyssesSPAttentionHF.register_with_transformers(
            argparse.Namespace(config=case.config()), "sdpa", case.ranks, micro_batch_size=1)
        yield for_autoep(mpu, stage=1)
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = plain
        parallel_state_sp._release_sequence_parallel_groups()


class LongTraining(Training):
    """Steps of one sequence, which is the same for every contender."""

    def __init__(self, case: Long, contender: str, mpu: Any):
        model = model_of(case)
        of_experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
        super().__init__(case, contender, 1, model, config=ds_config(case, contender), mpu=mpu)
        self.mpu, self.vocabulary = mpu, MODELS[case.model]["vocab_size"]
        self.about |= {"expert_parameters": of_experts // case.ranks,
                       "other_parameters": self.about["parameters"] - of_experts}
        layers = models.moe_layers(self.engine)
        if not layers or SECTIONS[case.part][contender] is not None and not all(
                hasattr(layer, "mxfp8_settings") for layer in layers):
            raise ValueError("MoE layers were not found, or not converted")

    def lengthen(self, tokens: int) -> None:
        """Goes on with a sequence of so many tokens, of which a rank has its part."""
        ids = torch.randint(self.vocabulary, (1, tokens), generator=torch.Generator().manual_seed(tokens))
        batch = {"input_ids": ids, "labels": ids, "position_ids": torch.arange(tokens)[None]}
        if self.mpu is not None:
            group, ranks = self.mpu.get_sequence_parallel_group(), world.size()
            batch = next(UlyssesSPDataLoaderAdapter([batch], world.rank(), group, ranks, device()))
            batch["labels"] = batch["shift_labels"]
        self.batches = [{name: part.to(device()) for name, part in batch.items()}]

    def micro_batch(self, i: int) -> torch.Tensor:
        """Returns this rank's part of the loss, as in guides/long_context.md."""
        batch = self.batches[0]
        loss = self.engine(**batch).loss
        if self.mpu is not None:
            count = (batch["shift_labels"] != -100).sum()
            total = count.clone()
            dist.all_reduce(total, group=self.mpu.get_sequence_parallel_group())
            loss = loss * count / total
        self.engine.backward(loss)
        self.engine.step()
        return loss.detach().float()


def compile_kernels(case: Long, training: LongTraining) -> float:
    """Returns the gradient norm of the first step."""
    training.lengthen(min(case.sequence, SHORT * case.ranks))
    training.step()
    norm = float(training.engine.get_global_grad_norm())
    for _ in range(COMPILES - 1):
        training.step()
    get_accelerator().empty_cache()
    return norm


def peak(training: LongTraining, before: int) -> dict[str, int]:
    """The largest of the ranks', since it was last reset."""
    if not on_gpu():
        return {}
    staging = models.staging_bytes(models.moe_layers(training.engine)[0])
    held = get_accelerator().max_memory_allocated() - before + staging
    return {"peak_bytes": int(world.largest(torch.tensor([held])).item())}


def measure(case: Long, training: LongTraining, before: int) -> dict:
    """Times steps. `before`: bytes that were allocated when there was no engine."""
    norm = compile_kernels(case, training)
    training.lengthen(case.sequence)
    get_accelerator().reset_peak_memory_stats()
    for _ in range(UNTIMED[case.part]):
        training.step()
    times = training.steps_ms(TIMED[case.part])
    ms = sum(times) / len(times)
    losses = world.gathered(torch.stack(training.losses)).sum(0).tolist()  # of the ranks' parts of a sequence
    keys = MODELS[case.model]
    of_expert = case.tokens * keys["num_experts_per_tok"] * case.one_rank_of / keys["num_experts"]
    return {"median_ms": round(ms, 1), "steps": len(times), "tokens_per_s": round(1e3 * case.tokens / ms),
            "tflops": round(case.tokens * training.about["flops_per_token"] / ms / 1e9, 2),
            **peak(training, before), **training.about, **models.experts_in(training.engine, of_expert),
            "losses": [round(loss, 5) for loss in losses], "gradient_norm": round(norm, 6),
            "correct": all(map(math.isfinite, losses))}


def attempt(case: Long, training: LongTraining, before: int) -> dict:
    """One step of the case's length."""
    compile_kernels(case, training)
    training.lengthen(case.sequence)
    get_accelerator().reset_peak_memory_stats()
    ms, = training.steps_ms(1)
    return {"fits": True, "step_ms": round(ms, 1), **peak(training, before), **training.about,
            "correct": bool(torch.isfinite(training.losses[-1]))}


# ---- rows ---------------------------------------------------------------------------------------------------------


def is_out_of_memory(error: Exception) -> bool:
    """Of the device, of pinned memory, or of NCCL."""
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)


def next_length(found: dict[int, bool], start: int, most: int) -> int | None:
    """The length to try after those that were found to fit or not: powers of two times `start`, then the middle."""
    fits, full = (max((n for n, fit in found.items() if fit), default=None),
                  min((n for n, fit in found.items() if not fit), default=None))
    if fits is None:
        return start if full is None else full // 2 if full > start // 8 else None
    if full is None:
        return 2 * fits if fits < most else None
    return (fits + full) // 2 if full == 2 * fits else None


class Runs:
    """What is measured in one run of this script, and where it is written."""

    def __init__(self, args: argparse.Namespace, rows: dict[tuple, dict], commit: str | None):
        self.args, self.rows, self.commit = args, rows, commit

    def lacking(self, case: Long, contender: str) -> Iterator[Long]:
        """The case, unless it has a row; or with each length that is to be tried, one after the other."""
        if case.part != LONGEST:
            if trainings.key(case.row(contender)) not in self.rows:
                yield case
            return
        while True:
            tried = [row for row in self.rows.values() if row["contender"] == contender
                     and {**row["case"], "sequence": case.sequence} == case.described()]
            found = {row["case"]["sequence"]: row["fits"] for row in tried if "fits" in row}
            length = next_length(found, case.sequence * START, case.sequence * MOST)
            if length is None or len(found) < len(tried):  # or it failed for another reason
                return
            longer = replace(case, sequence=length)
            if longer.host_bytes > self.args.host_gib * 2**30:
                self.add(longer, contender, {"fits": False, "correct": True, "why": HOST_MEMORY})
            else:
                yield longer

    def add(self, case: Long, contender: str, said: dict) -> None:
        row = {**case.row(contender), "commit": self.commit, **said}
        self.rows[trainings.key(row)] = row
        trainings.settle(self.rows.values(), (AUTOEP, ))

    def or_end(self, case: Long, contender: str, call: Callable[..., Any], *given: Any) -> Any:
        """`call`'s result. If it runs out of memory beside other ranks, writes this down and ends this process."""
        try:
            return call(*given)
        except Exception as error:
            if world.size() == 1 or not is_out_of_memory(error):
                raise
            said = f"rank {world.rank()}: {type(error).__name__}: {error}"[:300]
            print(f"{said}\nThe other ranks wait for this one, so they end too: run this again", file=sys.stderr)
            try:
                self.add(case, contender, {"fits": False, "correct": True, "why": said} if case.part == LONGEST else
                         {"failure": said, "correct": False})
                results_file.write(SHOWN.benchmark, list(self.rows.values()), self.args.out, self.commit)
            finally:
                sys.stderr.flush()
                os._exit(1)

    def measured(self, case: Long, contender: str, mpu: Any) -> None:
        checked = partial(self.or_end, case, contender)
        said, = trainings.found(partial(checked, LongTraining, case, contender, mpu),
                                [partial(checked, attempt if case.part == LONGEST else measure, case)])
        self.add(case, contender, said)


def fill(args: argparse.Namespace, rows: dict[tuple, dict], commit: str | None) -> Iterator[None]:
    """Adds what the rows lack, and yields whenever they are to be written."""
    args.host_gib = -world.largest(torch.tensor(-args.host_gib)).item()  # ranks may have seen different amounts
    runs = Runs(args, rows, commit)
    for case, contenders in cases(args.model).items():
        if case.part not in args.parts:
            continue
        with ulysses(case) as mpu:
            for contender in contenders:
                for one in runs.lacking(case, contender):
                    if not [*world.in_time([f"{one}, {contender}"], args.seconds)]:
                        return
                    runs.measured(one, contender, mpu)
                    yield
                if case.part == LONGEST:  # rows of lengths that the host cannot hold
                    yield


def main() -> None:
    parser = run.parser(__doc__, seconds=420)  # the last trial may take two minutes more
    parser.add_argument("--parts", nargs="+", choices=SECTIONS, default=[*SECTIONS],
                        help="as far as they are of this many ranks (default: all)")
    parser.add_argument("--model", choices=("Qwen3-30B-A3B", "tiny"), default="Qwen3-30B-A3B" if on_gpu() else "tiny")
    parser.add_argument("--host-gib", type=float, default=HOST * psutil.virtual_memory().available / 2**30,
                        help="of host memory for what the ranks' checkpoints keep (default: %(default).0f, most of "
                        "what is free)")
    parser.set_defaults(out=results_file.RESULTS / f"{SHOWN.benchmark}.json" if on_gpu() else None)
    trainings.complete(SHOWN, parser, fill)


if __name__ == "__main__":
    main()
