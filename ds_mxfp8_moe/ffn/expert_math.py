# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of one call of an expert FFN: formula and recipe applied to expert-sorted rows.

expert_ffn.py explains the letters in tensor names, gives the formulas, and has a table of the operands of weight
gradients.

The work between two exchanges is one step or a few. A step takes its rows in a list, which it empties, so that each of
them is freed after its last use.
"""

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from itertools import chain
from types import ModuleType
from typing import NamedTuple

import torch

from ..compute import casts
from ..compute.activation import activate, activate_backward, add_weighted_bias, group_sums
from ..compute.executor import replayed
from ..compute.formula import ExpertFormula, LowRank
from ..compute.grouped_gemm import (
    grouped_mm,
    grouped_mm_weights,
    grouped_mm_wgrad_rows,
    plain,
    rescales_rows,
    wgrad_cost,
)
from ..compute.low_rank import add_low_rank, low_rank_rows, low_rank_wgrad, weighted_bias_backward
from ..compute.mx import MXTensor
from ..compute.sums import Sum
from ..config import Recipe
from ..ops.device import multiprocessors
from ..transport import Pending, Plan

# The GEMMs, and the names of their quantised weights in what a step returns.
GEMMS = {"up": "quantized up", "down": "quantized down"}


class Rows(NamedTuple):
    """The tensors that forward keeps for backward: MXTensors, or plain ones in a recipe without quantisation.

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


class ExpertMath:
    """Formula and recipe applied to the rows of one plan.

    Attributes:
        plan: None until the rows are known.
        stacks: the weights of each GEMM, by its name: "up", which includes the gate, and "down".
        adapters: the low-rank updates by the name of their GEMM, in the tokens' dtype.
        adapter_grads: their gradients, after `backward`.
        sums: where `backward` puts the gradients of weights, by role, instead of returning them.
        executor: records steps and replays them. None: the host launches all kernels from Python.
        quantized_weights: the weights that are quantised already, by the name of their GEMM.
        keep: whether they stay there after this GEMM. Such an object computes either forward or backward, which
            needs the weights transposed.
        frozen: the weights of each GEMM, if they are held in MXFP8 alone. Then `weights` has biases alone.
    """

    def __init__(self, formula: ExpertFormula, recipe: Recipe, plan: Plan | None, weights: dict, dtype: torch.dtype,
                 kept: dict[str, MXTensor] | None = None, adapters: dict[str, LowRank] | None = None,
                 executor: ModuleType | None = None, frozen: dict[str, MXTensor] | None = None):
        """Arguments:
            weights: for each role of the formula, one tensor [E, ...] or a list of E.
            dtype: of the tokens.
            kept: quantised weights of earlier calls, to which this object adds those that it makes. None keeps none.
            adapters: None: there are none.
            frozen: of a gated formula: FrozenWeights.operands. None: the weights are in `weights`.
        """
        self.formula, self.recipe, self.plan, self.weights, self.dtype = formula, recipe, plan, weights, dtype
        self.keep, self.adapters, self.executor = kept is not None, adapters or {}, executor
        self.frozen = frozen or {}
        self.adapter_grads: dict[str, LowRank] = {}
        self.sums: dict[str, Sum] = {}
        self.quantized_weights = kept if self.keep else {}

    # The replay of a whole call needs none of what follows.

    @cached_property
    def up_roles(self) -> list[str]:
        return [role for role in ("gate", "up") if role in self.weights or self.frozen]

    @cached_property
    def stacks(self) -> dict[str, list]:
        if self.frozen:
            return {gemm: [mx.qdata, mx.scale_bytes] for gemm, mx in self.frozen.items()}
        found = {"up": [self.weights[role] for role in self.up_roles]}
        if "down" in self.weights:
            found["down"] = [self.weights["down"]]
        return found

    @cached_property
    def dtypes(self) -> dict[str, torch.dtype]:
        """Of the weights, by role."""
        return {role: casts.sample(weight).dtype for role, weight in self.weights.items()}

    @cached_property
    def up_bias_EG(self) -> torch.Tensor | None:
        biases = [self._stacked_bias(role) for role in self.up_roles]
        if all(bias is None for bias in biases):
            return None
        known = next(bias for bias in biases if bias is not None)
        return torch.cat([torch.zeros_like(known) if bias is None else bias for bias in biases], dim=1)

    @cached_property
    def down_bias_EH(self) -> torch.Tensor | None:
        return self._stacked_bias("down")

    def _stacked_bias(self, role: str) -> torch.Tensor | None:
        bias = self.weights.get(f"{role}_bias")
        return None if bias is None else casts.joined([bias]).contiguous()

    @property
    def wgrad_quantized(self) -> bool:
        """Whether the weight gradients' GEMMs multiply MXFP8."""
        return self.recipe.quantize_gemm and self.recipe.wgrad == "mxfp8"

    # ---- steps ------------------------------------------------------------------------------------------------------

    def step(self, name: str, function: Callable[[list], dict], reads: Sequence[str] | None = (),
             how: tuple = ()) -> Callable[[list], dict]:
        """The function, or with an executor, what records its first call and replays it in later ones.

        What runs between two exchanges can be recorded, since it depends on the number of rows, and on nothing else
        that only the device knows. Transports round that number up (`room_for`), so that it repeats. With a transport
        of one rank, a whole forward or backward is a step, and those inside it are part of it.

        Args:
            function: takes rows, which are tensors, MXTensors and None, in a list, and empties it.
            reads: the GEMMs whose weights the step reads, as they are or quantised. None: it is a whole call.
            how: what the step depends on, beside this object's attributes and the properties of its tensors.
        """
        return function if self.executor is None else partial(self._replayed, name, function, reads, how)

    def _replayed(self, name: str, function: Callable[[list], dict], reads: Sequence[str] | None, how: tuple,
                  rows: list) -> dict:
        if rows and rows[0].numel() == 0:
            return function(rows)
        known, count, executor = self.quantized_weights, len(rows), self.executor
        given = [gemm for gemm in (GEMMS if reads is None else reads) if gemm in known]
        sums = [one.out_ENK for one in self.sums.values()]
        inputs = [*rows, *map(known.get, given), *chain(*self.adapters.values()), *sums]
        rows.clear()
        if reads is None:
            stacks = [*self.weights.values(), *(chain(*self.stacks.values()) if self.frozen else ())]
        else:
            stacks = [stack for gemm in reads if gemm not in known for stack in self.stacks[gemm]]
            inputs += getattr(self.plan, "group_ends_E", None), self.up_bias_EG, self.down_bias_EH
            how = *how, *self.dtypes.values()
        if not self.keep:  # no later step reads them
            for gemm in given:
                del known[gemm]

        def of_inputs(inputs: list) -> dict:
            known.update(zip(given, inputs[count:count + len(given)], strict=True))
            del inputs[count:]
            before = [*known]
            self.executor = None  # steps within this one are part of it
            made = function(inputs)
            self.executor = executor
            return made | {GEMMS[gemm]: mx for gemm, mx in known.items() if gemm not in before}

        places = [(role, one.begun, one.factor, out.data_ptr() - sums[0].data_ptr())
                  for (role, one), out in zip(self.sums.items(), sums, strict=True)]
        key = (name, how, self.formula, self.recipe, self.dtype, self.keep, tuple(self.weights), tuple(self.frozen),
               tuple(self.adapters), tuple(given), *places)
        made = replayed(executor, key, of_inputs, inputs,
                        [stack if isinstance(stack, list) else [stack] for stack in stacks],
                        self.recipe.quantize_gemm)
        for gemm, quantized in GEMMS.items():
            if quantized in made:
                known[gemm] = made.pop(quantized)
        return made

    # ---- forward ----------------------------------------------------------------------------------------------------

    def quantize_ahead(self) -> None:
        """Quantises the weights for the forward GEMMs that are not quantised yet. It needs no plan."""
        missing = [gemm for gemm in self.stacks if gemm not in self.quantized_weights and not self.frozen]

        def quantize(rows: list) -> dict:
            self.quantized_weights.update({gemm: self._quantize_weights(gemm, transposed=False) for gemm in missing})
            return {}

        if self.recipe.quantize_gemm and missing:
            self.step("quantize", quantize, missing)([])

    def forward_rows(self, backward: bool, given: list) -> dict:
        """The experts' output rows y_PH, and those of `Rows`. Takes x_PH and weight_P.

        `backward`: whether to keep what backward needs.
        """
        x_PH, weight_P = given
        given.clear()
        x_PH = self.quantized(x_PH)
        pre_PG = self.adapted(self.gemm(x_PH, "up"), x_PH, "up")
        if not backward:
            x_PH = None
        keep = backward and self.recipe.quantize_gemm and self.recipe.preactivation == "mxfp8"
        h_PF, kept_PG = activate(pre_PG, weight_P, quantized=self.recipe.quantize_gemm, keep=keep, **self.activation())
        pre_PG = kept_PG if keep else pre_PG if backward else None
        y_PH = self.adapted(self.gemm(h_PF, "down"), h_PF, "down")
        if self.down_bias_EH is not None:
            y_PH = add_weighted_bias(y_PH, self.down_bias_EH, weight_P, self.plan.group_ends_E)
        return {"y_PH": y_PH, "x_PH": x_PH, "pre_PG": pre_PG, "h_PF": h_PF, "weight_P": weight_P}

    # ---- backward ---------------------------------------------------------------------------------------------------

    def backward(self, dispatch_grad: Callable[[], tuple], combine_grad: Callable[..., Pending],
                 sms_beside: Callable[[float, int], int], rows: Rows, needed: set[str]) -> tuple[dict, tuple]:
        """Computes all gradients.

        Args:
            dispatch_grad: returns the rows g_PH of the output's gradient, and None.
            combine_grad: starts to send the gradients of x_PH and of the routing weights back to their tokens.
            sms_beside: takes the seconds and the tiles of a GEMM. Returns the multiprocessors that the combine of the
                gradient takes while this GEMM runs. 0: the two run one after the other.
            needed: roles whose weights need a gradient.

        Returns:
            A stacked gradient for each of these roles that is not in `sums`; and the result of `combine_grad`.
            Gradients of adapters are in `adapter_grads`.
        """
        wants_ups = not needed.isdisjoint(self.up_roles)
        how = tuple(sorted(needed))
        g_PH, _ = dispatch_grad()
        given = [g_PH, *rows]
        del g_PH
        grads = self.step("gradient of h", partial(self._backward_to_dpre, needed), ("down", ), how)(given)
        g_rows, g_wgrad, low_PR, dweight_P = map(grads.pop, ("g_rows", "g_wgrad", "low_PR", "dweight_P"))
        columns = g_wgrad is not None and self.wgrad_quantized
        g_wgrad = g_rows if g_wgrad is None else g_wgrad
        for name in self.adapters:
            self.adapter_grads[name] = LowRank(*(grads.pop((name, field)) for field in LowRank._fields))

        def ups(beside: int) -> dict:
            return self.step("gradients of up", partial(self._ups_wgrad, columns, needed, beside),
                             how=(how, columns, beside))([g_wgrad, rows.x_PH])

        beside = 0 if not wants_ups else sms_beside(
            *wgrad_cost(g_wgrad, rows.x_PH, len(self.plan.group_ends_E), self.wgrad_quantized))
        ups_first = wants_ups and not beside and g_wgrad is not g_rows and self._ups_first_takes_less(
            g_rows.shape, rows.x_PH.shape[1])
        if ups_first:
            grads |= ups(0)
        if ups_first or not wants_ups:
            g_wgrad = None  # which frees it
        given = [g_rows, low_PR]
        del g_rows
        dx_PH = self.step("gradient of x", self._backward_to_dx, ("up", ))(given).pop("dx_PH")
        pending = combine_grad(dx_PH, weight_P=dweight_P, sms=beside)
        del dx_PH
        try:
            if wants_ups and not ups_first:
                grads |= ups(beside)
        finally:  # an error must not free memory that the exchange still reads or writes
            result = pending.result()
        return grads, result

    def _backward_to_dpre(self, needed: set[str], given: list) -> dict:
        """The forms of dpre: `g_rows` for dx, and `g_wgrad` for dW1, None if it is the same; what an adapter adds to
        dx; the gradient of the routing weights; and, by role, those of dW2 and of the biases. Takes g_PH and `Rows`.
        """
        g_PH, *rows = given
        given.clear()
        rows, grads = Rows(*rows), {}
        if self.down_bias_EH is not None:
            dweight_of_bias_P = weighted_bias_backward(g_PH, self.down_bias_EH, self.plan.group_ends_E)
            if "down_bias" in needed:
                grads["down_bias"] = self.group_sums(plain(g_PH), rows.weight_P).to(self.dtypes["down_bias"])
        given += g_PH, rows.h_PF
        del g_PH
        t_PF = self.product_backward("down", given, needed, grads)

        wants_ups = not needed.isdisjoint(self.up_roles)
        columns = wants_ups and self.reads_columns(t_PF)
        wants_biases = not needed.isdisjoint(f"{role}_bias" for role in self.up_roles)
        wants_plain = not self.recipe.quantize_gemm or wants_biases or "up" in self.adapters or (
            wants_ups and not self.wgrad_quantized)
        dpre = activate_backward(t_PF, rows.pre_PG, rows.weight_P, plain=wants_plain, rows=self.recipe.quantize_gemm,
                                 columns=columns, **self.activation())
        del t_PF
        dweight_P = dpre.dweight_P if self.down_bias_EH is None else dpre.dweight_P + dweight_of_bias_P
        if wants_biases:
            grads |= self._up_bias_gradients(dpre.plain)
        low_PR = self._adapter_backward(dpre.plain, rows.x_PH, "up", grads)
        g_rows = dpre.rows if self.recipe.quantize_gemm else dpre.plain
        g_wgrad = dpre.columns if columns else None if self.wgrad_quantized or g_rows is dpre.plain else dpre.plain
        return grads | {"g_rows": g_rows, "g_wgrad": g_wgrad, "low_PR": low_PR, "dweight_P": dweight_P}

    def _backward_to_dx(self, given: list) -> dict:
        """Takes `g_rows` and `low_PR` of `_backward_to_dpre`."""
        g_rows, low_PR = given
        given.clear()
        return {"dx_PH": self._adapted_dgrad(self.gemm(g_rows, "up", transposed=True), low_PR, "up")}

    def adapted(self, y_PN: torch.Tensor, x_PK: torch.Tensor, name: str) -> torch.Tensor:
        """The result of the GEMM of this name with what its adapter adds, in place, if it has one."""
        if name not in self.adapters:
            return y_PN
        (a_ERK, b_ENR), ends_E = self.adapters[name], self.plan.group_ends_E
        return add_low_rank(y_PN, low_rank_rows(x_PK, a_ERK, ends_E), b_ENR.transpose(1, 2), ends_E)

    def product_backward(self, name: str, given: list, needed: set[str], grads: dict) -> torch.Tensor:
        """The gradient [P, K] of the rows of the GEMM of this name. Adds the gradients of its weights, by role, and of
        its adapter to `grads`. Takes the gradient of its result, and its rows, None if no weight needs a gradient."""
        g_PN, x_PK = given
        given.clear()
        roles = self.up_roles if name == "up" else [name]
        wanted = not needed.isdisjoint(roles)
        low_PR = self._adapter_backward(g_PN, x_PK, name, grads)
        g_PN, g_wgrad, columns = self._forms_of_gradient(g_PN, wanted)
        dx_PK = self._adapted_dgrad(self.gemm(g_PN, name, transposed=True), low_PR, name)
        del g_PN
        if wanted:
            grads |= self._wgrads(roles, g_wgrad, x_PK, needed, columns)
        return dx_PK

    def _adapter_backward(self, g_PN: torch.Tensor, x_PK: torch.Tensor, name: str,
                          grads: dict) -> torch.Tensor | None:
        """Adds the gradients of an adapter to `grads`, and returns g B [P, R]. None: there is no adapter.

        Args:
            g_PN: the gradient of the GEMM's result.
            x_PK: the GEMM's operand.
        """
        if name not in self.adapters:
            return None
        (a_ERK, b_ENR), ends_E = self.adapters[name], self.plan.group_ends_E
        b_ERN = b_ENR.transpose(1, 2)
        low_PR = low_rank_rows(g_PN, b_ERN, ends_E)
        grads[name, "a_ERK"] = low_rank_wgrad(low_PR, x_PK, a_ERK, ends_E)
        grads[name, "b_ENR"] = low_rank_wgrad(low_rank_rows(x_PK, a_ERK, ends_E), g_PN, b_ERN, ends_E).transpose(1, 2)
        return low_PR

    def _adapted_dgrad(self, dx_PK: torch.Tensor, low_PR: torch.Tensor | None, name: str) -> torch.Tensor:
        """dx + (g B) A, in place, if there is an adapter, of which `_adapter_backward` returned g B."""
        if low_PR is None:
            return dx_PK
        return add_low_rank(dx_PK, low_PR, self.adapters[name].a_ERK, self.plan.group_ends_E)

    def _up_bias_gradients(self, dpre_PG: torch.Tensor) -> dict[str, torch.Tensor]:
        sums = self.group_sums(dpre_PG).chunk(len(self.up_roles), dim=1)
        biases = zip((f"{role}_bias" for role in self.up_roles), sums, strict=True)
        return {bias: of_role.to(self.dtypes[bias]) for bias, of_role in biases if bias in self.weights}

    def _ups_wgrad(self, columns: bool, needed: set[str], beside: int, given: list) -> dict[str, torch.Tensor]:
        """The gradients of gate and up. Takes dpre and x_PH."""
        g_wgrad, x_PH = given
        given.clear()
        return self._wgrads(self.up_roles, g_wgrad, x_PH, needed, columns, beside)

    def _wgrads(self, roles: list[str], g: torch.Tensor, a_PK: torch.Tensor, needed: set[str], columns: bool,
                beside: int = 0) -> dict[str, torch.Tensor]:
        """The gradients of the roles of one GEMM that are not in `sums`. Arguments as those of `wgrad_gemm`."""
        # Autograd copies a gradient that is not laid out as its stacked parameter. So the GEMM writes the gradients of
        # gate and up one after the other, each contiguous, into one storage. If only one of them is needed, it does
        # not: autograd then copies this one, and the storage of both is freed.
        count = len(roles)
        splits = count if needed.issuperset(roles) else 1
        sums = [self.sums[role] for role in roles if role in self.sums]
        direct = len(sums) == splits == count
        both = self.wgrad_gemm(g, a_PK, self.dtypes[roles[-1]], columns, beside, splits, sums if direct else ())
        if direct:
            return {}
        grads = dict(zip(roles, both.unbind(0) if splits > 1 else both.chunk(count, dim=1), strict=True))
        for role in self.sums.keys() & grads.keys():
            self.sums[role].take(grads.pop(role))
        return grads

    def _ups_first_takes_less(self, shape_PG: Sequence[int], H: int) -> bool:
        """Whether peak memory is lower if dW1 is computed before dx.

        Called only if no GEMM runs beside the exchange, and if dW1 and dx read different forms of dpre. The estimate
        takes the plain form for dW1, and the MXFP8 form for dx. Bytes in memory at the same time:

            dW1 first, during dW1   dpre MXFP8 G P + x dequantised 2 H P + dW1 2 E G H + dpre plain 2 G P
            dW1 first, during dx    dpre MXFP8 G P + dx 2 H P            + dW1 2 E G H + quantised weights E G H
            dx first, during dW1    dx 2 H P       + x dequantised 2 H P + dW1 2 E G H + dpre plain 2 G P
        """
        (P, G), E = shape_PG, len(self.plan.group_ends_E)
        return max(2 * G * P, E * G * H) < (G + 2 * H) * P

    # ---- operands ---------------------------------------------------------------------------------------------------

    def quantized(self, x_PN: torch.Tensor) -> torch.Tensor:
        """Rows in MXFP8, for GEMMs that contract over the last axis. A recipe without quantisation leaves them."""
        if not self.recipe.quantize_gemm or isinstance(x_PN, MXTensor):
            return x_PN
        return casts.quantize(x_PN, self.recipe.block_size, self.recipe.scaling_mode, scale_k_major=True)

    def _forms_of_gradient(self, g_PN: torch.Tensor, wgrad: bool) -> tuple:
        """The form of a gradient that the GEMM of the input gradient reads; the form that the GEMM of the weight
        gradient reads, if `wgrad`; and whether the second is in column form."""
        if wgrad and self.reads_columns(g_PN):
            return *casts.quantize_both(g_PN, self.recipe.block_size, self.recipe.scaling_mode), True
        rows = self.quantized(g_PN)
        return rows, rows if self.wgrad_quantized else g_PN, False

    def reads_columns(self, g_PN: torch.Tensor) -> bool:
        """Whether the weight gradient's GEMM reads a gradient in column form, quantised along the rows."""
        return self.wgrad_quantized and not isinstance(g_PN, MXTensor) and not rescales_rows(
            g_PN.device, self.recipe.block_size)

    def _quantize_weights(self, name: str, transposed: bool) -> MXTensor:
        if self.frozen:
            return casts.transpose_tiles(self.frozen[name]) if transposed else self.frozen[name]
        return casts.quantize_weights(self.stacks[name], self.recipe.block_size, self.recipe.scaling_mode, transposed)

    # ---- products and sums ------------------------------------------------------------------------------------------

    def gemm(self, x_PK: torch.Tensor, name: str, transposed: bool = False) -> torch.Tensor:
        """Rows times the weights of this name in `stacks`.

        Contracts over the weights' last axis, as forward does, or over their second to last one if `transposed`.
        """
        ends_E = self.plan.group_ends_E
        if not self.recipe.quantize_gemm:
            return grouped_mm_weights(x_PK, self.stacks[name], ends_E, transposed)
        mx = self.quantized_weights.pop(name, None)
        if mx is None:
            mx = self._quantize_weights(name, transposed)
        if self.keep:
            self.quantized_weights[name] = mx
        if mx.dtype != self.dtype:
            # If no kernel multiplies MXFP8, the weights are dequantised to the dtype that they show: the tokens'.
            mx = MXTensor.of(mx.parts, self.dtype)
        return grouped_mm(x_PK, mx, ends_E, self.dtype)

    def wgrad_gemm(self, g: torch.Tensor, a_PK: torch.Tensor, dtype: torch.dtype, g_columns: bool, beside: int = 0,
                   splits: int = 1, sums: Sequence[Sum] = ()) -> torch.Tensor | None:
        """[E, N, K], or with several splits [splits, E, N / splits, K]. None: it went to `sums`, one for each split.

        `beside`: multiprocessors that are left to an exchange.
        """
        mode = self.recipe.scaling_mode if self.wgrad_quantized else None
        sms = multiprocessors(a_PK.device) - beside if beside else 0
        return grouped_mm_wgrad_rows(g, a_PK, self.plan.group_ends_E, dtype, mode, g_columns, sms, splits, sums)

    def group_sums(self, x_PN: torch.Tensor, weight_P: torch.Tensor | None = None) -> torch.Tensor:
        return group_sums(x_PN, self.plan.group_ends_E, weight_P)

    def activation(self) -> dict:
        formula = self.formula
        layout = "mlp" if formula.kind == "mlp" else "gate_up" if formula.packed == "none" else formula.packed
        return {"activation": formula.activation, "alpha": formula.alpha, "limit": formula.limit, "layout": layout,
                "block_size": self.recipe.block_size, "scaling_mode": self.recipe.scaling_mode,
                "bias_EG": self.up_bias_EG, "ends_E": self.plan.group_ends_E}
