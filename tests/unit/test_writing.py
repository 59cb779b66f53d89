# SPDX-License-Identifier: Apache-2.0
"""Files of limited size, and their index."""

import json

import pytest
import torch
from safetensors.torch import load_file

from ds_mxfp8_moe.checkpoint.writing import ShardWriter, size_in_bytes


def write(directory, sizes, most_bytes) -> list[str]:
    """The files after tensors of these sizes in bytes were written."""
    directory.mkdir()
    files = ShardWriter(directory, most_bytes)
    for i, size in enumerate(sizes):
        files.add(f"t{i}", torch.full((size, ), i, dtype=torch.uint8))
    files.finish()
    found = {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}
    assert all(torch.equal(found.pop(f"t{i}"), torch.full((size, ), i, dtype=torch.uint8))
               for i, size in enumerate(sizes)) and not found
    return sorted(path.name for path in directory.iterdir())


def test_files_are_as_large_as_allowed(tmp_path):
    index = "model.safetensors.index.json"
    three = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert write(tmp_path / "three", [4, 4, 3, 20], 8) == [*three, index]
    places = json.loads((tmp_path / "three" / index).read_text())
    assert places == {"metadata": {"total_size": 31},
                      "weight_map": {"t0": three[0], "t1": three[0], "t2": three[1], "t3": three[2]}}
    assert write(tmp_path / "one", [4], 8) == ["model.safetensors"]


def test_a_view_is_written_without_what_it_is_a_view_of(tmp_path):
    files = ShardWriter(tmp_path, 10**6)
    whole = torch.arange(12).view(3, 4)
    files.add("a", whole[1])
    files.add("b", whole.t())
    files.finish()
    found = load_file(tmp_path / "model.safetensors")
    assert torch.equal(found["a"], whole[1]) and torch.equal(found["b"], whole.t())


@pytest.mark.parametrize("size, expected", [(7, 7), ("7", 7), ("5GB", 5 * 10**9), ("300 KB", 300_000)])
def test_sizes(size, expected):
    assert size_in_bytes(size) == expected


@pytest.mark.parametrize("size", ["5GiB", "many", -1, 1.5])
def test_other_sizes_are_errors(size):
    with pytest.raises(ValueError, match='expected a number of bytes, or a text like "5GB"'):
        size_in_bytes(size)
