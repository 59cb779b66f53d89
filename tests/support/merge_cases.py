# SPDX-License-Identifier: Apache-2.0
"""Merges by kernels against merging.py, to the bit, on whatever device the kernels run; the reference runs on the CPU.
"""

import torch

from ds_mxfp8_moe.compute import merging, mxfp4
from ds_mxfp8_moe.compute.formula import LowRank
from ds_mxfp8_moe.compute.mx import MXTensor
from ds_mxfp8_moe.ops.mx_format import MXParts
from ds_mxfp8_moe.ops.triton_kernels import merge as kernels
from tests.support.conformance import poisoned
from tests.support.mxfp4_cases import hard
from tests.support.quantize_cases import equal, hard_values, same, same_values

EXPERTS = 3
SEEDS = merging.seeds_of(["first", "second", "third"], 7, "cpu")


def factors(rows: int, columns: int, rank: int, dtype: torch.dtype, spread: int) -> LowRank:
    """Of updates between 2^-spread and 2^spread, which are zero in the first tiles of the first expert, and NaN in one
    value of the last."""
    generator = torch.Generator().manual_seed(rows + columns + rank)
    a, b = (torch.randn(shape, generator=generator) for shape in ((EXPERTS, rank, columns), (EXPERTS, rows, rank)))
    b *= torch.exp2(torch.randint(-spread, spread + 1, (EXPERTS, rows, 1), generator=generator).float())
    b[0, :128] = 0
    b[-1, -1, 0] = float("nan")
    a[-1, :, :-1] = 0  # NaN * 0 is NaN: so in a whole row of tiles
    return LowRank(a.to(dtype), b.to(dtype))


def on(device: str, low: LowRank) -> LowRank:
    return LowRank(*(factor.to(device) for factor in low))


def run_tiles(device: str, rows: int, columns: int, rank: int, dtype: torch.dtype) -> None:
    """All 256 data bytes under many scales; matrices are parts of taller ones."""
    generator = torch.Generator().manual_seed(rows + columns)
    data = torch.randint(0, 256, (EXPERTS, 2 * rows, columns), generator=generator, dtype=torch.uint8)
    data[data & 0x7F == 0x7F] &= 0xFE
    data[1, rows] = 0x7F
    scale = torch.randint(115, 135, (EXPERTS, 2 * rows // 128, columns // 128), generator=generator).byte()
    scale[0, -1, -1], scale[2, -1, 0] = 255, 0
    whole = MXTensor(data.view(torch.float8_e4m3fn), scale, 128, torch.bfloat16, tiled=True)
    there = MXTensor(data.to(device).view(torch.float8_e4m3fn), scale.to(device), 128, torch.bfloat16, tiled=True)
    low = factors(rows, columns, rank, dtype, 12)
    with poisoned():
        for part in (slice(0, rows), slice(rows, 2 * rows)):
            tiles = slice(part.start // 128, part.stop // 128)
            expected = merging.merge(whole.with_parts(whole.qdata[:, part], scale[:, tiles]), low, SEEDS)
            found = kernels.merge_tiles(MXParts(there.qdata[:, part], there.scale_bytes[:, tiles], 128, tiled=True),
                                        *on(device, low), SEEDS.to(device))
            same(found, expected)
    equal("bytes without an update", expected.qdata.view(torch.uint8)[0, :128], data[0, rows:rows + 128])


def run_held(device: str, rows: int, columns: int, rank: int, dtype: torch.dtype) -> None:
    """Frozen weights in both formats, small updates, and those that hide the weights."""
    weights = hard(EXPERTS, rows, columns)
    for spread in (0, 12):
        low = factors(rows, columns, rank, dtype, spread)
        low.b_ENR[-1, -1, 0] = 1 if spread else float("nan")
        with poisoned():
            tiles = mxfp4.unpack_tiles(weights)
            there = MXParts(tiles.qdata.to(device), tiles.scale_bytes.to(device), 128, tiled=True)
            same(kernels.merge_tiles(there, *on(device, low)), merging.merge_as_held(tiles, low))
            found = kernels.merge_mxfp4(*(part.to(device) for part in weights.buffers[:2]), *on(device, low))
            same(found, merging.merge_as_held(weights, low))


def run_plain(device: str, rows: int, columns: int, rank: int, dtype: torch.dtype) -> None:
    w_ENK = hard_values(EXPERTS * rows, columns, dtype).view(EXPERTS, rows, columns)
    low = factors(rows, columns, rank, dtype, 12)
    expected = merging.merge(w_ENK, low, SEEDS)
    with poisoned():
        same_values(kernels.merge_plain(w_ENK.to(device), *on(device, low), SEEDS.to(device)), expected)
