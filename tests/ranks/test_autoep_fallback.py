# SPDX-License-Identifier: Apache-2.0
"""AutoEP layers that are left to DeepSpeed, with the reason, and those that the config gives to DeepEP."""

from unittest import mock

import pytest
import torch
from autoep_models import autoep_layers, engine, train_engine
from deepspeed.module_inject import auto_ep_layer
from test_autoep import MXFP8, train

from ds_mxfp8_moe import convert
from ds_mxfp8_moe.layers.autoep import MXFP8GroupedExperts


class OtherExperts(auto_ep_layer.GroupedExperts):
    pass


# What is done to a layer -> the reason for which it is left to DeepSpeed.
TAMPERED = {
    "its GroupedExperts is a OtherExperts": lambda layer: setattr(layer.experts, "__class__", OtherExperts),
    "GroupedExperts has a forward hook, which this path would ignore":
    lambda layer: layer.experts.register_forward_hook(lambda module, args, output: None),
    "forward method is replaced": lambda layer: setattr(layer, "forward", layer.forward),
    "its comm_backend is 'other'": lambda layer: setattr(layer, "comm_backend", "other"),
    "parameter w1 of its experts is shared": lambda layer: layer.register_parameter("again", layer.experts.w1),
}


def refused(reason, stage):
    built = engine(None, stage)
    layer = autoep_layers(built.module)[0]
    TAMPERED[reason](layer)
    report = convert(built, MXFP8)
    return type(layer.experts) is not MXFP8GroupedExperts, report.layers[0].detail, report.layers[1].converted


@pytest.mark.parametrize("reason, stage", [*((reason, 0) for reason in TAMPERED), (list(TAMPERED)[1], 3)])
def test_what_it_cannot_prove_it_leaves_alone(ranks2, reason, stage):
    for untouched, detail, other in ranks2.run(refused, reason, stage):
        assert untouched and other
        assert reason in detail and "runs DeepSpeed's own path" in detail


DEEPEP = {"comm_backend": "deepep", "comm_max_tokens_per_rank": 64}


def in_place_of_deepep() -> tuple:
    """Trains with layers that the config gives to DeepEP, and with others. DeepEP itself is not called."""
    with mock.patch.object(auto_ep_layer.AutoEPMoELayer, "_deepep_route", side_effect=AssertionError):
        deepep, comm = (train(MXFP8, 1, expert_parallel=keys) for keys in (DEEPEP, {}))
    details = [layer.detail for layer in convert(engine(None, expert_parallel=DEEPEP), MXFP8).layers]
    return deepep[0], comm[0], all(torch.equal(deepep[2][name], comm[2][name]) for name in comm[2]), deepep[4], details


def test_layers_of_deepep_train_with_our_exchange_and_the_report_says_so(ranks2):
    for deepep, comm, same, converted, details in ranks2.run(in_place_of_deepep):
        assert deepep == comm and same and converted == len(details) == 2
        assert all(detail.endswith(", in place of DeepEP") for detail in details)


def fallback_trains(*args, **kwargs):
    built = engine(MXFP8, *args, **kwargs)
    report = convert(built, MXFP8)
    return [layer.detail for layer in report.layers], train_engine(built, [0, 0, 0], rank=0)


@pytest.mark.parametrize("reason, kwargs", [
    ("applies the router's scores 'pre' the experts", dict(expert_parallel={"score_apply": "pre"})),
    ("FFN size 48 are not both multiples of 32", dict(model_changes={"moe_intermediate_size": 48})),
])
def test_fallback_layers_train_as_deepspeed_does(ranks2, reason, kwargs):
    for details, losses in ranks2.run(fallback_trains, 0, 2, **kwargs):
        assert details and all(reason in detail for detail in details)
        assert losses[-1] < losses[0]


def test_folding_with_autotp_falls_back(ranks4):
    for details, losses in ranks4.run(fallback_trains, 1, 2, family="mixtral",
                                      tensor_parallel={"autotp_size": 2, "preset_model": "mixtral"},
                                      expert_parallel={"preset_model": "mixtral"}):
        assert details and all("it is folded with AutoTP" in detail for detail in details)
        assert losses[-1] < losses[0]
