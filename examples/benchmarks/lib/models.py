# SPDX-License-Identifier: Apache-2.0
"""The GPT-MoEs that are trained: their sizes, how many layers fit, engines around them, one layer, even routing."""

import gc
import math
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import torch
import yaml
from deepspeed.accelerator import get_accelerator
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.module_inject.auto_ep_presets import base
from deepspeed.moe.ep_router import TokenChoiceTopKRouter
from deepspeed.moe.layer import MoE
from deepspeed.moe.sharded_moe import MOELayer, TopKGate
from torch import nn

import ds_mxfp8_moe
from ds_mxfp8_moe.engine.placement import EVERY, WINDOW

from . import world
from .world import BF16, device

HEAD = 128
VOCABULARY = 32000
FILLED = 0.8  # of a device's memory, by the formula
BATCHES = 2  # that are trained on in turn
SCRATCH_BYTES = 6e9  # DeepSpeed's buckets, one group's gradients in float32, staging of exchanges, the CUDA context
# Times the experts' width: Adam's first steps move every weight as far, and the more of them are summed the further
# they lead. Low: two batches learnt by heart would set apart what differs by rounding.
LEARNING_RATE = 3e-3
# The section of every contender of ours. With the check, a broken kernel would be measured as DeepSpeed's path.
OURS = {"enabled": True, "debug": {"self_check": False}}
# Plain AutoEP records router logits in a way that fails with transformers from 5.23 on. It has another one.
base._install_instance_transformers_output_recorders = lambda *_: None
# Of the logarithms of experts' loads, as training/routes.py recorded them: how far experts differ, how far they move
# in 100 steps, and how far batches differ. Estimated from few experts, the first is lower: 0.83 from 32.
PREFERENCE, DRIFT, NOISE = 1.0, 0.1, 0.1
IMBALANCE = 2  # rows of the fullest expert over the mean: what the dropless classic layer pads every expert to


@dataclass(frozen=True)
class Size:
    """A GPT-MoE; attention, norms and router are those of Hugging Face's `family`.

    Attributes:
        layers: at most, as many as the model has that this is like.
    """

    family: str
    hidden: int
    ffn: int
    experts: int
    top_k: int
    heads: int
    kv_heads: int
    layers: int
    batch: int
    sequence: int = 4096
    vocabulary: int = VOCABULARY

    @property
    def tokens(self) -> int:
        """Of a rank in a micro-batch."""
        return self.batch * self.sequence

    def bytes_of(self, layers: int, ranks: int) -> float:
        """What a rank needs in ZeRO-1 for the contender that needs most: weights and gradients in bf16, AdamW's master
        weights and two moments in float32 in shares over the ranks with the same parameters, and activations of the
        dropless classic layer. Every rank has other experts."""
        attention, keys = self.heads * HEAD, self.kv_heads * HEAD
        experts = 3 * self.hidden * self.ffn * self.experts / ranks
        dense = self.hidden * (2 * attention + 2 * keys + self.experts)
        # Rows that an expert reads and writes, once more in float32 to be weighed, and four values of the FFN's width.
        routed = IMBALANCE * self.tokens * self.top_k * 8 * (self.hidden + self.ffn)
        others = self.tokens * (16 * self.hidden + 10 * attention + 12 * keys)
        logits = 12 * self.tokens * self.vocabulary  # bf16, float32, and their gradients
        shared = 4 + 12 / ranks  # bytes of a parameter that all ranks have
        return (layers * (experts * 16 + dense * shared + routed + others)
                + 2 * self.vocabulary * self.hidden * shared + logits + SCRATCH_BYTES)

    def most_layers(self, ranks: int, memory: float) -> int:
        """How many fit into `memory` bytes of a rank, and with all experts in bf16 while built. 0 if the ranks do
        not divide the experts."""
        whole = 2 * 3 * self.hidden * self.ffn * self.experts
        return max((layers for layers in range(1, self.layers + 1) if layers * whole <= FILLED * memory
                    and self.experts % ranks == 0
                    and self.bytes_of(layers, ranks) <= FILLED * memory), default=0)


SIZES = {name: Size(**figures)
         for name, figures in yaml.safe_load(Path(__file__).with_name("sizes.yaml").read_text()).items()}
FULL_SIZES = ("deepseek", "qwen3", "mixtral")


def hugging_face(size: Size, layers: int) -> nn.Module:
    """The same weights on all ranks, on the device, in bf16."""
    from transformers import AutoConfig, AutoModelForCausalLM
    experts = {"num_local_experts": size.experts, "intermediate_size": size.ffn} if size.family == "mixtral" else {
        "num_experts": size.experts, "moe_intermediate_size": size.ffn, "intermediate_size": size.ffn,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
    config = AutoConfig.for_model(
        size.family, vocab_size=size.vocabulary, hidden_size=size.hidden, num_hidden_layers=layers,
        num_attention_heads=size.heads, num_key_value_heads=size.kv_heads, head_dim=HEAD,
        max_position_embeddings=size.sequence, num_experts_per_tok=size.top_k, output_router_logits=False,
        use_cache=False, initializer_range=size.hidden**-0.5, **experts)
    torch.manual_seed(0)
    with torch.device(device()):
        return AutoModelForCausalLM.from_config(config, dtype=BF16)


class SwiGLU(nn.Module):

    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.gate, self.up = (nn.Linear(dim, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Classic(nn.Module):
    """deepspeed.moe.layer.MoE with the router and the experts of a Hugging Face layer. Without `drop` it computes the
    same."""

    def __init__(self, source: nn.Module, size: Size, ep: int, drop: bool):
        super().__init__()
        with torch.device(device()):
            self.moe = MoE(size.hidden, SwiGLU(size.hidden, size.ffn).to(BF16), size.experts, ep, k=size.top_k,
                           drop_tokens=drop, top2_2nd_expert_sampling=False)
        inner = self.moe.deepspeed_moe
        first = world.rank() % ep * self.moe.num_local_experts
        with torch.no_grad():
            inner.gate.wg.weight.copy_(source.gate.weight)
            for e, expert in enumerate(inner.experts.deepspeed_experts, first):
                for linear, weight in zip((expert.gate, expert.up), source.experts.gate_up_proj[e].chunk(2),
                                          strict=True):
                    linear.weight.copy_(weight)
                expert.down.weight.copy_(source.experts.down_proj[e])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.moe(x)[0]


def timer(waits: bool = False) -> dict:
    """The config's "timers". By default no host waits for the device at the end of each micro-batch: ours sees to that
    by itself, and contenders differ in their layers alone."""
    return {"timers": {"throughput": {"synchronized": waits}}}


def engine_of(size: Size, layers: int, ep: int, zero: int, *, classic: bool, section: dict | None, drop: bool = False,
              adapters: dict | None = None, **more) -> nn.Module:
    """A DeepSpeed engine as users make it; ours by the section "mxfp8_moe".

    Args:
        drop: classic layers drop tokens beyond a capacity.
        adapters: of peft.LoraConfig, which alone are trained then.
        more: other keys of the config.
    """
    model = hugging_face(size, layers).train()
    adamw = {"lr": LEARNING_RATE / size.ffn, "torch_adam": True, "fused": True}
    config = {"train_micro_batch_size_per_gpu": size.batch, "bf16": {"enabled": True}, **timer(),
              "zero_optimization": {"stage": zero}, "optimizer": {"type": "AdamW", "params": adamw}, **more}
    if classic:
        for layer in model.model.layers:
            layer.mlp = Classic(layer.mlp, size, ep, drop)
    else:
        config["expert_parallel"] = {"enabled": True, "autoep_size": ep, "preset_model": size.family}
    if adapters is not None:
        import peft
        model = peft.get_peft_model(model, peft.LoraConfig(**adapters))
    if section is not None:
        config["mxfp8_moe"] = {**OURS, **section}
    return ds_mxfp8_moe.initialize(model=model, config=config)[0]


def moe_layers(engine: nn.Module) -> list[nn.Module]:
    return [module for module in engine.modules() if isinstance(module, (AutoEPMoELayer, MOELayer))]


class Layer:
    """The MoE layer of an engine's model, or a module alone, with gradients of tokens and parameters."""

    def __init__(self, module: nn.Module, engine: nn.Module | None = None):
        self.module, self.engine = module, engine
        # In an order that AutoEP's layers and blocks of transformers share.
        named = sorted(module.named_parameters(), key=lambda one: one[0].removeprefix("router."))
        self.parameters = tuple(p for _, p in named if p.requires_grad)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.module(x)
        return out[0] if isinstance(out, tuple) else out

    def backward(self, x: torch.Tensor, y: torch.Tensor, g: torch.Tensor) -> tuple:
        return torch.autograd.grad(y, (x, *self.parameters), g.view_as(y))


def one_layer(tokens: int, hidden: int, ffn: int, experts: int, top_k: int) -> Size:
    return Size("qwen3_moe", hidden, ffn, experts, top_k, heads=1, kv_heads=1, layers=1, batch=1, sequence=tokens,
                vocabulary=128)


def layer_of(size: Size, ep: int = 1, **more) -> Layer:
    """The layer of `one_layer`, as users make it. `more`: arguments of `engine_of`."""
    engine = engine_of(size, 1, ep, 1, **more)
    return Layer(engine.module.model.layers[0].mlp, engine)


def staging_bytes(layer: nn.Module) -> int:
    """Of the peer memory that a layer's transport shares with all others. It is not the allocator's."""
    settings = getattr(layer, "mxfp8_settings", None)
    memory = getattr(settings and settings.choose_transport(layer.ep_group), "memory", None)
    return 0 if memory is None else 2 * memory.half_bytes


def experts_in(engine: nn.Module, tokens_per_expert: float) -> dict[str, str]:
    """What our layers multiply in with so many tokens: few of them run the bf16 recipe. Nothing of plain DeepSpeed."""
    settings = getattr(moe_layers(engine)[0], "mxfp8_settings", None)
    if settings is None:
        return {}
    enough = tokens_per_expert >= settings.min_tokens_per_expert
    return {"experts_in": "MXFP8" if settings.recipe.quantize_gemm and enough else "bf16"}


def free(engine: nn.Module) -> None:
    """Gives the memory of an engine back, which lives on in cycles of references and, where a step failed, in losses
    that layers keep with all that they were computed from."""
    zero = engine.optimizer
    inner = getattr(zero, "optimizer", zero)  # without ZeRO there may be one alone
    parameters = list(engine.module.parameters())
    states = [state for group in inner.state.values() for state in group.values()]
    flat = [part for name in ("bit16_groups_flat", "single_partition_of_fp32_groups")
            for part in getattr(zero, name, ())]
    holders = inner, zero, *engine.module.modules()
    engine.destroy()
    for tensor in (*parameters, *states, *flat):
        if isinstance(tensor, torch.Tensor):
            tensor.grad = None
            tensor.data = tensor.data.new_empty(0)
    for holder in holders:
        vars(holder).clear()
    gc.collect()
    get_accelerator().empty_cache()


def random_batches(vocabulary: int, *shape: int) -> list[torch.Tensor]:
    """Of this rank, the same for every contender."""
    seeds = (1000 * i + world.rank() for i in range(BATCHES))
    return [torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(seed)).to(device())
            for seed in seeds]


# ---- routing ------------------------------------------------------------------------------------------------------


def even_routes(tokens: int, top_k: int, experts: int) -> torch.Tensor:
    """[T, K]: every expert gets equally many, and the choices of a token lie on as many ranks as a router's would.

    Neighbors instead, as round-robin gives them, share a rank: they would travel together, as in no training.
    """
    generator = torch.Generator().manual_seed(0)
    order, offsets = (torch.randperm(experts, generator=generator) for _ in range(2))
    return order[(torch.arange(tokens).unsqueeze(1) + offsets[:top_k]) % experts]


def uneven_routes(tokens: int, top_k: int, experts: int, ranks: int, fullest: float) -> torch.Tensor:
    """[T, K]: the first rank's experts get `fullest` times what a rank gets in the mean, all others share the rest."""
    local, here = experts // ranks, top_k * fullest / ranks
    most = min(top_k, local)  # of a token's choices
    if here > most:
        raise ValueError(f"one of {ranks} ranks was to get {fullest} times the mean; with {local} experts there and "
                         f"{top_k} choices it can get {most * ranks / top_k:g} times")
    here_T = ((torch.arange(tokens + 1) * here).long().diff()).unsqueeze(1)
    first_TK = even_routes(tokens, most, local)
    others_TK = local + even_routes(tokens, min(top_k, experts - local), experts - local)
    k = torch.arange(top_k).expand(tokens, -1)
    return torch.where(k < here_T, first_TK.gather(1, k.clamp(max=first_TK.shape[1] - 1)),
                       others_TK.gather(1, (k - here_T).clamp(0, others_TK.shape[1] - 1)))


def skewed_routes(tokens: int, top_k: int, experts: int, layer: int, step: int) -> torch.Tensor:
    """[T, K]: this rank's routes in a step, with the statistics that training/routes.py recorded.

    Loads are log-normal over the experts of a layer. They move slowly from step to step, in the same way on all ranks,
    and each batch of each rank has noise. The choices of a token are a systematic sample, which adds no other noise.
    """
    generator = torch.Generator().manual_seed(layer)
    now_E, later_E = torch.randn(2, experts, generator=generator, dtype=torch.float64)
    order = torch.randperm(experts, generator=generator)
    turn = 2 * math.asin(DRIFT / PREFERENCE / 2) * step / 100
    generator.manual_seed(1000 * (1000 * layer + step) + world.rank())
    noise_E = torch.randn(experts, generator=generator, dtype=torch.float64)
    log_E = PREFERENCE * (math.cos(turn) * now_E + math.sin(turn) * later_E) + NOISE * noise_E
    share_E = log_E[order].softmax(0)
    while share_E.max() > 1 / top_k + 1e-12:  # a token chooses an expert once
        share_E = share_E.clamp(max=1 / top_k)
        share_E /= share_E.sum()
    place_TK = (torch.randperm(tokens, generator=generator).unsqueeze(1) + 0.5) / tokens + torch.arange(top_k)
    return order[torch.searchsorted(share_E.cumsum(0), place_TK.double() / top_k).clamp(max=experts - 1)]


class Given(NamedTuple):
    """Choices of a batch. `capacity`, `place_KT`: of the classic layer, whose ranks have the same capacity."""

    expert_TK: torch.Tensor
    counts_E: torch.Tensor
    capacity: torch.Tensor
    place_KT: torch.Tensor

    @classmethod
    def of(cls, routes_TK: torch.Tensor, experts: int) -> "Given":
        """Collective."""
        expert_TK = routes_TK.to(device())
        counts_E = torch.bincount(expert_TK.flatten(), minlength=experts).int()
        chosen_TE = torch.zeros(len(routes_TK), experts, dtype=torch.int32, device=device()).scatter_(1, expert_TK, 1)
        place_TK = (chosen_TE.cumsum(0) - 1).gather(1, expert_TK)
        return cls(expert_TK, counts_E, world.largest(counts_E.max()).to(device()), place_TK.t().int().contiguous())


class EvenRouter(TokenChoiceTopKRouter):
    """AutoEP's router, its choices taken from `given`, each with the score that it has."""

    def forward(self, x: torch.Tensor, expert_bias: torch.Tensor | None = None) -> tuple:
        given = next(self.given)
        scores_TK = self.gate(x).float().softmax(dim=1).gather(1, given.expert_TK)
        return scores_TK / scores_TK.sum(-1, keepdim=True), given.expert_TK, given.counts_E


class EvenBlockRouter(nn.Module):
    """The same of the router in a Qwen3-MoE block."""

    def forward(self, hidden_states: torch.Tensor) -> tuple:
        expert_TK = next(self.given).expert_TK
        logits_TE = nn.functional.linear(hidden_states.flatten(0, -2), self.weight)
        scores_TK = logits_TE.float().softmax(dim=1).gather(1, expert_TK)
        return logits_TE, (scores_TK / scores_TK.sum(-1, keepdim=True)).to(logits_TE.dtype), expert_TK


class EvenGate(TopKGate):
    """The same of the classic layer's, with capacities that just suffice."""

    def forward(self, input: torch.Tensor, *_unused) -> tuple:
        given = next(self.given)
        scores_TE = nn.functional.linear(input.float(), self.wg.weight.float()).softmax(dim=1)
        weight_TK = scores_TE.gather(1, given.expert_TK)
        weight_TK = weight_TK / weight_TK.sum(-1, keepdim=True)
        return (scores_TE.mean(), given.capacity, scores_TE.shape[1], given.expert_TK.t().int(), given.place_KT,
                weight_TK.t(), given.counts_E)


UNEVEN = {f"fullest rank {times}x": times for times in (1.5, 3, 5)}  # times the mean
AS_RECORDED = "as recorded"


def given(size: Size, routing: str, layer: int) -> list[Given]:
    """The routes of batches, in turn. As recorded, experts are placed by the first batches, and have the next ones
    over as many steps as they stay."""
    of = size.tokens, size.top_k, size.experts
    if routing == AS_RECORDED:
        steps = *range(WINDOW), *range(WINDOW, WINDOW + EVERY, EVERY // 12)
        return [Given.of(skewed_routes(*of, layer, step), size.experts) for step in steps]
    routes_TK = uneven_routes(*of, world.size(), UNEVEN[routing]) if routing in UNEVEN else even_routes(*of)
    return [Given.of(routes_TK, size.experts)]


def route(engine: nn.Module, size: Size, routing: str) -> None:
    """Has every router of the model route evenly, as UNEVEN says, as recorded, or as it is made to."""
    for i, layer in enumerate(moe_layers(engine)):
        router = layer.router if hasattr(layer, "router") else layer.gate
        made = vars(router).setdefault("made_as", type(router))
        if routing == "router":
            router.__class__ = made
            continue
        router.__class__ = EvenRouter if issubclass(made, TokenChoiceTopKRouter) else (
            EvenGate if issubclass(made, TopKGate) else EvenBlockRouter)
        vars(router)["given"] = cycle(given(size, routing, i))
