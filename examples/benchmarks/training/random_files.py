# SPDX-License-Identifier: Apache-2.0
"""Checkpoint files of random weights in a model's real shapes, with the names and the forms of published ones.

One file for each layer. Layers of the same form have the same values, so that 100 GB are written in a minute or two.
"""

import json
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from ds_mxfp8_moe.compute.block_fp8 import to_block_fp8
from ds_mxfp8_moe.compute.mx import quantize_tiles
from lib.world import BF16, device

IN_BF16, IN_FP8, IN_MXFP4, IN_NVFP4 = "bf16", "FP8", "MXFP4", "NVFP4"
QUANTISATION = {IN_MXFP4: {"quant_method": "mxfp4"},
                IN_NVFP4: {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "*self_attn*"]},
                IN_FP8: {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
                         "scale_fmt": "ue8m0",
                         "modules_to_not_convert": ["lm_head", r".*\.self_attn", r".*\.shared_experts",
                                                    r".*\.mlp\.(gate|up|down)_proj"]}}
DTYPES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.float8_e4m3fn: "F8_E4M3", torch.uint8: "U8"}
E2M1_RMS = 2.93  # of all its values
E4M3_SCALES = 0x70, 0x7f  # bytes of the scales in NVFP4, from 128 to 448
FILLED = 0.9  # of what is free in a folder
WRITERS = 8


def weights(*shape: int) -> torch.Tensor:
    """[..., out, in], on the device."""
    return torch.randn(*shape, dtype=BF16, device=device()) * shape[-1]**-0.5


def in_bf16(name: str, n: int, k: int) -> dict[str, torch.Tensor]:
    """What a file has for the weight `name`, [n, k], as the functions below."""
    return {name: weights(n, k)}


def in_fp8(name: str, n: int, k: int) -> dict[str, torch.Tensor]:
    weight, factors = to_block_fp8(quantize_tiles(weights(n, k)))
    return {f"{name}_scale_inv": factors, name: weight}


def in_nvfp4(name: str, n: int, k: int) -> dict[str, torch.Tensor]:
    """As ModelOpt writes it."""
    scales = torch.randint(*E4M3_SCALES, (n, k // 16), dtype=torch.uint8, device=device()).view(torch.float8_e4m3fn)
    return {name: torch.randint(256, (n, k // 2), dtype=torch.uint8, device=device()), f"{name}_scale": scales,
            f"{name}_scale_2": k**-0.5 / E2M1_RMS / scales.float().square().mean().sqrt()}


def stack_in_mxfp4(name: str, experts: int, n: int, k: int) -> dict[str, torch.Tensor]:
    exponent = 127 + round(torch.tensor(k**-0.5 / E2M1_RMS).log2().item())
    blocks = torch.randint(256, (experts, n, k // 32, 16), dtype=torch.uint8, device=device())
    scales = torch.randint(exponent - 1, exponent + 2, (experts, n, k // 32), dtype=torch.uint8, device=device())
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}


def expert_tensors(name: str, shape: torch.Size, files: str) -> Iterator[tuple[str, torch.Tensor]]:
    """A stack of experts as published checkpoints have it: a stack in MXFP4, and else expert by expert.

    `shape`: of the model's parameter: [E, in, out] of gpt-oss, which is in MXFP4; else [E, out, in].
    """
    if files == IN_MXFP4:
        experts, k, n = shape
        yield from stack_in_mxfp4(name, experts, n, k).items()
        return
    written = {IN_BF16: in_bf16, IN_FP8: in_fp8, IN_NVFP4: in_nvfp4}[files]
    stem, stack = name.rsplit(".", 1)
    parts = ("gate_proj", "up_proj") if stack == "gate_up_proj" else (stack, )
    for one in (f"{stem}.{e}.{part}.weight" for e in range(shape[0]) for part in parts):
        yield from written(one, shape[1] // len(parts), shape[2]).items()


def random_tensors(like: dict[str, torch.Tensor], files: str) -> dict[str, torch.Tensor]:
    """What a file has for these parameters, on the host, the widest dtypes first. `like`: without memory."""
    made: dict[str, torch.Tensor] = {}
    for name, meta in like.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            made |= {one: tensor.cpu() for one, tensor in expert_tensors(name, meta.shape, files)}
        elif name.endswith("bias") or meta.dim() < 2:
            made[name] = torch.full(meta.shape, float(name.endswith("norm.weight")), dtype=meta.dtype)
        else:
            made[name] = weights(*meta.shape).cpu()
    return dict(sorted(made.items(), key=lambda one: -one[1].element_size()))


def write_file(path: Path, prefix: str, tensors: dict[str, torch.Tensor]) -> None:
    """A file in safetensors. safetensors' own writer would hold its bytes a second time, and other threads up."""
    at, header = 0, {"__metadata__": {"format": "pt"}}
    for name, tensor in tensors.items():
        header[prefix + name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape),
                                 "data_offsets": [at, at := at + tensor.nbytes]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(tensor.contiguous().flatten().view(torch.uint8).numpy())


@contextmanager
def checkpoint(config: Any, files: str, folders: list[Path]) -> Iterator[tuple[Path, dict]]:
    """The folder of a checkpoint inside the context, and what rows say of it.

    Args:
        config: transformers'.
        files: what the experts are in.
        folders: a file goes to the first with room.

    Raises:
        RuntimeError: the folders have no room.
    """
    from transformers import AutoModelForCausalLM
    begin, largest, weight_map = time.perf_counter(), 0, {}
    with torch.device("meta"):
        state = AutoModelForCausalLM.from_config(config, dtype=BF16).state_dict()
    groups: dict[str, dict] = {}
    for name, meta in state.items():
        prefix = found[0] if (found := re.match(r"model\.layers\.\d+\.", name)) else ""
        groups.setdefault(prefix, {})[name.removeprefix(prefix)] = meta
    torch.manual_seed(0)
    with ExitStack() as stack:
        places = {Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder, prefix="from_files_"))):
                  FILLED * shutil.disk_usage(folder).free for folder in folders}
        main = next(iter(places))
        jobs, made = [], {}
        for i, (prefix, like) in enumerate(groups.items()):
            form = str([(name, meta.shape) for name, meta in like.items()])
            if form not in made:
                made[form] = random_tensors(like, files)
            size = sum(tensor.nbytes for tensor in made[form].values())
            place = next((place for place, room in places.items() if room > size), None)
            if place is None:
                raise RuntimeError(f"no room for the files in {', '.join(map(str, folders))}: at file {i + 1} of "
                                   f"{len(groups)}, of {size / 1e9:.1f} GB")
            places[place], largest = places[place] - size, max(largest, size)
            path = place / f"model-{i + 1:05}-of-{len(groups):05}.safetensors"
            jobs.append((path, prefix, made[form]))
            weight_map |= {prefix + name: path.name for name in made[form]}
            if place != main:
                (main / path.name).symlink_to(path)
        with ThreadPoolExecutor(WRITERS) as writers:
            for _ in writers.map(lambda job: write_file(*job), jobs):
                pass
        jobs.clear()
        made.clear()
        config.save_pretrained(main)
        keys = json.loads((main / "config.json").read_text())
        keys |= {"quantization_config": QUANTISATION[files]} if files in QUANTISATION else {}
        (main / "config.json").write_text(json.dumps(keys))
        (main / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        total = sum(path.stat().st_size for path in main.glob("*.safetensors"))
        yield main, {"file_gb": total / 1e9, "largest_file_gb": largest / 1e9,
                     "write_s": time.perf_counter() - begin}
