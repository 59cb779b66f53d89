# SPDX-License-Identifier: Apache-2.0
"""Records what a function does on the device, and repeats it on other tensors with little work on the host.

    with Recording(inputs) as recording:
        outputs = function(inputs)
    program = recording.program(outputs, executor)
    other_outputs = program(other_inputs)

A recording notes each launch of a kernel and each torch op. It does not note Python code. The program repeats the
launches and ops in C++ (ops/csrc/replay): it allocates tensors, launches kernels with addresses and numbers, calls
torch ops through the dispatcher, and frees each tensor after its last use. It empties the list of its inputs, so that
it can free inputs, too. A program holds no tensor. It runs on the current stream, on the device of its first input.

A program does not repeat the function's branches. It is valid only for inputs with the same properties (the executor's
`signature`). A kernel may get the address of one weight, and find the others by distances that are numbers of a launch
(quantize.py). The weights must then lie at the same `distances` from each other, which the executor computes too.
ds_mxfp8_moe/compute/recorded.py keeps the programs.
"""

import re
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from . import launcher
from .launcher import Kernel

_ACTIVE = threading.local()
_ALLOCATIONS = {torch.ops.aten.empty.memory_format, torch.ops.aten.new_empty.default,
                torch.ops.aten.empty_strided.default, torch.ops.aten.empty_like.default}


def active() -> "Recording | None":
    """The recording that this thread is in."""
    return getattr(_ACTIVE, "recording", None)


class _Step(NamedTuple):
    """A step of a program.

    Attributes:
        uses, makes: numbers of tensors.
        optional: the step only makes tensors, and is left out if nobody uses them.
        add: adds the step to an executor's program. It takes the program, the executor and the slot of each number,
            and returns the slots of what the step makes.
    """

    uses: frozenset
    makes: tuple
    optional: bool
    add: Callable[[Any, ModuleType, dict], Sequence[int]]


class _Tensor(NamedTuple):
    """A tensor among an op's arguments."""

    number: int


class _Address(NamedTuple):
    """`offset` bytes behind the first element of a tensor."""

    number: int
    offset: int


class _Map(NamedTuple):
    """A TMA descriptor: all that the executor's Map takes."""

    address: _Address
    rest: tuple


class Recording(TorchDispatchMode):
    """Notes what runs inside `with`. Its result is `program`."""

    def __init__(self, inputs: Sequence[torch.Tensor]):
        super().__init__()
        self.obstacle = ""  # why there is no program
        self._inputs = list(inputs)
        self._count = len(self._inputs)  # of tensors. The inputs have the first numbers
        self._numbers: dict[int, int] = {}  # of tensors, by id
        self._roots: dict[int, int] = {}  # of the tensor that each storage was allocated for, by the storage's id
        self._steps: list[_Step] = []
        self._input_at: dict[int, list[tuple[int, int]]] = {}  # addresses and numbers, by the storage's id
        for i, x in enumerate(self._inputs):
            self._numbers[id(x)] = i
            self._input_at.setdefault(x.untyped_storage()._cdata, []).append((x.data_ptr(), i))

    def __enter__(self):
        _ACTIVE.recording = self
        return super().__enter__()

    def __exit__(self, *exception):
        _ACTIVE.recording = None
        return super().__exit__(*exception)

    # ---- noting -----------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(kind not in (torch.Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented  # a tensor around others: what it does with them comes here
        given = {x.untyped_storage()._cdata for x in _tensors((args, kwargs))}
        schema = func._schema
        arguments = [self._argument(x) for x in _in_order(schema, args, kwargs)]
        out = func(*args, **kwargs)
        made = [out] if isinstance(out, torch.Tensor) else out if isinstance(out, (tuple, list)) else [out]
        if not all(isinstance(x, torch.Tensor) for x in made):
            self.obstacle = f"{func} returns more than tensors"
            return out
        if schema.is_mutable:  # an op that changes its arguments returns one of them
            self._steps.append(_Step(_numbers_in(arguments), (), False, _op(schema, arguments, 0)))
            return out
        views, allocates = all(x.untyped_storage()._cdata in given for x in made), func in _ALLOCATIONS
        add = _allocate(made[0]) if allocates else _op(schema, arguments, len(made))
        uses = frozenset() if allocates else _numbers_in(arguments)
        self._steps.append(_Step(uses, tuple(self._new(x, views) for x in made), views or allocates, add))
        return out

    def _new(self, x: torch.Tensor, view: bool) -> int:
        """The number of a tensor that an op made."""
        number = self._numbers[id(x)] = self._count
        self._count += 1
        if not view:
            self._roots[x.untyped_storage()._cdata] = number
            self._input_at.pop(x.untyped_storage()._cdata, None)
        return number

    def note_launch(self, kernel: Kernel, grid: tuple, args: Sequence) -> None:
        """Notes a launch. `args`: those of the kernel that may differ between launches; its constants come after."""
        arguments = list(self._values(args, kernel.types, iter(kernel.maps)))

        def add(program: Any, executor: ModuleType, slots: dict) -> tuple:
            program.launch(kernel.name, kernel.function, grid, kernel.threads, kernel.shared_bytes,
                           [_resolved(x, executor, slots) for x in arguments])
            return ()

        uses = frozenset(x.address.number if isinstance(x, _Map) else x.number
                         for x in arguments if isinstance(x, (_Map, _Address)))
        self._steps.append(_Step(uses, (), False, add))

    def _values(self, args: Sequence, types: Sequence, maps: Iterator) -> Iterator:
        """The kernel's parameters in their order: ints that hold their bytes, addresses, descriptors."""
        for x, kind in zip(args, types, strict=False):
            if isinstance(kind, tuple):
                yield from self._values(x, kind, maps)
            elif kind == "constexpr":
                continue
            elif kind.startswith("tensordesc"):
                yield _Map(self._address(x.base), launcher.map_arguments(x, next(maps)))
                yield from (*x.shape, *x.strides)
            elif isinstance(x, torch.Tensor):
                yield self._address(x)
            elif kind in ("fp32", "f32"):
                yield int.from_bytes(struct.pack("<f", x), "little")
            elif re.fullmatch("[iu](1|8|16|32|64)", kind):
                yield int(x)
            else:
                self.obstacle = f"an argument of type {kind} of a kernel"

    # ---- numbers ----------------------------------------------------------------------------------------------------

    def _address(self, x: torch.Tensor) -> _Address:
        storage, address = x.untyped_storage()._cdata, x.data_ptr()
        # Of the inputs in this storage, the last one that begins at or before the address.
        base, number = max(((at, number) for at, number in self._input_at.get(storage, ()) if at <= address),
                           default=(None, None))
        if number is None:
            number, base = self._roots.get(storage), x.untyped_storage().data_ptr()
        if number is None:
            self.obstacle = f"a kernel reads a tensor of {tuple(x.shape)} that is no input"
        return _Address(number, address - base)

    def _number(self, x: torch.Tensor) -> int | None:
        number = self._numbers.get(id(x))
        if number is None:
            self.obstacle = f"an op reads a tensor of {tuple(x.shape)} that is no input"
        return number

    def _argument(self, x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return _Tensor(self._number(x))
        if isinstance(x, (tuple, list)):
            return [self._argument(one) for one in x]
        return x

    # ---- the program ------------------------------------------------------------------------------------------------

    def program(self, outputs: Sequence[torch.Tensor | None], executor: ModuleType) -> Callable | None:
        """A function of a list of inputs, which it empties. It returns a list of outputs like these. None: see
        `obstacle`."""
        returned = [None if x is None else self._number(x) for x in outputs]
        if self.obstacle:
            return None
        needed, kept = set(returned), []
        for step in reversed(self._steps):
            if not step.optional or needed.intersection(step.makes):
                kept.append(step)
                needed |= step.uses
        program = executor.Program(len(self._inputs))
        slots = {number: number for number in range(len(self._inputs))}
        frees = _last_uses(kept, set(returned))
        for step, free in zip(reversed(kept), reversed(frees), strict=True):
            slots.update(zip(step.makes, step.add(program, executor, slots), strict=True))
            if free:
                program.free([slots[number] for number in free])
        program.set_outputs([-1 if number is None else slots[number] for number in returned])
        device, stream = self._inputs[0].get_device(), launcher.current_stream()
        return lambda inputs: program.run(inputs, stream(device))


def _last_uses(steps: Sequence[_Step], returned: set) -> list[list[int]]:
    """For each step, the numbers of the tensors that no later step uses. Those of outputs are left out.

    `steps`: from the last to the first. The result has the same order.
    """
    alive, found = set(returned), []
    for step in steps:
        last = (step.uses | set(step.makes)) - alive
        found.append(sorted(last))
        alive |= last
    return found


def _in_order(schema: Any, args: tuple, kwargs: dict) -> list:
    """An op's arguments in its schema's order, with defaults for those that are not given."""
    return [*args, *(kwargs.get(argument.name, argument.default_value) for argument in schema.arguments[len(args):])]


def _allocate(x: torch.Tensor) -> Callable:
    shape, strides, dtype, device = list(x.shape), list(x.stride()), x.dtype, x.device
    return lambda program, executor, slots: [program.allocate(shape, strides, dtype, device)]


def _op(schema: Any, arguments: list, results: int) -> Callable:
    def add(program: Any, executor: ModuleType, slots: dict) -> Sequence[int]:
        return program.op(schema.name, schema.overload_name, [_resolved(x, executor, slots) for x in arguments],
                          results)
    return add


def _resolved(x: Any, executor: ModuleType, slots: dict) -> Any:
    """An argument in the executor's terms."""
    if isinstance(x, _Tensor):
        return executor.Slot(slots[x.number])
    if isinstance(x, _Address):
        return executor.Address(slots[x.number], x.offset)
    if isinstance(x, _Map):
        return executor.Map(_resolved(x.address, executor, slots), *x.rest)
    return [_resolved(one, executor, slots) for one in x] if isinstance(x, list) else x


def _numbers_in(arguments: Sequence) -> frozenset:
    found = set()
    for x in arguments:
        if isinstance(x, _Tensor):
            found.add(x.number)
        elif isinstance(x, list):
            found |= _numbers_in(x)
    return frozenset(found)


def _tensors(x: Any) -> list[torch.Tensor]:
    if isinstance(x, torch.Tensor):
        return [x]
    if isinstance(x, dict):
        x = x.values()
    elif not isinstance(x, (tuple, list)):
        return []
    return [tensor for part in x for tensor in _tensors(part)]
