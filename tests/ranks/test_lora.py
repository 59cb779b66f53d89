# SPDX-License-Identifier: Apache-2.0
"""LoRA by PEFT on experts, routers and shared experts: trained like plain Hugging Face with PEFT, and loaded by
these."""

import contextlib
import io
import warnings

import deepspeed.comm as dist
import peft
import pytest
import torch
from packaging.version import Version
from safetensors.torch import load_file
from transformers.integrations.peft import MIN_PEFT_VERSION

import ds_mxfp8_moe
from ds_mxfp8_moe.checkpoint import saving
from ds_mxfp8_moe.config import ConfigError
from ds_mxfp8_moe.layers.experts import converted_layers
from tests.support import models
from tests.support.adapted_models import LEARNING_RATE, adapted, build
from tests.support.autoep_models import autoep_layers, batch, ds_config, gathered, model, train_engine
from tests.support.pretrained_models import held_out_loss
from tests.support.slow import WIDE, slow_except

BF16 = {"enabled": True, "recipe": "bf16"}
MXFP8 = {"enabled": True}
KEPT = {"enabled": True, "frozen_experts": "keep"}  # which runs without MXFP8, too
LEFT_OUT = {"enabled": True, "exclude": [".*"]}
SECTIONS = {"BF16": BF16, "LEFT_OUT": LEFT_OUT}
WEIGHTS = ("w1", "w2", "w3")


def plain_losses(net, steps, ranks, rate=LEARNING_RATE):
    """Of plain Hugging Face and PEFT on the batches of all ranks: [steps, ranks]."""
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=rate, momentum=0.9)
    losses = []
    for step in steps:
        of_ranks = [net(input_ids=ids, labels=ids).loss for ids in (batch(step, rank) for rank in range(ranks))]
        (sum(of_ranks) / ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append([loss.item() for loss in of_ranks])
    return losses


def beside_peft(section, stage, ep_size, steps=3, bf16=False, checkpointing=False, trained=False, **changes):
    """`trained`: the experts' weights, too."""
    dtype = torch.bfloat16 if bf16 else torch.float32
    extra = {"bf16": {"enabled": True}} if bf16 else {}
    plain, net = (adapted(dtype=dtype, **changes) for _ in range(2))
    for name, p in [*plain.named_parameters(), *net.named_parameters()]:
        p.requires_grad |= trained and ".experts." in name
    losses = plain_losses(plain, range(steps), dist.get_world_size())
    engine = build(net, section, stage, ep_size, **extra)
    if checkpointing:
        net.enable_input_require_grads()
        net.gradient_checkpointing_enable({"use_reentrant": False})
    experts = [p for layer in autoep_layers(net) for name, p in layer.experts.named_parameters() if name in WEIGHTS]
    before = [gathered(p) for p in experts]
    ours = train_engine(engine, range(steps))
    assert all(torch.equal(a, gathered(b)) != trained for a, b in zip(before, experts, strict=True))
    return [of_ranks[dist.get_rank()] for of_ranks in losses], ours, len(experts)


# On four ranks, two share the experts, and two such pairs share the batches.
@pytest.mark.parametrize("ranks, stage, ep_size", slow_except(
    [("ranks4", 2, 2), ("ranks2", 0, 2), ("ranks2", 1, 1), ("ranks2", 2, 2), ("ranks2", 3, 1), ("ranks2", 3, 2)],
    ("ranks2", 0, 2), ("ranks2", 3, 2)))
def test_trains_like_plain_peft(request, ranks, stage, ep_size):
    for plain, ours, frozen in request.getfixturevalue(ranks).run(beside_peft, BF16, stage, ep_size):
        assert ours == pytest.approx(plain, rel=1e-5) and frozen == 6


@pytest.mark.parametrize("section, family", slow_except(
    [*(("BF16", family) for family in ("mixtral", "qwen2_moe", "deepseek_v3", "gpt_oss")), ("LEFT_OUT", "gpt_oss")],
    ("BF16", "gpt_oss")))
def test_every_family_trains_like_plain_peft(ranks2, section, family):
    for plain, ours, _ in ranks2.run(beside_peft, SECTIONS[section], 2, 2, family=family):
        assert ours == pytest.approx(plain, rel=1e-5)


@pytest.mark.parametrize("stage, ep_size", slow_except([(0, 1), (2, 2), (3, 2)], (2, 2)))
def test_beside_mxfp8_experts_losses_stay_close(ranks2, stage, ep_size):
    for plain, ours, _ in ranks2.run(beside_peft, MXFP8, stage, ep_size, steps=6, bf16=True):
        assert ours == pytest.approx(plain, rel=0.01)


@pytest.mark.parametrize("stage, changes", [
    (0, {"targets": ["gate_up_proj"]}), (0, {"targets": ["down_proj"], "rank": 9}), (1, {"trained": True}),
    pytest.param(3, {"checkpointing": True}, marks=WIDE)])
def test_one_target_any_rank_trained_experts_and_activation_checkpointing(ranks2, stage, changes):
    for plain, ours, _ in ranks2.run(beside_peft, BF16, stage, 2, **changes):
        assert ours == pytest.approx(plain, rel=1e-5)


def told_of_adapters(family, names) -> str:
    net = peft.get_peft_model(model(family), peft.LoraConfig(**names))
    with contextlib.redirect_stdout(io.StringIO()) as told:
        build(net, MXFP8, 1)
    return told.getvalue()


STACKS = {"target_modules": ["q_proj", "gate_up_proj", "down_proj"]}  # names of parameters, of which PEFT says nothing


@pytest.mark.parametrize("family, names, line", [
    ("mixtral", STACKS, ", experts frozen, no adapters\n"),
    ("qwen3_moe", STACKS, ", with PEFT's adapters of down_proj\n"),
    ("qwen3_moe", {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
     ", with PEFT's adapters of gate_up_proj and down_proj\n")])
def test_the_start_says_which_experts_adapters_reached(ranks2, family, names, line):
    assert ranks2.run(told_of_adapters, family, names)[0].count(line) == 1  # of both layers


# ---------------------------------------------------------------- target_modules="all-linear"

TARGETS = {
    "all": {"target_modules": "all-linear", "task_type": "CAUSAL_LM"},  # experts and routers, or what is shared
    "one router": {"target_modules": ["q_proj"], "target_parameters": ["layers.1.mlp.gate.weight"]},
    "biases": {"target_modules": ["q_proj"], "target_parameters": ["experts.down_proj", "router.weight"],
               "bias": "all"},
    "whole gate": {"target_modules": ["q_proj", "shared_expert.up_proj"], "modules_to_save": ["shared_expert_gate"]}}


def adapted_everywhere(family, targets):
    net = model(family)
    torch.manual_seed(1)
    return peft.get_peft_model(net, peft.LoraConfig(r=4, init_lora_weights=False, **TARGETS[targets]))


def everywhere(directory, stage, family, targets):
    """Losses of plain PEFT and of an engine, the latter's held-out loss, and its exported weights."""
    plain, net = (adapted_everywhere(family, targets) for _ in range(2))
    engine = build(net, BF16, stage, rate=0.05, gradient_clipping=0.0)  # rounding changes no choice of experts
    if dist.get_rank() == 0:
        plain.save_pretrained(directory / "plain")
    losses = [of_ranks[dist.get_rank()] for of_ranks in plain_losses(plain, range(3), 2, rate=0.05)]
    ours = train_engine(engine, range(3))
    ds_mxfp8_moe.save_pretrained(engine, directory / "ours")
    state = saving.consolidated_state_dict(engine)  # as by accelerator.get_state_dict, and in Trainer checkpoints
    if dist.get_rank() == 0:
        net.save_pretrained(directory / "trainer", state_dict=state)
        if stage < 3:
            net.save_pretrained(directory / "own")
    exported = {name: tensor.clone() for name, tensor in ds_mxfp8_moe.export_weights(engine, weights="model")}
    ds_mxfp8_moe.convert(engine, {"enabled": False})
    return losses, ours, held_out_loss(engine), exported


# Mixtral's loss includes the routers' logits.
@pytest.mark.parametrize("stage, family, targets", slow_except(
    [(3, "qwen3_moe", "all"), (1, "mixtral", "all"), (0, "mixtral", "one router"), (1, "deepseek_v3", "all"),
     (3, "qwen2_moe", "all"), (0, "qwen2_moe", "whole gate"), (1, "gpt_oss", "biases")],
    (0, "mixtral", "one router"), (3, "qwen2_moe", "all")))
def test_routers_and_shared_experts_train_and_are_saved_like_plain_pefts(ranks2, tmp_path, stage, family, targets):
    results = ranks2.run(everywhere, tmp_path, stage, family, targets)
    for plain, ours, _, _ in results:
        assert ours == pytest.approx(plain, rel=1e-5)
    wanted = set(load_file(tmp_path / "plain" / "adapter_model.safetensors"))
    assert any(".mlp." in name for name in wanted)
    for name in ("ours", "trainer", "own")[:2 if stage == 3 else 3]:
        assert set(load_file(tmp_path / name / "adapter_model.safetensors")) == wanted
        net = peft.PeftModel.from_pretrained(model(family), tmp_path / name)
        assert [loss for _, _, loss, _ in results] == pytest.approx([held_out_loss(net)] * 2, abs=1e-5)
    net.merge_and_unload().save_pretrained(tmp_path / "merged")
    merged, exported = load_file(tmp_path / "merged" / "model.safetensors"), results[0][-1]
    assert merged.keys() == exported.keys()
    for name, tensor in merged.items():
        if ".experts." not in name:  # those: test_exporting.py
            assert torch.allclose(tensor, exported[name], atol=1e-5), name


def gathered_in_backward(family):
    """How many parameters of the last layer ZeRO-3 has gathered when the backward of the first layer ends."""
    net = adapted() if family == "qwen3_moe" else model(family)
    engine = build(net, BF16, 3, zero_optimization={"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0,
                                                    "stage3_prefetch_bucket_size": 0})
    layers, found = autoep_layers(net), []

    def count(grad):
        found.append(sum(p.shape == p.ds_shape for p in layers[-1].parameters()))

    layers[0].register_forward_pre_hook(lambda module, args: args[0].register_hook(count) and None)
    train_engine(engine, [0])
    return found


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_layers_adapters_and_biases_are_gathered_for_its_own_backward_alone(ranks2, family):
    assert ranks2.run(gathered_in_backward, family) == [[0]] * 2


# ---------------------------------------------------------------- saving and loading


def saved(directory, stage, ep_size, **changes):
    net = adapted(**changes)
    engine = build(net, KEPT, stage, ep_size)
    train_engine(engine, range(2))
    ds_mxfp8_moe.save_pretrained(engine, directory / "ours", save_embedding_layers=True)
    if stage == 3:
        with pytest.raises(RuntimeError, match="ds_mxfp8_moe.save_pretrained"):
            net.save_pretrained(directory / "theirs")
    elif dist.get_rank() == 0:
        net.save_pretrained(directory / "theirs", save_embedding_layers=True)
        for module in (peft.utils, peft.utils.save_and_load):
            assert any(".experts.base_layer.lora_A." in name for name in module.get_peft_model_state_dict(net))
    ds_mxfp8_moe.convert(engine, {"enabled": False})
    return held_out_loss(engine)


@pytest.mark.parametrize("stage, ep_size, family", slow_except(
    [(0, 1, "mixtral"), (0, 2, "gpt_oss"), (2, 2, "qwen3_moe"), (3, 2, "qwen3_moe")], (3, 2, "qwen3_moe")))
def test_plain_peft_loads_the_adapter(ranks2, tmp_path, stage, ep_size, family):
    losses = ranks2.run(saved, tmp_path, stage, ep_size, family=family)
    assert abs(held_out_loss(model(family)) - losses[0]) > 1e-3
    for name in ("ours", "theirs")[:1 if stage == 3 else 2]:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Found missing adapter keys")
            net = peft.PeftModel.from_pretrained(model(family), tmp_path / name)
        files = load_file(tmp_path / name / "adapter_model.safetensors")
        assert {f"base_model.model.{one}.weight" for one in ("model.embed_tokens", "lm_head")} < set(files)
        assert losses == pytest.approx([held_out_loss(net)] * 2, abs=1e-5)


def by_transformers(directory, section):
    """Its own add_adapter, in place of a PeftModel."""
    net = model()
    net.add_adapter(peft.LoraConfig(r=4, init_lora_weights=False, target_modules=["q_proj"],
                                    modules_to_save=["lm_head"],
                                    target_parameters=["experts.gate_up_proj", "experts.down_proj"]))
    engine = build(net, section)
    train_engine(engine, range(2))
    state = saving.consolidated_state_dict(engine)  # what accelerator.get_state_dict returns
    net.save_pretrained(directory / "theirs", state_dict=state, is_main_process=dist.get_rank() == 0)
    ds_mxfp8_moe.save_pretrained(engine, directory / "ours")
    assert "lm_head.weight" in dict(ds_mxfp8_moe.export_weights(engine, "model"))
    if section == KEPT:
        ds_mxfp8_moe.convert(engine, {"enabled": False})
    return held_out_loss(engine)


@pytest.mark.skipif(Version(peft.__version__) < Version(MIN_PEFT_VERSION), reason="transformers' own add_adapter asks "
                    f"for PEFT {MIN_PEFT_VERSION}")
@pytest.mark.parametrize("section, difference", [(KEPT, 1e-5), (MXFP8, 5e-3)])
def test_adapters_added_by_transformers(ranks2, tmp_path, section, difference):
    losses = ranks2.run(by_transformers, tmp_path, section)
    for name in ("ours", "theirs"):
        net = peft.PeftModel.from_pretrained(model(), tmp_path / name)  # transformers 5.17 itself loads no experts'
        assert losses == pytest.approx([held_out_loss(net)] * 2, abs=difference)
    assert abs(held_out_loss(model()) - held_out_loss(net)) > 1e-3


def resumed(directory, stage, exclude):
    """Losses after a checkpoint: of the engine that goes on, and of another one that loads it."""
    first = build(adapted(), BF16, stage)
    train_engine(first, range(2))
    first.save_checkpoint(directory, exclude_frozen_parameters=exclude)
    second = build(adapted(seed=2), BF16, stage)
    second.load_checkpoint(directory, load_module_strict=not exclude)
    return train_engine(first, [2, 3]), train_engine(second, [2, 3])


@pytest.mark.parametrize("stage, exclude", slow_except(
    [(0, True), (1, False), (2, False), (3, True)], (2, False)))
def test_training_goes_on_from_a_checkpoint(ranks2, tmp_path, stage, exclude):
    for went_on, loaded in ranks2.run(resumed, tmp_path, stage, exclude):
        assert loaded == pytest.approx(went_on, abs=1e-6)


# ---------------------------------------------------------------- PEFT's own functions, and what is refused


def switched(section):
    """Held-out losses of plain PEFT and of an engine: with the adapter, without, with another one, with both, and with
    one that PEFT had merged before."""
    results, targets = [], ["experts.gate_up_proj", "experts.down_proj", "gate.weight"]
    for sharded in (False, True):
        net = adapted(targets=targets, prefix="")
        net.add_adapter("other", peft.LoraConfig(r=5, init_lora_weights=False, target_modules=["q_proj"],
                                                 target_parameters=targets))
        torch.manual_seed(3)
        for name, p in net.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(p, std=0.1)
        called = build(net, section) if sharded else net
        losses = [held_out_loss(called)]
        with net.disable_adapter():
            losses.append(held_out_loss(called))
        net.set_adapter("other")
        losses.append(held_out_loss(called))
        net.base_model.set_adapter(["default", "other"])
        losses.append(held_out_loss(called))
        merged = adapted(targets=targets, prefix="")
        merged.merge_adapter()
        losses.append(held_out_loss(build(merged, section) if sharded else merged))
        results.append(losses)
    return results


def test_adapters_are_switched_by_peft(ranks2):
    for plain, ours in ranks2.run(switched, BF16):
        assert ours == pytest.approx(plain, abs=1e-4)
        assert len({round(loss, 3) for loss in plain}) == 5


def refused():
    net = adapted()
    build(net, BF16)
    assert net.get_model_status().trainable_params > 0 and "gate_up_proj" in repr(net)
    with pytest.raises(RuntimeError, match="PEFT cannot merge adapters into their weights.*save_pretrained"):
        net.merge_and_unload()
    with pytest.raises(ConfigError, match="mlp.experts: an adapter targets gate_up_proj_bias; expert parallelism"):
        build(adapted("gpt_oss", targets=["gate_up_proj", "gate_up_proj_bias"]), BF16)
    # Nothing is converted, so the model stays PEFT's.
    net = adapted()
    config = {**ds_config(BF16), "expert_parallel": {"enabled": False}}
    engine = ds_mxfp8_moe.initialize(model=net, config=config)[0]
    return held_out_loss(engine) == held_out_loss(adapted())


def test_what_is_refused(ranks2):
    assert ranks2.run(refused) == [True, True]


# ---------------------------------------------------------------- frozen experts


def frozen_but_for_attention(stage):
    net = peft.get_peft_model(model(), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    engine = build(net, MXFP8, stage)
    losses = train_engine(engine, [0] * 3)
    return losses, len(converted_layers(net))


@pytest.mark.parametrize("stage", slow_except([1, 2], 1))
def test_all_experts_may_be_frozen_without_adapters(ranks2, stage):
    for losses, converted in ranks2.run(frozen_but_for_attention, stage):
        assert losses[-1] < losses[0] and converted == 2


def classic(stage, section):
    layout = models.Layout(zero=stage, frozen=r".*deepspeed_experts.*", steps=3)
    return [record["loss"] for record in models.train_steps(models.make_engine(layout, section), layout)]


@pytest.mark.slow
@pytest.mark.parametrize("stage", slow_except([1, 2], 2))
def test_experts_of_classic_layers_may_be_frozen_too(ranks2, stage):
    for plain, ours in zip(ranks2.run(classic, 0, models.PLAIN), ranks2.run(classic, stage, BF16), strict=True):
        assert ours == pytest.approx(plain, abs=1e-5)
