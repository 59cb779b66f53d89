# SPDX-License-Identifier: Apache-2.0
"""Products of rows sorted by expert with factors of a low rank, and which kernel computes them: those of LoRA adapters
(`LowRank`), and of rank 1 those with an expert's bias.

Kernels (ops/triton_kernels/low_rank.py) take factors in bf16 of a rank up to 128. All else goes to torch._grouped_mm,
which rounds the product once more before it is added.

P: rows, W: their width, R: the rank, E: experts. P and all groups are multiples of 128 rows. `factor_ERW` is one of
LowRank's factors: a_ERK, or b_ENR with its last two axes exchanged.
"""

from types import ModuleType

import torch

from ..ops.device import runs_triton
from .activation import bias_rows
from .grouped_gemm import grouped_mm, grouped_mm_wgrad, plain
from .mx import parts_of


def low_rank_rows(x_PW: torch.Tensor, factor_ERW: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """x factor[e]^T of the rows of each expert e: [P, R] in the factor's dtype.

    `x_PW`: plain or MXFP8.
    """
    if (kernels := _kernels(x_PW, factor_ERW)) is not None:
        return kernels.low_rank_rows(parts_of(x_PW), factor_ERW, ends_E)
    return grouped_mm(plain(x_PW), factor_ERW, ends_E, factor_ERW.dtype, aligned=False)


def add_low_rank(y_PW: torch.Tensor, low_PR: torch.Tensor, factor_ERW: torch.Tensor,
                 ends_E: torch.Tensor) -> torch.Tensor:
    """Adds low factor[e] to the rows of each expert e, in place, and returns y."""
    if (kernels := _kernels(y_PW, factor_ERW)) is not None:
        kernels.add_low_rank(y_PW, low_PR, factor_ERW, ends_E)
        return y_PW
    return y_PW.add_(grouped_mm(low_PR, factor_ERW.transpose(1, 2), ends_E, y_PW.dtype, aligned=False))


def low_rank_wgrad(low_PR: torch.Tensor, x_PW: torch.Tensor, factor_ERW: torch.Tensor,
                   ends_E: torch.Tensor) -> torch.Tensor:
    """low^T x over the rows of each expert: the gradient of the factor, [E, R, W], in its dtype and laid out as it."""
    if (kernels := _kernels(x_PW, factor_ERW)) is not None:
        return kernels.low_rank_wgrad(low_PR, parts_of(x_PW), factor_ERW, ends_E)
    if factor_ERW.is_contiguous():
        return grouped_mm_wgrad(low_PR, plain(x_PW), ends_E, factor_ERW.dtype, aligned=False)
    return grouped_mm_wgrad(plain(x_PW), low_PR, ends_E, factor_ERW.dtype, aligned=False).transpose(1, 2)


def weighted_bias_backward(g_PN: torch.Tensor, bias_EN: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """The gradient of the weights in `activation.add_weighted_bias`: <g, bias> of each row, [P] float32.

    `g_PN`: plain or MXFP8.
    """
    factor_E1N = bias_EN.unsqueeze(1)
    if (kernels := _kernels(g_PN, factor_E1N)) is not None:
        return kernels.low_rank_rows(parts_of(g_PN), factor_E1N, ends_E, torch.float32).squeeze(1)
    return (plain(g_PN).float() * bias_rows(bias_EN, ends_E, g_PN.shape[0])).sum(-1)


def _kernels(x_PW: torch.Tensor, factor_ERW: torch.Tensor) -> ModuleType | None:
    """The kernels, if they take these operands."""
    if not runs_triton(x_PW) or x_PW.dtype != torch.bfloat16 or factor_ERW.dtype != torch.bfloat16:
        return None
    from ..ops.triton_kernels import low_rank
    return low_rank if factor_ERW.shape[1] <= low_rank.MOST_RANKS else None
