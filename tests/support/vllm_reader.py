# SPDX-License-Identifier: Apache-2.0
"""What vLLM asks a checkpoint in block FP8 for, and how it reads it, in a few lines: which modules are quantized
(`is_layer_skipped`), the names and shapes of scales (`Fp8LinearMethod`, `Fp8MoEMethod`), and the sizes it refuses.
"""

import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file

FUSED = {"q_proj": ("q_proj", "k_proj", "v_proj"), "gate_proj": ("gate_proj", "up_proj")}
EXPERT = re.compile(r"(.+\.experts)\.\d+\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight")
NOT_LINEAR = ("embed_tokens.weight", "lm_head.weight", "norm.weight")


def files_of(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder. Where there are several files, the index names each tensor's."""
    index = directory / "model.safetensors.index.json"
    if not index.exists():
        return load_file(directory / "model.safetensors")
    places, found = json.loads(index.read_text())["weight_map"], {}
    for name in sorted(set(places.values())):
        found |= load_file(directory / name)
    assert places.keys() == found.keys()
    return found


def is_quantized(name: str, plain: dict[str, torch.Tensor], ignored: list[str]) -> bool:
    if expert := EXPERT.fullmatch(name):
        return not any(expert[1] in ignored_name for ignored_name in ignored)
    if plain[name].dim() != 2 or not name.endswith(".weight") or name.endswith(NOT_LINEAR):
        return False
    prefix, _, last = name.removesuffix(".weight").rpartition(".")
    parts = [f"{prefix}.{part}" for part in FUSED.get(last, ())]
    if not all(f"{part}.weight" in plain for part in parts):  # not in every model
        parts = []
    skipped = {part in ignored for part in parts or [f"{prefix}.{last}"]}
    assert len(skipped) == 1, f"some but not all shards of {name} are quantized"
    return not skipped.pop()


def read(directory: Path, plain: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Every tensor of an unquantized checkpoint (`plain`), dequantized where it is quantized.

    Fails if one is missing, has another shape, or is left over.
    """
    section = json.loads((directory / "config.json").read_text())["quantization_config"]
    assert (section["quant_method"], section["activation_scheme"]) == ("fp8", "dynamic")
    assert section["weight_block_size"] == [128, 128]
    tensors, found = files_of(directory), {}
    for name, tensor in plain.items():
        weight, shape = tensors.pop(name), tensor.shape
        found[name] = weight
        assert weight.shape == shape, name
        if not is_quantized(name, plain, section["ignored_layers"]):
            assert weight.dtype == tensor.dtype, name
            continue
        assert weight.dtype == torch.float8_e4m3fn, name
        assert shape[0] % 128 == 0 and shape[1] % 128 == 0, f"vLLM refuses some of these sizes: {name}"
        scale = tensors.pop(f"{name}_scale_inv")
        assert scale.dtype == torch.float32 and scale.shape == (shape[0] // 128, shape[1] // 128), name
        found[name] = weight.float() * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert not tensors, f"vLLM does not ask for {sorted(tensors)}"
    return found
