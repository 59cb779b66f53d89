# SPDX-License-Identifier: Apache-2.0
"""Trainings whose gradients go to the optimizer's sums, and losses that keep them from it."""

from contextlib import contextmanager
from unittest import mock

import torch

from ds_mxfp8_moe.compat import sums
from ds_mxfp8_moe.compute.routing import Routes
from ds_mxfp8_moe.compute.sums import Sum
from ds_mxfp8_moe.ffn.expert_ffn import ExpertFFN
from ds_mxfp8_moe.transport.local import Local
from tests.support.autoep_models import autoep_layers, batch
from tests.support.autoep_models import engine as autoep_engine
from tests.support.expert_ffn_cases import RECIPES, alone, formula
from tests.support.models import ADAM, state
from tests.support.rank_pool import reset_deepspeed_groups

BF16 = {"bf16": {"enabled": True}, **ADAM, "gradient_clipping": 0.1}
STEPS = 2


def forward(engine, number):
    ids = batch(number).to(engine.device)
    return engine(input_ids=ids, labels=ids).loss


def decayed(engine, number):
    """A loss that reads experts' weights, too."""
    experts = [p for layer in autoep_layers(engine.module) for p in layer.experts.parameters()]
    return forward(engine, number) + 1e-3 * sum(p.float().square().sum() for p in experts)


def twice(engine, number):
    """Two forwards before one backward."""
    return forward(engine, number) + forward(engine, number + 50)


def decayed_late(engine, number):
    """Only in the second micro-batch of the second step."""
    return (decayed if number == 3 else forward)(engine, number)


def with_gradients_of_inputs(engine, number):
    """torch.autograd.grad runs the experts' backward, and keeps its gradients from the parameters."""
    x = engine.module.get_input_embeddings()(batch(number)).detach().requires_grad_()
    loss = engine.module(inputs_embeds=x).logits.float().square().mean()
    torch.autograd.grad(loss, [x, *autoep_layers(engine.module)[0].experts.parameters()])
    return forward(engine, number)


LOSSES = {function.__name__: function for function in (forward, decayed, twice, decayed_late,
                                                      with_gradients_of_inputs)}


@contextmanager
def answers():
    """Notes for each gradient of an expert weight whether it went to a sum, and whether it began it."""
    noted, plain = [], sums.Sums.sum_of

    def sum_of(self, optimizer, *args):
        answer = plain(self, optimizer, *args)
        noted.append(answer and answer.begun)
        return answer

    with mock.patch.object(sums.Sums, "sum_of", sum_of):
        yield noted


def trained(batched, stage, ep_size, micro, loss="forward", hook=False, checkpointing=None, config=(), section=(),
            **changes):
    """Losses, weights, the optimizer's state; and what `answers` noted in each micro-batch."""
    reset_deepspeed_groups()
    section = {"enabled": True, "batch_gradients": batched, **dict(section)}
    model = {"dtype": torch.bfloat16, **changes.pop("model", {})}
    engine = autoep_engine(section, stage, ep_size, model_changes=model, gradient_accumulation_steps=micro,
                           **{**BF16, **dict(config)}, **changes)
    if checkpointing is not None:
        engine.module.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    records, seen, noted = [], [], []
    if hook:
        w1, w2, w3 = autoep_layers(engine.module)[0].experts.parameters()
        w1.register_hook(lambda grad: seen.append(grad.clone()))
        w2.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    for number in range(STEPS * micro):
        with answers() as found:
            value = LOSSES[loss](engine, number)
            engine.backward(value)
        noted.append(found)
        engine.step()
        records.append((value.item(), engine.get_global_grad_norm()))
    end = {name: p.detach().cpu().clone() for name, p in engine.module.named_parameters()}
    found = {name: x.cpu() for name, x in state(engine).items()} | {f"seen {i}": x for i, x in enumerate(seen)}
    mixed = len(engine.optimizer.mxfp8_batching.sums.mixed) if batched else 0
    engine.destroy()
    return (records, end, found), noted, mixed


WEIGHTS = 6  # of two layers


def expected(micro, weights=WEIGHTS, others=()):
    return [[*others, *[False] * weights]] + [[*others, *[True] * weights]] * (micro - 1)


def step_by_step(recipe, name, device="cpu"):
    """Outputs, sums and gradients of calls whose sums lie elsewhere each time. The sum of `gate` has no begun one
    beside it in the last call, which therefore adds both by themselves."""
    (x, g, routes, weights), found = alone(name), []
    weights = {role: torch.nn.Parameter(torch.stack(values).detach().bfloat16().to(device))
               for role, values in weights.items()}
    routes = Routes(expert_TK=routes.expert_TK.to(device), weight_TK=routes.weight_TK.detach().to(device),
                    num_experts=routes.num_experts)
    for call in range(6):
        size = sum(w.numel() for w in weights.values()) + 8 * call
        flat = torch.full((size, ), float(call), dtype=torch.bfloat16, device=device)
        parts, start = {}, 0
        for weight in weights.values():
            parts[weight] = flat[start:start + weight.numel()].view(weight.shape)
            start += weight.numel()

        def sum_of(weight, node, call=call, parts=parts):
            odd = call == 5 and weight is weights.get("gate")
            return None if odd else Sum(parts[weight].detach(), call > 1, 0.5)

        ffn = ExpertFFN(formula(name), RECIPES[recipe], Local(), len(weights["up"]), sum_of=sum_of)
        for weight in weights.values():
            weight.grad = None
        given = x.to(device, copy=True).requires_grad_()
        y = ffn(given, routes, weights)
        y.backward(g.to(device))
        given_to_autograd = {role for role, w in weights.items() if w.grad is not None}
        assert given_to_autograd == (weights.keys() if call < 2 else {"gate"} & weights.keys() if call == 5 else set())
        assert call >= 2 or all(w.grad.data_ptr() == parts[w].data_ptr() for w in weights.values())
        found += [y.detach(), given.grad, flat, *(weights[role].grad for role in given_to_autograd)]
    return found
