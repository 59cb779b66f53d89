# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs in processes that many cases share."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def capture(graph: torch.cuda.CUDAGraph) -> Iterator[None]:
    """Captures what is launched within. What earlier cases left in reference cycles, such as staging and graphs, is
    freed before: freeing it waits for the device, which ends a capture, and the garbage collector may come at any
    time."""
    gc.collect()
    gc.disable()
    try:
        with torch.cuda.graph(graph):
            yield
    finally:
        gc.enable()
