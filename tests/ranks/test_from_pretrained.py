# SPDX-License-Identifier: Apache-2.0
"""Models whose experts are read from a checkpoint's files into MXFP8, beside plain torch's reading of the files."""

import ctypes
import gc
import re
import sys
import weakref
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import peft
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import FP8Experts, FP8Linear
from transformers.integrations.mxfp4 import Mxfp4GptOssExperts

import ds_mxfp8_moe
from ds_mxfp8_moe import from_pretrained
from ds_mxfp8_moe.checkpoint import expert_tensors
from ds_mxfp8_moe.checkpoint.shards import ShardReader
from ds_mxfp8_moe.compat.patches import patched
from ds_mxfp8_moe.compute.mx import dequantize, quantize_tiles
from ds_mxfp8_moe.compute.mxfp4 import quantize
from ds_mxfp8_moe.layers.frozen_experts import frozen_layers
from ds_mxfp8_moe.layers.held_experts import HeldExperts
from tests.support.autoep_models import ds_config, train_engine
from tests.support.engine_cases import enabled
from tests.support.frozen_checkpoints import (
    NVFP4,
    expert_values,
    fp8_without_gpu,
    nvfp4_values,
    tensors_of,
    write,
)
from tests.support.pretrained_models import held_out_logits, held_out_loss
from tests.support.rank_pool import reset_hugging_face
from tests.support.slow import slow_except
from tests.support.trainers import AUTO, Sentences

MXFP8 = {"enabled": True}
FAMILIES = ("qwen3_moe", "mixtral", "deepseek_v3")


def held(net: torch.nn.Module) -> dict[str, HeldExperts]:
    return {name: module for name, module in net.named_modules() if isinstance(module, HeldExperts)}


VALUES = [*((family, kind, {}) for family in FAMILIES for kind in ("bf16", "float", "ue8m0")),
          ("qwen3_moe", "modelopt", {}), ("mixtral", "compressed-tensors", {}),
          ("qwen3_moe", "transformers", {}), ("gpt_oss", "bf16", {}), ("gpt_oss", "mxfp4", {}),
          *(("qwen3_moe", kind, {"moe_intermediate_size": 192}) for kind in ("bf16", "float", "ue8m0")),
          ("gpt_oss", "mxfp4", {"intermediate_size": 192})]


@pytest.mark.parametrize("family, kind, sizes, on_gpu", [
    *((*case, False) for case in VALUES),
    *((*case, True) for case in VALUES if case[1] in ("float", "ue8m0", "transformers"))])
def test_experts_have_the_values_of_the_files(tmp_path, family, kind, sizes, on_gpu):
    """`on_gpu`: transformers makes FP8 layers, as it does there, and does not dequantize."""
    write(tmp_path, family, kind, **sizes)
    if kind == "transformers" and not any(
            tensor.dim() > 1 for name, tensor in tensors_of(tmp_path).items() if name.endswith("_scale_inv")):
        pytest.skip(f"transformers {transformers.__version__} saves no scales of experts that it has quantized")
    with fp8_without_gpu() if on_gpu else nullcontext():
        net = from_pretrained(tmp_path, ds_config(MXFP8, ep_size=1))
    wanted = list(expert_values(tmp_path).values())
    modules = held(net)
    assert len(modules) == len(wanted) == (1 if family == "deepseek_v3" else 2)
    for module, values in zip(modules.values(), wanted, strict=True):
        weights = module.take("experts", 0, 8, torch.bfloat16, torch.device("cpu"))
        assert weights.format == ("MXFP4" if kind == "mxfp4" else "MXFP8")
        up = torch.cat([values["gate"], values["up"]], dim=1)
        for gemm, exact in (("up", up), ("down", values["down"])):
            mx = weights.tiles(gemm)
            if kind in ("ue8m0", "mxfp4") and not sizes:
                assert torch.equal(dequantize(mx, torch.float32), exact)
            else:
                again = quantize_tiles(exact)
                assert torch.equal(mx.scale_bytes, again.scale_bytes)
                assert torch.equal(mx.qdata.view(torch.uint8), again.qdata.view(torch.uint8))
    assert not any("experts.gate_up_proj" in name for name in net.state_dict() if not name.endswith("_bias"))
    assert not any(p.is_meta for p in net.parameters())


@pytest.mark.parametrize("family, kind", slow_except(
    [("qwen3_moe", "bf16"), ("mixtral", "ue8m0"), ("qwen3_moe", "float"), ("gpt_oss", "mxfp4"), ("gpt_oss", "bf16")],
    ("qwen3_moe", "bf16"), ("gpt_oss", "mxfp4")))
def test_the_key_says_the_format(tmp_path, family, kind):
    write(tmp_path, family, kind)
    for key in ("mxfp8", "mxfp4"):
        net = from_pretrained(tmp_path, ds_config({**MXFP8, "frozen_experts": key}, ep_size=1))
        for module, values in zip(held(net).values(), expert_values(tmp_path).values(), strict=True):
            weights = module.take("experts", 0, 8, torch.bfloat16, torch.device("cpu"), key)
            assert weights.format.lower() == key
            for gemm, exact in (("up", torch.cat([values["gate"], values["up"]], dim=1)), ("down", values["down"])):
                exact = dequantize(quantize_tiles(exact), torch.float32) if kind == "float" else exact
                exact = quantize(exact).values() if key == "mxfp4" else exact
                again, tiles = quantize_tiles(exact), weights.tiles(gemm)
                assert torch.equal(tiles.scale_bytes, again.scale_bytes)
                assert torch.equal(tiles.qdata.view(torch.uint8), again.qdata.view(torch.uint8))


@pytest.mark.parametrize("kind", NVFP4)
def test_other_weights_in_nvfp4_are_in_the_models_dtype(tmp_path, kind):
    write(tmp_path, "qwen3_moe", kind, everywhere=True)
    net, tensors = from_pretrained(tmp_path, ds_config(MXFP8, ep_size=1)), tensors_of(tmp_path)
    found = {name: tensor for name, tensor in net.state_dict().items() if name.endswith("_proj.weight")}
    assert len(found) == 2 * 4 and not any("_scale" in name or "_packed" in name for name in net.state_dict())
    for name, tensor in found.items():
        assert torch.equal(tensor.float(), nvfp4_values(tensors, name))


@pytest.mark.parametrize("model_class", [None, transformers.Qwen3MoeForCausalLM])
def test_the_dtype_is_the_callers(tmp_path, model_class):
    write(tmp_path, "qwen3_moe", "bf16")
    for dtype in ({}, {"dtype": torch.float32}, {"torch_dtype": torch.float32}):
        net = from_pretrained(tmp_path, ds_config(MXFP8, ep_size=1), model_class, **dtype)
        assert net.dtype == (torch.float32 if dtype else torch.bfloat16)


def test_the_models_own_config_goes_to_transformers(tmp_path):
    write(tmp_path, "qwen3_moe", "bf16")
    changed = transformers.AutoConfig.from_pretrained(tmp_path, output_router_logits=True)
    net = from_pretrained(tmp_path, ds_config=ds_config(MXFP8, ep_size=1), config=changed)
    assert net.config.output_router_logits and held(net)


# ---------------------------------------------------------------- engines


def by_shards(directory, config):
    return from_pretrained(directory, config)


def by_transformers(directory, config):
    """On a CPU it dequantizes, so the engine quantizes the same values again."""
    return AutoModelForCausalLM.from_pretrained(directory, dtype="auto")


def by_fp8_experts(directory, config):
    """As on a GPU: transformers' FP8Experts."""
    with fp8_without_gpu():
        net = by_transformers(directory, config)
    assert any(isinstance(module, FP8Experts) for module in net.modules())
    return net


def by_mxfp4_experts(directory, config):
    """As on a GPU, but for the layout in which kernels read the bytes."""
    net, tensors = by_transformers(directory, config), tensors_of(directory)
    for name, block in net.named_modules():
        if name.endswith("mlp"):
            experts = Mxfp4GptOssExperts(net.config)
            for stack in ("gate_up_proj", "down_proj"):
                blocks, scales = (tensors[f"{name}.experts.{stack}_{kind}"] for kind in ("blocks", "scales"))
                delattr(experts, stack)
                setattr(experts, stack, SimpleNamespace(storage=stored(blocks.flatten(2))))
                scale = SimpleNamespace(storage=stored(scales))
                setattr(experts, f"{stack}_precision_config", SimpleNamespace(weight_scale=scale))
                bias = getattr(experts, f"{stack}_bias")
                bias.data.copy_(getattr(block.experts, f"{stack}_bias"))
            block.experts = experts
    return net


def stored(data):
    return SimpleNamespace(data=data.transpose(-1, -2), layout=SimpleNamespace(unswizzle_data=lambda data: data))


def adapted(net, targets):
    net = peft.get_peft_model(net, peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "q_a_proj"],
                                                   target_parameters=[f"experts.{name}" for name in targets]))
    torch.manual_seed(1)
    for name, p in net.named_parameters():
        if "lora_" in name:  # PEFT rounds those of FP8 experts to e4m3
            torch.nn.init.normal_(p, std=0.3)
    return net


def trained(directory, way, ep_size, stage, targets):
    """All that has to be the same, and the held-out loss and logits of an engine whose adapters are saved."""
    config = ds_config(MXFP8, stage, ep_size, bf16={"enabled": True})
    net = adapted(way(directory, config), targets)
    engine = ds_mxfp8_moe.initialize(model=net, config=config)[0]
    losses = train_engine(engine, range(3))
    frozen = frozen_layers(net).values()
    in_mxfp4 = way is not by_transformers and "mxfp4" in (directory / "config.json").read_text()
    assert {layer.experts.frozen.format for layer in frozen} == {"MXFP4" if in_mxfp4 else "MXFP8"}
    values = [sum(x.double().square().sum().item() for x in layer.experts.frozen.dequantized()) for layer in frozen]
    if way is by_shards:
        ds_mxfp8_moe.save_pretrained(engine, directory / "adapters")
    return (losses, values), held_out_loss(engine), held_out_logits(engine)


STACKS = ("gate_up_proj", "down_proj")


@pytest.mark.parametrize("family, kind, ep_size, stage, ways", slow_except([
    ("qwen3_moe", "bf16", 2, 0, (by_shards, )), ("qwen3_moe", "bf16", 1, 2, (by_shards, )),
    ("mixtral", "ue8m0", 2, 2, (by_shards, by_fp8_experts)), ("qwen3_moe", "ue8m0", 2, 3, (by_shards, )),
    ("deepseek_v3", "ue8m0", 1, 0, (by_shards, by_fp8_experts)), ("gpt_oss", "bf16", 2, 2, (by_shards, )),
    ("gpt_oss", "mxfp4", 2, 0, (by_shards, by_mxfp4_experts))],
    ("mixtral", "ue8m0", 2, 2, (by_shards, by_fp8_experts)),
    ("gpt_oss", "mxfp4", 2, 0, (by_shards, by_mxfp4_experts))))
def test_every_way_in_trains_with_the_same_bits(ranks2, tmp_path, family, kind, ep_size, stage, ways):
    write(tmp_path, family, kind)

    def run(way, targets):
        return ranks2.run(trained, tmp_path, way, ep_size, stage, targets)

    reference, results = run(by_transformers, STACKS), {}
    for way in ways:
        targets = () if way is by_mxfp4_experts else STACKS  # PEFT finds no parameters there
        wanted = reference if targets else run(by_transformers, targets)
        results[way] = run(way, targets)
        assert [found for found, *_ in results[way]] == [found for found, *_ in wanted]
    assert_plain_peft_loads_the_adapters(tmp_path, *results[by_shards])


def assert_plain_peft_loads_the_adapters(directory, first: tuple, second: tuple) -> None:
    (_, loss, logits), (_, same_loss, _) = first, second
    net = by_transformers(directory, None)
    untrained = held_out_logits(net)
    net = peft.PeftModel.from_pretrained(net, directory / "adapters")
    assert loss == same_loss == pytest.approx(held_out_loss(net), rel=5e-3)  # the engine's activations are in MXFP8
    plain = held_out_logits(net)
    assert (untrained - plain).norm() > 4 * (logits - plain).norm()


def other_layers(directory, way):
    """Whether transformers' FP8 layers are as in the files, after the engine has cast its parameters to bf16."""
    config = ds_config(MXFP8, bf16={"enabled": True})
    with fp8_without_gpu():
        net = way(directory, config).requires_grad_(False)
    net.lm_head.requires_grad_(True)
    ds_mxfp8_moe.initialize(model=net, config=config)
    tensors = tensors_of(directory)
    layers = {name: module for name, module in net.named_modules() if isinstance(module, FP8Linear)}
    for name, layer in layers.items():
        assert torch.equal(layer.weight.view(torch.uint8), tensors[f"{name}.weight"].view(torch.uint8))
        assert torch.equal(layer.weight_scale_inv, tensors[f"{name}.weight_scale_inv"])
    return len(layers), len(frozen_layers(net))


@pytest.mark.parametrize("way", [by_shards, by_transformers])
def test_other_fp8_layers_stay_transformers_own(ranks2, tmp_path, way):
    write(tmp_path, "qwen3_moe", "float", everywhere=True)
    assert ranks2.run(other_layers, tmp_path, way) == [(2 * 4, 2)] * 2


# ---------------------------------------------------------------- memory, and what comes out again


AT_ONCE = 2 * 512 * 512


def most_host_memory(directory, config) -> tuple[float, int]:
    """MiB that loading takes at most beside what stays, and bytes of experts that are read and not freed yet, at most.
    """
    live = most_live = 0

    def freed(nbytes):
        nonlocal live
        live -= nbytes

    def read(plain, *args):
        nonlocal live, most_live
        tensor = plain(*args)
        live += tensor.nbytes
        most_live = max(most_live, live)
        weakref.finalize(tensor, freed, tensor.nbytes)
        return tensor

    with patched(ShardReader, "read", read), mock.patch.object(expert_tensors, "AT_ONCE", AT_ONCE):
        for _ in range(2):  # the first time imports modules
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")  # forgets the largest size
            before = in_mib("VmRSS")
            net = from_pretrained(directory, config)
            most = in_mib("VmHWM") - before
            buffers = [buffer for module in held(net).values() for buffer in module.weights_of.args[0].buffers()]
            most -= sum(tensor.nbytes for tensor in [*buffers, *net.state_dict().values()]) / 2**20
            del net, buffers
    return most, most_live


def in_mib(key):
    return int(re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) / 2**10


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("kind, value, layers", slow_except([("bf16", 2, 8), ("float", 1, 2)], ("float", 1, 2)))
def test_loading_takes_the_host_memory_of_a_few_experts(ranks2, tmp_path, kind, value, layers):
    write(tmp_path, "qwen3_moe", kind, shard="8MB", hidden_size=512, moe_intermediate_size=512,
          num_hidden_layers=layers)
    assert sum(file.stat().st_size / 2**20 for file in tmp_path.glob("*.safetensors")) > 6 * value * layers
    for beside, live in ranks2.run(most_host_memory, tmp_path, ds_config(MXFP8)):
        assert live < 1.01 * 2 * AT_ONCE * value  # what is read next, too
        assert beside < 32  # torch's and Python's own included, which come and go


def saved(directory, out):
    config = ds_config(MXFP8, 1, bf16={"enabled": True})
    engine = ds_mxfp8_moe.initialize(model=from_pretrained(directory, config), config=config)[0]
    train_engine(engine, range(2))
    ds_mxfp8_moe.save_pretrained(engine, out)
    return held_out_loss(engine)


@pytest.mark.parametrize("family, kind", slow_except(
    [("qwen3_moe", "bf16"), ("mixtral", "ue8m0"), ("gpt_oss", "mxfp4"), ("mixtral", "modelopt")],
    ("qwen3_moe", "bf16")))
def test_the_model_is_written_with_the_names_of_its_type(ranks2, tmp_path, family, kind):
    write(tmp_path / "bf16", family, "bf16")
    write(tmp_path / "base", family, kind)
    losses = ranks2.run(saved, tmp_path / "base", tmp_path / "out")
    assert tensors_of(tmp_path / "out").keys() == tensors_of(tmp_path / "bf16").keys()
    assert losses == pytest.approx([held_out_loss(by_transformers(tmp_path / "out", None))] * 2, rel=2e-3)


@enabled()
def by_trainer(directory, out, way, stage):
    """The losses of a Trainer, which reads the config before the model is loaded, and resumes from a checkpoint."""
    losses = []
    for resume in (None, str(out / "checkpoint-2")):
        reset_hugging_face()
        config = ds_config(MXFP8, stage, 2, bf16={"enabled": True}, optimizer=AUTO)
        arguments = transformers.TrainingArguments(output_dir=str(out), deepspeed=config, use_cpu=True, bf16=True,
                                                   per_device_train_batch_size=2, max_steps=4, save_steps=2,
                                                   logging_steps=1, report_to=[], disable_tqdm=True)
        net = adapted(way(directory, config), STACKS)
        trainer = transformers.Trainer(model=net, args=arguments, train_dataset=Sentences(32))
        trainer.train(resume_from_checkpoint=resume)
        assert len(frozen_layers(net)) == 2
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert losses[0] == losses[1]
    return losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("stage", slow_except([2, 3], 3))
def test_the_trainer(ranks2, tmp_path, stage):
    write(tmp_path / "base", "qwen3_moe", "bf16")
    run = partial(ranks2.run, by_trainer, tmp_path / "base")
    assert run(tmp_path / "shards", by_shards, stage) == run(tmp_path / "plain", by_transformers, 2)
