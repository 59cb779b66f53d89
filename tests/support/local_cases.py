# SPDX-License-Identifier: Apache-2.0
"""The kernels of local.py against plain torch, which tests/ranks/test_transport.py compares with a naive reference."""

from unittest import mock

import torch

from ds_mxfp8_moe.compute.mx import MXTensor
from ds_mxfp8_moe.transport import local
from ds_mxfp8_moe.transport.local import Local
from tests.support.permute_cases import FLOOR, MX32, MX128, Problem, bits, moved, poisoned

ONE_RANK = {
    "mxfp8": Problem((21, ), row_format=MX32),
    "dropped": Problem((21, ), routing="dropped"),
    "floor, not finite": Problem((21, ), row_format=FLOOR, not_finite=True, routing="dropped"),
    "not contiguous": Problem((9, ), contiguous=False),
    "no tokens": Problem((0, )),
    "short last block": Problem((9, ), row_format=MX128, hidden=160),
    "float32 answers": Problem((9, ), y_dtype=torch.float32, top_k=4, row_format=MX128),
    "float16": Problem((9, ), dtype=torch.float16, top_k=8, local_experts=1),
    "many choices": Problem((300, ), top_k=3, local_experts=5),
    "many experts": Problem((70, ), top_k=4, local_experts=130),
    "many dropped": Problem((300, ), top_k=3, local_experts=5, routing="dropped"),
    "one expert": Problem((150, ), routing="one expert"),
    "nowhere": Problem((4, ), routing="nowhere"),
}


def moved_here(transport, problem: Problem, device: str) -> dict:
    plan, (x_PH, weight_P, y_TH, back_TK, bare_PH, bare_TH) = moved(transport, problem, problem.inputs()[0], "slot_TK",
                                                                    device)
    return {"ends": plan.group_ends_E, "x": x_PH, "weight": weight_P, "bare x": bare_PH, "source": plan.source_P,
            "y": y_TH, "back": back_TK, "bare y": bare_TH}


def check_local(device: str, problem: Problem) -> None:
    """Kernels and plain torch give the same bits, dtypes and shapes."""
    results = []
    for in_kernels in (False, True):
        with mock.patch.object(local, "has_kernels", lambda device: in_kernels), poisoned():  # noqa: B023
            results.append(moved_here(Local(), problem, device))
    plain, kernels = results
    for name, expected in plain.items():
        assert (type(expected), expected.dtype) == (type(kernels[name]), kernels[name].dtype), name
        assert torch.equal(bits(expected), bits(kernels[name])), name
    x_PH = kernels["x"]
    if isinstance(x_PH, MXTensor) and x_PH.shape[0]:  # as the GEMMs read them
        assert x_PH.scale_bytes.stride() == (1, x_PH.shape[0]) and x_PH.qdata.is_contiguous()
