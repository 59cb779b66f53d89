# SPDX-License-Identifier: Apache-2.0
"""A Torch optimizer made by the user trains all of the model, experts too. test_trainer.py has Accelerate's."""

import functools

import pytest
import torch
from autoep_models import batch, ds_config, gathered, model

import ds_mxfp8_moe


def by_initialize(stage, made):
    config = ds_config({"enabled": True}, stage)
    del config["optimizer"], config["zero_allow_untested_optimizer"]
    net = model()
    optimizer = functools.partial(torch.optim.AdamW, lr=0.01)
    engine, returned, *_ = ds_mxfp8_moe.initialize(
        model=net, config=config, optimizer=optimizer(net.parameters()) if made else optimizer,
        model_parameters=net.parameters())
    before = {name: gathered(p) for name, p in engine.module.named_parameters()}
    engine.backward(engine(input_ids=batch(0), labels=batch(0)).loss)
    engine.step()
    still = [name for name, p in engine.module.named_parameters() if torch.equal(before[name], gathered(p))]
    return still, isinstance(returned.optimizer, torch.optim.AdamW)


@pytest.mark.parametrize("stage, made", [(1, True), (2, False)])
def test_initialize_splits_an_own_optimizer(ranks2, stage, made):
    """Torch's AdamW needs no zero_allow_untested_optimizer."""
    assert ranks2.run(by_initialize, stage, made) == [([], True)] * 2
