# SPDX-License-Identifier: Apache-2.0
"""One type of each form of experts that AutoEP does not know is written in FP8, and read and held in MXFP8:
transformers finds the weights that were there."""

from contextlib import nullcontext

import pytest
import torch

import ds_mxfp8_moe
from ds_mxfp8_moe.checkpoint.gathering import whole_state_dict
from ds_mxfp8_moe.compute.mx import dequantize, quantize_tiles
from ds_mxfp8_moe.layers.experts import expert_blocks
from small_models import small_config, small_model
from tests.support.autoep_models import ds_config
from tests.support.frozen_checkpoints import fp8_without_gpu
from tests.support.slow import slow_except

SIZES = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128, "moe_latent_size": 128}
# Without a gate, transposed, with a norm behind each expert, below a language model, with a clamped gate.
FORMS = ["nemotron_h", "aria", "muse_spark", "qwen3_vl_moe", "deepseek_v4"]
ONE_BY_ONE = ["nemotron_h", "deepseek_v4"]  # in published checkpoints


def model_of(model_type: str):
    return small_model(model_type, **(SIZES if model_type in ONE_BY_ONE else {}))


def config_of(stage: int, ep_size: int = 2) -> dict:
    return ds_config({"enabled": True}, stage, ep_size, bf16={"enabled": True})


def saved_in_fp8(directory, model_type, stage):
    engine = ds_mxfp8_moe.initialize(model=model_of(model_type), config=config_of(stage))[0]
    assert list(expert_blocks(engine.module))
    ds_mxfp8_moe.save_pretrained(engine, directory, "fp8")


def assert_holds(state: dict, expected: dict) -> None:
    """`expected`, with experts that were quantized."""
    assert state.keys() == expected.keys()
    for name, tensor in state.items():
        wanted = expected[name].bfloat16()
        if ".experts." in name and name.endswith("_proj"):
            whole = wanted.transpose(1, 2) if is_transposed(expected, name) else wanted
            wanted = dequantize(quantize_tiles(whole)).view_as(whole)
            wanted = wanted.transpose(1, 2) if is_transposed(expected, name) else wanted
        assert torch.equal(tensor.bfloat16(), wanted.bfloat16()), name


def is_transposed(state: dict, name: str) -> bool:
    """By the sizes of both weights of the module."""
    module = name.rpartition(".")[0]
    down = state[f"{module}.down_proj"]
    up = next(state[f"{module}.{one}"] for one in ("gate_up_proj", "up_proj") if f"{module}.{one}" in state)
    return up.shape[1] == down.shape[2] != up.shape[2]


@pytest.mark.parametrize("model_type, stage", slow_except(
    [("nemotron_h", 3), ("nemotron_h", 1), ("deepseek_v4", 3)], ("nemotron_h", 3)))
def test_transformers_reads_what_was_there_in_fp8(ranks2, tmp_path, model_type, stage):
    ranks2.run(saved_in_fp8, tmp_path, model_type, stage)
    net, info = small_config(model_type)[0].from_pretrained(tmp_path, dtype=torch.bfloat16, output_loading_info=True)
    assert not any(info.values())
    assert_holds(net.state_dict(), model_of(model_type).state_dict())


def held(directory, model_type, ours, on_gpu):
    """On rank 0, the state of a model whose experts are read into MXFP8 alone."""
    kind = small_config(model_type)[0]
    with fp8_without_gpu() if on_gpu else nullcontext():
        net = ds_mxfp8_moe.from_pretrained(directory, config_of(2), kind, dtype=torch.bfloat16) if ours else (
            kind.from_pretrained(directory, dtype=torch.bfloat16))
    net.requires_grad_(False).get_output_embeddings().requires_grad_(True)
    engine = ds_mxfp8_moe.initialize(model=net, config=config_of(2))[0]
    assert all("frozen" in block.experts._modules for _, block in expert_blocks(engine.module))
    return whole_state_dict(engine.module)


@pytest.mark.parametrize("model_type", slow_except(FORMS, "nemotron_h", "aria"))
def test_their_experts_are_held_in_mxfp8(ranks2, tmp_path, model_type):
    net = model_of(model_type)
    expected = net.state_dict()
    net.save_pretrained(tmp_path)
    assert_holds(ranks2.run(held, tmp_path, model_type, True, False)[0], expected)


def by_fp8_experts(directory):
    engine = ds_mxfp8_moe.initialize(model=model_of("deepseek_v4"), config=config_of(1))[0]
    ds_mxfp8_moe.save_pretrained(engine, directory, "fp8")
    return held(directory, "deepseek_v4", False, True)


def test_transformers_own_fp8_experts(ranks2, tmp_path):
    expected = model_of("deepseek_v4").state_dict()
    assert_holds(ranks2.run(by_fp8_experts, tmp_path)[0], expected)
