# SPDX-License-Identifier: Apache-2.0
"""Recording and replay on the CPU. The kernel here writes to addresses, as kernels on a GPU do."""

import ctypes

import pytest
import torch

from ds_mxfp8_moe.mx import quantize
from ds_mxfp8_moe.ops.triton_kernels import recording
from ds_mxfp8_moe.ops.triton_kernels.recording import Recording, replayed


@pytest.fixture(autouse=True)
def no_device(monkeypatch):
    monkeypatch.setattr(recording, "_current_stream", lambda: lambda device: 7)


def launcher(x, y, z, stream, source, out, count, factor):
    assert stream == 7
    values = (ctypes.c_float * count).from_address(source)
    (ctypes.c_float * count).from_address(out)[:] = [factor * value for value in values]


def scale(source: torch.Tensor, out: torch.Tensor, factor: int) -> None:
    """out = factor * source, by a kernel."""
    args = source, out, out.numel()
    launcher(1, 1, 1, 7, *(x.data_ptr() if isinstance(x, torch.Tensor) else x for x in args), factor)
    if recording.active():
        recording.active().note_launch(launcher, (1, 1, 1, None), args, (factor, ), (), None)


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


def test_a_program_computes_what_was_recorded_on_other_tensors():
    given = inputs(1)
    with Recording(given) as noted:
        outputs, _ = layer(*given)
    program = noted.program(outputs)
    assert not noted.obstacle and equal(outputs, layer(*given)[0])
    for seed in (2, 3):
        given = inputs(seed)
        assert equal(program(*given), layer(*given)[0])


def test_the_first_call_records_and_the_others_replay(monkeypatch):
    monkeypatch.setattr(recording, "_PROGRAMS", {})
    calls = []

    def counted(*given):
        calls.append(given)
        return layer(*given)

    for seed in range(4):
        given = inputs(seed)
        outputs, beside = replayed(("key", ), (), counted, given)
        assert equal(outputs, layer(*given)[0]) and beside == "beside"
    assert len(calls) == 1
    for distance in range(20):  # which never come again: at some point recording ends
        replayed(("other", ), (distance, ), counted, inputs(0))
    assert len(recording._PROGRAMS[("other", )]) == recording.MOST_DISTANCES


def test_inputs_in_one_storage_are_read_where_they_lie():
    def function(a, b):
        out = torch.empty(2, 4)
        scale(a, out[0], 1)
        scale(b[1:], out[1][1:], 1)
        return [out], None

    buffer = torch.arange(16.0)
    with Recording([buffer[:4], buffer[8:12]]) as noted:
        outputs, _ = function(*noted._inputs)
    program = noted.program(outputs)
    other = torch.arange(100.0, 132.0)
    out, = program(other[4:8], other[20:24])
    assert out[0].tolist() == other[4:8].tolist() and out[1][1:].tolist() == other[21:24].tolist()


def test_memory_is_freed_after_its_last_use():
    def function(x):
        a = x.double()
        b = a + 1
        return [b.float()], None

    given = [torch.ones(3)]
    with Recording(given) as noted:
        outputs, _ = function(*given)
    lines = []
    space_exec = exec
    recording.exec = lambda code, space: (lines.append(code), space_exec(code, space))
    try:
        noted.program(outputs)
    finally:
        del recording.exec
    code = [line.strip() for line in lines[0].splitlines()]
    assert code.index("del t0_0") == code.index(next(line for line in code if line.startswith("t1_0"))) + 1


def test_tensors_that_are_no_inputs_are_an_obstacle():
    hidden = torch.ones(4)
    for function in (lambda x: [x + hidden], lambda x: [scale(hidden, x.clone(), 2), x.clone()][1:]):
        with Recording([torch.ones(4)]) as noted:
            outputs = function(noted._inputs[0])
        assert noted.program(outputs) is None and "no input" in noted.obstacle


def test_what_wrappers_do_is_recorded():
    def function(x):
        mx, out = quantize(x, 32), torch.empty_like(x)
        scale(mx.abs(), out, 2)
        return [mx.dequantize(torch.float32), out], None

    with Recording([torch.randn(4, 64)]) as noted:
        outputs, _ = function(*noted._inputs)
    program, x = noted.program(outputs), torch.randn(4, 64)
    assert equal(program(x), function(x)[0])
