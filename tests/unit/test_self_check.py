# SPDX-License-Identifier: Apache-2.0
"""The check at first use, on a CPU: each operation then runs twice in plain torch, and a broken one is put in place of
the first. tests/gpu/test_self_check_gpu.py breaks kernels."""

import re
from functools import wraps

import pytest
import torch

from ds_mxfp8_moe.compute import casts, operations, recorded
from ds_mxfp8_moe.compute.operations import operation
from ds_mxfp8_moe.config import MXFP8MoEConfig, resolve
from ds_mxfp8_moe.engine import self_check
from ds_mxfp8_moe.engine.self_check import Kind, Verdict, small
from ds_mxfp8_moe.ffn import expert_math
from tests.support.self_check_cases import CASES, CLASSIC, FORMULAS, FROZEN, SPREAD
from tests.support.slow import slow_except

CPU = torch.device("cpu")


def kind(name="gated", recipe="mxfp8_wgrad_with_hp", block=128, **keys):
    block = {} if recipe == "bf16" else {"scale_block_size": block}
    recipe = resolve(MXFP8MoEConfig(recipe=recipe, **block), "cpu")
    return Kind(small(FORMULAS[name]), recipe, torch.bfloat16, **keys)


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch, tmp_path):
    """Operations on CPUs are compared too, on few tokens."""
    monkeypatch.setattr(self_check, "_on_gpu", bool)
    monkeypatch.setattr(self_check, "WIDE_COPIES", 2)
    monkeypatch.setattr(self_check, "_folder", lambda: tmp_path / "verdicts")
    monkeypatch.setattr(self_check, "releases", lambda device: {"chip": "none", "triton": "0"})


# tests/gpu takes every pair of formula and recipe. Here the first formula has every recipe, the others have MXFP8.
ON_CPU = [case for case in CASES if case.startswith("gated-") or "-mxfp8-" in case]


@pytest.mark.parametrize("case", slow_except(ON_CPU, "gated-mxfp8_wgrad_with_hp-spread", "packed-mxfp8-classic",
                                             "gpt-oss-mxfp8-frozen"))
def test_whole_kernels_pass(case):
    name, recipe, keys = CASES[case]
    assert self_check._run(kind(name, recipe, **keys), CPU) == Verdict()


def broken_once(function, change):
    """An operation whose every second call is right: that in plain torch."""
    calls, plain = [0], function.__wrapped__

    @operation
    @wraps(plain)
    def broken(*args, **kwargs):
        calls[0] += 1
        found = plain(*args, **kwargs)
        return change(found) if calls[0] % 2 else found

    return broken


def with_a_wrong_row(x):
    x = x.clone()
    x[3] *= 2
    return x


def raising(x):
    raise RuntimeError("ptxas failed")


@pytest.mark.parametrize("name, change, runs, found", [
    ("grouped_mm", with_a_wrong_row, "bf16", r"grouped_mm: signal-to-noise ratio \d"),
    ("grouped_mm", lambda x: x * float("nan"), "bf16", "grouped_mm: signal-to-noise ratio nan"),
    ("grouped_mm", raising, "bf16", "RuntimeError: ptxas failed"),
    ("grouped_mm_weights", with_a_wrong_row, "deepspeed", "grouped_mm_weights: signal"),
    ("group_sums", with_a_wrong_row, "deepspeed", "group_sums: signal"),
])
def test_a_broken_operation_is_found(monkeypatch, name, change, runs, found):
    monkeypatch.setattr(expert_math, name, broken_once(getattr(expert_math, name), change))
    verdict = self_check._run(kind("gpt-oss" if name == "group_sums" else "gated"), CPU)
    assert verdict.runs == runs
    assert re.search(found, verdict.found)


@pytest.mark.parametrize("name, keys", [("quantize_weights", SPREAD), ("transpose_tiles", FROZEN)])
def test_a_broken_cast_is_found(monkeypatch, name, keys):
    def change(found):
        data = found.qdata.view(torch.uint8).clone()
        data[0, 5] ^= 0x80  # a row with another sign
        return found.with_parts(data.view(torch.float8_e4m3fn), found.scale_bytes)

    monkeypatch.setattr(casts, name, broken_once(getattr(casts, name), change))
    verdict = self_check._run(kind(**keys), CPU)
    assert verdict.runs == "bf16" and verdict.found.startswith(f"{name}: signal-to-noise")


def test_the_check_leaves_no_trace(monkeypatch, recwarn):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)  # random states of others are none of its business
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    self_check._run(kind(recipe="bf16", **CLASSIC), CPU)
    assert torch.equal(torch.rand(3), expected) and not recwarn
    assert operations._watch is None and not recorded._from_python


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
