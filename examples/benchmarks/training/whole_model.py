# SPDX-License-Identifier: Apache-2.0
"""Training whole Hugging Face models in DeepSpeed as their users do: tokens per second, memory, and where a step's
time goes, of plain transformers, AutoEP and ours in every recipe.

Real configurations with random weights: whole_model.yaml has them, the cases, and what others publish. Full finetuning
and LoRA by PEFT on attention and experts, with Liger's norms, rope and loss and without, in ZeRO-1 with fused AdamW.
A case may change attention, loss, optimizer, compilation and DeepSpeed's timer (changes.py).

A rank holds its share of the experts of N ranks ("one rank of"), and everything else whole. So each expert gets as
many tokens as with N ranks, and the optimizer has more to do, since it does not share the other parameters. One rank
exchanges nothing. Over several, as many experts for each are spread.

    python examples/benchmarks/training/whole_model.py --cases short   # again, until nothing is lacking
    python examples/benchmarks/training/whole_model.py --cases guide   # for the table of guides/fast_training.md
    python examples/benchmarks/training/whole_model.py --cases memory  # for guides/memory.md, --out ..._memory.json
    python examples/benchmarks/training/whole_model.py --cases offload  # ZeRO-Offload, --out ..._offload.json
    torchrun --nproc-per-node 8 examples/benchmarks/training/whole_model.py --models Qwen3-30B-A3B

Rows are added to what the result file has, so that a run of ten minutes goes on where the last one ended. Times come
first. Then, on one rank, each contender is built once more for a profiled step, since a profiler slows what follows.
It runs without CUDA graphs, so that the kernels of attention's linears are told apart.

Model FLOPs of a token: 6 for each weight that it meets and that is trained, 4 for each frozen one, with the experts
that it is sent to; and 12 x context x heads x head size for each attention, where the context is half the sequence or
the sliding window. The embedding and what checkpointing computes again do not count. Utilization is of the device's
peak in dense bf16.

Where fewer layers fit than the model has, "all layers" is derived: the time of what layers hold grows with them, that
of the optimizer and ZeRO with the trained parameters, the loss stays. "With its exchange" is a model, too: dispatch
and combine of every layer, with nothing beside them, at the rates that exchange/rates.py fits to 2 and 4 GPUs.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from torch import nn
from torch.profiler import ProfilerActivity
from torch.utils.checkpoint import create_selective_checkpoint_contexts

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import ds_mxfp8_moe
from lib import models, results_file, run, show, timing, trainings, world
from lib.world import device, on_gpu
from training import changes, step_parts
from training.step_parts import GRADIENTS, IDLE, PARTS
from training.whole_model_results import (
    AUTOEP,
    AWARE,
    AWARE_IN_4_BITS,
    BF16,
    CASES,
    CHANGES,
    CHECKPOINTING,
    DEFAULT,
    FULL,
    IN_4_BITS,
    IN_8_BITS,
    KEPT,
    LIGER_TOLD,
    LORA,
    MODELS,
    MXFP8,
    NO_GRAPHS,
    NOT_KEPT,
    PLAIN,
    SHOWN,
    experts_of,
)

SECTIONS: dict[str, dict] = {BF16: {"recipe": "bf16"}, DEFAULT: {}, MXFP8: {"recipe": "mxfp8"},
                             KEPT: {"keep_quantized_weights": True}, NOT_KEPT: {"keep_quantized_weights": False},
                             NO_GRAPHS: {"graph_attention": False}, IN_8_BITS: {"frozen_experts": "mxfp8"},
                             IN_4_BITS: {"frozen_experts": "mxfp4"}, AWARE: {"merge_aware": True},
                             AWARE_IN_4_BITS: {"frozen_experts": "mxfp4", "merge_aware": True}}
CONTENDERS, REFERENCES = (PLAIN, AUTOEP, *SECTIONS), (PLAIN, AUTOEP, BF16)
STANDARD = (PLAIN, AUTOEP, BF16, DEFAULT, MXFP8)  # without others being asked for
# These are the rates for weights with a fan-in of at most FAN_IN. A step of Adam moves the outputs of a wider weight
# further. At 1e-5, two steps lower the loss of a random Mixtral by 1.7, and rounding to MXFP8 slows so fast a fall.
LEARNING_RATES, FAN_IN = {FULL: 1e-5, LORA: 1e-4}, 2048
ADAPTERS = {"r": 8, "task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj"],
            "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
# The kernels of Liger beside its loss, by the case's "liger".
LIGER = {of: {"rope": of is True, "rms_norm": of is True, "cross_entropy": False, "swiglu": False}
         for of in ("loss", True)}
# Micro-batches at least, in two steps at least: the first one decides which weights are kept, the second one compiles
# for them. One more step says how many steps are timed.
WARM_UP = 4
LEAST, MOST = 3, 20  # steps that are timed
COMPARED = 3  # steps, the first ones, whose losses have to agree
PEAKS = {"H200": 989, "H100 80GB HBM3": 989, "B200": 2250}  # TFLOP/s in dense bf16, by a part of the device's name


@dataclass(frozen=True)
class Case:
    """Attributes: as in whole_model.yaml. `sequences`, of a micro-batch, and `micro_batches` are one rank's."""

    model: str
    training: str
    one_rank_of: int
    sequences: int
    micro_batches: int
    layers: int
    ranks: int
    sequence: int = 4096
    checkpointing: bool | str = False
    liger: bool | str = False
    attention: str | None = None
    loss: str | None = None
    optimizer: str | None = None
    compiled: str | None = None
    timer: str | None = None

    def __str__(self) -> str:
        return show.described(self.described(), ("model", "training", "sequences", "micro_batches", "checkpointing",
                                                 "liger", *CHANGES))

    def described(self) -> dict:
        """The case in a result file. What is off is None, so that titles leave it out."""
        return {**asdict(self), "checkpointing": CHECKPOINTING[self.checkpointing],
                "liger": LIGER_TOLD[self.liger]}

    @property
    def tokens(self) -> int:
        """Of a rank in a micro-batch."""
        return self.sequences * self.sequence

    def config(self) -> Any:
        """transformers' config of what the ranks hold together."""
        from transformers import AutoConfig
        keys, (key, experts) = dict(MODELS[self.model]), experts_of(self.model)
        keys |= {key: min(experts, experts // self.one_rank_of * self.ranks), "num_hidden_layers": self.layers,
                 "use_cache": False, "output_router_logits": False, "initializer_range": keys["hidden_size"]**-0.5}
        return AutoConfig.for_model(keys.pop("model_type"), **keys)


# ---- training -----------------------------------------------------------------------------------------------------


def model_of(case: Case) -> nn.Module:
    """The same weights on all ranks and for all contenders, on the device, in bf16."""
    from transformers import AutoModelForCausalLM
    torch.manual_seed(0)
    with torch.device(device()):
        model = AutoModelForCausalLM.from_config(case.config(), dtype=world.BF16,
                                                 **changes.choose_attention(case.attention))
    return prepared(model, case)


def prepared(model: nn.Module, case: Case) -> nn.Module:
    """The model with all that its case changes of it, and adapters."""
    model.train()
    if case.liger:
        from transformers.integrations.liger import apply_liger_kernel
        loss = {"fused_linear_cross_entropy": case.loss in (None, changes.LARGE_CHUNKS)}
        apply_liger_kernel(model, LIGER[case.liger] | loss)
    changes.change_loss(model, case.loss, case.micro_batches)
    if case.checkpointing:
        options: dict = {"use_reentrant": False}
        if case.checkpointing == "attention":
            options["context_fn"] = partial(create_selective_checkpoint_contexts, changes.ATTENTION)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options,
                                            offload=case.checkpointing == "host")
        for layer in model.model.layers[::2] if case.checkpointing == "half" else ():
            layer.gradient_checkpointing = False
    if case.training == LORA:
        import peft
        model = peft.get_peft_model(model, peft.LoraConfig(**ADAPTERS))
    return model


def flops_per_token(model: nn.Module, case: Case) -> float:
    """Of forward and backward; the module's docstring says which."""
    config, embedding = model.config, model.get_input_embeddings().weight
    share = config.num_experts_per_tok / getattr(config, experts_of(case.model)[0])
    weights = sum((6 if p.requires_grad else 4) * p.numel() * (share if ".experts." in name else 1)
                  for name, p in model.named_parameters() if p.dim() > 1 and p is not embedding)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * case.layers
    contexts = [case.sequence / 2 if kind == "full_attention" else min(case.sequence / 2, config.sliding_window)
                for kind in kinds]
    return weights + 12 * sum(contexts) * config.num_attention_heads * head


def learning_rate(case: Case) -> float:
    keys = MODELS[case.model]
    fan_in = max(keys["hidden_size"], keys.get("moe_intermediate_size", keys["intermediate_size"]))
    return LEARNING_RATES[case.training] * min(1, FAN_IN / fan_in)


def engine_config(case: Case, contender: str, micro_batches: int, graphs: bool = True) -> dict:
    """DeepSpeed's config. `graphs`: False keeps our package from making CUDA graphs."""
    config: dict = {"train_micro_batch_size_per_gpu": case.sequences, "gradient_accumulation_steps": micro_batches,
                    "bf16": {"enabled": True}, "zero_optimization": {"stage": 1},
                    **models.timer(case.timer == changes.WAITS),
                    **changes.optimizer_config(case.optimizer, {"lr": learning_rate(case)})}
    if contender != PLAIN:
        config["expert_parallel"] = {"enabled": True, "autoep_size": case.ranks}
    if contender in SECTIONS:
        config["mxfp8_moe"] = {**models.OURS, **SECTIONS[contender], **({} if graphs else SECTIONS[NO_GRAPHS])}
    if case.compiled:
        config["compile"] = {"autoep_non_moe": True}
    return config


class Training:
    """Steps of one contender's engine, as a user writes them, over batches that are the same for every contender.

    Attributes:
        losses: of each step, the mean over its micro-batches.
        about: what the rows say of the model.
    """

    def __init__(self, case: Case, contender: str, micro_batches: int, model: nn.Module | None = None,
                 graphs: bool = True, config: dict | None = None, mpu: Any = None):
        """Args:
            micro_batches: of a step, in place of the case's.
            model: in place of `model_of`.
            graphs: as in `engine_config`.
            config: in place of `engine_config`.
            mpu: of ranks that share sequences.
        """
        model = model_of(case) if model is None else model
        trained = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
        self.about = {"parameters": sum(p.numel() for p in model.parameters()), "trained": sum(trained.values()),
                      "trained_outside_layers": sum(n for name, n in trained.items() if ".layers." not in name),
                      "flops_per_token": flops_per_token(model, case)}
        self.contender, self.micro_batches, self.losses = contender, micro_batches, []
        self.batches = models.random_batches(model.config.vocab_size, case.sequences, case.sequence)
        config = engine_config(case, contender, micro_batches, graphs) if config is None else config
        initialize = ds_mxfp8_moe.initialize if "mxfp8_moe" in config else deepspeed.initialize
        self.engine = initialize(model=model, config=config, mpu=mpu)[0]
        if case.compiled:
            self.engine.compile()

    def micro_batch(self, i: int) -> torch.Tensor:
        batch = self.batches[i % len(self.batches)]
        loss = self.engine(input_ids=batch, labels=batch).loss
        with step_parts.part(GRADIENTS):
            self.engine.backward(loss)
            self.engine.step()
        return loss.detach().float()

    def step(self) -> None:
        self.losses.append(torch.stack([self.micro_batch(i) for i in range(self.micro_batches)]).mean())

    def steps_ms(self, steps: int) -> list[float]:
        """The time of each of these steps in a row, on the slowest rank."""
        world.barrier()
        get_accelerator().synchronize()
        marks = [timing.moment()]
        for _ in range(steps):
            self.step()
            marks.append(timing.moment())
        get_accelerator().synchronize()
        return world.largest(torch.tensor(timing.apart_ms(marks), dtype=torch.float64)).tolist()


def measure(case: Case, budget_s: float, training: Training, before: int) -> dict:
    """Times LEAST to MOST steps.

    Args:
        budget_s: seconds for them.
        before: bytes that were allocated when there was no engine. The peak, the largest of the ranks', is beyond.
    """
    engine, accelerator, layers = training.engine, get_accelerator(), models.moe_layers(training.engine)
    if training.contender != PLAIN and not layers:
        raise ValueError("AutoEP finds no MoE layers in this model")
    if training.contender in SECTIONS and not all(hasattr(layer, "mxfp8_settings") for layer in layers):
        raise ValueError("MoE layers were not converted")
    accelerator.reset_peak_memory_stats()
    training.step()
    norm = float(engine.get_global_grad_norm())
    for _ in range(max(2, math.ceil(WARM_UP / case.micro_batches)) - 1):
        training.step()
    one_ms, = training.steps_ms(1)
    step = timing.spread_ms(training.steps_ms(max(LEAST, min(MOST, int(budget_s * 1e3 / one_ms)))))
    peak = accelerator.max_memory_allocated() - before + (models.staging_bytes(layers[0]) if layers else 0)
    losses = world.gathered(torch.stack(training.losses[:COMPARED])).mean(0).tolist()
    rates = {quantile: 1e3 * case.tokens * case.micro_batches / ms for quantile, ms in step.items()}
    tflops = rates["median_ms"] * training.about["flops_per_token"] / 1e12
    most_tflops = next((tops for name, tops in PEAKS.items() if name in results_file.machine()), None)
    tokens_per_expert = (case.tokens * MODELS[case.model]["num_experts_per_tok"] * case.one_rank_of
                         / experts_of(case.model)[1])
    return {**step, "tokens_per_s": round(rates["median_ms"]), "tokens_per_s_p10": round(rates["p90_ms"]),
            "tokens_per_s_p90": round(rates["p10_ms"]), "tflops": round(tflops, 4),
            **({"utilisation": round(tflops / most_tflops, 4)} if most_tflops else {}),
            **({"peak_bytes": int(world.largest(torch.tensor([peak])).item())} if on_gpu() else {}),
            **training.about, "tokens_per_expert": tokens_per_expert,
            **(models.experts_in(engine, tokens_per_expert) if layers else {}),
            "losses": [round(loss, 5) for loss in losses], "gradient_norm": round(norm, 6),
            "correct": all(map(math.isfinite, losses))}


def profile(case: Case, step_ms: float, training: Training, before: int) -> dict:
    """The parts of a step of `step_ms`, from a step of one or two micro-batches: the first of two stands for all but
    the last. Without a GPU they are of the profiled step, since the profiler slows its operators."""
    step_parts.mark(training.engine.module)
    training.step()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu() else [])]
    parts, busy, wall, last = dict.fromkeys(PARTS, 0.0), 0.0, 0.0, training.micro_batches - 1
    for i in range(training.micro_batches):
        times = 1 if i == last else case.micro_batches - 1
        get_accelerator().synchronize()
        with torch.profiler.profile(activities=activities) as profiler:
            begin = time.perf_counter()
            training.micro_batch(i)
            get_accelerator().synchronize()
            wall += times * (time.perf_counter() - begin) * 1e3
        found, busy_ms = step_parts.spent_ms(profiler)
        busy += times * busy_ms
        for name, ms in found.items():
            parts[name] += times * ms
    parts[IDLE] = (step_ms if on_gpu() else wall) - busy
    return {**{f"{name}_ms": round(ms, 3) for name, ms in parts.items()}, "busy_ms": round(busy, 3)}


# ---- rows ---------------------------------------------------------------------------------------------------------


class Run(NamedTuple):
    case: Case
    contender: str

    def __str__(self) -> str:
        return f"{self.case}, {self.contender}"

    @property
    def key(self) -> tuple:
        return trainings.key({"case": self.case.described(), "contender": self.contender})

    def told(self, micro_batches: int, call: Callable[[Training, int], dict], graphs: bool = True) -> dict:
        """What `call` says of the contender. `micro_batches`: of each step. `graphs`: as in `engine_config`."""
        build = partial(Training, self.case, self.contender, micro_batches, graphs=graphs)
        told, = trainings.found(build, [call])
        return told


def fill(args: argparse.Namespace, rows: dict[tuple, dict], commit: str | None) -> Iterator[None]:
    """Adds the times that the rows lack, and yields whenever they are to be written. Then, on one rank, the parts of
    a step."""
    runs = runs_of(args)
    for one in world.in_time([one for one in runs if one.key not in rows], args.seconds):
        told = one.told(one.case.micro_batches, partial(measure, one.case, args.budget))
        rows[one.key] = {"case": one.case.described(), "contender": one.contender, "commit": commit, **told}
        trainings.settle(rows.values(), REFERENCES, CHANGES)
        yield
    lacking = [one for one in runs if "median_ms" in (row := rows.get(one.key, {})) and "busy_ms" not in row]
    for one in world.in_time(lacking if world.size() == 1 and not args.no_parts else [], args.seconds):
        row = rows[one.key]
        told = one.told(min(2, one.case.micro_batches), partial(profile, one.case, row["median_ms"]), graphs=False)
        if "failure" not in told:
            row.update({**told, "correct": row["correct"]})
        yield


def without_liger(model_type: str) -> str:
    """Why there are no kernels of Liger. "": there are."""
    if not on_gpu():
        return "it needs a GPU"
    if find_spec("liger_kernel") is None:
        return "liger_kernel is not installed"
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    return "" if model_type in MODEL_TYPE_TO_APPLY_LIGER_FN else f"it has no kernels for {model_type}"


def runs_of(args: argparse.Namespace) -> list[Run]:
    """What was asked for. Liger comes last, since it changes transformers' classes for the rest of the process."""
    names = ("short", "full", "published") if args.cases == "full" else (args.cases, )
    lines = [line for name in names for line in CASES[name]]
    lines = [line for line in lines if line["model"] in args.models and line["training"] in args.training]
    why = {name: without_liger(MODELS[name]["model_type"]) for name in dict.fromkeys(line["model"] for line in lines)}
    for name in filter(why.get, why):
        world.say(f"{name}: cases with Liger are left out: {why[name]}")
    found = []
    for line in lines:
        layers = min(line.get("layers", MODELS[line["model"]]["num_hidden_layers"]), args.layers or math.inf)
        names = [name for name in line.get("contenders", args.contenders or STANDARD)
                 if name in (args.contenders or CONTENDERS)
                 and (line["training"], name) != (LORA, AUTOEP)]  # it finds no experts that PEFT wraps
        keys = {key: value for key, value in line.items() if key != "contenders"}
        keys |= {"layers": layers, "ranks": world.size()}
        asked = [how == "with" for how in ("without", "with") if how in args.liger]
        found += [Run(Case(**keys | {"liger": liger}), name) for liger in line.get("liger", asked)
                  if bool(liger) in asked and not (liger and why[line["model"]]) for name in names]
    return sorted(found, key=lambda one: [*LIGER_TOLD].index(one.case.liger))


# ---- command line -------------------------------------------------------------------------------------------------


def main() -> None:
    parser = run.timed_parser(__doc__, budget=15, seconds=540, more_cases=("guide", "memory", "offload", "published"))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="NAME",
                        help=f"some of {', '.join(MODELS)} (default: all)")
    parser.add_argument("--training", nargs="+", choices=(FULL, LORA), default=[FULL, LORA], help="default: both")
    parser.add_argument("--liger", nargs="+", choices=("with", "without"), default=["with", "without"],
                        help="default: both, without first")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, metavar="NAME",
                        help=f"some of: {'; '.join(CONTENDERS)} (default: the first {len(STANDARD)})")
    parser.add_argument("--layers", type=run.one_or_more, help="at most; default: as whole_model.yaml says")
    parser.add_argument("--no-parts", action="store_true", help="leave the profiled steps out")
    trainings.complete(SHOWN, parser, fill)


if __name__ == "__main__":
    main()
