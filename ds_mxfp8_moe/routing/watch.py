# SPDX-License-Identifier: Apache-2.0
"""The samples that layers take of their tokens, in the steps for which metrics.py asks."""

from typing import Any

import torch

from ..compute import casts
from ..compute.routing import Routes
from ..config import Recipe
from ..ops.mx_format import E4M3_MAX
from ..transport import Transport
from ..transport.timed import Timed
from .routes import is_recomputed

SAMPLED = 1024  # tokens of a rank


@torch.compiler.disable
def watch(layer: Any, x_TH: torch.Tensor, routes: Routes, transport: Transport, chosen_E: torch.Tensor) -> Transport:
    """Takes a layer's sample. Returns the transport for this forward, which takes the times of its exchanges.

    Call it in training, if the layer's `mxfp8_samples` is an empty list. `chosen_E`: choices of each expert, also
    those that the layer's capacity dropped.
    """
    timed = Timed(transport, is_recomputed) if layer.ep_size > 1 else None
    layer.mxfp8_samples.append((*sample(x_TH, routes, chosen_E, layer.mxfp8_settings.recipe), timed))
    return timed or transport


def sample(x_TH: torch.Tensor, routes: Routes, chosen_E: torch.Tensor,
           recipe: Recipe) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer's sample, on the device.

    Returns:
        float32 [E + 7], to be summed over ranks: `chosen_E`; how many of them were dropped; tokens in the sample;
        blocks; blocks of zeros; saturated blocks; the sums of squares of the tokens and of their quantization error.
        And float32 [1], of which the largest counts: the largest absolute value.
    """
    with torch.no_grad():
        dropped = chosen_E.sum() - routes.counts_E().sum()
        tokens_SH = x_TH[:SAMPLED].detach().float()
        amax = tokens_SH.abs().amax() if tokens_SH.numel() else tokens_SH.new_zeros(())
        figures = [dropped, amax.new_full((), len(tokens_SH)), *(amax.new_zeros(()) for _ in range(5))]
        if recipe.quantize_gemm and len(tokens_SH):
            figures[2:] = _of_cast(tokens_SH, recipe)
        return torch.cat([chosen_E.float(), torch.stack([x.float() for x in figures])]), amax.view(1)


def _of_cast(x_SH: torch.Tensor, recipe: Recipe) -> list[torch.Tensor]:
    quantized = casts.quantize(x_SH, recipe.block_size, recipe.scaling_mode)
    padded = torch.nn.functional.pad(x_SH, (0, -x_SH.shape[1] % recipe.block_size))
    amax_SB = padded.view(len(x_SH), -1, recipe.block_size).abs().amax(2)
    held_SB = E4M3_MAX * torch.exp2(quantized.scale_bytes.float() - 127)
    noise_SH = x_SH - quantized.dequantize(torch.float32)
    return [amax_SB.new_full((), amax_SB.numel()), (amax_SB == 0).sum(), (amax_SB > held_SB).sum(),
            x_SH.square().sum(), noise_SH.square().sum()]
