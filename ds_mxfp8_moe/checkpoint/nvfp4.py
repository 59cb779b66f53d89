# SPDX-License-Identifier: Apache-2.0
"""Weights in NVFP4: which tensors of a checkpoint they are, and their values.

NVFP4 stores e2m1 values, two in a byte, an e4m3 scale for 16 values of a row, and a float32 factor for the tensor. A
scale has four significant bits, so that the products are no e4m3 values: they are read as float32. Two libraries write
it, under these names:

                         values [N, K / 2]    scales [N, K / 16]    factor                 a value is
    ModelOpt             weight               weight_scale          weight_scale_2         e2m1 * scale * factor
    compressed-tensors   weight_packed        weight_scale          weight_global_scale    e2m1 * scale / factor
"""

import re
from collections.abc import Collection
from typing import NamedTuple

import torch

from ..compute.mxfp4 import e2m1_values

# The endings of the names, after "weight": of the values, the scales and the factor.
MODELOPT, COMPRESSED_TENSORS = ("", "_scale", "_scale_2"), ("_packed", "_scale", "_global_scale")
OF_ACTIVATIONS = re.compile(r".*\.(input_scale|input_global_scale|k_scale|v_scale)")
OF_OTHER_WEIGHTS = re.compile(r".*\.(weight_(packed|scale|scale_2|global_scale|zero_point)|pre_quant_scale)")


class Parts(NamedTuple):
    """The names of a weight's tensors."""

    values: str
    scales: str
    factor: str


def find_weights(names: Collection[str]) -> dict[str, Parts]:
    """The weights in NVFP4 among a checkpoint's tensors, by the name that they have in high precision.

    Raises:
        RuntimeError: other weights are in another quantized format.
    """
    found = {}
    for name in names:
        for endings in (MODELOPT, COMPRESSED_TENSORS):
            if name.endswith(f".weight{endings[-1]}"):
                weight = name.removesuffix(endings[-1])
                found[weight] = Parts(*(weight + ending for ending in endings))
    used = {part for parts in found.values() for part in parts}
    other = next((name for name in names if name not in used and OF_OTHER_WEIGHTS.fullmatch(name)), None)
    if found and other:
        raise RuntimeError(f"{other} belongs to no weight in NVFP4, as others of the checkpoint do: from_pretrained "
                           "reads NVFP4 beside high precision alone. Use the model's files in bf16")
    return found


def values(name: str, parts: Parts, codes: torch.Tensor, scales: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """A weight's values in float32, [N, K].

    Args:
        name: of the weight, for errors.
        parts: the names of the tensors, which say what the factor does.
        codes: uint8 [N, K / 2]. The lower half of a byte is the earlier value.
        scales: float8_e4m3fn [N, K / 16].
        factor: float32, one value.

    Raises:
        RuntimeError: a tensor has another form, or a scale is NaN. Reads from the device.
    """
    expected = (*codes.shape[:-1], codes.shape[-1] // 8) if codes.dim() == 2 else None
    if (codes.dtype, scales.dtype, factor.dtype) != (torch.uint8, torch.float8_e4m3fn, torch.float32) or (
            tuple(scales.shape) != expected or codes.shape[-1] % 8 or factor.numel() != 1):
        given = ", ".join(f"{part} is {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
                          for part, tensor in zip(parts, (codes, scales, factor), strict=True))
        raise RuntimeError(f"{name} is not in NVFP4, which has uint8 [N, K / 2], float8_e4m3fn [N, K / 16] and a "
                           f"float32: {given}")
    inverted = parts.factor.endswith(COMPRESSED_TENSORS[-1])
    scales = scales.float() / factor if inverted else scales.float() * factor
    if not bool(scales.isfinite().all()):
        raise RuntimeError(f"{name}: one of its scales in {parts.scales} or {parts.factor} is NaN")
    return (e2m1_values(codes).unflatten(-1, (-1, 16)) * scales.unsqueeze(-1)).flatten(-2)


def is_nvfp4(quantization: dict) -> bool:
    """Whether this "quantization_config" of a config.json is one of NVFP4."""
    method = quantization.get("quant_method")
    return method == "modelopt" and quantization.get("quant_algo") == "NVFP4" or (
        method == "compressed-tensors" and quantization.get("format") == "nvfp4-pack-quantized")
