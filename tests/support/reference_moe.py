# SPDX-License-Identifier: Apache-2.0
"""What an MXFP8 expert FFN computes, written down a second time: no plan, no transport, no autograd function.

Takes the tokens of all ranks at once, loops over experts, and rounds where the recipe rounds. Independent of
expert_ffn.py on purpose: it shares only the casts of mx.py with it.
"""

import torch

from ds_mxfp8_moe.compute.mx import quantize, quantize_tiles


def at_most(x, limit):
    """torch.clamp, whose gradient at exactly the limit is 1. That of torch's own is 0 since 2.15."""
    return torch.where(x > limit, limit, x)


ACT = {
    "relu": torch.relu,
    "relu_squared": lambda x: torch.relu(x)**2,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "silu": torch.nn.functional.silu,
}


def _cast(x, recipe):
    """Rounds float32 rows to MXFP8 and back along the last axis."""
    return quantize(x, recipe.block_size, recipe.scaling_mode).dequantize(torch.float32)


def _cast_rows(x, recipe):
    """The same along the rows, in the layout that experts see: padded to 128."""
    padded = torch.nn.functional.pad(x, (0, 0, 0, -x.shape[0] % 128))
    return _cast(padded.t(), recipe).t()[:x.shape[0]]


def tiled_rows(x_PK, scale_bytes):
    """Values of MXFP8 rows in blocks of 128, re-scaled to one scale, the largest, for 128 rows and a block."""
    largest = scale_bytes.view(-1, 128, scale_bytes.shape[1]).amax(1).repeat_interleave(128, dim=0)
    power = torch.exp2(largest.to(x_PK.dtype) - 127).repeat_interleave(128, dim=1)[:, :x_PK.shape[1]]
    return (x_PK / power).float().to(torch.float8_e4m3fn).to(x_PK.dtype) * power


def _cast_tiles(x, recipe):
    """The same of float32 rows, in the layout that experts see. Rows that were cast before are cast anew: where their
    largest value had been rounded to 224, to half the scale."""
    padded = torch.nn.functional.pad(x, (0, 0, 0, -x.shape[0] % 128))
    mx = quantize(padded, recipe.block_size, recipe.scaling_mode)
    return tiled_rows(mx.dequantize(torch.float32), mx.scale_bytes)[:x.shape[0]]


def _weight(w, recipe, transposed):
    """Weights [N, K] as forward (contracts K) or the input gradient (contracts N) see them."""
    w = w.float()
    if not recipe.quantize_gemm:
        return w
    if recipe.block_size == 128:
        return quantize_tiles(w, recipe.scaling_mode).dequantize(torch.float32)
    return _cast(w.t(), recipe).t() if transposed else _cast(w, recipe)


def reference(formula, recipe, experts, tokens, routes, grads, ranks, rescales_rows=False):
    """Output and all gradients of a MoE layer over `ranks` ranks.

    Args:
        experts: per global expert a dict role -> tensor.
        tokens, grads: per rank, [T, H] inputs and output gradients in the tokens' dtype.
        routes: per rank (expert_TK, weight_TK).
        rescales_rows: weight gradients in MXFP8 read rows in the form that the other GEMMs read, with one scale for
            128 of them and 128 columns (Hopper, blocks of 128).

    Returns:
        dict: "y", "x", "weight" lists per rank; "experts" list of dicts role -> gradient. All float32.
    """
    dtype = tokens[0].dtype
    local = len(experts) // ranks
    quantized = recipe.quantize_gemm

    def rnd(x):
        return x.to(dtype).float()

    def wire(x, kind):
        return _cast(x, recipe) if kind == "mxfp8" else rnd(x)

    def operand(x):
        return _cast(x, recipe) if quantized else rnd(x)

    top_k = routes[0][0].shape[1]
    x_wire = [wire(x.float(), recipe.dispatch_fwd) for x in tokens]
    g_wire = [wire(g.float(), recipe.combine_bwd) for g in grads]
    width = tokens[0].shape[1]
    # partial sums [source rank][expert rank], of outputs and of input gradients
    y_part = [[torch.zeros(len(x), width) for _ in range(ranks)] for x in tokens]
    x_part = [[torch.zeros(len(x), width) for _ in range(ranks)] for x in tokens]
    weight_grad = [torch.zeros(r[1].shape) for r in routes]
    expert_grads = []
    # choices ascending: accumulate per choice k outside of the loop over experts
    results = []
    for e, p in enumerate(experts):
        where = [(r, t, k) for r in range(ranks) for t, k in (routes[r][0] == e).nonzero().tolist()]
        rows = torch.stack([x_wire[r][t] for r, t, _ in where]) if where else torch.zeros(0, width)
        g = torch.stack([g_wire[r][t] for r, t, _ in where]) if where else torch.zeros(0, width)
        w = torch.tensor([routes[r][1][t, k] for r, t, k in where]).view(-1, 1)
        results.append((where, *_expert(formula, recipe, p, rows, g, w, operand, rnd,
                                        rescales_rows and recipe.wgrad == "mxfp8")))
        expert_grads.append(results[-1][-1])
    for k_wanted in range(top_k):
        for e, (where, y, dx, dw, _) in enumerate(results):
            for i, (r, t, k) in enumerate(where):
                if k == k_wanted:
                    y_part[r][e // local][t] += y[i]
                    x_part[r][e // local][t] += dx[i]
                    weight_grad[r][t, k] = dw[i]
    def came_back(parts, kind):
        return rnd(sum(wire(part, kind) for part in parts))

    return {
        "y": [came_back(parts, recipe.combine_fwd) for parts in y_part],
        "x": [came_back(parts, recipe.dispatch_bwd) for parts in x_part],
        "weight": weight_grad,
        "experts": expert_grads,
    }


def _expert(formula, recipe, p, rows, g, w, operand, rnd, rescales_rows):
    x_op = operand(rows)

    def wgrad(g_hp, a):
        if rescales_rows:
            return _cast_tiles(g_hp, recipe).t() @ _cast_tiles(a, recipe)
        if recipe.wgrad == "mxfp8":
            return _cast_rows(g_hp, recipe).t() @ _cast_rows(a, recipe)
        return g_hp.t() @ a

    def bias(name):
        return p[name].float() if name in p else 0.0

    grads = {}
    first = {"none": ("gate", "up"), "gate_up": ("first", "second"), "up_gate": ("second", "first")}[formula.packed]
    act = ACT.get(formula.activation, lambda gate: gate * torch.sigmoid(formula.alpha * gate))
    limit = float("inf") if formula.limit is None else formula.limit
    if formula.kind == "mlp":
        names = ["up"]
    else:
        names = ["gate", "up"] if formula.packed == "none" else ["up"]
    pre = [rnd(rnd(x_op @ _weight(p[n], recipe, False).t()) + bias(f"{n}_bias")) for n in names]
    if formula.packed != "none":
        half = pre[0].shape[1] // 2
        pre = [pre[0][:, :half], pre[0][:, half:]]
    if first[0] == "second":
        pre.reverse()

    def activated(values):
        if len(values) == 1:
            return act(values[0])
        return act(at_most(values[0], limit)) * (-at_most(-at_most(values[1], limit), limit)
                                                 + (formula.activation == "swiglu_oai"))

    h = operand(activated(pre) * w)
    y = rnd(h @ _weight(p["down"], recipe, False).t()) + w * bias("down_bias")
    kept = [_cast(v, recipe) if recipe.preactivation == "mxfp8" else v for v in pre]
    t = rnd(operand(g) @ _weight(p["down"], recipe, True))
    leaves = [v.clone().requires_grad_() for v in kept]
    value = activated(leaves)
    dw = (t * value.detach()).sum(-1) + ((g * p["down_bias"].float()).sum(-1) if "down_bias" in p else 0)
    dpre = torch.autograd.grad(value, leaves, t * w)
    grads["down"] = wgrad(g, h)
    if "down_bias" in p:
        grads["down_bias"] = (g * w).sum(0)
    if first[0] == "second":
        dpre = dpre[::-1]
    if formula.packed != "none":
        dpre = (torch.cat(dpre, dim=1), )
    dx = 0
    for n, d in zip(names, dpre, strict=True):
        dx = dx + operand(d) @ _weight(p[n], recipe, True)
        grads[n] = wgrad(d if recipe.quantize_gemm and recipe.wgrad == "mxfp8" else rnd(d), x_op)
        if f"{n}_bias" in p:
            grads[f"{n}_bias"] = d.sum(0)
    return y, rnd(dx), dw, grads
