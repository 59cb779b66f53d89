# SPDX-License-Identifier: Apache-2.0
"""Classic MoE layers through `ds_mxfp8_moe.initialize`, in every layout of ranks and optimizer that DeepSpeed has.

Each case trains the same model twice from the same start: by plain DeepSpeed and by ours. Float32 layouts take recipe
bf16, which computes what plain DeepSpeed computes, in another order: nothing is left but float32 roundings, so a
gradient lost, doubled or summed over the wrong ranks shows at once. bf16 layouts take the default recipe. There a
token near the border between two experts may go to the other one, which moves single experts a lot and the model as
a whole little. Two layouts are trained with every recipe, and with the section switched off: equal bit for bit.
"""

import contextlib
import io
import math
import re
from dataclasses import replace

import deepspeed.comm as dist
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.sharded_moe import MOELayer
from deepspeed.utils import groups

import ds_mxfp8_moe
from ds_mxfp8_moe.compute.mx import sqnr_db
from tests.support.models import (
    BF16,
    DEFAULT,
    OFF,
    PLAIN,
    Layout,
    Net,
    assert_same_bits,
    batch,
    make_engine,
    owners,
    parameters,
    train_steps,
)
from tests.support.rank_pool import reset_deepspeed_groups
from tests.support.slow import WIDE, slow_except

SECTIONS = {"plain": PLAIN, "off": OFF, "bf16": BF16, "default": DEFAULT}
EVERY_WAY = "zero0", "half-zero2-bf16"
ADAM = {"optimizer": {"type": "Adam", "params": {"lr": 1e-3, "eps": 1e-3, "torch_adam": True}}}
OFFLOAD = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}, "zero_force_ds_cpu_optimizer": False}

TWO_RANKS = {
    "zero0": Layout(),
    "zero1": Layout(zero=1),
    "zero2": Layout(zero=2),
    "zero0-bf16": Layout(dtype="bf16"),
    "zero1-bf16": Layout(dtype="bf16", zero=1),
    "zero2-bf16": Layout(dtype="bf16", zero=2),
    "zero1-bf16-fp32-accumulation": Layout(dtype="bf16", zero=1, config={"data_types": {"grad_accum_dtype": "fp32"}}),
    "no-expert-parallelism": Layout(ep_size=1, zero=1),
    "accumulation-zero2": Layout(zero=2, config={"gradient_accumulation_steps": 3}),
    "clipping-zero1": Layout(zero=1, config={"gradient_clipping": 0.05}),
    "client-optimizer-zero2-bf16": Layout(client=True, zero=2, dtype="bf16"),
    "offload-zero2": Layout(zero=2, config={**ADAM, **OFFLOAD}),
    "offload-zero2-bf16": Layout(zero=2, dtype="bf16", config=OFFLOAD),
    "no-communication-overlap": Layout(zero=2, config={"zero_optimization": {"overlap_comm": False,
                                                                             "contiguous_gradients": True}}),
    "residual": Layout(zero=1, moe={"use_residual": True}),
    "dropless": Layout(zero=1, moe={"drop_tokens": False}),
    "noisy-gate": Layout(zero=1, moe={"noisy_gate_policy": "Jitter"}),
    "pipeline": Layout(ep_size=1, stages=2, config={"gradient_accumulation_steps": 2}),
    # Three steps: after two, single tokens at other experts are too large a part of what the parameters have moved.
    "pipeline-zero1-bf16": Layout(ep_size=1, stages=2, zero=1, dtype="bf16", steps=3,
                                  config={"gradient_accumulation_steps": 2}),
    "tensor-parallel": Layout(tensor_parallel=2, zero=1),
    "tensor-parallel-odd": Layout(tensor_parallel=2, shape=(1, 63), moe={"drop_tokens": False}),
    "frozen-experts": Layout(zero=1, frozen=r"blocks\.0\..*experts.*"),
    "frozen-all-experts": Layout(frozen=r".*experts.*"),
    "frozen-all-but-experts": Layout(zero=2, frozen=r"(?!.*experts).*"),
    "frozen-one-projection": Layout(frozen=r".*experts\.\d\.up\..*"),
}
FOUR_RANKS = {
    "half-zero1": Layout(zero=1),
    "half-zero2-bf16": Layout(zero=2, dtype="bf16"),
    "whole": Layout(ep_size=4, zero=2),
    "data-before-experts": Layout(zero=1, config={"use_data_before_expert_parallelism": True}),
    "two-ep-sizes": Layout(ep_size=(2, 4), zero=2),
    "pipeline": Layout(stages=2, config={"gradient_accumulation_steps": 2}),
    # As of two ranks.
    "pipeline-zero1-bf16": Layout(stages=2, zero=1, dtype="bf16", steps=3,
                                  config={"gradient_accumulation_steps": 2}),
    "tensor-parallel-half": Layout(tensor_parallel=2, zero=1),
    "tensor-parallel-whole": Layout(ep_size=4, tensor_parallel=2, zero=2),
    "tensor-parallel-across": Layout(tensor_parallel=2, config={"use_data_before_expert_parallelism": True}),
}


def train_each_way(layout, ways):
    runs = {}
    for name in ways:
        reset_deepspeed_groups()
        engine = make_engine(layout, SECTIONS[name])
        start = parameters(engine)
        records = train_steps(engine, layout)
        runs[name] = {"steps": records, "start": start, "end": parameters(engine), "owners": owners(engine)}
        engine.destroy()
    return runs


def moved(run):
    """What training changed, as one float32 vector per parameter."""
    return {name: (end.float() - run["start"][name].float()).flatten() for name, end in run["end"].items()}


def assert_trains_like_deepspeed(results, layout):
    strict = layout.dtype == "fp32"
    for runs in results:
        plain = runs["plain"]
        assert all(torch.isfinite(p).all() for run in runs.values() for p in run["end"].values())
        if "off" in runs:
            assert runs["off"]["steps"] == plain["steps"]
            assert_same_bits(runs["off"]["end"], plain["end"])
        wanted = moved(plain)
        if strict:
            still = {name for name, v in wanted.items() if not v.any()}
            assert still == {name for name in wanted if layout.frozen and re.fullmatch(layout.frozen, name)}
        for name in runs.keys() & {"bf16", "default"}:
            run = runs[name]
            assert_same_bits(run["start"], plain["start"])
            exact = strict and name == "bf16"
            # Float32 sums in another order; bf16 and MXFP8 noise, tokens that change their expert included.
            loss_tolerance, norm_tolerance = (1e-6, 1e-5) if exact else (1e-2, 2e-2)
            for got, expected in zip(run["steps"], plain["steps"], strict=True):
                assert got["loss"] == pytest.approx(expected["loss"], rel=loss_tolerance)
                assert got["skipped"] == expected["skipped"] == 0
                if expected["norm"] is None:
                    assert got["norm"] is None
                else:
                    assert math.isfinite(expected["norm"])
                    if layout.zero == 0:  # DeepSpeed's leaves experts out (test_clipping.py)
                        continue
                    assert got["norm"] == pytest.approx(expected["norm"], rel=norm_tolerance)
            moves = moved(run)
            if exact:
                low = {n: db for n in wanted if (db := sqnr_db(wanted[n], moves[n])) < 70}
                assert not low, f"SQNR in dB of what recipe bf16 changed: {low}"
            whole = sqnr_db(torch.cat(list(wanted.values())), torch.cat([moves[n] for n in wanted]))
            assert whole > 15, f"recipe {name}: SQNR {whole:.1f} dB over all parameters"
            assert not all(torch.equal(run["end"][n], p) for n, p in plain["end"].items())
    for rank, runs in enumerate(results):
        for name, run in runs.items():
            for parameter, ranks in run["owners"].items():
                assert rank in ranks
                for other in ranks:
                    assert torch.equal(run["end"][parameter], results[other][name]["end"][parameter]), (
                        f"{name}: {parameter} differs between ranks {rank} and {other}, which share it")


def assert_layout_trains_like_deepspeed(ranks, name, layout):
    ours = "bf16" if layout.dtype == "fp32" else "default"
    ways = list(SECTIONS) if name in EVERY_WAY else ["plain", ours]
    assert_trains_like_deepspeed(ranks.run(train_each_way, layout, ways), layout)


@pytest.mark.parametrize("name", slow_except(
    TWO_RANKS, "zero0", "zero1-bf16-fp32-accumulation", "no-expert-parallelism", "accumulation-zero2",
    "offload-zero2-bf16", "residual", "tensor-parallel", "frozen-experts"))
def test_layout_of_two_ranks(ranks2, name):
    assert_layout_trains_like_deepspeed(ranks2, name, TWO_RANKS[name])


@pytest.mark.parametrize("name", slow_except(FOUR_RANKS, "half-zero1", "pipeline", "tensor-parallel-across"))
def test_layout_of_four_ranks(ranks4, name):
    assert_layout_trains_like_deepspeed(ranks4, name, FOUR_RANKS[name])


def overflow_then_train(layout, section):
    """Three fp16 steps; in the first one, rank 1's loss is too large for fp16 gradients."""
    # DeepSpeed refuses fp16 on CPUs without fp16 arithmetic of their own; PyTorch computes it there all the same.
    get_accelerator().is_fp16_supported = lambda: True
    engine = make_engine(layout, section)
    start, states = parameters(engine), []
    for step in range(3):
        torch.manual_seed(step)
        x, target = batch(step, layout, dist.get_rank())
        loss = engine(x, target) * (1e9 if step == 0 and dist.get_rank() == 1 else 1)
        engine.backward(loss)
        engine.step()
        states.append(parameters(engine))
    return {"start": start, "states": states, "skipped": engine.skipped_steps, "loss": loss.item(),
            "owners": owners(engine)}


@pytest.mark.parametrize("zero", slow_except([0, 1, 2], 2))
def test_an_fp16_overflow_on_one_rank_is_skipped_on_every_rank(ranks2, zero):
    layout = Layout(zero=zero, dtype="fp16", config={"fp16": {"initial_scale_power": 4, "hysteresis": 1}})
    results = ranks2.run(overflow_then_train, layout, DEFAULT)
    for run in results:
        assert run["skipped"] == 1
        assert_same_bits(run["states"][0], run["start"])
        assert all(torch.isfinite(p).all() for p in run["states"][-1].values()) and math.isfinite(run["loss"])
        assert not all(torch.equal(p, run["start"][n]) for n, p in run["states"][-1].items())
        for parameter, ranks in run["owners"].items():
            assert all(torch.equal(run["states"][-1][parameter], results[r]["states"][-1][parameter]) for r in ranks)


def train_on_uneven_batches(layout, section):
    """Four steps, in each of them another number of tokens on each rank: all, few, one, none."""
    engine = make_engine(layout, section)
    losses = []
    for step in range(4):
        torch.manual_seed(step)
        size = [(0, 16), (4, 16), (1, 1), (3, 7)][(step + dist.get_rank()) % 4]
        x, target = batch(step, replace(layout, shape=size), dist.get_rank())
        loss = engine(x, target)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return {"losses": losses, "end": parameters(engine), "owners": owners(engine)}


@pytest.mark.parametrize("layout, section", [
    pytest.param(Layout(ep_size=4), DEFAULT, marks=WIDE), (Layout(zero=1, moe={"drop_tokens": False}), BF16),
    (Layout(zero=2, dtype="bf16", moe={"use_residual": True}), DEFAULT)],
    ids=["zero0", "zero1-dropless", "zero2-bf16-residual"])
def test_uneven_batches_and_ranks_without_tokens(ranks4, layout, section):
    results = ranks4.run(train_on_uneven_batches, layout, section)
    for run in results:
        assert all(map(math.isfinite, run["losses"]))
        assert all(torch.isfinite(p).all() for p in run["end"].values())
        for parameter, ranks in run["owners"].items():
            assert all(torch.equal(run["end"][parameter], results[r]["end"][parameter]) for r in ranks)
    assert not any(all(run["losses"]) for run in results), "somebody had no tokens, and so no loss"


@contextlib.contextmanager
def expert_tensor_parallel(which):
    """A layout of tensor-parallel experts and a model that has them in `which` of its two MoE layers."""
    layout = Layout(tensor_parallel=2, moe={"enable_expert_tensor_parallelism": True})
    torch.manual_seed(layout.seed)
    model = Net(layout.ep_size, **layout.moe)
    for i, block in enumerate(model.blocks):
        block.moe.enable_expert_tensor_parallelism = i in which
    try:
        yield layout, model
    finally:
        groups.expert_tensor_parallel_world_size = 1  # DeepSpeed keeps it for the whole process


def train_expert_tensor_parallel(section, which):
    printed = io.StringIO()
    with expert_tensor_parallel(which) as (layout, model):
        with contextlib.redirect_stdout(printed):
            engine = make_engine(layout, section, model)
        kinds = {type(block.moe.deepspeed_moe) for block in engine.module.blocks}
        return {"steps": train_steps(engine, layout), "end": parameters(engine), "printed": printed.getvalue(),
                "plain path": kinds == {MOELayer}}


# The first layer with such experts sets DeepSpeed's groups and exchanges for all.
@pytest.mark.parametrize("which", [(0, 1), (0, )], ids=["all-layers", "one-layer"])
def test_expert_tensor_parallelism_falls_back_with_its_reason(ranks4, which):
    plain = ranks4.run(train_expert_tensor_parallel, PLAIN, which)
    ours = ranks4.run(train_expert_tensor_parallel, DEFAULT, which)
    for got, expected in zip(ours, plain, strict=True):
        assert got["plain path"]
        assert got["steps"] == expected["steps"]
        assert_same_bits(got["end"], expected["end"])
    assert ours[0]["printed"].count("not converted: its experts are tensor-parallel") == 1


def convert_before_the_groups_are_known():
    with expert_tensor_parallel((0, 1)) as (layout, model):
        assert ds_mxfp8_moe.convert(model).converted == 2
        engine = make_engine(layout, PLAIN, model)
        with pytest.raises(RuntimeError, match="convert after deepspeed.initialize"):
            engine(*batch(0, layout, 0))


def test_experts_that_become_tensor_parallel_after_conversion_are_an_error(ranks4):
    ranks4.run(convert_before_the_groups_are_known)


def record_and_replay():
    engine = make_engine(Layout(), DEFAULT)
    told = "not supported for blocks.0.moe.deepspeed_moe: it is a classic layer of DeepSpeed"
    for context in (ds_mxfp8_moe.record_routes(engine), ds_mxfp8_moe.replay_routes(engine, torch.zeros(1, 2, 2))):
        with pytest.raises(RuntimeError, match=told), context:
            raise AssertionError("the forward began")


def test_routes_are_neither_recorded_nor_replayed(ranks2):
    ranks2.run(record_and_replay)
