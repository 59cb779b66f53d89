# SPDX-License-Identifier: Apache-2.0
"""Choices of experts that are recorded, replayed or biased, in blocks of transformers that route by themselves.

A router of transformers chooses by `topk` of scores over all experts. While a block's forward runs, a torch function
mode answers this call: with the experts that routes.py wants replayed, or with the best ones after a bias was added.
The values that it returns are the router's own scores of these experts. All else is the router's: scores, groups,
norms, factors, auxiliary losses.

A router that chooses by other means is left alone. It may choose the experts that are to be replayed by itself, as
hash routing does. If it chooses others, that is an error when the replay ends.

Letters: T tokens, K choices of a token, E experts.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ..transport.deadline import tell_peers_on_error
from .routes import Turn, is_recomputed

CHANGES = "changes the choice that torch.topk gives it"
NO_TOPK = "does not choose by torch.topk over the scores of its experts"
_TOPK, _MASKED_FILL = (torch.topk, torch.Tensor.topk), (torch.masked_fill, torch.Tensor.masked_fill)


@torch.compiler.disable
def run_block(block: nn.Module, forward: Callable, *args, **kwargs) -> Any:
    """forward(*args, **kwargs), the forward of a block whose experts' choice may be recorded, replayed or biased.

    Raises:
        RuntimeError: the routes to replay have another number of choices. Or see ModelRoutes.turn.
        ValueError: see ModelRoutes.turn.
    """
    experts, hidden_states = block.experts, args[0] if args else next(iter(kwargs.values()))
    routes, bias_E = experts.mxfp8_routes, getattr(experts, "expert_bias", None)
    turn = None if routes is None else routes.model.turn(routes, hidden_states.shape[:-1])
    if turn is None and bias_E is None:
        return forward(*args, **kwargs)
    with ExitStack() as stack:
        experts.mxfp8_choice = choice = Choice(experts, hidden_states.shape[:-1].numel(), turn, bias_E, stack.close)
        stack.callback(setattr, experts, "mxfp8_choice", None)
        stack.enter_context(choice)  # also to record: a recomputation saves the same tensors for backward then
        return forward(*args, **kwargs)


class Choice(TorchFunctionMode):
    """The choice of experts in one forward of a block.

    Args:
        experts: the block's.
        num_tokens: T.
        turn: what to replay, and where to note the choice. None: nothing.
        bias_E: added to the scores for the choice alone. None: nothing.
        leave: leaves this mode.
    """

    def __init__(self, experts: nn.Module, num_tokens: int, turn: Turn | None, bias_E: torch.Tensor | None,
                 leave: Callable[[], None]):
        super().__init__()
        self._experts, self._num_tokens, self._leave = experts, num_tokens, leave
        self._turn, self._bias_E = turn or Turn(), bias_E
        self._answer_TK: torch.Tensor | None = None
        self._masked: tuple[Any, ...] = (None, None, None)  # scores with a mask, without it, and the mask

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _TOPK:
            return self._topk(func, *args, **kwargs)
        result = func(*args, **kwargs)
        if func in _MASKED_FILL and args[0].shape[-1] == self._experts.num_experts:  # a router limits the groups
            self._masked = result, args[0], args[1] if len(args) > 1 else kwargs["mask"]
        return result

    def _topk(self, func: Callable, input: torch.Tensor, k: int, dim: int = -1, *args, **kwargs) -> Any:
        if not self._is_the_choice(input, k, dim):
            return func(input, k, dim, *args, **kwargs)
        chosen_TK, shape = self._turn.chosen_TK, (*input.shape[:-1], k)
        masked, free, mask = self._masked if self._masked[0] is input else (None, input, None)
        if self._turn.complete:
            answer = chosen_TK.long().view(shape)
        else:
            ranked = input.detach()
            if self._bias_E is not None:
                ranked = free.detach() + self._bias_E
                ranked = ranked if masked is None else ranked.masked_fill(mask, -torch.inf)
            # The view changes nothing, but a recomputation has one: selective checkpointing counts operators.
            answer = func(ranked, k, dim, *args, **kwargs).indices.view(shape)
            if chosen_TK is not None:
                answer = torch.where(chosen_TK.view(shape) < 0, answer, chosen_TK.view(shape).long())
        self._answer_TK = answer.view(-1, k)
        # A given expert keeps its score in groups that this model would not choose.
        return torch.return_types.topk((free.gather(-1, answer), answer))

    def _is_the_choice(self, scores: torch.Tensor, k: int, dim: int) -> bool:
        """Whether this topk is over all experts for all tokens, with as many choices as the routes to replay have."""
        chosen_TK = self._turn.chosen_TK
        return (scores.shape[-1] == self._experts.num_experts and dim in (-1, scores.dim() - 1)
                and scores.shape[:-1].numel() == self._num_tokens
                and (chosen_TK is None or k == chosen_TK.shape[1]))

    @tell_peers_on_error
    def end(self, expert_TK: torch.Tensor) -> None:
        """Takes the choice, int64 [T, K], that arrives at the experts. The rest of the block runs as always."""
        self._leave()
        answer_TK, turn, name = self._answer_TK, self._turn, self._experts.mxfp8_settings.name
        turn.note(expert_TK)
        if is_recomputed():
            return
        answered = answer_TK is not None and answer_TK.shape == expert_TK.shape
        if (chosen_TK := turn.chosen_TK) is not None:
            if chosen_TK.shape != expert_TK.shape:
                raise RuntimeError(f"replay_routes: {name} chooses {expert_TK.shape[1]} experts for a token, and the "
                                   f"routes have {chosen_TK.shape[1]}")
            self._experts.mxfp8_routes.check(expert_TK, chosen_TK, CHANGES if answered else NO_TOPK)
        elif self._bias_E is not None and not answered:
            self._experts.mxfp8_unbiased = True


def correction_bias(block: nn.Module) -> tuple[nn.Module, str] | None:
    """The module and the name of the block's own bias for the choice alone. None: it has none, or an optimizer's."""
    inside = set(block.experts.modules())
    for module in block.modules():
        for name, buffer in module.named_buffers(recurse=False) if module not in inside else ():
            if name.endswith("bias") and buffer.shape == (block.num_experts, ):
                return module, name
    return None


def top_k_of(block: nn.Module) -> int | None:
    """How many experts a token of this block chooses. None: its router does not tell."""
    found = [module.top_k for module in block.modules() if isinstance(getattr(module, "top_k", None), int)]
    return found[0] if found else getattr(block.experts.config, "top_k_experts", None)
