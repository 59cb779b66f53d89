# SPDX-License-Identifier: Apache-2.0
"""The MXFP8 format byte by byte, and how MXTensor behaves as a tensor.

How the bytes below come about. e4m3: sign, 4 exponent bits with bias 7, 3 mantissa bits; so 0x38 = 0 0111 000 is 1.0,
0x40 is 2, 0x78 = 0 1111 000 is 2^8 = 256, 0x7E = 0 1111 110 is 1.75 * 256 = 448, the largest; 0x08 is 2^-6, the
smallest normal, 0x01 is 2^-9, the smallest subnormal; 0x7F is NaN; 0x80 added is minus. E8M0: byte b is 2^(b - 127).

For the largest magnitude m * 2^k of a block (1 <= m < 2), floor takes the scale 2^(k - 8), byte 127 + k - 8. rceil
takes the same when m <= 1.75, because then amax / scale = m * 256 <= 448, and twice as much when m > 1.75.
"""

import copy
import io
import pickle
import re

import pytest
import torch

from ds_mxfp8_moe.compute.mx import (
    MXTensor,
    ScaleCalculationMode,
    quantize,
    quantize_tiles,
    sqnr_db,
    transpose_rescale,
)
from tests.support import float64_oracle as oracle

INF, NAN = float("inf"), float("nan")
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
ALL = (F32, BF16, F16)


def data_bytes(mx):
    return mx.qdata.view(torch.uint8)


def scale_bytes(mx):
    return mx.scale.view(torch.uint8)


def same_bytes(a, b):
    return torch.equal(data_bytes(a), data_bytes(b)) and torch.equal(scale_bytes(a), scale_bytes(b))


# name, dtypes that hold the values, values (the rest of the block is +0), then for rceil and floor: scale byte and
# the values' data bytes.
TABLE = [
    # A zero block: scale byte 0, data 0, signs kept.
    ("zeros", ALL, [0.0, -0.0], (0, [0x00, 0x80]), (0, [0x00, 0x80])),
    # 448 = 1.75 * 2^8: both take 2^0.
    ("448", ALL, [448.0, -448.0, 1.0], (127, [0x7E, 0xFE, 0x38]), (127, [0x7E, 0xFE, 0x38])),
    # 449 needs m = 1.7539 > 1.75: rceil doubles, 224.5 rounds to 224 = 1.75 * 2^7 = 0x76; floor saturates at 448.
    ("449", (F32, ), [449.0, 1.0], (128, [0x76, 0x30]), (127, [0x7E, 0x38])),
    # 480 = 1.875 * 2^8, which e4m3 would hold but for NaN: rceil doubles, 240 = 1.875 * 2^7 = 0x77; floor saturates.
    ("480", ALL, [480.0, -3.0], (128, [0x77, 0xBC]), (127, [0x7E, 0xC4])),
    # A power of two is always 256 times its scale: 2^0 has byte 127 - 8 = 119.
    ("1", ALL, [1.0, -1.0], (119, [0x78, 0xF8]), (119, [0x78, 0xF8])),
    ("2^127", (F32, BF16), [2.0**127], (246, [0x78]), (246, [0x78])),
    # 1.875 * 2^-120 = 240 * 2^-127 fits byte 0: rceil's doubling of 2^-128.
    ("1.875 * 2^-120", (F32, BF16), [1.875 * 2.0**-120], (0, [0x77]), (0, [0x77])),
    # Subnormals of float32.
    ("2^-127", (F32, BF16), [2.0**-127, -2.0**-127], (0, [0x38, 0xB8]), (0, [0x38, 0xB8])),
    # 2^-136 is e4m3's smallest subnormal, 2^-137 half of it: a tie with 0, which is even. 1.5 * 2^-137 rounds up.
    ("tiny", (F32, ), [2.0**-136, 2.0**-137, 1.5 * 2.0**-137, -2.0**-137, 2.0**-149],
     (0, [0x01, 0x00, 0x01, 0x80, 0x00]), (0, [0x01, 0x00, 0x01, 0x80, 0x00])),
    # The largest is just below 2^128: rceil rounds it up to 256 scales, floor saturates.
    ("max float32", (F32, ), [torch.finfo(F32).max], (247, [0x78]), (246, [0x7E])),
    # Ties, with 448 to hold the scale at 2^0. Steps are 2 in 16..32: 17 lies between 16 (mantissa 0, even) and 18,
    # 19 between 18 (1) and 20 (2, even). 15.5 between 15 (7) and 16 (0 of the next exponent, even). 432 between 416
    # (5) and 448 (6, even).
    ("ties", ALL, [448.0, 17.0, 19.0, -17.0, -19.0, 15.5, 1.0625, 1.1875, 432.0],
     (127, [0x7E, 0x58, 0x5A, 0xD8, 0xDA, 0x58, 0x38, 0x3A, 0x7E]),
     (127, [0x7E, 0x58, 0x5A, 0xD8, 0xDA, 0x58, 0x38, 0x3A, 0x7E])),
    # The same among e4m3's subnormals, steps of 2^-9: 2^-10 to 0, 3 * 2^-10 to 2 * 2^-9, 5 * 2^-10 to 2 * 2^-9,
    # 7.5 * 2^-9 to 8 * 2^-9 = 2^-6, the smallest normal.
    ("subnormal ties", ALL, [448.0, 2.0**-10, 3 * 2.0**-10, 5 * 2.0**-10, 7.5 * 2.0**-9, -2.0**-10],
     (127, [0x7E, 0x00, 0x02, 0x02, 0x08, 0x80]), (127, [0x7E, 0x00, 0x02, 0x02, 0x08, 0x80])),
    # Beyond 448 under floor everything saturates, whichever sign.
    ("saturation", ALL, [496.0, -496.0, 464.0, -464.0, 440.0],
     (128, [0x78, 0xF8, 0x76, 0xF6, 0x76]), (127, [0x7E, 0xFE, 0x7E, 0xFE, 0x7E])),
]
SPECIAL = {"NaN": [1.0, NAN], "Inf": [INF, 2.0], "-Inf": [0.0, -INF], "all": [NAN, INF, -INF, 448.0]}
CASES = [pytest.param(d, v, r, f, id=f"{n}-{str(d)[6:]}") for n, ds, v, r, f in TABLE for d in ds]


@pytest.mark.parametrize("dtype, values, rceil, floor", CASES)
def test_bytes(dtype, values, rceil, floor):
    x = torch.zeros(2, 64, dtype=dtype)
    x[1, 32:32 + len(values)] = torch.tensor(values, dtype=torch.float64).to(dtype)
    assert x[1, 32:32 + len(values)].double().tolist() == values  # the dtype holds them
    for mode, (scale, data) in (("rceil", rceil), ("floor", floor)):
        mx = quantize(x, 32, mode)
        assert scale_bytes(mx).tolist() == [[0, 0], [0, scale]]
        expected = torch.zeros(2, 64, dtype=torch.uint8)
        expected[1, 32:32 + len(data)] = torch.tensor(data, dtype=torch.uint8)
        assert data_bytes(mx).tolist() == expected.tolist(), mode


@pytest.mark.parametrize("dtype", ALL, ids=str)
@pytest.mark.parametrize("name", SPECIAL)
@pytest.mark.parametrize("mode", ("rceil", "floor"))
def test_nan_and_inf_fill_their_block_alone(mode, name, dtype):
    x = torch.ones(2, 64, dtype=dtype)
    x[0, 32:32 + len(SPECIAL[name])] = torch.tensor(SPECIAL[name], dtype=dtype)
    mx = quantize(x, 32, mode)
    assert scale_bytes(mx).tolist() == [[119, 255], [119, 119]]
    assert (data_bytes(mx)[0, 32:] == 0x7F).all() and (data_bytes(mx)[0, :32] == 0x78).all()
    assert mx.qdata[0, 32:].float().isnan().all()  # either half alone reads as NaN
    for out_dtype in ALL:
        values = mx.dequantize(out_dtype)
        assert values[0, 32:].isnan().all() and torch.equal(values[0, :32], torch.ones(32, dtype=out_dtype))


def test_nan_with_a_sign_and_a_payload():
    bits = torch.tensor([0xFFC00001 - 2**32, 0x7F800001, 0x7FFFFFFF], dtype=torch.int32)
    for nan in bits.view(F32):
        x = torch.zeros(1, 32)
        x[0, 5] = nan
        assert scale_bytes(quantize(x)).item() == 255


@pytest.mark.parametrize("mode", ("rceil", "floor"))
@pytest.mark.parametrize("dtype", ALL, ids=str)
@pytest.mark.parametrize("block", ((1, 32), (1, 128), (128, 128)), ids=str)
def test_random_bits_against_the_oracle(block, dtype, mode):
    """Any bit pattern: a few exponents per block, so that scales, ties and subnormals all occur. The last blocks and
    tiles are short: 160 x 288 has tiles of 128 and 32 rows by 128, 128 and 32 columns."""
    g = torch.Generator().manual_seed(11)
    width, mantissa = {F32: (8, 23), BF16: (8, 7), F16: (5, 10)}[dtype]
    base = torch.randint(0, 2**width - 1, (160, 9), generator=g).repeat_interleave(32, 1)
    exponent = (base - torch.randint(0, 14, (160, 288), generator=g)).clamp(0, 2**width - 2)
    fraction = torch.randint(0, 2**mantissa, (160, 288), generator=g)
    fraction = torch.where(torch.rand(160, 288, generator=g) < 0.5, fraction >> (mantissa - 4) << (mantissa - 4),
                           fraction)  # half of them short, where ties are
    bits = (exponent << mantissa) | fraction | torch.randint(0, 2, (160, 288), generator=g) << (width + mantissa)
    x = bits.to(torch.int32).view(F32) if dtype == F32 else bits.to(torch.int32).to(torch.int16).view(dtype)
    assert x.isfinite().all()
    mx = quantize(x, block[1], mode) if block[0] == 1 else quantize_tiles(x, mode)
    expected = oracle.cast(x, block, mode)
    assert torch.equal(scale_bytes(mx), expected.scale) and torch.equal(data_bytes(mx), expected.data)
    assert mx.dtype == dtype and torch.equal(mx.dequantize(F32).double(), oracle.values(expected, block))


def test_dequantized_values_are_exact_in_bfloat16():
    x = torch.randn(64, 256) * torch.logspace(-100, 100, 64, base=2).unsqueeze(1)
    for block in (32, 128):
        mx = quantize(x, block)
        assert torch.equal(mx.dequantize(BF16).float(), mx.dequantize(F32))


def test_any_strides():
    x = torch.randn(64, 96)
    expected = quantize(x)
    wide = torch.zeros(64, 192)
    wide[:, ::2] = x
    for view in (x.t().contiguous().t(), wide[:, ::2], torch.stack([x, x], 2)[..., 1]):
        assert not view.is_contiguous() and same_bytes(expected, quantize(view))
        assert quantize(view).qdata.is_contiguous() and quantize(view).scale.is_contiguous()
    row = x[:1].expand(64, 96)
    assert same_bytes(quantize(row), quantize(row.contiguous()))
    assert torch.equal(data_bytes(quantize_tiles(wide[:, ::2])), data_bytes(quantize_tiles(x)))


@pytest.mark.parametrize("shape", ((0, 64), (3, 0), (2, 0, 32), (0, )))
def test_empty_tensors(shape):
    for mx in (quantize(torch.zeros(shape)), quantize(torch.zeros(shape), 128)):
        assert mx.shape == shape and mx.dequantize().shape == shape
        assert mx.scale.shape == (*shape[:-1], -(-shape[-1] // mx.block_size))


@pytest.mark.parametrize("error, match, call", [
    (TypeError, "float64", lambda: quantize(torch.zeros(2, 32, dtype=torch.float64))),
    (TypeError, "int64", lambda: quantize(torch.zeros(2, 32, dtype=torch.int64))),
    (ValueError, "multiple of 32", lambda: quantize(torch.zeros(2, 48))),
    (ValueError, "multiple of 32", lambda: quantize(torch.tensor(1.0))),
    (TypeError, r"x is \[1.0\], of type list", lambda: quantize([1.0])),
    (TypeError, "in torch.sparse_coo", lambda: quantize(torch.zeros(2, 64).to_sparse())),
    (ValueError, "block_size is 64; expected one of 32, 128", lambda: quantize(torch.zeros(2, 64), 64)),
    (ValueError, "block_size is 32.0", lambda: quantize(torch.zeros(2, 64), 32.0)),
    (ValueError, "scaling_mode is 'ceil'", lambda: quantize(torch.zeros(2, 64), 32, "ceil")),
    (ValueError, "multiple of 32", lambda: quantize_tiles(torch.zeros(64, 48))),
    (ValueError, "two axes", lambda: quantize_tiles(torch.zeros(64))),
    (ValueError, "multiple of 32", lambda: transpose_rescale(quantize(torch.zeros(48, 64)))),
])
def test_bad_input(error, match, call):
    with pytest.raises(error, match=match):
        call()


@pytest.mark.parametrize("mode", tuple(ScaleCalculationMode))
@pytest.mark.parametrize("block", (32, 128))
@pytest.mark.parametrize("shape", ((64, 96), (2, 160, 64)))
def test_transpose_rescale(shape, block, mode):
    x = torch.randn(shape).bfloat16()
    mx = quantize(x, block, mode)
    turned = transpose_rescale(mx, scaling_mode=mode)
    assert same_bytes(turned, quantize(mx.dequantize(F32).transpose(-1, -2), block, mode))
    assert turned.shape == (*shape[:-2], shape[-1], shape[-2]) and turned.dtype == BF16
    values = mx.dequantize(F32).transpose(-1, -2)
    if mode == "rceil":  # powers of two move the exponent; floor may saturate a second time
        assert sqnr_db(values, turned.dequantize(F32)) > 60
    tiles = quantize_tiles(x, mode)
    assert same_bytes(transpose_rescale(tiles, 32, mode), quantize(tiles.dequantize(F32).transpose(-1, -2), 32, mode))


# --- MXTensor as a tensor -------------------------------------------------------------------------------------------


@pytest.fixture
def mx():
    return quantize(torch.randn(6, 128, generator=torch.Generator().manual_seed(1)).bfloat16())


def test_looks_like_the_tensor_it_was(mx):
    assert isinstance(mx, torch.Tensor) and type(mx) is MXTensor
    assert mx.shape == (6, 128) and mx.dtype == BF16 and mx.device.type == "cpu" and mx.numel() == 768
    assert mx.qdata.dtype == torch.float8_e4m3fn and mx.scale.dtype == torch.float8_e8m0fnu
    assert mx.scale.shape == (6, 4) and not mx.requires_grad
    assert repr(mx) == str(mx) == ("MXTensor(shape=(6, 128), dtype=torch.bfloat16, block_size=32, tiled=False, "
                                   "device=cpu)")


def test_type_as_and_arithmetic(mx):
    plain = torch.randn(6, 128)
    assert plain.type_as(mx).dtype == BF16 and type(plain.type_as(mx)) is torch.Tensor
    values = mx.dequantize()
    for actual, expected in ((mx + 1, values + 1), (2 * mx, 2 * values), (mx * mx, values * values),
                             (mx @ plain.t().bfloat16(), values @ plain.t().bfloat16()), (mx.sum(0), values.sum(0)),
                             (mx.t(), values.t()), (mx.relu(), values.relu()), (mx[:, 5], values[:, 5]),
                             (mx[:, 32:64], values[:, 32:64]), (torch.cat([mx, values]), torch.cat([values, values]))):
        assert type(actual) is torch.Tensor and torch.equal(actual, expected)
    assert torch.equal(torch.zeros(6, 128).bfloat16().copy_(mx), values)


def test_moves_of_whole_rows_stay_quantized(mx):
    index, mask = torch.tensor([5, 0, 0]), torch.tensor([True, False] * 3)
    cube = quantize(torch.randn(2, 3, 64))
    moves = {"slice": lambda t: t[2:5], "step": lambda t: t[::2], "row": lambda t: t[3], "index": lambda t: t[index],
             "mask": lambda t: t[mask], "index_select": lambda t: t.index_select(0, index),
             "view": lambda t: t.view(2, 3, 128), "reshape": lambda t: t.reshape(-1, 128),
             "flatten": lambda t: t.view(2, 3, 128).flatten(0, 1), "clone": lambda t: t.clone(),
             "detach": lambda t: t.detach(), "contiguous": lambda t: t.contiguous(),
             "cat": lambda t: torch.cat([t, t[1:2]])}
    for name, move in moves.items():
        moved = move(mx)
        assert type(moved) is MXTensor, name
        assert torch.equal(moved.dequantize(), move(mx.dequantize())), name
        assert moved.scale.shape == (*moved.shape[:-1], 4), name
    for move in (lambda t: t[1], lambda t: t[:, 1:], lambda t: t[index[1:], mask[:2].long()]):
        assert type(move(cube)) is MXTensor and torch.equal(move(cube).dequantize(), move(cube.dequantize()))


def test_tiles_are_cut_between_matrices_only():
    w = quantize_tiles(torch.randn(3, 128, 160))
    assert type(w[1]) is type(w[1:]) is type(w[torch.tensor([2, 0])]) is MXTensor
    assert torch.equal(w[1].dequantize(), w.dequantize()[1])
    for cut in (lambda t: t[:, :64], lambda t: t[0, 5], lambda t: t[torch.tensor([0]), torch.tensor([1])]):
        assert type(cut(w)) is torch.Tensor and torch.equal(cut(w), cut(w.dequantize()))


def test_to(mx):
    single = mx.to(F32)
    assert type(single) is MXTensor and single.dtype == F32 and same_bytes(single, mx)
    assert single.dequantize().dtype == F32 and mx.float().dtype == F32 and mx.to(BF16) is mx
    elsewhere = mx.to("meta")
    assert elsewhere.device.type == elsewhere.qdata.device.type == elsewhere.scale.device.type == "meta"
    assert mx.to(torch.int32).dtype == torch.int32


def test_writing_into_one_is_an_error(mx):
    other = torch.ones(6, 128).bfloat16()
    for write in (lambda: mx.mul_(2), lambda: mx.copy_(other), lambda: mx.zero_(), lambda: mx.__setitem__(0, 1.0),
                  lambda: torch.mul(other, 2, out=mx)):
        with pytest.raises(TypeError, match="read-only: call .dequantize"):
            write()


def test_adding_to_rows_is_seen_by_the_whole(mx):
    before, other = mx.dequantize(F32), torch.randn(2, mx.shape[-1])
    mx[1:3].add_(other)
    sums = quantize(before[1:3] + other, mx.block_size).dequantize(F32)
    assert torch.equal(mx.dequantize(F32), torch.cat([before[:1], sums, before[3:]]))


def test_deepcopy_and_save(mx):
    buffer = io.BytesIO()
    torch.save(mx, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(mx), torch.load(buffer, weights_only=True)):
        assert type(other) is MXTensor and same_bytes(other, mx) and other.dtype == BF16
        assert other.qdata.data_ptr() != mx.qdata.data_ptr()


DATA, SCALES = torch.ones(8, 64).to(torch.float8_e4m3fn), torch.full((8, 2), 127, dtype=torch.uint8)
# Parts that do not belong together, and the argument that the error names.
NOT_PARTS = {
    "one scale for each row": ("scales of shape (8, 2)", (DATA, SCALES[:, :1])),
    "scales of blocks of 32": ("scales of shape (8, 1)", (DATA, SCALES, 128)),
    "scales of rows for tiles": ("scales of shape (1, 1)", (DATA, SCALES, 128, BF16, True)),
    "scales elsewhere": ("there; got", (DATA, SCALES.to("meta"))),
    "plain scales": ("MXTensor: scale is", (DATA, torch.ones(8, 2))),
    "bytes as data": ("MXTensor: qdata is", (DATA.view(torch.uint8), SCALES)),
    "no tensor": ("MXTensor: qdata is None", (None, SCALES)),
    "half a block": ("multiple of 32", (DATA[:, :48], SCALES)),
    "a single value": ("expected 1 axes", (DATA[0, 0], SCALES[0, 0])),
    "other blocks": ("MXTensor: block_size is 64", (DATA, SCALES[:, :1], 64)),
    "tiles of 32": ("MXTensor: block_size is 32", (DATA, SCALES, 32, BF16, True)),
    "another dtype": ("MXTensor: orig_dtype is torch.float64", (DATA, SCALES, 32, torch.float64)),
    "tiled is no bool": ("MXTensor: tiled is 0", (DATA, SCALES, 32, BF16, 0)),
}


def saved(parts: tuple) -> io.BytesIO:
    """A file that holds an MXTensor with these attributes, as torch.save writes it."""
    mx, buffer = MXTensor(DATA, SCALES), io.BytesIO()
    names = "qdata", "scale_bytes", "block_size", "orig_dtype", "tiled"
    for name, value in zip(names, parts, strict=False):
        setattr(mx, name, value)
    torch.save(mx, buffer)
    buffer.seek(0)
    return buffer


@pytest.mark.parametrize("name", NOT_PARTS)
def test_parts_that_do_not_belong_together_are_refused(name):
    """By the constructor, and by torch.load, for which the package puts the type on torch's list of safe ones."""
    text, parts = NOT_PARTS[name]
    for make in (lambda: MXTensor(*parts), lambda: torch.load(saved(parts), weights_only=True),
                 lambda: torch.load(saved(parts), weights_only=False)):
        with pytest.raises((TypeError, ValueError, pickle.UnpicklingError), match=re.escape(text)):
            make()


@pytest.mark.parametrize("parts", [(DATA[:4], SCALES[:4]), (DATA, SCALES, 32, F32)])
def test_a_file_whose_tensor_looks_otherwise_than_its_data_is_refused(parts):
    with pytest.raises((ValueError, pickle.UnpicklingError), match=r"says that it is \(8, 64\) of torch.bfloat16"):
        torch.load(saved(parts), weights_only=True)


class GivesMX(torch.autograd.Function):
    """Identity whose gradient is an MXTensor, as combine's is."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return quantize(grad)


def test_as_the_gradient_of_a_leaf():
    """The first is kept as it is; accumulation re-quantizes the sum."""
    x, g = torch.randn(4, 64, requires_grad=True), torch.randn(4, 64)
    GivesMX.apply(x).backward(g)
    assert type(x.grad) is MXTensor and same_bytes(x.grad, quantize(g))
    GivesMX.apply(x).backward(g)
    assert type(x.grad) is MXTensor and torch.equal(x.grad.dequantize(), 2 * quantize(g).dequantize())
    (3 * x).backward(g)
    assert type(x.grad) is MXTensor and sqnr_db(5 * g, x.grad.dequantize()) > 28
    y = torch.randn(4, 64, requires_grad=True)
    (3 * y).backward(g)
    GivesMX.apply(y).backward(g)
    assert torch.equal(y.grad, 3 * g + quantize(g).dequantize())


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_as_a_gradient_inside_the_graph(dtype):
    """It arrives at the next backward unchanged, and sums of two paths are plain."""
    seen = []
    x, g = torch.randn(4, 64, requires_grad=True), torch.randn(4, 64).to(dtype)
    y = x.to(dtype)
    y.register_hook(lambda grad: seen.append(grad))
    GivesMX.apply(y).backward(g)
    assert type(seen[0]) is MXTensor and same_bytes(seen[0], quantize(g))
    z = x.detach().to(dtype).requires_grad_()
    (GivesMX.apply(z) + GivesMX.apply(2 * z) + z).backward(g)
    q = quantize(g).dequantize()
    assert sqnr_db(3 * q + g, torch.as_tensor(z.grad)) > 28


@pytest.mark.parametrize("dtype", (None, *ALL), ids=str)
def test_gradients_flow_through_dequantize(mx, dtype):
    """As through the cast of a plain tensor that holds the same values."""
    leaf, plain = mx.detach().requires_grad_(), mx.dequantize().requires_grad_()
    w = torch.randn(6, 128)
    for x, values in ((leaf, leaf[1:4].dequantize(dtype)), (plain, plain[1:4].to(dtype or BF16))):
        assert type(values) is torch.Tensor and values.dtype == (dtype or BF16)
        (values.float().square() * w[1:4]).sum().backward()
        assert type(x.grad) is torch.Tensor and x.grad.dtype == BF16
    assert torch.equal(leaf.grad, plain.grad) and leaf.grad[1:4].any()
    with torch.no_grad():
        assert not leaf.dequantize().requires_grad
    assert not mx.dequantize().requires_grad


def test_torch_compile(mx):
    """Of a leaf, whose dequantize has a gradient."""

    def f(x, y):
        return (x.dequantize() * 2 + y).type_as(x) + x.detach() * y, x.detach()[1:3]

    y, found = torch.randn(6, 128).bfloat16(), []
    for call in (f, torch.compile(f, backend="aot_eager", fullgraph=True)):
        leaf = mx.detach().requires_grad_()
        out, rows = call(leaf, y)
        out.sum().backward()
        assert type(rows) is MXTensor and same_bytes(rows, mx[1:3])
        found.append((out, leaf.grad))
    torch._dynamo.reset()
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    assert torch.equal(leaf.grad, torch.full((6, 128), 2.0).bfloat16())


def test_sqnr():
    x = torch.ones(100)
    assert sqnr_db(x, x) == float("inf")
    assert sqnr_db(x, x * 1.1) == pytest.approx(20.0, abs=1e-3)  # noise a tenth of the signal
    assert sqnr_db(x.bfloat16(), (x * 1.5).bfloat16()) == pytest.approx(6.0206, abs=1e-3)


@pytest.mark.parametrize("block", (32, 128))
def test_nan_in_transposed_blocks(block):
    """torch's vectorised maximum over strided blocks gives a NaN with the sign bit set."""
    x = torch.randn(32, 32).to(torch.bfloat16)
    x[3, 5], x[7, 9] = float("nan"), float("-inf")
    mx = quantize(x.t(), block)
    bad = torch.isin(torch.arange(32), torch.tensor([5, 9]))
    assert (mx.scale_bytes[bad] == 255).all() and (mx.qdata[bad].view(torch.uint8) == 0x7F).all()
    assert mx.dequantize()[bad].isnan().all() and mx.dequantize()[~bad].isfinite().all()
