# SPDX-License-Identifier: Apache-2.0
"""Experts' weights that are not trained, in one copy of one byte a value."""

from collections.abc import Iterator

import torch
from torch import nn

from ..compute import casts
from ..compute.mx import MXTensor
from ..ops.mx_format import TILE

ODD = -0x61C8864680B583EB  # an odd number without a pattern: 2^64 divided by the golden ratio, as int64
REFUSED = ("is frozen, and held in MXFP8 alone, so it cannot be trained: freeze fewer experts before the engine is "
           'made, or write "frozen_experts": "keep" in the mxfp8_moe section, which keeps them in the model\'s dtype')


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
        dtype: of the weights that these bytes stand for.
    """

    def __init__(self, num_experts: int, hidden_size: int, ffn_size: int, dtype: torch.dtype,
                 device: torch.device | str, has_gate: bool = True):
        """Allocates the bytes, without values. Whoever makes this writes them: by `put`, or into the buffers."""
        super().__init__()
        self.dtype = dtype
        up_rows = 2 * ffn_size if has_gate else ffn_size
        for name, rows, columns in (("up", up_rows, hidden_size), ("down", hidden_size, ffn_size)):
            tiles = -(-rows // TILE), -(-columns // TILE)
            for kind, shape in (("data", (rows, columns)), ("scale", tiles)):
                buffer = torch.empty(num_experts, *shape, dtype=torch.uint8, device=device)
                self.register_buffer(f"{name}_{kind}", buffer, persistent=False)
        self._operands: dict[str, MXTensor] = {}

    @torch.no_grad()
    def put(self, expert: int, gate_FH: torch.Tensor, down_HF: torch.Tensor, up_FH: torch.Tensor,
            scaling_mode: str) -> None:
        """Quantizes the weights of one expert, as `casts.quantize_weights` does with blocks of 128.

        `expert`: counted from this rank's first. Of the weights, no copy stays. Without a gate, the halves of up come
        as `gate_FH` and `up_FH`.
        """
        device = self.up_data.device
        for name, parts in (("up", (gate_FH, up_FH)), ("down", (down_HF, ))):
            stacks = [part.detach().to(device, self.dtype).unsqueeze(0) for part in parts]
            quantized = casts.quantize_weights(stacks, TILE, scaling_mode)
            self.put_tiles(name, expert, quantized[0])

    @torch.no_grad()
    def put_tiles(self, name: str, expert: int, tiles: MXTensor) -> None:
        """Writes the weight of one expert in one GEMM, "up" [2F, H] or "down" [H, F], which is quantized already."""
        self.get_buffer(f"{name}_data")[expert].copy_(tiles.qdata.view(torch.uint8))
        self.get_buffer(f"{name}_scale")[expert].copy_(tiles.scale_bytes)

    def operands(self) -> dict[str, MXTensor]:
        """The weights of each GEMM as it reads them, by its name: "up", which includes the gate, and "down"."""
        if not self._operands:
            self._operands = {name: MXTensor(data.view(torch.float8_e4m3fn), scale, TILE, self.dtype, tiled=True)
                              for name, data, scale in (("up", self.up_data, self.up_scale),
                                                        ("down", self.down_data, self.down_scale))}
        return self._operands

    def _apply(self, *args, **kwargs) -> nn.Module:
        """Moves the buffers. The operands would keep the old ones in memory."""
        self._operands = {}
        return super()._apply(*args, **kwargs)

    def dequantized(self) -> Iterator[torch.Tensor]:
        """The experts' gate [E, F, H], down [E, H, F] and up [E, F, H] in `dtype`, one after the other. Without a
        gate, the halves of up in the place of gate and up."""
        half, up, down = self.up_data.shape[1] // 2, *self.operands().values()
        yield casts.dequantize(up, self.dtype)[:, :half].contiguous()
        yield casts.dequantize(down, self.dtype)
        yield casts.dequantize(up, self.dtype)[:, half:].contiguous()

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
        values = self.up_data.numel() + self.down_data.numel()
        return values * self.dtype.itemsize, sum(buffer.numel() for buffer in self.buffers())

    def requires_grad_(self, requires_grad: bool = True) -> nn.Module:
        """Raises RuntimeError if asked to train the weights."""
        if requires_grad:
            raise RuntimeError(f"the weight of these experts {REFUSED}")
        return self
