# SPDX-License-Identifier: Apache-2.0
"""Experts' gradients in ZeRO's sums, with the kernels and their recordings: DeepSpeed's bits, in less memory."""

import deepspeed.comm as dist
import pytest
import torch

from ds_mxfp8_moe.compute import recorded
from tests.support.autoep_models import engine as autoep_engine
from tests.support.rank_pool import reset_deepspeed_groups
from tests.support.slow import slow_except
from tests.support.sums_cases import BF16, STEPS, expected, forward, step_by_step, trained
from tests.support.zero_cases import assert_same_bits_as_deepspeed

SIZES = {"hidden_size": 256, "moe_intermediate_size": 128}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 4}, "bf16": {"enabled": False}}


def both(stage, recipe, config=(), dtype=torch.bfloat16):
    """Trainings of engines on a GPU, see test_sums.py."""
    section = {"recipe": recipe, "min_tokens_per_expert": 0}
    (plain, *_), (own, noted, mixed) = (
        trained(batched, stage, dist.get_world_size(), 3, section=section, config=config,
                model={**SIZES, "dtype": dtype}) for batched in (False, True))
    return (plain, own), noted, mixed


HOW = {"1": (1, (), torch.bfloat16), "2": (2, (), torch.bfloat16),
       "overlap": (2, {"zero_optimization": {"overlap_comm": True}}, torch.bfloat16), "fp16": (2, FP16, torch.float16)}


@pytest.mark.parametrize("how, recipe", slow_except(
    [(how, recipe) for how in HOW for recipe in ("mxfp8_wgrad_with_hp", "mxfp8", "bf16")],
    ("1", "mxfp8_wgrad_with_hp"), ("2", "mxfp8"), ("overlap", "bf16"), ("fp16", "mxfp8_wgrad_with_hp")))
def test_trainings_are_deepspeeds_bit_for_bit(gpu_ranks, how, recipe):
    stage, config, dtype = HOW[how]
    results = gpu_ranks.run(both, stage, recipe, config, dtype, seconds=240)
    assert_same_bits_as_deepspeed([pair for pair, *_ in results])
    assert all(noted == expected(3) * STEPS and mixed == 0 for _, noted, mixed in results)


@pytest.mark.parametrize("recipe, name", [("hp-128", "swiglu"), ("mxfp8-128", "swiglu"), ("hp-32", "gelu"),
                                          ("bf16", "gelu")])
def test_replays_take_the_sums_of_their_own_call(one_rank, recipe, name, monkeypatch):
    monkeypatch.setattr(recorded, "_PROGRAMS", {})
    found = step_by_step(recipe, name, device="cuda")
    programs = [program for of_key in recorded._PROGRAMS.values() for program, _ in of_key.values()]
    assert len(programs) == (4 if name == "swiglu" else 3) and None not in programs
    monkeypatch.setattr(recorded, "executor_for", lambda device: None)
    direct = step_by_step(recipe, name, device="cuda")
    assert all(map(torch.equal, found, direct)) and len(found) == len(direct)


def memory(batched, stage):
    """The most bytes that the second micro-batch takes, and those of the experts' weights."""
    reset_deepspeed_groups()
    model = {"dtype": torch.bfloat16, "hidden_size": 1024, "moe_intermediate_size": 1024, "num_hidden_layers": 1}
    engine = autoep_engine({"enabled": True, "batch_gradients": batched}, stage, dist.get_world_size(),
                           model_changes=model, gradient_accumulation_steps=3, **BF16)
    for number in range(5):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        engine.backward(forward(engine, number))
        peak = torch.cuda.max_memory_allocated() - before
        engine.step()
    experts = sum(p.nbytes for name, p in engine.module.named_parameters() if ".experts." in name)
    engine.destroy()
    return peak, experts


def memories(stage):
    return [memory(batched, stage) for batched in (False, True)]


@pytest.mark.parametrize("stage", [1, 2])
def test_a_later_micro_batch_allocates_no_gradients_of_experts(gpu_ranks, stage):
    for (plain, experts), (own, _) in gpu_ranks.run(memories, stage, seconds=240):
        assert own < plain - 0.6 * experts  # down's gradient is a third, gate's and up's together two thirds
