# SPDX-License-Identifier: Apache-2.0
"""Tiny MoE models and one way to train them through DeepSpeed, for the tests of layouts, checkpoints, recomputation.

The same call trains a model with plain DeepSpeed's MoE and with ours, from the same start, on the same data, with the
same random states: what differs between two results is the MoE layers alone.
"""

import re
from dataclasses import dataclass, field

import deepspeed
import deepspeed.comm as dist
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.comm.torch import TorchBackend
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import is_moe_param, split_params_into_different_moe_groups_for_optimizer
from deepspeed.pipe import PipelineModule
from deepspeed.utils import groups
from torch import nn

import ds_mxfp8_moe

HIDDEN, FFN, EXPERTS = 64, 96, 8
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

ADAM = {"optimizer": {"type": "Adam", "params": {"lr": 1e-3, "eps": 1e-4, "torch_adam": True}}}
OFFLOAD = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}, "zero_force_ds_cpu_optimizer": False}

PLAIN = None  # deepspeed.initialize itself
OFF = {"enabled": False}
BF16 = {"enabled": True, "recipe": "bf16"}
DEFAULT = {"enabled": True}


class SwiGLU(nn.Module):

    def __init__(self, hidden=HIDDEN, ffn=FFN):
        super().__init__()
        self.gate = nn.Linear(hidden, ffn, bias=False)
        self.up = nn.Linear(hidden, ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def gelu_mlp():
    return nn.Sequential(nn.Linear(HIDDEN, FFN), nn.GELU(), nn.Linear(FFN, HIDDEN))


def moe_layer(expert: nn.Module, ep_size: int, cls: type[MoE] = MoE, **keys) -> MoE:
    """A MoE layer whose experts all differ, between ranks too: copies of one template would hide misrouting."""
    layer = cls(HIDDEN, expert, EXPERTS, ep_size, **keys)
    generator = torch.Generator().manual_seed(1000 + dist.get_rank())
    for module in layer.deepspeed_moe.experts.deepspeed_experts:
        for p in module.parameters():
            p.data = torch.randn(p.shape, generator=generator) / p.shape[-1]**0.5
    return layer


class Block(nn.Module):

    def __init__(self, moe):
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.moe = moe

    def forward(self, x):
        y, aux, _ = self.moe(self.norm(x))
        return x + y, aux


def blocks(ep_size: int | tuple[int, int], **keys) -> list[Block]:
    """Top-2 of SwiGLUs, then top-1 of GELU MLPs with biases; capacities that drop tokens unless `keys` says otherwise.

    Two numbers as `ep_size` are one for each.
    """
    first, second = ep_size if isinstance(ep_size, tuple) else (ep_size, ep_size)
    return [Block(moe_layer(SwiGLU(), first, k=2, **keys)), Block(moe_layer(gelu_mlp(), second, k=1, **keys))]


def mse(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean squared error of a batch of 64 tokens; a sum of the same scale for any other number, 0 for none."""
    return nn.functional.mse_loss(y.float(), target.float(), reduction="sum") / (64 * HIDDEN)


class Net(nn.Module):
    """Two MoE blocks of different kinds between two Linears; forward gives the loss, auxiliary losses included."""

    def __init__(self, ep_size, **keys):
        super().__init__()
        self.first = nn.Linear(HIDDEN, HIDDEN)
        self.blocks = nn.ModuleList(blocks(ep_size, **keys))
        self.last = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x, target):
        x, total = self.first(x), 0.0
        for block in self.blocks:
            x, aux = block(x)
            total = total + aux
        return mse(self.last(x), target) + 0.01 * total


class WithoutAux(nn.Module):
    """A block between two stages of a pipeline, where one tensor passes."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        return self.block(x)[0]


def pipeline(layout: "Layout") -> PipelineModule:
    """The layers of Net, without the auxiliary losses, in `layout.stages` stages of equal length."""
    first, second = (WithoutAux(block) for block in blocks(layout.ep_size, **layout.moe))
    layers = [nn.Linear(HIDDEN, HIDDEN), first, second, nn.Linear(HIDDEN, HIDDEN)]
    return PipelineModule(layers, num_stages=layout.stages, partition_method="uniform", loss_fn=mse)


@dataclass(frozen=True)
class Layout:
    """How a model is trained.

    Attributes:
        ep_size: ranks that share the experts of a layer.
        config: what is added to the DeepSpeed config.
        moe: arguments of the MoE layers.
        client: the optimizer is made by the test, in DeepSpeed's expert-parallel parameter groups.
        tensor_parallel: size of the tensor-parallel groups of a client mpu; the model itself is not split.
        stages: of a PipelineModule; 1 means none.
        shape: of the tokens that a rank brings, [batch, sequence].
        frozen: regular expression; parameters whose whole name it matches are not trained.
    """

    ep_size: int | tuple[int, int] = 2
    dtype: str = "fp32"
    zero: int = 0
    config: dict = field(default_factory=dict)
    moe: dict = field(default_factory=dict)
    client: bool = False
    tensor_parallel: int = 1
    stages: int = 1
    shape: tuple[int, int] = (4, 16)
    frozen: str | None = None
    steps: int = 2
    seed: int = 7


def ds_config(layout: Layout, section: dict | None) -> dict:
    """SGD, so that what a parameter moved is the sum of its gradients, with momentum as a state to save."""
    config = {"train_micro_batch_size_per_gpu": layout.shape[0],
              "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
              "zero_allow_untested_optimizer": True,
              "zero_optimization": {"stage": layout.zero}}
    if layout.dtype != "fp32":
        config[layout.dtype] = {"enabled": True}
    if layout.client:
        del config["optimizer"]
    if section is not None:
        config["mxfp8_moe"] = section
    for key, value in layout.config.items():
        config[key] = {**config.get(key, {}), **value} if isinstance(value, dict) else value
    return config


def _let_gloo_gather_tokens() -> None:
    """DeepSpeed gathers tokens of [E, C, H] into a flat buffer, which NCCL takes and gloo refuses: flatten both."""
    gather = TorchBackend.all_gather_into_tensor
    if gather.__name__ != "flat":

        def flat(self, output_tensor, input_tensor, *args, **kwargs):
            return gather(self, output_tensor.view(-1), input_tensor.view(-1), *args, **kwargs)

        TorchBackend.all_gather_into_tensor = flat


class TensorParallel:
    """The part of Megatron's mpu that DeepSpeed asks for: neighbors form a tensor-parallel group."""

    def __init__(self, size: int):
        _let_gloo_gather_tokens()
        self._size = size
        world = dist.get_world_size()
        for start in range(0, world, size):
            ranks = list(range(start, start + size))
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                self._model = group
        for start in range(size):
            ranks = list(range(start, world, size))
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                self._data = group

    def get_model_parallel_group(self):
        return self._model

    def get_model_parallel_rank(self):
        return dist.get_rank() % self._size

    def get_model_parallel_world_size(self):
        return self._size

    def get_data_parallel_group(self):
        return self._data

    def get_data_parallel_rank(self):
        return dist.get_rank() // self._size

    def get_data_parallel_world_size(self):
        return dist.get_world_size() // self._size


def make_engine(layout: Layout, section: dict | None, model: nn.Module | None = None, **arguments):
    """An engine with the two-block model, or with `model`."""
    torch.manual_seed(layout.seed)
    if layout.tensor_parallel > 1:
        arguments["mpu"] = TensorParallel(layout.tensor_parallel)
    if model is None:
        model = pipeline(layout) if layout.stages > 1 else Net(layout.ep_size, **layout.moe)
    if layout.frozen:
        for name, p in model.named_parameters():
            p.requires_grad = not re.fullmatch(layout.frozen, name)
    trained = [p for p in model.parameters() if p.requires_grad]
    if layout.client:
        group = {"params": trained, "name": "all"}
        arguments["optimizer"] = torch.optim.SGD(split_params_into_different_moe_groups_for_optimizer(group), lr=0.1,
                                                 momentum=0.9)
    else:
        arguments["model_parameters"] = trained
    initialize = deepspeed.initialize if section is PLAIN else ds_mxfp8_moe.initialize
    return initialize(model=model, config=ds_config(layout, section), **arguments)[0]


def batch(step: int, layout: Layout, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets [*layout.shape, HIDDEN] of one data-parallel rank."""
    generator = torch.Generator().manual_seed(10_000 * step + rank)
    x, noise = torch.randn(2, *layout.shape, HIDDEN, generator=generator)
    to = dict(dtype=DTYPES[layout.dtype], device=get_accelerator().current_device_name())
    return x.to(**to), (x.roll(1, dims=-1) * 0.5 + 0.1 * noise).to(**to)


def train_steps(engine, layout: Layout, first: int = 0) -> list[dict]:
    """`layout.steps` optimizer steps from batch number `first` on; per step loss, gradient norm, whether skipped."""
    records = []
    rank = groups._get_data_parallel_rank()
    for step in range(first, first + layout.steps):
        skipped = engine.skipped_steps
        # The gates draw random numbers: alike for two runs, different between data-parallel ranks.
        torch.manual_seed(1 + 100 * step + 7919 * rank)
        batches = (batch(100 * step + micro, layout, rank) for micro in range(engine.gradient_accumulation_steps()))
        if layout.stages > 1:
            losses = [engine.train_batch(batches).item()]
        else:
            losses = []
            for x, target in batches:
                loss = engine(x, target)
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
        norm = engine.get_global_grad_norm()
        records.append({"loss": sum(losses) / len(losses), "norm": None if norm is None else float(norm),
                        "skipped": engine.skipped_steps - skipped})
    return records


def parameters(engine) -> dict[str, torch.Tensor]:
    """Copies of the module's parameters."""
    return {name: p.detach().clone() for name, p in engine.module.named_parameters()}


def state(engine) -> dict[str, torch.Tensor]:
    """Weights, and all tensors and numbers of this rank's optimizer: masters, moments, step counts."""
    found = {f"weight {name}": p for name, p in parameters(engine).items()}

    def walk(place, value):
        if isinstance(value, dict):
            for key, inner in value.items():
                walk(f"{place}.{key}", inner)
        elif isinstance(value, (list, tuple)):
            for i, inner in enumerate(value):
                walk(f"{place}.{i}", inner)
        elif isinstance(value, (torch.Tensor, int, float)):
            found[f"optimizer{place}"] = torch.as_tensor(value).detach().clone()

    walk("", engine.optimizer.state_dict())
    return found


def owners(engine) -> dict[str, list[int]]:
    """For each parameter the ranks that hold a copy of it."""
    shared = sorted(dist.get_all_ranks_from_group(groups._get_data_parallel_group()))
    return {name: sorted(groups._get_expert_data_parallel_group_ranks(p.group_name)) if is_moe_param(p) else shared
            for name, p in engine.module.named_parameters()}


def assert_same_bits(got: dict, expected: dict):
    assert got.keys() == expected.keys()
    different = [name for name in got if not torch.equal(got[name], expected[name])]
    assert not different
