# SPDX-License-Identifier: Apache-2.0
"""The check at first use with real kernels: whole ones pass within seconds, broken ones are named and not used."""

import time

import pytest
import torch
import triton
import triton.language as tl

from ds_mxfp8_moe.config import MXFP8MoEConfig, resolve
from ds_mxfp8_moe.engine import self_check
from ds_mxfp8_moe.engine.self_check import Kind, Verdict, small
from ds_mxfp8_moe.ops.triton_kernels import activation, grouped_gemm_hopper, quantize
from ds_mxfp8_moe.ops.triton_kernels.launch import Launched
from tests.support.self_check_cases import CASES, CLASSIC, FORMULAS, SPREAD

GPU = torch.device("cuda")


def kind(name="gated", recipe="mxfp8_wgrad_with_hp", dtype=torch.bfloat16, **keys):
    recipe = resolve(MXFP8MoEConfig(recipe=recipe), "cuda", torch.cuda.get_device_capability())
    return Kind(small(FORMULAS[name]), recipe, dtype, **keys)


@pytest.mark.parametrize("case", CASES)
def test_whole_kernels_pass(case):
    name, recipe, keys = CASES[case]
    assert self_check._run(kind(name, recipe, **keys), GPU) == Verdict()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_whole_kernels_pass_in_other_dtypes(dtype):
    assert self_check._run(kind(dtype=dtype, **SPREAD), GPU) == Verdict()


def test_it_takes_three_seconds_beside_compilation():
    """At most, for a recipe and its fallback. A remembered verdict takes none. Other tests may keep the host busy."""

    def seconds():
        start = time.monotonic()
        self_check._run(kind(**SPREAD), GPU)
        return time.monotonic() - start

    seconds()  # compiles
    assert min(seconds() for _ in range(3)) < 3


@Launched
@triton.jit
def _not_compiling(x_ptr, SIZE: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, SIZE), tl.no_such_function(SIZE))


def test_a_kernel_that_does_not_compile_is_named(monkeypatch):
    def launch(a, b, *args, **kwargs):
        _not_compiling[(1, )](torch.empty(32, device=GPU), SIZE=32)

    monkeypatch.setattr(grouped_gemm_hopper, "grouped_mm_mxfp8", launch)
    verdict = self_check._run(kind(**SPREAD), GPU)
    assert verdict.runs == "bf16" and verdict.found.startswith("kernel _not_compiling does not compile or start")


def with_a_wrong_tile(parts):
    """Of MXParts, or of a result that begins with them or with a plain tensor."""
    first = parts if hasattr(parts, "qdata") or isinstance(parts, torch.Tensor) else parts[0]
    data = getattr(first, "qdata", first)
    data.view(torch.uint8).flatten(0, -2)[:32] ^= 0x80
    return parts


@pytest.mark.parametrize("module, name, found", [
    (quantize, "quantize_weights", "quantize_weights: signal-to-noise ratio"),
    (activation, "activate", "forward, tensor 3 of 5: signal-to-noise ratio"),
    (grouped_gemm_hopper, "grouped_mm_mxfp8", "gemm: signal-to-noise ratio"),
])
def test_a_kernel_that_returns_wrong_numbers_is_named(monkeypatch, module, name, found):
    kernel = getattr(module, name)

    def wrong(*args, **kwargs):
        result = kernel(*args, **kwargs)
        return with_a_wrong_tile(result) if kwargs.get("quantize", True) else result

    monkeypatch.setattr(module, name, wrong)
    verdict = self_check._run(kind(**CLASSIC), GPU)
    assert verdict.runs == "bf16" and verdict.found.startswith(found)
