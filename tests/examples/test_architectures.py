# SPDX-License-Identifier: Apache-2.0
"""examples/guides/architectures.py and its small models."""

import pytest
import torch

from architectures import decorated_types, judged, losses_agree
from small_models import experts_of, loss_of, small_model


@pytest.mark.slow
def test_every_type_has_a_small_model_whose_experts_are_trained():
    failures = {}
    for model_type in decorated_types():
        try:
            model = small_model(model_type, torch.float32)
            loss = loss_of(model, torch.randint(3, 128, (2, 16)))
            loss.backward()
            untrained = [name for name, experts in experts_of(model).items()
                         for p in experts.parameters() if p.grad is None or not bool(p.grad.abs().sum() > 0)]
            assert loss.isfinite() and not untrained, untrained
        except Exception as error:
            failures[model_type] = f"{type(error).__name__}: {error}"[:200]
    assert failures.keys() <= {"diffusion_gemma"}, failures  # in 5.17, its default config has no vision tower


def test_a_type_that_does_not_agree_has_its_reason():
    row = {"type": "a", "bf16": 0.001, "mxfp8": 0.002, "lora": 0.0, "reload": 0.0, "replay": True,
           "converted": "2 of 2"}
    assert judged(row) == {**row, "correct": True}
    assert judged({**row, "mxfp8": 0.02})["reason"] == "farther from transformers than mxfp8 may be"
    assert judged({**row, "bf16": float("nan")})["reason"] == "farther from transformers than bf16 may be"
    assert judged({**row, "bf16": 0.01, "float32": 1e-7})["reason"] == (
        "farther from transformers than bf16 may be; in float32, the losses differ by 1.0e-07")
    assert judged({**row, "converted": "1 of 2"})["reason"] == (
        "1 layers stay transformers' own: no line says why")
    assert judged({**row, "replay": False})["reason"] == "a replay gives another loss"
    assert judged({"type": "a", "reason": "lora: no"})["correct"] is False
    assert losses_agree({**row, "replay": False})
    assert not losses_agree({**row, "converted": "1 of 2"}) and not losses_agree({"type": "a"})
