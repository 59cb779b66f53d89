# SPDX-License-Identifier: Apache-2.0
"""The collectives that a call makes."""

import deepspeed.comm as dist

from tests.support.conformance import Problem


def steps(problem: Problem, exchange, told) -> None:
    """A plan, a dispatch, a combine and a dispatch without weights, after each of which `told` gets its name."""
    expert_TK, x_TH, weight_TK = problem.inputs(dist.get_world_size())[dist.get_rank()]
    plan = exchange.plan(expert_TK, problem.local_experts)
    told("plan")
    x_PH, weight_P = exchange.dispatch(plan, x_TH, problem.row_format, weight_TK)
    told("dispatch")
    y_PH = x_PH.dequantize() if problem.row_format.mxfp8 else x_PH
    exchange.combine(plan, y_PH, problem.row_format, problem.dtype, weight_P)
    told("combine")
    exchange.dispatch(plan, x_TH, problem.row_format)
    told("dispatch bare")
