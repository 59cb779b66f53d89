# SPDX-License-Identifier: Apache-2.0
"""The roundings of a converted layer one by one: measured while a batch passes, or left out.

`simulated` replaces the arithmetic of converted layers. Each tensor is rounded to MXFP8 exactly as the layer's recipe
says, and is then multiplied in the tokens' own dtype. So one rounding can be left out of a product in which the other
operand is rounded. What remains different from the layer itself is the order of sums, and on Hopper the short
accumulators of the FP8 tensor cores.

    name            what is rounded
    dispatch_fwd    tokens on their way to the experts. The first GEMM reads them as they arrive.
    x               tokens that arrive unrounded, for the first GEMM
    weights_fwd     weights of both forward GEMMs
    pre             the pre-activation, as it is kept for backward
    h               the activation, for the second GEMM
    combine_fwd     results on their way back
    combine_bwd     the output's gradient on its way to the experts
    g               the output's gradient that arrives unrounded, for the GEMM of the input gradient
    weights_bwd     weights of both GEMMs of the input gradient
    dpre            the pre-activation's gradient, for the GEMM of the input gradient
    dispatch_bwd    the input's gradient on its way back
    x_wgrad, h_wgrad, g_wgrad, dpre_wgrad    operands of weight gradients in MXFP8: rounded along the rows
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch

from ds_mxfp8_moe import casts, expert_ffn, mx
from ds_mxfp8_moe.activation import activate, activate_backward
from ds_mxfp8_moe.expert_math import ExpertMath, Rows
from ds_mxfp8_moe.experts import ExpertFormula
from ds_mxfp8_moe.grouped_gemm import grouped_mm, grouped_mm_weights, grouped_mm_wgrad_rows, plain, rescales_rows
from ds_mxfp8_moe.mx import MXTensor
from ds_mxfp8_moe.transport import Pending, Transport, Wire
from ds_mxfp8_moe.transport.collective import Collective
from ds_mxfp8_moe.transport.local import Local
from ds_mxfp8_moe.transport.nvlink import NVLink

WIRES = ("dispatch_fwd", "combine_fwd", "combine_bwd", "dispatch_bwd")  # the config leaves these out, and "pre"
NAMES = ("x", "weights_fwd", "h", "g", "weights_bwd", "dpre", "x_wgrad", "h_wgrad", "g_wgrad", "dpre_wgrad")
PHASES = {"dispatch": "dispatch_fwd", "combine": "combine_fwd", "dispatch of the gradient": "combine_bwd",
          "combine of the gradient": "dispatch_bwd"}


class Measured:
    """Collects how each rounding changed its tensors. Everything stays on the device until it is read."""

    def __init__(self) -> None:
        self._found: dict[str, list[torch.Tensor]] = {}

    def add(self, name: str, exact: torch.Tensor, rounded: torch.Tensor) -> None:
        """Adds one tensor and what it was rounded to, of the same shape."""
        exact = exact.detach().float()
        difference = rounded.detach().float() - exact
        sums = (exact.square().sum(), difference.square().sum(), (difference * exact).sum())
        self._found.setdefault(name, []).append(torch.stack(sums))

    def read(self) -> dict[str, dict[str, float]]:
        """{"sqnr_db": {rounding: ...}, "shrinkage": {rounding: ...}}: means over the tensors of a name.

        Shrinkage is <rounded, exact> / <exact, exact> - 1. Tensors of zeros do not count.
        """
        result: dict = {"sqnr_db": {}, "shrinkage": {}}
        for name, sums in sorted(self._found.items()):
            signal, noise, along = torch.stack(sums).double().unbind(1)
            there = signal > 0
            if there.any():
                ratio = noise[there] / signal[there]
                result["sqnr_db"][name] = (-10 * torch.log10(ratio.clamp_min(1e-20))).mean().item()
                result["shrinkage"][name] = (along[there] / signal[there]).mean().item()
        return result


def simulates(formula: ExpertFormula) -> bool:
    """Whether experts of this formula can be simulated: gated ones without biases."""
    return formula.kind == "gated" and not (formula.gate_bias or formula.up_bias or formula.down_bias)


class SimulatedMath(ExpertMath):
    """Rounds as the recipe says, but for the roundings in `off`. Multiplies plain tensors."""

    off: Collection[str] = ()
    measured: Measured | None = None

    def _note(self, name: str, exact: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
        if self.measured is not None:
            self.measured.add(name, exact, rounded)
        return rounded

    def _rounded(self, name: str, x_PN: torch.Tensor) -> torch.Tensor:
        return x_PN if name in self.off else self._note(name, x_PN, plain(self.quantized(x_PN)))

    def _product(self, x_PK: torch.Tensor, stack: str, transposed: bool) -> torch.Tensor:
        plan, name = self.plan, "weights_bwd" if transposed else "weights_fwd"
        if name in self.off:
            return grouped_mm_weights(x_PK, self.stacks[stack], plan.group_ends_E, transposed)
        weights = casts.joined(self.stacks[stack]).to(self.dtype)
        exact = weights.transpose(1, 2) if transposed else weights
        rounded = self._note(name, exact, casts.dequantize(self._quantize_weights(stack, transposed), self.dtype))
        return grouped_mm(x_PK, rounded, plan.group_ends_E, self.dtype)

    def _along_rows(self, name: str, x_PN: torch.Tensor) -> torch.Tensor:
        """An operand of a weight gradient, rounded along the rows where the recipe multiplies it in MXFP8."""
        if not self.wgrad_quantized or name in self.off or x_PN.shape[0] == 0:
            return x_PN
        recipe = self.recipe
        if rescales_rows(x_PN.device, recipe.block_size):  # Hopper's kernel gives each tile one scale
            rounded = mx.quantize_tiles(x_PN, recipe.scaling_mode).dequantize()
        else:
            rounded = plain(casts.quantize_columns(x_PN, recipe.block_size, recipe.scaling_mode)).t()
        return self._note(name, x_PN, rounded.contiguous())

    def _weight_gradient(self, g_PN: torch.Tensor, a_PK: torch.Tensor, role: str) -> torch.Tensor:
        return grouped_mm_wgrad_rows(g_PN, a_PK, self.plan.group_ends_E, self.dtype_of(role))

    def quantize_ahead(self) -> None:
        if not self.recipe.quantize_gemm:
            super().quantize_ahead()

    def forward(self, dispatch: Callable[[], tuple], backward: bool) -> tuple[torch.Tensor, Rows]:
        if not self.recipe.quantize_gemm:
            return super().forward(dispatch, backward)
        if not simulates(self.formula):
            raise ValueError("roundings are simulated for gated experts without biases only, and these are "
                             f"{self.formula}: choose recipes without a switched-off rounding")
        x_PH, weight_P = dispatch()
        x_PH = plain(x_PH) if isinstance(x_PH, MXTensor) else self._rounded("x", x_PH)
        pre_PG = self._product(x_PH, "up", transposed=False)
        keep = backward and self.recipe.preactivation == "mxfp8"
        exact, _ = activate(pre_PG, weight_P, quantized=False, keep=False, **self.activation())
        rounded, kept = activate(pre_PG, weight_P, quantized=True, keep=keep, **self.activation())
        h_PF = exact if "h" in self.off else self._note("h", exact, plain(rounded))
        if keep:
            self._note("pre", pre_PG, kept.dequantize().flatten(-2))
        return self._product(h_PF, "down", transposed=False), Rows(x_PH if backward else None,
                                                                   kept if keep else pre_PG, h_PF, weight_P)

    def backward(self, dispatch_grad: Callable, combine_grad: Callable, sms_beside: Callable, rows: Rows,
                 needed: set[str]) -> tuple[dict, tuple]:
        if not self.recipe.quantize_gemm:
            return super().backward(dispatch_grad, combine_grad, sms_beside, rows, needed)
        arrived, _ = dispatch_grad()
        exact = plain(arrived)
        g_PH = exact if isinstance(arrived, MXTensor) else self._rounded("g", exact)
        t_PF = self._product(g_PH, "down", transposed=True)
        twice = rescales_rows(t_PF.device, self.recipe.block_size)  # the weight gradient re-scales what dgrad reads
        grads = {}
        if "down" in needed:
            grads["down"] = self._weight_gradient(self._along_rows("g_wgrad", g_PH if twice else exact),
                                                  self._along_rows("h_wgrad", rows.h_PF), "down")
        along_rows = self.wgrad_quantized and not twice and "dpre_wgrad" not in self.off
        dpre = activate_backward(t_PF, rows.pre_PG, rows.weight_P, plain=True, rows=True, columns=along_rows,
                                 **self.activation())
        dpre_PG = dpre.plain if "dpre" in self.off else self._note("dpre", dpre.plain, plain(dpre.rows))
        if not needed.isdisjoint(self.up_roles):
            if along_rows:
                g_wgrad = self._note("dpre_wgrad", dpre.plain, plain(dpre.columns).t().contiguous())
            else:
                g_wgrad = self._along_rows("dpre_wgrad", dpre_PG if twice and self.wgrad_quantized else dpre.plain)
            both = self._weight_gradient(g_wgrad, self._along_rows("x_wgrad", rows.x_PH), "up")
            pieces = both.chunk(len(self.up_roles), dim=1)
            grads |= {role: piece.contiguous() for role, piece in zip(self.up_roles, pieces, strict=True)}
        dx_PH = self._product(dpre_PG, "up", transposed=True)
        return grads, combine_grad(dx_PH, weight_P=dpre.dweight_P, sms=0).result()


def _measuring(transport: type[Transport], measured: Measured) -> dict[str, Callable]:
    """Methods of a transport that also measure what a wire in MXFP8 rounds."""
    dispatch, combine, start = transport.dispatch, transport.combine, vars(transport).get("start_combine")

    def combined(self, *args):
        # By default, start_combine calls combine. Where a transport has its own, combine calls that.
        return start(self, *args).result() if start else combine(self, *args)

    def measured_dispatch(self, plan, x_TH, wire, weight_TK=None, phase="dispatch"):
        if wire.mxfp8:
            measured.add(PHASES[phase], x_TH, casts.quantize(x_TH, wire.block_size, wire.scaling_mode).dequantize())
        return dispatch(self, plan, x_TH, wire, weight_TK, phase)

    def measured_combine(self, plan, y_PH, wire, dtype, weight_P=None, phase="combine"):
        result = combined(self, plan, y_PH, wire, dtype, weight_P, phase)
        if wire.mxfp8:
            measured.add(PHASES[phase], combined(self, plan, y_PH, Wire(False), dtype, None, phase)[0], result[0])
        return result

    def measured_start(self, plan, y_PH, wire, dtype, weight_P=None, phase="combine", sms=0):
        return Pending(measured_combine(self, plan, y_PH, wire, dtype, weight_P, phase))

    return {"dispatch": measured_dispatch, "combine": measured_combine, "start_combine": measured_start}


@contextmanager
def simulated(off: Collection[str] = (), measured: Measured | None = None) -> Iterator[None]:
    """Within it, converted layers of this process compute with `SimulatedMath`, without replays.

    Every rank enters it at the same step, since wires that are measured send their rows twice.

    Args:
        off: roundings of NAMES that are left out.
    """
    if unknown := set(off).difference(NAMES):
        raise ValueError(f"{sorted(unknown)} cannot be left out here; expected some of {NAMES}. The config leaves out "
                         'wires ("dispatch_fwd_dtype" and so on) and "preactivation_dtype"')
    math = type("SimulatedMath", (SimulatedMath, ), {"off": frozenset(off), "measured": measured})
    with mock.patch.object(expert_ffn, "ExpertMath", math), \
            mock.patch.object(expert_ffn, "executor_for", lambda device: None):
        if measured is None:
            yield
            return
        with ExitStack() as patched:
            for transport in (Local, Collective, NVLink):
                patched.enter_context(mock.patch.multiple(transport, **_measuring(transport, measured)))
            yield
