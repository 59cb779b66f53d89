# SPDX-License-Identifier: Apache-2.0
"""Trained models, exported in each format."""

import torch

import ds_mxfp8_moe
from ds_mxfp8_moe import export_weights, save_pretrained
from ds_mxfp8_moe.compute.mx import dequantize, quantize_tiles
from small_models import small_model
from tests.support.autoep_models import batch, ds_config, model
from tests.support.pretrained_models import HELD_OUT
from tests.support.vllm_reader import EXPERT, files_of, read

SIZES = {"hidden_size": 128, "moe_intermediate_size": 128, "intermediate_size": 128}


def config_of(section=None, stage=1, ep_size=2) -> dict:
    return ds_config({"enabled": True, **(section or {})}, stage, ep_size, bf16={"enabled": True})


def engine_of(net, *args, **kwargs):
    return ds_mxfp8_moe.initialize(model=net, config=config_of(*args, **kwargs))[0]


def same(found: dict, expected: dict) -> bool:
    return found.keys() == expected.keys() and all(
        one.dtype == expected[name].dtype and torch.equal(one.cpu().float(), expected[name].float())
        for name, one in found.items())


def saved(directory, model_type, combinations):
    """Whether every combination of stage and EP writes and exports the same. The files are those of the first."""
    first = None
    for stage, ep_size in combinations:
        engine = engine_of(small_model(model_type, **SIZES), stage=stage, ep_size=ep_size)
        if first is None:
            save_pretrained(engine, directory / "model")
            save_pretrained(engine, directory / "fp8", weights="fp8", max_shard_size="300KB")
            first = {weights: files_of(directory / weights) for weights in ("fp8", "model")}
        for weights, bucket_bytes in (("fp8", 1), ("model", 2**30)):
            if not same(dict(export_weights(engine, weights, bucket_bytes)), first[weights]):
                return stage, ep_size, weights
    return True


def check_files(directory):
    """Whether vLLM's rules find the unquantized weights in the files, cast."""
    assert len(list((directory / "fp8").glob("model-*-of-*.safetensors"))) > 1
    plain = files_of(directory / "model")
    found = read(directory / "fp8", plain)
    for name, tensor in plain.items():
        expected = dequantize(quantize_tiles(tensor)) if EXPERT.fullmatch(name) else tensor
        assert torch.equal(found[name].to(tensor.dtype), expected), name


MULTIPLIED = {"scale_block_size": 128, "min_tokens_per_expert": 0}  # as tiles of block FP8


def saved_with_its_loss(directory, section):
    """The engine's loss of a text, before and after a training that the files hold."""
    engine = engine_of(model("qwen3_moe", **SIZES), section)
    ids, losses = batch(HELD_OUT, rank=0).to(engine.device), []
    for steps in range(2):
        for _ in range(5 * steps):
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()
        engine.eval()
        with torch.no_grad():
            losses.append(engine(input_ids=ids, labels=ids).loss.item())
        engine.train()
    save_pretrained(engine, directory, "fp8")
    return losses
