# SPDX-License-Identifier: Apache-2.0
"""What from_pretrained and a later engine say of broken files, of too little memory, and of what does not fit."""

import json
import re
from functools import partial

import deepspeed.comm as dist
import pytest
import torch
from safetensors.torch import load_file, save_file

import ds_mxfp8_moe
from ds_mxfp8_moe import ConfigError, from_pretrained
from ds_mxfp8_moe.compat.patches import patched
from ds_mxfp8_moe.ffn.frozen_weights import FrozenWeights
from tests.support.autoep_models import batch, ds_config
from tests.support.frozen_checkpoints import change_config, rewrite, write

MXFP8 = {"enabled": True}


def without(name):
    """Leaves a tensor out of the file that has it."""

    def fault(directory):
        rewrite(directory, lambda found, tensor: {} if found == name else {found: tensor})

    return fault


def shard_missing(directory):
    shard_of(directory, NAME).unlink()


def shard_cut_short(directory):
    file = shard_of(directory, NAME)
    file.write_bytes(file.read_bytes()[:-100])


def other_block_size(directory):
    halved = {f"{NAME}_scale_inv": torch.ones(2, 2)}
    rewrite(directory, lambda name, tensor: {name: halved.get(name, tensor)})


def scales_without_number(directory):
    integers = {f"{NAME}_scale_inv": torch.ones(1, 1, dtype=torch.int32)}
    rewrite(directory, lambda name, tensor: {name: integers.get(name, tensor)})


def other_shape(directory):
    rewrite(directory, lambda name, tensor: {name: tensor[:64].contiguous() if name == NAME else tensor})


NAME = "model.layers.1.mlp.experts.5.up_proj.weight"


def shard_of(directory, name):
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    return directory / index["weight_map"][name]


def refused(directory, config, use=lambda net, config: None):
    """The error of this rank."""
    with pytest.raises((RuntimeError, TypeError, ValueError, OSError)) as caught:
        use(from_pretrained(directory, config), config)
    return str(caught.value)


CODES = "model.layers.1.mlp.experts.down_proj_blocks"


def scale_of_nan(directory):
    """Of expert 5, in MXFP4."""

    def change(name, tensor):
        if name == CODES.replace("blocks", "scales"):
            tensor[5, 3, 1] = 255
        return {name: tensor}

    rewrite(directory, change)


def blocks_of_64(directory):
    """In MXFP4."""
    rewrite(directory, lambda name, tensor: {name: tensor.flatten(2).unflatten(2, (-1, 32)) if name == CODES else
                                             tensor[..., ::2].contiguous() if name == CODES.replace("blocks", "scales")
                                             else tensor})


def attention_in_fp8(directory):
    rewrite(directory, lambda name, tensor: {name: tensor.to(torch.float8_e4m3fn), f"{name}_scale": torch.ones(1)}
            if name.endswith("k_proj.weight") else {name: tensor})


def modelopt_fp8(directory):
    change_config(directory, quantization_config={"quant_method": "modelopt", "quant_algo": "FP8"})


def changed(change, name):
    """Puts what `change` returns in the place of a tensor."""

    def fault(directory):
        rewrite(directory, lambda one, tensor: {one: change(tensor).contiguous() if one == name else tensor})

    return fault


def first_is_nan(scales):
    scales.view(torch.uint8)[0, 0] = 0x7F
    return scales


@pytest.mark.parametrize("kind, fault, said", [
    ("mxfp4", scale_of_nan, rf"{CODES}\[5\]: one of its scales is NaN \(byte 0xFF\)"),
    ("mxfp4", blocks_of_64, rf"{CODES}\[\d\]: its blocks have shape \(128, 2, 32\) and its scales \(128, 2\)"),
    ("mxfp4", without(CODES.replace("blocks", "scales")), r"no tensor of the checkpoint becomes .*down_proj_scales"),
    ("bf16", without(NAME), f"{NAME} is in no file of the checkpoint"),
    ("bf16", shard_missing, r"model-\d+-of-\d+.safetensors \(missing\) cannot be read"),
    ("bf16", shard_cut_short, r"model-\d+-of-\d+.safetensors \(\d+ bytes\) cannot be read.*cut short"),
    ("bf16", other_shape, rf"{NAME} has shape \(64, 128\)|{NAME} has shape \(192, 128\)"),
    ("float", other_block_size, rf"{NAME} has shape \(128, 128\) and scales of shape \(2, 2\); tiles of 128x128"),
    ("float", scales_without_number, f"scales of {NAME} have dtype torch.int32"),
    ("float", without(f"{NAME}_scale_inv"), f"{NAME}_scale_inv is in no file"),
    ("modelopt", changed(first_is_nan, f"{NAME}_scale"), f"{NAME}: one of its scales in {NAME}_scale or .* is NaN"),
    ("compressed-tensors", changed(lambda x: x[:, ::2], f"{NAME}_scale"),
     rf"{NAME} is not in NVFP4, .*{NAME}_scale is float8_e4m3fn \[128, 4\]"),
    ("compressed-tensors", without(f"{NAME}_packed"), f"{NAME}_packed is in no file"),
    ("modelopt", attention_in_fp8, "k_proj.weight_scale belongs to no weight in NVFP4, .*files in bf16"),
    ("bf16", modelopt_fp8, 'the checkpoint is in ModelOpt\'s format "FP8", and .*files in bf16'),
])
def test_a_broken_checkpoint_is_an_error_on_every_rank(ranks2, tmp_path, kind, fault, said):
    write(tmp_path, "gpt_oss" if kind == "mxfp4" else "qwen3_moe", kind)
    fault(tmp_path)
    # Expert 5 belongs to rank 1. Rank 0 reads its own and hears of the error.
    for rank, error in enumerate(ranks2.run(refused, tmp_path, ds_config(MXFP8))):
        assert re.search(said, error), error
        everywhere = fault in (shard_missing, shard_cut_short, blocks_of_64, attention_in_fp8, modelopt_fp8)
        everywhere |= "no tensor" in said
        assert everywhere or (rank == 1) == ("rank 1" not in error)


def tensor_in_two_files(directory):
    other = next(file for file in sorted(directory.glob("*.safetensors")) if file != shard_of(directory, NAME))
    save_file({**load_file(other), NAME: torch.ones(128, 128)}, other, metadata={"format": "pt"})


def file_elsewhere(directory):
    change_index(directory, lambda files: files | {NAME: "../elsewhere.safetensors"})


def no_index(directory):
    change_index(directory, lambda files: None)


def change_index(directory, change):
    path = directory / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": change(json.loads(path.read_text())["weight_map"])}))


def two_series(directory):
    stray = NAME.replace("experts.", "experts{0.__class__}.")
    rewrite(directory, lambda name, tensor: {name: tensor, stray: tensor.clone()} if name == NAME else {name: tensor})


def rows_from_gate_to_up(directory):
    """So that gate above up has the right shape."""
    other = NAME.replace("up_proj", "gate_proj")
    rewrite(directory, lambda name, tensor: {name: torch.cat([tensor, tensor[:64]]) if name == NAME else
                                             tensor[:64].contiguous() if name == other else tensor})


BIAS = "model.layers.1.mlp.experts.down_proj_bias"
NORM = "model.layers.0.input_layernorm.weight"


@pytest.mark.parametrize("family, kind, fault, said", [
    ("gpt_oss", "bf16", without(BIAS), f"{BIAS} is in no file of the checkpoint"),
    ("gpt_oss", "mxfp4", without(BIAS), f"{BIAS} is in no file of the checkpoint"),
    ("qwen3_moe", "bf16", tensor_in_two_files, f"{NAME} is in two files of the checkpoint, .*and .*remove the one"),
    ("qwen3_moe", "bf16", file_elsewhere, r"the file .*/../elsewhere.safetensors, which lies outside of its folder"),
    ("qwen3_moe", "bf16", no_index, "index.json is no index of a checkpoint,.*weight_map: Input should be an object"),
    ("qwen3_moe", "bf16", changed(lambda x: x[None], NAME), rf"{NAME} has shape \(1, 128, 128\) for an expert, exp"),
    ("qwen3_moe", "float", changed(lambda x: x.flatten()[0], NAME), rf"{NAME} has shape \(\) for an expert, exp"),
    ("qwen3_moe", "bf16", changed(lambda x: x[:8], NORM), rf"{NORM} has shape \(8,\); the model's config asks for"),
    ("gpt_oss", "bf16", changed(lambda x: x[:4], BIAS), rf"^{BIAS} has shape \(4, 128\); the model's config[^;]+$"),
    ("qwen3_moe", "bf16", changed(lambda x: x.double(), NAME), f"^{NAME} has dtype torch.float64 and no scales in t"),
    ("qwen3_moe", "bf16", two_series, r"experts\{0.__class__\}.5.up_proj.weight would become .*tensors of two models"),
    ("qwen3_moe", "bf16", rows_from_gate_to_up, r"gate_proj.weight has shape \(64, 128\); the model's config asks"),
])
def test_a_damaged_checkpoint_is_an_error_that_names_the_tensor(tmp_path, family, kind, fault, said):
    write(tmp_path, family, kind)
    fault(tmp_path)
    assert re.search(said, error := refused(tmp_path, ds_config(MXFP8, ep_size=1))), error


def test_a_config_in_another_form_is_an_error_that_names_it(tmp_path):
    write(tmp_path, "qwen3_moe", "bf16")
    change_config(tmp_path, num_experts="eight")
    assert "config.json" in refused(tmp_path, ds_config(MXFP8, ep_size=1))


@pytest.mark.parametrize("section, said", [
    *(({"enabled": True, "autoep_size": size}, '"autoep_size" in "expert_parallel" is .*an integer, at least 1')
      for size in (0, -1, "2", 2.5, True, None)),
    (True, '"expert_parallel" is true, expected an object'), ([], r'"expert_parallel" is \[\], expected an object')])
def test_a_wrong_section_of_autoep_is_a_config_error(section, said):
    with pytest.raises(ConfigError, match=said):
        from_pretrained("not read", ds_config(MXFP8) | {"expert_parallel": section})


def test_a_section_of_autoep_that_does_not_fit_the_model_is_a_config_error(tmp_path):
    write(tmp_path, "qwen3_moe", "bf16")
    with pytest.raises(ConfigError, match="is 3, which does not divide the 8 experts of model.layers.0.mlp"):
        from_pretrained(tmp_path, ds_config(MXFP8, 0, 1, {"autoep_size": 3}))


@pytest.mark.parametrize("key", ["mxfp8", "mxfp4"])
def test_experts_without_blocks_of_32_are_a_config_error(tmp_path, key):
    write(tmp_path, "qwen3_moe", "bf16", moe_intermediate_size=48)
    with pytest.raises(ConfigError, match=r"layers.0.mlp.experts.down_proj has shape \(8, 128, 48\); in MXFP8 and"):
        from_pretrained(tmp_path, ds_config({**MXFP8, "frozen_experts": key}, ep_size=1))


def out_of_memory(directory, config):
    """The error of this rank, where rank 1 has no memory for its experts' second GEMM."""

    def write_some(plain, weights, gemm, *args):
        if dist.get_rank() == 1 and gemm == "down":
            raise torch.OutOfMemoryError("no memory left")
        plain(weights, gemm, *args)

    with patched(FrozenWeights, "write", write_some):
        return refused(directory, config)


def test_a_rank_out_of_memory_is_an_error_on_every_rank(ranks2, tmp_path):
    write(tmp_path, "qwen3_moe", "bf16")
    for error in ranks2.run(out_of_memory, tmp_path, ds_config(MXFP8)):
        assert "out of memory at experts 4 to 7 of model.layers.0.mlp.experts: no memory left" in error


def initialized(changes, net, config):
    """Gives the model to an engine of a config with these changes."""
    ds_mxfp8_moe.initialize(model=net, config={**config, **changes})


def unfrozen(net, config):
    ds_mxfp8_moe.initialize(model=net.requires_grad_(True), config=config)


def called(net, config):
    net(input_ids=batch(0))


@pytest.mark.parametrize("changes, use, said", [
    ({"mxfp8_moe": {"enabled": True, "recipe": "bf16"}}, None, '"frozen_experts": "keep" do not compute'),
    ({"mxfp8_moe": {"enabled": True, "frozen_experts": "keep"}}, None, '"frozen_experts": "keep" do not compute'),
    ({"expert_parallel": {"enabled": False}}, None, '"expert_parallel": {"enabled": true'),
    ({}, partial(initialized, {"expert_parallel": {"enabled": True, "autoep_size": 1}}), "this rank loaded the exp"),
    ({}, partial(initialized, {"expert_parallel": {"enabled": False}}),
     "layers.0.mlp.experts is held quantized alone, and is not spread over the ranks: the section \"expert_parallel\" "
     "is {'enabled': False}."),
    ({}, partial(initialized, {"mxfp8_moe": {"enabled": False}}), 'write "mxfp8_moe": {"enabled": true}'),
    ({}, partial(initialized, {"mxfp8_moe": {"enabled": True, "frozen_experts": "mxfp4"}}),
     'from_pretrained loaded these experts in MXFP8, but "frozen_experts" is "mxfp4"'),
    ({}, unfrozen, "gate_up_proj is to be trained, but is held quantized alone"),
    ({}, called, "held quantized alone, which transformers cannot compute: give the model to ds_mxfp8_moe.in")])
def test_what_does_not_fit_together_is_refused(ranks2, tmp_path, changes, use, said):
    write(tmp_path, "qwen3_moe", "bf16")
    config = ds_config(MXFP8, **changes)
    for error in ranks2.run(refused, tmp_path, config, *([use] if use else [])):
        assert said in error
