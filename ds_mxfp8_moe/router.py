# SPDX-License-Identifier: Apache-2.0
"""AutoEP's router: DeepSpeed's own, or in two kernels where a GPU can run them.

DeepSpeed's router takes a dozen small torch ops in forward, and as many in backward. The host takes longer to launch
them than the device to compute them.
"""

import torch
from deepspeed.moe.ep_router import TokenChoiceTopKRouter
from torch.autograd.function import once_differentiable

from .ops.device import has_kernels


def route(router: TokenChoiceTopKRouter, x_TH: torch.Tensor,
          bias_E: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """router(x_TH, bias_E): the routing weights [T, K], the experts [T, K] and the counts of choices [E].

    The kernels choose the same experts, in descending order of their scores. The weights are the same up to rounding
    in float32.
    """
    if not _runs_kernels(router, x_TH):
        return router(x_TH, bias_E)
    return _Route.apply(router.gate(x_TH), bias_E, router.e_score_correction_bias, router.top_k,
                        router.score_func == "sigmoid", router.route_norm, router.route_scale)


def _runs_kernels(router: TokenChoiceTopKRouter, x_TH: torch.Tensor) -> bool:
    if not has_kernels(x_TH.device) or x_TH.shape[0] == 0 or torch.compiler.is_compiling():
        return False
    from .ops.triton_kernels.route import MOST_EXPERTS  # Triton exists on Linux alone
    # Hooks, and a forward that was put in place of the class's, see the router's own call.
    plain = type(router) is TokenChoiceTopKRouter and "forward" not in vars(router) and not (
        router._forward_hooks or router._forward_pre_hooks or router._backward_hooks or router._backward_pre_hooks)
    return plain and router.num_expert_groups is None and router.score_func in ("softmax", "sigmoid") and (
        router.top_k <= router.num_experts <= MOST_EXPERTS)


class _Route(torch.autograd.Function):

    @staticmethod
    def forward(ctx, logits_TE, bias_E, correction_E, top_k, *how):
        from .ops.triton_kernels import route as kernels
        logits_TE = logits_TE.contiguous()
        weight_TK, expert_TK, count_E = kernels.route(logits_TE, top_k, *how, bias_E, correction_E)
        ctx.save_for_backward(logits_TE, expert_TK)
        ctx.how = how
        ctx.mark_non_differentiable(expert_TK, count_E)
        return weight_TK, expert_TK, count_E

    @staticmethod
    @once_differentiable
    def backward(ctx, dweight_TK, *_):
        from .ops.triton_kernels import route as kernels
        logits_TE, expert_TK = ctx.saved_tensors
        dlogits_TE = kernels.route_backward(logits_TE, expert_TK, dweight_TK.contiguous(), *ctx.how)
        return dlogits_TE, None, None, None, *(None for _ in ctx.how)
