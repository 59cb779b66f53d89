# SPDX-License-Identifier: Apache-2.0
"""LoRA by PEFT on experts, routers and shared experts of every layout: trained like plain transformers with PEFT, and
saved under its names."""

import contextlib
import io
import warnings
from dataclasses import dataclass, field

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
from ds_mxfp8_moe.layers.experts import expert_blocks
from tests.support.adapted_models import STACKS, adapted, build, plain_losses, switched
from tests.support.autoep_models import ds_config, gathered, model, train_engine
from tests.support.missing_names import without
from tests.support.pretrained_models import held_out_loss
from tests.support.slow import WIDE

BF16 = {"enabled": True, "recipe": "bf16"}  # which is fp32 where the model is
MXFP8 = {"enabled": True}
KEPT = {"enabled": True, "frozen_experts": "keep"}  # which runs without MXFP8, too
RATE = 0.05  # at which rounding changes no choice of experts


def also(*names: str) -> dict:
    """Attention and these parameters."""
    return {"target_modules": ["q_proj"], "target_parameters": list(names)}


EXPERTS = also("experts.gate_up_proj", "experts.down_proj")


@dataclass(frozen=True)
class Case:
    """How adapters are trained.

    Attributes:
        targets: arguments of peft.LoraConfig.
        both: two adapters at once.
        experts_too: the experts' weights are trained, too.
    """

    stage: int = 0
    ep_size: int = 2
    family: str = "qwen3_moe"
    targets: dict = field(default_factory=lambda: EXPERTS)
    rank: int = 4
    section: dict = field(default_factory=lambda: BF16)
    both: bool = False
    experts_too: bool = False
    checkpointing: bool = False

    @property
    def has_one_file(self) -> bool:
        """Whether the file of one adapter has all that was trained."""
        return not self.both and not self.experts_too

    @property
    def without_frozen(self) -> bool:
        """Whether checkpoints leave frozen parameters out."""
        return self.stage in (0, 3)

    def adapted(self, seed: int = 1) -> torch.nn.Module:
        net = model(self.family)
        torch.manual_seed(seed)
        configs = [peft.LoraConfig(r=rank, lora_alpha=8, init_lora_weights=False, **self.targets)
                   for rank in (self.rank, 3)]
        net = peft.get_peft_model(net, configs[0])
        if self.both:
            net.add_adapter("other", configs[1])
            net.base_model.set_adapter(["default", "other"])
        for name, p in net.named_parameters():
            p.requires_grad |= self.experts_too and ".experts." in name
        return net


ALL = {"target_modules": "all-linear", "task_type": "CAUSAL_LM"}  # experts and routers, or what is shared
UP = also("experts.up_proj", "experts.down_proj")
# Ranks by their fixture: on four, two share the experts, and two such pairs share the batches. Mixtral's loss includes
# the routers' logits. The experts of nemotron_h have no gate, those of qwen3_vl_moe lie below a language model, those
# of aria are transposed.
QUICK = {
    "zero0, one stack": ("ranks2", Case(targets=also("experts.down_proj"), rank=9)),
    "one router": ("ranks2", Case(family="mixtral", targets=also("layers.1.mlp.gate.weight"))),
    "shared experts, zero3": ("ranks2", Case(3, family="qwen2_moe", targets=ALL)),
    "biases": ("ranks2", Case(2, family="gpt_oss", targets={**also("experts.down_proj", "router.weight"),
                                                            "bias": "all"})),
    "experts, too": ("ranks2", Case(1, experts_too=True)),
    "nemotron_h": ("ranks2", Case(3, family="nemotron_h", targets=UP)),
    "qwen3_vl_moe": ("ranks2", Case(1, family="qwen3_vl_moe", targets=also("experts.gate_up_proj", "gate.weight"))),
    "aria, both": ("ranks2", Case(3, family="aria", both=True)),
}
SLOW = {
    "four ranks": ("ranks4", Case(2)),
    "zero2": ("ranks2", Case(2)),
    "zero3, whole experts": ("ranks2", Case(3, 1)),
    "zero3": ("ranks2", Case(3, targets=ALL)),
    "deepseek_v3": ("ranks2", Case(1, family="deepseek_v3", targets=ALL)),
    "gpt_oss, zero3": ("ranks2", Case(3, family="gpt_oss")),
    "left out": ("ranks2", Case(2, family="gpt_oss", section={"enabled": True, "exclude": [".*"]})),
    "whole gate": ("ranks2", Case(0, family="qwen2_moe", targets={"target_modules": [
        "q_proj", "shared_expert.up_proj"], "modules_to_save": ["shared_expert_gate"]})),
    "recomputed": ("ranks2", Case(3, checkpointing=True)),
}


def assert_pefts_names(plain: torch.nn.Module, net: torch.nn.Module, engine) -> None:
    def factors(names) -> list[str]:
        return [name for name in names if ".lora_" in name]

    wanted = factors(name for name, _ in plain.named_parameters())
    assert factors(net.state_dict()) == factors(plain.state_dict())
    assert set(factors(name for name, _ in net.named_parameters())) == set(wanted) == set(
        factors(engine.param_names.values()))
    for adapter in plain.peft_config:
        for function in (peft.utils.get_peft_model_state_dict, peft.utils.save_and_load.get_peft_model_state_dict):
            assert list(function(net, adapter_name=adapter)) == list(function(plain, adapter_name=adapter))


def frozen_weights(net: torch.nn.Module) -> list[torch.Tensor]:
    return [gathered(p) for name, p in net.named_parameters() if ".experts." in name and "lora_" not in name]


def beside_peft(directory, case: Case) -> dict:
    """Trains three steps in plain PEFT and in an engine, which is saved in each way."""
    plain, net = case.adapted(), case.adapted()
    engine = build(net, case.section, case.stage, case.ep_size, RATE, gradient_clipping=0.0)
    assert_pefts_names(plain, net, engine)
    if case.checkpointing:
        net.enable_input_require_grads()
        net.gradient_checkpointing_enable({"use_reentrant": False})
    if dist.get_rank() == 0:
        plain.save_pretrained(directory / "plain", save_embedding_layers=True)
    expected, before = plain_losses(plain, range(3), RATE), frozen_weights(net)
    losses = train_engine(engine, range(2))
    engine.save_checkpoint(directory / "checkpoint", exclude_frozen_parameters=case.without_frozen)
    losses += train_engine(engine, [2])
    assert all(torch.equal(a, b) != case.experts_too for a, b in zip(before, frozen_weights(net), strict=True))

    ds_mxfp8_moe.save_pretrained(engine, directory / "ours", save_embedding_layers=True)
    state = saving.consolidated_state_dict(engine)  # as by accelerator.get_state_dict, and in Trainer checkpoints
    if dist.get_rank() == 0:
        net.save_pretrained(directory / "trainer", state_dict=state, save_embedding_layers=True)
        if case.stage < 3:
            net.save_pretrained(directory / "own", save_embedding_layers=True)
    exported = {name: tensor.clone() for name, tensor in ds_mxfp8_moe.export_weights(engine, "model")}
    found = {"plain": expected, "ours": losses, "exported": exported, "held out": held_out_loss(engine)}
    dist.barrier()
    return found | another_engine(directory, case)


def another_engine(directory, case: Case) -> dict:
    """The held-out losses of an engine with adapters that PEFT's own functions load; its loss after a checkpoint."""
    net, loaded = case.adapted(seed=2), []
    engine = build(net, case.section, case.stage, case.ep_size, RATE, gradient_clipping=0.0)
    if case.stage < 3 and case.has_one_file:
        files = peft.load_peft_weights(directory / "ours", device="cpu")
        for load in (lambda: net.load_adapter(directory / "ours", "default"),
                     lambda: peft.set_peft_model_state_dict(net, files)):
            for name, p in net.named_parameters():
                if ".lora_" in name:
                    p.data.zero_()
            assert not load().unexpected_keys
            loaded.append(held_out_loss(engine))
        engine.train()
    engine.load_checkpoint(directory / "checkpoint", load_module_strict=not case.without_frozen)
    return {"loaded": loaded, "resumed": train_engine(engine, [2])}


@pytest.mark.parametrize("ranks, case", [*(pytest.param(*case, id=name) for name, case in QUICK.items()),
                                         *(pytest.param(*case, id=name, marks=WIDE) for name, case in SLOW.items())])
def test_adapters_train_and_are_saved_like_plain_pefts(request, tmp_path, ranks, case):
    results = request.getfixturevalue(ranks).run(beside_peft, tmp_path, case)
    for found in results:
        assert found["ours"] == pytest.approx(found["plain"], rel=1e-5)
        assert found["resumed"] == pytest.approx(found["ours"][2:], rel=1e-5)
        assert found["loaded"] == pytest.approx([found["held out"]] * len(found["loaded"]), abs=1e-5)
    assert_peft_loads(tmp_path, case, results[0])


def assert_peft_loads(directory, case: Case, found: dict) -> None:
    """Each file has PEFT's names and the loss of the engine; merged, it has the exported weights."""
    wanted = set(load_file(directory / "plain" / "adapter_model.safetensors"))
    for name in ("ours", "trainer", "own")[:2 if case.stage == 3 else 3]:
        assert set(load_file(directory / name / "adapter_model.safetensors")) == wanted
        if not case.has_one_file:
            continue
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Found missing adapter keys")
            net = peft.PeftModel.from_pretrained(model(case.family), directory / name)
        assert held_out_loss(net) == pytest.approx(found["held out"], abs=1e-5)
    if not case.has_one_file:
        return
    assert abs(held_out_loss(model(case.family)) - found["held out"]) > 3e-5  # three times as much as may be lost
    net.merge_and_unload().save_pretrained(directory / "merged")
    merged, exported = load_file(directory / "merged" / "model.safetensors"), found["exported"]
    assert merged.keys() == exported.keys()
    for name, tensor in merged.items():
        assert torch.allclose(tensor, exported[name], atol=1e-5), name


def in_mxfp8(family: str, stage: int, ep_size: int) -> tuple[list[float], list[float]]:
    targets = UP if family == "nemotron_h" else EXPERTS
    plain, net = (Case(family=family, targets=targets).adapted().bfloat16() for _ in range(2))
    losses = plain_losses(plain, range(6), RATE)
    engine = build(net, MXFP8, stage, ep_size, RATE, bf16={"enabled": True})
    assert all("frozen" in block.experts._modules for _, block in expert_blocks(net))
    return losses, train_engine(engine, range(6))


@pytest.mark.parametrize("family, stage, ep_size", [
    ("nemotron_h", 2, 2), *(pytest.param(*case, marks=WIDE) for case in [
        ("qwen3_moe", 0, 1), ("qwen3_moe", 3, 2), ("aria", 2, 2)])])
def test_beside_frozen_mxfp8_experts_losses_stay_close(ranks2, family, stage, ep_size):
    for plain, ours in ranks2.run(in_mxfp8, family, stage, ep_size):
        assert ours == pytest.approx(plain, rel=0.01)


def told_of_adapters(family, names) -> str:
    net = peft.get_peft_model(model(family), peft.LoraConfig(**names))
    with contextlib.redirect_stdout(io.StringIO()) as told:
        build(net, MXFP8, 1)
    return told.getvalue()


OF_PARAMETERS = {"target_modules": ["q_proj", *STACKS]}  # of which PEFT says nothing


@pytest.mark.parametrize("family, names, line", [
    ("mixtral", OF_PARAMETERS, ", experts frozen, no adapters\n"),
    ("qwen3_moe", OF_PARAMETERS, ", with PEFT's adapters of down_proj\n"),
    ("qwen3_moe", EXPERTS, ", with PEFT's adapters of gate_up_proj and down_proj\n")])
def test_the_start_says_which_experts_adapters_reached(ranks2, family, names, line):
    assert ranks2.run(told_of_adapters, family, names)[0].count(line) == 1  # of both layers


def gathered_in_backward(family):
    """How many parameters of the last layer ZeRO-3 has gathered when the backward of the first layer ends."""
    net = model(family) if family == "gpt_oss" else adapted(family)
    engine = build(net, BF16, 3, zero_optimization={"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0,
                                                    "stage3_prefetch_bucket_size": 0})
    layers, found = [block for _, block in expert_blocks(net)], []

    def count(grad):
        found.append(sum(p.shape == p.ds_shape for p in layers[-1].parameters()))

    layers[0].register_forward_pre_hook(lambda module, args: args[0].register_hook(count) and None)
    train_engine(engine, [0])
    return found


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "aria"])
def test_a_layers_adapters_and_biases_are_gathered_for_its_own_backward_alone(ranks2, family):
    assert ranks2.run(gathered_in_backward, family) == [[0]] * 2


# ---------------------------------------------------------------- PEFT's and transformers' own functions


def by_transformers(directory, section):
    """Its own add_adapter, in place of a PeftModel."""
    net = model()
    net.add_adapter(peft.LoraConfig(r=4, init_lora_weights=False, modules_to_save=["lm_head"], **EXPERTS))
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


def switched_and_merged() -> list[list[float]]:
    """Held-out losses of plain PEFT and of an engine, the last one with an adapter that PEFT had merged before."""
    results, targets = [], ["experts.gate_up_proj", "experts.down_proj", "gate.weight"]
    for make in (lambda net: net, lambda net: build(net, BF16)):
        merged = adapted(targets=targets, prefix="")
        merged.merge_adapter()
        results.append([*switched(adapted(targets=targets, prefix=""), make), held_out_loss(make(merged))])
    return results


def test_adapters_are_switched_by_peft(ranks2):
    for plain, ours in ranks2.run(switched_and_merged):
        assert ours == pytest.approx(plain, abs=1e-4)
        assert len({round(loss, 3) for loss in plain}) == 5


def refused():
    for family in ("qwen3_moe", "aria"):
        net = adapted(family)
        build(net, BF16)
        assert net.get_model_status().trainable_params > 0 and "gate_up_proj" in repr(net)
        for call in (net.merge_and_unload, net.unload, net.merge_adapter):
            with pytest.raises(RuntimeError, match="PEFT cannot merge adapters into their weights.*save_pretrained"):
                call()
    with pytest.raises(ConfigError, match="mlp.experts: an adapter targets gate_up_proj_bias; expert parallelism"):
        build(adapted("gpt_oss", targets=["gate_up_proj", "gate_up_proj_bias"]), BF16)
    unknown = "cannot take adapters of experts: deepspeed .*gone"
    with without("LoRA on experts"), pytest.raises(ConfigError, match=unknown):
        build(adapted("aria"), BF16)
    for name in ("experts", "mlp"):
        with pytest.raises(ConfigError, match=f"{name} holds experts, and is in modules_to_save"):
            build(peft.get_peft_model(model("aria"), peft.LoraConfig(target_modules=["q_proj"],
                                                                    modules_to_save=[name])), BF16)
    # Nothing is converted, so the model stays PEFT's.
    net = adapted()
    config = {**ds_config(BF16), "expert_parallel": {"enabled": False}}
    engine = ds_mxfp8_moe.initialize(model=net, config=config)[0]
    return held_out_loss(engine) == held_out_loss(adapted())


def test_what_is_refused(ranks2):
    assert ranks2.run(refused) == [True, True]


def losses_of_experts_alone(stage: int, adapters: bool) -> list[float]:
    """Of a model of which nothing before the first layer's experts is trained."""
    net = model()
    if adapters:
        torch.manual_seed(1)
        net = peft.get_peft_model(net, peft.LoraConfig(r=4, target_modules=[], init_lora_weights=False,
                                                       target_parameters=["experts.gate_up_proj"]))
    else:
        for name, p in net.named_parameters():
            p.requires_grad = "experts" in name
    return train_engine(build(net, {"enabled": True}, stage, rate=0.1), range(3))


@pytest.mark.parametrize("adapters", [False, True], ids=["experts", "adapters"])
def test_experts_alone_train_in_zero3(ranks2, adapters):
    expected = ranks2.run(losses_of_experts_alone, 2, adapters)
    for losses, of_zero2 in zip(ranks2.run(losses_of_experts_alone, 3, adapters), expected, strict=True):
        assert losses == pytest.approx(of_zero2, rel=1e-5)
        assert losses[2] < losses[0] or adapters
