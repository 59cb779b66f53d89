# SPDX-License-Identifier: Apache-2.0
"""examples/guides/architectures.py and its small models: the experts of every model type of transformers."""

import pytest
import torch

from architectures import decorated_types, judged, losses_agree
from ds_mxfp8_moe.compute.formula import SWIGLU_OAI, Activation
from ds_mxfp8_moe.recognition.activation_proof import activation_of
from small_models import experts_of, loss_of, small_model

CLAMPED = Activation("silu", limit=10.0)
# Classes of experts that compute no plain SwiGLU.
OTHERS = {
    "DeepseekV4Experts": CLAMPED, "Glm5NextTextExperts": CLAMPED, "HYV4Experts": CLAMPED, "HYV4VLExperts": CLAMPED,
    "GptOssExperts": SWIGLU_OAI, "MiniMaxM3VLExperts": SWIGLU_OAI, "OpenAIPrivacyFilterExperts": SWIGLU_OAI,
    "NemotronHExperts": Activation("relu_squared"), "Gemma4TextExperts": Activation("gelu_tanh"),
    "Inkling2Experts": None, "Inkling2LoopExperts": None,
}


@pytest.mark.slow
def test_every_type_has_a_small_model_whose_experts_are_trained_and_known():
    failures, seen = {}, set()
    for model_type in decorated_types():
        try:
            model = small_model(model_type, torch.float32)
            loss = loss_of(model, torch.randint(3, 128, (2, 16)))
            loss.backward()
            all_experts = experts_of(model)
            untrained = [name for name, experts in all_experts.items()
                         for p in experts.parameters() if p.grad is None or not bool(p.grad.abs().sum() > 0)]
            assert loss.isfinite() and not untrained, untrained
            for experts in all_experts.values():
                seen.add(kind := type(experts).__name__)
                expected = OTHERS.get(kind, Activation("silu"))
                assert activation_of(experts) == activation_of(experts.eval().bfloat16()) == expected, kind
        except Exception as error:
            failures[model_type] = f"{type(error).__name__}: {error}"[:200]
    assert failures.keys() <= {"diffusion_gemma"}, failures  # in 5.17, its default config has no vision tower
    assert len(seen & OTHERS.keys()) >= 5, seen


def test_a_type_that_does_not_agree_has_its_reason():
    row = {"type": "a", "bf16": 0.001, "mxfp8": 0.002, "lora": 0.0, "reload": 0.0, "replay": True,
           "converted": "2 of 2"}
    assert judged(row) == {**row, "correct": True}
    for change, reason in (({"mxfp8": 0.02}, "farther from transformers than mxfp8 may be"),
                           ({"bf16": float("nan")}, "farther from transformers than bf16 may be"),
                           ({"bf16": 0.01, "float32": 1e-7}, "farther from transformers than bf16 may be; in float32, "
                            "the losses differ by 1.0e-07"),
                           ({"converted": "1 of 2"}, "1 layers stay transformers' own: no line says why"),
                           ({"replay": False}, "a replay gives another loss")):
        assert judged(row | change)["reason"] == reason
    assert judged({"type": "a", "reason": "lora: no"})["correct"] is False
    assert losses_agree({**row, "replay": False})
    assert not losses_agree({**row, "converted": "1 of 2"}) and not losses_agree({"type": "a"})
