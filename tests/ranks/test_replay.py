# SPDX-License-Identifier: Apache-2.0
"""Recording and replaying routes: the same bits at once, the model's own rule elsewhere, errors before the forward."""

from unittest import mock

import deepspeed.comm as dist
import pytest
import torch
from architectures import ARCHITECTURES, tiny_model
from autoep_models import batch, ds_config
from slow import slow_except
from test_autoep_presets import QUICK

import ds_mxfp8_moe
from ds_mxfp8_moe import record_routes, replay_routes
from ds_mxfp8_moe.layers.found import converted_layers

MXFP8 = {"enabled": True}
BF16 = {"enabled": True, "recipe": "bf16"}  # in float32 models, this is float32


def outcome(model, ids) -> dict[str, torch.Tensor]:
    """Loss, logits and all gradients of one forward and backward."""
    torch.manual_seed(1 + dist.get_rank())  # phimoe's router draws at random
    model.zero_grad()
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": out.loss.detach(), "logits": out.logits.detach(), **grads}


def different(first: dict, second: dict) -> list[str]:
    assert first.keys() == second.keys()
    return [name for name in first if not torch.equal(first[name], second[name])]


def other_routes(layers: list, tokens: int = 32) -> torch.Tensor:
    """Random choices, different on every rank."""
    generator = torch.Generator().manual_seed(9 + dist.get_rank())
    shape = tokens, len(layers), layers[0].num_experts
    return torch.rand(shape, generator=generator).argsort(-1)[..., :layers[0].router.top_k]


class Forced:
    """Inside the context, the routers of a Hugging Face model choose given experts."""

    def __init__(self, routes_TLK: torch.Tensor, num_experts: int):
        self._num_experts, self._left = num_experts, list(routes_TLK.unbind(1))
        self._topk = torch.topk
        self._patches = [mock.patch.object(torch, "topk", self.topk),
                         mock.patch.object(torch.Tensor, "topk", lambda *args, **keys: self.topk(*args, **keys)),
                         mock.patch("transformers.models.phimoe.modeling_phimoe.sparsemixer", self.sparsemixer)]

    def topk(self, scores, k, dim=-1, **keys):
        if scores.dim() != 2 or scores.shape[1] != self._num_experts or not self._left:
            return self._topk(scores, k, dim=dim, **keys)
        expert_TK = self._left.pop(0)
        return scores.gather(1, expert_TK), expert_TK

    def sparsemixer(self, logits_TE, jitter_eps, training, top_k):
        """In evaluation mode, with the chosen experts among those that the softmax is over."""
        expert_TK, weights, others_TE = self._left.pop(0), [], logits_TE
        for expert_T1 in expert_TK.split(1, dim=1):
            largest_T1 = others_TE.max(1, keepdim=True)[0]
            near_TE = (largest_T1 - logits_TE) / logits_TE.abs().maximum(largest_T1) <= 2 * jitter_eps
            near_TE = near_TE.scatter(1, expert_T1, True)
            weights.append(others_TE.masked_fill(~near_TE, -torch.inf).softmax(1).gather(1, expert_T1))
            others_TE = others_TE.scatter(1, expert_T1, -torch.inf)
        return torch.cat(weights, 1), expert_TK

    def __enter__(self):
        for patch in self._patches:
            patch.start()

    def __exit__(self, *_):
        for patch in self._patches:
            patch.stop()
        assert not self._left


# DeepSeek-V2 itself gives experts outside the best groups the weight 0.
CHANGES = {"deepseek_v2": {"topk_method": "greedy"}}


def every_type(model_type: str) -> tuple:
    """What differs if a recording is replayed at once, and by how much from Hugging Face with other experts."""
    changes = CHANGES.get(model_type, {})
    engine = ds_mxfp8_moe.initialize(model=tiny_model(model_type, torch.float32, **changes),
                                     config=ds_config(BF16, 0, 2))[0]
    model, ids = engine.module, batch(0)
    layers = converted_layers(model)
    plain = outcome(model, ids)
    with record_routes(engine) as routes:
        recorded = outcome(model, ids)
    with replay_routes(engine, routes):
        replayed = outcome(model, ids)
    drifted_TLK = other_routes(layers)
    assert routes[0].shape == (*ids.shape, *drifted_TLK.shape[1:])
    assert (drifted_TLK.sort()[0] != routes[0].view_as(drifted_TLK).sort()[0]).any()
    model.eval()
    with replay_routes(engine, drifted_TLK):
        ours = outcome(model, ids)
    plain_model = tiny_model(model_type, torch.float32, **changes).eval()
    with Forced(drifted_TLK, layers[0].num_experts):
        own = outcome(plain_model, ids)
    errors = [float((ours["logits"] - own["logits"]).abs().max())]
    for layer in layers:
        gate = layer.router.gate.weight
        name = next(name for name, p in plain_model.named_parameters() if torch.equal(p, gate))
        errors.append(float((gate.grad - own[name]).norm() / own[name].norm()))
    engine.destroy()
    return different(plain, recorded), different(plain, replayed), errors


@pytest.mark.parametrize("model_type", slow_except(ARCHITECTURES, *QUICK))
def test_every_model_type(ranks2, model_type):
    for recorded, replayed, errors in ranks2.run(every_type, model_type):
        assert recorded == replayed == []
        assert max(errors) < 1e-4, errors
