# SPDX-License-Identifier: Apache-2.0
"""Recording and replay on the CPU, by the executor's own C++. In place of the CUDA driver stand two Python functions.
The kernel here writes to addresses, as kernels on a GPU do."""

import ctypes
import gc
import itertools
import weakref
from typing import NamedTuple

import pytest
import torch

from ds_mxfp8_moe.compute import recorded
from ds_mxfp8_moe.compute.mx import quantize
from ds_mxfp8_moe.ops.op_builder import replay
from ds_mxfp8_moe.ops.triton_kernels import recording
from ds_mxfp8_moe.ops.triton_kernels.grouped_gemm_hopper import descriptor
from ds_mxfp8_moe.ops.triton_kernels.recording import Kernel, Recording

pytestmark = pytest.mark.skipif(not replay.ReplayBuilder().is_compatible(),
                                reason=str(replay.ReplayBuilder()._obstacle()))
STREAM, SCALE, FAILS = 7, 1000, 1001  # addresses of a stream and of kernels


class Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared_bytes", ctypes.c_uint),
                ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("count", ctypes.c_uint)]


LAUNCHES: list = []  # (grid, block, shared bytes, count of attributes, parameters) of kernels that are not SCALE


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(Config), ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p),
                  ctypes.c_void_p)
def launch(config, function, parameters, _extra):
    config = config.contents
    if config.stream != STREAM or function == FAILS:
        return 400
    values = [ctypes.c_uint64.from_address(parameters[i]).value for i in range(4)]
    if function == SCALE:
        scale_floats(*values)
    else:
        encoded = [ctypes.c_uint64.from_address(parameters[0] + 8 * i).value for i in range(16)]
        LAUNCHES.append((list(config.grid), list(config.block), config.shared_bytes, config.count, values, encoded))
    return 0


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p, *[ctypes.c_void_p] * 4,
                  *[ctypes.c_int] * 4)
def encode(out, dtype, rank, address, shape, strides, box, _steps, _interleave, swizzle, _promotion, padding):
    """A TMA descriptor's stand-in: what was asked for, in 64-bit numbers."""
    def numbers(at, count, kind):
        return list((kind * count).from_address(at))

    values = [dtype, rank, address, *numbers(shape, rank, ctypes.c_uint64),
              *numbers(strides, rank - 1, ctypes.c_uint64), *numbers(box, rank, ctypes.c_uint32), swizzle, padding]
    (ctypes.c_uint64 * len(values)).from_address(out)[:] = values
    return 0


@pytest.fixture(scope="module")
def executor():
    module = replay.ReplayBuilder().jit_load()
    module.use_driver(*(ctypes.cast(function, ctypes.c_void_p).value for function in (launch, encode)))
    return module


@pytest.fixture(autouse=True)
def no_device(monkeypatch):
    monkeypatch.setattr(recording.launcher, "current_stream", lambda: lambda device: STREAM)


def scale_floats(source, out, count, factor):
    values = (ctypes.c_float * count).from_address(source)
    (ctypes.c_float * count).from_address(out)[:] = [factor * value for value in values]


def kernel(name="scale", function=SCALE, types=("*fp32", "*fp32", "i32", "i64"), maps=(), **other):
    return Kernel(**{"name": name, "function": function, "threads": 128, "shared_bytes": 0, "types": types,
                     "maps": maps, **other})


def scale(source: torch.Tensor, out: torch.Tensor, factor: int) -> None:
    """out = factor * source, by a kernel."""
    args = source, out, out.numel(), factor
    scale_floats(*(x.data_ptr() if isinstance(x, torch.Tensor) else x for x in args))
    if recording.active():
        recording.active().note_launch(kernel(), (1, 1, 1), args)


def layer(x, w, b):
    """Views, allocations, kernels that read from the middle of a tensor, ops that change tensors, and a list."""
    h = torch.empty_like(x)
    scale(x, h, 3)
    half = h.view(2, -1)[1]
    scale(half, half.clone(), 5)  # into memory that nobody uses
    out = torch.zeros(x.shape)
    scale(half, out[2:], 2)
    out.add_(b)
    first, second = torch.cat([out @ w.t(), h], dim=1).chunk(2, dim=1)
    return [first, None, second.t(), h[0]], "beside"


def inputs(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator) for shape in ((4, 6), (6, 6), (6, ))]


def equal(a, b):
    return len(a) == len(b) and all(
        x is y if x is None else torch.equal(x, y) and x.stride() == y.stride() for x, y in zip(a, b, strict=True))


def test_a_program_computes_what_was_recorded_on_other_tensors(executor):
    given = inputs(1)
    with Recording(given) as noted:
        outputs, _ = layer(*given)
    program = noted.program(outputs, executor)
    assert not noted.obstacle and equal(outputs, layer(*given)[0])
    for seed in (2, 3):
        given = inputs(seed)
        assert equal(program(list(given)), layer(*given)[0])


class Outcome(NamedTuple):
    tensors: tuple
    beside: dict


@pytest.fixture
def calls(executor, monkeypatch):
    """The settings of the calls of `counted` that ran in Python."""
    monkeypatch.setattr(recorded, "executor_for", lambda device: executor)
    monkeypatch.setattr(recorded, "_PROGRAMS", {})
    CALLS.clear()
    return CALLS


CALLS: list = []


@recorded.recorded
def counted(how, pair, weights):
    CALLS.append(how)
    tensors, beside = layer(*pair, weights.stacks[0][-1])
    return Outcome(tuple(tensors), {"beside": beside, "mx": quantize(tensors[-1].repeat(1, 32), 32), "how": how})


def test_the_first_call_records_and_the_others_replay(calls):
    for how, seed in itertools.product(("a", "b"), range(4)):
        x, w, b = inputs(seed)
        found = counted(how, (x, w), recorded.Weights(([b], ), apart=True))
        wanted, _ = layer(x, w, b)
        assert type(found) is Outcome and equal(found.tensors, wanted) and found.beside["how"] == how
        assert torch.equal(found.beside["mx"].qdata, quantize(wanted[-1].repeat(1, 32), 32).qdata)
    assert calls == ["a", "b"]


@pytest.mark.parametrize("apart", [True, False])
def test_weights_that_lie_elsewhere_are_recorded_apart(calls, apart):
    """By their distances in a stack, or in all stacks. At some point, recording ends."""
    x, w, _ = inputs(0)
    memory = torch.randn(1000)
    for distance in range(0, 160, 8):
        one, other, third = memory[:6], memory[8:14], memory[16 + distance:][:6]
        stacks = ([one, other], [third]) if distance % 16 else ([one, other, third], )
        for _ in range(2):
            found = counted("c", (x, w), recorded.Weights(stacks, apart))
            assert equal(found.tensors, layer(x, w, stacks[0][-1])[0])
    most = recorded.MOST_DISTANCES
    assert [len(of_key) for of_key in recorded._PROGRAMS.values()] == ([10, 1] if apart else [10, 10]) and most == 16


def test_inputs_in_one_storage_are_read_where_they_lie(executor):
    def function(a, b):
        out = torch.empty(2, 4)
        scale(a, out[0], 1)
        scale(b[1:], out[1][1:], 1)
        return [out], None

    buffer = torch.arange(16.0)
    with Recording([buffer[:4], buffer[8:12]]) as noted:
        outputs, _ = function(*noted._inputs)
    program = noted.program(outputs, executor)
    other = torch.arange(100.0, 132.0)
    out, = program([other[4:8], other[20:24]])
    assert out[0].tolist() == other[4:8].tolist() and out[1][1:].tolist() == other[21:24].tolist()


def test_memory_is_freed_after_its_last_use(executor):
    def function(x, y):
        a = x.double() + y
        b = a + 1
        return [b.float(), x], None

    given = [torch.ones(1000), torch.ones(1000)]
    with Recording(given) as noted:
        outputs, _ = function(*given)
    freed, plain = [], executor.Program.free

    class Program(executor.Program):

        def free(self, slots):
            freed.append(slots)
            plain(self, slots)

    program = noted.program(outputs, type("", (), {**vars(executor), "Program": Program}))
    # x.double() and y behind their sum, a behind the next one, b behind the cast; never x, which is an output too
    assert freed == [[1, 2], [3], [4]]
    one, other = given
    out, x = program(given)
    assert given == [] and equal([out], [one + other + 1]) and x.data_ptr() == one.data_ptr()
    kept = weakref.ref(out)
    del out
    gc.collect()
    assert kept() is None  # a program holds no tensor


def test_a_launch_has_all_that_triton_gives_it(executor):
    x = torch.zeros(256, 128, dtype=torch.bfloat16)
    box = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [64, 32]}
    types = "tensordesc<bf16[64, 32]>", ("i64", "fp32"), "constexpr", "*bf16", "i1"
    noted = Recording([x])
    with noted:
        noted.note_launch(kernel("many", 1, types, (box, ), shared_bytes=4096), (3, 2, 1),
                          (descriptor(x[128:], [64, 32]), (-5, 1.5), None, x[1:], True))
    other = torch.zeros(256, 128, dtype=torch.bfloat16)
    LAUNCHES.clear()
    assert noted.program([x], executor)([other])[0].data_ptr() == other.data_ptr()
    (grid, block, shared_bytes, attributes, values, encoded), = LAUNCHES
    assert (grid, block, shared_bytes, attributes) == ([3, 2, 1], [128, 1, 1], 4096, 0)
    assert encoded[:8] == [9, 2, other.data_ptr() + 128 * 256, 128, 128, 256, 32, 64]
    assert values[1:] == [128, 128, 128]  # shape and strides follow a descriptor


def test_a_failed_launch_names_the_kernel(executor):
    x = torch.zeros(4)
    noted = Recording([x])
    with noted:
        noted.note_launch(kernel("broken", FAILS), (1, 1, 1), (x, x, 4, 1))
    with pytest.raises(RuntimeError, match="the launch of kernel broken failed with CUDA driver error 400"):
        noted.program([x], executor)([x])


def test_tensors_that_are_no_inputs_are_an_obstacle(executor):
    hidden = torch.ones(4)
    for function in (lambda x: [x + hidden], lambda x: [scale(hidden, x.clone(), 2), x.clone()][1:]):
        with Recording([torch.ones(4)]) as noted:
            outputs = function(noted._inputs[0])
        assert noted.program(outputs, executor) is None and "no input" in noted.obstacle


def test_a_signature_holds_what_a_program_depends_on(executor):
    x = torch.zeros(8, 4)
    others = [x[:4], x.t(), x.int(), torch.zeros(33)[1:].view(8, 4), x.view(4, 8), None]
    found = [executor.signature([x, other]) for other in (x, *others)]
    assert len(set(found)) == len(found)
    assert executor.signature([torch.ones(8, 4), x]) == found[0]


def test_distances_are_those_of_addresses(executor):
    x = torch.zeros(12)
    numbers = (ctypes.c_int64 * 3).from_buffer_copy(executor.distances([x[4:], x, x[8:]]))
    assert list(numbers) == [0, -16, 16]
