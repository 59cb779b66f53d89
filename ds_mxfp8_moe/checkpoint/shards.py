# SPDX-License-Identifier: Apache-2.0
"""The files of a checkpoint in safetensors, whose tensors are read one by one. Errors name a tensor or a file."""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open


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


class ShardReader:
    """Files of a checkpoint. The one that was read last stays open.

    Attributes:
        file_of: a tensor's file, by the tensor's name.
    """

    def __init__(self, files: Sequence[str], folder: str | os.PathLike | None = None):
        """Arguments:
            folder: in which the files must lie, whatever the checkpoint's index says.

        Raises:
            RuntimeError: a file cannot be read or lies elsewhere, or two of them have the same tensor.
        """
        self.file_of: dict[str, str] = {}
        self._last: tuple[str, Any] = "", None
        for file in files:
            if folder is not None and not Path(os.path.abspath(file)).is_relative_to(os.path.abspath(folder)):
                raise RuntimeError(f"the checkpoint names the file {file}, which lies outside of its folder {folder}: "
                                   "put it there")
            try:
                with safe_open(file, framework="pt") as opened:
                    names = list(opened.keys())
            except (SafetensorError, OSError) as error:
                size = f"{os.path.getsize(file)} bytes" if os.path.isfile(file) else "missing"
                raise RuntimeError(f"the checkpoint file {file} ({size}) cannot be read: {error}. It was "
                                   "probably cut short while it was copied: copy it again") from error
            for name in names:
                if self.file_of.setdefault(name, file) != file:
                    raise RuntimeError(f"{name} is in two files of the checkpoint, {self.file_of[name]} and {file}: "
                                       "remove the one that is left over from another save, in the index too")

    def read(self, name: str, index: int | None = None) -> torch.Tensor:
        """The tensor, or its part at `index` of the first axis, in host memory.

        Raises:
            RuntimeError: no file has it, or it cannot be read.
        """
        if name not in self.file_of:
            raise RuntimeError(f"{name} is in no file of the checkpoint")
        file = self.file_of[name]
        try:
            if self._last[0] != file:  # which closes the one before: the pages of open files count as host memory
                self._last = file, safe_open(file, framework="pt")
            if index is None:
                return self._last[1].get_tensor(name)
            return self._last[1].get_slice(name)[index:index + 1][0]
        except (SafetensorError, OSError, IndexError) as error:
            raise RuntimeError(f"{name} cannot be read from {file}: {error}") from error

    @contextmanager
    def slices(self, names: Iterable[str]) -> Iterator[dict[str, Any]]:
        """Tensors that are read when somebody indexes them, as transformers does, inside the context."""
        with ExitStack() as stack:
            opened: dict[str, Any] = {}
            found = {}
            for name in names:
                file = self.file_of[name]
                if file not in opened:
                    opened[file] = stack.enter_context(safe_open(file, framework="pt"))
                found[name] = opened[file].get_slice(name)
            yield found
