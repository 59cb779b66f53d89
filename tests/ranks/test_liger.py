# SPDX-License-Identifier: Apache-2.0
"""Models that Liger-Kernel has patched are converted, and train and save as without it.

Liger is no dependency, and its kernels need a GPU. `patch` does to a model what its apply_liger_kernel_to_qwen3_moe
and apply_liger_kernel_to_deepseek_v3 do (release 0.8.5, with their defaults), with transformers' own forwards in
place of its kernels.
"""

from contextlib import nullcontext
from types import FunctionType, MethodType
from unittest import mock

import pytest
import torch
from torch import nn
from transformers.models.qwen3_moe import modeling_qwen3_moe

import ds_mxfp8_moe
from ds_mxfp8_moe.layers.experts import converted_layers
from tests.support.adapted_models import with_adapters
from tests.support.autoep_models import batch, ds_config, model
from tests.support.autoep_models import train_engine as train
from tests.support.pretrained_models import loaded
from tests.support.slow import slow_except

EXPERTS, MODEL, NORM, SHARED = "experts", "model", "norm", "shared experts"


class Experts(nn.Module):
    """In the place of its LigerExperts, which has transformers' parameters, and no activation to look at."""

    def __init__(self, config):
        super().__init__()
        sizes = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.num_experts, self.hidden_dim, self.intermediate_dim = sizes
        self.gate_up_proj = nn.Parameter(torch.empty(sizes[0], 2 * sizes[2], sizes[1]))
        self.down_proj = nn.Parameter(torch.empty(sizes))

    def forward(self, hidden_states, top_k_index, top_k_weights):
        raise AssertionError("Liger's experts ran")


# Nobody but Liger may change experts.
Experts.__module__ = "liger_kernel.transformers.experts"
Experts.forward = FunctionType(Experts.forward.__code__, {"__name__": Experts.__module__})


def bind(module: nn.Module, calls: set, name: str) -> None:
    """Its _bind_method_to_module. The forward notes that it ran."""

    def forward(self, *args, **kwargs):
        calls.add(name)
        return type(self).forward(self, *args, **kwargs)

    module.__dict__["forward"] = MethodType(forward, module)


def patch(net: nn.Module) -> set:
    """Returns what ran of its forwards, which the experts' must not."""
    causal, calls = net.get_base_model() if hasattr(net, "get_base_model") else net, set()
    bind(causal, calls, MODEL)
    for module in causal.modules():
        if type(module).__name__.endswith("RMSNorm"):
            bind(module, calls, NORM)
        if isinstance(getattr(module, "experts", None), nn.Module):
            module.experts.__dict__["forward"] = MethodType(Experts.forward, module.experts)
        if isinstance(getattr(module, "shared_experts", None), nn.Module):
            bind(module.shared_experts, calls, SHARED)
    return calls


def trained(family: str, patched: str | None, directory=None):
    """Losses, what ran of Liger's forwards, and how many layers were converted.

    Args:
        patched: "instance", as the Trainer does it; "class", before the model is made; "adapters": an instance with
            PEFT's adapters on its experts, so that a wrapper of PEFT gets the experts' forward. It is checkpointed and
            its first block is compiled. "not adapters": an instance with adapters and nothing else. None: not at all.
        directory: to save the model in.
    """
    source, calls = model(family), set()
    changed = mock.patch.object(modeling_qwen3_moe, "Qwen3MoeExperts", Experts)
    with changed if patched == "class" else nullcontext():
        net = model(family)
    assert (type(net.model.layers[-1].mlp.experts) is Experts) == (patched == "class")
    net.load_state_dict(source.state_dict())
    if patched in ("adapters", "not adapters"):
        net = with_adapters(net)
    if patched in ("instance", "adapters"):
        calls = patch(net)
    if patched == "adapters":
        net.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    engine = ds_mxfp8_moe.initialize(model=net, config=ds_config({"enabled": True}, 1))[0]
    if patched == "adapters":
        net.get_base_model().model.layers[0].compile(backend="eager")
    losses = train(engine, range(2))
    engine.eval()
    with torch.no_grad():
        losses.append(engine(input_ids=batch(9), labels=batch(9)).loss.item())
    engine.train()
    losses += train(engine, [2])
    if directory:
        ds_mxfp8_moe.save_pretrained(engine, directory)
    return losses, calls, len(converted_layers(engine.module))


@pytest.mark.parametrize("family, patched", slow_except(
    [("qwen3_moe", "instance"), ("qwen3_moe", "class"), ("deepseek_v3", "instance")], ("qwen3_moe", "instance"))
    + [pytest.param("qwen3_moe", "adapters", marks=pytest.mark.slow)])
def test_trains_and_saves_as_without_liger(ranks2, tmp_path, family, patched):
    plain = "not adapters" if patched == "adapters" else None
    directory = None if plain else tmp_path / "saved"
    expected = {"class": set(), "instance": {MODEL, NORM, SHARED} if family == "deepseek_v3" else {MODEL, NORM},
                "adapters": {MODEL, NORM}}[patched]
    for (losses, calls, count), (without, _, as_many) in zip(
            ranks2.run(trained, family, patched, directory), ranks2.run(trained, family, plain), strict=True):
        assert losses == without and calls == expected and count == as_many > 0
    if directory:
        assert loaded(directory)(input_ids=batch(0, rank=0)).logits.isfinite().all()
