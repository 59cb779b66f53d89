# SPDX-License-Identifier: Apache-2.0
"""The MXFP8 operands of a model that from_pretrained made."""

import torch

from ds_mxfp8_moe.layers.held_experts import HeldExperts


def held(net) -> dict[str, HeldExperts]:
    return {name: module for name, module in net.named_modules() if isinstance(module, HeldExperts)}


def operands(module: HeldExperts, first: int, count: int):
    return module.take("experts", first, count, torch.bfloat16, torch.device("cpu")).operands()
