# SPDX-License-Identifier: Apache-2.0
"""The check at first use, on a CPU: each step then runs twice in plain torch, and the first run is broken.
tests/gpu/test_self_check_gpu.py breaks kernels."""

import re
from dataclasses import replace
from functools import wraps

import pytest
import torch
from torch.utils._pytree import tree_map

from ds_mxfp8_moe.compute import casts, recorded
from ds_mxfp8_moe.compute.mx import MXTensor
from ds_mxfp8_moe.config import MXFP8MoEConfig, resolve
from ds_mxfp8_moe.engine import self_check
from ds_mxfp8_moe.engine.self_check import Kind, Verdict, small
from ds_mxfp8_moe.ffn import expert_math
from ds_mxfp8_moe.transport import local
from tests.support.self_check_cases import CASES, CLASSIC, FORMULAS, FROZEN, IN_4_BITS, SPREAD
from tests.support.slow import slow_except

CPU = torch.device("cpu")


def kind(name="gated", recipe="mxfp8_wgrad_with_hp", block=128, **keys):
    block = {} if recipe == "bf16" else {"scale_block_size": block}
    recipe = resolve(MXFP8MoEConfig(recipe=recipe, **block), "cpu")
    return Kind(small(FORMULAS[name]), recipe, torch.bfloat16, **keys)


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch, tmp_path):
    monkeypatch.setattr(self_check, "WIDE_COPIES", 2)
    monkeypatch.setattr(self_check, "_folder", lambda: tmp_path / "verdicts")
    monkeypatch.setattr(self_check, "releases", lambda device: {"chip": "none", "triton": "0"})


# tests/gpu takes every pair of formula and recipe. Here the first formula has every recipe, the others have MXFP8.
ON_CPU = [case for case in CASES if case.startswith("gated-") or "-mxfp8-" in case or "-mxfp4" in case]


@pytest.mark.parametrize("case", slow_except(ON_CPU, "gated-mxfp8_wgrad_with_hp-spread", "packed-mxfp8-classic",
                                             "gpt-oss-mxfp8-frozen"))
def test_whole_kernels_pass(case):
    name, recipe, keys = CASES[case]
    assert self_check._run(kind(name, recipe, **keys), CPU) == Verdict()


def broken_once(function, change):
    """A function whose first call, which stands for a kernel, is wrong. Later ones are right, as plain torch is."""
    calls = []

    @wraps(function)
    def broken(*args, **kwargs):
        calls.append(1)
        found = function(*args, **kwargs)
        return found if len(calls) > 1 else tree_map(lambda x: change(x) if isinstance(x, torch.Tensor) else x, found)

    return broken


def with_a_wrong_tile(x):
    """Some of 1000 rows have another sign, or one expert's."""
    if isinstance(x, MXTensor):
        data = x.qdata.view(torch.uint8).clone()
        data.flatten(0, -2)[3:35] ^= 0x80
        return x.with_parts(data.view(torch.float8_e4m3fn), x.scale_bytes)
    x = x.clone()
    x[3:35] *= -1
    return x


def raising(x):
    raise RuntimeError("ptxas failed")


@pytest.mark.parametrize("module, name, change, runs, found", [
    (expert_math, "grouped_mm", with_a_wrong_tile, "bf16", r"gemm: signal-to-noise ratio \d"),
    (expert_math, "grouped_mm", lambda x: x * float("nan"), "bf16", "gemm: signal-to-noise ratio nan"),
    (expert_math, "grouped_mm", raising, "bf16", "RuntimeError: ptxas failed"),
    (expert_math, "grouped_mm_weights", with_a_wrong_tile, "deepspeed", "gemm: signal"),
    (expert_math, "grouped_mm_wgrad_rows", with_a_wrong_tile, "deepspeed", "wgrad_gemm: signal"),
    (expert_math, "activate", with_a_wrong_tile, "deepspeed", "forward, tensor 3 of 5: signal"),
    (expert_math, "activate_backward", with_a_wrong_tile, "deepspeed", "backward_to_dpre, tensor 0 of "),
    (expert_math, "group_sums", with_a_wrong_tile, "deepspeed", "backward_to_dpre, tensor 3 of"),
    (expert_math, "add_weighted_bias", with_a_wrong_tile, "deepspeed", "forward, tensor 0 of 5: signal"),
    (expert_math, "weighted_bias_backward", with_a_wrong_tile, "deepspeed", "backward_to_dpre, tensor 2 of"),
    (expert_math, "low_rank_rows", with_a_wrong_tile, "deepspeed", "gemm: signal"),
    (expert_math, "low_rank_wgrad", with_a_wrong_tile, "deepspeed", "product_backward, tensor 2 of"),
    (expert_math, "add_low_rank", with_a_wrong_tile, "deepspeed", "gemm: signal"),
    (casts, "quantize_weights", with_a_wrong_tile, "bf16", "quantize_weights: signal"),
    (casts, "quantize_both", with_a_wrong_tile, "bf16", "forms_of_gradient, tensor 0 of 2: signal"),
    (casts, "transpose_tiles", with_a_wrong_tile, "bf16", "gemm: signal"),
    (casts, "unpack_tiles", with_a_wrong_tile, "bf16", "gemm: signal"),
    (local, "plan_rows", with_a_wrong_tile, "deepspeed", "plan, tensor"),
    (local, "with_zero_row", with_a_wrong_tile, "deepspeed", "dispatch, tensor 0 of 2: signal"),
])
def test_a_wrong_result_of_one_step_is_found(monkeypatch, module, name, change, runs, found):
    """Whatever a step computes between two others is found as well."""
    monkeypatch.setattr(module, name, broken_once(getattr(module, name), change))
    keys = {"transpose_tiles": FROZEN, "unpack_tiles": IN_4_BITS}.get(name, SPREAD)
    one = kind("gpt-oss", **keys)
    if name == "quantize_both":
        one = one._replace(recipe=replace(one.recipe, wgrad="mxfp8", combine_bwd="bf16"))
    verdict = self_check._run(one, CPU)
    assert verdict.runs == runs
    assert re.search(found, verdict.found)


def test_the_check_leaves_no_trace(monkeypatch, recwarn):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)  # random states of others are none of its business
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    self_check._run(kind(recipe="bf16", **CLASSIC), CPU)
    assert torch.equal(torch.rand(3), expected) and not recwarn
    assert not recorded._from_python


def test_verdicts_are_remembered_by_kind_and_release(monkeypatch, tmp_path):
    runs = []
    monkeypatch.setattr(self_check, "_run", lambda kind, device: runs.append(kind) or Verdict("bf16", "broken"))
    one, other = kind(**SPREAD), kind(**CLASSIC)
    for asked in (one, other, one, other):
        assert self_check.check(asked, CPU) == Verdict("bf16", "broken")
    assert runs == [one, other]
    assert self_check.remembered(CPU) == [Verdict("bf16", "broken")] * 2
    monkeypatch.setattr(self_check, "releases", lambda device: {"chip": "none", "triton": "1"})
    assert self_check.remembered(CPU) == []
    self_check.check(one, CPU)
    assert len(runs) == 3
    assert all(path.suffix == ".json" for path in (tmp_path / "verdicts").iterdir())  # nothing half done is left


@pytest.mark.parametrize("text", ["", "null", "\xff", '{"runs": "all"}', "[" * 5000,
                                  '{"runs": ["all"], "found": "", "releases": {}}'])
def test_a_file_without_a_verdict_is_none(monkeypatch, tmp_path, text):
    monkeypatch.setattr(self_check, "_run", lambda kind, device: Verdict("bf16", "broken"))
    self_check.check(kind(**SPREAD), CPU)
    [path] = (tmp_path / "verdicts").iterdir()
    path.write_bytes(text.encode("latin-1"))
    assert self_check.remembered(CPU) == []
    assert self_check.check(kind(**SPREAD), CPU) == Verdict("bf16", "broken") and len(self_check.remembered(CPU)) == 1


def test_the_worst_verdict_counts_and_its_line_names_the_kernel_and_the_releases():
    good, bad = Verdict("bf16", "a"), Verdict("deepspeed", "grouped_mm: wrong")
    assert self_check.worst([Verdict(), bad, good]) == bad and self_check.worst([]) == Verdict()
    line = self_check.line_about(good, CPU)
    assert line == ("mxfp8_moe: WARNING: MoE layers run in bf16, since a kernel is broken here: a. Here: chip none, "
                    "triton 0. Tested with Triton 3.6 to 3.9")
