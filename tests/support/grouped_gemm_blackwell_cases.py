# SPDX-License-Identifier: Apache-2.0
"""Blackwell's grouped GEMMs, compared with a loop of dequantized products."""

import torch

from ds_mxfp8_moe.compute.mx import MXTensor, quantize, quantize_tiles

# Of every group; then rows that belong to none. Empty groups, all rows in one, no rows at all.
SIZES = [((128, 0, 256), 128), ((0, 0, 384), 0), ((384, 0, 0), 256), ((0, 0, 0), 128), ((0, 0, 0), 0)]
# N, K, block of a, block of b or "tiles": whole tiles, parts of tiles, blocks that differ.
FORMATS = [(256, 256, 32, 32), (160, 96, 32, 32), (160, 288, 128, "tiles"), (416, 160, 32, "tiles"),
           (1056, 64, 128, 128)]


def _spread(*shape):
    """Values whose blocks of 32, in either direction, differ in magnitude."""
    x = torch.randn(*shape)
    for axis in (-2, -1):
        magnitude = torch.exp2(torch.randint(-2, 3, (-(-shape[axis] // 32), )).float()).repeat_interleave(32)
        magnitude = magnitude[:shape[axis]]
        x = x * (magnitude if axis == -1 else magnitude.unsqueeze(-1))
    return x


def _block_major(mx: MXTensor) -> MXTensor:
    return mx.with_parts(mx.qdata, mx.scale_bytes.t().contiguous().t())


def _weights(w, block):
    if block == "tiles":
        # As the input gradient sees them: bytes transposed, scales the transposed view of the forward's.
        mx = quantize_tiles(w.transpose(1, 2))
        return MXTensor(mx.qdata.transpose(1, 2).contiguous(), mx.scale_bytes.transpose(1, 2), 128, tiled=True)
    return quantize(w, block)


def _to(mx: MXTensor, device) -> MXTensor:
    scale = mx.scale_bytes.to(device)
    assert scale.stride() == mx.scale_bytes.stride()
    return mx.with_parts(mx.qdata.to(device), scale)


def _bounds(ends) -> list:
    return list(zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True))


def _grouped(a, b, ends):
    out = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float64)
    for e, (start, end) in enumerate(_bounds(ends)):
        out[start:end] = a[start:end] @ b[e].t()
    return out


def _contracted(g, a, ends):
    return torch.stack([g[:, start:end] @ a[:, start:end].t() for start, end in _bounds(ends)])


def _prepare(device):
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch.empty holds NaN
    if device == "cpu":
        _complete_interpreter()


def _complete_interpreter():
    """Adds dot_scaled."""
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    def values(x, scale):
        x = torch.from_numpy(x.copy()).view(torch.float8_e4m3fn).float()
        scale = torch.from_numpy(scale.handle.data.copy()).view(torch.float8_e8m0fnu).float()
        return x * scale.repeat_interleave(32, 1)

    def dot_scaled(self, a, a_scale, a_format, b, b_scale, b_format, acc, *options):
        product = values(a.handle.data, a_scale) @ values(b.handle.data.T, b_scale).t()
        return self.tensor(interpreter.TensorHandle(acc.handle.data + product.numpy(), acc.dtype), acc.type)

    TritonSemantic.dot_scaled = dot_scaled


def check_grouped_mm(device, sizes, past, N, K, a_block, b_block, dtype=torch.float32, nans=False):
    from ds_mxfp8_moe.ops.triton_kernels.grouped_gemm_blackwell import grouped_mm_mxfp8
    _prepare(device)
    ends, P = torch.tensor(sizes).cumsum(0).int(), sum(sizes) + past
    a, b = quantize(_spread(P, K), a_block), _weights(_spread(len(sizes), N, K), b_block)
    if a_block == 128:
        a = _block_major(a)
    nan_rows, nan_columns = torch.zeros(P, dtype=torch.bool), torch.zeros(len(sizes), N, dtype=torch.bool)
    if nans:
        a.scale_bytes[5, -1] = 255
        nan_rows[5] = True
        b.scale_bytes[-1, -1, 0] = 255
        nan_columns[-1, (N - 1) // 128 * 128 if b.tiled else N - 1:] = True
    out = grouped_mm_mxfp8(_to(a, device), _to(b, device), ends.to(device), dtype).cpu()
    assert out.shape == (P, N) and out.dtype == dtype
    nan = nan_rows.unsqueeze(1) | (_grouped(torch.ones(P, 1).double(), nan_columns.unsqueeze(2).double(), ends) > 0)
    nan[ends[-1]:] = False
    assert torch.equal(out.isnan(), nan)
    assert not out[ends[-1]:].any()
    plain_a, plain_b = (x.dequantize(torch.float32).nan_to_num(0).double() for x in (a, b))
    compare(out, _grouped(plain_a, plain_b, ends), _grouped(plain_a.abs(), plain_b.abs(), ends), nan)


def check_wgrad(device, sizes, past, N, K, g_block, a_block, dtype=torch.float32):
    from ds_mxfp8_moe.ops.triton_kernels.grouped_gemm_blackwell import grouped_mm_wgrad_mxfp8
    _prepare(device)
    ends, P = torch.tensor(sizes).cumsum(0).int(), sum(sizes) + past
    g, a = _block_major(quantize(_spread(N, P), g_block)), quantize(_spread(K, P), a_block)
    out = grouped_mm_wgrad_mxfp8(_to(g, device), _to(a, device), ends.to(device), dtype)
    assert out.shape == (len(sizes), N, K) and out.dtype == dtype
    for e, size in enumerate(sizes):
        assert size > 0 or not out[e].any()
    plain_g, plain_a = (x.dequantize(torch.float32).double() for x in (g, a))
    compare(out.cpu(), _contracted(plain_g, plain_a, ends), _contracted(plain_g.abs(), plain_a.abs(), ends),
            torch.zeros(out.shape, dtype=torch.bool))


def compare(out, exact, magnitude, skip):
    """Errors relative to the sum of the products' magnitudes: float32 accumulation, and the rounding to `out`."""
    limit = 1e-5 if out.dtype == torch.float32 else 2**-8
    assert not ((out.double() - exact).abs() > limit * magnitude)[~skip].any()
