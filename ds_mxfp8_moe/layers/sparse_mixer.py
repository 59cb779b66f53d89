# SPDX-License-Identifier: Apache-2.0
"""phimoe's router. In training it chooses two experts by chance, among those with nearly the largest logits."""

import torch
from deepspeed.moe.ep_count import count_tokens_per_expert
from deepspeed.moe.ep_router import TokenChoiceTopKRouter

from ..config import ConfigError
from .routes import Turn


class SparseMixerRouter(TokenChoiceTopKRouter):
    """phimoe's router, with the results of AutoEP's."""

    jitter: float

    def forward(self, x: torch.Tensor, expert_bias: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        """Takes [T, H]; returns weights [T, 2], experts [T, 2] and counts [E], as AutoEP's router.

        Raises:
            ConfigError: there is a bias for the choice of experts.
        """
        from transformers.models.phimoe.modeling_phimoe import sparsemixer

        _refuse_bias(expert_bias)
        weight_TK, expert_TK = sparsemixer(self.gate(x), self.jitter, self.training, self.top_k)
        return weight_TK, expert_TK, count_tokens_per_expert(expert_TK, self.num_experts)

    def forward_in_turn(self, turn: Turn, x: torch.Tensor,
                        expert_bias: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        """The same for a turn. It draws the same random numbers.

        The rule takes the softmax over the experts whose logits are nearly the largest. A chosen expert is always one
        of them, so that its weight is not 0.
        """
        _refuse_bias(expert_bias)
        logits_TE = self.gate(x)
        others_TE, weights, experts = logits_TE, [], []
        for k in range(2):
            largest_T1, live_T1 = others_TE.detach().max(dim=-1, keepdim=True)
            distance_TE = (largest_T1 - logits_TE.detach()) / logits_TE.detach().abs().clamp(min=largest_T1)
            left_out_TE = distance_TE > 2 * self.jitter
            if self.training:  # by the Gumbel-max trick
                near_TE = others_TE.detach().masked_fill(left_out_TE, float("-inf"))
                live_T1 = (near_TE - torch.empty_like(near_TE).exponential_().log()).argmax(dim=-1, keepdim=True)
            expert_T1 = live_T1
            if turn.chosen_TK is not None:
                given_T1 = turn.chosen_TK[:, k:k + 1].long()
                expert_T1 = torch.where(given_T1 < 0, live_T1, given_T1)
            left_out_TE = left_out_TE.scatter(1, expert_T1, False)
            share_TE = others_TE.masked_fill(left_out_TE, float("-inf")).softmax(dim=-1)
            weights.append(self._weight(logits_TE, share_TE, expert_T1, k))
            experts.append(expert_T1)
            others_TE = logits_TE.scatter(1, expert_T1, float("-inf"))
        weight_TK, expert_TK = torch.cat(weights, dim=-1), torch.cat(experts, dim=-1)
        return weight_TK, expert_TK, count_tokens_per_expert(expert_TK, self.num_experts)

    def _weight(self, logits_TE: torch.Tensor, share_TE: torch.Tensor, expert_T1: torch.Tensor,
                k: int) -> torch.Tensor:
        """The chosen expert's share. In training, by chance a third of it if the expert is not the first."""
        from transformers.models.phimoe.modeling_phimoe import PhimoeMultiplier

        share_T1 = share_TE.gather(1, expert_T1)
        if not self.training:
            return share_T1
        largest_T1, first_T1 = share_TE.max(dim=-1, keepdim=True)
        chance_T1 = torch.rand_like(largest_T1)
        if k == 1:  # transformers draws these numbers twice
            chance_T1.uniform_()
        whole_T1 = (expert_T1 == first_T1) | (chance_T1 > 0.75)
        factor_T1 = torch.add(0.3333, whole_T1, alpha=0.6667).type_as(share_TE)
        return PhimoeMultiplier.apply(logits_TE, share_T1, expert_T1, share_TE, factor_T1)


def _refuse_bias(expert_bias: torch.Tensor | None) -> None:
    if expert_bias is not None:
        raise ConfigError("phimoe: its router chooses by chance and takes no bias: leave out "
                          '"load_balance_coeff"')
