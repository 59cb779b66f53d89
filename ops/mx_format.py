# SPDX-License-Identifier: Apache-2.0
"""The numbers of the MXFP8 format, and the plain struct in which kernels take and give MXFP8 values."""

from typing import NamedTuple

import torch

E4M3_MAX = 448.0
NAN_SCALE_BYTE = 255
NAN_DATA_BYTE = 0x7F
TILE = 128  # rows and columns of a weight that share one scale, and the larger of the block sizes
BLOCK_SIZES = (32, 128)


class MXParts(NamedTuple):
    """What an MXFP8 tensor consists of. ds_mxfp8_moe.compute.mx.MXTensor is the same as a torch.Tensor.

    Attributes:
        qdata: float8_e4m3fn, [..., R, K].
        scale_bytes: uint8 E8M0, [..., R, ceil(K / block_size)], or [..., ceil(R / 128), ceil(K / 128)] with `tiled`.
        block_size: values along the last axis that share a scale: 32 or 128.
        tiled: one scale serves a tile of 128x128 values (weights).
    """

    qdata: torch.Tensor
    scale_bytes: torch.Tensor
    block_size: int
    tiled: bool = False
