# SPDX-License-Identifier: Apache-2.0
"""The arithmetic between two exchanges of an expert FFN, on expert-sorted rows.

expert_ffn.py explains the letters in tensor names, gives the formulas, and has a table of the operands of weight
gradients. `ends_E`: Plan.group_ends_E.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ..compute import casts
from ..compute.activation import activate, activate_backward, add_weighted_bias, group_sums
from ..compute.casts import Stack
from ..compute.formula import ExpertFormula, LowRank
from ..compute.grouped_gemm import grouped_mm, grouped_mm_weights, grouped_mm_wgrad_rows, plain, rescales_rows
from ..compute.low_rank import add_low_rank, low_rank_rows, low_rank_wgrad, weighted_bias_backward
from ..compute.merging import merge_as_held
from ..compute.mx import MXTensor
from ..compute.mxfp4 import MXFP4Weights
from ..compute.recorded import Weights, recorded
from ..compute.sums import Sum
from ..config import Recipe


class Projection(NamedTuple):
    """One of an expert's two GEMMs: "up", which includes the gate, or "down".

    Attributes:
        roles: of its weights, which lie one above the other along N.
        dtype: of its weights.
        weights: in high precision, quantized as the GEMM reads them, or in MXFP4, which is unpacked for each GEMM.
        held: whether quantized weights are in the form that forward reads, so that backward transposes them itself.
        biases: for each role, one stacked tensor or E of them. None: it has none.
        adapter: its low-rank update, in the tokens' dtype. None: it has none.
        merged: the same update in its own dtype, if it is merged into the weights for each GEMM. Its gradient passes
            straight through the rounding, and is that of an update apart. None: it is not merged.
        sums: for each role, where backward puts the weights' gradient instead of returning it. None: nowhere.
    """

    roles: tuple[str, ...]
    dtype: torch.dtype
    weights: Weights | MXTensor | MXFP4Weights
    held: bool = False
    biases: tuple[Stack | None, ...] = ()
    adapter: LowRank | None = None
    merged: LowRank | None = None
    sums: tuple[Sum | None, ...] = ()

    def bias_EN(self) -> torch.Tensor | None:
        """The bias of the GEMM's result, under autograd if it is on. None: it has none."""
        stacks = [bias if bias is None or isinstance(bias, torch.Tensor) else torch.stack(bias)
                  for bias in self.biases]
        known = next((bias_EN for bias_EN in stacks if bias_EN is not None), None)
        if known is None or len(stacks) == 1:
            return None if known is None else known.contiguous()
        return torch.cat([torch.zeros_like(known) if bias_EN is None else bias_EN for bias_EN in stacks], dim=1)


class Rows(NamedTuple):
    """The tensors that forward keeps for backward: MXTensors, or plain ones in a recipe without quantization.

    Attributes:
        x_PH: the tokens. None if no backward follows.
        pre_PG: the pre-activation: an MXTensor [P, G / F, F], or the result of the first GEMM. None if no backward
            follows.
        h_PF: the operand of the second GEMM.
        weight_P: float32, the routing weights.
    """

    x_PH: torch.Tensor | None
    pre_PG: torch.Tensor | None
    h_PF: torch.Tensor
    weight_P: torch.Tensor


class Gradients(NamedTuple):
    """Gradients of experts.

    Attributes:
        by_role: stacked gradients of weights and biases. Those that went to sums are left out.
        up_adapter, down_adapter: of adapters. None: there is none.
    """

    by_role: dict[str, torch.Tensor]
    up_adapter: LowRank | None = None
    down_adapter: LowRank | None = None


class Dpre(NamedTuple):
    """The gradient of the pre-activation, and what backward computes on the way to it.

    Attributes:
        rows: the form that the GEMM of dx reads.
        wgrad: the form that the GEMM of dW1 reads. None: the same, or there is no such GEMM.
        columns: whether that is in column form.
        low_PR: what an adapter adds to dx, before its second factor. None: there is no adapter.
        dweight_P: the gradient of the routing weights.
        gradients: of W2, of biases and of adapters.
    """

    rows: torch.Tensor
    wgrad: torch.Tensor | None
    columns: bool
    low_PR: torch.Tensor | None
    dweight_P: torch.Tensor
    gradients: Gradients


@lru_cache(maxsize=64)
def unquantized(recipe: Recipe) -> Recipe:
    """The recipe without any quantization."""
    return replace(recipe, quantize_gemm=False, wgrad="hp", dispatch_fwd="bf16", combine_fwd="bf16",
                   dispatch_bwd="bf16", combine_bwd="bf16", preactivation="bf16")


@dataclass(frozen=True)
class ExpertMath:
    """Formula and recipe, applied to rows of `dtype`."""

    formula: ExpertFormula
    recipe: Recipe
    dtype: torch.dtype

    @property
    def wgrad_quantized(self) -> bool:
        """Whether the weight gradients' GEMMs multiply MXFP8."""
        return self.recipe.quantize_gemm and self.recipe.wgrad == "mxfp8"

    # ---- forward ----------------------------------------------------------------------------------------------------

    @recorded
    def forward(self, x_PH: torch.Tensor, weight_P: torch.Tensor, up: Projection, down: Projection,
                ends_E: torch.Tensor, backward: bool) -> tuple[torch.Tensor, Rows]:
        """The experts' output rows y_PH, and what is kept of the call. `backward`: whether a backward follows."""
        quantized = self.recipe.quantize_gemm
        x_PH = self.quantized(x_PH)
        pre_PG = self.gemm(x_PH, up, ends_E)
        if not backward:
            x_PH = None
        keep = backward and quantized and self.recipe.preactivation == "mxfp8"
        h_PF, kept_PG = activate(pre_PG, weight_P, quantized=quantized, keep=keep, **self._activation(up, ends_E))
        pre_PG = kept_PG if keep else pre_PG if backward else None
        y_PH = self.gemm(h_PF, down, ends_E)
        if (bias_EH := down.bias_EN()) is not None:
            y_PH = add_weighted_bias(y_PH, bias_EH, weight_P, ends_E)
        return y_PH, Rows(x_PH, pre_PG, h_PF, weight_P)

    @recorded
    def quantize_weights(self, weights: Weights, transposed: bool) -> MXTensor:
        """Weights as a GEMM reads them. `transposed`: it contracts over their second to last axis, as backward's."""
        return casts.quantize_weights(weights.stacks, self.recipe.block_size, self.recipe.scaling_mode, transposed)

    # ---- backward ---------------------------------------------------------------------------------------------------

    @recorded
    def backward_to_dpre(self, g_PH: torch.Tensor, rows: Rows, up: Projection, down: Projection,
                         ends_E: torch.Tensor, needed: frozenset[str]) -> Dpre:
        """From the gradient of the output rows. `needed`: roles whose weights need a gradient."""
        by_role, dweight_of_bias_P = {}, None
        if (bias_EH := down.bias_EN()) is not None:
            dweight_of_bias_P = weighted_bias_backward(g_PH, bias_EH, ends_E)
            if "down_bias" in needed:
                by_role["down_bias"] = group_sums(plain(g_PH), ends_E, rows.weight_P).to(bias_EH.dtype)
        t_PF, of_weights, down_adapter = self.product_backward(g_PH, rows.h_PF, down, ends_E, needed)
        by_role |= of_weights

        wants_ups = not needed.isdisjoint(up.roles)
        biases = [f"{role}_bias" for role in up.roles]
        columns = wants_ups and self.reads_columns(t_PF)
        wants_plain = not self.recipe.quantize_gemm or not needed.isdisjoint(biases) or up.adapter is not None or (
            wants_ups and not self.wgrad_quantized)
        dpre = activate_backward(t_PF, rows.pre_PG, rows.weight_P, plain=wants_plain, rows=self.recipe.quantize_gemm,
                                 columns=columns, **self._activation(up, ends_E))
        del t_PF
        dweight_P = dpre.dweight_P if dweight_of_bias_P is None else dpre.dweight_P + dweight_of_bias_P
        if not needed.isdisjoint(biases):
            sums = group_sums(dpre.plain, ends_E).chunk(len(biases), dim=1)
            by_role |= {bias: of_bias.to(casts.sample(stack).dtype)
                        for bias, stack, of_bias in zip(biases, up.biases, sums, strict=True) if bias in needed}
        low_PR, up_adapter = self._adapter_backward(dpre.plain, rows.x_PH, up, ends_E)
        of_x = dpre.rows if self.recipe.quantize_gemm else dpre.plain
        of_w = dpre.columns if columns else dpre.plain if wants_ups and not self.wgrad_quantized else None
        return Dpre(of_x, None if of_w is of_x else of_w, columns, low_PR, dweight_P,
                    Gradients(by_role, up_adapter, down_adapter))

    @recorded
    def backward_to_dx(self, dpre_PG: torch.Tensor, low_PR: torch.Tensor | None, up: Projection,
                       ends_E: torch.Tensor) -> torch.Tensor:
        """From `rows` and `low_PR` of `Dpre`."""
        return self._adapted_dgrad(self.gemm(dpre_PG, up, ends_E, transposed=True), low_PR, up, ends_E)

    @recorded
    def weight_gradients(self, g: torch.Tensor, a_PK: torch.Tensor, projection: Projection, ends_E: torch.Tensor,
                         needed: frozenset[str], columns: bool) -> dict[str, torch.Tensor]:
        """By role, without those that went to sums. `columns`: g, the gradient of the rows, is in column form."""
        # Autograd copies a gradient that is not laid out as its stacked parameter. So the GEMM writes the gradients of
        # gate and up one after the other, each contiguous, into one storage. If only one of them is needed, it does
        # not: autograd then copies this one, and the storage of both is freed.
        roles, count = projection.roles, len(projection.roles)
        splits = count if needed.issuperset(roles) else 1
        sums = {role: one for role, one in zip(roles, projection.sums, strict=False) if one is not None}
        direct = len(sums) == splits == count
        both = self.wgrad_gemm(g, a_PK, ends_E, projection.dtype, columns, splits, [*sums.values()] if direct else ())
        if direct:
            return {}
        grads = dict(zip(roles, both.unbind(0) if splits > 1 else both.chunk(count, dim=1), strict=True))
        for role in sums:
            sums[role].take(grads.pop(role))
        return {role: grad for role, grad in grads.items() if role in needed}

    def ups_first_takes_less(self, dpre: Dpre, H: int, E: int) -> bool:
        """Whether peak memory is lower if dW1 is computed before dx.

        Called only if dW1 and dx read different forms of dpre. The estimate takes the plain form for dW1, and the
        MXFP8 form for dx. Bytes in memory at the same time:

            dW1 first, during dW1   dpre MXFP8 G P + x dequantized 2 H P + dW1 2 E G H + dpre plain 2 G P
            dW1 first, during dx    dpre MXFP8 G P + dx 2 H P            + dW1 2 E G H + quantized weights E G H
            dx first, during dW1    dx 2 H P       + x dequantized 2 H P + dW1 2 E G H + dpre plain 2 G P
        """
        P, G = dpre.rows.shape
        return max(2 * G * P, E * G * H) < (G + 2 * H) * P

    def product_backward(self, g_PN: torch.Tensor, x_PK: torch.Tensor | None, projection: Projection,
                         ends_E: torch.Tensor, needed: frozenset[str]) -> tuple:
        """The backward of `gemm`. `x_PK`: None if no weight needs a gradient.

        Returns:
            The rows' gradient [P, K]; the weights' gradients by role, except those written to sums; and the adapter's
            gradients, None without an adapter.
        """
        wanted = not needed.isdisjoint(projection.roles)
        low_PR, of_adapter = self._adapter_backward(g_PN, x_PK, projection, ends_E)
        rows, wgrad, columns = self.forms_of_gradient(g_PN, wanted)
        dx_PK = self._adapted_dgrad(self.gemm(rows, projection, ends_E, transposed=True), low_PR, projection, ends_E)
        del rows
        of_weights = self.weight_gradients(wgrad, x_PK, projection, ends_E, needed, columns) if wanted else {}
        return dx_PK, of_weights, of_adapter

    def _adapter_backward(self, g_PN: torch.Tensor, x_PK: torch.Tensor, projection: Projection,
                          ends_E: torch.Tensor) -> tuple[torch.Tensor | None, LowRank | None]:
        """g B [P, R], and the gradients of the adapter. None: there is none.

        Args:
            g_PN: the gradient of the GEMM's result.
            x_PK: the GEMM's operand.
        """
        if projection.adapter is None:
            return None, None
        a_ERK, b_ENR = projection.adapter
        b_ERN = b_ENR.transpose(1, 2)
        low_PR = low_rank_rows(g_PN, b_ERN, ends_E)
        da_ERK = low_rank_wgrad(low_PR, x_PK, a_ERK, ends_E)
        db_ERN = low_rank_wgrad(low_rank_rows(x_PK, a_ERK, ends_E), g_PN, b_ERN, ends_E)
        return low_PR, LowRank(da_ERK, db_ERN.transpose(1, 2))

    def _adapted_dgrad(self, dx_PK: torch.Tensor, low_PR: torch.Tensor | None, projection: Projection,
                       ends_E: torch.Tensor) -> torch.Tensor:
        """dx + (g B) A, in place, if there is an adapter apart, of which `_adapter_backward` returned g B."""
        if low_PR is None or projection.merged is not None:
            return dx_PK
        return add_low_rank(dx_PK, low_PR, projection.adapter.a_ERK, ends_E)

    # ---- operands ---------------------------------------------------------------------------------------------------

    def quantized(self, x_PN: torch.Tensor) -> torch.Tensor:
        """Rows in MXFP8, for GEMMs that contract over the last axis. A recipe without quantization leaves them."""
        if not self.recipe.quantize_gemm or isinstance(x_PN, MXTensor):
            return x_PN
        return casts.quantize(x_PN, self.recipe.block_size, self.recipe.scaling_mode, scale_k_major=True)

    def forms_of_gradient(self, g_PN: torch.Tensor, wgrad: bool) -> tuple:
        """The form of a gradient that the GEMM of the input gradient reads; the form that the GEMM of the weight
        gradient reads, if `wgrad`; and whether the second is in column form."""
        if wgrad and self.reads_columns(g_PN):
            return *casts.quantize_both(g_PN, self.recipe.block_size, self.recipe.scaling_mode), True
        rows = self.quantized(g_PN)
        return rows, rows if self.wgrad_quantized else g_PN, False

    def reads_columns(self, g_PN: torch.Tensor) -> bool:
        """Whether the weight gradient's GEMM reads a gradient in column form, quantized along the rows."""
        return self.wgrad_quantized and not isinstance(g_PN, MXTensor) and not rescales_rows(
            g_PN.device, self.recipe.block_size)

    # ---- products ---------------------------------------------------------------------------------------------------

    def gemm(self, x_PK: torch.Tensor, projection: Projection, ends_E: torch.Tensor,
             transposed: bool = False) -> torch.Tensor:
        """Rows times weights, [P, N], with what an adapter adds.

        `transposed`: contracts over the weights' second to last axis instead, and adds nothing.
        """
        weights: Any = projection.weights
        if not self.recipe.quantize_gemm:
            y_PN = grouped_mm_weights(x_PK, weights.stacks, ends_E, transposed)
        else:
            if projection.merged is not None:
                weights = merge_as_held(weights, projection.merged)
                weights = casts.transpose_tiles(weights) if transposed else weights
            elif isinstance(weights, MXFP4Weights):
                weights = casts.unpack_tiles(weights, transposed)
            elif isinstance(weights, Weights):
                weights = self.quantize_weights(weights, transposed)
            elif projection.held and transposed:
                weights = casts.transpose_tiles(weights)
            if weights.dtype != self.dtype:
                # If no kernel multiplies MXFP8, the weights are dequantized to the dtype that they show: the tokens'.
                weights = MXTensor.of(weights.parts, self.dtype)
            y_PN = grouped_mm(x_PK, weights, ends_E, self.dtype)
        if transposed or projection.adapter is None or projection.merged is not None:
            return y_PN
        a_ERK, b_ENR = projection.adapter
        return add_low_rank(y_PN, low_rank_rows(x_PK, a_ERK, ends_E), b_ENR.transpose(1, 2), ends_E)

    def wgrad_gemm(self, g: torch.Tensor, a_PK: torch.Tensor, ends_E: torch.Tensor, dtype: torch.dtype, columns: bool,
                   splits: int = 1, sums: Sequence[Sum] = ()) -> torch.Tensor | None:
        """[E, N, K], or with several splits [splits, E, N / splits, K]. None: it went to `sums`, one of each split."""
        mode = self.recipe.scaling_mode if self.wgrad_quantized else None
        return grouped_mm_wgrad_rows(g, a_PK, ends_E, dtype, mode, columns, splits, sums)

    def _activation(self, up: Projection, ends_E: torch.Tensor) -> dict:
        formula = self.formula
        layout = "mlp" if formula.kind == "mlp" else "gate_up" if formula.packed == "none" else formula.packed
        return {"activation": formula.activation, "alpha": formula.alpha, "limit": formula.limit, "layout": layout,
                "block_size": self.recipe.block_size, "scaling_mode": self.recipe.scaling_mode,
                "bias_EG": up.bias_EN(), "ends_E": ends_E}
