# SPDX-License-Identifier: Apache-2.0
"""Sums of weight gradients, to which the kernels of weight gradients add.

An engine may keep one sum of all micro-batches' gradients (compat/sums.py). Then no gradient needs memory of its own.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch


class Sum(NamedTuple):
    """Where a stacked weight's gradient goes.

    Attributes:
        out_ENK: as the weight, contiguous.
        begun: whether the gradient is added to what out_ENK holds. Else it is written.
        factor: a power of two, by which the gradient is multiplied before it is added.
        place: bytes from the first of the sums that a backward writes, on which its recording depends.
    """

    out_ENK: torch.Tensor
    begun: bool = False
    factor: float = 1.0
    place: int = 0

    def take(self, gradient_ENK: torch.Tensor) -> None:
        """Writes or adds a gradient. As in the kernels, the gradient, its product and the sum are rounded."""
        gradient_ENK = gradient_ENK.to(self.out_ENK.dtype)
        if not self.begun:
            self.out_ENK.copy_(gradient_ENK)
        else:
            self.out_ENK.add_(gradient_ENK if self.factor == 1 else gradient_ENK * self.factor)


def goal_of(sums: Sequence[Sum]):
    """What the kernels take for the sums of a GEMM, one for each of its splits (grouped_wgrad_hopper.Goal). None: they
    cannot write there."""
    from ..ops.triton_kernels.grouped_wgrad_hopper import Goal  # Triton exists on Linux alone
    outs = [one.out_ENK for one in sums]
    first, begun, factor = outs[0], sums[0].begun, sums[0].factor
    E, N, K = first.shape
    expert, at = N * K * first.element_size(), [out.data_ptr() for out in outs]
    distances = {after - before for before, after in pairwise(at)} or {E * expert}
    jump, rest = divmod(distances.pop(), expert)
    storages = {out.untyped_storage().data_ptr() for out in outs}
    if (distances or rest or jump < E or len(storages) > 1 or at[0] % 16 or first.element_size() != 2
            or any((one.begun, one.factor) != (begun, factor) for one in sums)):
        return None
    whole = first.as_strided((jump * (len(sums) - 1) + E, N, K), first.stride())
    return Goal(whole, None if jump == E else jump, begun, None if factor == 1 else factor)
