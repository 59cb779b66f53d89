# SPDX-License-Identifier: Apache-2.0
"""The kernels of local.py against plain torch, and both against the collective transport of one rank."""

from unittest import mock

import torch
from permute_cases import PROBLEMS, Problem, bits, poisoned

from ds_mxfp8_moe.mx import MXTensor
from ds_mxfp8_moe.transport import local
from ds_mxfp8_moe.transport.collective import Collective
from ds_mxfp8_moe.transport.local import Local

ONE_RANK = {name: problem for name, problem in PROBLEMS.items() if len(problem.tokens) == 1} | {
    "many choices": Problem((300, ), top_k=3, local_experts=5),
    "many experts": Problem((70, ), top_k=4, local_experts=130, wire=Problem.wire),
    "one expert": Problem((150, ), routing="one expert"),
    "nowhere": Problem((4, ), routing="nowhere"),
}


def moved(transport, problem: Problem, device: str) -> dict:
    expert_TK, x_TH, weight_TK = (t.to(device) for t in problem.inputs()[0])
    plan = transport.plan(expert_TK, problem.local_experts)
    x_PH, weight_P = transport.dispatch(plan, x_TH, problem.wire, weight_TK)
    bare_PH, none = transport.dispatch(plan, x_TH, problem.wire)
    assert none is None
    y_PH = (x_PH.dequantize(torch.float32) if problem.wire.mxfp8 else x_PH) * 1.37
    y_PH = y_PH.to(problem.y_dtype or problem.dtype)
    number_P = weight_P + 1
    padding = plan.source_P == expert_TK.numel()
    y_PH[padding], number_P[padding] = float("nan"), float("nan")
    y_TH, back_TK = transport.combine(plan, y_PH, problem.wire, problem.dtype, number_P)
    bare_TH, none = transport.combine(plan, y_PH, problem.wire, problem.dtype)
    assert none is None
    return {"ends": plan.group_ends_E, "x": x_PH, "weight": weight_P, "bare x": bare_PH, "source": plan.source_P,
            "y": y_TH, "back": back_TK, "bare y": bare_TH}


def check_local(device: str, problem: Problem) -> None:
    """Kernels and plain torch give the same bits, and those of the collective transport on the rows of groups."""
    results = []
    for in_kernels in (False, True):
        with mock.patch.object(local, "_in_kernels", lambda x: in_kernels), poisoned():  # noqa: B023
            results.append(moved(Local(), problem, device))
    plain, kernels = results
    for name, expected in plain.items():
        assert (type(expected), expected.dtype) == (type(kernels[name]), kernels[name].dtype), name
        assert torch.equal(bits(expected), bits(kernels[name])), name
    collective = moved(Collective(), problem, device)
    rows = int(collective["ends"][-1])
    assert kernels["source"].shape[0] == local.most_rows(problem.tokens[0] * problem.top_k, problem.local_experts)
    for name in ("ends", "x", "weight", "bare x", "y", "back", "bare y"):
        actual = kernels[name]
        beyond = actual[rows:].dequantize() if isinstance(actual, MXTensor) else actual[rows:]
        if name in ("x", "weight", "bare x"):
            assert not beyond.any(), name
            actual = actual[:rows]
        assert torch.equal(bits(actual), bits(collective[name])), name
