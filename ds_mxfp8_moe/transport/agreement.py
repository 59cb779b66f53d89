# SPDX-License-Identifier: Apache-2.0
"""What ranks compare before their first exchange: arguments of calls outside of a step, and how an engine starts."""

from typing import Any

import deepspeed.comm as dist

from ..config import SECTION, ConfigError
from .deadline import answers_of_all
from .releases import Code, check_same_code, own_code


def check_same_arguments(call: str, **arguments: Any) -> None:
    """Raises an error on every rank unless all ranks make this call with these arguments.

    Collective: one exchange of a small object, and none in a process that is alone.

    Args:
        call: the name of the public function.
        arguments: those that all ranks must agree on, by name.

    Raises:
        ValueError: an argument differs.
        RuntimeError: the ranks make different calls.
        PeerError: a rank does not come.
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


def compare_starts(section: str, *answer: Any) -> list[tuple]:
    """Every rank's `answer`, in rank order, after a comparison of what starts its engine. Collective.

    Args:
        section: of the config of this rank's engine, as JSON.
        answer: of plain types, which ranks with different code can read.

    Raises:
        RuntimeError: ranks run different code. Raised on every rank.
        ConfigError: sections differ between ranks. Raised on every rank.
        PeerError: a rank does not come.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [answer]
    mine = tuple(own_code()), section, answer
    answers = answers_of_all(dist.get_world_group(), mine, "the engine's start (all ranks enable ds_mxfp8_moe)")
    codes, sections, found = zip(*answers, strict=True)
    check_same_code(range(len(answers)), [Code(*code) for code in codes])
    if different := [rank for rank, other in enumerate(sections) if other != sections[0]]:
        raise ConfigError(f'the section "{SECTION}" on ranks {different} differs from rank 0\'s: give every rank the '
                          "same config")
    return list(found)
