# SPDX-License-Identifier: Apache-2.0
"""Calls that every rank makes outside of a step compare their arguments before their first exchange."""

from typing import Any

import deepspeed.comm as dist

from .deadline import answers_of_all


def check_same_arguments(call: str, **arguments: Any) -> None:
    """Raises an error on every rank unless all ranks make this call with these arguments.

    Collective: one exchange of a small object, and none in a process that is alone.

    Args:
        call: the name of the public function.
        arguments: those that all ranks must agree on, by name.

    Raises:
        ValueError: an argument differs.
        RuntimeError: the ranks make different calls.
        PeerFailure: a rank does not come.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    mine = call, {name: repr(value) for name, value in arguments.items()}
    answers = answers_of_all(dist.get_world_group(), mine, f"{call} (every rank has to make this call)")
    for rank, (other_call, others) in enumerate(answers):
        first_call, first = answers[0]
        if other_call != first_call:
            raise RuntimeError(f"rank 0 calls {first_call}, and rank {rank} calls {other_call}: all ranks must make "
                               "the same calls in the same order")
        for name in first:
            if others[name] != first[name]:
                raise ValueError(f"{call} got {name}={first[name]} on rank 0 and {name}={others[name]} on rank "
                                 f"{rank}: pass the same value on every rank")
