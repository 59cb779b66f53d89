# SPDX-License-Identifier: Apache-2.0
"""Classic MoE layers through `ds_mxfp8_moe.initialize`, in every layout of ranks and optimizer that DeepSpeed has.

Each case trains the same model four times from the same start: by plain DeepSpeed, with the section switched off, with
recipe bf16 and with the default recipe. Switched off is equal bit for bit. Recipe bf16 computes what plain DeepSpeed
computes, in another order: in float32 layouts nothing is left but float32 roundings, so a gradient lost, doubled or
summed over the wrong ranks shows at once. In bf16 layouts and with quantisation a token near the border between two
experts may go to the other one, which moves single experts a lot and the model as a whole little.
"""

import math

import pytest
import torch
from models import BF16, DEFAULT, OFF, PLAIN, Layout, make_engine, owners, parameters, train_steps
from ranks import reset_deepspeed_groups

from ds_mxfp8_moe.mx import sqnr_db

SECTIONS = {"plain": PLAIN, "off": OFF, "bf16": BF16, "default": DEFAULT}
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
    "accumulation": Layout(config={"gradient_accumulation_steps": 3}),
    "accumulation-zero2": Layout(zero=2, config={"gradient_accumulation_steps": 3}),
    "clipping": Layout(config={"gradient_clipping": 0.05}),
    "clipping-zero1": Layout(zero=1, config={"gradient_clipping": 0.05}),
    "client-optimizer": Layout(client=True),
    "client-optimizer-zero1": Layout(client=True, zero=1),
    "client-optimizer-zero2-bf16": Layout(client=True, zero=2, dtype="bf16"),
    "adam": Layout(zero=2, config=ADAM),
    "offload-zero1": Layout(zero=1, config=OFFLOAD),
    "offload-zero2": Layout(zero=2, config={**ADAM, **OFFLOAD}),
    "offload-zero2-bf16": Layout(zero=2, dtype="bf16", config=OFFLOAD),
    "no-communication-overlap": Layout(zero=2, config={"zero_optimization": {"overlap_comm": False,
                                                                             "contiguous_gradients": True}}),
    "residual": Layout(zero=1, moe={"use_residual": True}),
    "dropless": Layout(zero=1, moe={"drop_tokens": False}),
    "noisy-gate": Layout(zero=1, moe={"noisy_gate_policy": "Jitter"}),
    "pipeline": Layout(ep_size=1, stages=2, config={"gradient_accumulation_steps": 2}),
    "pipeline-zero1-bf16": Layout(ep_size=1, stages=2, zero=1, dtype="bf16",
                                  config={"gradient_accumulation_steps": 2}),
    "tensor-parallel": Layout(tensor_parallel=2, zero=1),
    "tensor-parallel-dropless": Layout(tensor_parallel=2, moe={"drop_tokens": False}),
}
FOUR_RANKS = {
    "half-zero0": Layout(),
    "half-zero1": Layout(zero=1),
    "half-zero2-bf16": Layout(zero=2, dtype="bf16"),
    "whole": Layout(ep_size=4, zero=2),
    "data-before-experts": Layout(zero=1, config={"use_data_before_expert_parallelism": True}),
    "two-ep-sizes": Layout(ep_size=(2, 4), zero=2),
    "two-ep-sizes-zero0": Layout(ep_size=(4, 1)),
    "pipeline": Layout(stages=2, config={"gradient_accumulation_steps": 2}),
    "pipeline-zero1-bf16": Layout(stages=2, zero=1, dtype="bf16", config={"gradient_accumulation_steps": 2}),
    "tensor-parallel-half": Layout(tensor_parallel=2, zero=1),
    "tensor-parallel-whole": Layout(ep_size=4, tensor_parallel=2, zero=2),
    "tensor-parallel-across": Layout(tensor_parallel=2, config={"use_data_before_expert_parallelism": True}),
}


def train_four_ways(layout):
    runs = {}
    for name, section in SECTIONS.items():
        reset_deepspeed_groups()
        engine = make_engine(layout, section)
        start = parameters(engine)
        records = train_steps(engine, layout)
        runs[name] = {"steps": records, "start": start, "end": parameters(engine), "owners": owners(engine)}
        engine.destroy()
    return runs


def moved(run):
    """What training changed, as one float32 vector per parameter."""
    return {name: (end.float() - run["start"][name].float()).flatten() for name, end in run["end"].items()}


def check(results, layout):
    strict = layout.dtype == "fp32"
    for runs in results:
        plain = runs["plain"]
        assert all(torch.isfinite(p).all() for run in runs.values() for p in run["end"].values())
        assert runs["off"]["steps"] == plain["steps"]
        assert_equal(runs["off"]["end"], plain["end"])
        wanted = moved(plain)
        if strict:
            assert all(v.any() for v in wanted.values()), "every parameter trains"
        for name in ("bf16", "default"):
            run = runs[name]
            assert_equal(run["start"], plain["start"])
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
                    assert got["norm"] == pytest.approx(expected["norm"], rel=norm_tolerance)
            moves = moved(run)
            if exact:
                low = {n: db for n in wanted if (db := sqnr_db(wanted[n], moves[n])) < 70}
                assert not low, f"SQNR in dB of what recipe bf16 changed: {low}"
            whole = sqnr_db(torch.cat(list(wanted.values())), torch.cat([moves[n] for n in wanted]))
            assert whole > 15, f"recipe {name}: SQNR {whole:.1f} dB over all parameters"
        assert not all(torch.equal(runs["default"]["end"][n], p) for n, p in plain["end"].items())
    for name in SECTIONS:
        for rank, runs in enumerate(results):
            for parameter, ranks in runs[name]["owners"].items():
                assert rank in ranks
                for other in ranks:
                    assert torch.equal(runs[name]["end"][parameter], results[other][name]["end"][parameter]), (
                        f"{name}: {parameter} differs between ranks {rank} and {other}, which share it")


def assert_equal(got: dict, expected: dict):
    assert got.keys() == expected.keys()
    different = [name for name in got if not torch.equal(got[name], expected[name])]
    assert not different


@pytest.mark.parametrize("name", TWO_RANKS)
def test_layout_of_two_ranks(ranks2, name):
    check(ranks2.run(train_four_ways, TWO_RANKS[name]), TWO_RANKS[name])


@pytest.mark.parametrize("name", FOUR_RANKS)
def test_layout_of_four_ranks(ranks4, name):
    check(ranks4.run(train_four_ways, FOUR_RANKS[name]), FOUR_RANKS[name])
