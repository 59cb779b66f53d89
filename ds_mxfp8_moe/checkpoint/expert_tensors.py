# SPDX-License-Identifier: Apache-2.0
"""Which tensors of a checkpoint are experts' weights, and these weights as FrozenWeights takes them.

A checkpoint stores the experts of a block one by one or in a stack, in bf16, in block FP8 or in MXFP4. transformers'
conversion mapping says which of the model's parameters they become.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from ..compute.block_fp8 import Rounding, from_block_fp8, from_mxfp4, stack_rows
from ..compute.formula import DTYPES, gate_then_up
from ..compute.mx import MXTensor
from ..compute.mxfp4 import MXFP4Weights
from ..ffn.frozen_weights import Weights
from ..layers.held_experts import HeldExperts, gate_above_up
from ..recognition.stacked import DOWN
from .shards import ShardReader

# How the names of a quantized weight's parts end, in place of the weight's own name.
PARTS = ("_scale_inv", "_blocks", "_scales")
NUMBER = "<number>"
MERGES = (["MergeModulelist"], ["MergeModulelist", "Concatenate"], [])
EACH = {"MergeModulelist", "Concatenate", "Transpose", "Interleave"}  # change experts one by one
AXES = {"": 2, "_scale_inv": 2, "_blocks": 3, "_scales": 2}  # of one expert's tensors
# Values of a GEMM's weights that are read and quantized together: with each expert alone, the host does more than the
# device.
AT_ONCE = 2**26


@dataclass
class Source:
    """Which of a checkpoint's tensors become a stacked parameter of experts, and how.

    Attributes:
        forms: by part (PARTS, and "" for the weight itself), and by the pattern of transformers' converter that they
            match: the names of its tensors. A tensor has all experts, or a single one, with NUMBER in place of the
            expert's number. Two patterns are gate's and up's.
        converter: transformers'. None: the parameter has the tensor's values.
    """

    forms: dict[str, dict[str, str]] = field(default_factory=dict)
    converter: Any = None

    @property
    def operations(self) -> dict[str, Any]:
        """What the converter does with weights in high precision, by the names of transformers' classes."""
        every = self.converter.operations if self.converter else ()
        named = {type(one).__name__: one for one in every}
        return {name: one for name, one in named.items() if not name.endswith("Dequantize")}

    @property
    def stacks(self) -> bool:
        """Whether tensors are of single experts."""
        return "MergeModulelist" in self.operations

    @property
    def merges(self) -> bool:
        """Whether the converter only stacks experts and puts gate above up."""
        return [*self.operations] in MERGES

    def names(self, part: str) -> list[str]:
        """The names of a part's tensors, gate's before up's."""
        of_part = self.forms.get(part, {})
        patterns = self.converter.source_patterns if self.converter else []
        return [of_part[key] for key in sorted(of_part, key=lambda key: patterns.index(key) if key else 0)]


def expert_sources(names: Sequence[str], parameters: Sequence[str], mapping: list,
                   base_prefix: str) -> tuple[set[str], dict[str, Source]]:
    """Which tensors of a checkpoint are the weights of a model's experts: the names of all of them, and by parameter.

    Args:
        names: of the checkpoint's tensors.
        parameters: the names of the stacked parameters of experts in the model.
        mapping: transformers' WeightRenamings and WeightConverters of this model.
        base_prefix: the model's base_model_prefix.

    Raises:
        RuntimeError: a converter does more than to stack experts, to put gate above up or in turn with it, and to
            transpose. Or two series of tensors become the same weights.
    """
    from transformers.core_model_loading import WeightConverter, rename_source_key

    renamings = [one for one in mapping if not isinstance(one, WeightConverter)]
    converters = [one for one in mapping if isinstance(one, WeightConverter)]
    known = dict.fromkeys(parameters, True)
    found: set[str] = set()
    sources: dict[str, Source] = {}
    for name in names:
        renamed, _ = rename_source_key(name, renamings, [])
        part = next((end for end in PARTS if renamed.endswith(end)), "")
        parameter, pattern = rename_source_key(renamed.removesuffix(part), [], converters, base_prefix, known)
        if parameter not in known:
            continue
        found.add(name)
        source = sources.setdefault(parameter, Source())
        if pattern is None:
            form = name
        else:
            source.converter = next(one for one in converters if pattern in one.source_patterns)
            _check_converter(parameter, source)
            form = re.sub(r"(.*\.)\d+(\..*)", rf"\1{NUMBER}\2", name) if source.stacks else name
        same = source.forms.setdefault(part, {}).setdefault(pattern or "", form)
        if same != form:
            raise RuntimeError(f"{name} would become {parameter}, as {same} does: the checkpoint has tensors of two "
                               "models")
    return found, sources


def _check_converter(parameter: str, source: Source) -> None:
    if not EACH.issuperset(source.operations):
        done = ", ".join(source.operations)
        raise RuntimeError(f"{parameter} is made of a checkpoint's tensors by {done}, which is not "
                           "supported for experts that are quantized while they are read: use transformers' "
                           "from_pretrained")


class ExpertTensors:
    """The experts of one block in a checkpoint, on the device of `shards`."""

    def __init__(self, shards: ShardReader, sources: dict[str, Source], name: str, experts: HeldExperts,
                 dtype: torch.dtype, rounding: Rounding):
        """Arguments:
            name: of the module `experts` in the model.
            dtype: of the model.
            rounding: counts what changes of weights that are not in high precision.
        """
        self._shards, self._layout, self._name = shards, experts.layout, name
        self._dtype, self._rounding = dtype, rounding
        self._sources = {stack: sources.get(f"{name}.{stack}", Source()) for stack in self._layout.names}
        self._shapes = {stack: tuple(getattr(experts, stack).shape[1:]) for stack in self._layout.names}

    @property
    def in_mxfp4(self) -> bool:
        return all("_blocks" in source.forms for source in self._sources.values())

    def weights(self, experts: range) -> Iterator[tuple[range, str, Weights]]:
        """Some experts' weights in the first GEMM, gate above up, and in the second one, with the experts' numbers and
        a name of `Layout.names`.

        `experts`: counted over all ranks.

        Raises:
            RuntimeError, TypeError, ValueError: a tensor is missing, or has another form. The error names it.
        """
        jobs = []
        for stack, (rows, columns) in self._shapes.items():
            step = max(1, AT_ONCE // (rows * columns))
            jobs += [(experts[i:i + step], stack) for i in range(0, len(experts), step)]
        for (some, stack), read in zip(jobs, self._shards.reads.ahead(self._read, jobs), strict=True):
            try:
                yield some, stack, self._weights(stack, some, read)
            except (RuntimeError, TypeError, ValueError) as error:
                if len(some) == 1 or isinstance(error, torch.OutOfMemoryError):
                    raise
                for i in some:  # the error names an expert then. Or their tensors have several forms
                    one = range(i, i + 1)
                    yield one, stack, self._weights(stack, one, self._read((one, stack)))

    def _read(self, job: tuple[range, str]) -> dict[str, list]:
        """By part, and gate's before up's: the tensors of experts' weights, one of all or one of each."""
        experts, stack = job
        forms = self._sources[stack].forms
        parts = ("_blocks", "_scales") if "_blocks" in forms else ("", "_scale_inv")
        return {part: self._read_part(stack, part, experts) for part in parts if part != "_scale_inv" or part in forms}

    def _weights(self, stack: str, experts: range, read: dict[str, list]) -> Weights:
        source = self._sources[stack]
        names = [form.replace(NUMBER, str(experts[0])) if NUMBER in form else f"{form}[{experts[0]}]"
                 for form in source.names("") or source.names("_blocks")]
        rows, columns = self._shapes[stack][::-1] if self._layout.is_transposed else self._shapes[stack]
        weights, *factors = [[*map(_stacked, of_part)] for of_part in read.values()]
        if "_blocks" in source.forms:
            made = self._of_mxfp4(stack, names[0], *weights, *factors[0])
            _check_shape(names[0], made, (rows, columns))
            return made
        if factors and not source.merges:
            raise RuntimeError(f"{names[0]} is in block FP8, and becomes {self._name}.{stack} by more than merging: "
                               "use transformers' from_pretrained")
        if source.merges:
            shape = (rows // len(names), columns)
            for name, weight in zip(names, weights, strict=True):
                _check_shape(name, weight, shape[::-1] if self._layout.is_transposed and not factors else shape)
        if factors:
            return self._of_block_fp8(stack, names, weights, *factors)
        return self._of_high_precision(stack, names, weights)

    def _read_part(self, stack: str, part: str, experts: range) -> list:
        forms = self._sources[stack].names(part)
        if not forms:
            raise RuntimeError(f"no tensor of the checkpoint becomes {self._name}.{stack}{part}")
        read = []
        for form in forms:
            if NUMBER in form:
                names = [form.replace(NUMBER, str(expert)) for expert in experts]
                read.append([*map(self._shards.read, names)])
            else:
                names = [form]
                read.append(self._shards.read(form, experts))
            for name, tensor in zip(names, read[-1], strict=False):
                if tensor.dim() != AXES[part]:
                    raise RuntimeError(f"{name} has shape {tuple(tensor.shape)} for an expert, expected {AXES[part]} "
                                       "axes")
        return read

    def _of_mxfp4(self, stack: str, name: str, *parts: torch.Tensor) -> MXFP4Weights:
        if stack != DOWN and not self._layout.is_concatenated:
            parts = tuple(gate_then_up(part, dim=1) for part in parts)
        return from_mxfp4(name, *parts, self._rounding)  # type: ignore[call-arg]

    def _of_block_fp8(self, stack: str, names: list[str], weights: list[torch.Tensor],
                      factors: list[torch.Tensor]) -> MXTensor:
        if len(weights) == len(factors) == 2:
            parts = zip(names, weights, factors, strict=True)
            return stack_rows([from_block_fp8(*part, self._rounding) for part in parts], self._rounding)
        # transformers writes weights of single experts with the scales of a stack, if it has quantized them itself
        for name, weight in zip(names, weights, strict=True):
            if weight.dtype != weights[0].dtype:
                raise TypeError(f"{name} has dtype {weight.dtype}, and {names[0]} has {weights[0].dtype}")
        whole = torch.cat([weight.view(torch.uint8) for weight in weights], dim=1).view(weights[0].dtype)
        convert = gate_above_up if stack != DOWN and self._layout.has_gate else from_block_fp8
        return convert(" above ".join(names), whole, factors[0], self._rounding)

    def _of_high_precision(self, stack: str, names: list[str], weights: list[torch.Tensor]) -> list[torch.Tensor]:
        for name, weight in zip(names, weights, strict=True):
            if weight.dtype not in DTYPES:
                raise TypeError(f"{name} has dtype {weight.dtype} and no scales in the checkpoint; expected "
                                f"{', '.join(map(str, DTYPES))}, or block FP8, MXFP4 or NVFP4")
        weight_BNK = self._convert(stack, [weight.to(self._dtype) for weight in weights])
        _check_shape(names[0], weight_BNK, self._shapes[stack])
        parts = [self._layout.split_down(weight_BNK)] if stack == DOWN else self._layout.split_up(weight_BNK)
        return [part.contiguous() for part in parts]

    def _convert(self, stack: str, weights: list[torch.Tensor]) -> torch.Tensor:
        """What transformers' converter makes of some experts' tensors [B, ...]."""
        source = self._sources[stack]
        if not source.operations:
            return weights[0]
        patterns = [one for one in source.converter.source_patterns if one in source.forms[""]]
        found = {pattern: [*weight] if source.stacks else [weight]
                 for pattern, weight in zip(patterns, weights, strict=True)}
        whole = torch.empty(len(weights[0]), *self._shapes[stack], device="meta")
        model = SimpleNamespace(get_parameter=lambda name: whole)
        for operation in source.operations.values():
            found = operation.convert(found, source_patterns=patterns,
                                      target_patterns=source.converter.target_patterns,
                                      full_layer_name=f"{self._name}.{stack}", model=model, config=None)
        return next(iter(found.values()))


def _stacked(read: torch.Tensor | list[torch.Tensor]) -> torch.Tensor:
    """[B, ...] of the tensors of B experts. Raises RuntimeError: they differ."""
    if isinstance(read, torch.Tensor):
        return read
    first = read[0]
    if any((one.shape, one.dtype) != (first.shape, first.dtype) for one in read):
        raise RuntimeError("experts' tensors have several shapes or dtypes")
    # Not every device stacks float8.
    return torch.stack([one.view(torch.uint8) for one in read]).view(first.dtype) if len(read) > 1 else first[None]


def _check_shape(name: str, weight: torch.Tensor | MXFP4Weights, expected: tuple[int, int]) -> None:
    """`weight`: of several experts, [B, N, K]."""
    if tuple(weight.shape[1:]) != expected:
        raise RuntimeError(f"{name} has shape {tuple(weight.shape[1:])}; the model's config asks for {expected}")
