# SPDX-License-Identifier: Apache-2.0
"""Writes a model's tensors to files, one after the other, as transformers names and indexes them."""

import json
import re
from pathlib import Path

import torch

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_INDEX = "model.safetensors.index.json"


def size_in_bytes(size: int | str) -> int:
    """A number of bytes, or a text like "5GB". Raises ValueError for any other."""
    found = re.fullmatch(r"(\d+) ?([KMGT]B)?", str(size))
    if found is None:
        raise ValueError(f'max_shard_size is {size!r}; expected a number of bytes, or a text like "5GB"')
    return int(found[1]) * _UNITS[found[2] or ""]


class Shards:
    """safetensors files of limited size. One of them at a time is held in host memory.

    A folder's earlier files are replaced when all new ones are complete.
    """

    def __init__(self, directory, most_bytes: int):
        """`most_bytes`: of a file's tensors. A larger tensor gets a file of its own."""
        self.directory, self.most_bytes = Path(directory), most_bytes
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
        """Writes the last file and the index, and puts all files in place."""
        self._write()
        for old in self.directory.glob("model*.safetensors"):
            if re.fullmatch(r"model(-\d{5}-of-\d{5})?\.safetensors", old.name):
                old.unlink()
        (self.directory / _INDEX).unlink(missing_ok=True)
        count, place = len(self._files), {}
        for i, (path, names) in enumerate(self._files, 1):
            new = f"model-{i:05d}-of-{count:05d}.safetensors" if count > 1 else "model.safetensors"
            path.rename(self.directory / new)
            place |= dict.fromkeys(names, new)
        if count > 1:
            index = {"metadata": {"total_size": self._total}, "weight_map": place}
            (self.directory / _INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")

    def remove(self) -> None:
        """Removes what is not in place yet."""
        for path, _ in self._files:
            path.unlink(missing_ok=True)

    def _write(self) -> None:
        from safetensors.torch import save_file  # transformers brings it

        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / f"model-{len(self._files) + 1:05d}.part"
        self._files.append((path, list(self._held)))
        save_file(self._held, path, metadata={"format": "pt"})
        self._total += self._bytes
        self._held, self._bytes = {}, 0
