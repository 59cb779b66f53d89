# SPDX-License-Identifier: Apache-2.0
"""AutoEP's router: DeepSpeed's own, or in few kernels where a GPU can run them.

DeepSpeed's router takes its linear layer and a dozen small torch ops in forward, and as many in backward. The host
takes longer to launch them than the device to compute them. Here, one kernel each way does the work of the small ops.
It is recorded and replayed together with the linear layer's GEMMs (ops/triton_kernels/recording.py).
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from types import ModuleType

import torch
from deepspeed.moe.ep_count import count_tokens_per_expert
from deepspeed.moe.ep_router import TokenChoiceTopKRouter
from torch import nn
from torch.autograd.function import once_differentiable

from ..compute.executor import executor_for, replayed
from ..ops.device import has_kernels
from ..ops.private_names import missing
from .patches import lent
from .routes import Turn


def route(router: TokenChoiceTopKRouter, x_TH: torch.Tensor, bias_E: torch.Tensor | None,
          turn: Turn | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """router(x_TH, bias_E): the routing weights [T, K], the experts [T, K] and the counts of choices [E].

    The kernels choose the same experts, in descending order of their scores. The weights are the same up to rounding
    in float32. A turn chooses in place of the router. The weights follow from the tokens by the router's rule.
    """
    gate = router.gate
    x_TH = as_gate_takes(gate, x_TH)
    if not _runs_kernels(router, x_TH):
        if turn is None:
            return router(x_TH, bias_E)
        return _route_in_turn(router, x_TH, bias_E, turn)
    plain = _is_plain(gate, x_TH)
    source, weight_EH = (x_TH, gate.weight) if plain else (gate(x_TH), None)
    weight_TK, expert_TK, count_E, logits_TE = _Route.apply(
        source, weight_EH, bias_E, router.e_score_correction_bias, None if turn is None else turn.chosen_TK,
        router.top_k, router.score_func == "sigmoid", router.route_norm, router.route_scale)
    if plain:
        for hook in gate._forward_hooks.values():
            hook(gate, (x_TH, ), logits_TE)
    return weight_TK, expert_TK, count_E


def as_gate_takes(gate: nn.Module, x_TH: torch.Tensor) -> torch.Tensor:
    """The tokens in the dtype of the router's linear layer. Under autocast, which casts by itself, as they are."""
    # transformers 5.24 keeps gates in float32 beside hidden states in bf16.
    dtype = gate.weight.dtype
    return x_TH if x_TH.dtype == dtype or torch.is_autocast_enabled(x_TH.device.type) else x_TH.to(dtype)


def why_no_turns(router: nn.Module) -> str | None:
    """Why this router's routes can be neither recorded nor replayed. None: they can."""
    if "forward" in vars(router):
        return "its router's forward method is replaced on the instance"
    return None if _rule_of(router) else f"its router is a {type(router).__name__}, whose rule is unknown"


def _route_in_turn(router: nn.Module, x_TH: torch.Tensor, bias_E: torch.Tensor | None,
                   turn: Turn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    with lent(router, "forward", partial(_rule_of(router), turn)):  # hooks see the call
        return router(x_TH, bias_E)


def _rule_of(router: nn.Module) -> Callable | None:
    """The router's forward, with a turn before its arguments. None: it is unknown."""
    if type(router) is TokenChoiceTopKRouter:
        return partial(_token_choice, router)
    return getattr(router, "forward_in_turn", None)


def _token_choice(router: TokenChoiceTopKRouter, turn: Turn, x_TH: torch.Tensor,
                  bias_E: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """DeepSpeed's router, with the same bits where the turn chooses what the router would."""
    logits_TE = router.gate(x_TH).to(torch.float32)
    score_TE = logits_TE.sigmoid() if router.score_func == "sigmoid" else logits_TE.softmax(dim=1)
    expert_TK = turn.chosen_TK.long() if turn.complete else _live_choice(router, turn, score_TE.detach(), bias_E)
    weight_TK = score_TE.gather(1, expert_TK)
    if router.route_norm:
        weight_TK = weight_TK / (weight_TK.sum(dim=-1, keepdim=True) + 1e-20)
    return weight_TK * router.route_scale, expert_TK, count_tokens_per_expert(expert_TK, router.num_experts)


@torch.no_grad()
def _live_choice(router: TokenChoiceTopKRouter, turn: Turn, score_TE: torch.Tensor,
                 bias_E: torch.Tensor | None) -> torch.Tensor:
    if bias_E is not None:
        score_TE = score_TE + bias_E
    if router.e_score_correction_bias is not None:
        score_TE = score_TE + router.e_score_correction_bias
    if router.num_expert_groups is not None:
        score_TE = router._get_node_limited_routing_scores(score_TE)
    live_TK = score_TE.topk(router.top_k, dim=-1, sorted=False)[1]
    return live_TK if turn.chosen_TK is None else torch.where(turn.chosen_TK < 0, live_TK, turn.chosen_TK.long())


@cache
def _kernels() -> ModuleType:
    from ..ops.triton_kernels import route  # Triton exists on Linux alone
    return route


def _runs_kernels(router: TokenChoiceTopKRouter, x_TH: torch.Tensor) -> bool:
    if not has_kernels(x_TH.device) or x_TH.shape[0] == 0 or missing("router kernels"):
        return False
    return type(router) is TokenChoiceTopKRouter and _has_no_hooks(router) and router.num_expert_groups is None and (
        router.score_func in ("softmax", "sigmoid") and router.top_k <= router.num_experts <= _kernels().MOST_EXPERTS)


def _is_plain(gate: nn.Module, x_TH: torch.Tensor) -> bool:
    """Whether calling the gate does no more than multiply by its weight and tell transformers the result."""
    return type(gate) is nn.Linear and _has_no_hooks(gate, "output_capturing_hook") and gate.bias is None and (
        gate.weight.dtype == x_TH.dtype and not torch.is_autocast_enabled(x_TH.device.type))


def _has_no_hooks(module: nn.Module, but: str = "") -> bool:
    """Hooks, and a forward that was put in place of the class's, see the module's own call.

    `but`: the name of a forward hook to ignore.
    """
    return "forward" not in vars(module) and not (
        module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks) and (
            not module._forward_hooks or all(getattr(hook, "__name__", "") == but
                                             for hook in module._forward_hooks.values()))


def _replayed(function: Callable, key: tuple, inputs: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """function(*inputs), which depends on `key` and its inputs alone. It is recorded where that is possible."""
    executor = executor_for(inputs[0].device)
    if executor is None:
        return function(*inputs)
    made = replayed(executor, (_Route, *key), lambda given: dict(enumerate(function(*given))), list(inputs))
    return list(made.values())


class _Route(torch.autograd.Function):
    """Takes tokens and the weight of a linear layer, or its result and None. Returns what `route` does, and the
    logits."""

    @staticmethod
    def forward(ctx, source, weight_EH, bias_E, correction_E, chosen_TK, top_k, *how):
        def forward(source, weight_EH, bias_E, correction_E, chosen_TK):
            logits_TE = (source if weight_EH is None else nn.functional.linear(source, weight_EH)).contiguous()
            return [logits_TE, *_kernels().route(logits_TE, top_k, *how, bias_E, correction_E, chosen_TK)]

        logits_TE, weight_TK, expert_TK, count_E = _replayed(forward, ("forward", top_k, *how),
                                                             (source, weight_EH, bias_E, correction_E, chosen_TK))
        ctx.save_for_backward(logits_TE, expert_TK, *(() if weight_EH is None else (source, weight_EH)))
        ctx.how = how
        ctx.mark_non_differentiable(expert_TK, count_E)
        ctx.set_materialize_grads(False)
        return weight_TK, expert_TK, count_E, logits_TE

    @staticmethod
    def backward(ctx, *grads):
        # What refuses a second derivative takes the host as long as a replay. Only create_graph=True asks for one.
        backward = once_differentiable(_Route._backward) if torch.is_grad_enabled() else _Route._backward
        return backward(ctx, *grads)

    @staticmethod
    def _backward(ctx, dweight_TK, _expert, _count, dlogits_TE):
        how, needs = ctx.how, ctx.needs_input_grad[:2]

        def backward(logits_TE, expert_TK, dweight_TK, more_TE, x_TH=None, weight_EH=None):
            if dweight_TK is None:
                dlogits_TE = more_TE
            else:
                dlogits_TE = _kernels().route_backward(logits_TE, expert_TK, dweight_TK.contiguous(), *how)
                dlogits_TE = dlogits_TE if more_TE is None else dlogits_TE + more_TE
            if weight_EH is None:
                return [dlogits_TE, None]
            return [dlogits_TE @ weight_EH if needs[0] else None, dlogits_TE.t() @ x_TH if needs[1] else None]

        logits_TE, expert_TK, *linear = ctx.saved_tensors
        grads = _replayed(backward, ("backward", needs, *how), (logits_TE, expert_TK, dweight_TK, dlogits_TE, *linear))
        return *grads, None, None, None, None, *(None for _ in how)
