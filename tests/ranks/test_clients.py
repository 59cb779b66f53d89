# SPDX-License-Identifier: Apache-2.0
"""What libraries around DeepSpeed do with engines: generation while training, reference models, models in wrappers."""

import deepspeed.comm as dist
import pytest
import torch
from autoep_models import batch, ds_config, model, train_engine
from torch import nn

import ds_mxfp8_moe

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


class Actor(nn.Module):
    """A model in a wrapper without a config, as OpenRLHF's, with a value head beside it."""

    def __init__(self):
        super().__init__()
        self.inner = model()
        self.value = nn.Linear(1, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.inner(input_ids=ids, labels=ids).loss + 0 * self.value.weight.sum()


def train_wrapped(wrapped: bool, directory: str = "") -> list[float]:
    net = Actor() if wrapped else model()
    engine = ds_mxfp8_moe.initialize(model=net, config=ds_config(SECTION, 2))[0]
    losses = []
    for i in range(3):
        loss = engine(batch(i)) if wrapped else engine(input_ids=batch(i), labels=batch(i)).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    if directory:
        ds_mxfp8_moe.save_pretrained(engine, directory)
    engine.destroy()
    return losses


def test_a_model_in_a_wrapper_trains_and_saves_and_another_engine_follows(ranks2, tmp_path):
    plain = ranks2.run(train_wrapped, False)
    assert ranks2.run(train_wrapped, True, str(tmp_path)) == plain
    import transformers

    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert {*saved.state_dict()} == {*model().state_dict()}


def engines_one_after_the_other() -> list[list[float]]:
    return [train_wrapped(False) for _ in range(2)]


def test_an_engine_after_a_destroyed_one_trains_alike(ranks2):
    for first, second in ranks2.run(engines_one_after_the_other):
        assert first == second
