# SPDX-License-Identifier: Apache-2.0
"""What BatchedGradients (zero.py) knows beside DeepSpeed's attributes: which gradients wait, and where they go."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from deepspeed.runtime.zero.stage_1_and_2 import GradPartitionBufferGroup
from torch.distributed import ProcessGroup

from .sums import Sums


def split(flat: torch.Tensor, likes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The parts of a flat tensor that have the shapes of `likes`, one after the other."""
    parts = flat.split([like.numel() for like in likes])
    return [part.view(like.shape) for part, like in zip(parts, likes, strict=True)]


class Place(NamedTuple):
    """Where the gradient of a parameter goes.

    Attributes:
        process_group: the ranks that it is averaged over.
        pieces: (rank of that group, elements) for each partition that it touches, in their order in the gradient.
        own: (start in the gradient, start in this rank's partition, elements), or None if this rank has no piece.
        alone: whether this rank is the only one of its group, and sums are in the gradients' dtype.
    """

    process_group: ProcessGroup
    pieces: list[tuple[int, int]]
    own: tuple[int, int, int] | None
    alone: bool


class Batching:
    """Gradients that wait, and sums.

    Attributes:
        waiting: parameters whose gradients are not in the bucket yet. `bucket.grads` holds the gradients. The bucket
            counts their elements already.
        elements: how many elements these gradients have.
        alone: parameters that no other rank has, and whose gradients are not in the sums yet, with their keys.
        alone_elements: how many elements these gradients have.
        in_hooks: gradients come from autograd's hooks, which may run on different streams. If false, they come after
            the backward pass.
        divisor: by which sums over ranks become averages.
        stream: the one that computed the gradients that wait. None: the current one.
        places: parameter id -> its place.
        fresh: groups whose sum began since the last epilogue: in this pass (ZeRO-2), or in this step (ZeRO-1).
            Gradients are copied into such a sum, and added to others.
        specs, likes: for each group, DeepSpeed's description of the parts of its sum, and tensors of their shapes.
        norm: of all gradients in this step, as DeepSpeed computed it.
        scaled: gradients that are unscaled and clipped already.
        sums: which gradients are in the sums already.
    """

    def __init__(self, bucket: Any, in_hooks: bool, divisor: int, sums: Sums):
        self.bucket, self.in_hooks, self.divisor, self.sums = bucket, in_hooks, divisor, sums
        self.waiting: list[torch.nn.Parameter] = []
        self.elements = 0
        self.alone: list[tuple[torch.nn.Parameter, tuple]] = []
        self.alone_elements = 0
        self.stream: Any = None
        self.places: dict[int, Place] = {}
        self.fresh: set[int] = set()
        self.specs: dict[int, list] = {}
        self.likes: dict[int, list] = {}
        self.norm: torch.Tensor | None = None
        self.scaled: torch.Tensor | None = None


class Parts(GradPartitionBufferGroup):
    """The sum of a group's gradients in this rank's partition, and its parts, one for each parameter."""

    def __init__(self, flat_partition: torch.Tensor, likes: list, specs: list):
        list.__init__(self, split(flat_partition, likes))
        self.flat_partition, self._view_specs = flat_partition, specs
        for part, (_, _, is_padding) in zip(self, specs, strict=True):
            if is_padding:
                part._mxfp8_padding = True
