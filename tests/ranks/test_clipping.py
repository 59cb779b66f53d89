# SPDX-License-Identifier: Apache-2.0
"""In ZeRO-0, gradients are clipped by the norm of the whole model, although ranks hold different experts."""

import deepspeed.comm as dist
import pytest
import torch
from deepspeed.moe.utils import is_moe_param

from tests.support.autoep_models import batch, engine
from tests.support.models import Layout, make_engine
from tests.support.models import batch as classic_batch

CLIP = 1e-3
SECTION = {"enabled": True, "recipe": "bf16"}
SGD = {"optimizer": {"type": "SGD", "params": {"lr": 1.0}}, "gradient_clipping": CLIP}


def norm(params, values) -> float:
    """Of the whole model. Each rank holds the half of the experts."""
    square = sum(value.double().square().sum() for p, value in zip(params, values, strict=True) if is_moe_param(p))
    dist.all_reduce(square)
    return float(square + sum(value.double().square().sum() for p, value in zip(params, values, strict=True)
                              if not is_moe_param(p))) ** 0.5


def step(net, loss: torch.Tensor) -> tuple[float, float, float | None]:
    """The norm of the step, the one of the gradients, and the one that the engine reports."""
    net.backward(loss)
    params = [p for p in net.module.parameters() if p.grad is not None]
    before, gradients = [p.detach().clone() for p in params], norm(params, [p.grad for p in params])
    net.step()
    moved = norm(params, [p - old for p, old in zip(params, before, strict=True)])
    return moved, gradients, net.get_global_grad_norm()


def autoep_step(**changes) -> tuple:
    # One rank's experts get almost all tokens.
    net = engine(SECTION, 0, **{**SGD, **changes})
    with torch.no_grad():
        for layer in net.module.model.layers:
            layer.mlp.gate.weight[1:] = -layer.mlp.gate.weight[0]
    ids = batch(0)
    return step(net, net(input_ids=ids, labels=ids).loss)


def classic_step() -> tuple:
    layout = Layout(ep_size=2, config=SGD)
    net = make_engine(layout, SECTION)
    return step(net, net(*classic_batch(0, layout, dist.get_rank())))


@pytest.mark.parametrize("run", [autoep_step, classic_step])
def test_in_fp32(ranks2, run):
    for made, gradients, _ in ranks2.run(run):
        assert gradients > 10 * CLIP and made == pytest.approx(CLIP, rel=1e-3)


def test_in_16_bits(ranks2):
    for _, gradients, reported in ranks2.run(autoep_step, bf16={"enabled": True}):
        assert gradients > 10 * CLIP and float(reported) == pytest.approx(gradients, rel=1e-3)
