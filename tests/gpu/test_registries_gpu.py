# SPDX-License-Identifier: Apache-2.0
"""Models of transformers with experts in MXFP8 by `ds_mxfp8_moe.register`, by the bars of the CPU's tests."""

import pytest
import torch

from tests.support.registries_cases import (
    APART,
    DATA_PARALLEL,
    check_a_rank_without_tokens,
    check_data_parallelism,
    check_expert_parallelism,
    check_near_eager,
    needs_exchange,
)


@pytest.mark.parametrize("family, bar", (("qwen3_moe", 22), ("gpt_oss", 20), ("nemotron_h", 20)))
def test_loss_and_gradients_are_near_those_of_eager(family, bar):
    check_near_eager(family, bar, "cuda")


def test_in_bf16():
    check_near_eager("qwen3_moe", 18, "cuda", dtype=torch.bfloat16)


@pytest.mark.parametrize("how, family", DATA_PARALLEL)
def test_data_parallelism(pair, how, family):
    check_data_parallelism(pair, how, family)


@needs_exchange
@pytest.mark.parametrize("family, sizes", APART, ids=str)
def test_expert_parallelism(pair, tmp_path, family, sizes):
    check_expert_parallelism(pair, tmp_path, family, sizes)


@needs_exchange
def test_a_rank_without_tokens(pair, tmp_path):
    check_a_rank_without_tokens(pair, tmp_path)
