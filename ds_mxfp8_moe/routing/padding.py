# SPDX-License-Identifier: Apache-2.0
"""Which tokens of a forward are padding, by the attention mask that the model gets."""

import inspect
import sys
from functools import partial
from typing import Any

import torch
from torch import nn

from ..ops.log import log_on_rank_0


class PaddingMask:
    """The attention mask of the latest forward of a model, for layers that count their choices.

    The model's own forward gets the mask, as may those of transformers' models inside it, which scripts may call by
    themselves. The latest call decides. A mask [B, S] has zeros at padding tokens. Masks of other forms, which say who
    attends to whom, leave all tokens in the counts.
    """

    def __init__(self, model: nn.Module, layers: list[nn.Module]):
        self._mask: torch.Tensor | None = None
        self._said = False
        modeling = sys.modules.get("transformers.modeling_utils")
        kinds = (type(model), modeling.PreTrainedModel) if modeling else type(model)
        self._hooks = []
        for module in model.modules():
            names = list(inspect.signature(module.forward).parameters) if isinstance(module, kinds) else []
            if "attention_mask" in names and not set(layers).isdisjoint(module.modules()):
                take = partial(self._take, names.index("attention_mask"))
                self._hooks.append(module.register_forward_pre_hook(take, with_kwargs=True))

    @torch.compiler.disable
    def _take(self, place: int, module: nn.Module, args: tuple, kwargs: dict) -> None:
        mask: Any = args[place] if len(args) > place else kwargs.get("attention_mask")
        self._mask = mask if isinstance(mask, torch.Tensor) and mask.dim() == 2 else None

    def counts(self, expert_TK: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
        """Returns the number of choices of each expert [E] without those of padding.

        Args:
            expert_TK: int64, the choices.
            counts_E: their number, padding included.
        """
        mask = self._mask
        if mask is None:
            return counts_E
        if mask.numel() != len(expert_TK):
            if not self._said:
                log_on_rank_0('mxfp8_moe: "load_balance_coeff" counts padding, too: the attention mask '
                                f"{list(mask.shape)} does not fit {len(expert_TK)} tokens of a MoE layer")
            self._said = True
            return counts_E
        is_token_TK = mask.reshape(-1, 1).to(expert_TK.device).ne(0).expand(expert_TK.shape)
        return torch.zeros_like(counts_E).index_add_(0, expert_TK.flatten(), is_token_TK.flatten().to(counts_E.dtype))

    def close(self) -> None:
        """Takes the hooks off."""
        for hook in self._hooks:
            hook.remove()
