# SPDX-License-Identifier: Apache-2.0
"""Which tensors of a checkpoint are experts' weights, and these weights as tiles of MXFP8.

A checkpoint stores the experts of a block one by one or in a stack, in bf16, in block FP8 or in MXFP4. transformers'
conversion mapping says which of the model's parameters they become.
"""

import re
from collections.abc import Sequence

import torch
from deepspeed.module_inject.auto_ep_config import MoELayerSpec

from ..compute import casts
from ..compute.block_fp8 import Rounding, above, from_block_fp8, from_mxfp4
from ..compute.formula import DTYPES, gate_then_up
from ..compute.mx import TILE, MXTensor
from ..layers.held_experts import STACKS, gate_above_up
from ..layers.presets import gate_and_up_in_turn
from .shards import Shards

# How the names of a quantised weight's parts end, in place of the weight's own name.
PARTS = ("_scale_inv", "_blocks", "_scales")
# By the name of a stacked parameter of experts in the model, and by part (PARTS, and "" for the weight itself): the
# names of its tensors. A tensor has all experts, or a single one, with NUMBER in place of the expert's number. Two
# names are gate's and up's.
Sources = dict[str, dict[str, list[str]]]
NUMBER = "<number>"
AXES = {"": 2, "_scale_inv": 2, "_blocks": 3, "_scales": 2}  # of one expert's tensors


def expert_sources(names: Sequence[str], parameters: Sequence[str], mapping: list,
                   base_prefix: str) -> tuple[set[str], Sources]:
    """Which tensors of a checkpoint are the weights of a model's experts: the names of all of them, and by parameter.

    Args:
        names: of the checkpoint's tensors.
        parameters: the names of the stacked parameters of experts in the model.
        mapping: transformers' WeightRenamings and WeightConverters of this model.
        base_prefix: the model's base_model_prefix.

    Raises:
        RuntimeError: a converter does more than to stack experts and to put gate above up, or two series of tensors
            become the same weights.
    """
    from transformers.core_model_loading import WeightConverter, rename_source_key

    renamings = [one for one in mapping if not isinstance(one, WeightConverter)]
    converters = [one for one in mapping if isinstance(one, WeightConverter)]
    known = dict.fromkeys(parameters, True)
    found: set[str] = set()
    sources: dict[str, dict[str, dict[int, str]]] = {}
    for name in names:
        renamed, _ = rename_source_key(name, renamings, [])
        part = next((end for end in PARTS if renamed.endswith(end)), "")
        parameter, pattern = rename_source_key(renamed.removesuffix(part), [], converters, base_prefix, known)
        if parameter not in known:
            continue
        found.add(name)
        place = 0 if pattern is None else _place(pattern, converters, parameter)
        form = name if pattern is None else re.sub(r"(.*\.)\d+(\..*)", rf"\1{NUMBER}\2", name)
        same = sources.setdefault(parameter, {}).setdefault(part, {}).setdefault(place, form)
        if same != form:
            raise RuntimeError(f"{name} would become {parameter}, as {same} does: the checkpoint has tensors of two "
                               "models")
    return found, {parameter: {part: [forms[place] for place in sorted(forms)] for part, forms in parts.items()}
                   for parameter, parts in sources.items()}


def _place(pattern: str, converters: list, parameter: str) -> int:
    """0 for what becomes the upper rows of a parameter, or all of them, and 1 for what becomes the lower ones."""
    converter = next(one for one in converters if pattern in one.source_patterns)
    weights = [one for one in converter.source_patterns
               if not one.removesuffix("$").endswith(("_scale_inv", "activation_scale"))]
    done = [type(operation).__name__ for operation in converter.operations]
    plain = [one for one in done if not one.endswith("Dequantize")]
    if plain not in (["MergeModulelist"], ["MergeModulelist", "Concatenate"]) or len(weights) > 2:
        raise RuntimeError(f"{parameter} is made of a checkpoint's tensors by {', '.join(done)}, which is not "
                           "supported for experts that are read in 8 bits: use transformers' from_pretrained")
    return weights.index(pattern)


class ExpertTensors:
    """The experts of one block in a checkpoint, as tiles of MXFP8 on a device."""

    def __init__(self, shards: Shards, sources: Sources, spec: MoELayerSpec, transposed: bool,
                 dtype: torch.dtype, device: torch.device, scaling_mode: str, rounding: Rounding):
        """Arguments:
            transposed: the model's stacked parameters are [E, in, out].
            dtype: of the model.
            scaling_mode: for weights in high precision.
            rounding: counts what changes of the others.
        """
        self._shards, self._transposed, self._in_turn = shards, transposed, gate_and_up_in_turn(spec)
        self._to = {"device": device, "dtype": dtype}
        self._scaling_mode, self._rounding = scaling_mode, rounding
        self._name = f"{spec.moe_module_name}.{spec.experts_name}"
        self._forms = {stack: sources.get(f"{self._name}.{stack}", {}) for stack in STACKS}
        self._shapes = {"gate_up_proj": (2 * spec.ffn_hidden_size, spec.hidden_size),
                        "down_proj": (spec.hidden_size, spec.ffn_hidden_size)}

    def tiles(self, stack: str, expert: int) -> MXTensor:
        """An expert's gate above up, [2F, H], or its down, [H, F].

        Args:
            stack: "gate_up_proj" or "down_proj".
            expert: counted over all ranks.

        Raises:
            RuntimeError, TypeError, ValueError: a tensor is missing, or has another form. The error names it.
        """
        forms = self._forms[stack]
        names = [form.replace(NUMBER, str(expert)) if NUMBER in form else f"{form}[{expert}]"
                 for form in forms.get("", forms.get("_blocks", ()))]
        if not names:
            raise RuntimeError(f"no tensor of the checkpoint becomes {self._name}.{stack}")
        rows, columns = self._shapes[stack]
        if "_blocks" in forms:
            made = self._of_mxfp4(stack, names[0], expert)
            _check_shape(names[0], made, (rows, columns))
            return made
        weights, shape = self._read(stack, "", expert), (rows // len(names), columns)
        if self._transposed and "_scale_inv" not in forms:
            shape = shape[::-1]
        for name, weight in zip(names, weights, strict=True):
            _check_shape(name, weight, shape)
        if "_scale_inv" in forms:
            return self._of_block_fp8(names, weights, self._read(stack, "_scale_inv", expert))
        return self._of_high_precision(stack, names, weights)

    def _read(self, stack: str, part: str, expert: int) -> list[torch.Tensor]:
        forms = self._forms[stack].get(part)
        if forms is None:
            raise RuntimeError(f"no tensor of the checkpoint becomes {self._name}.{stack}{part}")
        tensors = []
        for form in forms:
            name = form.replace(NUMBER, str(expert))
            tensor = self._shards.read(name, None if NUMBER in form else expert)
            if tensor.dim() != AXES[part]:
                raise RuntimeError(f"{name} has shape {tuple(tensor.shape)} for an expert, expected {AXES[part]} axes")
            tensors.append(tensor)
        return tensors

    def _of_mxfp4(self, stack: str, name: str, expert: int) -> MXTensor:
        parts = [self._read(stack, part, expert)[0].to(self._to["device"]) for part in ("_blocks", "_scales")]
        if stack == "gate_up_proj" and self._in_turn:
            parts = [gate_then_up(part, dim=0) for part in parts]
        return from_mxfp4(name, *parts, self._rounding)

    def _of_block_fp8(self, names: list[str], weights: list[torch.Tensor], factors: list[torch.Tensor]) -> MXTensor:
        weights, factors = ([tensor.to(self._to["device"]) for tensor in tensors] for tensors in (weights, factors))
        if len(weights) == len(factors) == 2:
            parts = zip(names, weights, factors, strict=True)
            return above([from_block_fp8(*part, self._rounding) for part in parts], self._rounding)
        # transformers writes weights of single experts with the scales of a stack, if it has quantised them itself
        for name, weight in zip(names, weights, strict=True):
            if weight.dtype != weights[0].dtype:
                raise TypeError(f"{name} has dtype {weight.dtype}, and {names[0]} has {weights[0].dtype}")
        whole = torch.cat([weight.view(torch.uint8) for weight in weights]).view(weights[0].dtype)
        return gate_above_up(" above ".join(names), whole, factors[0], self._rounding)

    def _of_high_precision(self, stack: str, names: list[str], weights: list[torch.Tensor]) -> MXTensor:
        for name, weight in zip(names, weights, strict=True):
            if weight.dtype not in DTYPES:
                raise TypeError(f"{name} has dtype {weight.dtype} and no scales in the checkpoint; expected "
                                f"{', '.join(map(str, DTYPES))}, or block FP8 or MXFP4")
        weights = [weight.to(**self._to) for weight in weights]
        if self._transposed:
            weights = [weight.t() for weight in weights]
        if stack == "gate_up_proj" and self._in_turn:
            weights = [gate_then_up(weight, dim=0) for weight in weights]
        stacks = [weight.unsqueeze(0).contiguous() for weight in weights]
        return casts.quantize_weights(stacks, TILE, self._scaling_mode)[0]


def _check_shape(name: str, weight: torch.Tensor, expected: tuple[int, int]) -> None:
    if tuple(weight.shape) != expected:
        raise RuntimeError(f"{name} has shape {tuple(weight.shape)}; the model's config asks for {expected}")
