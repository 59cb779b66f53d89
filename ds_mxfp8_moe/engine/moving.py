# SPDX-License-Identifier: Apache-2.0
"""Moves experts between the ranks of an engine (layers/placement.py), between two steps, when there are no gradients.

Two experts in the same slot of two ranks trade places: their weights, and all that the optimizer keeps for them. Each
rank sends and gets the same ranges of its tensors, so layouts and partitions stay. What every rank has whole (biases,
adapters) stays where it is.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine

from ..checkpoint.engine_checkpoints import CheckpointError
from ..compat.optimizer_parts import parts_of
from ..layers.classic import MXFP8MOELayer
from ..layers.experts import MXFP8Experts, converted_layers
from ..layers.frozen_experts import frozen_of
from ..recognition.stacked import SPREAD_NAMES
from ..transport.deadline import all_to_all, tell_peers_on_error
from .keeping import weights_change

BUCKET_BYTES = 2**27  # that a rank sends at a time, and gets


@tell_peers_on_error
@torch.no_grad()
def move_experts(engine: DeepSpeedEngine, wanted: Mapping[Any, Sequence[Sequence[int]]]) -> None:
    """Moves the experts of layers. Collective over their groups.

    Args:
        wanted: experts by rank and slot, each in its slot, by layer of `converted_layers`. The same on every rank.

    Raises:
        RuntimeError: the optimizer keeps states in a form that cannot be moved. Or see PeerError.
    """
    with weights_change(engine, of_frozen=True) if wanted else nullcontext():
        for layer, experts_RL in wanted.items():
            _exchange(engine, layer, layer.mxfp8_placement.experts_RL, experts_RL)
            layer.mxfp8_placement.move(experts_RL)


def move_home(engine: DeepSpeedEngine, with_frozen: bool = True) -> dict[Any, Sequence[Sequence[int]]]:
    """Moves all experts home, or those that are parameters. Collective.

    Returns:
        Where they were: by layer, of those that moved.
    """
    away = {layer: layer.mxfp8_placement for layer in converted_layers(engine.module)
            if layer.mxfp8_placement is not None and not layer.mxfp8_placement.is_home
            and (with_frozen or frozen_of(layer.experts) is None)}
    before: dict[Any, Sequence[Sequence[int]]] = {layer: one.experts_RL for layer, one in away.items()}
    move_experts(engine, {layer: one.home_RL for layer, one in away.items()})
    return before


@contextmanager
def at_home(engine: DeepSpeedEngine) -> Iterator[None]:
    """Inside the context, experts are at home, if they are parameters, as checkpoints of DeepSpeed have them.

    They stay there after an error that not all ranks have, and while another process still writes their weights.
    """
    away = move_home(engine, with_frozen=False)
    try:
        yield
    except CheckpointError:
        move_experts(engine, away)
        raise
    if not getattr(engine.checkpoint_engine, "is_decoupled", bool)():
        move_experts(engine, away)


def _exchange(engine: DeepSpeedEngine, layer: MXFP8Experts | MXFP8MOELayer, now: Sequence[Sequence[int]],
              wanted: Sequence[Sequence[int]]) -> None:
    """Moves the experts of one layer. `now`, `wanted`: the experts by rank and slot."""
    ranks, me = range(layer.ep_size), torch.distributed.get_rank(layer.ep_group)
    moved = {slot for slot in range(layer.num_local_experts) if any(now[r][slot] != wanted[r][slot] for r in ranks)}
    goal = {slot: next(r for r in ranks if wanted[r][slot] == now[me][slot]) for slot in moved}
    origin = {slot: next(r for r in ranks if now[r][slot] == wanted[me][slot]) for slot in moved}
    where = f"the move of experts of {layer.mxfp8_settings.name}"
    for bucket in _buckets((slot, values) for slot, values in _values(engine, layer) if slot in moved):
        # Ranks differ in what stays with them, but not in the buckets.
        sent = sorted(((goal[slot], values) for slot, values in bucket if goal[slot] != me), key=lambda one: one[0])
        got = sorted(((origin[slot], values) for slot, values in bucket if origin[slot] != me), key=lambda one: one[0])
        out, into = (torch.empty(sum(len(values) for _, values in part), dtype=torch.uint8,
                                 device=layer.mxfp8_settings.device) for part in (sent, got))
        _copy(out.split([len(values) for _, values in sent]), [values for _, values in sent])
        got_of, sent_of = (tuple(sum(len(values) for r, values in part if r == rank) for rank in ranks)
                           for part in (got, sent))
        all_to_all(into, out, got_of, sent_of, layer.ep_group, where)
        _copy([values for _, values in got], into.split([len(values) for _, values in got]))


def _copy(into: Any, values: Any) -> None:
    if values:
        torch._foreach_copy_([*into], [*values])


def _values(engine: DeepSpeedEngine, layer: MXFP8Experts | MXFP8MOELayer) -> Iterator[tuple[int, torch.Tensor]]:
    """(slot, values) of all tensors that belong to one of this rank's experts, as bytes, in the order of all ranks."""
    L, experts = layer.num_local_experts, layer.experts
    if isinstance(layer, MXFP8MOELayer):
        tensors = [(slot, slot + 1, tensor) for slot, expert in enumerate(experts.deepspeed_experts)
                   for tensor in (*expert.parameters(), *expert.buffers())]
    else:
        frozen = frozen_of(experts)
        own = [getattr(experts, name) for name in SPREAD_NAMES] if frozen is None else frozen.buffers()
        tensors = [(0, L, tensor) for tensor in own]
    for first, end, tensor in tensors:
        size = getattr(tensor, "ds_numel", tensor.numel()) // (end - first)
        for part in parts_of(engine.optimizer, tensor):
            for slot in range(first, end):
                values = part.of((slot - first) * size, (slot - first + 1) * size)
                if len(values):
                    yield slot, values.view(torch.uint8)


def _buckets(all_values: Iterator[tuple[int, torch.Tensor]]) -> Iterator[list[tuple[int, torch.Tensor]]]:
    """The values in buckets of at most BUCKET_BYTES."""
    bucket, room = [], BUCKET_BYTES
    for slot, values in all_values:
        for piece in values.split(BUCKET_BYTES):
            if len(piece) > room:
                yield bucket
                bucket, room = [], BUCKET_BYTES
            bucket.append((slot, piece))
            room -= len(piece)
    if bucket:
        yield bucket
