# SPDX-License-Identifier: Apache-2.0
"""ops/triton_kernels/launch.py against Triton's own launches, without a GPU: a driver that only notes them."""

from types import SimpleNamespace

import pytest
import torch
import triton
from triton import language as tl
from triton.backends.nvidia import driver as nvidia
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from ds_mxfp8_moe.ops.triton_kernels import launcher
from ds_mxfp8_moe.ops.triton_kernels.gluon_names import async_store
from ds_mxfp8_moe.ops.triton_kernels.grouped_gemm_hopper import descriptor
from ds_mxfp8_moe.ops.triton_kernels.launch import Launched
from ds_mxfp8_moe.ops.triton_kernels.recording import Recording
from tests.support.aot import _Driver

STREAM = 7


@Launched
@triton.jit
def _kernel(x_ptr, other_ptr, pair, N, stride, SIZE: tl.constexpr, NAME: tl.constexpr):
    i = tl.program_id(0) * stride + tl.arange(0, SIZE)
    x = tl.load(x_ptr + i, i < N, other=0).to(tl.float32) + pair[1]
    if other_ptr is not None:
        x += tl.load(other_ptr + i).to(tl.float32)
    if NAME == "twice":
        x *= 2
    tl.store(pair[0] + i, x.to(pair[0].dtype.element_ty))


@Launched
@gluon.jit
def _copy_kernel(desc, out_desc, rows):
    smem = gl.allocate_shared_memory(desc.dtype, desc.block_shape, desc.layout)
    async_store(out_desc, [rows, 0], smem)
    tma.store_wait(0)


class _NotingDriver(_Driver):
    """Notes what would be launched: the compiled code, the grid, the stream, the arguments."""

    def __init__(self):
        super().__init__(90)
        self.launches = []

        def fill(address, *rest):
            return address, *map(str, rest)

        self.utils = SimpleNamespace(
            load_binary=lambda name, code, shared, device: (code, hash((code, shared)), 32, 0, 1024),
            unload_module=lambda module: None,
            get_device_properties=lambda device: {"max_shared_mem": 232448},
            fill_tma_descriptor=fill, fill_tma_descriptor_tiled=fill)

    def get_current_stream(self, device):
        return STREAM

    def launcher_cls(self, source, metadata):
        def note(*args):
            self.launches.append(args)

        def note_list(*args):
            note(*args[:-1], *args[-1])

        # Since 3.7, the kernel's arguments are one list.
        one_list = hasattr(nvidia, "annotate_arguments")
        launch = nvidia.wrap_handle_tensordesc(note_list if one_list else note, dict(source.signature.items()),
                                               metadata.tensordesc_meta)

        def call(*args):
            base, of_kernel = (*args[:5], None, None, None, None, *args[5:9]), args[9:]
            return launch(*base, of_kernel) if one_list else launch(*base, *of_kernel)

        return call

    def launcher_with_launch(self, source, metadata):
        """As Triton's CudaLauncher: `launch`, and what a recording asks about."""
        launcher = _NotingDriver.launcher_cls(self, source, metadata)

        class Launcher:
            launch = global_scratch_size = profile_scratch_size = launch_cooperative_grid = launch_pdl = 0

            def __call__(self, *args):
                return launcher(*args)

        return Launcher()


@pytest.fixture
def driver(monkeypatch):
    driver = _NotingDriver()
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    for kernel in (_kernel, _copy_kernel):
        monkeypatch.setattr(kernel, "_bound", {})
        monkeypatch.setattr(kernel.fn, "device_caches", type(kernel.fn.device_caches)(
            kernel.fn.create_binder))
    return driver


def _plain(launch: tuple) -> list:
    """Code, grid, stream and arguments of a launch, in a form that can be compared. Hooks that nobody set say nothing.
    """
    grid, (stream, function), args = launch[:3], launch[3:5], launch[9:]
    assert all(x is None or not x.calls for x in args[1:4] if x is None or hasattr(x, "calls"))
    return [grid, stream, function, args[0], *map(_value, args[4:])]


def _value(x):
    return x.data_ptr() if isinstance(x, torch.Tensor) else tuple(map(_value, x)) if isinstance(x, tuple) else x


def test_remembered_launches_are_tritons_own(driver):
    """Of everything that Triton compiles apart: each case by it, then twice by ours."""
    memory = torch.zeros(1 << 12, dtype=torch.bfloat16)
    usual = {"x": memory, "other": None, "pair": (memory, 5), "n": 64, "size": 256, "name": "once", "warps": 1}
    others = {"x": [memory[1:], memory.half()], "other": [memory[8:], memory[3:], memory.float()],
              "pair": [(memory[2:], 5), (memory, 48), (memory, 1)], "size": [128], "name": ["twice"], "warps": [2],
              "n": [0, 1, 33, -16, 1 << 31, (1 << 31) + 1, 1 << 40]}
    cases = [usual, *({**usual, key: value} for key, values in others.items() for value in values)]

    def launches(kernel, order):
        found = {}
        for i in order:
            x, other, pair, n, size, name, warps = cases[i].values()
            kernel[(3, 2)](x, other, pair, n, 16, SIZE=size, NAME=name, num_warps=warps)
            found[i] = _plain(driver.launches.pop())
        return found

    every = range(len(cases))
    own = launches(_kernel.fn, every)
    assert len({launch[2] for launch in own.values()}) >= 8
    assert launches(_kernel, every) == own
    tritons = _kernel.fn.run
    try:
        _kernel.fn.run = None  # nothing is asked of Triton again
        assert launches(_kernel, reversed(every)) == own
    finally:
        _kernel.fn.run = tritons


def test_descriptors_are_told_apart_by_dtype_and_box(driver):
    x = torch.zeros(256, 256, dtype=torch.bfloat16)
    forms = [(x, [64, 64]), (x, [128, 64]), (x.view(torch.int32), [64, 32]), (x[128:], [64, 64])]
    calls = [(descriptor(a, box), descriptor(a, box), 16 * i) for i, (a, box) in enumerate(forms, 1)]
    found = []
    for kernel in (_copy_kernel.fn, _copy_kernel, _copy_kernel):
        for args in calls:
            kernel[(1, )](*args, num_warps=4)
        found.append([_plain(launch) for launch in driver.launches])
        driver.launches.clear()
    assert found[0] == found[1] == found[2]
    assert [len(bound.compiled) for bound in _copy_kernel._bound.values()] == [3]


def test_what_it_cannot_tell_is_tritons(driver):
    x = torch.zeros(64, dtype=torch.bfloat16)
    for _ in range(2):
        _kernel[(1, )](x, triton.reinterpret(x, tl.bfloat16), (x, 5), 64, 3, SIZE=32, NAME="once", num_warps=1)
    assert len(driver.launches) == 2 and not any(bound.compiled for bound in _kernel._bound.values())


@pytest.mark.parametrize("attribute", [None, "global_scratch_size", "launch_cooperative_grid", "launch_pdl"])
def test_a_launch_that_only_triton_can_make_ends_a_recording(driver, monkeypatch, attribute):
    """None: a kernel whose launches are Triton's anyway."""
    def launcher(source, metadata):
        made = driver.launcher_with_launch(source, metadata)
        setattr(made, attribute, 1)
        return made

    if attribute:
        monkeypatch.setattr(driver, "launcher_cls", launcher)
    else:
        monkeypatch.setattr(_kernel, "remembers", False)
    x = torch.zeros(64, dtype=torch.bfloat16)
    with Recording([x]) as noted:
        _kernel[(1, )](x, None, (x, 5), 64, 3, SIZE=32, NAME="once", num_warps=1)
    assert noted.obstacle == "a launch of _kernel is Triton's own"


def test_hooks_of_a_profiler_are_called(driver):
    x = torch.zeros(64, dtype=torch.bfloat16)

    def launch():
        _kernel[(1, )](x, None, (x, 5), 64, 3, SIZE=32, NAME="once", num_warps=1)

    launch()
    launch()
    assert [args[9 + 2] for args in driver.launches][1] is None
    triton.knobs.runtime.launch_enter_hook.add(print)
    try:
        launch()
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(print)
    hook = driver.launches[-1][9 + 2]
    assert hook is triton.knobs.runtime.launch_enter_hook


def test_a_recording_has_the_parameters_of_compiled_code(driver, monkeypatch):
    """Those that Triton's own launcher would hand to the driver: without constants, ones and None."""
    monkeypatch.setattr(driver, "launcher_cls", driver.launcher_with_launch)
    memory = torch.zeros(256, 256, dtype=torch.bfloat16)
    with Recording([memory]) as noted:
        noted.note_launch = lambda *launch: found.append(launch)
        found = []
        for _ in range(2):  # through Triton, and remembered
            _kernel[(3, 2)](memory, None, (memory, 5), 48, 1, SIZE=256, NAME="once", num_warps=2)
            _copy_kernel[(1, )](descriptor(memory, [64, 64]), descriptor(memory, [64, 64]), 16, num_warps=4)
    assert not noted.obstacle and [kernel for kernel, *_ in found[:2]] == [kernel for kernel, *_ in found[2:]]
    (kernel, grid, _), (copy, _, _) = found[:2]
    assert grid == (3, 2, 1) and kernel.threads == 64 and kernel.name == "_kernel"
    assert kernel.types == ("*bf16", "constexpr", ("*bf16", "i32"), "i32", "constexpr")
    assert [kind.partition("<")[0] for kind in copy.types] == ["tensordesc", "tensordesc", "i32"]
    assert len(copy.maps) == 2 and copy.maps[0]["block_size"] == [64, 64] and copy.shared_bytes >= 64 * 64 * 2
    recorder = Recording([memory])
    values = list(recorder._values(found[0][2], kernel.types, iter(kernel.maps)))
    assert values == [(0, 0), (0, 0), 5, 48]  # two addresses in the first input, two numbers


def test_this_release_of_triton_has_a_known_launcher():
    assert launcher.KNOWN and triton.__version__ in launcher.UNKNOWN


@pytest.mark.parametrize("given", [{}, {"enable_fp_fusion": False}])
@pytest.mark.parametrize("remembers", [True, False])
def test_the_fusion_of_multiplication_and_addition_is_chosen_in_every_launch(driver, monkeypatch, given, remembers):
    """Triton's default moves from on to off with 3.10."""
    monkeypatch.setattr(_kernel, "remembers", remembers)
    chosen = []
    monkeypatch.setattr(_kernel.fn, "run", lambda *args, grid, warmup, **options: chosen.append(options))
    x = torch.zeros(64, dtype=torch.bfloat16)
    _kernel[(1, )](x, None, (x, 5), 64, 3, SIZE=32, NAME="once", **given)
    assert chosen[0]["enable_fp_fusion"] is given.get("enable_fp_fusion", True)


def test_arguments_that_are_missing_are_named(driver):
    x = torch.zeros(64, dtype=torch.bfloat16)
    with pytest.raises((KeyError, TypeError), match="NAME"):
        _kernel[(1, )](x, None, (x, 5), 64, 3, SIZE=32, num_warps=1)
