# SPDX-License-Identifier: Apache-2.0
"""Writes a model's tensors to files, one after the other, as transformers names and indexes them."""

import json
import re
from pathlib import Path

import torch

from .staging import INDEX, WEIGHTS_FILE

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def size_in_bytes(size: int | str) -> int:
    """A number of bytes, or a text like "5GB". Raises ValueError for any other."""
    found = re.fullmatch(r"(\d+) ?([KMGT]B)?", str(size))
    if found is None:
        raise ValueError(f'max_shard_size is {size!r}; expected a number of bytes, or a text like "5GB"')
    return int(found[1]) * _UNITS[found[2] or ""]


class ShardWriter:
    """safetensors files of limited size in an empty folder. One of them at a time is held in host memory."""

    def __init__(self, folder: Path, most_bytes: int):
        """`most_bytes`: of a file's tensors. A larger tensor gets a file of its own."""
        self.folder, self.most_bytes = folder, most_bytes
        self._held: dict[str, torch.Tensor] = {}
        self._files: list[tuple[Path, list[str]]] = []
        self._bytes = self._total = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Copies a tensor, and writes a file if it is full."""
        if self._held and self._bytes + tensor.nbytes > self.most_bytes:
            self._write()
        self._held[name] = tensor.to("cpu", copy=True).contiguous()
        self._bytes += tensor.nbytes

    def finish(self) -> None:
        """Writes the last file and the index, and gives all files their names."""
        self._write()
        count, place = len(self._files), {}
        for i, (path, names) in enumerate(self._files, 1):
            new = f"model-{i:05d}-of-{count:05d}.safetensors" if count > 1 else WEIGHTS_FILE
            path.rename(self.folder / new)
            place |= dict.fromkeys(names, new)
        if count > 1:
            index = {"metadata": {"total_size": self._total}, "weight_map": place}
            (self.folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")

    def _write(self) -> None:
        from safetensors.torch import save_file  # transformers brings it

        path = self.folder / f"model-{len(self._files) + 1:05d}.part"
        self._files.append((path, list(self._held)))
        save_file(self._held, path, metadata={"format": "pt"})
        self._total += self._bytes
        self._held, self._bytes = {}, 0
