# SPDX-License-Identifier: Apache-2.0
"""Quantized weights that are kept within a step: one cast of each, the same bits as without, and no stale weights."""

import contextlib
import io
import os
from dataclasses import dataclass, field, replace
from functools import partial
from unittest import mock

import deepspeed.comm as dist
import pytest
import torch

import ds_mxfp8_moe
from ds_mxfp8_moe.compute.routing import Routes
from ds_mxfp8_moe.engine import keeping
from ds_mxfp8_moe.ffn import kept_weights
from ds_mxfp8_moe.ffn.expert_ffn import ExpertFFN
from ds_mxfp8_moe.ffn.kept_weights import KeptWeights
from ds_mxfp8_moe.layers.experts import converted_layers
from ds_mxfp8_moe.transport.local import Local
from tests.support.autoep_models import autoep_layers, train_engine
from tests.support.autoep_models import batch as token_ids
from tests.support.autoep_models import engine as autoep_engine
from tests.support.checkpointed_net import CheckpointedNet
from tests.support.expert_ffn_cases import RECIPES, formula, problem
from tests.support.kept_weights_cases import calls, counted, equal, parameters_of
from tests.support.models import BF16, DEFAULT, OFF, OFFLOAD, Layout, Net, batch, make_engine, parameters, train_steps
from tests.support.rank_pool import reset_deepspeed_groups
from tests.support.slow import slow_except
from tests.support.zero_cases import poison

KEPT, NEVER = ({**DEFAULT, "keep_quantized_weights": value} for value in (True, False))
TWO = {"gradient_accumulation_steps": 2}
CASTS = 8  # of a model of two layers in a step: two GEMMs a layer, in forward and in backward


def trained(layout, section, way="stored", poisoned=False):
    """The records of each step, the parameters at the end, and how many casts of weights each step made."""
    reset_deepspeed_groups()
    torch.manual_seed(layout.seed)
    model = CheckpointedNet(way, layout.ep_size, **layout.moe) if layout.stages == 1 else None
    engine = make_engine(layout, section, model)
    records, counts = [], []
    for step in range(layout.steps):
        if poisoned and step == 1:
            poison(engine, dist.get_rank())
        with counted() as count:
            records += train_steps(engine, replace(layout, steps=1), first=step)
        counts.append(count.total())
    end = parameters(engine)
    engine.destroy()
    return records, end, counts


def both(layout, change=None, *args):
    return [trained(layout, {**section, **(change or {})}, *args) for section in (NEVER, KEPT)]


def assert_same_bits_and_casts(results, without, kept, later=None):
    """Equal bits; the number of casts in each step `without` the key and with it. `later`: in all but the first."""
    for (records, end, counts), (kept_records, kept_end, kept_counts) in results:
        assert kept_records == records
        assert [name for name in end if not torch.equal(end[name], kept_end[name])] == []
        assert counts == [without] * len(counts) and kept_counts == [
            kept, *[kept if later is None else later] * (len(counts) - 1)]


ZERO_2 = Layout(zero=2, dtype="bf16", config=TWO)


@dataclass(frozen=True)
class Case:
    """How many casts the key saves. `later`: in all steps but the first."""

    layout: Layout
    keys: dict = field(default_factory=dict)
    way: str = "stored"
    without: int = 2 * CASTS
    kept: int = CASTS
    later: int = CASTS


CASES = {
    "zero0-bf16": Case(Layout(dtype="bf16", config=TWO)),
    "zero1": Case(Layout(zero=1, config=TWO)),
    "zero1-bf16-fp32-accumulation": Case(Layout(zero=1, dtype="bf16", config={
        **TWO, "data_types": {"grad_accum_dtype": "fp32"}})),
    "offload": Case(replace(ZERO_2, config={**TWO, **OFFLOAD})),
    "mxfp8": Case(ZERO_2, {"recipe": "mxfp8", "scale_block_size": 128}),
    "mxfp8-blocks-of-32": Case(ZERO_2, {"recipe": "mxfp8", "scale_block_size": 32}),
    "experts-on-every-rank": Case(replace(ZERO_2, ep_size=1)),
    # Frozen experts, here of one of the two layers, are cast once for all steps.
    "frozen": Case(Layout(zero=1, dtype="bf16", frozen=r"blocks\.0\..*experts.*", config=TWO), later=CASTS // 2),
    "pipeline": Case(Layout(ep_size=1, stages=2, zero=1, dtype="bf16", config=TWO),  # one layer on each rank
                     without=CASTS, kept=CASTS // 2, later=CASTS // 2),
    **{way: Case(Layout(zero=2, dtype="bf16"), way=way, without=3 * CASTS // 2)
       for way in ("reentrant", "non-reentrant", "non-reentrant-to-the-end", "deepspeed")},
}


@pytest.mark.parametrize("name", slow_except(CASES, "mxfp8-blocks-of-32", "frozen", "non-reentrant"))
def test_micro_batches_and_recomputations_cast_each_weight_once(request, name):
    case, ranks = CASES[name], request.getfixturevalue("ranks4" if name == "pipeline" else "ranks2")
    results = ranks.run(both, case.layout, case.keys, case.way)
    assert_same_bits_and_casts(results, case.without, case.kept, case.later)


def decided(layout, free=None, way="stored", retries=None, **keys):
    """Without the key, with `free` bytes free on the last rank: what `trained` returns, and what was said.

    `retries`: of the allocator, as they are counted one after the other.
    """
    last = dist.get_rank() == dist.get_world_size() - 1
    memory = mock.patch.object(keeping, "free_bytes", lambda: free) if free is not None and last else (
        contextlib.nullcontext())
    counting = mock.patch.object(keeping, "_retries", side_effect=retries) if retries else contextlib.nullcontext()
    with contextlib.redirect_stdout(io.StringIO()) as said, memory, counting:
        without_key = trained(layout, {**DEFAULT, **keys}, way)
    return (trained(layout, {**NEVER, **keys}, way), without_key), said.getvalue()


@pytest.mark.parametrize("layout, free, way, first, later, said", [
    (ZERO_2, None, "stored", 2 * CASTS, CASTS, "MXFP8 weights are kept within each step, up to"),
    (ZERO_2, 1000, "stored", 2 * CASTS, 2 * CASTS, 'GiB on rank 1). "keep_quantized_weights": true keeps them anyway. '
     '"optimizer": {"type": "FlashAdamW"} keeps Adam'),
    (Layout(zero=2, dtype="bf16"), None, "reentrant", 3 * CASTS // 2, CASTS, "MXFP8 weights are kept within each"),
    (Layout(zero=2, dtype="bf16"), None, "stored", CASTS, CASTS, None)],
    ids=["micro-batches", "no memory on one rank", "checkpointing", "one micro-batch"])
def test_without_the_key_the_first_step_decides(ranks2, layout, free, way, first, later, said):
    results = ranks2.run(decided, replace(layout, steps=3), free, way)
    for ((records, end, counts), (found, found_end, found_counts)), _ in results:
        assert found == records and all(torch.equal(end[name], found_end[name]) for name in end)
        assert counts == [first] * 3 and found_counts == [first, later, later]
    assert (said in results[0][1]) if said else "weights are" not in results[0][1]


def test_turns_of_one_micro_batch_share_kept_weights(ranks2):
    layout = Layout(zero=2, dtype="bf16", steps=3)
    for ((records, _, counts), (found, _, found_counts)), _ in ranks2.run(decided, layout, expert_turns=2):
        assert found == records and found_counts == [counts[0], CASTS, CASTS] and counts == [counts[0]] * 3
        assert counts[0] > CASTS


def test_with_less_memory_one_form_is_kept(ranks2):
    layout = replace(ZERO_2, steps=3)
    size = ranks2.run(bytes_of_one_form, layout)[0]
    results = ranks2.run(decided, layout, 3 * size, scale_block_size=128)
    for ((records, end, counts), (found, found_end, found_counts)), _ in results:
        assert found == records and all(torch.equal(end[name], found_end[name]) for name in end)
        assert counts == [2 * CASTS] * 3 and found_counts == [2 * CASTS, CASTS // 2, CASTS // 2]


def bytes_of_one_form(layout) -> int:
    reset_deepspeed_groups()
    engine = make_engine(layout, DEFAULT, None)
    size = keeping._bytes(converted_layers(engine.module))
    engine.destroy()
    return size


def test_without_memory_nothing_is_kept_any_more(ranks2):
    results = ranks2.run(decided, replace(ZERO_2, steps=4), retries=[0, 0, 0, 1])
    for ((records, _, _), (found, _, found_counts)), said in results:
        assert found == records and found_counts == [2 * CASTS, CASTS, CASTS, 2 * CASTS]
        assert "MXFP8 weights are not kept any more on this rank" in said


def test_what_the_key_asks_for_is_kept_without_memory(ranks2):
    results = ranks2.run(decided, replace(ZERO_2, steps=3), retries=[*range(9)], keep_quantized_weights=True)
    for (_, (_, _, counts)), said in results:
        assert counts == [CASTS] * 3 and "not kept any more" not in said


def test_a_skipped_step(ranks2):
    layout = Layout(zero=1, steps=3, config=TWO)
    results = ranks2.run(both, layout, None, "stored", True)
    assert_same_bits_and_casts(results, 2 * CASTS, CASTS)
    assert all([record["skipped"] for record in records] == [0, 1, 1] for (records, *_), _ in results)


def autoep_both(stage, ep_size, changes):
    """As `both`, of an AutoEP model that is evaluated after each step, and what the second one said at start-up."""
    results = []
    for section in (NEVER, KEPT):
        reset_deepspeed_groups()
        with contextlib.redirect_stdout(io.StringIO()) as said:
            engine = autoep_engine(section, stage, ep_size, **TWO, **changes)
        assert len(autoep_layers(engine.module)) == 2
        losses, counts = [], []
        for step in range(2):
            with counted() as count:
                losses += train_engine(engine, range(10 * step, 10 * step + 2))
            counts.append(count.total())
            engine.eval()
            with torch.no_grad(), counted() as count:
                losses.append(engine(input_ids=token_ids(9), labels=token_ids(9)).loss.item())
                assert count.total() == CASTS // 2
            engine.train()
        end = {} if stage == 3 else parameters(engine)
        results.append((losses, end, counts))
        engine.destroy()
    return results, said.getvalue()


@pytest.mark.parametrize("stage, ep_size, kind", slow_except(
    [(0, 2, "fp32"), (2, 2, "bf16"), (2, 1, "fp32"), (3, 2, "fp32"), (1, 2, "biases")],
    (3, 2, "fp32"), (1, 2, "biases")))
def test_autoep(ranks2, stage, ep_size, kind):
    changes = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}, "biases": {"family": "gpt_oss"}}
    results = ranks2.run(autoep_both, stage, ep_size, changes[kind])
    kept = 2 * CASTS if stage == 3 else CASTS
    assert_same_bits_and_casts([found for found, _ in results], 2 * CASTS, kept)
    assert ("has no effect: ZeRO-3" if stage == 3 else "are kept within each step") in results[0][1]
    assert not results[1][1]


# ---- weights that change --------------------------------------------------------------------------------------------


def experts_of(engine):
    return [p for name, p in engine.module.named_parameters() if "deepspeed_experts" in name]


def load_checkpoint(engine, directory, **keys):
    path, _ = engine.load_checkpoint(directory, **keys)
    assert path is not None


def load_halves(engine, directory, **keys):
    engine.module.load_state_dict({name: value / 2 for name, value in engine.module.state_dict().items()}, **keys)


def write_and_step(engine, directory):
    """Writes that leave no trace, and the engine's step after them."""
    for p in experts_of(engine):
        p.data.mul_(0.5)
    engine._take_model_step({})


def evaluate_other_weights(engine, directory):
    """The loss of an average of weights, which is written into the parameters without a trace and taken out again."""
    own = [p.detach().clone() for p in experts_of(engine)]
    for p in experts_of(engine):
        p.data.mul_(0.5)
    engine.eval()
    with torch.no_grad():
        loss = engine(*(x.to(own[0].dtype) for x in batch(5, Layout(), dist.get_rank()))).item()
    engine.train()
    for p, value in zip(experts_of(engine), own, strict=True):
        p.data.copy_(value)
    return loss


def write(engine, directory):
    with torch.no_grad():
        for p in experts_of(engine):
            p.mul_(0.5)


def replace_data(engine, directory):
    for p in experts_of(engine):
        p.data = p.data / 2


CHANGES = {
    "load_checkpoint": load_checkpoint,
    "load_checkpoint, weights alone": partial(load_checkpoint, load_module_only=True),
    "load_state_dict": load_halves,
    "load_state_dict, assigned": partial(load_halves, assign=True),
    "a write": write,
    "other data": replace_data,
    "a write without a trace before a step": write_and_step,
    "optimizer.step": lambda engine, directory: engine.optimizer.step(),
    "an evaluation of other weights": evaluate_other_weights,
    "nothing": lambda engine, directory: None,
}
NOT_IN_ZERO_2 = "load_state_dict, assigned", "a write without a trace before a step", "optimizer.step"


def changed_within_a_step(layout, directory, change):
    """The losses of micro-batches before and after a change, in five of them a step, without the key and with it."""
    results = []
    for section in (NEVER, KEPT):
        reset_deepspeed_groups()
        engine = make_engine(replace(layout, config={"gradient_accumulation_steps": 5}), section)
        losses = []

        def micro_batches(numbers, engine=engine, losses=losses):
            for number in numbers:
                torch.manual_seed(number)
                loss = engine(*batch(number, layout, dist.get_rank()))
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())

        micro_batches(range(6))
        if not os.path.exists(os.path.join(directory, "t")):
            engine.save_checkpoint(directory, tag="t")
        dist.barrier()
        micro_batches(range(6, 7))
        losses.append(CHANGES[change](engine, directory))
        with counted() as count:
            micro_batches(range(7, 9))
        results.append((losses, parameters(engine), count.total()))
        engine.destroy()
    return results


@pytest.mark.parametrize("change", slow_except(
    CHANGES, "a write", "load_checkpoint"))
def test_weights_that_change_within_a_step_are_cast_again(ranks2, tmp_path, change):
    layout = Layout(zero=0 if change in NOT_IN_ZERO_2 else 2, dtype="bf16")
    casts_after = 0 if change in ("nothing", "an evaluation of other weights") else CASTS
    for (losses, end, casts_without), (kept_losses, kept_end, casts_with) in ranks2.run(
            changed_within_a_step, layout, str(tmp_path), change):
        assert kept_losses == losses
        assert [name for name in end if not torch.equal(end[name], kept_end[name])] == []
        assert casts_without == 2 * CASTS and casts_with == casts_after


# ---- which engines keep weights -------------------------------------------------------------------------------------


def keeping_layers(engine_or_model):
    return [vars(module).get("mxfp8_kept") is not None for module in engine_or_model.modules()
            if "mxfp8_settings" in vars(module)]


ONE_LAYER = {**KEPT, "exclude": [".*0.*"]}
SECTIONS = [DEFAULT, {**BF16, "keep_quantized_weights": True}, ONE_LAYER, KEPT, OFF, KEPT]


def lives():
    """Through the life of a model, which of its converted layers keep weights; and what was said."""
    reset_deepspeed_groups()
    model = Net(2)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        ds_mxfp8_moe.convert(model, KEPT)
        states = [keeping_layers(model)]
        engine = make_engine(Layout(zero=1), {}, model)
        states.append(keeping_layers(model))
        for section in SECTIONS:
            ds_mxfp8_moe.convert(engine, section)
            states.append(keeping_layers(model))
            with counted() as count:
                train_steps(engine, Layout(zero=1, steps=2))
            assert section is not KEPT or count.total() == 2 * CASTS
        engine.destroy()
        states.append(keeping_layers(model))
        reset_deepspeed_groups()
        config = {"train_micro_batch_size_per_gpu": 4, "mxfp8_moe": KEPT}
        states.append(keeping_layers(ds_mxfp8_moe.initialize(model=Net(2), config=config)[0]))
    return states, said.getvalue()


def test_layers_keep_weights_where_an_engine_can_clear_them(ranks2):
    no, yes = [False, False], [True, True]
    for states, _ in (results := ranks2.run(lives)):
        assert states[:2] == [no, yes]  # converted without an engine; in an engine without a section
        assert states[2:-2] == [no, no, [True], yes, [], yes]  # after each of SECTIONS
        assert states[-2:] == [no, no]  # destroyed; without an optimizer
    said = results[0][1]
    assert said.count('"keep_quantized_weights" has no effect without an engine') == 1
    assert said.count('"keep_quantized_weights" has no effect: the engine has no optimizer') == 1
    assert said.count("MXFP8 weights are kept within each step, up to 0.00 GiB on this rank") == 4


def hooks_that_count():
    """On each converted layer: after two conversions without a step between them, and after the engine's end."""
    reset_deepspeed_groups()
    engine = make_engine(Layout(zero=1), DEFAULT)
    layers = [module for module in engine.modules() if "mxfp8_settings" in vars(module)]
    ds_mxfp8_moe.convert(engine, DEFAULT)
    counting = [len(layer._forward_pre_hooks) for layer in layers]
    engine.destroy()
    return counting, [len(layer._forward_pre_hooks) for layer in layers]


def test_one_hook_counts_until_the_first_step_or_the_end(ranks2):
    assert ranks2.run(hooks_that_count) == [([1, 0], [0, 0])] * 2


# ---- one layer ------------------------------------------------------------------------------------------------------


def test_tokens_of_several_dtypes_share_kept_weights():
    weights = parameters_of(problem(1, "swiglu", dtype=torch.float32)[0])
    dtypes = torch.bfloat16, torch.float32
    wanted = calls(weights, None, dtypes=dtypes, count=4)
    with counted() as count:
        assert equal(calls(weights, KeptWeights(), dtypes=dtypes, count=4), wanted)
    assert count.total() == 4


def test_weights_that_are_no_parameters_are_not_kept():
    weights = parameters_of(problem(1, "swiglu", dtype=torch.bfloat16)[0])
    kept, with_others = KeptWeights(), {}
    calls(weights, kept, count=1)
    for scale in (2, 3):
        others = {role: [(p * scale).detach().requires_grad_() for p in values] for role, values in weights.items()}
        with counted() as count:
            with_others[scale] = calls(others, kept, count=2)
        assert count.total() == 2 * 4 and equal(with_others[scale], calls(others, None, count=2))
    with counted() as count:
        calls(weights, kept, count=1)
    assert count.total() == 0


def test_saved_tensors_that_were_copied_are_not_kept():
    weights = parameters_of(problem(1, "swiglu", dtype=torch.bfloat16)[0])
    wanted = calls(weights, None)
    copied = torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda tensor: tensor)
    with copied, counted() as count:
        assert equal(calls(weights, KeptWeights()), wanted)
    assert count == {False: 2, True: 3 * 2}


def test_calls_in_inference_mode_and_training_share_kept_weights():
    weights = parameters_of(problem(1, "swiglu", dtype=torch.bfloat16)[0])
    _, (x, ), _, (routes, ) = problem(1, "swiglu", dtype=torch.bfloat16)
    wanted, kept = calls(weights, None), KeptWeights()
    with torch.inference_mode(), counted() as count:
        ffn = ExpertFFN(formula("swiglu"), RECIPES["hp-128"], Local(), len(weights["up"]), kept=kept)
        ffn(x, Routes(expert_TK=routes[0], weight_TK=routes[1], num_experts=len(weights["up"])), weights)
        assert count.total() == 2
    with counted() as count:
        assert equal(calls(weights, kept), wanted)
    assert count == {True: 2}


def test_graph_capture_and_other_streams(monkeypatch):
    weights, kept = [torch.nn.Parameter(torch.ones(2))], KeptWeights()
    kept.of(weights, False)["up"] = "made before"
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "is_cuda", True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert kept.of(weights, False) is None
    assert kept.of(weights, False) == {"up": "made before"} and kept.of(weights, True) == {}
    with monkeypatch.context() as patch:
        patch.setattr(kept_weights, "get_accelerator", lambda: mock.Mock(current_stream=lambda device: "another"))
        assert kept.of(weights, False) == {}
