# SPDX-License-Identifier: Apache-2.0
"""Engines with spread experts, and their checkpoints."""

from unittest import mock

import deepspeed
import deepspeed.comm as dist
import torch
from deepspeed.checkpoint import ds_to_universal
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

import ds_mxfp8_moe
from ds_mxfp8_moe.layers.experts import expert_blocks
from tests.support.autoep_models import autoep_layers, ds_config, gathered, model, train_engine

PLAIN = {"enabled": False}  # DeepSpeed's own AutoEP
MXFP8 = {"enabled": True}


def build(section, stage, ep_size, family="deepseek_v3", seed=0, **changes):
    """An engine in bfloat16 with float32 masters and Adam; plain DeepSpeed's own where the section is PLAIN."""
    config = ds_config(section, stage, ep_size, bf16={"enabled": True}, zero_allow_untested_optimizer=False,
                       optimizer={"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}, **changes)
    initialize = deepspeed.initialize if section == PLAIN else ds_mxfp8_moe.initialize
    return initialize(model=model(family, seed=seed), config=config)[0]


def state(engine) -> dict[str, torch.Tensor]:
    """Weights, masters and moments by name; the experts of all ranks in one tensor."""
    layer = autoep_layers(engine.module)[0]
    if engine.zero_optimization_stage() in (1, 2):
        # DeepSpeed links parameters with moments after the step of the first group, before the experts' have any.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    found = {}
    for name, p in engine.module.named_parameters():
        values = {"weight": gathered(p), "master": safe_get_full_fp32_param(p)}
        for moment in ("exp_avg", "exp_avg_sq"):
            values[moment] = safe_get_full_optimizer_state(p, moment)
        for kind, value in values.items():
            if ".experts.w" in name and layer.ep_size > 1:
                parts = [torch.empty_like(value) for _ in range(layer.ep_size)]
                dist.all_gather(parts, value.contiguous(), group=layer.ep_group)
                value = torch.cat(parts)
            found[f"{kind} of {name}"] = value.clone()
    return found


def state_of(engine):
    """In ZeRO-0, DeepSpeed tells no masters and moments: the losses have to do."""
    return state(engine) if engine.zero_optimization_stage() else {
        name: p.detach().clone() for name, p in engine.module.named_parameters()}


def written(directory, section, stage, ep_size, family):
    """The state that is saved, and the losses of the steps after the save. Every rank trains with the same batches, so
    that the number of ranks changes no loss."""
    engine = build(section, stage, ep_size, family)
    train_engine(engine, range(2), rank=0)
    engine.save_checkpoint(str(directory), tag="two")
    return state_of(engine), train_engine(engine, range(2, 4), rank=0)


def read(directory, section, stage, ep_size, family, tag="two", **changes):
    """Whether there was a checkpoint, what another engine has of it, and its losses."""
    engine = build(section, stage, ep_size, family, seed=1, **changes)
    assert list(expert_blocks(engine.module))
    path, _ = engine.load_checkpoint(str(directory), tag=tag)
    return path is not None, state_of(engine), train_engine(engine, range(2, 4), rank=0)


def to_universal(directory):
    """DeepSpeed's own tool, as its command line runs it; in this process, which has imported all it needs."""
    with mock.patch("sys.argv", ["ds_to_universal", "--input_folder", str(directory / "two"), "--output_folder",
                                 str(directory / "two_universal"), "--num_extract_workers", "1",
                                 "--num_merge_workers", "1", "--inject_missing_state"]):
        ds_to_universal.main(ds_to_universal.parse_arguments())
