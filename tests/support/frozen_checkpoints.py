# SPDX-License-Identifier: Apache-2.0
"""Tiny checkpoints of Hugging Face MoE models in bf16, block FP8, MXFP4 and NVFP4; and their experts' weights in
float32, as plain torch reads them from the files."""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import Fp8Quantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

from tests.support.autoep_models import model
from tests.support.mxfp4_cases import E2M1

SIZES = dict(hidden_size=128, moe_intermediate_size=128, intermediate_size=128)
BLOCK_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
NVFP4 = {"modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
         "compressed-tensors": {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}}
EXPERT = re.compile(r".*\.experts\.\d+\.\w+\.weight|.*\.experts\.(gate_up|down)_proj")  # the weights' names
NOT_EXPERTS = ["lm_head", r".*\.self_attn", r".*\.shared_experts", r".*\.mlp\.(gate|up|down)_proj"]
PARTS = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}


def write(directory: Path, family: str, kind: str, shard: str = "300KB", everywhere: bool = False, **sizes) -> None:
    """Writes a checkpoint of several shards.

    `kind`: "bf16"; "float" or "ue8m0", which are block FP8 with scales of this format, as published checkpoints have
    it; "transformers", which transformers has quantized and saved; "mxfp4"; "modelopt" and "compressed-tensors", which
    are NVFP4. Attention is quantized only with `everywhere`, since no CPU computes block FP8.
    """
    net = model(family, torch.bfloat16, **{**SIZES, **sizes})
    with torch.no_grad():
        for name, p in net.named_parameters():
            if "experts" in name:  # so that they matter for the loss
                p.mul_(4) if p.dim() == 3 else p.normal_(std=0.5)
    net.save_pretrained(directory, max_shard_size=shard)
    if kind == "transformers":
        with fp8_without_gpu():
            quantization = FineGrainedFP8Config(modules_to_not_convert=NOT_EXPERTS)
            net = AutoModelForCausalLM.from_pretrained(directory, quantization_config=quantization, dtype="auto")
        for file in directory.glob("*.safetensors*"):
            file.unlink()
        net.save_pretrained(directory, max_shard_size=shard)
    elif kind == "mxfp4":
        rewrite(directory, _to_mxfp4)
        change_config(directory, quantization_config={"quant_method": "mxfp4"})
    elif kind in NVFP4:
        wanted = re.compile(r".*_proj\.weight") if everywhere else EXPERT
        rewrite(directory, lambda name, tensor: _to_nvfp4(name, tensor, kind) if wanted.fullmatch(name) else
                {name: tensor})
        change_config(directory, quantization_config=NVFP4[kind])
    elif kind != "bf16":
        quantization = FineGrainedFP8Config(scale_fmt=kind)
        wanted = re.compile(r".*_proj\.weight") if everywhere else EXPERT
        rewrite(directory, lambda name, tensor: _to_block_fp8(name, tensor, quantization)
                if wanted.fullmatch(name) else {name: tensor})
        change_config(directory, quantization_config={
            **BLOCK_FP8, "scale_fmt": kind, "modules_to_not_convert": ["lm_head"] if everywhere else NOT_EXPERTS})


@contextmanager
def fp8_without_gpu() -> Iterator[None]:
    """Inside the context, transformers makes and loads FP8 layers on a CPU. It cannot call them there."""
    plain = FineGrainedFP8HfQuantizer.validate_environment
    FineGrainedFP8HfQuantizer.validate_environment = lambda self, *args, **kwargs: None
    try:
        yield
    finally:
        FineGrainedFP8HfQuantizer.validate_environment = plain


def rewrite(directory: Path, change: Callable[[str, torch.Tensor], dict[str, torch.Tensor]]) -> None:
    """Replaces tensors in all files, and mends the index."""
    weight_map = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors = {}
        for name, tensor in load_file(file).items():
            tensors |= change(name, tensor)
        save_file(tensors, file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file.name)
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def change_config(directory: Path, **keys) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def _to_block_fp8(name: str, tensor: torch.Tensor, config: FineGrainedFP8Config) -> dict[str, torch.Tensor]:
    rows, columns = -tensor.shape[-2] % 128, -tensor.shape[-1] % 128
    quantizer = type("Quantizer", (), {"quantization_config": config})()
    made = Fp8Quantize(quantizer)._quantize_one(name, torch.nn.functional.pad(tensor, (0, columns, 0, rows)))
    made[name] = made[name][..., :tensor.shape[-2], :tensor.shape[-1]].contiguous()
    return made


def _to_mxfp4(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    if not EXPERT.fullmatch(name):
        return {name: tensor}
    groups = tensor.transpose(1, 2).float().unflatten(-1, (-1, 32))
    exponent = (groups.abs().amax(-1).clamp_min(1e-30).log2().floor() - 2).clamp(-127, 127)
    values = torch.tensor([*E2M1, *(-value for value in E2M1)])
    codes = (groups.unsqueeze(-1) / exponent.exp2()[..., None, None] - values).abs().argmin(-1)
    return {f"{name}_blocks": (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8),
            f"{name}_scales": (exponent + 127).to(torch.uint8)}


def _to_nvfp4(name: str, tensor: torch.Tensor, kind: str) -> dict[str, torch.Tensor]:
    groups = tensor.float().unflatten(-1, (-1, 16))
    largest = groups.abs().amax(-1)
    factor = largest.max() / (6 * 448)
    scales = (largest / (6 * factor)).to(torch.float8_e4m3fn)
    divisor = (scales.float() * factor).clamp_min(1e-30)[..., None, None]
    grid = torch.tensor([*E2M1, *(-value for value in E2M1)])
    codes = (groups.unsqueeze(-1) / divisor - grid).abs().argmin(-1).flatten(-2)
    packed, module = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8), name.removesuffix(".weight")
    scale, one = {f"{name}_scale": scales}, torch.ones(())
    if kind == "modelopt":
        return {name: packed, **scale, f"{name}_scale_2": factor, f"{module}.input_scale": one}
    return {f"{name}_packed": packed, **scale, f"{name}_global_scale": 1 / factor[None],
            f"{module}.input_global_scale": one[None]}


def nvfp4_values(tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """Of a weight, rounded to bf16, which the model's other tensors have. `name`: in high precision."""
    packed = tensors.get(f"{name}_packed", tensors.get(name)).long()
    codes = torch.stack([packed % 16, packed // 16], dim=-1).flatten(-2)
    values = torch.tensor([*E2M1, *(-value for value in E2M1)])[codes]
    factor = tensors[f"{name}_scale_2"] if f"{name}_scale_2" in tensors else 1 / tensors[f"{name}_global_scale"]
    return (values * (tensors[f"{name}_scale"].float() * factor).repeat_interleave(16, -1)).bfloat16().float()


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint."""
    return {name: tensor for file in sorted(directory.glob("*.safetensors")) for name, tensor in
            load_file(file).items()}


def expert_values(directory: Path) -> dict[str, dict[str, torch.Tensor]]:
    """For each module of experts, by its name in the file: gate [E, F, H], up [E, F, H] and down [E, H, F]."""
    found: dict[str, dict] = {}
    tensors = tensors_of(directory)
    for name, tensor in tensors.items():
        module, _, rest = name.partition(".experts.")
        of_module = found.setdefault(f"{module}.experts", {}) if rest and "scale" not in rest else None
        if of_module is not None and f"{name.removesuffix('_packed')}_scale" in tensors:  # NVFP4
            number, part = rest.split(".")[:2]
            of_module.setdefault(PARTS[part], {})[int(number)] = nvfp4_values(tensors, name.removesuffix("_packed"))
            continue
        if of_module is None or rest.endswith("_bias"):
            continue
        if rest.endswith("_blocks"):
            scales = tensors[name.replace("_blocks", "_scales")]
            tensor = convert_moe_packed_tensors(tensor, scales, dtype=torch.float32)
        if tensor.dim() == 3:  # gpt-oss: [E, in, out], the columns of gate and up in turn
            rows = tensor.transpose(1, 2).float()
            of_module |= {"gate": rows[:, 0::2], "up": rows[:, 1::2]} if "gate_up" in rest else {"down": rows}
            continue
        number, part = rest.split(".")[:2]
        of_module.setdefault(PARTS[part], {})[int(number)] = tensor.float() * _factors(tensors, name, tensor.shape)
    return {module: {part: torch.stack([experts[i] for i in range(len(experts))]) if isinstance(experts, dict) else
                     experts for part, experts in parts.items()} for module, parts in found.items() if parts}


def _factors(tensors: dict, name: str, shape: torch.Size) -> torch.Tensor | float:
    of_stack = re.sub(r"\d+\.(\w+)_proj\.weight$", lambda m: "down_proj" if m[1] == "down" else "gate_up_proj", name)
    if f"{name}_scale_inv" in tensors:
        factors = tensors[f"{name}_scale_inv"].float()
    elif f"{of_stack}_scale_inv" in tensors:  # as transformers saves what it has quantized itself; sizes of 128
        number = int(re.search(r"experts\.(\d+)\.", name)[1])
        both = tensors[f"{of_stack}_scale_inv"][number].float()
        factors = both if "down" in name else both.chunk(2)["up" in name.rsplit(".", 2)[1]]
    else:
        return 1.0
    return factors.repeat_interleave(128, 0).repeat_interleave(128, 1)[:shape[0], :shape[1]]
