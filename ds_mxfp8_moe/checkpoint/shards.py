# SPDX-License-Identifier: Apache-2.0
"""The files of a checkpoint in safetensors, whose tensors are read one by one. Errors name a tensor or a file."""

import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open

from . import nvfp4
from .reading import FileReads

# As headers of safetensors call them.
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64,
          "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
          "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
          "BOOL": torch.bool}


class _Index(BaseModel):
    """`model.safetensors.index.json`."""

    model_config = ConfigDict(strict=True)

    metadata: dict[str, Any]
    weight_map: dict[str, str] = Field(min_length=1)


def check_index(path: Path) -> None:
    """Raises RuntimeError: the file is no index of a checkpoint. transformers takes for granted that it is one."""
    try:
        _Index.model_validate_json(path.read_bytes())
    except ValidationError as error:
        found = error.errors()[0]
        where = ".".join(map(str, found["loc"])) or "the file"
        raise RuntimeError(f'{path} is no index of a checkpoint, {{"metadata": {{...}}, "weight_map": {{tensor: '
                           f"file}}}}: {where}: {found['msg']}") from None


class _Entry(NamedTuple):
    """A tensor's place in a file. `dtype`: as the file's header calls it. `start`, `nbytes`: in the file."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


class ShardReader:
    """Tensors of a checkpoint's files, which are read onto a device. Use it in a `with` statement.

    Of a weight in NVFP4, the values are one tensor in float32, under the name of a weight in high precision.

    Attributes:
        names: of the tensors, without scales of activations.
        reads: the files.
    """

    def __init__(self, files: Sequence[str], device: torch.device, folder: str | os.PathLike | None = None):
        """Arguments:
            folder: in which the files must lie, whatever the checkpoint's index says.

        Raises:
            RuntimeError: a file cannot be read or lies elsewhere, or two of them have the same tensor. Or weights
                beside some in NVFP4 are in another quantized format.
        """
        self.reads = FileReads(device)
        self._entries: dict[str, _Entry] = {}
        for file in files:
            if folder is not None and not Path(os.path.abspath(file)).is_relative_to(os.path.abspath(folder)):
                raise RuntimeError(f"the checkpoint names the file {file}, which lies outside of its folder {folder}: "
                                   "put it there")
            try:
                with safe_open(file, framework="pt"):  # checks the header, and that the file is whole
                    entries = self._read_header(file)
            except (SafetensorError, OSError) as error:
                size = f"{os.path.getsize(file)} bytes" if os.path.isfile(file) else "missing"
                raise RuntimeError(f"the checkpoint file {file} ({size}) cannot be read: {error}. It was "
                                   "probably cut short while it was copied: copy it again") from error
            for name, entry in entries.items():
                if (other := self._entries.setdefault(name, entry)).file != file:
                    raise RuntimeError(f"{name} is in two files of the checkpoint, {other.file} and {file}: "
                                       "remove the one that is left over from another save, in the index too")
        self._in_nvfp4 = nvfp4.find_weights(self._entries)
        hidden = {part for parts in self._in_nvfp4.values() for part in parts}
        self.names = [*self._in_nvfp4, *(name for name in self._entries if name not in hidden
                                         and not (hidden and nvfp4.OF_ACTIVATIONS.fullmatch(name)))]

    def __enter__(self) -> "ShardReader":
        return self

    def __exit__(self, *error) -> None:
        self.reads.__exit__(*error)

    def read(self, name: str, part: range | None = None) -> torch.Tensor:
        """The tensor, or its `part` of the first axis, on the device. Any thread may call this.

        Raises:
            RuntimeError: no file has it, or it cannot be read.
        """
        if (parts := self._in_nvfp4.get(name)) is not None:
            tensor = nvfp4.values(name, parts, *map(self._read, parts))
            return tensor if part is None else tensor[part.start:part.stop]
        return self._read(name, part)

    def lazy(self, name: str) -> "LazyTensor":
        dtype = "F32" if name in self._in_nvfp4 else self._entries[name].dtype
        return LazyTensor(partial(self.read, name), dtype)

    def _read(self, name: str, part: range | None = None) -> torch.Tensor:
        if name not in self._entries:
            raise RuntimeError(f"{name} is in no file of the checkpoint")
        file, dtype, shape, start, nbytes = self._entries[name]
        if dtype not in DTYPES:
            raise RuntimeError(f"{name} has dtype {dtype} in {file}; supported are {', '.join(DTYPES)}")
        if part is not None:
            if not shape or part.stop > shape[0]:
                raise RuntimeError(f"{name} cannot be read from {file}: its shape is {shape}, so it has no part "
                                   f"{part.stop - 1}")
            of_one = nbytes // shape[0]
            shape, start, nbytes = (len(part), *shape[1:]), start + part.start * of_one, len(part) * of_one
        try:
            return self.reads.read(file, start, nbytes).view(DTYPES[dtype]).view(shape)
        except OSError as error:
            raise RuntimeError(f"{name} cannot be read from {file}: {error}") from error

    def _read_header(self, file: str) -> dict[str, _Entry]:
        opened = self.reads.open(file)
        size = int.from_bytes(opened.read(8), "little")
        found = {}
        for name, one in json.loads(opened.read(size)).items():
            if name != "__metadata__":
                start, end = one["data_offsets"]
                found[name] = _Entry(file, one["dtype"], tuple(one["shape"]), 8 + size + start, end - start)
        return found


class LazyTensor:
    """A tensor that is read when somebody indexes it, as transformers does with safetensors' slices."""

    def __init__(self, read: Callable[[], torch.Tensor], dtype: str):
        self._read, self._dtype = read, dtype

    def get_dtype(self) -> str:
        return self._dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._read()[index]
