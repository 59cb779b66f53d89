# SPDX-License-Identifier: Apache-2.0
"""Modules that users may have for experts, and the reason for which one is refused."""

import pytest
import torch.nn.functional as F
from deepspeed.moe.experts import Experts
from torch import nn

from ds_mxfp8_moe.compute.formula import NotRecognized
from ds_mxfp8_moe.recognition.recognize import recognize

H, FFN = 64, 96


def local_experts(template, num=2):
    return Experts(template, num).deepspeed_experts


def refused(template, *, num=2, hidden_size=H):
    """The reason, as text."""
    experts = template if isinstance(template, nn.ModuleList) else local_experts(template, num)
    with pytest.raises(NotRecognized) as caught:
        recognize(experts, hidden_size)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def mlp(act=None, hidden=H, ffn=FFN, **keys):
    return nn.Sequential(nn.Linear(hidden, ffn, **keys), act or nn.ReLU(), nn.Linear(ffn, hidden, **keys))


class Gated(nn.Module):
    """Names and their order say nothing about the roles."""

    def __init__(self, hidden=H, ffn=FFN, act=F.silu, bias=False):
        super().__init__()
        self.a = nn.Linear(ffn, hidden, bias=bias)
        self.b = nn.Linear(hidden, ffn, bias=bias)
        self.c = nn.Linear(hidden, ffn, bias=bias)
        self.hidden_size, self.act = hidden, act

    def forward(self, x):
        return self.a(self.b(x) * self.act(self.c(x)))


class Packed(nn.Module):
    def __init__(self, gate_first, act=F.silu, bias=True, in_turn=False):
        super().__init__()
        self.in_turn = in_turn
        self.gate_up = nn.Linear(H, 2 * FFN, bias=bias)
        self.down = nn.Linear(FFN, H, bias=bias)
        self.gate_first, self.act = gate_first, act

    def forward(self, x):
        both = self.gate_up(x)
        first, second = (both[..., 0::2], both[..., 1::2]) if self.in_turn else both.chunk(2, dim=-1)
        gate, up = (first, second) if self.gate_first else (second, first)
        return self.down(self.act(gate) * up), None


class Mlp(nn.Module):
    """Two Linears with `change` between them, or around them: a function (module, x) -> y."""

    def __init__(self, compute, hidden=H, ffn=FFN):
        super().__init__()
        self.up = nn.Linear(hidden, ffn)
        self.down = nn.Linear(ffn, hidden)
        self.compute = compute

    def forward(self, x):
        return self.compute(self, x)
