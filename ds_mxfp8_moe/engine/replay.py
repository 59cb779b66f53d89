# SPDX-License-Identifier: Apache-2.0
"""Router replay: which experts each token went to, out of one forward and into another.

A rollout engine and a trainer choose experts separately, and disagree for some tokens. With replay, the trainer takes
the rollout's choice. Nothing else is replayed: the scores follow from the tokens by the model's own rule, at the
experts that were chosen, so the router has gradients. This is for blocks of transformers, not for classic layers.

    with ds_mxfp8_moe.replay_routes(engine, routes):    # [B, S, L, K]
        engine.backward(engine(**batch).loss)
"""

import operator
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import deepspeed.comm as dist
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.moe.sharded_moe import MOELayer

from ..compat.private_names import missing
from ..layers.experts import ExpertBlock, MXFP8Experts
from ..routing.choices import top_k_of
from ..routing.routes import Given, LayerRoutes, ModelRoutes, RecordedRoutes, routes_of
from ..transport.deadline import answers_of_all, failure_in_world, tell_peers, tell_peers_on_error
from .hooks import engine_of, model_of
from .moe_engine import MoEEngine

CHECK = "the check of routes"  # what ranks wait for

@contextmanager
def record_routes(engine: torch.nn.Module) -> Iterator[RecordedRoutes]:
    """Records which experts each token goes to, in all forwards of a model inside the `with`.

    Recomputations by activation checkpointing record nothing. They choose what their forward chose. Each rank records
    its own tokens, without communication, and the host waits for nothing.

    Args:
        engine: a DeepSpeed engine, its model, or a part of this model.

    Yields:
        A sequence with one int16 tensor [*tokens, L, K] for each forward: see RecordedRoutes.

    Raises:
        RuntimeError: the routes of this model cannot be recorded. The text says why.
    """
    layers, around, state = _prepared(engine, "record_routes")
    with _watched(around, state):
        state.recorded = recorded = RecordedRoutes([layer.mxfp8_routes for layer in layers])
        try:
            yield recorded
        finally:
            state.recorded = None


@contextmanager
def replay_routes(engine: torch.nn.Module, routes: Any) -> Iterator[None]:
    """The tokens of the forwards inside the `with` go to given experts.

    The n-th forward of the model takes the n-th routes, evaluations too. A token whose K ids are all -1 in a layer
    chooses by itself there: a padding token, or one without routes. Recomputations by activation checkpointing choose
    what their forward chose, also after the `with`, until the engine's next step. For a part of a model, until the
    next `with` begins. Later ones raise an error.

    Each rank gives the routes of its own tokens, for all experts of the group, and for as many forwards as the other
    ranks. This is collective over all ranks. They check all routes when the `with` begins, and the host waits for
    that. In the forwards it waits for nothing more than it does without replay. When the `with` ends, it waits once to
    learn whether the routers of transformers took the choice.

    Args:
        engine: a DeepSpeed engine, its model, or a part of this model.
        routes: integers [*tokens, L, K] for one forward, or a sequence of such for several forwards, such as what
            record_routes gives. Tensors on any device, or NumPy arrays. `tokens` is [B, S] or [T], in the order of the
            hidden states. L counts the MoE layers, without dense layers.

    Raises:
        ValueError: before the forwards, on every rank, if on any rank shapes are wrong, ids are not in 0..E-1, a token
            has an expert twice, or the routes cannot be read; or if ranks give routes of different numbers of
            forwards. In a forward: the routes are for another number of tokens.
        RuntimeError: before the forwards, on every rank, if the routes of this model cannot be replayed on any rank.
            There are more forwards than routes, or fewer. In a forward, or when the `with` ends: the router of a block
            does not take the choice.
    """
    layers, around, state = _prepared(engine, "replay_routes")
    with _watched(around, state):
        given = _checked(layers, routes)  # last: the host waits for the device, which then waits for the host
        state.replayed, state.ignored = iter(given), {}
        try:
            yield
            if unused := operator.length_hint(state.replayed):
                error = RuntimeError(f"replay_routes: {unused} of the routes of {len(given)} forwards were not used: "
                                     "give routes for each forward inside the `with`, in their order")
                tell_peers(error)  # they may be in a forward that this rank did not run
                raise error
            state.end_replay()
        finally:
            state.replayed = None


def pad_routes(routes: Sequence, attention_mask: torch.Tensor) -> torch.Tensor:
    """Lays out the routes of single sequences like a padded batch, for replay_routes.

    Args:
        routes: of each sequence, integers [tokens, L, K], as vLLM and SGLang give them: of the prompt and of what was
            generated, in the order of the tokens. A sequence may have fewer routes than tokens: the last token that
            was generated did not go through the layers.
        attention_mask: [B, S], 1 for tokens and 0 for padding, on either side.

    Returns:
        int64 [B, S, L, K] on the CPU. -1 for padding and for tokens without routes.

    Raises:
        ValueError: a sequence has more routes than tokens, or there is another number of sequences.
    """
    mask = attention_mask.cpu().bool()
    tensors = [torch.as_tensor(one).to("cpu", torch.int64) for one in routes]
    if len(tensors) != len(mask) or not tensors:
        raise ValueError(f"pad_routes: there are routes of {len(tensors)} sequences, and the batch has {len(mask)}")
    batch = torch.full((*mask.shape, *tensors[0].shape[1:]), -1)
    for row, one in enumerate(tensors):
        tokens = mask[row].nonzero()[:, 0]
        if len(one) > len(tokens):
            raise ValueError(f"pad_routes: sequence {row} has {len(one)} routes and {len(tokens)} tokens")
        batch[row, tokens[:len(one)]] = one
    return batch


@tell_peers_on_error
def _prepared(engine: torch.nn.Module, name: str) -> tuple[list[MXFP8Experts], list[torch.nn.Module], ModelRoutes]:
    """The experts of a model, the modules that contain all of them, and the model's state. Raises RuntimeError if its
    routes cannot be recorded or replayed.

    Before a replay, this is collective, and raises on every rank if it does on any.
    """
    model = model_of(engine)
    state, modules = routes_of(model, make=True), dict(model.named_modules())
    of_moe = {path: module for path, module in modules.items() if isinstance(module, (MOELayer, AutoEPMoELayer))}
    failure = _refusal(of_moe)
    if (state.recorded if name == "record_routes" else state.replayed) is not None:
        failure = "this model is inside another `with` of it already"
    if name == "replay_routes":
        failure = failure_in_world(failure, CHECK)
    if failure:
        raise RuntimeError(f"{name}: {failure}")
    if not isinstance(made := engine_of(engine), MoEEngine) or not made._mxfp8.steps:  # nothing tells of steps
        state.forget()
    for index, block in enumerate(of_moe.values()):
        block.mxfp8_chooses = True
        block.experts.mxfp8_routes = LayerRoutes(block.mxfp8_settings.name, index, top_k_of(block), state)
    return [block.experts for block in of_moe.values()], _around(modules, of_moe), state


def _refusal(of_moe: dict[str, torch.nn.Module]) -> str | None:
    """Why routes of this model can be neither recorded nor replayed. None: they can."""
    if gone := missing("router replay"):
        return f"not supported: {gone}"
    if not of_moe:
        return ('the model has no layers that ds_mxfp8_moe converted. Enable "mxfp8_moe" in its config, and read the '
                "start-up lines about the layers")
    reasons = ((path, _obstacle(module)) for path, module in of_moe.items())
    return next((f"not supported for {path}: {reason}" for path, reason in reasons if reason), None)


def _obstacle(module: torch.nn.Module) -> str | None:
    """Why routes of this MoE layer can be neither recorded nor replayed. None: they can."""
    if isinstance(module, MOELayer):
        return "it is a classic layer of DeepSpeed, and only MoE blocks of transformers record and replay routes"
    if not isinstance(module, ExpertBlock):
        return "it runs DeepSpeed's own path: the start-up lines say why"
    if "forward" in vars(module):
        return "its forward method is replaced on the instance"
    if module.mxfp8_settings.config.force_load_balance:
        return '"force_load_balance" chooses the experts'
    return None


@contextmanager
def _watched(around: list[torch.nn.Module], state: ModelRoutes) -> Iterator[None]:
    """Inside the context, the state knows where forwards of the model begin."""
    state.cut()
    hooks = [module.register_forward_pre_hook(state.begin) for module in around]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        state.cut()


def _around(modules: dict[str, torch.nn.Module], paths: Iterable[str]) -> list[torch.nn.Module]:
    """The modules that contain all those at `paths`. A user may call any of them. A single layer counts, too."""
    names = [""]
    for parts in zip(*(path.split(".") for path in paths), strict=False):
        if len(set(parts)) > 1:
            break
        names.append(f"{names[-1]}.{parts[0]}".strip("."))
    return [modules[name] for name in names]


def _checked(layers: list[MXFP8Experts], routes: Any) -> list[Given]:
    """The routes of each forward. Collective: raises ValueError on every rank if they are wrong on any rank."""
    given, failure = [], None
    try:
        for one in routes if isinstance(routes, Sequence) else [routes]:
            given.append(_given(layers, one))
    except Exception as error:  # of any kind: the other ranks wait for this one's answer
        failure = f"forward {len(given)}: {error}"
    failure = failure_in_world(failure, CHECK)
    if not failure and dist.is_initialized() and dist.get_world_size() > 1:
        counts = answers_of_all(dist.get_world_group(), len(given), CHECK)
        if len(set(counts)) > 1:
            failure = f"the ranks, in their order, give routes of {counts} forwards; expected as many on every rank"
    if failure:
        raise ValueError(f"replay_routes: {failure}")
    return given


def _given(layers: list[MXFP8Experts], routes: Any) -> Given:
    """The routes of one forward. Raises ValueError if they are wrong. The host reads them once, as its last step."""
    routes = torch.as_tensor(routes)
    top_k_L = [layer.mxfp8_routes.top_k or routes.shape[-1] for layer in layers]
    num_experts_L = [layer.num_local_experts * layer.ep_size for layer in layers]
    L, K = len(layers), max(top_k_L)
    if routes.dim() < 3 or routes.shape[-2:] != (L, K) or routes.dtype.is_floating_point or routes.dtype == torch.bool:
        raise ValueError(f"the routes are {routes.dtype} of shape {tuple(routes.shape)}; expected integers of shape "
                         f"[..., {L}, {K}]: {L} MoE layers, dense layers not counted, and {K} choices of a token")
    id_TLK = routes.reshape(-1, L, K)
    if id_TLK.dtype != torch.int16:  # as recorded
        id_TLK = id_TLK.to(torch.int64)
    # Layers in a row that are alike together: their numbers in a tensor would have to get to the device first.
    alike = [(*rule, len([*run])) for rule, run in groupby(zip(top_k_L, num_experts_L, strict=True))]
    found = [_found(part_TLK, k, num_experts) for part_TLK, (k, num_experts, _) in zip(
        id_TLK.split([run[-1] for run in alike], dim=1), alike, strict=True)]
    flags = torch.stack([found_TL.all() for pair in found for found_TL in pair])
    device = torch.device(get_accelerator().current_device_name())
    chosen_LTK = id_TLK.transpose(0, 1).to(device, torch.int16, copy=True, memory_format=torch.contiguous_format)
    flags = flags.tolist()  # here the host waits for the device
    if not all(flags[0::2]):
        t, index = (~torch.cat([right_TL for right_TL, _ in found], dim=1)).nonzero()[0].tolist()
        k, num_experts = top_k_L[index], num_experts_L[index]
        rest = f", and -1 in the other {K - k}" if k < K else ""
        raise ValueError(f"token {t} has experts {id_TLK[t, index].tolist()} in {layers[index].mxfp8_settings.name}; "
                         f"expected {k} different ones of 0 to {num_experts - 1}{rest}, or -1 in all {K} for a token "
                         "that chooses by itself")
    return Given(chosen_LTK, complete=all(flags[1::2]))


def _found(id_TLK: torch.Tensor, k: int, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each token: whether its ids are right, for layers with k choices, and whether they choose (or are wrong)."""
    ascending_TLK = id_TLK[..., :k].sort(dim=2)[0]
    chosen_TL = ascending_TLK[..., 0] >= 0
    different_TL = (ascending_TLK[..., 1:] > ascending_TLK[..., :-1]).all(2)
    right_TL = chosen_TL & different_TL & (ascending_TLK[..., -1] < num_experts) | (ascending_TLK == -1).all(2)
    if k < id_TLK.shape[2]:
        right_TL &= (id_TLK[..., k:] == -1).all(2)
    return right_TL, chosen_TL
