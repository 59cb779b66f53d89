# SPDX-License-Identifier: Apache-2.0
"""Parameter groups of the user's beside an optimizer in the config train as with an optimizer of the user's."""

import pytest
import torch

import ds_mxfp8_moe
from tests.support.autoep_models import ds_config, model, train_engine
from tests.support.slow import WIDE

SECTION = {"enabled": True, "recipe": "bf16"}
WARMUP = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.2, "warmup_num_steps": 4}}}
SGD = {"type": "SGD", "params": {"lr": 0.2, "weight_decay": 0.1}}


def groups_of(net: torch.nn.Module) -> list[dict]:
    """Experts of one layer and norms, and the rest, with other rates and decays."""
    one = [p for name, p in net.named_parameters() if "norm" in name or "layers.0.mlp.experts" in name]
    known = set(map(id, one))
    return [{"params": one, "lr": 0.02, "weight_decay": 0.0},
            {"params": [p for p in net.parameters() if id(p) not in known], "lr": 0.1}]


def trained(stage: int, by_config: bool, changes: dict) -> list[float]:
    net = model()
    config = ds_config(SECTION, stage, **{**changes, "optimizer": SGD} if by_config else changes)
    if by_config:
        given = {"model_parameters": groups_of(net)}
    else:
        config.pop("optimizer")
        given = {"optimizer": torch.optim.SGD(groups_of(net), **SGD["params"])}
    return train_engine(ds_mxfp8_moe.initialize(model=net, config=config, **given)[0], range(4))


@pytest.mark.parametrize("stage, changes", [pytest.param(0, {}, marks=WIDE), (2, WARMUP), (3, {})], ids=str)
def test_groups_beside_an_optimizer_in_the_config_keep_their_settings(ranks2, stage, changes):
    assert ranks2.run(trained, stage, True, changes) == ranks2.run(trained, stage, False, changes)
