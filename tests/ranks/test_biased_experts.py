# SPDX-License-Identifier: Apache-2.0
"""gpt-oss under AutoEP: experts with biases, converted and not, in every ZeRO stage, saved and loaded."""

import pytest
import torch
from autoep_models import autoep_layers, batch, train_engine
from slow import slow_except
from test_autoep import call, decibels
from test_autoep_checkpoints import check_same, read, to_universal, write
from test_autoep_presets import BF16, SGD, beside_hugging_face, model_of

import ds_mxfp8_moe
from architectures import difference, losses
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


@pytest.mark.parametrize("stage", slow_except([0, 2, 3], 2))
def test_trains_like_hugging_face(ranks2, stage):
    for own, ours, layers, converted, _ in ranks2.run(beside_hugging_face, "gpt_oss", BF16, stage):
        assert layers == converted == 2
        assert difference(ours, own) < 1e-5


def in_two_groups():
    """Two ranks share the experts, and two such pairs share the batches."""
    own = losses(model_of("gpt_oss"), None, steps=3, **SGD)[0]
    return own, losses(model_of("gpt_oss"), BF16, steps=3, **SGD)[0]


def test_two_groups_of_two_ranks_train_like_hugging_face(ranks4):
    for own, ours in ranks4.run(in_two_groups):
        assert difference(ours, own) < 1e-5


def three_paths(stage):
    """One layer on DeepSpeed's way (in its plain experts), in our bf16, and in MXFP8."""
    engine = build({"enabled": True, "exclude": [".*"]}, stage)
    layer = autoep_layers(engine.module)[0]
    plain_class = type(layer.experts) is ExtendedGroupedExperts
    generator = torch.Generator().manual_seed(engine.global_rank)
    x, grad = (torch.randn(2, 64, 64, generator=generator) for _ in range(2))
    layer.return_router_logits = False  # None, which `call` cannot differentiate
    plain, _ = call(layer, x, grad)
    ds_mxfp8_moe.convert(engine, BF16)
    ours, _ = call(layer, x, grad)
    converted_class = type(layer.experts) is MXFP8ExtendedGroupedExperts
    ds_mxfp8_moe.convert(engine, MXFP8)
    mxfp8, _ = call(layer, x, grad)
    ds_mxfp8_moe.convert(engine, {"enabled": False})
    back, _ = call(layer, x, grad)
    assert type(layer.experts) is ExtendedGroupedExperts and plain_class and converted_class
    return decibels(plain, ours), decibels(plain, mxfp8), all(torch.equal(plain[name], back[name]) for name in plain)


def test_converted_or_not_it_computes_the_same(ranks2):
    for bf16, mxfp8, restored in ranks2.run(three_paths, 0):
        assert {"expert_biases.gate", "expert_biases.up", "expert_biases.down"} <= set(bf16)
        assert min(bf16.values()) >= 90, bf16
        # The gradient of the router's bias is a sum over tokens, in which much cancels.
        assert all(db >= (16 if name == "router.gate.bias" else 21) for name, db in mxfp8.items()), mxfp8
        assert restored


def checkpointed(directory, stage, ep_sizes):
    """Losses after loading, of an engine that goes on and of another one that loads its checkpoint."""
    first = build(BF16, stage, ep_sizes[0])
    train_engine(first, range(2))
    first.save_checkpoint(directory)
    second = build(BF16, stage, ep_sizes[1])
    second.load_checkpoint(directory, load_optimizer_states=ep_sizes[0] == ep_sizes[1])
    return train_engine(first, [2, 3]), train_engine(second, [2, 3])


@pytest.mark.parametrize("stage, ep_sizes", slow_except([(1, (2, 2)), (3, (2, 2)), (0, (2, 1))],
                                                        (1, (2, 2)), (3, (2, 2))))
def test_a_checkpoint_holds_the_biases_of_all_ranks(ranks2, tmp_path, stage, ep_sizes):
    for went_on, loaded in ranks2.run(checkpointed, tmp_path, stage, ep_sizes):
        assert loaded[:1] == pytest.approx(went_on[:1], abs=1e-6)
        if ep_sizes[0] == ep_sizes[1]:
            assert loaded == pytest.approx(went_on, abs=1e-6)


@pytest.mark.parametrize("ep_size", slow_except([1, 2], 1))
def test_a_universal_checkpoint_holds_the_biases(ranks2, tmp_path, ep_size):
    changes = {"family": "gpt_oss"}
    written = ranks2.run(write, tmp_path, MXFP8, MXFP8, 2, 2, **changes)
    to_universal(tmp_path)
    read_again = ranks2.run(read, tmp_path, MXFP8, 2, ep_size, **changes, checkpoint={"load_universal": True})
    for (saved, went_on), (found, converted, loaded, next_losses) in zip(written, read_again, strict=True):
        assert found and converted == 2
        assert sum("expert_biases" in name for name in saved) == 2 * 3 * 4
        check_same(saved, loaded)
        assert next_losses[0] == pytest.approx(went_on[0], abs=1e-2 if ep_size == 1 else 1e-6)


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


def kept(stage):
    results = []
    for keep in (False, True):
        engine = build({**MXFP8, "keep_quantized_weights": keep}, stage, gradient_accumulation_steps=2)
        results.append(train_engine(engine, range(4)))
        layer = autoep_layers(engine.module)[0]
        results.append(layer.mxfp8_kept is not None)
        ids = batch(9)
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        results.append(bool(layer.mxfp8_kept._forward) if keep else None)
    return results


def test_quantised_weights_are_kept_beside_biases(ranks2):
    for plain, _, _, kept_losses, keeps, holds in ranks2.run(kept, 1):
        assert kept_losses == plain and keeps and holds


def recomputed():
    results = []
    for checkpointing in (False, True):
        engine = build(MXFP8, 3)
        if checkpointing:
            engine.module.gradient_checkpointing_enable({"use_reentrant": False})
        results.append(train_engine(engine, range(2)))
    return results


def test_activation_checkpointing_in_zero_3_changes_no_bit(ranks2):
    for plain, again in ranks2.run(recomputed):
        assert plain == again


def with_autotp():
    engine = build(BF16, 1, tensor_parallel={"autotp_size": 2})
    told = "experts with biases .gpt_oss. or LoRA adapters do not work with AutoTP.*given: 2"
    with pytest.raises(ValueError, match=told):
        train_engine(engine, [0], rank=0)


def test_autotp_is_an_error(ranks4):
    ranks4.run(with_autotp)
