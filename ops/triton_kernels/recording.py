# SPDX-License-Identifier: Apache-2.0
"""Records what a function does on the device, and does it again on other tensors with little work on the host.

    with Recording(inputs) as recording:
        outputs = function(*inputs)
    program = recording.program(outputs)
    other_outputs = program(*other_inputs)

A recording notes each launch of a kernel and each torch op. The program repeats them as straight lines of Python:
allocate, launch with addresses and numbers, free. What only the host does is left out, views of tensors above all. A
branch of the function is not taken again, so a program fits inputs of the same shapes, strides, dtypes, devices and
alignment (`signature`) alone, and weights that a kernel finds from one address at the same `distances`. `replayed`
sees to that.

A program holds no tensor, and a tensor is freed after its last use. It runs on the current stream, on the device of
its first input.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

STREAM = 3  # place of the stream among the arguments of Triton's launchers
MOST_KEYS, MOST_DISTANCES = 512, 16
_ACTIVE = threading.local()
_PROGRAMS: dict[tuple, dict] = {}  # by key and distances; they hold no tensors
_ALLOCATIONS = {torch.ops.aten.empty.memory_format, torch.ops.aten.new_empty.default,
                torch.ops.aten.empty_strided.default, torch.ops.aten.empty_like.default}


def active() -> "Recording | None":
    """The recording that this thread is in."""
    return getattr(_ACTIVE, "recording", None)


def signature(tensors: Sequence[torch.Tensor | None]) -> tuple:
    """What of single tensors a program depends on."""
    return tuple(x if x is None else (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16) for x in tensors)


def distances(tensors: Sequence[torch.Tensor]) -> tuple:
    """The distances in memory from the first tensor to each."""
    addresses = [x.data_ptr() for x in tensors]
    first = addresses[0]
    return tuple(address - first for address in addresses)


def replayed(key: tuple, between: tuple, function: Callable, inputs: Sequence[torch.Tensor]) -> tuple:
    """function(*inputs), recorded at the first call, and replayed from then on if it can be.

    Args:
        key: all that `function` depends on, beside what the inputs hold and `between`.
        between: distances between inputs. If they change often, there is no use in recording, and it ends.
        function: returns a list of tensors and None, and an object without tensors.
    """
    if key not in _PROGRAMS:
        if len(_PROGRAMS) == MOST_KEYS:
            _PROGRAMS.pop(next(iter(_PROGRAMS)))
        _PROGRAMS[key] = {}
    programs = _PROGRAMS[key]
    found = programs.get(between)
    if found is None and len(programs) < MOST_DISTANCES:
        with Recording(inputs) as recording:
            outputs, other = function(*inputs)
        programs[between] = recording.program(outputs), other
        return outputs, other
    program, other = found or (None, None)
    return function(*inputs) if program is None else (program(*inputs), other)


class Recording(TorchDispatchMode):
    """Notes what runs inside `with`. Its result is `program`."""

    def __init__(self, inputs: Sequence[torch.Tensor]):
        super().__init__()
        self.obstacle = ""  # why there is no program
        self._inputs = list(inputs)
        self._names: dict[int, str] = {}  # of tensors, by id
        self._roots: dict[int, str] = {}  # of the tensor that a storage was allocated for, by the storage's id
        self._steps: list[_Step] = []
        self._constants: dict[str, Any] = {}
        self._input_at: dict[int, list[tuple[int, str]]] = {}  # addresses and names, by the storage's id
        for i, x in enumerate(self._inputs):
            self._names[id(x)] = f"i{i}"
            self._input_at.setdefault(x.untyped_storage()._cdata, []).append((x.data_ptr(), f"i{i}"))
        for places in self._input_at.values():
            places.sort()

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
        out = func(*args, **kwargs)
        made = [out] if isinstance(out, torch.Tensor) else list(out or ())
        if not all(isinstance(x, torch.Tensor) for x in made):
            self.obstacle = f"{func} returns more than tensors"
            return out
        changes, allocates = func._schema.is_mutable, func in _ALLOCATIONS
        views = not changes and all(x.untyped_storage()._cdata in given for x in made)
        text = f"{self._constant(func)}({self._arguments(args, kwargs)})"
        if allocates:
            text = (f"empty({tuple(made[0].shape)}, {made[0].stride()}, dtype={self._constant(made[0].dtype)}, "
                    f"device={self._constant(made[0].device)})")
        names = []
        if not changes:  # an op that changes its arguments returns one of them
            names = [self._new_name(x, i, views) for i, x in enumerate(made)]
            text = f"{names[0]} = {text}" if isinstance(out, torch.Tensor) else f"{', '.join(names)}, = {text}"
        self._steps.append(_Step(text, names, views or allocates))
        return out

    def _new_name(self, x: torch.Tensor, i: int, view: bool) -> str:
        name = self._names[id(x)] = f"t{len(self._steps)}_{i}"
        if not view:
            self._roots[x.untyped_storage()._cdata] = name
            self._input_at.pop(x.untyped_storage()._cdata, None)
        return name

    def note_launch(self, launch: Callable, before: tuple, args: tuple, after: tuple, maps: Sequence,
                    fill: Callable) -> None:
        """Notes a launch.

        Args:
            launch: Triton's launcher of compiled code. It takes `before`, where None at STREAM stands for the stream,
                then `args` and `after`.
            maps: for each TMA descriptor among `args`, what `fill` takes beside its address.
        """
        maps = list(maps)
        values = [*map(self._constant, before), *(self._argument_of_launch(x, maps, self._constant(fill))
                                                  for x in args), *map(self._constant, after)]
        values[STREAM] = "stream"
        self._steps.append(_Step(f"{self._constant(launch)}({', '.join(values)})", [], False))

    def _argument_of_launch(self, x: Any, maps: list, fill: str) -> str:
        if isinstance(x, torch.Tensor):
            return self._address(x)
        if isinstance(x, tuple):
            return "(" + "".join(f"{self._argument_of_launch(part, maps, fill)}, " for part in x) + ")"
        if hasattr(x, "base"):  # a TMA descriptor
            sizes = "".join(f", {size}" for size in (*x.shape, *x.strides))
            return f"{fill}({self._address(x.base)}, *{self._constant(maps.pop(0))}){sizes}"
        return self._constant(x)

    # ---- naming -----------------------------------------------------------------------------------------------------

    def _constant(self, x: Any) -> str:
        if x is None or type(x) in (bool, int, str):
            return repr(x)
        name = f"c{len(self._constants)}"
        self._constants[name] = x
        return name

    def _address(self, x: torch.Tensor) -> str:
        """An expression for a tensor's address."""
        storage, address = x.untyped_storage()._cdata, x.data_ptr()
        if storage in self._input_at:
            # Of the inputs in this storage, the last one that begins at or before the address.
            base, name = max(((at, name) for at, name in self._input_at[storage] if at <= address),
                             default=(None, None))
            if name is not None:
                return f"{name}.data_ptr() + {address - base}"
        name = self._roots.get(storage)
        if name is None:
            self.obstacle = f"a kernel reads a tensor of {tuple(x.shape)} that is no input"
            return "0"
        return f"{name}.data_ptr() + {address - x.untyped_storage().data_ptr()}"

    def _name(self, x: torch.Tensor) -> str:
        name = self._names.get(id(x))
        if name is None:
            self.obstacle = f"an op reads a tensor of {tuple(x.shape)} that is no input"
            return "None"
        return name

    def _arguments(self, args: tuple, kwargs: dict) -> str:
        parts = [self._argument(x) for x in args]
        return ", ".join(parts + [f"{key}={self._argument(x)}" for key, x in kwargs.items()])

    def _argument(self, x: Any) -> str:
        if isinstance(x, torch.Tensor):
            return self._name(x)
        if isinstance(x, (tuple, list)):
            return f"[{', '.join(map(self._argument, x))}]"
        return self._constant(x)

    # ---- the program ------------------------------------------------------------------------------------------------

    def program(self, outputs: Sequence[torch.Tensor | None]) -> Callable | None:
        """A function of the inputs that returns a tuple of outputs like these. None: see `obstacle`."""
        returned = ["None" if x is None else self._name(x) for x in outputs]
        if self.obstacle:
            return None
        needed, kept = set(returned), []
        for step in reversed(self._steps):
            if not step.optional or needed.intersection(step.makes):
                kept.append(step)
                needed |= step.uses
        lines, alive = [], set(returned)
        for step in kept:  # from the last to the first: a name that is not alive yet is used here for the last time
            last = sorted(name for name in step.uses | set(step.makes) if name not in alive)
            alive |= step.uses | set(step.makes)
            lines += [f"del {', '.join(last)}"] * bool(last) + [step.text]
        names = [f"i{i}" for i in range(len(self._inputs))]
        body = "\n    ".join(["stream = current_stream(device)", *reversed(lines),
                              f"return {', '.join(returned)}{',' * bool(returned)}"])
        space = {**self._constants, "empty": torch.empty_strided, "current_stream": _current_stream(),
                 "device": self._inputs[0].get_device()}
        exec(f"def program({', '.join(names)}):\n    {body}\n", space)  # noqa: S102
        return space["program"]


class _Step:
    """A line of a program. `optional`: it only makes tensors, and goes if nobody uses them."""

    def __init__(self, text: str, makes: list[str], optional: bool):
        self.text, self.makes, self.optional = text, makes, optional
        words = "".join(c if c.isalnum() or c == "_" else " " for c in text).split()
        self.uses = {word for word in words if word[0] in "it" and word[1:].replace("_", "").isdigit()} - set(makes)


def _tensors(x: Any) -> list[torch.Tensor]:
    if isinstance(x, torch.Tensor):
        return [x]
    if isinstance(x, dict):
        x = x.values()
    elif not isinstance(x, (tuple, list)):
        return []
    return [tensor for part in x for tensor in _tensors(part)]


def _current_stream() -> Callable:
    from triton.runtime import driver
    return driver.active.get_current_stream
