# SPDX-License-Identifier: Apache-2.0
"""Quantized weights that all calls of a layer in one step share. Those of frozen experts are shared by all steps."""

from collections.abc import Sequence
from operator import attrgetter

import torch
from deepspeed.accelerator import get_accelerator

from ..compute.mx import MXTensor

_VERSION = attrgetter("_version")


class KeptWeights:
    """The quantized weights of one layer. Its first calls in a step make them, and later calls use them.

    Parameters with another address or version are quantized again, for example after load_state_dict. A write into
    `parameter.data` changes neither, so whoever does that has to call `clear`. The engine does after DeepSpeed's
    optimizers have written (engine/keeping.py).

    `transposes`: keeps one form, of which backward makes the transpose. Else the forms of forward and backward are
    kept.
    """

    def __init__(self, transposes: bool = False):
        self.transposes = transposes
        self.clear()

    def clear(self) -> None:
        """Frees all kept weights."""
        # The parameters are held, so that their addresses do not come back as those of others.
        self._parameters: Sequence[torch.Tensor] = ()
        self._state: list = []
        self._forward: dict[str, MXTensor] = {}
        self._backward: dict[str, MXTensor] = {}

    def of(self, weights: Sequence[torch.Tensor], transposed: bool) -> dict[str, MXTensor] | None:
        """What is kept of these weights. The caller adds to this dict what it makes.

        Args:
            weights: the layer's parameters, or the tensors that autograd saved of them.
            transposed: for GEMMs that contract over the weights' second to last axis, as backward's do.

        Returns:
            Quantized weights by name. None: the call can neither use kept weights nor keep its own. A CUDA graph is
            being captured, which would replay on weights of this step; or the weights are not parameters, so they may
            be new in every call.
        """
        if weights[0].is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        # Another stream does not wait for the kernels that made them.
        stream = get_accelerator().current_stream(weights[0].device.index)
        state = [stream, *map(torch.Tensor.data_ptr, weights), *map(_VERSION, weights)]
        if state != self._state:
            if not all(isinstance(w, torch.nn.Parameter) for w in weights):
                return None
            self.clear()
            self._parameters, self._state = tuple(weights), state
        return self._backward if transposed and not self.transposes else self._forward
