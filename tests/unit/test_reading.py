# SPDX-License-Identifier: Apache-2.0
"""Parts of files on a device: their bytes, in the order of the calls, by plain reads and by a GPU's pinned buffers."""

import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from ds_mxfp8_moe.checkpoint import reading
from ds_mxfp8_moe.checkpoint.reading import AHEAD, BUFFER_BYTES, FileReads

CPU, GPU = torch.device("cpu"), SimpleNamespace(type="cuda")


class _TorchWithGPU:
    """torch, whose GPU is the CPU."""

    cuda = SimpleNamespace(device=lambda device: nullcontext(),
                           Event=lambda: SimpleNamespace(record=lambda: None, synchronize=lambda: None))

    def __getattr__(self, name):
        return getattr(torch, name)

    def empty(self, *size, dtype, device=None, pin_memory=False):
        return torch.empty(*size, dtype=dtype)


@pytest.fixture(params=[CPU, GPU], ids=["cpu", "gpu"])
def reads(request, monkeypatch):
    monkeypatch.setattr(reading, "torch", _TorchWithGPU())
    with FileReads(request.param) as made:
        yield made


def written(path, nbytes: int) -> torch.Tensor:
    data = torch.randint(256, (nbytes, ), dtype=torch.uint8)
    path.write_bytes(data.numpy().tobytes())
    return data


def test_any_part_of_a_file_is_read(reads, tmp_path):
    file = tmp_path / "file"
    data = written(file, 2 * BUFFER_BYTES + 77)
    reads.open(file)
    for start, nbytes in ((0, len(data)), (3, BUFFER_BYTES), (5, BUFFER_BYTES + 1), (len(data) - 1, 1), (9, 0)):
        assert torch.equal(reads.read(file, start, nbytes), data[start:start + nbytes])
    with pytest.raises(OSError, match="cut short"):
        reads.read(file, 1, len(data))
    assert torch.equal(reads.read(file, 0, len(data)), data)  # all buffers are back


def test_jobs_are_read_ahead_in_order_and_an_error_comes_in_its_place(reads):
    begun = []

    def read(job):
        begun.append(job)
        time.sleep(0.001 * (job % 3))
        if job == 12:
            raise OSError("twelve")
        return job

    results = reads.ahead(read, range(30))
    assert [next(results) for _ in range(4)] == [0, 1, 2, 3]
    assert len(begun) <= 4 + AHEAD
    assert [next(results) for _ in range(8)] == [*range(4, 12)]
    with pytest.raises(OSError, match="twelve"):
        next(results)
