# SPDX-License-Identifier: Apache-2.0
"""Steps of one call of an expert FFN: the work between two exchanges, recorded and replayed.

With a transport of one rank, expert_call.py records whole calls. Between ranks, exchanges cannot be recorded, and the
number of rows changes from call to call. What runs between them can be recorded, since it depends on the number of
rows, and on nothing else that only the device knows. Transports round that number up (`room_for`), so that it repeats.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..compute.executor import put_together, replayed, taken_apart


def run_step(experts: Any, name: str, function: Callable[[list], dict], rows: list, reads: Sequence[str],
             how: tuple) -> dict:
    """function(rows): tensors, MXTensors and None by name. The first call is recorded, later ones are replayed.

    Args:
        experts: an ExpertMath with an executor. The step depends on its attributes.
        function: empties `rows`.
        rows: tensors, MXTensors and None.
        reads: the GEMMs whose weights the step reads, as they are or quantised.
        how: what the step depends on, beside the attributes of `experts` and the properties of its tensors.
    """
    if rows and rows[0].numel() == 0:
        return function(rows)
    executor, known, count = experts.executor, experts.quantized_weights, len(rows)
    quantized = [gemm for gemm in reads if gemm in known]
    stacks = _stacks(experts, [gemm for gemm in reads if gemm not in known])
    tensors, kinds = taken_apart([*rows, *map(known.get, quantized)])
    rows.clear()
    if not experts.keep:  # no later step reads them
        for gemm in quantized:
            del known[gemm]
    others = [None if experts.plan is None else experts.plan.group_ends_E, experts.up_bias_EG, experts.down_bias_EH,
              *(factor for low_rank in experts.adapters.values() for factor in low_rank)]
    key = (name, how, experts.formula, experts.recipe, experts.dtype, experts.keep, tuple(experts.weights),
           tuple(experts.adapters), tuple(quantized), kinds, tuple(map(len, stacks)),
           executor.signature([*tensors, *others, *(stack[0] for stack in stacks)]))
    # A GEMM may compute the address of every weight from that of one. Casts do so within a stack.
    if experts.recipe.quantize_gemm:
        between = tuple(map(executor.distances, stacks))
    else:
        between = executor.distances([weight for stack in stacks for weight in stack])

    def of_tensors(given: list) -> tuple:
        rows = put_together(given, kinds)
        given.clear()
        known.update(zip(quantized, rows[count:], strict=True))
        del rows[count:]
        made = function(rows)
        values, made_kinds = taken_apart(made.values())
        return values, (tuple(made), made_kinds)

    inputs = [*tensors, *others, *(weight for stack in stacks for weight in stack)]
    del tensors
    values, (names, kinds_made) = replayed(executor, key, between, of_tensors, inputs)
    return dict(zip(names, put_together(values, kinds_made), strict=True))


def _stacks(experts: Any, gemms: Sequence[str]) -> list[list[torch.Tensor]]:
    """The weights of these GEMMs, those of a role in a list."""
    return [[stack] if isinstance(stack, torch.Tensor) else list(stack)
            for gemm in gemms for stack in experts.stacks[gemm]]
