# SPDX-License-Identifier: Apache-2.0
"""Packed batches without padding, and padded ones: other numbers of tokens on each rank, in each step."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import deepspeed.comm as dist
import pytest
import torch
from transformers import DataCollatorWithFlattening

from ds_mxfp8_moe import record_routes
from ds_mxfp8_moe.engine.metrics import load_figures
from ds_mxfp8_moe.routing.routes import is_recomputed
from tests.support.autoep_models import converted, engine_of, model, watch_choices, weights
from tests.support.autoep_trainings import BF16, PLAIN, assert_trains_like_transformers, near
from tests.support.graph_cases import SLIDING, changing, for_good, impatient
from tests.support.guide_code_cases import GUIDES, blocks
from tests.support.metrics_cases import monitor, written
from tests.support.rank_pool import reset_deepspeed_groups
from tests.support.slow import slow_except

# Of the sequences of each rank, by step. A rank may have two tokens alone.
LENGTHS = (((5, 9, 23), (3, 8), (31, ), (2, )), ((11, ), (7, 1, 30), (2, 2), (6, 5)),
           ((2, 2, 2, 40), (2, ), (9, 9), (3, )))
AUX_LOSS = {"output_router_logits": True, "router_aux_loss_coef": 0.5}


def sequences(step: int, rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return [torch.randint(3, 128, (length, ), generator=generator) for length in LENGTHS[step][rank]]


def packed(step: int, rank: int) -> dict:
    """All sequences in one row, with what FlashAttention reads. `sdpa` separates them by their positions."""
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    return {**collate([{"input_ids": ids} for ids in sequences(step, rank)]), "use_cache": False}


def padded(side: str, step: int, rank: int) -> dict:
    """One sequence in each row, whose first token is predicted by none. Padding comes on this side."""
    rows = sequences(step, rank)
    labels = [torch.nn.functional.pad(ids[1:], (1, 0), value=-100) for ids in rows]

    def padded_with(value: int, tensors: list[torch.Tensor]) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value, padding_side=side)

    return {"input_ids": padded_with(0, rows), "labels": padded_with(-100, labels),
            "attention_mask": padded_with(0, [torch.ones_like(ids) for ids in rows]), "use_cache": False}


def alone(net: torch.nn.Module, step: int, rank: int) -> torch.Tensor:
    """The loss of a rank's sequences, each of which has the model for itself."""
    of_tokens = [torch.nn.functional.cross_entropy(net(ids[None]).logits[0, :-1], ids[1:], reduction="none")
                 for ids in sequences(step, rank)]
    return torch.cat(of_tokens).mean()


def masked(engine, step: int, rank: int) -> torch.Tensor:
    """The loss of packed sequences with the guide's masks for gpt-oss."""
    names: dict = {}
    exec(blocks(GUIDES / "long_context.md", "python")[-1], names)
    batch = packed(step, rank)
    return engine(**batch, attention_mask=names["masks"](engine.module, batch["position_ids"])).loss


def of(batch: Callable) -> Callable:
    return lambda net, step, rank: net(**batch(step, rank)).loss


def trained(net, section, loss_of, stage=2, ep_size=2, recompute=None, steps=3, **changes) -> tuple:
    """Losses, by how much each weight and bias has moved, and how many layers are ours. With PLAIN, each rank trains
    transformers' own model with the sequences of all ranks.

    `recompute`: use_reentrant of checkpointing. None: there is none.
    """
    reset_deepspeed_groups()
    if recompute is not None:
        net.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": recompute})
        net.enable_input_require_grads()
    engine = engine_of(net, section, stage, ep_size, gradient_clipping=0.0, **changes)
    before, losses, rank = weights(engine), [], dist.get_rank()
    for step in range(steps):
        ranks = range(dist.get_world_size()) if section is PLAIN else [rank]
        of_ranks = {one: loss_of(engine, step % 3, one) for one in ranks}
        engine.backward(sum(of_ranks.values()) / len(ranks))
        engine.step()
        losses.append(of_ranks[rank].item())
    moved = {name: value - before[name] for name, value in weights(engine).items()}
    moved |= {name: buffer.clone() for name, buffer in engine.module.named_buffers() if name.endswith("expert_bias")}
    result = losses, moved, converted(engine)
    engine.destroy()
    return result


# ---------------------------------------------------------------- packed


def beside_one_process(family, stage, ep_size=2, turns=1, auxiliary=False) -> tuple:
    changes = AUX_LOSS if auxiliary else {"output_router_logits": False}
    changes |= SLIDING if family == "gpt_oss" else {}
    own = trained(model(family, **changes), PLAIN, of(packed) if auxiliary else alone, 0)
    section, ours = {**BF16, "expert_turns": turns}, masked if family == "gpt_oss" else of(packed)
    return near(own, trained(model(family, **changes), section, ours, stage, ep_size, recompute=False))


@pytest.mark.parametrize("family, stage", slow_except(
    [("qwen3_moe", 2), ("gpt_oss", 2), ("deepseek_v3", 1), ("mixtral", 3)], ("qwen3_moe", 2), ("gpt_oss", 2)))
def test_packed_sequences_train_like_separate_ones(ranks2, family, stage):
    assert_trains_like_transformers(ranks2.run(beside_one_process, family, stage))


@pytest.mark.parametrize("ep_size, turns", slow_except([(4, 1), (2, 3)], (2, 3)))
def test_packed_sequences_of_four_ranks(ranks4, ep_size, turns):
    assert_trains_like_transformers(ranks4.run(beside_one_process, "qwen3_moe", 2, ep_size, turns))


@pytest.mark.parametrize("stage", slow_except([2, 3], 3))
def test_the_auxiliary_loss_is_that_of_packed_batches(ranks2, stage):
    assert_trains_like_transformers(ranks2.run(beside_one_process, "mixtral", stage, auxiliary=True))


# Some micro-batches have too few tokens for MXFP8.
MXFP8 = {"enabled": True, "min_tokens_per_expert": 12, "load_balance_coeff": 0.01}


def the_same(one: tuple, other: tuple) -> bool:
    return one[0] == other[0] and all(torch.equal(moved, other[1][name]) for name, moved in one[1].items())


def counted(net: torch.nn.Module) -> tuple[list, list]:
    """Gets how often which expert was chosen in each call of a layer: in forward, and when it is recomputed."""
    forward, again = [], []

    def count(expert_TK: torch.Tensor) -> None:
        (again if is_recomputed() else forward).append(expert_TK.flatten().bincount(minlength=8).tolist())

    for layer in net.model.layers:
        watch_choices(layer.mlp, count)
    return forward, again


def last_layer_first(counts: list) -> list:
    """Of each micro-batch, as two layers are recomputed."""
    return [counts[i + layer] for i in range(0, len(counts), 2) for layer in (1, 0)]


def with_counts(stage: int, way: bool | None) -> tuple:
    net = model()
    counts = counted(net)
    return trained(net, MXFP8, of(packed), stage, recompute=way, steps=4, gradient_accumulation_steps=2), *counts


def recomputed(stage: int) -> tuple[bool, bool]:
    """Whether both ways of checkpointing give the same bits, and route as forward did."""
    (plain, counts, none), *others = (with_counts(stage, way) for way in (None, False, True))
    return (all(the_same(plain, other) and forward == counts for other, forward, _ in others),
            not none and all(again == last_layer_first(counts) for *_, again in others))


@pytest.mark.parametrize("stage", slow_except([1, 3], 3))
def test_recomputation_changes_no_bit_and_routes_the_same(ranks2, stage):
    assert ranks2.run(recomputed, stage) == [(True, True)] * 2


def repeated(way: bool, records: bool) -> bool:
    """Whether layers choose the same experts again, although what comes to them has other bits then."""
    net = model()
    forward, again = counted(net)
    for layer in net.model.layers:
        layer.mlp.register_forward_pre_hook(
            lambda _, args: (args[0] + 0.3 * torch.randn_like(args[0]), ) if is_recomputed() else None)
    net.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": way})
    net.enable_input_require_grads()
    engine = engine_of(net, BF16, 1)
    with record_routes(engine) if records else nullcontext():
        engine.backward(of(packed)(engine, 0, dist.get_rank()))
    engine.step()
    engine.destroy()
    return again == last_layer_first(forward)


def test_recorded_routes_are_repeated_where_a_recomputation_has_other_bits(ranks2):
    assert ranks2.run(repeated, True, False) == [False] * 2
    assert ranks2.run(repeated, True, True) == ranks2.run(repeated, False, True) == [True] * 2


def without_keys(key: str) -> bool:
    return the_same(*(trained(model(), {**MXFP8, key: on}, of(packed), steps=4, gradient_accumulation_steps=2)
                      for on in (True, False)))


@pytest.mark.parametrize("key", ["keep_quantized_weights", "batch_gradients"])
def test_these_keys_change_no_bit(ranks2, key):
    assert all(ranks2.run(without_keys, key))


# ---------------------------------------------------------------- padded


def beside_packed(side: str) -> tuple:
    """With "load_balance_coeff" and the model's own auxiliary loss, neither of which counts padding."""
    section = {**BF16, "load_balance_coeff": 0.01}
    own, ours = (trained(model("mixtral", **AUX_LOSS), section, of(batch))
                 for batch in (packed, partial(padded, side)))
    return near((*own[:2], 0), ours)


@pytest.mark.parametrize("side", ["right", "left"])
def test_padded_sequences_train_like_packed_ones(ranks2, side):
    results = ranks2.run(beside_packed, side)
    assert_trains_like_transformers(results)
    assert any(name.endswith("expert_bias") for name in results[0][2])


def loads(folder: str) -> list[torch.Tensor]:
    """By layer, how often all ranks chose each expert in the last step."""
    net, last = model(), {}
    for layer in net.model.layers:
        watch_choices(layer.mlp, partial(last.__setitem__, layer))
    trained(net, {**BF16, "metrics": {"every": 1}}, of(partial(padded, "right")), **monitor(folder))
    found = [last[layer].flatten().bincount(minlength=8).float() for layer in net.model.layers]
    for load_E in found:
        dist.all_reduce(load_E)
    return found


def test_metrics_count_the_tokens_of_each_rank_and_padding(ranks2, tmp_path):
    of_layers, _ = ranks2.run(loads, str(tmp_path))
    figures = written(tmp_path)
    assert [load_E.sum() for load_E in of_layers] == [2 * (4 * 40 + 2)] * 2  # two choices
    for i, load_E in enumerate(of_layers):
        for name, value in load_figures(load_E.view(2, -1).sum(1).tolist(), load_E.tolist()).items():
            assert figures[f"model.layers.{i}.mlp_{name}"][-1][1] == pytest.approx(value)


# ---------------------------------------------------------------- graphs of attention


def test_lengths_that_come_once_have_no_graphs(ranks2):
    for losses, moved, lines, replays in ranks2.run(impatient, changing):
        assert losses and moved and not replays
        assert len(lines) == 1 and "Micro-batches need the same shape" in lines[0]


def test_graphs_that_no_step_uses_are_freed(ranks2):
    for losses, moved, lines, replays in ranks2.run(impatient, for_good):
        assert losses and moved and replays == 4 * (2 + 4)
        made, freed, again = lines
        assert "did not use the CUDA graphs" in freed and made == again
