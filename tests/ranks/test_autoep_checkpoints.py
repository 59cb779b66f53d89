# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of AutoEP models: plain DeepSpeed and ours read what the other has written, and train on.

Weights, float32 masters and moments are compared bit for bit, experts over all ranks. What follows is compared with
the engine that wrote the checkpoint, switched to the reader's path, and simply going on.
"""

from unittest import mock

import deepspeed
import deepspeed.comm as dist
import pytest
import torch
from autoep_models import autoep_layers, ds_config, gathered, model
from autoep_models import train_engine as train
from deepspeed.checkpoint import ds_to_universal
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from slow import slow_except

import ds_mxfp8_moe
from ds_mxfp8_moe.layers.autoep import MXFP8AutoEPMoELayer

PLAIN = {"enabled": False}
MXFP8 = {"enabled": True}


def build(section, stage, ep_size, family="deepseek_v3", seed=0, **changes):
    """An engine in bfloat16 with float32 masters and Adam; plain DeepSpeed's own where the section is PLAIN."""
    config = ds_config(section, stage, ep_size, bf16={"enabled": True}, zero_allow_untested_optimizer=False,
                       optimizer={"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}, **changes)
    initialize = deepspeed.initialize if section is PLAIN else ds_mxfp8_moe.initialize
    return initialize(model=model(family, seed=seed), config=config)[0]


def state(engine) -> dict[str, torch.Tensor]:
    """Weights, masters and moments by name; the experts of all ranks in one tensor."""
    layer = autoep_layers(engine.module)[0]
    if engine.zero_optimization_stage() in (1, 2):
        # DeepSpeed links parameters with moments after the step of the first group, before the experts' have any.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    found = {}
    for name, p in engine.module.named_parameters():
        values = {"weight": gathered(p), "master": safe_get_full_fp32_param(p)}
        for moment in ("exp_avg", "exp_avg_sq"):
            values[moment] = safe_get_full_optimizer_state(p, moment)
        for kind, value in values.items():
            if ".experts.w" in name and layer.ep_size > 1:
                parts = [torch.empty_like(value) for _ in range(layer.ep_size)]
                dist.all_gather(parts, value.contiguous(), group=layer.ep_group)
                value = torch.cat(parts)
            found[f"{kind} of {name}"] = value.clone()
    return found


def write(directory, section, reader, stage, ep_size, **changes):
    """Trains and saves; then goes on as the reader will."""
    engine = build(section, stage, ep_size, **changes)
    train(engine, range(2))
    engine.save_checkpoint(str(directory), tag="two")
    saved = state(engine)
    ds_mxfp8_moe.convert(engine, reader)
    return saved, train(engine, range(2, 4))


def read(directory, section, stage, ep_size, **changes):
    engine = build(section, stage, ep_size, seed=1, **changes)
    path, _ = engine.load_checkpoint(str(directory), tag="two_universal" if "checkpoint" in changes else "two")
    converted = sum(type(layer) is MXFP8AutoEPMoELayer for layer in autoep_layers(engine.module))
    return path is not None, converted, state(engine), train(engine, range(2, 4))


SECTIONS = {"plain": PLAIN, "ours": MXFP8}


LAYERS = {"deepseek_v3": 1, "qwen3_moe": 2, "gpt_oss": 2}


def check_read(read_again, written, reader, family):
    for (saved, _), (found, converted, loaded, _) in zip(written, read_again, strict=True):
        assert found and converted == (LAYERS[family] if reader is MXFP8 else 0)
        assert saved.keys() == loaded.keys()
        assert not [name for name in saved if not torch.equal(saved[name], loaded[name])]
        assert sum(name.startswith("exp_avg_sq") for name in saved) > 10
        assert sum("expert_biases" in name for name in saved) == (2 * 3 * 4 if family == "gpt_oss" else 0)


@pytest.mark.parametrize("ranks, stage, writer, reader, family", slow_except(
    [("ranks2", 3, "plain", "ours", "deepseek_v3"), ("ranks2", 3, "ours", "plain", "deepseek_v3"),
     ("ranks2", 2, "plain", "ours", "deepseek_v3"), ("ranks2", 1, "ours", "plain", "deepseek_v3"),
     ("ranks2", 1, "ours", "ours", "deepseek_v3"), ("ranks4", 3, "plain", "ours", "deepseek_v3"),
     ("ranks4", 3, "ours", "ours", "deepseek_v3"), ("ranks2", 1, "ours", "ours", "gpt_oss"),
     ("ranks2", 3, "ours", "ours", "gpt_oss")],
    ("ranks2", 3, "plain", "ours", "deepseek_v3"), ("ranks2", 3, "ours", "plain", "deepseek_v3"),
    ("ranks2", 1, "ours", "ours", "gpt_oss"), ("ranks2", 3, "ours", "ours", "gpt_oss")))
def test_what_one_writes_the_other_reads(request, tmp_path, ranks, stage, writer, reader, family):
    pool, writer, reader = request.getfixturevalue(ranks), SECTIONS[writer], SECTIONS[reader]
    written = pool.run(write, tmp_path, writer, reader, stage, 2, family=family)
    read_again = pool.run(read, tmp_path, reader, stage, 2, family=family)
    check_read(read_again, written, reader, family)
    for (_, losses), (*_, next_losses) in zip(written, read_again, strict=True):
        assert next_losses == losses


def to_universal(directory):
    """DeepSpeed's own tool, as its command line runs it; in this process, which has imported all it needs."""
    with mock.patch("sys.argv", ["ds_to_universal", "--input_folder", str(directory / "two"), "--output_folder",
                                 str(directory / "two_universal"), "--num_extract_workers", "1",
                                 "--num_merge_workers", "1", "--inject_missing_state"]):
        ds_to_universal.main(ds_to_universal.parse_arguments())


@pytest.mark.parametrize("stage, ep_size, writer, reader, family", slow_except(
    [(2, 2, "plain", "ours", "qwen3_moe"), (2, 2, "ours", "plain", "qwen3_moe"), (1, 1, "plain", "ours", "qwen3_moe"),
     (3, 2, "ours", "plain", "qwen3_moe"), (2, 1, "ours", "ours", "gpt_oss"), (2, 2, "ours", "ours", "gpt_oss")],
    (2, 2, "plain", "ours", "qwen3_moe"), (2, 1, "ours", "ours", "gpt_oss")))
def test_universal_checkpoints_both_ways(ranks2, tmp_path, stage, ep_size, writer, reader, family):
    """Written with two ranks' experts apart; read alike, or with all experts on each rank.

    Not of DeepSeek-V3: DeepSpeed's universal checkpoints leave out buffers, such as its router's correction bias. From
    ZeRO-3 they leave out Adam's step count too, so that the second step is another one, with plain DeepSpeed as well.
    """
    writer, reader = SECTIONS[writer], SECTIONS[reader]
    written = ranks2.run(write, tmp_path, writer, reader, stage, 2, family=family)
    to_universal(tmp_path)
    read_again = ranks2.run(read, tmp_path, reader, stage, ep_size, family=family, checkpoint={"load_universal": True})
    check_read(read_again, written, reader, family)
    for (_, losses), (*_, next_losses) in zip(written, read_again, strict=True):
        assert next_losses[0] == pytest.approx(losses[0], abs=1e-2 if ep_size == 1 else 1e-6)
        assert next_losses[1] == pytest.approx(losses[1], abs=1e-6 if (stage, ep_size) == (2, 2) else 1e-2)
