# SPDX-License-Identifier: Apache-2.0
"""The code of the guides and of the README runs as it stands there, on two ranks."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import deepspeed.comm as dist
import peft
import pytest
import torch
import transformers

import ds_mxfp8_moe
from ds_mxfp8_moe.layers.experts import converted_layers
from ds_mxfp8_moe.layers.frozen_experts import frozen_layers
from ds_mxfp8_moe.transport.peer_memory import PeerMemory
from tests.support import emulator
from tests.support.autoep_models import batch, ds_config, engine, model
from tests.support.guide_code_cases import (
    GUIDES,
    ROOT,
    accelerate,
    all_to_all,
    blocks,
    building_blocks,
    classic,
    lora,
    metrics,
    plain_torch,
    quick_start,
    run,
    serving,
    trainer,
    write_config,
)
from tests.support.registries_cases import needs_exchange, on_cpu
from tests.support.slow import slow_except


def loads(directory: Path) -> bool:
    """Whether plain transformers finds all weights there, and no others."""
    _, info = transformers.AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    return not any(info.values())


def readme(directory: Path) -> int:
    line, = blocks(ROOT / "README.md", "json")
    write_config(directory, json.dumps(ds_config(json.loads(f"{{{line}}}")["mxfp8_moe"])))
    return len(converted_layers(run(ROOT / "README.md", directory)["engine"].module))


def test_the_lines_of_the_readme(ranks2, tmp_path):
    assert ranks2.run(readme, tmp_path) == [2, 2]


@pytest.mark.slow
def test_the_quick_start(ranks2, tmp_path):
    for converted, loss in ranks2.run(quick_start, tmp_path):
        assert converted == 2 and loss < 4.2
    assert loads(tmp_path / "trained")


@pytest.mark.slow
def test_classic(ranks2, tmp_path):
    for converted, loss in ranks2.run(classic, tmp_path):
        assert converted == ["moe"] and loss < 4


def test_trainer(ranks2, tmp_path):
    assert ranks2.run(trainer, tmp_path) == [2, 2]
    assert loads(tmp_path / "run/final") and loads(tmp_path / "run/checkpoint-3")


def test_accelerate(ranks2, tmp_path):
    assert ranks2.run(accelerate, tmp_path) == [(2, 2)] * 2
    assert loads(tmp_path / "run/final")


def test_peft(ranks2, tmp_path, monkeypatch):
    assert ranks2.run(lora, tmp_path) == [2, 2]
    adapters = peft.PeftModel.from_pretrained(model(), tmp_path / "run/adapters")
    assert any(bool(p.any()) for name, p in adapters.named_parameters() if "lora_B" in name)
    model().save_pretrained(tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    exec(blocks(GUIDES / "peft.md", "python")[1], {})
    assert loads(tmp_path / "run/merged")
    assert ranks2.run(too_large, tmp_path) == [2, 2]


def too_large(directory: Path) -> int:
    names = {"ds_mxfp8_moe": ds_mxfp8_moe, "peft": peft, "lora": peft.LoraConfig(target_modules=["q_proj"])}
    before = os.getcwd()
    os.chdir(directory)
    exec(blocks(GUIDES / "peft.md", "python")[2], names)
    os.chdir(before)
    return len(frozen_layers(names["engine"].module))


def like_liger(net: torch.nn.Module, config: dict | None) -> None:
    """Gives the model a forward that takes chunk_mem_const, as Liger-Kernel does."""

    def forward(self, input_ids=None, labels=None, chunk_mem_const=None, **kwargs):
        assert chunk_mem_const == 16
        return type(self).forward(self, input_ids=input_ids, labels=labels, **kwargs)

    net.forward = forward.__get__(net)


def fast(directory: Path, family: str) -> tuple[int, list[float], list[float]]:
    """Converted layers, and losses of the model's own and of the guide's forward, as a mean and as a Trainer's sum."""
    page, net = GUIDES / "fast_training.md", model(family)
    ids = batch(0, rank=0, length=40)
    labels = ids.masked_fill(ids < 20, -100)
    given = [{"input_ids": ids, "labels": labels} | more for more in ({}, {"num_items_in_batch": torch.tensor(7)})]
    plain = [net(**one).loss.item() for one in given]
    with mock.patch("transformers.integrations.liger.apply_liger_kernel", like_liger):
        names = run(page, directory, model=net)
    other = model(family)
    names["loss_in_chunks"](other, tokens=24)
    assert other(input_ids=ids).logits.shape == (2, 40, len(other.lm_head.weight))
    converted = len(converted_layers(names["trainer"].model_wrapped.module))
    return converted, plain, [other(**one).loss.item() for one in given]


@pytest.mark.parametrize("family", slow_except(["qwen3_moe", "qwen2_moe"], "qwen2_moe"))
def test_fast_training(ranks2, tmp_path, family):
    for converted, plain, in_chunks in ranks2.run(fast, tmp_path, family):
        assert converted == 2 and in_chunks == pytest.approx(plain, rel=1e-5)


def replay(directory: Path) -> tuple:
    net, ids = engine({"enabled": True}), batch(0)
    names = run(GUIDES / "rl.md", directory, [0], engine=net, batch={"input_ids": ids, "labels": ids})
    return tuple(names["routes"].shape), net.global_steps


def test_router_replay(ranks2, tmp_path):
    assert ranks2.run(replay, tmp_path) == [((2, 16, 2, 2), 1)] * 2


def saving(directory: Path) -> None:
    write_config(directory, json.dumps(ds_config({"enabled": True}, 3)))
    made = ds_mxfp8_moe.initialize
    with mock.patch.object(ds_mxfp8_moe, "initialize", lambda **given: made(**given | {"model": model()})):
        run(GUIDES / "saving_and_loading.md", directory)


def test_saving_and_loading(ranks2, tmp_path):
    ranks2.run(saving, tmp_path)
    assert loads(tmp_path / "run/final") and loads(tmp_path / "run/from_checkpoint")


def test_serving(ranks2, tmp_path):
    assert ranks2.run(serving, tmp_path) == [("lm_head.weight", torch.bfloat16)] * 2
    assert loads(tmp_path / "run/fp8")


def test_metrics(ranks2, tmp_path):
    ranks2.run(metrics, tmp_path)
    assert len(list((tmp_path / "runs/moe").glob("Train_MoE_*_load_most.csv"))) == 2


def test_building_blocks(ranks2, tmp_path):
    assert min(ranks2.run(building_blocks, tmp_path)) > 22


@needs_exchange
@on_cpu
def test_plain_torch(ranks2, tmp_path):
    assert ranks2.run(plain_torch, tmp_path) == pytest.approx([4.85, 4.85], rel=0.02)  # ln 128


def emulated_all_to_all(directory: Path) -> float:
    memory = PeerMemory(dist.get_world_group(), emulator.load(dist.get_rank()), 1, emulator.Shared)
    with mock.patch("ds_mxfp8_moe.all_to_all.choose", lambda *_: SimpleNamespace(memory=memory)):
        return all_to_all(directory)


@pytest.mark.usefixtures("emulated")
def test_all_to_all(ranks2, tmp_path):
    assert max(ranks2.run(emulated_all_to_all, tmp_path)) < 0.05
