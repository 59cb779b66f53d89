# SPDX-License-Identifier: Apache-2.0
"""A small model with MoE blocks to recognize."""

from deepspeed.moe.layer import MoE as PlainMoE
from torch import nn

from tests.support.models import HIDDEN, gelu_mlp


class Block(nn.Module):

    def __init__(self, cls=PlainMoE):
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.moe = cls(HIDDEN, gelu_mlp(), num_experts=4, k=2)

    def forward(self, x):
        return x + self.moe(self.norm(x))[0]


class Model(nn.Module):

    def __init__(self, *blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks or [Block(), Block()])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x
