# SPDX-License-Identifier: Apache-2.0
"""Every kernel, compiled for Hopper and Blackwell as its host function launches it. A kernel that no case launches
fails the first test.

A case calls host functions on CPU tensors, which compiles and runs nothing.
"""

import os
import pkgutil
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib import import_module
from multiprocessing import get_context

import pytest
import torch
import triton
from triton.runtime.jit import JITFunction

from ds_mxfp8_moe.ops.mx_format import MXParts
from tests.support.aot import Launch, launches_for
from tests.support.slow import WIDE

pytestmark = pytest.mark.slow
PACKAGE = "ds_mxfp8_moe.ops.triton_kernels"
HOPPER, BLACKWELL = 90, 100
BOTH = (HOPPER, BLACKWELL)
BF16, F32, BYTE = torch.bfloat16, torch.float32, torch.uint8

T, E, K, P, H, F, W = 64, 8, 4, 4096, 2048, 1024, 4  # as in expert_ffn.py and transport; W ranks


def module(name):
    return import_module(f"{PACKAGE}.{name}")


def mx(*shape, block=32, tiled=False, block_major=False):
    *rows, last = shape
    if tiled:
        rows[-1] //= 128
    scale = torch.empty(*rows, last // block, dtype=BYTE)
    if block_major:
        scale = torch.empty(last // block, *rows, dtype=BYTE).t()
    return MXParts(torch.empty(shape, dtype=torch.float8_e4m3fn), scale, block, tiled)


def ends():
    return torch.empty(E, dtype=torch.int32)


def blackwell_gemms():
    gemm = module("grouped_gemm_blackwell")
    gemm.grouped_mm_mxfp8(mx(P, H), mx(E, F, H), ends(), BF16)
    gemm.grouped_mm_mxfp8(mx(P, H, block=128, block_major=True), mx(E, 160, H, block=128), ends(), F32)
    gemm.grouped_mm_mxfp8(mx(P, H), mx(E, F, H, block=128, tiled=True), ends(), BF16)  # frozen weights
    for dtype in (BF16, F32):
        gemm.grouped_mm_wgrad_mxfp8(mx(F, P, block_major=True), mx(H, P, block=128, block_major=True), ends(), dtype)


def casts():
    cast = module("quantize")
    for block in (32, 128):
        for dtype in (BF16, F32):
            x = torch.empty(P, H, dtype=dtype)
            cast.quantize_rows(x, block, "rceil", True)
            cast.quantize_rows_and_columns(x, block, "floor")
            cast.quantize_columns(x, block, "rceil")
        for rows in (P, P + 128):  # tiles divide the first
            cast.rescale_transposed(mx(rows, H, block=block, block_major=True), "rceil")
        cast.dequantize(mx(P, H, block=block), BF16)
        stack = torch.empty(E * E, P, H, dtype=BF16)
        scattered = [stack[e * e] for e in range(E)]
        for transposed in (False, True):
            cast.quantize_weights([scattered, scattered], block, "rceil", transposed)
    cast.dequantize(mx(E, F, H, block=128, tiled=True), F32)
    cast.quantize_weights([torch.empty(E, F, H, dtype=BF16)], 128, "rceil", True)
    for dtype in (BF16, F32):
        module("pack").pack(torch.empty(E, F, H, dtype=dtype))
    for rows in (F, F + 32):
        module("transpose_tiles").transpose_tiles(mx(E, rows, H, block=128, tiled=True))
        for transposed in (False, True):
            module("unpack").unpack_tiles(*(torch.empty(E, *shape, dtype=BYTE) for shape in (
                (rows, H // 2), (rows, H // 32), (-(-rows // 128), H // 128))), transposed)


def adapters():
    low_rank = module("low_rank")
    for R, block, rank_first in ((8, 32, True), (8, 128, False), (128, 0, True), (128, 128, False)):
        x = mx(P, H, block=block, block_major=True) if block else torch.empty(P, H, dtype=BF16)
        low, y = torch.empty(P, R, dtype=BF16), torch.empty(P, H, dtype=BF16)
        factor = torch.empty(E, R, H, dtype=BF16)
        factor = factor if rank_first else factor.view(E, H, R).transpose(1, 2)
        low_rank.low_rank_rows(x, factor, ends())
        low_rank.add_low_rank(y, low, factor, ends())
        low_rank.low_rank_wgrad(low, x, factor, ends())
    low_rank.low_rank_rows(mx(P, H, block=128), torch.empty(E, 1, H, dtype=BF16), ends(), F32)  # of a bias


def activations():
    ffn = module("activation")
    pre, t, weight = torch.empty(P, 2 * F, dtype=BF16), torch.empty(P, F, dtype=BF16), torch.empty(P)
    bias = torch.empty(E, 2 * F, dtype=BF16)
    oai, clamped = ("swiglu_oai", dict(alpha=1.702, limit=7.0)), ("silu", dict(limit=10.0))
    for block, (activation, constants) in ((32, ("gelu", {})), (128, ("silu", {})), (32, oai), (128, oai),
                                           (32, clamped), (128, clamped)):
        _, kept = ffn.activate(pre, weight, activation, "gate_up", block, keep=True, bias_EG=bias, ends_E=ends(),
                               **constants)
        backward = partial(ffn.activate_backward, t, kept, weight, activation, "gate_up", block, **constants)
        backward(rows=True, plain=True)
        backward(rows=True, columns=True)
    narrow, t_narrow = torch.empty(P, 2 * 160, dtype=BF16), torch.empty(P, 160, dtype=BF16)
    for limit in (None, 10.0):
        _, kept = ffn.activate(narrow, weight, "silu", "gate_up", 128, keep=True, limit=limit)
        ffn.activate_backward(t_narrow, kept, weight, "silu", "gate_up", 128, rows=True, plain=True, limit=limit)
    _, kept = ffn.activate(t, weight, "relu_squared", "mlp", 128, keep=True)
    ffn.activate_backward(t, kept, weight, "relu_squared", "mlp", 128, rows=True, columns=True)
    ffn.activate(t, weight, "gelu_tanh", "mlp", quantize=False)
    ffn.activate(t.float(), weight, "gelu_tanh", "mlp", 128, keep=True)
    ffn.activate_backward(t, t, weight, "relu", "mlp", plain=True)
    ffn.group_sums(t, ends(), weight)
    ffn.add_weighted_bias(t, bias[:, :F].contiguous(), weight, ends())


def exchanges():
    local, permute, unpermute = module("local"), module("permute"), module("unpermute")
    R, S = T * W, T * W
    x, scale, weight = torch.empty(T, H, dtype=BF16), torch.empty(T, H // 32, dtype=BYTE), torch.empty(T, K)
    sent, slot, source = torch.empty(W, T).long(), torch.empty(R, K).long(), torch.empty(P).long()
    y, weight_P = torch.empty(P, H, dtype=BF16), torch.empty(P)
    for block in (0, 32, 128):
        data, scales = (mx(T, H).qdata, scale[:, :H // block]) if block else (x, None)
        permute.pack_rows(data, scales, weight, sent, S, K)
        received = [part if part is None else part.repeat(W, 1) for part in (data.view(BYTE), scales, weight)]
        permute.expand_rows(*received, slot, source)
        answers = unpermute.combine_rows(y, weight_P, slot, BF16, block, "rceil")
        unpermute.sum_rows(answers, sent, H, K, K, BF16, block)
        sums = unpermute.combine_rows(y, weight_P, slot, F32, 0, "rceil")
        unpermute.pass_on_rows(sums, sent, H, K, K, BF16, block, "rceil")
        local.dispatch_rows(x, weight, slot.int(), source.int(), block, "rceil")
        local.combine_rows(y, weight_P, slot.int(), BF16, block, "rceil")
    local.plan_rows(slot, E, P)


def hopper_gemms():
    gemm, wgrad = module("grouped_gemm_hopper"), module("grouped_wgrad_hopper")
    wide, narrow = 128 * 132, 128
    for rows in (wide, narrow):
        gemm.grouped_mm_mxfp8(mx(rows, H, block=128), mx(E, F, H, block=128, tiled=True), ends(), BF16)
    gemm.grouped_mm_mxfp8(mx(wide, H, block=128), mx(E, F, H, block=128, tiled=True), ends(), torch.float32)
    bf16, mxfp8_rows = wgrad.grouped_mm_wgrad_bf16, module("grouped_wgrad_rows_hopper").grouped_mm_wgrad_mxfp8_rows
    plain = torch.empty(P, F, dtype=BF16), torch.empty(P, H, dtype=BF16)
    rows = mx(P, F, block=128), mx(P, H, block=128, block_major=True)

    def added(factor):
        return dict(splits=2, goal=wgrad.Goal(torch.empty(3 * E, F // 2, H, dtype=BF16), 2 * E, True, factor))

    for wgrad_gemm, operands in ((bf16, plain), (bf16, (plain[0], mx(P, H))), (bf16, rows), (mxfp8_rows, rows)):
        wgrad_gemm(*operands, ends(), BF16)
        wgrad_gemm(*operands, ends(), BF16, **added(0.5))
    for wgrad_gemm, operands in ((bf16, plain), (mxfp8_rows, rows)):
        wgrad_gemm(*operands, ends(), F32)
        wgrad_gemm(*operands, ends(), BF16, **added(None))


def hopper_bf16_gemms():
    gemm = module("grouped_gemm_bf16_hopper")
    stacks = torch.empty(2, E, H, 2 * H, dtype=BF16)
    scattered = [[stacks[i, e * e % E] for e in range(E)] for i in range(2)]
    gemm.grouped_mm_bf16(torch.empty(128 * (E + 1), 2 * H, dtype=BF16), stacks[:1].unbind(0), ends(), BF16)  # narrow
    # Narrow, a tile for an expert; wide, for few rows; wide, for many.
    for rows, parts, dtype in ((128 * E, scattered, BF16), (256 * E, stacks.unbind(0), BF16),
                               (128 * 132, scattered, BF16), (128 * 132, stacks.unbind(0), torch.float32)):
        gemm.grouped_mm_bf16(torch.empty(rows, 2 * H, dtype=BF16), parts, ends(), dtype)
        gemm.grouped_mm_bf16(torch.empty(rows, 2 * H, dtype=BF16), parts, ends(), dtype, transposed=True)


def merges():
    merge, seeds = module("merge"), torch.empty(E, 2, dtype=torch.int32)
    for dtype in (BF16, F32):
        low = torch.empty(E, 16, H, dtype=dtype), torch.empty(E, F, 16, dtype=dtype)
        merge.merge_tiles(mx(E, F, H, block=128, tiled=True), *low, seeds)
        merge.merge_tiles(mx(E, F, H, block=128, tiled=True), *low)
        merge.merge_mxfp4(torch.empty(E, F, H // 2, dtype=BYTE), torch.empty(E, F, H // 32, dtype=BYTE), *low)
        merge.merge_plain(torch.empty(E, F, H, dtype=dtype), *low, seeds)


CASES = {
    "activations": (activations, BOTH),
    "adapters": (adapters, BOTH),
    "blackwell_gemms": (blackwell_gemms, (BLACKWELL, )),
    "casts": (casts, BOTH),
    "exchanges": (exchanges, BOTH),
    "merges": (merges, BOTH),
    "hopper_bf16_gemms": (hopper_bf16_gemms, (HOPPER, )),
    "hopper_gemms": (hopper_gemms, (HOPPER, )),
}


def compile_case(name: str, arch: int) -> list[Launch]:
    with launches_for(arch) as launches:
        CASES[name][0]()
    return launches


def _start(path):
    sys.path[:] = path
    os.environ.pop("TRITON_INTERPRET", None)


def never_launched(launched: set) -> set:
    """The kernels of the package that are neither in `launched` nor called by one that is."""
    modules = [module(m.name) for m in pkgutil.iter_modules(import_module(PACKAGE).__path__)]
    kernels = {}
    for m in modules:
        for value in vars(m).values():
            while not isinstance(value, JITFunction) and hasattr(value, "fn"):  # under autotune or heuristics
                value = value.fn
            if isinstance(value, JITFunction):
                kernels[f"{value.module}.{value.fn.__name__}"] = value
    missing, known = set(kernels), list(launched)
    while known:
        name = known.pop()
        if name in missing:
            missing.remove(name)
            fn = kernels[name].fn
            called = (fn.__globals__.get(word) for word in fn.__code__.co_names)
            known += [f"{f.module}.{f.fn.__name__}" for f in called if isinstance(f, JITFunction)]
    return missing


@pytest.fixture(scope="module", params=["each kernel", pytest.param("each kernel for both", marks=WIDE)])
def compiled(request) -> Iterator[tuple]:
    """Launches by case and architecture, and the kernels that have none.

    Compiled in processes of their own, which the interpreter has never seen. CI compiles kernels that run on both
    architectures for Hopper only with the newest Triton, and for both with the oldest.
    """
    for_both = request.param == "each kernel for both"
    with ProcessPoolExecutor(2, get_context("spawn"), _start, (sys.path, )) as pool:
        jobs = {(name, arch): pool.submit(compile_case, name, arch) for name, (_, archs) in CASES.items()
                for arch in (archs if for_both else archs[:1])}
        launches = {case: job.result() for case, job in jobs.items()}
        names = {launch.kernel for case in launches.values() for launch in case}
        yield launches, pool.submit(never_launched, names).result()


@pytest.fixture(scope="module")
def launches(compiled) -> list[Launch]:
    return [launch for case in compiled[0].values() for launch in case]


def test_every_kernel_has_a_case(compiled):
    _, missing = compiled
    assert not missing


def test_no_kernel_is_compiled_twice_for_a_cache():
    """Triton's name of a kernel in its cache holds the constexpr globals of functions that were named before it: with
    such globals it depends on what ran first, and a new process compiles what waits in the cache."""
    for m in pkgutil.iter_modules(import_module(PACKAGE).__path__):
        for name, value in vars(module(m.name)).items():
            assert not isinstance(value, triton.language.constexpr), f"{m.name}.{name}: pass it, or make it local"


def test_blackwell_multiplies_natively(launches):
    gemms = [launch for launch in launches if "blackwell._grouped_mm" in launch.kernel]
    assert gemms
    for launch in gemms:
        multiplications = re.findall(r"tcgen05\.mma[.\w:]*", launch.ptx)
        assert multiplications and all("block_scale" in m for m in multiplications)
        assert "tcgen05.cp" in launch.ptx  # scales go from shared memory to tensor memory past the registers


def test_hopper_multiplies_natively(launches):
    gemms = [launch for launch in launches if "_hopper." in launch.kernel]
    assert gemms
    for launch in gemms:
        operands = "bf16.bf16" if "bf16" in launch.kernel else "e4m3.e4m3"
        multiplications = re.findall(r"wgmma\.mma_async[.\w]*", launch.ptx)
        assert multiplications and all(m.endswith(f"f32.{operands}") for m in multiplications)


def test_shared_memory_is_read_before_it_is_brought_again(launches):
    """A TMA load does not wait for plain reads, so they are fenced before a barrier says that their place is empty.

    The race is too rare for a test on a GPU: one call of 25,000.
    """
    readers = set()
    for launch in (launch for launch in launches if "grouped_wgrad" in launch.kernel):
        unfenced = False
        for line in launch.ptx.splitlines():
            if re.search(r"ld\.shared\.v\d", line):
                readers.add(launch.kernel)
                unfenced = True
            elif "fence.proxy.async.shared" in line:
                unfenced = False
            assert not (unfenced and "mbarrier.arrive.shared" in line), launch.kernel
    assert len(readers) == 2  # of bf16 and of MXFP8


def test_memory_is_moved_by_16_bytes(launches):
    """Of what is read or what is written, whichever is wider. A few numbers a row, and a table of pointers, are left
    out."""
    rooms = r"\.(quantize|transpose_tiles|unpack|activation|permute|unpermute|local)\."
    moving = [launch for launch in launches if re.search(rooms, launch.kernel)
              and not launch.kernel.endswith(("_sum_shares_kernel", "_places_kernel", "_count_kernel",
                                              "_scan_kernel", "_place_kernel"))]
    assert moving
    narrow = [launch for launch in moving if not re.search(r"(ld|st)\.global[.\w]*\.(v4\.b32|v2\.b64)", launch.ptx)]
    # 8 in rows and columns of 128, where a warp's are a row of the tile.
    assert sorted((launch.kernel.rpartition(".")[2], launch.arch) for launch in narrow) == [
        ("_quantize_matrix_kernel", arch) for arch in sorted({launch.arch for launch in moving})]
    assert all(re.search(r"ld\.global[.\w]*\.v2\.b32", launch.ptx) for launch in narrow)


def test_casts_to_e4m3_are_the_hardware_s(launches):
    names = {launch.kernel.rpartition(".")[2] for launch in launches if "cvt.rn.satfinite.e4m3x2.f32" in launch.ptx}
    assert names >= {"_quantize_rows_kernel", "_quantize_matrix_kernel", "_rescale_kernel", "_forward_kernel",
                     "_backward_kernel", "_combine_kernel"}


def test_subnormals_are_not_flushed(launches):
    """But for what exp2 and rsqrt flush, which is nothing beside 1."""
    of_values = [launch for launch in launches if re.search(r"\.(quantize|activation|pack|unpack)\.", launch.kernel)]
    assert not [launch.kernel for launch in of_values
                if ".ftz" in re.sub(r"(ex2|rsqrt)\.approx\.ftz", "", launch.ptx)]


# Most bytes of a thread's stack with Triton 3.6, and with later releases, whose LLVM and ptxas take more registers:
# for clamped activations, and for the cast to rows and columns at once. Hopper's GEMMs have two
# warpgroups that share all registers. Triton 3.6 spills most where the FP8 GEMM's results are float32: in bf16 24; and
# where adapters are merged into MXFP4. Later releases spill nothing there.
STACK_BYTES = {"grouped_gemm_hopper.": (224, 64), "_hopper.": (160, 160), "activation._backward_kernel": (32, 208),
               "quantize._quantize_matrix": (0, 48), "merge._merge_mxfp4": (688, 0), "pack._pack": (8, 0)}


def test_few_spills(launches):
    column, spilled = 0 if triton.__version__.startswith("3.6.") else 1, []
    for launch in launches:
        limit = next((most[column] for kernel, most in STACK_BYTES.items() if kernel in launch.kernel), 0)
        if launch.stack_bytes > limit:
            spilled.append((launch.kernel, launch.arch, launch.registers, launch.stack_bytes))
    assert not spilled
