# SPDX-License-Identifier: Apache-2.0
"""Adapters of the expert FFN: output and gradients are those of weights into which they are merged."""

from unittest import mock

import pytest
import torch

from tests.support.expert_adapters_cases import assert_equals_merged_weights, run
from tests.support.expert_ffn_cases import RECIPES


@pytest.mark.parametrize("recipe_name, dtype", [
    ("bf16", torch.float32), ("bf16", torch.bfloat16), ("hp-32", torch.bfloat16), ("mxfp8-128", torch.bfloat16),
    ("all-wires-mxfp8", torch.bfloat16)])
def test_equals_merged_weights(one_rank, recipe_name, dtype):
    assert_equals_merged_weights(recipe_name, dtype)


def test_frozen_weights_get_no_gradient(one_rank):
    with mock.patch("ds_mxfp8_moe.ffn.expert_math.grouped_mm_wgrad_rows") as wgrad:
        run(RECIPES["hp-32"], torch.bfloat16)
    assert not wgrad.called
