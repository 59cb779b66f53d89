# SPDX-License-Identifier: Apache-2.0
"""Experts' weights that are not trained, in one copy of 8 or of 4 bits a value."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from ..compute import casts
from ..compute.block_fp8 import Rounding
from ..compute.formula import LowRank
from ..compute.merging import merge_as_held
from ..compute.mx import TILE, MXTensor
from ..compute.mxfp4 import MXFP4Weights

ODD = -0x61C8864680B583EB  # an odd number without a pattern: 2^64 divided by the golden ratio, as int64

# Experts' weights [B, N, K] in a file's format: MXFP4, tiles of MXFP8, or rows in high precision, one part above the
# other.
Weights: TypeAlias = MXFP4Weights | MXTensor | Sequence[torch.Tensor]


class FrozenWeights(nn.Module):
    """The weights of a layer's experts on this rank, in MXFP8 with one power-of-two scale for each tile of 128x128.

    Forward reads them as they are. The input gradient reads an exact transpose, which ExpertMath makes for one GEMM at
    a time. Nothing else is held: no copy in high precision, and no other orientation.

    The bytes are uint8 buffers, which follow the module to another device, keep their values when the model's dtype
    changes, and are in no state dict:

        up_data    [E, G, H]    e4m3. With a gate, G is 2F: rows [0, F) are gate, rows [F, 2F) are up. Else G is F
        up_scale   [E, ceil(G / 128), ceil(H / 128)]    E8M0
        down_data  [E, H, F]
        down_scale [E, ceil(H / 128), ceil(F / 128)]

    Attributes:
        format: how people call the format.
        dtype: of the weights that these bytes stand for.
        sizes: E, H and F.
        rounding: what writing changed, of the first expert.
    """

    format = "MXFP8"

    def __init__(self, num_experts: int, hidden_size: int, ffn_size: int, dtype: torch.dtype,
                 device: torch.device | str, has_gate: bool = True):
        """Allocates the bytes, without values. Whoever makes this writes them: by `put` or `write`, or into the
        buffers."""
        super().__init__()
        self.dtype, self.sizes = dtype, (num_experts, hidden_size, ffn_size)
        self._shapes = {"up": (2 * ffn_size if has_gate else ffn_size, hidden_size), "down": (hidden_size, ffn_size)}
        for name, shape in self._shapes.items():
            for kind, size in self._buffer_shapes(*shape).items():
                buffer = torch.empty(num_experts, *size, dtype=torch.uint8, device=device)
                self.register_buffer(f"{name}_{kind}", buffer, persistent=False)
        self._operands: dict[str, MXTensor | MXFP4Weights] = {}
        self.rounding = Rounding()

    @torch.no_grad()
    def put(self, expert: int, gate_FH: torch.Tensor, down_HF: torch.Tensor, up_FH: torch.Tensor,
            scaling_mode: str) -> None:
        """Writes the weights of one expert in high precision, of which no copy stays.

        `expert`: counted from this rank's first. Without a gate, the halves of up come as `gate_FH` and `up_FH`.
        """
        for name, parts in (("up", (gate_FH, up_FH)), ("down", (down_HF, ))):
            rows = [part.detach().to(self.up_data.device, self.dtype).unsqueeze(0) for part in parts]
            self.write(name, slice(expert, expert + 1), rows, scaling_mode)

    @torch.no_grad()
    def write(self, name: str, experts: slice, weights: Weights, scaling_mode: str = "rceil") -> None:
        """Writes the weights of some experts in one GEMM, "up" [B, G, H] or "down" [B, H, F]."""
        for buffer, part in zip(self._buffers_of(name), self._encoded(weights, scaling_mode), strict=True):
            buffer[experts].copy_(part)
        if experts.start == 0:
            held = self._operand(*(buffer[:1] for buffer in self._buffers_of(name)))
            self.rounding.add(_values(_first(weights)), _values(held))

    def operands(self) -> dict[str, MXTensor | MXFP4Weights]:
        """The weights of each GEMM as ExpertMath takes them, by its name: "up", which includes the gate, and "down".
        """
        if not self._operands:
            self._operands = {name: self._operand(*self._buffers_of(name)) for name in self._shapes}
        return self._operands

    def tiles(self, name: str, experts: slice = slice(None),
              adapters: Mapping[str, LowRank] | None = None) -> MXTensor:
        """The weights of a GEMM as tiles of MXFP8, of some of this rank's experts.

        `adapters`: of this rank's experts, by GEMM, which are merged as "merge_aware" trains with them.
        """
        operand = self._operand(*(buffer[experts] for buffer in self._buffers_of(name)))
        if not adapters or name not in adapters:
            return self._tiles(operand)
        return merge_as_held(operand, LowRank(*(factor[experts] for factor in adapters[name])))

    def dequantized(self, adapters: Mapping[str, LowRank] | None = None) -> Iterator[torch.Tensor]:
        """The experts' gate [E, F, H], down [E, H, F] and up [E, F, H] in `dtype`, one after the other. Without a
        gate, the halves of up in the place of gate and up. `adapters`: as in `tiles`."""
        half = self._shapes["up"][0] // 2
        yield casts.dequantize(self.tiles("up", adapters=adapters), self.dtype)[:, :half].contiguous()
        yield casts.dequantize(self.tiles("down", adapters=adapters), self.dtype)
        yield casts.dequantize(self.tiles("up", adapters=adapters), self.dtype)[:, half:].contiguous()

    def checksums(self) -> list[int]:
        """For each expert a number that depends on all of its bytes and their places. The same on every device."""
        buffers = [buffer.flatten(1) for buffer in self.buffers()]
        places = torch.arange(1, max(buffer.shape[1] for buffer in buffers) + 1, device=self.up_data.device)
        factors = places * ODD  # modulo 2^64, as all sums here
        sums = torch.zeros(len(self.up_data), dtype=torch.int64, device=factors.device)
        for expert in range(len(sums)):
            for buffer in buffers:
                values = buffer[expert].to(torch.int64)
                sums[expert] = sums[expert] * ODD + (values * factors[:len(values)]).sum()
        return sums.tolist()

    def bytes_held(self) -> tuple[int, int]:
        """The bytes of these weights in `dtype`, and as they are held."""
        values = self.sizes[0] * sum(rows * columns for rows, columns in self._shapes.values())
        return values * self.dtype.itemsize, sum(buffer.numel() for buffer in self.buffers())

    @property
    def refusal(self) -> str:
        """Why the weights cannot be trained, after a name of them."""
        return (f"is frozen, and held in {self.format} alone, so it cannot be trained: freeze fewer experts before "
                'the engine is made, or write "frozen_experts": "keep" in the mxfp8_moe section, which keeps them in '
                "the model's dtype")

    def requires_grad_(self, requires_grad: bool = True) -> nn.Module:
        """Raises RuntimeError if asked to train the weights."""
        if requires_grad:
            raise RuntimeError(f"the weight of these experts {self.refusal}")
        return self

    def _apply(self, *args, **kwargs) -> nn.Module:
        """Moves the buffers. The operands would keep the old ones in memory."""
        self._operands = {}
        return super()._apply(*args, **kwargs)

    def _buffers_of(self, name: str) -> list[torch.Tensor]:
        return [buffer for key, buffer in self.named_buffers() if key.startswith(f"{name}_")]

    # ---- the format -------------------------------------------------------------------------------------------------

    @staticmethod
    def _buffer_shapes(rows: int, columns: int) -> dict[str, tuple[int, int]]:
        """Of one expert, by kind."""
        return {"data": (rows, columns), "scale": (-(-rows // TILE), -(-columns // TILE))}

    def _encoded(self, weights: Weights, scaling_mode: str) -> Sequence[torch.Tensor]:
        """What `write` puts into the buffers of a GEMM."""
        tiles: Any = weights
        if isinstance(weights, MXFP4Weights):
            tiles = casts.unpack_tiles(weights)
        elif not isinstance(weights, MXTensor):
            tiles = casts.quantize_weights(weights, TILE, scaling_mode)
        return tiles.qdata.view(torch.uint8), tiles.scale_bytes

    def _operand(self, data: torch.Tensor, scale: torch.Tensor) -> Any:
        return MXTensor(data.view(torch.float8_e4m3fn), scale, TILE, self.dtype, tiled=True)

    @staticmethod
    def _tiles(operand: Any) -> MXTensor:
        return operand


class FrozenMXFP4Weights(FrozenWeights):
    """The same in MXFP4: 4.25 bits a value. Each GEMM gets tiles of MXFP8, which are unpacked for it and then freed.

        up_data    [E, G, H / 2]    e2m1, two values in a byte
        up_scale   [E, G, H / 32]    E8M0
        up_tile    [E, ceil(G / 128), ceil(H / 128)]    E8M0, the scales of the tiles of MXFP8
        down_data, down_scale, down_tile: accordingly.
    """

    format = "MXFP4"

    @staticmethod
    def _buffer_shapes(rows: int, columns: int) -> dict[str, tuple[int, int]]:
        return {"data": (rows, columns // 2), "scale": (rows, columns // 32),
                "tile": (-(-rows // TILE), -(-columns // TILE))}

    def _encoded(self, weights: Weights, scaling_mode: str) -> Sequence[torch.Tensor]:
        if not isinstance(weights, MXFP4Weights):
            weights = casts.pack(_values(weights), self.dtype)
        return weights.buffers

    def _operand(self, data: torch.Tensor, scale: torch.Tensor, tile: torch.Tensor) -> MXFP4Weights:  # type: ignore[override]
        return MXFP4Weights(data, scale, tile, self.dtype)

    @staticmethod
    def _tiles(operand: Any) -> MXTensor:
        return casts.unpack_tiles(operand)


def _first(weights: Weights) -> Weights:
    """Those of the first expert, [1, N, K]."""
    if isinstance(weights, MXFP4Weights):
        return weights.part(slice(0, 1))
    return weights[:1] if isinstance(weights, MXTensor) else [part[:1] for part in weights]


def _values(weights: Weights) -> torch.Tensor:
    """[B, N, K], exactly: in float32, or in the dtype of the rows."""
    if isinstance(weights, MXTensor):
        return casts.dequantize(weights, torch.float32)
    return weights.values() if isinstance(weights, MXFP4Weights) else torch.cat([*weights], dim=1)


FORMATS = {"mxfp8": FrozenWeights, "mxfp4": FrozenMXFP4Weights}  # by the value of "frozen_experts"
