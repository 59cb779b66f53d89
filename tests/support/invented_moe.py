# SPDX-License-Identifier: Apache-2.0
"""A MoE model that no release of transformers has: its router, its gate and its block are invented. Its experts obey
the contract of transformers' stacked experts, which is all that this package knows of it.
"""

from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations.moe import use_experts_implementation

VOCABULARY = 128


class InventedConfig(PreTrainedConfig):
    model_type = "invented_moe"
    vocab_size: int = VOCABULARY
    hidden_size: int = 64
    expert_size: int = 96
    num_hidden_layers: int = 2
    experts_in_all: int = 8
    choices: int = 3


@use_experts_implementation
class InventedExperts(nn.Module):

    def __init__(self, config: InventedConfig):
        super().__init__()
        self.num_experts = config.experts_in_all
        self.gate_up_proj = nn.Parameter(torch.empty(self.num_experts, 2 * config.expert_size, config.hidden_size))
        self.down_proj = nn.Parameter(torch.empty(self.num_experts, config.hidden_size, config.expert_size))
        self.reach = 3.0

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.mish(gate).clamp(max=self.reach) * (0.5 + torch.sin(up))

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor,
                top_k_weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            token, choice = torch.where(top_k_index == expert)
            inner = self._apply_gate(F.linear(hidden_states[token], self.gate_up_proj[expert]))
            y = F.linear(inner, self.down_proj[expert])
            y = self.post_expert_norm(y) if hasattr(self, "post_expert_norm") else y
            out.index_add_(0, token, (y * top_k_weights[token, choice, None]).to(out.dtype))
        return out


class InventedBlock(nn.Module):
    """Chooses by the cosine with an expert's key, plus a term by the place of the token. The weights add up to more
    than 1, and a share of the input goes past the experts.
    """

    def __init__(self, config: InventedConfig):
        super().__init__()
        self.choices = config.choices
        self.keys = nn.Parameter(torch.empty(config.experts_in_all, config.hidden_size))
        self.by_place = nn.Parameter(torch.empty(7, config.experts_in_all))
        self.past = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.experts = InventedExperts(config)

    def forward(self, x_BSH: torch.Tensor) -> torch.Tensor:
        B, S, H = x_BSH.shape
        x_TH = x_BSH.flatten(0, 1)
        cosine_TE = F.normalize(x_TH.float(), dim=-1) @ F.normalize(self.keys.float(), dim=-1).T
        place_T = torch.arange(S, device=x_TH.device).repeat(B) % len(self.by_place)
        score_TE = 2 * torch.sigmoid(4 * cosine_TE + self.by_place[place_T].float())
        weight_TK, expert_TK = score_TE.topk(self.choices, dim=-1)
        y_TH = self.experts(x_TH, expert_TK, weight_TK.to(x_TH.dtype))
        return (y_TH + 0.1 * self.past(x_TH)).view(B, S, H)


class InventedModel(PreTrainedModel):
    config_class = InventedConfig

    def __init__(self, config: InventedConfig):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.norms = nn.ModuleList(nn.LayerNorm(config.hidden_size) for _ in range(config.num_hidden_layers))
        self.blocks = nn.ModuleList(InventedBlock(config) for _ in range(config.num_hidden_layers))
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if not isinstance(module, nn.LayerNorm):
            for parameter in module.parameters(recurse=False):
                nn.init.normal_(parameter, std=0.1)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> SimpleNamespace:
        x = self.embed(input_ids)
        for norm, block in zip(self.norms, self.blocks, strict=True):
            x = x + block(norm(x))
        logits = self.head(x)
        if labels is None:
            return SimpleNamespace(logits=logits)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        return SimpleNamespace(loss=loss, logits=logits)
