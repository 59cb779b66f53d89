# SPDX-License-Identifier: Apache-2.0
"""gpt-oss under AutoEP: experts with biases, converted and not, in every ZeRO stage, saved and loaded."""

import pytest
import torch
from autoep_models import autoep_layers, train_engine
from preset_models import difference
from slow import slow_except
from test_autoep import call, decibels, same_bits
from test_autoep_presets import BF16, SGD, beside_hugging_face, model_of

import ds_mxfp8_moe
from ds_mxfp8_moe.layers.autoep import MXFP8ExtendedGroupedExperts
from ds_mxfp8_moe.layers.extended_experts import ExtendedGroupedExperts

MXFP8 = {"enabled": True}


def config(section, stage=0, ep_size=2, **changes):
    zero = {"stage": stage} | ({"stage3_param_persistence_threshold": 0} if stage == 3 else {})
    return {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero, **SGD, "mxfp8_moe": section,
            "expert_parallel": {"enabled": True, "autoep_size": ep_size}, **changes}


def build(*args, optimizer=None, model=None, **changes):
    return ds_mxfp8_moe.initialize(model=model or model_of("gpt_oss"), config=config(*args, **changes),
                                   **({} if optimizer is None else {"optimizer": optimizer}))[0]


# On four ranks, two share the experts, and two such pairs share the batches.
@pytest.mark.parametrize("ranks, stage", slow_except([("ranks2", 0), ("ranks2", 2), ("ranks2", 3), ("ranks4", 0)],
                                                     ("ranks2", 2), ("ranks4", 0)))
def test_trains_like_hugging_face(request, ranks, stage):
    for own, ours, layers, converted, _ in request.getfixturevalue(ranks).run(beside_hugging_face, "gpt_oss", BF16,
                                                                              stage):
        assert layers == converted == 2
        assert difference(ours, own) < 1e-5


def three_paths():
    """One layer on DeepSpeed's way, in our bf16, in MXFP8, and back; and the classes of its experts."""
    engine = build({"enabled": True, "exclude": [".*"]})
    layer = autoep_layers(engine.module)[0]
    generator = torch.Generator().manual_seed(engine.global_rank)
    x, grad = (torch.randn(2, 64, 64, generator=generator) for _ in range(2))
    layer.return_router_logits = False  # None, which `call` cannot differentiate
    results, classes = [call(layer, x, grad)[0]], [type(layer.experts)]
    for section in (BF16, MXFP8, {"enabled": False}):
        ds_mxfp8_moe.convert(engine, section)
        results.append(call(layer, x, grad)[0])
        classes.append(type(layer.experts))
    plain, ours, mxfp8, back = results
    return decibels(plain, ours), decibels(plain, mxfp8), same_bits(plain.values(), back.values()), classes


def test_converted_or_not_it_computes_the_same(ranks2):
    for bf16, mxfp8, restored, classes in ranks2.run(three_paths):
        assert {"expert_biases.gate", "expert_biases.up", "expert_biases.down"} <= set(bf16)
        assert min(bf16.values()) >= 90, bf16
        # The gradient of the router's bias is a sum over tokens, in which much cancels.
        assert all(db >= (16 if name == "router.gate.bias" else 21) for name, db in mxfp8.items()), mxfp8
        assert restored and classes == [ExtendedGroupedExperts, *[MXFP8ExtendedGroupedExperts] * 2,
                                        ExtendedGroupedExperts]


def at_another_ep_size(directory):
    """The next loss of an engine, and of another one with all experts on each rank that loads its checkpoint."""
    first, second = build(BF16), build(BF16, ep_size=1)
    train_engine(first, range(2))
    first.save_checkpoint(directory)
    second.load_checkpoint(directory, load_optimizer_states=False)
    return train_engine(first, [2]), train_engine(second, [2])


@pytest.mark.slow
def test_a_checkpoint_is_read_at_another_ep_size(ranks2, tmp_path):
    for went_on, loaded in ranks2.run(at_another_ep_size, tmp_path):
        assert loaded == pytest.approx(went_on, abs=1e-6)


def with_a_client_optimizer():
    plain = model_of("gpt_oss")
    frozen = [name for name, _ in plain.named_parameters() if "gate_up_proj_bias" in name]
    for name, parameter in plain.named_parameters():
        parameter.requires_grad_(name not in frozen)
    optimizer = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.1)
    engine = build(BF16, 0, 2, model=plain, optimizer=optimizer)
    biases = autoep_layers(engine.module)[0].expert_biases
    before = [p.detach().clone() for p in (biases.gate, biases.up, biases.down)]
    train_engine(engine, range(2))
    moved = [not torch.equal(a, b) for a, b in zip(before, (biases.gate, biases.up, biases.down), strict=True)]
    return moved, [p.requires_grad for p in (biases.gate, biases.up, biases.down)]


def test_a_client_optimizer_moves_the_biases_and_frozen_ones_stay(ranks2):
    for moved, trained in ranks2.run(with_a_client_optimizer):
        assert moved == trained == [False, False, True]


def with_autotp():
    engine = build(BF16, 1, tensor_parallel={"autotp_size": 2})
    told = "experts with biases .gpt_oss. or LoRA adapters do not work with AutoTP.*given: 2"
    with pytest.raises(ValueError, match=told):
        train_engine(engine, [0], rank=0)


def test_autotp_is_an_error(ranks4):
    ranks4.run(with_autotp)
