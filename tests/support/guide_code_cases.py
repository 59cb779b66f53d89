# SPDX-License-Identifier: Apache-2.0
"""The code of the guides, run as it is written."""

import os
import re
from pathlib import Path

import deepspeed.comm as dist
import torch
from deepspeed.accelerator import get_accelerator

import ds_mxfp8_moe
from ds_mxfp8_moe.layers.experts import converted_layers
from tests.support.autoep_models import batch, model
from tests.support.engine_cases import enabled
from tests.support.trainers import Sentences

ROOT = Path(__file__).parents[2]
GUIDES = ROOT / "examples/guides"


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def config_of(page: Path) -> str | None:
    """The page's whole config, which begins with a line of its own."""
    return next((block for block in blocks(page, "json") if block.startswith("{\n")), None)


def write_config(directory: Path, text: str | None) -> None:
    """Once for all ranks: another one would read a file that is being written."""
    if text is not None and dist.get_rank() == 0:
        (directory / "ds_config.json").write_text(text)
    dist.barrier()


@enabled(times=0)  # the blocks call `enable` themselves
def run(page: Path, directory: Path, which: slice | list[int] = slice(None), **given) -> dict:
    """Runs all Python of a page in `directory`, or `which` of its blocks, one after the other. Returns its names."""
    names = {"model": model(), "dataset": Sentences(16)} | given
    before = os.getcwd()
    write_config(directory, config_of(page))
    os.chdir(directory)
    try:
        found = blocks(page, "python")
        for block in found[which] if isinstance(which, slice) else [found[i] for i in which]:
            block = block.replace("range(101)", "range(11)").replace("range(20)", "range(10)")  # steps
            exec(compile(block, str(page), "exec"), names)
    finally:
        os.chdir(before)
    return names


def quick_start(directory: Path) -> tuple[int, float]:
    names = run(GUIDES / "quick_start.md", directory)
    return len(converted_layers(names["engine"].module)), names["loss"].item()


def classic(directory: Path) -> tuple[list[str], float]:
    names = run(GUIDES / "classic.md", directory)
    converted = [layer.mxfp8_settings.name for layer in converted_layers(names["engine"].module)]
    return converted, names["train"](names["engine"]).item()


def trainer(directory: Path) -> int:
    return len(converted_layers(run(GUIDES / "trainer.md", directory)["trainer"].model_wrapped.module))


def accelerate(directory: Path) -> tuple[int, int]:
    names = run(GUIDES / "accelerate.md", directory)
    return len(converted_layers(names["model"].module)), names["accelerator"].num_processes


def lora(directory: Path) -> int:
    return len(converted_layers(run(GUIDES / "peft.md", directory, [0])["engine"].module))


def serving(directory: Path) -> tuple[str, torch.dtype]:
    """The last of the exported tensors."""
    sizes = {"hidden_size": 128, "moe_intermediate_size": 128}
    names = run(GUIDES / "serving.md", directory, model=model(**sizes))
    return names["name"], names["tensor"].dtype


def metrics(directory: Path) -> None:
    write_config(directory, config_of(GUIDES / "metrics.md"))
    before = os.getcwd()
    os.chdir(directory)
    engine, *_ = ds_mxfp8_moe.initialize(model=model(), config="ds_config.json")
    os.chdir(before)
    run(GUIDES / "metrics.md", directory, engine=engine)


def building_blocks(directory: Path) -> float:
    """SQNR in dB of the page's result beside the same experts in bf16."""
    names = run(GUIDES / "building_blocks.md", directory)
    x_RD, whole = names["x_RD"].detach(), names["whole"]
    parts = [(torch.nn.functional.silu(x @ w1.t()) * (x @ w3.t())) @ w2.t() for x, w1, w2, w3 in zip(
        x_RD.split(names["rows_E"].tolist()), whole.w1, whole.w2, whole.w3, strict=True)]
    expected = torch.cat(parts).float()
    noise = expected - names["y_RD"].float()
    return (10 * torch.log10(expected.square().sum() / noise.square().sum())).item()


def plain_torch(directory: Path) -> float:
    """The last loss."""
    net, device = model(), get_accelerator().current_device_name()
    if dist.get_rank() == 0:
        net.save_pretrained(directory)
    return run(GUIDES / "plain_torch.md", directory, model=net.to(device), folder=directory,
               batches=[batch(step).to(device) for step in range(3)])["loss"].item()


def all_to_all(directory: Path) -> float:
    """By how much a value is off, at most."""
    names = run(GUIDES / "all_to_all.md", directory)
    expected = 2 * names["x"].float() * names["weights"].sum(1, keepdim=True)
    return float((names["out"].float() - expected).abs().max())
