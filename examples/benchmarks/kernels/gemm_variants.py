# SPDX-License-Identifier: Apache-2.0
"""TEMPORARY: decides between variants of Hopper's FP8 GEMM kernels. It is deleted with the variants that lose.

Every variant first runs in a process of its own, on small shapes, and must give the bits of today's kernel. A kernel
that does not end within some seconds is reported as hung, and left out. What passes is timed on twelve forward shapes
in turns, beside DeepGEMM (if it can be imported), our bf16 and torch. Then a few contenders run alone for more than a
second, with the clock and the power sampled. Weight gradients likewise. From Triton 3.9 on also gemm_multicast.py.

    python examples/benchmarks/kernels/gemm_variants.py                                     # all of it
    python examples/benchmarks/kernels/gemm_variants.py --stages check                      # bits and hangs alone
    python examples/benchmarks/kernels/gemm_variants.py --stages wgrad --variants default   # weight gradients
    python examples/benchmarks/kernels/gemm_variants.py --stages time --variants "192 tma"  # one, beside the default

DeepGEMM (wheels sgl-deep-gemm 0.1.3 and apache-tvm-ffi 0.1.9) is installed, or lies unpacked in the folder $DG. What
is named by --variants is always checked first. `clocks` needs `time`. The result is a file of JSON, $OUT or
runs/gemm_variants.json, and tables on the screen.
"""

import argparse
import ctypes
import json
import math
import os
import statistics
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import triton

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
if "ds_mxfp8_moe" not in sys.modules:  # without its __init__, whose imports take seconds in each process
    sys.modules["ds_mxfp8_moe"] = types.ModuleType("ds_mxfp8_moe")
    sys.modules["ds_mxfp8_moe"].__path__ = [str(Path(__file__).resolve().parents[3] / "ds_mxfp8_moe")]

from ds_mxfp8_moe.compute import casts
from ds_mxfp8_moe.compute import grouped_gemm as ours
from ds_mxfp8_moe.ops.mx_format import MXParts
from ds_mxfp8_moe.ops.triton_kernels.grouped_gemm_hopper import Variant, grouped_mm_with
from ds_mxfp8_moe.ops.triton_kernels.grouped_wgrad_rows_hopper import grouped_mm_wgrad_mxfp8_rows
from kernels import gemm_multicast

BF16, F32, BYTE = torch.bfloat16, torch.float32, torch.uint8
DEFAULT = "default"
VARIANTS = {
    DEFAULT: Variant(),
    "lean": Variant(LEAN=True),
    "boxes": Variant(WIDE_BOXES=True),
    "tma": Variant(SCALES=1),
    "tma 4 stages": Variant(STAGES=4, BUFFERS=1, SCALES=1),
    "tma 4 stages boxes": Variant(STAGES=4, BUFFERS=1, SCALES=1, WIDE_BOXES=True),
    "tma 4 stages boxes lean": Variant(STAGES=4, BUFFERS=1, SCALES=1, WIDE_BOXES=True, LEAN=True),
    "load": Variant(SCALES=2),
    "load 4 stages": Variant(STAGES=4, BUFFERS=1, SCALES=2),
    "load 4 stages boxes": Variant(STAGES=4, BUFFERS=1, SCALES=2, WIDE_BOXES=True),
    "load 4 stages boxes lean": Variant(STAGES=4, BUFFERS=1, SCALES=2, WIDE_BOXES=True, LEAN=True),
    "192": Variant(192, STAGES=4),
    "192 tma": Variant(192, STAGES=4, SCALES=1),
    "192 tma boxes": Variant(192, STAGES=4, SCALES=1, WIDE_BOXES=True),
    "192 tma boxes lean": Variant(192, STAGES=4, SCALES=1, WIDE_BOXES=True, LEAN=True),
    "192 load": Variant(192, STAGES=4, SCALES=2),
    "192 load boxes lean": Variant(192, STAGES=4, SCALES=2, WIDE_BOXES=True, LEAN=True),
    "128 tma": Variant(128, STAGES=6, BUFFERS=1, SCALES=1),
    "128 load": Variant(128, STAGES=6, BUFFERS=1, SCALES=2),
}
VARIANTS = {name: how._replace(BUFFERS=1) if how.TILE_N == 192 else how for name, how in VARIANTS.items()}
if gemm_multicast.SUPPORTED:
    VARIANTS |= {f"multicast {share} {tile_n}": (share, tile_n) for share in "ab" for tile_n in (192, 256)}
WGRAD = "wgrad rows"  # a name among those that are checked
# Experts, rows of each, columns, contraction.
SHAPES = [(16, 2048, 1536, 2048), (16, 2048, 2048, 768), (16, 8192, 1536, 2048), (16, 8192, 2048, 768),
          (128, 1024, 1536, 2048), (8, 3072, 2816, 2048), (8, 3072, 2048, 1408), (64, 1536, 2816, 2048),
          (8, 4096, 4096, 7168), (8, 4096, 7168, 2048), (16, 4096, 3072, 4096), (32, 1024, 4096, 7168)]
CLOCK_SHAPES = [(16, 8192, 1536, 2048), (16, 4096, 3072, 4096), (16, 8192, 2048, 768)]
WGRAD_SHAPES = [(16, 2048, 1536, 2048), (16, 2048, 2048, 768), (16, 8192, 1536, 2048), (8, 4096, 4096, 7168),
                (8, 4096, 7168, 2048), (16, 4096, 3072, 4096), (32, 1024, 4096, 7168)]
# Rows of each expert, rows past the last one, columns, contraction. The smallest first. Columns hold every way in
# which tiles of 192 and 256 can end: in odd and in even tiles, in the first and in the second piece.
CHECKS = [((128, 0), 0, 128, 128), ((0, 128), 128, 32, 160), ((0, 256, 128, 0), 128, 160, 96),
          ((256, 128), 0, 192, 512), ((128, 384), 0, 224, 1408), ((0, 0, 640, 0), 128, 256, 768),
          ((0, 0), 256, 320, 256), ((128, 0), 0, 352, 640), ((256, 256, 0, 128), 384, 384, 896),
          ((384, 128), 0, 448, 2048), ((128, ) * 3, 0, 544, 768), ((128, ) * 16, 0, 576, 384),
          ((128, 0) * 32, 128, 416, 640), ((0, 128) * 64, 0, 736, 256),
          ((2560, 0, 5120, 128, 6400, 1152, 3072, 2048), 256, 1536, 1408), ((8192, 8192), 0, 2816, 2048)]
WGRAD_CHECKS = [CHECKS[i] for i in (0, 2, 5, 8, 14)]  # few, since that kernel is compiled anew for many sizes
HUNG = 3  # a process' exit status
BIASED_SCALES = (0, 1, 60, 100, 120, 126, 127, 128, 130, 150, 200, 254)


def multiply(name: str, a: MXParts, b: MXParts, ends: torch.Tensor, out: torch.Tensor) -> None:
    how = VARIANTS[name]
    if isinstance(how, Variant):
        grouped_mm_with(how, a, b, ends, out)
    else:
        gemm_multicast.grouped_mm_multicast(*how, a, b, ends, out)


# ---- operands -------------------------------------------------------------------------------------------------------


def wait(what: str, seconds: float = 10) -> None:
    """Waits for the GPU. A kernel that does not end ends this process."""
    event, limit = torch.cuda.Event(), time.time() + seconds
    event.record()
    while not event.query():
        if time.time() > limit:
            print(json.dumps({"hung": what}), flush=True)
            os._exit(HUNG)
        time.sleep(0.0005)


def random_data(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Any e4m3 value but NaN."""
    data = torch.randint(0, 256, shape, dtype=BYTE, device="cuda", generator=generator)
    return torch.where(data & 0x7F == 0x7F, 0x3B, data).view(torch.float8_e4m3fn)


def random_scale(generator: torch.Generator, special: bool, *shape: int) -> torch.Tensor:
    """Bytes around 1, or also the smallest, the largest and NaN."""
    scale = torch.randint(118, 134, shape, dtype=BYTE, device="cuda", generator=generator)
    if special:
        choice = torch.randint(0, 64, shape, device="cuda", generator=generator)
        table = torch.tensor([*BIASED_SCALES, 255], dtype=BYTE, device="cuda")
        scale = torch.where(choice < len(table), table[choice.clamp(max=len(table) - 1)], scale)
    return scale


def random_rows(generator: torch.Generator, rows: int, columns: int, special: bool) -> MXParts:
    scale = random_scale(generator, special, -(-columns // 128), rows)
    return MXParts(random_data(generator, rows, columns), scale.t(), 128)


def case_of(sizes: tuple, past: int) -> tuple[int, torch.Tensor]:
    ends = torch.tensor(sizes).cumsum(0).to(torch.int32)
    return int(ends[-1]) + past, ends.cuda()


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Equal bits, and NaN where the other is NaN."""
    kind = torch.int16 if x.element_size() == 2 else torch.int32
    return bool(((x.view(kind) == y.view(kind)) | (x.isnan() & y.isnan())).all())


def sqnr_db(expected: torch.Tensor, found: torch.Tensor) -> float:
    expected, found = expected.float(), found.float()
    return round(20 * math.log10(expected.norm() / (expected - found).norm().clamp_min(1e-30)), 2)


# ---- check ----------------------------------------------------------------------------------------------------------


def check_forward(name: str) -> list[str]:
    """Cases with other bits than today's kernel."""
    wrong = []
    for i, (sizes, past, N, K) in enumerate(CHECKS):
        generator = torch.Generator("cuda").manual_seed(i)
        (P, ends), E = case_of(sizes, past), len(sizes)
        for special in (False, True):
            a = random_rows(generator, P, K, special)
            scale = random_scale(generator, special, E, -(-N // 128), -(-K // 128))
            b = MXParts(random_data(generator, E, N, K), scale, 128, True)
            expected, out = (torch.full((P, N), float("nan"), dtype=BF16, device="cuda") for _ in range(2))
            multiply(DEFAULT, a, b, ends, expected)
            wait(f"{DEFAULT} {sizes} {N} {K}")
            for _ in range(1 if P < 4096 else 5):
                out.fill_(float("nan"))
                multiply(name, a, b, ends, out)
                wait(f"{sizes} {N} {K}")
                if not same_bits(out, expected):
                    different = (out.view(torch.int16) != expected.view(torch.int16)).nonzero()
                    wrong.append(f"{sizes} {past} {N} {K} special={special}: {len(different)} values, first at "
                                 f"{different[0].tolist()}, last at {different[-1].tolist()}")
                    break
    return wrong


def check_wgrad() -> list[str]:
    wrong = []
    for i, (sizes, past, N, K) in enumerate(WGRAD_CHECKS):
        generator = torch.Generator("cuda").manual_seed(i)
        P, ends = case_of(sizes, past)
        for special in (False, True):
            g, a = random_rows(generator, P, N, special), random_rows(generator, P, K, special)
            for dtype in (BF16, F32) if i in (1, 4) else (BF16, ):
                expected = grouped_mm_wgrad_mxfp8_rows(g, a, ends, dtype)
                wait(f"today's {sizes} {N} {K}")
                for _ in range(1 if P < 4096 else 5):
                    out = grouped_mm_wgrad_mxfp8_rows(g, a, ends, dtype, scales=3)
                    wait(f"{sizes} {N} {K}")
                    if not same_bits(out, expected):
                        wrong.append(f"{sizes} {past} {N} {K} {dtype} special={special}")
                        break
    return wrong


def child_check(name: str) -> None:
    start = time.time()
    wrong = check_wgrad() if name == WGRAD else check_forward(name)
    print(json.dumps({"wrong": wrong, "seconds": round(time.time() - start, 1)}), flush=True)


# ---- contenders -----------------------------------------------------------------------------------------------------


def deep_gemm():
    """The package, or None."""
    if "DG" in os.environ:
        sys.path.insert(0, os.environ["DG"])
    for name in ("libnvrtc.so.13", "libcublasLt.so.13", "libcublas.so.13"):
        for path in list(Path(torch.__file__).parents[1].glob(f"nvidia/**/{name}"))[:1]:
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    try:
        import deep_gemm as package
        return package
    except Exception as error:  # whatever keeps it from loading is no fault of ours
        print(f"no DeepGEMM: {error!r}", file=sys.stderr)
        return None


def as_float(byte: torch.Tensor) -> torch.Tensor:
    return (byte.to(torch.int32) << 23).view(F32)


def forward_contenders(shape: tuple, package, names: list[str]) -> tuple[dict[str, Callable], dict[str, torch.Tensor]]:
    """Functions that each multiply once, and where they write (those that write always into the same memory)."""
    E, M, N, K = shape
    P = E * M
    x = torch.randn(P, K, device="cuda", dtype=BF16)
    w = torch.randn(E, N, K, device="cuda", dtype=BF16) / K**0.5
    ends = torch.arange(M, P + 1, M, device="cuda", dtype=torch.int32)
    mx_x = casts.quantize(x, 128, "rceil", scale_k_major=True).parts
    mx_w = casts.quantize_weights([w], 128, "rceil", transposed=False).parts
    found, outs = {}, {}

    def add(name):
        out = outs[name] = torch.full((P, N), float("nan"), dtype=BF16, device="cuda")
        found[name] = lambda: multiply(name, mx_x, mx_w, ends, out)

    for name in names:
        add(name)
    if package is not None:
        a_scale = as_float(mx_x.scale_bytes).contiguous()
        if hasattr(package, "get_mn_major_tma_aligned_tensor"):
            a_scale = package.get_mn_major_tma_aligned_tensor(a_scale)
        b_scale = as_float(mx_w.scale_bytes).contiguous()
        group = torch.arange(E, device="cuda", dtype=torch.int32).repeat_interleave(M)
        out = outs["DeepGEMM"] = torch.empty(P, N, device="cuda", dtype=BF16)
        found["DeepGEMM"] = lambda: package.m_grouped_fp8_fp4_gemm_nt_contiguous(
            (mx_x.qdata, a_scale), (mx_w.qdata, b_scale), out, group, disable_ue8m0_cast=True)
    found["bf16, ours"] = lambda: ours.grouped_mm(x, w, ends)
    found["bf16, torch"] = lambda: torch._grouped_mm(x, w.transpose(1, 2), offs=ends)
    return found, outs


def wgrad_contenders(shape: tuple) -> dict[str, Callable]:
    E, M, N, K = shape
    P = E * M
    g, x = (torch.randn(P, columns, device="cuda", dtype=BF16) for columns in (N, K))
    ends = torch.arange(M, P + 1, M, device="cuda", dtype=torch.int32)
    mx_g, mx_x = (casts.quantize(rows, 128, "rceil", scale_k_major=True) for rows in (g, x))
    columns_g, columns_x = (casts.rescale_columns(rows, "rceil") for rows in (mx_g, mx_x))
    return {
        "rows": lambda: grouped_mm_wgrad_mxfp8_rows(mx_g.parts, mx_x.parts, ends, BF16),
        "rows, consumers' scales": lambda: grouped_mm_wgrad_mxfp8_rows(mx_g.parts, mx_x.parts, ends, BF16, scales=3),
        "columns": lambda: ours.grouped_mm_wgrad(columns_g, columns_x, ends, BF16),
        "bf16 from MXFP8 rows": lambda: ours.grouped_mm_wgrad_rows(mx_g, mx_x, ends, BF16),
        "bf16, ours": lambda: ours.grouped_mm_wgrad(g, x, ends),
        "bf16, torch": lambda: torch._grouped_mm(g.t(), x, offs=ends),
    }


def child_warm(index: int) -> None:
    """Compiles what is not ours to check, for one shape."""
    shape = SHAPES[index]
    for run in forward_contenders(shape, deep_gemm(), [])[0].values():
        run()
    if shape in WGRAD_SHAPES:
        torch.cuda.empty_cache()
        for run in wgrad_contenders(shape).values():
            run()
    torch.cuda.synchronize()
    print("{}", flush=True)


# ---- time -----------------------------------------------------------------------------------------------------------


def timed_ms(run: Callable, times: int) -> float:
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(times):
        run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / times


def in_turns(runs: dict[str, Callable], rounds: int = 7, burst_ms: float = 5) -> dict[str, list[float]]:
    """Milliseconds of each, burst by burst in turns."""
    one = max(timed_ms(run, 3) for run in runs.values())
    times = max(2, round(burst_ms / one))
    found = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            found[name].append(timed_ms(run, times))
    return found


class Sampler:
    """The clock in MHz and the power in W, some 20 times a second, as the driver's library tells them."""

    def __init__(self):
        self.samples, self.running = [], True
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        try:
            nvml = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            return
        gpu, clock, power = ctypes.c_void_p(), ctypes.c_uint(), ctypes.c_uint()
        nvml.nvmlInit_v2()
        nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(gpu))
        while self.running:
            nvml.nvmlDeviceGetClockInfo(gpu, 1, ctypes.byref(clock))  # 1: that of multiprocessors
            nvml.nvmlDeviceGetPowerUsage(gpu, ctypes.byref(power))
            self.samples.append((time.time(), clock.value, power.value / 1000))
            time.sleep(0.05)

    def since(self, start: float) -> dict:
        inside = [sample for sample in self.samples if sample[0] >= start]
        if not inside:
            return {}
        _, clock, power = zip(*inside, strict=True)
        return {"mhz": round(statistics.mean(clock)), "least_mhz": min(clock), "watts": round(statistics.mean(power))}


def run_alone(run: Callable, sampler: Sampler, seconds: float = 1.2) -> dict:
    """A burst after idling, then a long run of which the last two thirds count."""
    time.sleep(0.3)
    burst = statistics.median(timed_ms(run, 1) for _ in range(15))
    times, start, long = max(1, round(20 / burst)), time.time(), []
    while time.time() < start + seconds:
        now = time.time()
        long.append((now, timed_ms(run, times)))
    late = start + seconds / 3
    return {"burst_ms": burst, "long_ms": statistics.median(ms for at, ms in long if at >= late),
            **sampler.since(late)}


def first_contact(runs: dict[str, Callable], what: str) -> None:
    for name, run in runs.items():
        run()
        wait(f"{name}: {what}")


def child_time(out: Path, names: list[str], stages: list[str], budget_s: float) -> None:
    """Times what passed, and writes the result after each shape."""
    result = json.loads(out.read_text())
    start, package = time.time(), deep_gemm()

    def store():
        result["seconds"]["measuring"] = round(time.time() - start, 1)
        out.write_text(json.dumps(result, indent=1))

    for shape in SHAPES if "time" in stages else ():
        if time.time() - start > budget_s:
            break
        runs, outs = forward_contenders(shape, package, names)
        first_contact(runs, str(shape))
        bits = {name: same_bits(outs[name], outs[DEFAULT]) for name in names}
        plain = runs["bf16, torch"]()
        result["forward"].append({
            "shape": shape, "ms": in_turns(runs), "bits": bits,
            "sqnr_db": {name: sqnr_db(plain, outs[name]) for name in (DEFAULT, "DeepGEMM") if name in outs}})
        store()
        del runs, outs, plain
    if "clocks" in stages and result["forward"]:
        sampler, means = Sampler(), over(result, DEFAULT)
        best = sorted((name for name in names if name != DEFAULT), key=lambda name: -means[name])[:3]
        for shape in CLOCK_SHAPES:
            runs, _ = forward_contenders(shape, package, [DEFAULT, *best])
            for name, run in runs.items():
                if name != "bf16, torch" and time.time() - start < budget_s:
                    result["clocks"].append({"shape": shape, "name": name, **run_alone(run, sampler)})
            store()
            del runs
        sampler.running = False
    for shape in WGRAD_SHAPES if "wgrad" in stages else ():
        runs = wgrad_contenders(shape)
        first_contact(runs, f"wgrad {shape}")
        bits = same_bits(runs["rows"](), runs["rows, consumers' scales"]())
        result["wgrad"].append({"shape": shape, "ms": in_turns(runs, rounds=5), "bits": bits})
        store()
        del runs
    store()


# ---- tables ---------------------------------------------------------------------------------------------------------


def medians(row: dict) -> dict[str, float]:
    return {name: statistics.median(ms) for name, ms in row["ms"].items()}


def over(result: dict, baseline: str, kind: str = "forward") -> dict[str, float]:
    """The geometric mean over the shapes of each contender's speed over the baseline's."""
    ratios = {}
    for row in result[kind]:
        ms = medians(row)
        for name in ms:
            if baseline in ms:
                ratios.setdefault(name, []).append(ms[baseline] / ms[name])
    return {name: statistics.geometric_mean(found) for name, found in ratios.items()}


def show(result: dict) -> None:
    for name, found in result["check"].items():
        if found.get("wrong") != []:
            print(f"NOT USED {name}: {str(found)[:300]}")
    if result["forward"]:
        to_default, to_dg = over(result, DEFAULT), over(result, "DeepGEMM")
        print("\nforward, TFLOP/s\n" + f"{'shape':24}{'default':>8}{'DeepGEMM':>9}{'bf16':>6}{'best':>6}"
              f"{'/default':>9}{'/DG':>6}  which")
        for row in result["forward"]:
            ms, (E, M, N, K) = medians(row), row["shape"]
            rate = {name: 2 * E * M * N * K / value / 1e9 for name, value in ms.items()}
            best = max((name for name in rate if name in VARIANTS), key=rate.get)
            dg = rate.get("DeepGEMM", float("nan"))
            bad = [name for name, same in row["bits"].items() if not same]
            print(f"{E} x {M} x {N} x {K}".ljust(24) + f"{rate[DEFAULT]:8.0f}{dg:9.0f}"
                  f"{rate['bf16, ours']:6.0f}{rate[best]:6.0f}{rate[best] / rate[DEFAULT]:9.3f}{rate[best] / dg:6.2f}"
                  f"  {best}" + (f"  OTHER BITS: {bad}" if bad else ""))
        print(f"\n{'over all shapes':28}{'/default':>9}{'/DG':>7}  /default by shape, in the order above")
        for name in sorted(to_default, key=to_default.get, reverse=True):
            by_shape = " ".join(f"{medians(row)[DEFAULT] / medians(row)[name]:.2f}" for row in result["forward"])
            print(f"{name:28}{to_default[name]:9.3f}{to_dg.get(name, float('nan')):7.3f}  {by_shape}")
    if result["clocks"]:
        print("\nalone: ms in a burst after idling, ms in a long run, MHz, W")
        for row in result["clocks"]:
            print(f"{' x '.join(map(str, row['shape'])):24}{row['name']:28}{row['burst_ms']:8.4f}{row['long_ms']:8.4f}"
                  f"{row.get('mhz', 0):6}{row.get('watts', 0):5}")
    if result["wgrad"]:
        names = list(result["wgrad"][0]["ms"])
        print("\nweight gradients, TFLOP/s\n" + " " * 24 + " | ".join(names))
        for row in result["wgrad"]:
            E, M, N, K = row["shape"]
            rates = [2 * E * M * N * K / value / 1e9 for value in medians(row).values()]
            print(f"{E} x {M} x {N} x {K}".ljust(24) + " | ".join(f"{rate:.0f}".rjust(min(len(name), 6)) for rate, name
                                                                  in zip(rates, names, strict=True))
                  + ("" if row["bits"] else "  OTHER BITS"))
        print("over rows: " + ", ".join(f"{name} {mean:.3f}" for name, mean in over(result, "rows", "wgrad").items()))
    print("seconds:", result["seconds"])


# ---- command line ---------------------------------------------------------------------------------------------------


def child(*args: str, timeout_s: float) -> tuple[int, str, str]:
    """Runs this file in a process of its own: exit status, stdout and the end of stderr."""
    try:
        done = subprocess.run([sys.executable, __file__, "--child", *args], capture_output=True, text=True,
                              timeout=timeout_s)
        return done.returncode, done.stdout, done.stderr[-2000:]
    except subprocess.TimeoutExpired:
        return HUNG, json.dumps({"hung": f"not done within {timeout_s} s"}), ""


def checked(name: str) -> dict:
    """What `check` found: {"wrong": []} if all is well."""
    status, printed, errors = child("check", name, timeout_s=180)
    try:
        found = json.loads(printed.strip().splitlines()[-1])
    except (IndexError, ValueError):
        found = {}
    return found if status in (0, HUNG) else {"failed": errors[-600:]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", nargs="+", default=["check", "time", "clocks", "wgrad"],
                        choices=["check", "time", "clocks", "wgrad"])
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), help="only these, and the default")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "runs")) / "gemm_variants.json")
    parser.add_argument("--budget", type=float, default=75, help="seconds after which forward shapes are left out")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        kind, *rest = args.child
        if kind == "check":
            child_check(*rest)
        elif kind == "warm":
            child_warm(int(rest[0]))
        else:
            out, names, stages, budget = rest
            child_time(Path(out), names.split(","), stages.split(","), float(budget))
        return
    start = time.time()
    names = list(dict.fromkeys([DEFAULT, *args.variants]))
    to_check = [WGRAD, *names]  # the one that compiles longest comes first
    measured = [stage for stage in args.stages if stage != "check"]
    with ThreadPoolExecutor(max(4, os.cpu_count() or 4)) as pool:
        checks = [pool.submit(checked, name) for name in to_check]
        warm = [pool.submit(child, "warm", str(i), timeout_s=150) for i in range(len(SHAPES) if measured else 0)]
        found = {name: job.result() for name, job in zip(to_check, checks, strict=True)}
        for i, job in enumerate(warm):
            if job.result()[0]:
                print(f"warm-up of {SHAPES[i]}: {job.result()[2][-400:]}", file=sys.stderr)
    result = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
              "variants": {name: str(VARIANTS[name]) for name in names}, "check": found,
              "seconds": {"checks": round(time.time() - start, 1)}}
    print(json.dumps({name: one.get("seconds") for name, one in found.items()}))
    names = [name for name in names if found[name].get("wrong") == []]
    if found[WGRAD].get("wrong") != []:
        measured = [stage for stage in measured if stage != "wgrad"]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    while measured:
        result |= {"forward": [], "clocks": [], "wgrad": []}
        args.out.write_text(json.dumps(result, indent=1))
        status, printed, errors = child("time", str(args.out), ",".join(names), ",".join(measured), str(args.budget),
                                        timeout_s=240)
        print(printed, errors[-1500:] if status else "", sep="\n")
        hung = next((name for name in names if f'"{name}: ' in printed), None)
        if status != HUNG or hung in (None, DEFAULT):
            break
        found[hung] = {"hung": printed.strip()}
        names.remove(hung)
    if measured:
        result = {"forward": [], "clocks": [], "wgrad": [], **json.loads(args.out.read_text()), "check": found}
    else:
        result |= {"forward": [], "clocks": [], "wgrad": []}
    result["seconds"]["all"] = round(time.time() - start, 1)
    args.out.write_text(json.dumps(result, indent=1))
    show(result)


if __name__ == "__main__":
    main()
