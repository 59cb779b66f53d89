# SPDX-License-Identifier: Apache-2.0
"""Frozen experts in 8 or 4 bits inside a Hugging Face model, from loading until an engine spreads them over the ranks.

Three kinds of modules become `HeldExperts`: transformers' own experts, while a checkpoint is read
(checkpoint/from_pretrained.py); its FP8Experts; and its experts of gpt-oss in MXFP4. They obey the contract of stacked
experts (stacked.py), so that an engine finds them as experts in bf16, and PEFT finds parameters of the right shapes,
for adapters. None of these parameters has memory.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from ..compat.private_names import missing
from ..compute.block_fp8 import Rounding, from_block_fp8, from_mxfp4, stack_rows
from ..compute.formula import gate_then_up
from ..compute.mx import TILE, MXTensor
from ..config import ConfigError
from ..ffn.frozen_weights import FORMATS, FrozenMXFP4Weights, FrozenWeights
from ..ops.log import log_on_rank_0
from ..recognition.stacked import DOWN, Layout


class HeldExperts(nn.Module):
    """What stands in a model for a block's experts. It computes nothing.

    Both stacked weights have the shapes, the dtype and the device of transformers' parameters. All their values are
    one NaN in memory. They are in no state dict. Everything else is as in the module whose place this takes: flags,
    biases, activation, other attributes.

    Attributes:
        layout: of both weights.
        kind: the class whose code computes these experts once they are spread.
        weights_of: takes what `take` takes, and returns FrozenWeights.
        original: the module whose place this takes, in a tuple, if the weights are still there. Else ().
    """

    def __init__(self, source: nn.Module, shapes: tuple[torch.Size, torch.Size], dtype: torch.dtype,
                 device: torch.device, convert: Callable[..., FrozenWeights] | None = None, kind: type | None = None,
                 **flags: bool):
        """Arguments:
            source: the module whose place this takes.
            shapes: of both weights.
            convert: takes `source`, and then what `take` takes. None: somebody else sets `weights_of`.
            kind: None: the class of `source`.
            flags: of the contract, where `source` has none.
        """
        super().__init__()
        own = {*vars(self)}
        self.layout = Layout.of(SimpleNamespace(**vars(source), **flags))
        stacks = self.layout.names
        for name, value in {**vars(source), **flags}.items():
            if name not in own and not name.startswith(stacks):
                setattr(self, name, value)
        for name, child in source.named_children():
            self.add_module(name, child)
        for name, parameter in source.named_parameters(recurse=False):
            if not name.startswith(stacks) or name.endswith("_bias"):
                self.register_parameter(name, parameter)
        for name, buffer in source.named_buffers(recurse=False):
            self.register_buffer(name, buffer)
        self._shapes, self.kind = shapes, kind or type(source)
        self.weights_of = convert and partial(convert, source)
        self.original = (source, ) if convert else ()
        self._place(torch.full((), float("nan"), dtype=dtype, device=device))
        self._left_out = self.register_state_dict_post_hook(_leave_out_stacks)

    def take(self, name: str, first: int, count: int, dtype: torch.dtype, device: torch.device,
             wanted: str | None = None) -> FrozenWeights:
        """The weights of a rank's experts.

        Args:
            name: of this module, for errors.
            first, count: the experts.
            dtype: of the weights that they stand for.
            device: where they are to lie.
            wanted: "frozen_experts" of the section.

        Raises:
            ConfigError: the experts are to be trained, or this rank has loaded others, or in another format.
            RuntimeError, TypeError, ValueError: a tensor has another form. The error names it.
        """
        trained = [stack for stack in self.layout.names if getattr(self, stack).requires_grad]
        if trained:
            raise ConfigError(f"{name}.{trained[0]} is to be trained, but is held quantized alone: freeze it, or load "
                              "the model in bf16")
        return self.weights_of(name, first, count, dtype, device, wanted)

    def leave(self) -> type:
        """Lets go of where the weights were, for whoever gives this module the class that is returned."""
        kind = self.kind
        self._left_out.remove()
        for name in ("layout", "kind", "weights_of", "original", "_shapes", "_left_out"):
            delattr(self, name)
        return kind

    def _place(self, nan: torch.Tensor, requires_grad: Sequence[bool] = (False, False)) -> None:
        for name, shape, trained in zip(self.layout.names, self._shapes, requires_grad, strict=True):
            self.register_parameter(name, nn.Parameter(nan.expand(shape), trained))
            getattr(self, name)._is_hf_initialized = True  # so that transformers draws no values for it

    def _apply(self, fn: Callable, recurse: bool = True) -> nn.Module:
        # To move or cast the stacks themselves would allocate every value: this does it to their one NaN.
        stacks = [self._parameters.pop(name) for name in self.layout.names]
        super()._apply(fn, recurse)
        self._place(fn(stacks[0][0, 0, 0].detach()), [p.requires_grad for p in stacks])
        return self

    def forward(self, *args, **kwargs) -> torch.Tensor:
        """Raises RuntimeError: an engine computes these experts."""
        raise RuntimeError("these experts are held quantized alone, which transformers cannot compute: give the model "
                           'to ds_mxfp8_moe.initialize, with "expert_parallel" in its config')


def read_before(weights: FrozenWeights, first: int, name: str, wanted_first: int, wanted_count: int,
                dtype: torch.dtype, device: torch.device, wanted: str | None) -> FrozenWeights:
    """HeldExperts.take of the experts from `first` on, whose weights were read before."""
    count = len(weights.up_data)
    if (first, count) != (wanted_first, wanted_count):
        raise ConfigError(f"{name}: this rank loaded the experts from {first} to {first + count - 1}, and DeepSpeed "
                          f"gives it those from {wanted_first} to {wanted_first + wanted_count - 1}: give "
                          "from_pretrained the config of the engine, and leave out use_data_before_expert_parallelism "
                          "and tensor_parallel")
    if wanted in FORMATS and type(weights) is not FORMATS[wanted]:
        raise ConfigError(f'{name}: from_pretrained loaded these experts in {weights.format}, but "frozen_experts" is '
                          f'"{wanted}": give from_pretrained the config of the engine')
    weights.dtype = dtype
    return weights.to(device)


# ---- transformers' modules ------------------------------------------------------------------------------------------


def gate_above_up(name: str, data: torch.Tensor, factors: torch.Tensor, rounding: Rounding) -> MXTensor:
    """Block FP8 of gate above up, [2F, H] or [E, 2F, H], as tiles.

    `factors`: for tiles of the whole, or one after the other for the tiles of gate and of up, as they come from two
    tensors. These are the same if F is a multiple of 128.
    """
    rows = data.shape[-2] // 2
    of_each = -(-rows // TILE)
    if rows % TILE == 0 or factors.shape[-2] != 2 * of_each:
        return from_block_fp8(name, data, factors, rounding)
    parts = zip(data.split(rows, dim=-2), factors.split(of_each, dim=-2), strict=True)
    return stack_rows([from_block_fp8(name, part.contiguous(), its_factors, rounding) for part, its_factors in parts],
                      rounding)


def _of_fp8_experts(rounding: Rounding, source: nn.Module, name: str, first: int, count: int, dtype: torch.dtype,
                    device: torch.device, wanted: str | None) -> FrozenWeights:
    _, hidden, ffn = source.down_proj.shape
    weights = FORMATS.get(wanted, FrozenWeights)(count, hidden, ffn, dtype, device, source.has_gate)
    up = Layout.of(source).up
    of_up = gate_above_up if source.has_gate else from_block_fp8
    for i in range(first, first + count):
        for gemm, stack, convert in (("up", up, of_up), ("down", DOWN, from_block_fp8)):
            parts = [getattr(source, f"{stack}{end}").detach()[i:i + 1].to(device) for end in ("", "_scale_inv")]
            weights.write(gemm, slice(i - first, i - first + 1),
                          convert(f"{name}.{stack}[{i}]", *parts, rounding))  # type: ignore[call-arg]
    return weights


def _of_mxfp4_experts(rounding: Rounding, source: nn.Module, name: str, first: int, count: int, dtype: torch.dtype,
                      device: torch.device, wanted: str | None) -> FrozenWeights:
    kind = FORMATS.get(wanted, FrozenMXFP4Weights)
    weights = kind(count, source.down_proj_bias.shape[1], source.gate_up_proj_bias.shape[1] // 2, dtype, device)
    for gemm, stack in (("up", "gate_up_proj"), ("down", "down_proj")):
        # transformers keeps both in the layout of its kernels, [E, K, N].
        blocks, scales = (one.storage.layout.unswizzle_data(one.storage.data).transpose(-1, -2) for one in (
            getattr(source, stack), getattr(source, f"{stack}_precision_config").weight_scale))
        blocks = blocks.reshape(*scales.shape, -1)
        for i in range(first, first + count):
            parts = [blocks[i:i + 1].to(device), scales[i:i + 1].to(device)]
            parts = [gate_then_up(part, dim=1) for part in parts] if gemm == "up" else parts
            weights.write(gemm, slice(i - first, i - first + 1),
                          from_mxfp4(f"{name}.{stack}[{i}]", *parts, rounding))  # type: ignore[call-arg]
    return weights


# ---- an engine's start ----------------------------------------------------------------------------------------------


def holds_experts(model: Any) -> bool:
    """Whether HeldExperts stand in the model."""
    return isinstance(model, nn.Module) and any(isinstance(module, HeldExperts) for module in model.modules())


@contextmanager
def quantized_experts(model: Any) -> Iterator[None]:
    """Inside the context, HeldExperts stand for the experts that transformers holds in FP8 or in MXFP4.

    Those that no engine spreads come back.
    """
    if not isinstance(model, nn.Module) or missing("stacked experts"):  # without which NaN would be trained
        yield
        return
    rounding = Rounding()
    for parent, name, child in _children(model):
        if (held := _stand_in(child, model, rounding)) is not None:
            setattr(parent, name, held)
    try:
        yield
    finally:
        for parent, name, child in _children(model):
            if isinstance(child, HeldExperts) and child.original:
                setattr(parent, name, *child.original)
    say_rounding(rounding)


def _leave_out_stacks(module: HeldExperts, state: dict, prefix: str, _: Any) -> None:
    for name in module.layout.names:
        del state[prefix + name]


def _children(model: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    return [(parent, name, child) for parent in model.modules() for name, child in parent.named_children()]


@contextmanager
def scales_kept(model: nn.Module) -> Iterator[None]:
    """Around a cast of parameters: scales of FP8 layers keep their dtype. In bf16 they would be other numbers."""
    kept = [(p, p.data) for module in model.modules() if _is(module, "finegrained_fp8", "FP8Linear")
            for name, p in module.named_parameters(recurse=False) if "scale" in name]
    yield
    for parameter, data in kept:
        parameter.data = data


def say_rounding(rounding: Rounding) -> None:
    """Rank 0 says how many weights are other numbers in MXFP8 than in the file, if any is."""
    if rounding.changed:
        log_on_rank_0("mxfp8_moe: weights of some experts were rounded once more, to one power-of-two scale for each "
                      f"tile of 128x128: {rounding.changed / rounding.values:.2%} of these experts' weights changed, "
                      f"SQNR {rounding.sqnr_db:.1f} dB (31 dB is usual, and as much as FP8 itself costs). The file's "
                      "scales are no powers of two, or too far apart")


def _is(module: nn.Module, file: str, name: str) -> bool:
    """Whether a module is of a class of transformers.integrations, which need not be imported."""
    integration = sys.modules.get(f"transformers.integrations.{file}")
    return integration is not None and isinstance(module, getattr(integration, name, ()))


def _stand_in(module: nn.Module, model: nn.Module, rounding: Rounding) -> HeldExperts | None:
    """What takes the place of experts that transformers holds in FP8 or MXFP4. None: it holds these in neither."""
    dtype = getattr(getattr(model, "config", None), "dtype", None) or torch.bfloat16
    if _is(module, "finegrained_fp8", "FP8Experts"):
        shapes = tuple(getattr(module, stack).shape for stack in Layout.of(module).names)
        return HeldExperts(module, shapes, dtype, module.down_proj.device, partial(_of_fp8_experts, rounding))
    if _is(module, "mxfp4", "Mxfp4GptOssExperts"):
        from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

        (experts, hidden), (_, double) = module.down_proj_bias.shape, module.gate_up_proj_bias.shape
        # As of GptOssExperts.
        shapes = torch.Size((experts, hidden, double)), torch.Size((experts, double // 2, hidden))
        return HeldExperts(module, shapes, dtype, module.down_proj_bias.device, partial(_of_mxfp4_experts, rounding),
                           GptOssExperts, has_gate=True, has_bias=True, is_transposed=True, is_concatenated=False,
                           has_post_expert_norm=False)
    return None
