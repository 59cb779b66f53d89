# SPDX-License-Identifier: Apache-2.0
"""Training with adapters merged into frozen experts: what is exported computes with the bits that training did."""

import contextlib
import io

import deepspeed.comm as dist
import peft
import pytest
import torch

import ds_mxfp8_moe
from ds_mxfp8_moe.compute.mx import sqnr_db
from ds_mxfp8_moe.config import ConfigError
from ds_mxfp8_moe.ffn.frozen_weights import FrozenMXFP4Weights, FrozenWeights
from tests.support.adapted_models import build
from tests.support.autoep_models import ds_config, model, train_engine
from tests.support.exporting_cases import SIZES
from tests.support.frozen_experts_cases import merge_aware_call
from tests.support.pretrained_models import held_out_logits
from tests.support.slow import slow_except

BF16 = {"bf16": {"enabled": True}}
SERVED = {"enabled": True, "scale_block_size": 128}
AWARE = {**SERVED, "merge_aware": True}
STACKS = ["experts.gate_up_proj", "experts.down_proj"]


@pytest.mark.parametrize("frozen, recipe, dtype", [
    (FrozenWeights, "hp-128", torch.bfloat16), (FrozenMXFP4Weights, "hp-32", torch.bfloat16),
    (FrozenMXFP4Weights, "hp-128", torch.float32)])
def test_a_call_multiplies_with_the_rounded_sum_and_gradients_pass_straight_through(frozen, recipe, dtype):
    ours, merged, found, wanted = merge_aware_call(frozen, recipe, dtype=dtype)
    assert all(map(torch.equal, ours, merged))
    assert all(one.dtype == dtype for one in found)
    assert min(sqnr_db(expected, one.float()) for expected, one in zip(wanted, found, strict=True)) > 20
    apart, *_ = merge_aware_call(frozen, recipe, dtype=dtype, size=0)
    assert not torch.equal(ours[0], apart[0])


def with_experts_adapted(family, targets=STACKS, **changes):
    torch.manual_seed(1)
    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules=[], target_parameters=targets, init_lora_weights=False)
    net = peft.get_peft_model(model(family, torch.bfloat16, **changes), lora)
    with torch.no_grad():
        for name, factor in net.named_parameters():
            if "lora_" in name:
                factor.mul_(0.3)
    return net


def frozen_everywhere(net):
    """The model with experts that are frozen, and a parameter to train."""
    for name, p in net.named_parameters():
        p.requires_grad = "embed_tokens" in name
    return net


def trained_and_served(directory, family, frozen, stage, ep_size, **changes):
    """Logits of an engine that trains with merged adapters; of an engine with the exported weights; and of one that
    goes on from a checkpoint."""
    section = {**AWARE, "frozen_experts": frozen}

    def make():
        net = with_experts_adapted(family, **changes)
        return build(net, section, stage, ep_size, rate=0.05, **BF16)

    engine = make()
    train_engine(engine, range(2))
    engine.save_checkpoint(directory / "checkpoint", exclude_frozen_parameters=stage in (1, 3))
    losses = train_engine(engine, [2])
    logits = held_out_logits(engine)
    engine.train()
    with io.StringIO() as told, contextlib.redirect_stdout(told):
        exported = {name: tensor.clone() for name, tensor in ds_mxfp8_moe.export_weights(engine)}
        text = told.getvalue()
    assert ("with the values that training computes with" in text) == (dist.get_rank() == 0), text
    net = model(family, torch.bfloat16, **changes)
    base = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    missing = net.load_state_dict(exported, strict=False) if family == "gpt_oss" else None
    if missing is None:
        if dist.get_rank() == 0:
            ds_mxfp8_moe_files(exported, net, directory / "model")
        dist.barrier()
        net = type(net).from_pretrained(directory / "model", dtype=torch.bfloat16)
    assert not all(torch.equal(base[name], p) for name, p in net.state_dict().items())
    served = [build(frozen_everywhere(net.train()), {**SERVED, "frozen_experts": frozen}, stage, ep_size, **BF16)]
    if family != "gpt_oss":
        ds_mxfp8_moe.save_pretrained(engine, directory / "fp8", weights="fp8")
        config = ds_config({**SERVED, "frozen_experts": "mxfp8"}, stage, ep_size, **BF16)
        net = ds_mxfp8_moe.from_pretrained(directory / "fp8", ds_config=config, dtype=torch.bfloat16)
        served.append(build(frozen_everywhere(net), {**SERVED, "frozen_experts": "mxfp8"}, stage, ep_size, **BF16))
    found = [torch.equal(held_out_logits(one), logits) for one in served]

    again = make()
    again.load_checkpoint(directory / "checkpoint", load_module_strict=stage in (0, 2))
    found += [train_engine(again, [2]) == losses, torch.equal(held_out_logits(again), logits)]
    with engine.module.disable_adapter():
        assert not torch.equal(held_out_logits(engine), logits)
    return found


def ds_mxfp8_moe_files(exported, net, directory):
    from safetensors.torch import save_file

    directory.mkdir()
    net.config.save_pretrained(directory)
    save_file(exported, directory / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("family, frozen, stage, ep_size, changes", slow_except([
    ("qwen3_moe", "mxfp8", 2, 2, True), ("qwen3_moe", "mxfp4", 1, 2, True), ("gpt_oss", "mxfp4", 0, 1, False),
    ("qwen3_moe", "mxfp4", 3, 1, True)], ("qwen3_moe", "mxfp8", 2, 2, True), ("gpt_oss", "mxfp4", 0, 1, False)))
def test_what_is_served_is_what_was_trained(ranks2, tmp_path, family, frozen, stage, ep_size, changes):
    for found in ranks2.run(trained_and_served, tmp_path, family, frozen, stage, ep_size,
                            **(SIZES if changes else {})):
        assert found == [True] * (3 if family == "gpt_oss" else 4)


def recomputed():
    """Losses of trainings with and without activation checkpointing."""
    losses, section = [], {**AWARE, "frozen_experts": "mxfp4"}
    for checkpointing in (False, True):
        engine = build(with_experts_adapted("qwen3_moe"), section, 2, 2, rate=0.05, **BF16)
        if checkpointing:
            engine.module.enable_input_require_grads()
            engine.module.gradient_checkpointing_enable({"use_reentrant": False})
        losses.append(train_engine(engine, range(3)))
    return losses


def test_recomputation_merges_the_same_weights(ranks2):
    for plain, checkpointed in ranks2.run(recomputed):
        assert plain == checkpointed and plain[0] != plain[2]


def refused():
    for net in model(), with_experts_adapted("qwen3_moe", moe_intermediate_size=48):
        with pytest.raises(ConfigError, match='"merge_aware" has nothing to merge: no layer has adapters'):
            build(net, AWARE, 1, 2)


def test_nothing_to_merge_is_an_error(ranks2):
    ranks2.run(refused)
