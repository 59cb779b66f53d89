# SPDX-License-Identifier: Apache-2.0
"""Merges LoRA adapters into weights, so that rounding loses nothing of the update in the mean.

An update is often much smaller than the distance between two numbers of the weight's format. Where the weight is such
a number itself, as in frozen MXFP8 experts, rounding to nearest gives the old number back, and the update vanishes. So
a merged weight is rounded stochastically: up with a probability equal to the distance from the number below, in units
of the distance between both. The mean over the weights is the exact sum.

The random bits are a hash of the weight's name, the training step and the place in the matrix. Every rank, device and
world size gets the same bytes. For the same reason, the product of the factors is summed in a fixed order, without
fused multiply-adds.

    MXFP8 tiles     rounded to e4m3. The scale of a tile that the update changes is the smallest without saturation
    bfloat16        rounded to bfloat16
    other dtypes    rounded to nearest: their numbers are close enough

Where the update of a value (in tiles: of the whole tile) is zero, its bytes stay. Kernels
(ops/triton_kernels/merge.py) return the same bits.

`merge_as_held` takes the random bits from the weights alone, so that they are the same in all steps. Training with
"merge_aware" computes with its result, and exports it.

E: experts, N and K: the axes of a weight, R: the rank of the adapter.
"""

import hashlib
from collections.abc import Sequence
from types import ModuleType

import torch

from ..ops.device import has_kernels, runs_triton
from . import casts, mxfp4
from .formula import LowRank
from .mx import NAN_DATA_BYTE, NAN_SCALE_BYTE, TILE, MXTensor, _pad_to, _power_of_two, _scale_bytes, dequantize
from .mxfp4 import MXFP4Weights

MOST_VALUES = 2**24  # that `merge_update` rounds at a time, in some 50 bytes each
LEAST_NORMAL = 2.0**-6  # of e4m3
E4M3_DROPPED, BF16_DROPPED = 0xFFFFF, 0xFFFF  # the mantissa bits that float32 has and the format lacks


class KeptShare:
    """The share of an update that a merge keeps, <after - before, update> / <update, update>, over all that was added.
    """

    def __init__(self):
        self._kept = self._update = 0.0

    def add(self, before: torch.Tensor, after: torch.Tensor, update: torch.Tensor) -> None:
        """Takes a weight without and with its update, in float32. Reads from the device."""
        update = update.double()
        self._kept += float(((after.double() - before.double()) * update).sum())
        self._update += float(update.square().sum())

    def __bool__(self) -> bool:
        """Whether there was an update."""
        return self._update > 0

    @property
    def percent(self) -> float:
        return 100 * self._kept / self._update


def seeds_of(names: Sequence[str], step: int, device: torch.device) -> torch.Tensor:
    """Two int32 for each name, [E, 2]: which random bits a weight gets."""
    digests = b"".join(hashlib.blake2b(f"{name} {step}".encode(), digest_size=8).digest() for name in names)
    return torch.frombuffer(bytearray(digests), dtype=torch.int32).view(-1, 2).to(device)


def product(low: LowRank) -> torch.Tensor:
    """The update of an adapter, [E, N, K] float32. The same bits on every device."""
    a_ERK, b_ENR = low.a_ERK.float(), low.b_ENR.float()
    # The sum begins with 0, so that none is -0, as in the kernels.
    update = torch.zeros(len(a_ERK), b_ENR.shape[1], a_ERK.shape[2], device=a_ERK.device)
    for r in range(a_ERK.shape[1]):
        update += b_ENR[:, :, r:r + 1] * a_ERK[:, r:r + 1]
    return update


def merge(w_ENK: torch.Tensor | MXTensor, low: LowRank, seeds_E2: torch.Tensor) -> torch.Tensor | MXTensor:
    """Weights with an adapter merged into them, in their own format.

    Args:
        w_ENK: plain, or in tiles of MXFP8.
        low: the adapter's factors.
        seeds_E2: of `seeds_of`.
    """
    if runs_triton(w_ENK):
        kernels = _kernels()
        if isinstance(w_ENK, MXTensor):
            return MXTensor.of(kernels.merge_tiles(w_ENK.parts, *low, seeds_E2), w_ENK.dtype)
        return kernels.merge_plain(w_ENK, *low, seeds_E2)
    merged = []
    for e in range(len(w_ENK)):  # an expert takes many times its size
        one = slice(e, e + 1)
        round_one = round_tiles if isinstance(w_ENK, MXTensor) else round_plain
        merged.append(round_one(w_ENK[one], product(LowRank(low.a_ERK[one], low.b_ENR[one])), seeds_E2[one]))
    return _joined(merged, w_ENK.dtype) if isinstance(w_ENK, MXTensor) else torch.cat(merged)


def merge_as_held(held_ENK: MXTensor | MXFP4Weights, low: LowRank) -> MXTensor:
    """Frozen weights with an adapter merged into them, rounded stochastically in the format in which they are held.

    An expert's first 8 bytes are its seeds: equal arguments give equal bytes, in every step and on every rank. A value
    without an update stays.

    Args:
        held_ENK: in tiles of MXFP8, or in MXFP4, of any size.
        low: the adapter's factors.

    Returns:
        Tiles of MXFP8. Sums in MXFP4 are rounded to MXFP4, with the scales of `mxfp4.quantize`, and then unpacked.
    """
    if isinstance(held_ENK, MXFP4Weights):
        data = held_ENK.codes
        if has_kernels(data.device):
            return MXTensor.of(_kernels().merge_mxfp4(data, held_ENK.scale_bytes, *low), held_ENK.dtype)
    else:
        data = held_ENK.qdata.view(torch.uint8)
        if has_kernels(data.device):
            return MXTensor.of(_kernels().merge_tiles(held_ENK.parts, *low), held_ENK.dtype)
    found = []
    for one in (slice(e, e + 1) for e in range(len(data))):
        update_1NK = product(LowRank(low.a_ERK[one], low.b_ENR[one]))
        seeds_12 = data[one].flatten(1)[:, :8].contiguous().view(torch.int32)
        if isinstance(held_ENK, MXFP4Weights):
            codes, scales, tiles, dtype = held_ENK
            values_1NK = MXFP4Weights(codes[one], scales[one], tiles[one], dtype).values()
            random_1NK = (random_bits(seeds_12, *values_1NK.shape[1:]) & 0xFFFF).float() / 2**16
            found.append(mxfp4.unpack_tiles(mxfp4.quantize(values_1NK + update_1NK, random_NK=random_1NK)))
        else:
            found.append(round_tiles(held_ENK[one], update_1NK, seeds_12))
    return _joined(found, held_ENK.dtype)


def merge_as_tiles(w_ENK: torch.Tensor | MXTensor, low: LowRank, seeds_E2: torch.Tensor,
                   scaling_mode: str) -> MXTensor:
    """Weights with an adapter merged into them, in tiles of MXFP8. For the arguments, see `merge`.

    Plain weights are merged in their own format, and cast to the nearest tiles: between two numbers of e4m3, they
    lie anywhere, so that a cast of many keeps the update in the mean. An expert all of whose weights are e4m3 numbers
    already, such as one from FP8 files, is merged in tiles.
    """
    if isinstance(w_ENK, MXTensor):
        return merge(w_ENK, low, seeds_E2)
    tiles, merged = (casts.quantize_weights([w], TILE, scaling_mode) for w in (w_ENK, merge(w_ENK, low, seeds_E2)))
    in_tiles_E = (casts.dequantize(tiles, w_ENK.dtype) == w_ENK).flatten(1).all(1)
    if not in_tiles_E.any():  # reads from the device
        return merged
    other, in_tiles_E11 = merge(tiles, low, seeds_E2), in_tiles_E.view(-1, 1, 1)
    data = torch.where(in_tiles_E11, *(one.qdata.view(torch.uint8) for one in (other, merged)))
    return merged.with_parts(data.view(torch.float8_e4m3fn),
                             torch.where(in_tiles_E11, other.scale_bytes, merged.scale_bytes))


def merge_update(weight: torch.Tensor, update: torch.Tensor, name: str, step: int) -> torch.Tensor:
    """A weight of any shape with an update of the same shape, in the weight's dtype.

    `name`, `step`: as for `seeds_of`.
    """
    rows, updates = (x.reshape(-1, x.shape[-1]) for x in (weight, update.float()))
    parts = []
    for i, part in enumerate(zip(*(x.split(max(MOST_VALUES // x.shape[1], 1)) for x in (rows, updates)), strict=True)):
        rows_1NK, update_1NK = (x.unsqueeze(0) for x in part)
        parts.append(round_plain(rows_1NK, update_1NK, seeds_of([f"{name} {i}"], step, weight.device))[0])
    return torch.cat(parts).view(weight.shape)


def round_plain(w_ENK: torch.Tensor, update_ENK: torch.Tensor, seeds_E2: torch.Tensor) -> torch.Tensor:
    """w + update in the dtype of w. `update_ENK`: float32."""
    merged = w_ENK.float() + update_ENK
    if w_ENK.dtype == torch.bfloat16:
        bits = random_bits(seeds_E2, *w_ENK.shape[1:])
        rounded = merged.view(torch.int32).add(bits & BF16_DROPPED).bitwise_and_(~BF16_DROPPED).view(torch.float32)
        merged = torch.where(merged.isnan(), merged, rounded)
    return torch.where(update_ENK == 0, w_ENK, merged.to(w_ENK.dtype))


def round_tiles(w_ENK: MXTensor, update_ENK: torch.Tensor, seeds_E2: torch.Tensor) -> MXTensor:
    """w + update in tiles. `update_ENK`: float32."""
    merged = dequantize(w_ENK, torch.float32) + update_ENK
    changed = _tiles(update_ENK != 0).any(-1, keepdim=True).any(-3, keepdim=True)
    scale = _scale_bytes(_tiles(merged.abs()).amax((-3, -1), keepdim=True), "rceil")
    finite = scale != NAN_SCALE_BYTE
    x = _tiles(merged) * _power_of_two(torch.where(finite, 254 - scale, 127))
    # Subnormals of e4m3 have the distances of the smallest normal numbers, to which this lifts them.
    lift = torch.where(x.abs() < LEAST_NORMAL, LEAST_NORMAL, 0.0)
    bits = _tiles(random_bits(seeds_E2, *w_ENK.shape[1:]) & E4M3_DROPPED)
    rounded = (x.abs() + lift).view(torch.int32).add(bits).bitwise_and_(~E4M3_DROPPED).view(torch.float32) - lift
    data = torch.copysign(rounded, x).to(torch.float8_e4m3fn).view(torch.uint8)
    data = torch.where(finite, data, NAN_DATA_BYTE)
    data = torch.where(changed, data, _tiles(w_ENK.qdata.view(torch.uint8))).flatten(3).flatten(1, 2)
    data = data[:, :w_ENK.shape[1], :w_ENK.shape[2]].contiguous()
    scale = torch.where(changed.view(w_ENK.scale_bytes.shape), scale.view(w_ENK.scale_bytes.shape),
                        w_ENK.scale_bytes.int())
    return w_ENK.with_parts(data.view(torch.float8_e4m3fn), scale.to(torch.uint8))


def random_bits(seeds_E2: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """int32 [E, rows, columns], 32 random bits each. Products and sums wrap around."""
    low, high = seeds_E2[:, 0].view(-1, 1, 1), seeds_E2[:, 1].view(-1, 1, 1)
    row, column = (torch.arange(size, dtype=torch.int32, device=seeds_E2.device) for size in (rows, columns))
    x = (row * columns).view(-1, 1) + column ^ low
    x ^= x >> 16 & 0xFFFF  # int32 is shifted with its sign
    x = x.mul_(0x7FEB352D).add_(high)
    x ^= x >> 15 & 0x1FFFF
    x *= 0x846CA68B - 2**32
    return x.bitwise_xor_(x >> 16 & 0xFFFF)


def _joined(experts: Sequence[MXTensor], dtype: torch.dtype) -> MXTensor:
    data = torch.cat([one.qdata.view(torch.uint8) for one in experts]).view(torch.float8_e4m3fn)
    return MXTensor(data, torch.cat([one.scale_bytes for one in experts]), TILE, dtype, tiled=True)


def _tiles(x_ENK: torch.Tensor) -> torch.Tensor:
    """[E, ceil(N / 128), 128, ceil(K / 128), 128], padded with zeros."""
    return _pad_to(x_ENK, (TILE, TILE)).unflatten(2, (-1, TILE)).unflatten(1, (-1, TILE))


def _kernels() -> ModuleType:
    from ..ops.triton_kernels import merge as kernels  # Triton is there on Linux alone
    return kernels
