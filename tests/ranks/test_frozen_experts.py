# SPDX-License-Identifier: Apache-2.0
"""Frozen experts in MXFP8: the bits of frozen experts that keep their weights, one byte a value, in and out again."""

import contextlib
import copy
import gc
import io
import re
import weakref
from unittest import mock

import deepspeed.comm as dist
import peft
import pytest
import torch

import ds_mxfp8_moe
from ds_mxfp8_moe.compute import casts, grouped_gemm, mx, mxfp4, recorded
from ds_mxfp8_moe.config import ConfigError
from ds_mxfp8_moe.ffn.frozen_weights import FrozenMXFP4Weights, FrozenWeights
from ds_mxfp8_moe.layers.experts import converted_layers
from ds_mxfp8_moe.layers.frozen_experts import frozen_layers, frozen_of
from ds_mxfp8_moe.ops.op_builder import replay
from ds_mxfp8_moe.ops.triton_kernels import recording
from tests.support.adapted_models import adapted, build
from tests.support.autoep_models import autoep_layers, ds_config, engine, model, train_engine
from tests.support.frozen_experts_cases import as_it_is, calls, far_apart
from tests.support.pretrained_models import held_out_logits, held_out_loss, loaded
from tests.support.slow import WIDE, slow_except

SECTION = {"enabled": True, "scale_block_size": 128, "min_tokens_per_expert": 0}
KEEP, HELD = {**SECTION, "frozen_experts": "keep"}, {**SECTION, "frozen_experts": "mxfp8"}
BF16 = {"bf16": {"enabled": True}}
ATTENTION = r".*(mlp|block_sparse_moe|embed|norm|lm_head).*"  # what is frozen if attention alone is trained


def trained(section, directory, stage, ep_size, checkpointing=False, dtype=torch.bfloat16, prepare=as_it_is,
            **changes):
    """Losses of three steps and of an evaluation; trained weights, of ZeRO-3 a part; the engine, and the way to make
    another one. A checkpoint is saved after two steps."""
    net = prepare(adapted(dtype=dtype, **changes))

    def make(net):
        return build(net, section, stage, ep_size, **(BF16 if dtype == torch.bfloat16 else {}))

    made = make(net)
    if checkpointing:
        net.enable_input_require_grads()
        net.gradient_checkpointing_enable({"use_reentrant": False})
    losses = train_engine(made, range(2))
    made.save_checkpoint(directory, exclude_frozen_parameters=stage in (1, 3))
    losses += train_engine(made, [2])
    weights = {name: p.detach().clone() for name, p in net.named_parameters() if p.requires_grad}
    return [*losses, held_out_loss(made)], weights, made, make


def beside_kept(directory, stage, ep_size, **changes):
    """The held-out logits, after all that has to have the same bits: training beside kept weights, and beside engines
    that go on from checkpoints with experts and without."""
    wanted, kept_weights, *_ = trained(KEEP, directory / "kept", stage, ep_size, **changes)
    losses, weights, made, make = trained(SECTION, directory / "held", stage, ep_size, **changes)
    layers = autoep_layers(made.module)
    assert [type(frozen_of(layer.experts)) for layer in layers] == [FrozenWeights] * len(layers) and layers
    assert not any(".experts.w" in name for name, _ in made.module.named_parameters())
    assert losses == wanted and weights.keys() == kept_weights.keys()
    assert [name for name in weights if not torch.equal(weights[name], kept_weights[name])] == []
    ds_mxfp8_moe.save_pretrained(made, directory / "ours")
    if dist.get_rank() == 0 and stage < 3:
        made.module.save_pretrained(directory / "theirs")
    changes = {key: value for key, value in changes.items() if key != "checkpointing"}
    for checkpoint in ("held", "kept") if stage == 2 else ("held", ):
        again = make(adapted(**{"dtype": torch.bfloat16, **changes}))
        again.load_checkpoint(directory / checkpoint, load_module_strict=stage in (0, 2))
        assert [*train_engine(again, [2]), held_out_loss(again)] == losses[2:]
    return held_out_logits(made)


@pytest.mark.parametrize("ranks, stage, ep_size, changes", [
    ("ranks2", 2, 2, {}), ("ranks2", 0, 1, {"family": "gpt_oss", "checkpointing": True}),
    *(pytest.param(*case, marks=WIDE) for case in [
        ("ranks2", 1, 1, {}), ("ranks2", 3, 2, {}), ("ranks4", 2, 2, {}), ("ranks2", 2, 2, {"dtype": torch.float32}),
        ("ranks2", 1, 2, {"family": "mixtral", "targets": ["down_proj"], "checkpointing": True}),
        ("ranks2", 2, 2, {"family": "deepseek_v3"}), ("ranks2", 0, 2, {"family": "qwen2_moe"})])], ids=str)
def test_trains_and_goes_on_with_the_bits_of_kept_weights(request, tmp_path, ranks, stage, ep_size, changes):
    logits, *_ = request.getfixturevalue(ranks).run(beside_kept, tmp_path, stage, ep_size, **changes)
    assert not [path for path in (tmp_path / "held").rglob("*expert*")]
    family = changes.get("family", "qwen3_moe")
    untrained = held_out_logits(model(family))
    for name in ("ours", "theirs")[:1 if stage == 3 else 2]:
        net = peft.PeftModel.from_pretrained(model(family), tmp_path / name)
        plain = held_out_logits(net)
        assert (untrained - plain).norm() > 2 * (logits - plain).norm()  # which has what MXFP8 and bf16 lose


IN_4_BITS = {**SECTION, "frozen_experts": "mxfp4"}


def rounded(net):
    """The model with experts that are rounded to MXFP4. MXFP8 holds them exactly."""
    for name, p in net.named_parameters():
        if p.dim() == 3 and "lora_" not in name:
            transposed = "gpt_oss" in net.config.model_type
            values = mxfp4.quantize(p.data.transpose(1, 2) if transposed else p.data).values()
            p.data.copy_(values.transpose(1, 2) if transposed else values)
    return net


def exported(made, weights):
    return {name: tensor.clone() for name, tensor in ds_mxfp8_moe.export_weights(made, weights)}


def beside_rounded(directory, stage, ep_size, formats, **changes):
    """Training, checkpoints and exports of experts in 4 bits have the bits of rounded ones in 8 bits."""
    wanted, rounded_weights, other, _ = trained(HELD, directory / "eight", stage, ep_size, prepare=rounded, **changes)
    losses, weights, made, make = trained(IN_4_BITS, directory / "four", stage, ep_size, **changes)
    layers = autoep_layers(made.module)
    assert [frozen_of(layer.experts).format for layer in layers] == ["MXFP4"] * len(layers) and layers
    assert losses == wanted and all(torch.equal(weights[name], one) for name, one in rounded_weights.items())
    for one in formats:
        ours, theirs = exported(made, one), exported(other, one)
        assert ours.keys() == theirs.keys()
        for name in ours:
            assert torch.equal(ours[name].view(torch.uint8), theirs[name].view(torch.uint8)), name
    changes = {key: value for key, value in changes.items() if key != "checkpointing"}
    again = make(adapted(dtype=torch.bfloat16, **changes))
    again.load_checkpoint(directory / "four", load_module_strict=stage in (0, 2))
    assert [*train_engine(again, [2]), held_out_loss(again)] == losses[2:]
    with pytest.raises(RuntimeError, match="is frozen, and held in MXFP4 alone"):
        layers[0].requires_grad_(True)
    in_8_bits = build(adapted(dtype=torch.bfloat16, **changes), HELD, stage, ep_size, **BF16)
    with pytest.raises(RuntimeError, match="or quantizes it differently .frozen_experts, scaling_mode"):
        in_8_bits.load_checkpoint(directory / "four", load_module_strict=stage in (0, 2))


@pytest.mark.parametrize("stage, ep_size, formats, changes", [
    (2, 2, ("model", "fp8"), {"hidden_size": 128, "moe_intermediate_size": 128}),
    pytest.param(0, 1, ("model", ), {"family": "gpt_oss", "checkpointing": True}, marks=WIDE),
    pytest.param(3, 2, (), {"moe_intermediate_size": 96}, marks=WIDE)])
def test_four_bits_give_the_bits_of_rounded_experts_in_eight(ranks2, tmp_path, stage, ep_size, formats, changes):
    ranks2.run(beside_rounded, tmp_path, stage, ep_size, formats, **changes)


def in_blocks_of_32():
    """Two engines: the second one's parameters are what the first one's bytes stand for."""
    section = {"enabled": True, "scale_block_size": 32}
    first, net = (adapted(dtype=torch.bfloat16) for _ in range(2))
    first = build(first, section, 1, 2, **BF16)
    second = build(net, {**section, "frozen_experts": "keep"}, 1, 2, **BF16)
    for one, other in zip(autoep_layers(first.module), autoep_layers(net), strict=True):
        for name, values in zip(("w1", "w2", "w3"), one.experts.frozen.dequantized(), strict=True):
            getattr(other.experts, name).data.copy_(values)
    return [[*train_engine(made, range(3)), held_out_loss(made)] for made in (first, second)]


def test_blocks_of_32_read_one_scale_a_tile(ranks2):
    for ours, wanted in ranks2.run(in_blocks_of_32):
        assert ours == wanted


# ---------------------------------------------------------------- one call


@pytest.mark.parametrize("recipe, routing, tokens", [
    ("hp-128", "random", 50), ("mxfp8-128", "random", 50), ("hp-128", "one-expert", 50), ("hp-128", "nowhere", 50),
    ("hp-128", "random", 0)])
def test_a_call_gives_the_bits_of_kept_weights(recipe, routing, tokens):
    held, kept = (calls(frozen, recipe, routing, tokens) for frozen in (FrozenWeights, None))
    assert all(map(torch.equal, held, kept))


@pytest.mark.parametrize("recipe, routing, files", [
    ("hp-128", "random", as_it_is), ("hp-128", "one-expert", far_apart), ("mxfp8-32", "random", as_it_is)])
def test_files_in_mxfp4_give_the_bits_of_mxfp8(recipe, routing, files):
    """Outputs, and gradients of tokens, routing weights and adapters."""
    wanted = calls(FrozenWeights, recipe, routing, files=files)
    with mock.patch.object(casts, "unpack_tiles", wraps=casts.unpack_tiles) as unpack:
        assert all(map(torch.equal, calls(FrozenMXFP4Weights, recipe, routing, files=files), wanted))
    assert unpack.call_count == 3 * 4  # forward and backward of both GEMMs
    exact = calls(FrozenMXFP4Weights, recipe, routing, files=as_it_is)
    assert all(map(torch.equal, wanted, exact)) == (files is as_it_is)


@pytest.mark.slow  # it builds the executor
@pytest.mark.skipif(not replay.ReplayBuilder().is_compatible(), reason=str(replay.ReplayBuilder()._obstacle()))
@pytest.mark.parametrize("recipe, frozen", [("hp-128", FrozenWeights), ("mxfp8-32", FrozenWeights),
                                            ("hp-128", FrozenMXFP4Weights)])
def test_replayed_calls_read_frozen_weights(monkeypatch, recipe, frozen):
    """Plain torch ops stand for the kernels here."""
    monkeypatch.setattr(grouped_gemm, "emulated", lambda device, dtype: True)  # which asks an op that has no tensors
    wanted = calls(frozen, recipe, "random")
    executor = replay.ReplayBuilder().jit_load()
    monkeypatch.setattr(recorded, "executor_for", lambda device: executor)
    monkeypatch.setattr(recording.launcher, "current_stream", lambda: lambda device: 0)
    monkeypatch.setattr(recorded, "_PROGRAMS", {})
    for _ in range(2):  # the second time, with other memory
        assert all(map(torch.equal, calls(frozen, recipe, "random"), wanted))
    programs = [program for found in recorded._PROGRAMS.values() for program, _ in found.values()]
    assert len(programs) == 2 and None not in programs


def test_frozen_weights_follow_a_module_and_are_in_no_state_dict():
    frozen = FrozenWeights(2, 160, 96, torch.float32, "cpu")
    weights = [torch.randn(2, *shape) for shape in ((96, 160), (160, 96), (96, 160))]
    weights[0][0, 0, 0] = float("nan")
    for i, parts in enumerate(zip(*weights, strict=True)):
        frozen.put(i, *parts, "rceil")
    gate, down, up = weights
    wanted = mx.quantize_tiles(torch.cat([gate, up], dim=1)), mx.quantize_tiles(down)
    model = torch.nn.Sequential(frozen)
    for moved in (model, model.bfloat16(), copy.deepcopy(model)):
        for found, one in zip(moved[0].operands().values(), wanted, strict=True):
            assert torch.equal(found.scale_bytes, one.scale_bytes)
            assert torch.equal(found.qdata.view(torch.uint8), one.qdata.view(torch.uint8))
    assert model.state_dict() == {} and not list(model.parameters())
    both = wanted[0].dequantize()
    for found, one in zip(frozen.dequantized(), (both[:, :96], wanted[1].dequantize(), both[:, 96:]), strict=True):
        torch.testing.assert_close(found, one, rtol=0, atol=0, equal_nan=True)
    before, now = frozen.bytes_held()
    assert before == 4 * 3 * 2 * 160 * 96 and 0 < now - before // 4 < 40
    bytes_held = weakref.ref(frozen.operands()["up"].qdata)
    meta = model.to("meta")
    assert bytes_held() is None  # so that their memory is free
    assert all(operand.device.type == "meta" for operand in meta[0].operands().values())


def test_weights_in_four_bits_follow_a_module_and_take_17_bits_of_32():
    frozen = FrozenMXFP4Weights(2, 160, 96, torch.float32, "cpu")
    weights = [torch.randn(2, *shape) for shape in ((96, 160), (160, 96), (96, 160))]
    for i, parts in enumerate(zip(*weights, strict=True)):
        frozen.put(i, *parts, "rceil")
    gate, down, up = weights
    wanted = mxfp4.quantize(torch.cat([gate, up], dim=1)), mxfp4.quantize(down)
    model, sums = torch.nn.Sequential(frozen), frozen.checksums()
    for moved in (model, model.bfloat16(), copy.deepcopy(model)):
        for found, one in zip(moved[0].operands().values(), wanted, strict=True):
            assert all(map(torch.equal, found.buffers, one.buffers))
        assert moved[0].checksums() == sums
    for found, one in zip(frozen.dequantized(), (gate, down, up), strict=True):
        assert mx.sqnr_db(one, found) > 18
    assert frozen.rounding.values == 3 * 96 * 160 and 18.5 < frozen.rounding.sqnr_db < 19.5
    values, tiles = 2 * 3 * 96 * 160, 2 * (2 * 2 + 2 * 1)
    assert frozen.bytes_held() == (4 * values, values * 17 // 32 + tiles)
    copy_ = copy.deepcopy(frozen)
    copy_.down_scale[1, 3, 0] += 1
    assert [a == b for a, b in zip(copy_.checksums(), sums, strict=True)] == [True, False]
    bytes_held = weakref.ref(frozen.operands()["up"].codes)
    model.to("meta")
    assert bytes_held() is None  # so that their memory is free


# ---------------------------------------------------------------- when, and what is refused


def held_in(section, family="qwen3_moe", prepare=None, **changes):
    """How many layers hold MXFP8 alone, and what the start said."""
    with contextlib.redirect_stdout(io.StringIO()) as told:
        made = build(prepare(model(family, **changes)), section, 1, 2)
    losses = train_engine(made, [0])
    assert torch.isfinite(torch.tensor(losses)).all()
    return len(frozen_layers(made.module)), len(converted_layers(made.module)), told.getvalue()


def all_trained(net):
    return net


def lora_of_attention(net):
    return peft.get_peft_model(net, peft.LoraConfig(target_modules=["q_proj"]))


def attention_alone(net):
    for name, p in net.named_parameters():
        p.requires_grad = not re.fullmatch(ATTENTION, name)
    return net


def second_layer_trained(net):
    for name, p in net.named_parameters():
        p.requires_grad = "layers.0.mlp.experts" not in name
    return net


WRITTEN = {"enabled": True, "frozen_experts": "mxfp8"}


@pytest.mark.parametrize("section, prepare, held, changes", [
    ({"enabled": True}, lora_of_attention, 2, {}), ({"enabled": True}, attention_alone, 0, {}),
    (WRITTEN, attention_alone, 2, {}), (WRITTEN, second_layer_trained, 1, {}), (WRITTEN, all_trained, 0, {}),
    ({**WRITTEN, "exclude": [r".*layers\.0\..*"]}, lora_of_attention, 1, {}),
    (WRITTEN, lora_of_attention, 0, {"moe_intermediate_size": 48})])  # not converted
def test_which_layers_hold_mxfp8(ranks2, section, prepare, held, changes):
    for found, converted, told in ranks2.run(held_in, section, prepare=prepare, **changes):
        assert found == held <= converted or held == converted == 0
        if told and held:
            assert re.search(rf"frozen experts of {held} layers are held in MXFP8 alone, in .* GiB on this rank "
                             r"instead of .* GiB, rounded to an SQNR of 31\.\d dB", told)
            assert told.count(", frozen experts in MXFP8") == 1  # layers that are alike share a line
        elif told:
            assert "MXFP8 alone" not in told
            no_effect = '"frozen_experts": "mxfp8" has no effect' in told
            assert no_effect == ("frozen_experts" in section and section["frozen_experts"] == "mxfp8"
                                 and converted > 0)


def refused():
    net = adapted()
    made = build(net, {**WRITTEN, "keep_quantized_weights": True})
    layer = autoep_layers(net)[0]
    for module in (layer, layer.experts, layer.experts.frozen):
        with pytest.raises(RuntimeError, match='is frozen, and held in MXFP8 alone.*"frozen_experts": "keep"'):
            module.requires_grad_(True)
    with pytest.raises(AttributeError, match='w1 of these experts is frozen, and held in MXFP8 alone'):
        layer.experts.w1.requires_grad = True
    layer.requires_grad_(False)
    for section in ({"enabled": False}, {"recipe": "bf16"}, {"exclude": [".*"]}):
        with pytest.raises(ConfigError, match=r"layers.0.mlp holds its frozen experts in MXFP8 alone"):
            ds_mxfp8_moe.convert(made, section)
    with pytest.raises(ConfigError, match='"recipe" is "bf16".*"frozen_experts" is "mxfp8"'):
        ds_mxfp8_moe.convert(made, {"recipe": "bf16", "frozen_experts": "mxfp8"})
    mixed = ds_mxfp8_moe.initialize(model=second_layer_trained(model()), config=ds_config(WRITTEN))[0]
    with pytest.raises(RuntimeError, match="layers.0.mlp holds its frozen experts quantized, in no checkpoint"):
        mixed.save_checkpoint("nowhere")


def test_what_is_refused(ranks2):
    ranks2.run(refused)


def failing_on_rank_1():
    plain = FrozenWeights.put

    def put(self, expert, *args):
        if dist.get_rank() == 1 and expert == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        plain(self, expert, *args)

    with mock.patch.object(FrozenWeights, "put", put), pytest.raises(RuntimeError) as caught:
        build(adapted(), WRITTEN)
    return str(caught.value)


def test_a_rank_without_memory_is_an_error_on_every_rank(ranks2):
    for said in ranks2.run(failing_on_rank_1):
        assert said == ("frozen experts could not be quantized: rank 1: base_model.model.model.layers.0.mlp."
                        "experts, with 2 of 4 experts done: OutOfMemoryError: CUDA out of memory")


def with_a_nan():
    """What is said if a frozen weight of rank 1 is NaN."""
    made = build(adapted(dtype=torch.bfloat16), SECTION, 1, **BF16)
    if dist.get_rank() == 1:
        autoep_layers(made.module)[1].experts.frozen.down_scale[0] = 255
    with contextlib.redirect_stdout(io.StringIO()) as told:
        train_engine(made, range(3))
    return [line for line in told.getvalue().splitlines() if "NaN" in line]


def test_a_nan_in_a_frozen_weight_is_named(ranks2):
    (line, ), nothing = ranks2.run(with_a_nan)
    place = "base_model.model.model.layers.1.mlp.experts.frozen.down_scale"
    assert not nothing and re.search(r"layers\.1\.mlp(\.experts)?, on rank 1; there is one in ", line)
    assert line.endswith(place)


# ---------------------------------------------------------------- the start


def live_bytes() -> int:
    """Of all tensors of this process that have memory. Compilers leave some that have none."""
    storages = {}
    for x in gc.get_objects():
        if type(x) in (torch.Tensor, torch.nn.Parameter) and not x.is_meta and not torch._is_functional_tensor(x):
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
    return sum(storages.values())


def watched_start(client_optimizer):
    """The bytes beyond those before the start, at each expert's cast."""
    net = adapted(dtype=torch.bfloat16, hidden_size=128, moe_intermediate_size=128)
    kwargs = {}
    if client_optimizer:
        kwargs["optimizer"] = torch.optim.SGD(net.parameters(), lr=0.1)
    one_expert = 3 * 128 * 128 * 2
    plain, seen = FrozenWeights.put, []
    gc.collect()
    before = live_bytes()

    def put(self, *args):
        gc.collect()
        seen.append(live_bytes() - before)
        plain(self, *args)

    with mock.patch.object(FrozenWeights, "put", put):
        config = ds_config(WRITTEN, 0, 2, **BF16)
        made = ds_mxfp8_moe.initialize(model=net, config=config if client_optimizer is False else {
            key: value for key, value in config.items() if key != "optimizer"}, **kwargs)[0]
    del net, kwargs
    gc.collect()
    return [extra / one_expert for extra in seen], (live_bytes() - before) / one_expert, made.global_rank


@pytest.mark.parametrize("client_optimizer", [False, True])
def test_the_start_takes_one_expert_beside_the_model(ranks2, client_optimizer):
    """In units of one expert in bf16. A layer has 8 of them, and this rank holds 4, in half of their bytes."""
    for seen, after, _ in ranks2.run(watched_start, client_optimizer):
        assert len(seen) == 8
        small = 0.1  # routers and scales
        assert max(seen[:4]) <= 4 / 2 + 1 + small
        assert max(seen[4:]) <= 2 * 4 / 2 - 8 + 1 + small
        assert after <= 2 * 4 / 2 - 2 * 8 + 3  # with DeepSpeed's own tensors


# ---------------------------------------------------------------- out again


def whole_saved(directory, stage, family):
    made = engine(HELD, stage, 2, family=family, frozen=ATTENTION)
    train_engine(made, range(2))
    with contextlib.redirect_stdout(io.StringIO()) as told:
        ds_mxfp8_moe.save_pretrained(made, directory)
    with pytest.raises(RuntimeError, match="holds one rank's experts .*layers.0"):
        made.module.save_pretrained(directory, state_dict=made.module.state_dict())
    return held_out_loss(made), told.getvalue()


@pytest.mark.parametrize("stage, family", slow_except([(2, "qwen3_moe"), (3, "mixtral"), (0, "gpt_oss")],
                                                      (2, "qwen3_moe")))
def test_a_whole_model_is_saved_from_dequantized_experts(ranks2, tmp_path, stage, family):
    (loss, told), (other, nothing) = ranks2.run(whole_saved, tmp_path, stage, family)
    assert told.count("held quantized, are saved in the model's dtype") == 1 and not nothing
    net = loaded(tmp_path)
    assert loss == other == pytest.approx(held_out_loss(net), rel=1e-3)
    stored = next(p for key, p in net.named_parameters() if key.endswith("experts.down_proj"))
    before = next(p for key, p in model(family).named_parameters() if key.endswith("experts.down_proj"))
    if family != "gpt_oss":  # whose weights lie the other way round
        assert torch.equal(stored, mx.quantize_tiles(before).dequantize())
