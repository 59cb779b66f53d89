# SPDX-License-Identifier: Apache-2.0
"""Ways to make an engine, and what it must have afterwards."""

from contextlib import contextmanager, nullcontext

import deepspeed
import torch
from deepspeed.moe.layer import MoE
from deepspeed.runtime.engine import DeepSpeedEngine

import ds_mxfp8_moe
from tests.support.autoep_models import ds_config, model

MXFP8 = {"enabled": True}


@contextmanager
def enabled(times: int = 1):
    """`enable()` for one case."""
    plain = DeepSpeedEngine.__init__
    for _ in range(times):
        ds_mxfp8_moe.enable()
    try:
        yield
    finally:
        ds_mxfp8_moe.disable()
        assert DeepSpeedEngine.__init__ is plain


@contextmanager
def initializer(by_enable: bool):
    """`initialize`, or DeepSpeed's own function after `enable`."""
    with enabled() if by_enable else nullcontext():
        yield (deepspeed if by_enable else ds_mxfp8_moe).initialize


def our_hooks(engine) -> int:
    return sum(hook.__module__.startswith("ds_mxfp8_moe") for hook in engine.module._forward_pre_hooks.values())


def made_by(front, section, **changes) -> DeepSpeedEngine:
    config = ds_config(section, **changes)
    if front == "convert":  # what began otherwise
        engine = ds_mxfp8_moe.initialize(model=model(), config=ds_config(OTHER, **changes))[0]
        ds_mxfp8_moe.convert(engine, section)
        return engine
    with initializer(front == "enable") as initialize:
        return initialize(model=model(), config=config)[0]


OTHER = {"enabled": True, "recipe": "bf16"}


class Block(torch.nn.Module):

    def __init__(self, experts=2):
        super().__init__()
        expert = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32))
        self.moe = MoE(32, expert, num_experts=experts, ep_size=1, k=1, min_capacity=0)

    def forward(self, x):
        return x + self.moe(x)[0]
