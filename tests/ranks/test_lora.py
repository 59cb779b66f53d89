# SPDX-License-Identifier: Apache-2.0
"""LoRA by PEFT on the experts of AutoEP layers: trained like plain Hugging Face with PEFT, and loaded by these."""

import deepspeed.comm as dist
import peft
import pytest
import torch
from autoep_models import autoep_layers, batch, ds_config, gathered, model, train_engine

import ds_mxfp8_moe

BF16 = {"enabled": True, "recipe": "bf16"}
MXFP8 = {"enabled": True}
PLAIN = {"enabled": True, "exclude": [".*"]}  # DeepSpeed's own path
LEARNING_RATE = 0.5


def adapted(family="qwen3_moe", seed=1, rank=4, targets=("gate_up_proj", "down_proj"), **changes):
    """A model with adapters that are not zero at the start."""
    net = model(family, **changes)
    torch.manual_seed(seed)
    config = peft.LoraConfig(r=rank, lora_alpha=8, target_modules=["q_proj"], init_lora_weights=False,
                             target_parameters=[f"experts.{name}" for name in targets])
    return peft.get_peft_model(net, config)


def build(net, section, stage=0, ep_size=2, **changes):
    optimizer = {"type": "SGD", "params": {"lr": LEARNING_RATE, "momentum": 0.9}}
    return ds_mxfp8_moe.initialize(model=net, config=ds_config(section, stage, ep_size, optimizer=optimizer,
                                                               **changes))[0]


def plain_losses(net, steps, ranks):
    """Of plain Hugging Face and PEFT on the batches of all ranks: [steps, ranks]."""
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=LEARNING_RATE, momentum=0.9)
    losses = []
    for step in steps:
        of_ranks = [net(input_ids=ids, labels=ids).loss for ids in (batch(step, rank) for rank in range(ranks))]
        (sum(of_ranks) / ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append([loss.item() for loss in of_ranks])
    return losses


def adapter_tensors(net):
    return {name: gathered(p) for name, p in net.named_parameters() if "lora_" in name}


def beside_peft(section, stage, ep_size, steps=3, bf16=False, **changes):
    dtype = torch.bfloat16 if bf16 else torch.float32
    extra = {"bf16": {"enabled": True}} if bf16 else {}
    losses = plain_losses(adapted(dtype=dtype, **changes), range(steps), dist.get_world_size())
    net = adapted(dtype=dtype, **changes)
    engine = build(net, section, stage, ep_size, **extra)
    experts = [p for layer in autoep_layers(net) for p in layer.experts.parameters()]
    before = [gathered(p) for p in experts]
    ours = train_engine(engine, range(steps))
    assert all(torch.equal(a, gathered(b)) for a, b in zip(before, experts, strict=True))
    return [of_ranks[dist.get_rank()] for of_ranks in losses], ours, len(experts)


@pytest.mark.parametrize("ep_size", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_trains_like_plain_peft(ranks2, stage, ep_size):
    for plain, ours, frozen in ranks2.run(beside_peft, BF16, stage, ep_size):
        assert ours == pytest.approx(plain, rel=1e-5) and frozen == 6
