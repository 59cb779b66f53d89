# SPDX-License-Identifier: Apache-2.0
"""AutoEP starts where transformers' registry of what models record takes models in place of names, as 5.23 does."""

import sys
from contextlib import nullcontext

import deepspeed
import pytest
import torch
from autoep_models import batch, ds_config, model
from deepspeed.module_inject.auto_ep_presets import base
from test_engine import enabled
from transformers import modeling_utils
from transformers.utils import output_capturing

import ds_mxfp8_moe
from ds_mxfp8_moe.layers.recorders import named_recorders

BF16 = {"enabled": True, "recipe": "bf16"}  # in float32 models, this is float32
NAME = "<class 'torch.nn.modules.module.Module'>"
OTHER = {"hidden_states": "other"}


class Registry(dict):
    """As transformers 5.23 has it. An older transformers, which gives it names, gets what its own dict gives."""

    def __setitem__(self, model, outputs):
        super().__setitem__(self._name(model), outputs)

    def get(self, model):
        return super().get(self._name(model)) or {}

    @staticmethod
    def _name(model):
        by_transformers = sys._getframe(2).f_globals["__name__"].startswith("transformers.")
        return model if by_transformers and isinstance(model, str) else str(model.__class__)


def install(patch, registry):
    for module in (output_capturing, modeling_utils):
        patch.setattr(module, "_CAN_RECORD_REGISTRY", registry)
    return registry


@pytest.fixture
def registry(monkeypatch):
    return install(monkeypatch, Registry({NAME: OTHER}))


def takes_names(registry):
    return type(registry) is not Registry


def test_names_and_models_inside_and_as_before_outside(registry):
    with named_recorders():
        assert registry.get(NAME, 1) is registry.get(NAME) is registry.get(torch.nn.Module()) is OTHER
        assert registry.get("nobody", 1) == 1 and registry.get(torch.nn.Linear(1, 1)) == {}
        registry["somebody"] = registry[torch.nn.Linear(1, 1)] = {}
    assert list(registry) == [NAME, "somebody", str(torch.nn.Linear)] and not takes_names(registry)
    with pytest.raises(TypeError):
        registry.get(NAME, 1)


def test_after_an_error_it_is_undone_too(registry):
    with pytest.raises(KeyError), named_recorders():
        raise KeyError
    assert not takes_names(registry)


def test_a_plain_dict_stays_one(monkeypatch):
    registry = install(monkeypatch, {})
    with named_recorders():
        assert type(registry) is dict


def test_without_transformers_there_is_nothing_to_do(monkeypatch, registry):
    monkeypatch.delitem(sys.modules, "transformers.utils.output_capturing")
    with named_recorders():
        assert not takes_names(registry) and "transformers.utils.output_capturing" not in sys.modules


def by_models(model, entries, transformers, remove_hooks):
    registry = transformers._CAN_RECORD_REGISTRY
    before = registry.get(model)
    registry.update(entries)
    registry[model] = before


def without_restoring(model, entries, transformers, remove_hooks):
    transformers._CAN_RECORD_REGISTRY.update(entries)


@pytest.mark.parametrize("install_recorders, needed", [(by_models, False), (without_restoring, True)])
def test_it_is_not_applied_once_deepspeed_does_it_itself(monkeypatch, registry, install_recorders, needed):
    monkeypatch.setattr(base, "_install_instance_transformers_output_recorders", install_recorders)
    with named_recorders():
        assert takes_names(registry) == needed


def test_names_can_be_read_whatever_the_release_of_transformers():
    with named_recorders():
        assert output_capturing._CAN_RECORD_REGISTRY.get("nobody", 1) == 1


def recorded(net) -> list[torch.Tensor]:
    with torch.no_grad():
        out = net.eval()(input_ids=batch(0, rank=0), output_router_logits=True, output_hidden_states=True)
    assert len(out.router_logits) == 2 and len(out.hidden_states) == 3
    return [tensor.flatten(0, -2) for tensor in (*out.router_logits, *out.hidden_states)]


def recorded_by_all(family, by_enable):
    """What models record with a registry like that of 5.23: a converted one, and others made before and after it."""
    with pytest.MonkeyPatch.context() as patch, enabled() if by_enable else nullcontext():
        registry = install(patch, Registry(output_capturing._CAN_RECORD_REGISTRY))
        other = model(family)
        before, entries = recorded(other), dict(registry)
        initialize = deepspeed.initialize if by_enable else ds_mxfp8_moe.initialize
        converted = initialize(model=model(family), config=ds_config(BF16, 1))[0].module
        assert not takes_names(registry) and dict(registry) == entries
        return [before] + [recorded(net) for net in (converted, other, model(family))]


@pytest.mark.parametrize("family, by_enable", [("mixtral", False), ("minimax_m3", False), ("gpt_oss", False),
                                               ("qwen3_moe", True)])
def test_a_converted_model_records_and_others_of_its_class_do_as_before(ranks2, family, by_enable):
    for before, *others in ranks2.run(recorded_by_all, family, by_enable):
        for found in others:
            for ours, plain in zip(found, before, strict=True):
                torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)


def seen_by_autoep(section):
    """Whether the registry took names each time that AutoEP changed it."""
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        registry = install(patch, Registry(output_capturing._CAN_RECORD_REGISTRY))
        patch.setattr(base, "_install_instance_transformers_output_recorders",
                      lambda model, entries, transformers, remove_hooks: seen.append(takes_names(registry)))
        ds_mxfp8_moe.initialize(model=model(), config=ds_config(section))
    return seen


@pytest.mark.parametrize("section", [None, {"enabled": False}])
def test_without_an_enabled_section_deepspeed_is_as_it_is(ranks2, section):
    for seen in ranks2.run(seen_by_autoep, section):
        assert seen and not any(seen)
