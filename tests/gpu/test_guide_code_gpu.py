# SPDX-License-Identifier: Apache-2.0
"""The code of the guides, on GPUs."""

import pytest
import torch

from tests.support import guide_code_cases as guides
from tests.support.registries_cases import needs_exchange


@pytest.mark.parametrize("guide", [guides.quick_start, guides.classic, guides.trainer, guides.accelerate, guides.lora,
                                   guides.metrics, guides.serving,
                                   pytest.param(guides.plain_torch, marks=needs_exchange)],
                         ids=lambda guide: guide.__name__)
def test_scripts(pair, tmp_path, guide):
    pair.run(guide, tmp_path)


def test_building_blocks(pair, tmp_path):
    assert min(pair.run(guides.building_blocks, tmp_path)) > 22


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="AllToAll's ranks are on GPUs of their own")
def test_all_to_all(pair, tmp_path):
    assert max(pair.run(guides.all_to_all, tmp_path)) < 0.05
