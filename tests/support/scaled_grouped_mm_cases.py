# SPDX-License-Identifier: Apache-2.0
"""torchao's grouped GEMM with operands for a loop."""

import torch

from ds_mxfp8_moe.compute.mx import MXTensor
from ds_mxfp8_moe.scaled_grouped_mm import _to_mxfp8_then_scaled_grouped_mm

M, K, N = 300, 256, 160
ENDS = [50, 50, 217, 290]  # sizes 50, 0, 167, 73, then ten rows that belong to no group


def operands(dtype=torch.bfloat16, seed=0):
    g = torch.Generator().manual_seed(seed)
    a = torch.randn(M, K, generator=g).to(dtype)
    w = (torch.randn(len(ENDS), N, K, generator=g) * 0.05).to(dtype)
    grad = torch.randn(M, N, generator=g)
    return a, w, grad


def loop(a, w, grad, ends=ENDS) -> tuple:
    """out, dA and dW in float32, group by group; rows past the last end give zeros."""
    a, w, grad = a.float(), w.float(), grad.float()
    out, da, dw = torch.zeros(a.shape[0], w.shape[1]), torch.zeros_like(a), torch.zeros_like(w)
    start = 0
    for e, end in enumerate(ends):
        rows = slice(start, end)
        out[rows], da[rows], dw[e] = a[rows] @ w[e].t(), grad[rows] @ w[e], grad[rows].t() @ a[rows]
        start = end
    return out, da, dw


def run(a, w, grad, ends=ENDS, device="cpu", **kwargs) -> tuple:
    """out, dA and dW through the function under test."""
    a, w = a.detach().to(device).requires_grad_(), w.detach().clone().to(device).requires_grad_()
    offs = torch.tensor(ends, dtype=torch.int32, device=device)
    out = _to_mxfp8_then_scaled_grouped_mm(a, w.transpose(-2, -1), offs=offs, **kwargs)
    out.backward((grad if isinstance(grad, MXTensor) else grad.to(out.dtype)).to(device))
    return out.detach().cpu(), a.grad.cpu(), w.grad.cpu()


CASES = [(block, mode, hp) for block in (32, 128) for mode in ("rceil", "floor") for hp in (True, False)]


def offs(*ends, dtype=torch.int32):
    return torch.tensor(ends, dtype=dtype)


def compiled_and_eager(device, backend, block, hp) -> list:
    """Output and gradients of the function compiled without a graph break, and as it is."""
    a, w, grad = (x.to(device) for x in operands())
    ends = torch.tensor(ENDS, dtype=torch.int32, device=device)

    def layer(a, w):
        return _to_mxfp8_then_scaled_grouped_mm(a * 2, w.transpose(-2, -1), offs=ends, block_size=block,
                                                wgrad_with_hp=hp)

    results = []
    for function in (layer, torch.compile(layer, fullgraph=True, backend=backend)):
        leaves = [x.clone().requires_grad_() for x in (a, w)]
        out = function(*leaves)
        out.backward(grad.to(out.dtype))
        results.append((out.detach(), *(leaf.grad for leaf in leaves)))
    torch._dynamo.reset()
    return list(zip(*results, strict=True))


def check_that_rows_past_the_last_group_touch_nothing(device):
    """The tail of permute's static bound may hold anything, NaN included."""
    a, w, grad = operands()
    poisoned, bad_grad = a.clone(), grad.clone()
    poisoned[ENDS[-1]:], bad_grad[ENDS[-1]:] = float("nan"), float("inf")
    for hp in (True, False):
        for x, y in zip(run(a, w, grad, device=device, wgrad_with_hp=hp),
                        run(poisoned, w, bad_grad, device=device, wgrad_with_hp=hp), strict=True):
            assert torch.equal(x, y)
