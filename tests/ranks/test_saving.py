# SPDX-License-Identifier: Apache-2.0
"""Each way of saving that an engine and its model have: plain transformers loads the files with the same held-out
loss, or an error names the call that writes such files. test_trainer.py has those of the Trainer and Accelerate."""

import contextlib
import gc
import io
import weakref
from pathlib import Path

import accelerate
import deepspeed
import deepspeed.comm as dist
import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import Qwen2MoeForSequenceClassification

import ds_mxfp8_moe
from ds_mxfp8_moe import save_pretrained
from ds_mxfp8_moe.checkpoint import gathering
from ds_mxfp8_moe.checkpoint.saving import MARK
from tests.support.autoep_models import FAMILIES, batch, ds_config, model, train_engine
from tests.support.models import Layout, Net, make_engine, train_steps
from tests.support.pretrained_models import HELD_OUT, build, held_out_loss, loaded
from tests.support.saved_models import LORA, PATTERN, loss_of


def disk_is_full(state, path, metadata=None) -> None:
    Path(path).write_text("cut")
    raise OSError(28, "No space left on device")


def saved_by_the_model(directory, stage, ep_size):
    engine = build("deepseek_v3", {"enabled": True}, stage, ep_size)
    train_engine(engine, range(2))
    if stage == 3 or ep_size > 1:
        for part in (engine.module, engine.module.model):
            with pytest.raises(RuntimeError, match="cannot save itself. Every rank calls ds_mxfp8_moe.save_pretr"):
                part.save_pretrained(directory)
        if stage < 3:
            with pytest.raises(RuntimeError, match="holds one rank's experts .*from accelerator.get_state_dict"):
                engine.module.save_pretrained(directory, state_dict=engine.module.state_dict())
        return None
    if dist.get_rank() == 0:  # without peers: nothing to gather
        engine.module.save_pretrained(directory)
        with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError, match="No space left"):
            patch.setattr(transformers.modeling_utils, "safe_save_file", disk_is_full)
            engine.module.save_pretrained(directory)
    return loss_of(engine)


def test_the_models_own_save_pretrained(ranks2, tmp_path):
    losses = ranks2.run(saved_by_the_model, tmp_path, 1, 1)
    assert losses == pytest.approx([held_out_loss(loaded(tmp_path))] * 2, abs=1e-3)


@pytest.mark.parametrize("stage, ep_size", [(1, 2), (3, 1)])
def test_a_model_that_cannot_save_itself_says_what_does(ranks2, tmp_path, stage, ep_size):
    ranks2.run(saved_by_the_model, tmp_path, stage, ep_size)
    assert not list(tmp_path.iterdir())


def saved_classic(directory, layout):
    """What of this rank is not in the file, by its name there, and whether a model without peers takes the file."""
    net = make_engine(layout, {"enabled": True})
    train_steps(net, layout)
    assert net.save_16bit_model(directory)
    with pytest.raises(RuntimeError, match="this Net holds one rank's experts"):
        accelerate.Accelerator.get_state_dict(None, net.module)
    dist.barrier()
    state, wrong = torch.load(directory / "pytorch_model.bin"), []
    for name, value in net.module.state_dict().items():
        before, mine, after = name.partition(".deepspeed_experts.")
        if mine:
            layer = net.module.get_submodule(before.removesuffix(".experts"))
            index, _, rest = after.partition(".")
            name = f"{before}{mine}{int(index) + layer.num_local_experts * dist.get_rank(layer.ep_group)}.{rest}"
        wrong += [] if torch.equal(state[name], value) else [name]
    return wrong, not any(Net(1, **layout.moe).to(torch.bfloat16).load_state_dict(state))


@pytest.mark.parametrize("layout", [Layout(zero=2, dtype="bf16"), Layout(ep_size=(1, 2), dtype="bf16"),
                                    Layout(zero=1, dtype="bf16", moe={"use_residual": True}, frozen=r"last\..*")])
def test_classic_layers_save_the_experts_of_all_ranks(ranks2, tmp_path, layout):
    assert ranks2.run(saved_classic, tmp_path, layout) == [([], True)] * 2


class OwnModel(transformers.PreTrainedModel):

    def __init__(self):
        super().__init__(transformers.PretrainedConfig())
        self.net = Net(2)


def saved_own(directory):
    config = {**ds_config({"enabled": True}, 1), "expert_parallel": {"enabled": False}}
    engine = ds_mxfp8_moe.initialize(model=OwnModel(), config=config)[0]
    with pytest.raises(RuntimeError, match="this OwnModel holds one rank's part .* cannot save itself"):
        engine.module.save_pretrained(directory)
    with pytest.raises(TypeError, match="a OwnModel, which has classic MoE layers. .*by engine.save_16bit_model"):
        save_pretrained(engine, directory)


def test_classic_layers_inside_a_transformers_model(ranks2, tmp_path):
    ranks2.run(saved_own, tmp_path)
    assert not list(tmp_path.iterdir())


def without_the_flag():
    engine = build("qwen3_moe", {"enabled": False}, 1, 2)
    replaced = ("save_16bit_model", "_zero3_consolidated_16bit_state_dict", MARK)
    return [name for part in (engine, engine.module) for name in replaced if name in vars(part)]


def test_with_the_flag_off_saving_is_deepspeeds(ranks2):
    assert ranks2.run(without_the_flag) == [[], []]


class Critic(torch.nn.Module):
    """A module of a user's own around a Hugging Face model, without a config where there are no adapters."""

    def __init__(self, lora):
        super().__init__()
        net = model("qwen2_moe")
        self.backbone = peft.get_peft_model(net, peft.LoraConfig(init_lora_weights=False, target_modules=[
            "q_proj", "up_proj"])) if lora else net
        self.value_head = torch.nn.Linear(64, 1)
        if lora:
            self.config = net.config

    def forward(self, input_ids):
        hidden = self.backbone(input_ids=input_ids, output_hidden_states=True).hidden_states[-1]
        return self.value_head(hidden).square().mean()


def saved_critic(directory, stage, lora):
    """The value of a text, the names that are written beside the Hugging Face model, and what is printed."""
    net = Critic(lora)
    place = {"moe_layer_pattern": r"backbone\.base_model\.model\.model\.layers\.\d+\.mlp"} if lora else None
    config = ds_config({"enabled": True, "recipe": "bf16"}, stage, 2, place)
    engine = ds_mxfp8_moe.initialize(model=net, config=config)[0]
    engine.backward(engine(batch(0)))
    engine.step()
    with contextlib.redirect_stdout(io.StringIO()) as told:
        save_pretrained(engine, directory / "model")
    with pytest.raises(RuntimeError, match=r"Every rank calls ds_mxfp8_moe.save_pretrained\(engine"):
        net.backbone.save_pretrained(directory / "own") if stage == 3 or not lora else (
            net.backbone.get_base_model().save_pretrained(directory / "own"))
    assert engine.save_16bit_model(directory)
    exported = {name: tensor.clone() for name, tensor in ds_mxfp8_moe.export_weights(engine, weights="model")}
    engine.eval()
    with torch.no_grad():
        return engine(batch(99, rank=0)).item(), exported, told.getvalue()


@pytest.mark.parametrize("stage, lora", [(3, False), (1, True)])
def test_a_module_around_a_model(ranks2, tmp_path, stage, lora):
    (value, exported, told), _ = ranks2.run(saved_critic, tmp_path, stage, lora)
    kind = "PeftModel" if lora else "Qwen2MoeForCausalLM"
    assert f"writes the {kind} that the Critic holds as 'backbone', and leaves out 2 tensors beside it" in told
    state = torch.load(tmp_path / "pytorch_model.bin")
    net = Critic(lora)
    assert not any(net.load_state_dict(state)) and net(batch(99, rank=0)).item() == pytest.approx(value, abs=1e-5)
    if lora:
        net.backbone = peft.PeftModel.from_pretrained(model("qwen2_moe"), tmp_path / "model")
    else:
        net.backbone = loaded(tmp_path / "model")
    assert net(batch(99, rank=0)).item() == pytest.approx(value, abs=1e-5)
    if lora:
        net.backbone = net.backbone.merge_and_unload()
    net.backbone.save_pretrained(tmp_path / "merged")
    assert set(exported) == {*load_file(tmp_path / "merged" / "model.safetensors"), "value_head.weight",
                             "value_head.bias"}


def gathered_again(directory):
    """How many parameters ZeRO-3 keeps whole, and of how many of them that is true after each collective call."""
    net = model()
    zero = {"stage3_param_persistence_threshold": 500}
    engine = ds_mxfp8_moe.initialize(model=net, config=ds_config({"enabled": True}, 3, 2, zero_optimization=zero))[0]
    train_engine(engine, range(1))
    kept = [p for p in net.parameters() if p.ds_persist]
    calls = [lambda: save_pretrained(engine, directory / "model"), lambda: engine.save_16bit_model(directory),
             engine._zero3_consolidated_16bit_state_dict,
             lambda: list(ds_mxfp8_moe.export_weights(engine, weights="model")),
             lambda: next(ds_mxfp8_moe.export_weights(engine, weights="model", rank_0_only=True), None)]
    counts = []
    for call in calls:
        call()
        gc.collect()  # an iterator that was not iterated to its end
        counts.append(sum(p.shape == p.ds_shape for p in kept))
    assert "model.layers.0.mlp.experts.w1" in engine.module_state_dict()  # checkpoints keep the engine's names
    with pytest.MonkeyPatch.context() as patch:  # the file stays whole
        patch.setattr(engine.checkpoint_engine, "save", disk_is_full)
        with pytest.raises(RuntimeError, match="be saved to .*: rank 0 raised OSError: .* No space left on device"):
            engine.save_16bit_model(directory)
    return len(kept), counts


def test_parameters_that_zero3_keeps_whole_are_whole_after_each_call(ranks2, tmp_path):
    for kept, counts in ranks2.run(gathered_again, tmp_path):
        assert kept > 4 and counts == [kept] * 5


def adapters(directory, stage):
    """What does not save adapters says what does. Their files: test_lora.py."""
    net = peft.get_peft_model(model("qwen3_moe"), LORA)
    section = {"enabled": True, "frozen_experts": "keep"}  # those in MXFP8: test_frozen_experts.py
    engine = ds_mxfp8_moe.initialize(model=net, config=ds_config(section, stage, 2, PATTERN))[0]
    state = engine._zero3_consolidated_16bit_state_dict()  # what accelerator.get_state_dict returns
    with pytest.raises(RuntimeError, match="cannot save itself"):
        net.get_base_model().save_pretrained(directory / "base")
    with pytest.raises(RuntimeError, match="save_16bit_model does not write adapters.*ds_mxfp8_moe.save_pretrained"):
        engine.save_16bit_model(directory / "16bit")
    with pytest.raises(RuntimeError, match="save_model does not write adapters.*ds_mxfp8_moe.save_pretrained"):
        accelerate.Accelerator.save_model(None, engine, directory / "model")
    if stage == 3:
        with pytest.raises(RuntimeError, match="partitioned the adapters.*ds_mxfp8_moe.save_pretrained"):
            net.save_pretrained(directory / "own")
        with pytest.raises(RuntimeError, match="frozen expert .*exclude_frozen_parameters.*ds_mxfp8_moe.save_pretr"):
            engine.save_checkpoint(str(directory))
    names = {name.removeprefix("base_model.model.").replace(".base_layer", "") for name in state or ()}
    return dist.get_rank() > 0 or set(model("qwen3_moe").state_dict()) <= names


@pytest.mark.parametrize("stage", [0, 3])
def test_calls_that_write_no_adapters_name_the_one_that_does(ranks2, tmp_path, stage):
    assert ranks2.run(adapters, tmp_path, stage) == [True, True]


# ---------------------------------------------------------------- save_pretrained, beside test_model_types.py


def untrained(directory, stage):
    """Saved before the first step, beside what transformers itself saves of the same model."""
    if dist.get_rank() == 0:
        theirs = model("deepseek_v3", dtype=torch.bfloat16)
        theirs.load_state_dict(model("deepseek_v3").state_dict())  # in bf16, other numbers are drawn
        theirs.save_pretrained(directory / "theirs")
    dist.barrier()
    save_pretrained(build("deepseek_v3", {"enabled": True}, stage, 2, "bf16"), directory / "ours",
                    max_shard_size="100KB")


@pytest.mark.parametrize("stage", [1, 3])
def test_the_files_hold_what_transformers_writes(ranks2, tmp_path, stage):
    ranks2.run(untrained, tmp_path, stage)
    theirs, ours = ({key: tensor for path in sorted((tmp_path / name).glob("*.safetensors"))
                     for key, tensor in load_file(path).items()} for name in ("theirs", "ours"))
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 1
    assert theirs.keys() == ours.keys()
    correction = [key for key in theirs if key.endswith("e_score_correction_bias")]
    assert len(correction) == 1
    for key, tensor in theirs.items():
        if key not in correction:
            # From 5.24 on, transformers keeps this router in float32. DeepSpeed's engine trains all weights in bf16.
            assert key.endswith("mlp.gate.weight") or tensor.dtype == torch.bfloat16, key
            assert ours[key].dtype == torch.bfloat16 and torch.equal(tensor.bfloat16(), ours[key]), key
    for name in ("config.json", "generation_config.json"):
        assert (tmp_path / "ours" / name).read_text() == (tmp_path / "theirs" / name).read_text()


def whole_at_once(directory):
    """How many whole tensors this rank holds at most."""
    engine, held, most = build("qwen3_moe", {"enabled": True}, 3, 2), weakref.WeakSet(), 0
    plain = gathering.Gather.unpartitioned

    def whole(gather, value):
        nonlocal most
        tensor = plain(gather, value)
        held.add(tensor)
        most = max(most, len(held))
        return tensor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gathering.Gather, "unpartitioned", whole)
        save_pretrained(engine, directory)
    return most


def test_under_zero3_only_rank_0_holds_the_model(ranks2, tmp_path):
    _, other = ranks2.run(whole_at_once, tmp_path)
    assert other <= 2  # with the one before, until it is replaced


def classifier(directory):
    config = FAMILIES["qwen2_moe"]()
    config.num_labels = 3
    torch.manual_seed(0)
    net = Qwen2MoeForSequenceClassification(config).train()
    engine = ds_mxfp8_moe.initialize(model=net, config=ds_config({"enabled": True}, 2))[0]
    ids = batch(0)
    engine.backward(engine(input_ids=ids, labels=torch.tensor([1, 2])).loss)
    engine.step()
    save_pretrained(engine, directory)
    ds_mxfp8_moe.convert(engine, {"enabled": False})
    engine.eval()
    with torch.no_grad():
        return engine(input_ids=batch(HELD_OUT, rank=0)).logits


def test_a_classifier_which_generates_nothing(ranks2, tmp_path):
    logits, _ = ranks2.run(classifier, tmp_path)
    net, info = Qwen2MoeForSequenceClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    with torch.no_grad():
        assert torch.allclose(net.eval()(input_ids=batch(HELD_OUT, rank=0)).logits, logits, atol=1e-5)


def with_adapters(directory):
    net = peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["q_proj"]), model("qwen3_moe"))
    engine = ds_mxfp8_moe.initialize(model=net, config=ds_config({"enabled": True}))[0]
    with pytest.raises(RuntimeError, match=r"q_proj.*None.*None: missing\)\. engine.save_16bit_model writes"):
        save_pretrained(engine, directory)
    engine.save_16bit_model(directory)


def test_adapters_are_named_where_they_hinder(ranks2, tmp_path):
    ranks2.run(with_adapters, tmp_path)


def no_room(directory):
    sizes = {"hidden_size": 128, "moe_intermediate_size": 128, "intermediate_size": 128}
    engine = build("qwen3_moe", {"enabled": True}, 1, 2, **sizes)
    for weights in ("model", "fp8"):
        with pytest.raises(RuntimeError, match="could not be saved to .*: "):
            save_pretrained(engine, directory / "file" / "below", weights)
        with pytest.raises(RuntimeError, match="NotADirectoryError"):  # transformers would log a line and go on
            save_pretrained(engine, directory / "file", weights)
    with pytest.raises(ValueError, match="max_shard_size is 'large'"):
        save_pretrained(engine, directory, "fp8", max_shard_size="large")
    with pytest.raises(TypeError, match="expected the Trainer or the DeepSpeed engine.*this is a Qwen3MoeForCausalLM"):
        save_pretrained(engine.module, directory)
    plain = deepspeed.initialize(model=torch.nn.Linear(4, 4), config={"train_micro_batch_size_per_gpu": 1})[0]
    with pytest.raises(TypeError, match="expected a transformers model.*a Linear, which holds 0 of them"):
        save_pretrained(plain, directory)
    return True


def test_every_rank_hears_of_a_failure(ranks2, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    assert ranks2.run(no_room, tmp_path) == [True, True] and [path.name for path in tmp_path.iterdir()] == ["file"]
