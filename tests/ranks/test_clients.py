# SPDX-License-Identifier: Apache-2.0
"""What libraries around DeepSpeed do with engines: generation while training, reference models, saves by rank 0."""

from unittest import mock

import accelerate
import deepspeed.comm as dist
import pytest
import torch

import ds_mxfp8_moe
from ds_mxfp8_moe.recognition.stacked import is_concatenated, is_stacked
from tests.support.autoep_models import batch, ds_config, model, train_engine

SECTION = {"enabled": True, "recipe": "bf16"}


def generate(stage: int, adapters: bool) -> tuple[int, list[int]]:
    """How many tokens this rank generates, and which. Rank 0 ends at its first one."""
    net = model()
    net.generation_config.pad_token_id = 0
    if adapters:
        import peft

        net = peft.get_peft_model(net, peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    engine = ds_mxfp8_moe.initialize(model=net, config=ds_config(SECTION, stage))[0]
    train_engine(engine, [0])
    engine.module.eval()
    ends = [*range(net.config.vocab_size)] if dist.get_rank() == 0 else [net.config.vocab_size + 1]
    tokens = engine.module.generate(input_ids=batch(0), max_new_tokens=6, do_sample=False, eos_token_id=ends)
    engine.module.train()
    train_engine(engine, [1])
    return tokens.shape[1] - batch(0).shape[1], tokens[0].tolist()


@pytest.mark.parametrize("adapters", [False, True])
def test_ranks_end_generation_together(ranks2, adapters):
    (first, _), (second, tokens) = ranks2.run(generate, 2, adapters)
    assert (first, second) == (1, 6) and 0 not in tokens[-6:]


def losses_of_reference(stage: int, dtype: str) -> tuple[list[float], list[float]]:
    """The losses of an engine without an optimizer, and of one that trains, over the same weights."""
    config = ds_config(SECTION, stage) | {dtype: {"enabled": True}}
    reference = {key: value for key, value in config.items() if "optimizer" not in key}
    reference["zero_optimization"] = {"stage": stage if stage == 3 else 0}
    with torch.no_grad():
        frozen = ds_mxfp8_moe.initialize(model=model().eval(), config=reference)[0]
        known = [frozen(input_ids=batch(i), labels=batch(i)).loss.item() for i in range(2)]
    engine = ds_mxfp8_moe.initialize(model=model(), config=config)[0]
    with torch.no_grad():
        return known, [engine(input_ids=batch(i), labels=batch(i)).loss.item() for i in range(2)]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_engine_without_an_optimizer_beside_the_one_that_trains(ranks2, stage):
    for known, trained in ranks2.run(losses_of_reference, stage, "bf16"):
        assert known == trained


def states_that_leave(leave: bool) -> list[float]:
    """The losses of steps between which an engine's states leave the device, as while a policy generates."""
    engine, losses = ds_mxfp8_moe.initialize(model=model(), config=ds_config(SECTION, 3))[0], []
    for i in range(3):
        losses += train_engine(engine, [i])
        if leave:
            with mock.patch("deepspeed.ops.adam.fused_adam.FusedAdam", torch.optim.SGD):  # which has no CPU build
                engine.offload_states(pin_memory=False)
            engine.reload_states()
    return losses


def test_states_leave_the_device_and_come_back(ranks2):
    assert ranks2.run(states_that_leave, True) == ranks2.run(states_that_leave, False)


def save_at_the_end(directory, stage: int) -> None:
    """As axolotl does: all ranks write checkpoints, then rank 0 saves the model once more, alone."""
    engine = ds_mxfp8_moe.initialize(model=model(), config=ds_config(SECTION, stage))[0]
    net, first = engine.module, directory / "first"
    train_engine(engine, [0])
    for _ in range(2):  # the second time, shards get other names
        state = accelerate.Accelerator.get_state_dict(None, engine)
        net.save_pretrained(first, state_dict=state, max_shard_size="20KB")
    if dist.get_rank() == 0:
        net.save_pretrained(directory / "second")
        changed = next(getattr(p, "ds_tensor", p) for p in net.parameters() if p.requires_grad)
        before = changed.detach().clone()
        changed.detach().add_(1)
        with pytest.raises(RuntimeError, match="cannot save itself.*since the last step"):
            net.save_pretrained(directory / "changed")
        changed.detach().copy_(before)
        net.save_pretrained(first, state_dict={name: 2 * value for name, value in state.items()})
        with pytest.raises(RuntimeError, match="cannot save itself"):  # the folder has other weights now
            net.save_pretrained(directory / "changed")
    dist.barrier()
    state = accelerate.Accelerator.get_state_dict(None, engine)
    net.save_pretrained(directory / "last", state_dict=state)
    train_engine(engine, [1])
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match="cannot save itself"):
            net.save_pretrained(directory / "changed")


@pytest.mark.parametrize("stage", [2, 3])
def test_rank_0_saves_alone_what_all_ranks_saved_before(ranks2, tmp_path, stage):
    ranks2.run(save_at_the_end, tmp_path, stage)
    import transformers

    second, last = (transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict()
                    for name in ("second", "last"))
    assert {*second} == {*last} and all(torch.equal(second[name], last[name]) for name in last)
    assert not (tmp_path / "changed").exists()


@pytest.mark.parametrize("family, flag", [("qwen3_moe", True), ("gpt_oss", None)])
def test_experts_of_releases_without_the_flag_is_concatenated(family, flag):
    """LLaMA-Factory 0.9.5 trains with transformers 5.6, where only a gate of the model's own says the layout."""
    experts = [module for module in model(family).modules() if is_stacked(module)]
    for module in experts:
        del module.is_concatenated
        assert is_concatenated(module) is flag and is_stacked(module) is bool(flag)
    assert experts
