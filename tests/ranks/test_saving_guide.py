# SPDX-License-Identifier: Apache-2.0
"""The code of examples/guides/saving_and_loading.md runs as it stands there."""

import re
from functools import partial
from pathlib import Path

import pytest
import transformers
from autoep_models import autoep_layers, ds_config, model
from test_engine import enabled
from test_trainer import Sentences

import ds_mxfp8_moe
from ds_mxfp8_moe.autoep import MXFP8AutoEPMoELayer

PAGE = Path(__file__).parents[2] / "examples/guides/saving_and_loading.md"
TRAINER, ACCELERATE, PLAIN, CHECKPOINT = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


@enabled(times=0)  # the blocks call `enable` themselves
def run(block, directory, stage, own_optimizer):
    config = ds_config({"enabled": True}, stage)
    if own_optimizer:
        del config["optimizer"]
    if block == TRAINER:
        config["train_micro_batch_size_per_gpu"] = "auto"
    names = {"model": model(), "ds_config": config, "dataset": Sentences(16), "directory": str(directory),
             "checkpoint": str(directory / "checkpoint")}
    if block == CHECKPOINT:
        ds_mxfp8_moe.initialize(model=model(), config=config)[0].save_checkpoint(names["checkpoint"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers, "TrainingArguments", partial(transformers.TrainingArguments, use_cpu=True))
        exec(compile(block, str(PAGE), "exec"), names)
    engine = {TRAINER: lambda: names["trainer"].model_wrapped, ACCELERATE: lambda: names["model"]}.get(
        block, lambda: names["engine"])()
    assert [type(layer) for layer in autoep_layers(engine.module)] == [MXFP8AutoEPMoELayer] * 2


@pytest.mark.parametrize("block, stage, own_optimizer, saved", [
    (TRAINER, 2, True, ["final", "checkpoint-2"]), (ACCELERATE, 1, True, ["final"]), (PLAIN, 3, False, ["final"]),
    (CHECKPOINT, 2, False, ["from_checkpoint"])], ids=["trainer", "accelerate", "plain", "checkpoint"])
def test_the_page_runs(ranks2, tmp_path, block, stage, own_optimizer, saved):
    ranks2.run(run, block, tmp_path, stage, own_optimizer)
    for name in saved:
        _, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, output_loading_info=True)
        assert not any(info.values())
