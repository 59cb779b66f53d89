# SPDX-License-Identifier: Apache-2.0
"""Models of transformers with PEFT's adapters, plain and in an engine."""

from collections.abc import Callable, Iterable

import deepspeed.comm as dist
import peft
import torch

import ds_mxfp8_moe
from tests.support.autoep_models import batch, ds_config, model
from tests.support.pretrained_models import held_out_loss

LEARNING_RATE = 0.5
STACKS = ("gate_up_proj", "down_proj")


def adapted(family="qwen3_moe", seed=1, rank=4, targets=STACKS, prefix="experts.", **changes):
    """A model with adapters that are not zero at the start."""
    return with_adapters(model(family, **changes), seed, rank, targets, prefix)


def with_adapters(net, seed=1, rank=4, targets=STACKS, prefix="experts."):
    torch.manual_seed(seed)
    config = peft.LoraConfig(r=rank, lora_alpha=8, target_modules=["q_proj"], init_lora_weights=False,
                             target_parameters=[f"{prefix}{name}" for name in targets])
    return peft.get_peft_model(net, config)


def build(net, section, stage=0, ep_size=2, rate=LEARNING_RATE, **changes):
    optimizer = {"type": "SGD", "params": {"lr": rate, "momentum": 0.9}}
    return ds_mxfp8_moe.initialize(model=net, config=ds_config(section, stage, ep_size, optimizer=optimizer,
                                                               **changes))[0]


def plain_losses(net: torch.nn.Module, steps: Iterable[int], rate: float) -> list[float]:
    """This rank's losses of plain transformers and PEFT, trained on the batches of all ranks."""
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=rate, momentum=0.9)
    losses = []
    for step in steps:
        ids = [batch(step, rank) for rank in range(dist.get_world_size())]
        of_ranks = [net(input_ids=one, labels=one).loss for one in ids]
        (sum(of_ranks) / len(of_ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(of_ranks[dist.get_rank()].item())
    return losses


def switched(net: torch.nn.Module, make: Callable) -> list[float]:
    """Held-out losses of an adapted model with its adapter, without, with another one, and with both. `make` returns
    what is called: the model itself, or an engine."""
    targets = net.peft_config["default"].target_parameters
    net.add_adapter("other", peft.LoraConfig(r=5, init_lora_weights=False, target_modules=["q_proj"],
                                             target_parameters=targets))
    torch.manual_seed(3)
    for name, p in net.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(p, std=0.1)
    called = make(net)
    losses = [held_out_loss(called)]
    with net.disable_adapter():
        losses.append(held_out_loss(called))
    net.set_adapter("other")
    losses.append(held_out_loss(called))
    net.base_model.set_adapter(["default", "other"])
    return [*losses, held_out_loss(called)]
