# SPDX-License-Identifier: Apache-2.0
"""A model of classic layers whose activations are recomputed in each way."""

import functools

import deepspeed
from deepspeed.runtime.activation_checkpointing.checkpointing import non_reentrant_checkpoint
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from tests.support.models import Net, mse


def without_early_stop(function, *args):
    with set_checkpoint_early_stop(False):
        return checkpoint(function, *args, use_reentrant=False)


WAYS = {
    "stored": lambda function, *args: function(*args),
    "reentrant": functools.partial(checkpoint, use_reentrant=True),
    "non-reentrant": functools.partial(checkpoint, use_reentrant=False),
    "non-reentrant-to-the-end": without_early_stop,
    "deepspeed": deepspeed.checkpointing.checkpoint,
    "deepspeed-non-reentrant": non_reentrant_checkpoint,
}


class CheckpointedNet(Net):
    """Net, its blocks recomputed in one of WAYS."""

    def __init__(self, way, *args, **keys):
        super().__init__(*args, **keys)
        self.way = WAYS[way]

    def forward(self, x, target):
        x, total = self.first(x), 0.0
        for block in self.blocks:
            x, aux = self.way(block, x)
            total = total + aux
        return mse(self.last(x), target) + 0.01 * total
