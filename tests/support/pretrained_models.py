# SPDX-License-Identifier: Apache-2.0
"""Trained engines whose saved models transformers loads, and their held-out loss."""

import torch
from transformers import AutoModelForCausalLM

import ds_mxfp8_moe
from tests.support.autoep_models import batch, ds_config, model

HELD_OUT = 99


def build(family, section, stage, ep_size, dtype="fp32", **changes):
    extra = {"bf16": {"enabled": True}} if dtype == "bf16" else {}
    net = model(family, **changes)
    return ds_mxfp8_moe.initialize(model=net, config=ds_config(section, stage, ep_size, **extra))[0]


def held_out_loss(net) -> float:
    """Of the same text on every rank: for the ranks of an engine compute it together."""
    net.eval()
    ids = batch(HELD_OUT, rank=0)
    with torch.no_grad():
        return net(input_ids=ids, labels=ids).loss.item()


def held_out_logits(net) -> torch.Tensor:
    net.eval()
    with torch.no_grad():
        return net(input_ids=batch(HELD_OUT, rank=0)).logits.float()


def loaded(directory, dtype=torch.float32, model_class=None):
    net, info = (model_class or AutoModelForCausalLM).from_pretrained(directory, dtype=dtype, output_loading_info=True)
    assert not any(info.values()), info
    return net
