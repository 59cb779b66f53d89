# SPDX-License-Identifier: Apache-2.0
"""Runs Triton kernels on CPU tensors: in a process that is the interpreter's alone, with casts that round as GPUs do.

    def case(x):                     # top level of a test file; imports the kernels inside, since only that process
        from ... import kernel       # may import them for the interpreter
        return kernel(x)

    def test_case(interpreter):      # conftest.py's fixture
        interpreter(case, x)
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from types import SimpleNamespace

import numpy as np
import torch


def _round_as_gpus_do() -> None:
    """Triton's interpreter (3.6 to 3.9) cuts float32 to bfloat16 and rounds ties to e4m3 away from zero."""
    from triton.runtime import interpreter
    dtypes = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8e4nv": torch.float8_e4m3fn}

    def convert(values, source, target, rounding):
        integer = {8: "uint8", 16: "uint16", 32: "uint32"}
        x = torch.from_numpy(values.copy().view(integer[source.primitive_bitwidth])).view(dtypes[str(source)]).float()
        if str(target) == "fp8e4nv":  # cvt.satfinite
            x = torch.where(x.isnan(), x.abs(), x.clamp(-448, 448))
        return x.to(dtypes[str(target)]).view(getattr(torch, integer[target.primitive_bitwidth])).numpy()

    interpreter._convert_float = convert


def _multiply_bfloat16() -> None:
    """Triton's interpreter (3.6 to 3.9) holds bfloat16 in integers, and multiplies those."""
    from triton import language
    from triton.runtime import interpreter
    builder = interpreter.InterpreterBuilder
    plain = builder.create_dot

    def widened(x):
        if x.dtype.scalar != language.bfloat16:
            return x
        values = interpreter._convert_float(x.data, language.bfloat16, language.float32, None).view("float32")
        return interpreter.TensorHandle(values, language.float32)

    builder.create_dot = lambda self, a, b, *rest: plain(self, widened(a), widened(b), *rest)


def _patch_language_once() -> None:
    """Triton (3.6 to 3.9) replaces its language's functions anew at every call of a function, and computes whether
    integers overflow without looking at the answer (`debug` is off): half of the interpreter's time. Loops whose
    bounds are computed count on an older NumPy (3.6)."""
    from triton import language
    from triton.runtime import interpreter
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": language, "core": language.core}))
    interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    language.tensor.__index__ = lambda self: self.handle.data.item()


def _compare_to_booleans() -> None:
    """In Triton's interpreter a comparison has its operands' type. Spread out from a scalar, it becomes integers,
    which 3.9 rejects as a mask."""
    from triton import language
    from triton.runtime import interpreter
    builder = interpreter.InterpreterBuilder
    plain = builder.binary_op

    def binary_op(self, lhs, rhs, op):
        out = plain(self, lhs, rhs, op)
        return interpreter.TensorHandle(out.data, language.int1) if out.data.dtype == bool else out

    builder.binary_op = binary_op


def _widen_arguments() -> None:
    """Triton's interpreter (3.6 to 3.9) calls integers from 2^31 on int64, but holds those below 2^32 in 32 bits. The
    addresses of tensors are so small where Python itself lies low in memory, as Debian's and Ubuntu's does."""
    from triton.runtime import interpreter
    plain = interpreter._implicit_cvt

    def convert(argument):
        out = plain(argument)
        if isinstance(argument, int) and 2**31 <= argument < 2**32:
            out.handle.data = out.handle.data.astype("int64")
        return out

    interpreter._implicit_cvt = convert


def _permute_bytes() -> None:
    """Triton's interpreter runs no instructions of PTX. Of these, kernels that it runs have prmt alone."""
    from triton import language
    from triton.runtime import interpreter

    def create_inline_asm(self, instruction, constraints, values, types, pure, pack):
        assert instruction == "prmt.b32 $0, $1, $2, $3;"
        low, high, places = (value.data.astype("uint32").astype("uint64") for value in values)
        found = 0
        for i in range(4):
            place = places >> 4 * i & 15
            byte = (low | high << 32) >> 8 * (place & 7) & 255
            found |= np.where(place > 7, (byte >> 7) * 255, byte) << 8 * i
        return SimpleNamespace(get_result=lambda _: interpreter.TensorHandle(
            found.astype("uint32").view("int32"), language.int32))

    interpreter.InterpreterBuilder.create_inline_asm = create_inline_asm


def _start() -> None:
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined
    torch.set_num_threads(1)
    _round_as_gpus_do()
    _compare_to_booleans()
    _widen_arguments()
    _multiply_bfloat16()
    _patch_language_once()
    _permute_bytes()


def _run(case: Callable, *args):
    torch.manual_seed(1234)
    torch.use_deterministic_algorithms(False)  # a case before may have set it
    return case(*args)


def interpreter_process() -> Iterator[Callable]:
    with ProcessPoolExecutor(1, get_context("spawn"), _start) as pool:
        yield lambda case, *args: pool.submit(_run, case, *args).result()
