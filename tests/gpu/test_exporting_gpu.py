# SPDX-License-Identifier: Apache-2.0
"""Files in FP8 that the kernels' casts made, and their loss."""

import pytest
import torch
from transformers import AutoModelForCausalLM, FineGrainedFP8Config

from tests.support.autoep_models import batch
from tests.support.exporting_cases import MULTIPLIED, check_files, saved, saved_with_its_loss
from tests.support.pretrained_models import HELD_OUT


@pytest.mark.parametrize("combinations", [((1, 2), (3, 2), (2, 1))])
def test_files_are_those_of_plain_torch(pair, tmp_path, combinations):
    assert all(result is True for result in pair.run(saved, tmp_path, "qwen3_moe", combinations))
    check_files(tmp_path)


def test_the_files_have_the_loss_of_training(pair, tmp_path):
    _, after = pair.run(saved_with_its_loss, tmp_path, MULTIPLIED)[0]
    net = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16,  # its FP8 kernels are in a hub
                                               quantization_config=FineGrainedFP8Config(dequantize=True)).cuda().eval()
    ids = batch(HELD_OUT, rank=0).cuda()
    with torch.no_grad():
        assert net(input_ids=ids, labels=ids).loss.item() == pytest.approx(after, rel=1e-3)
