# SPDX-License-Identifier: Apache-2.0
"""Streams an engine's weights under the names of published checkpoints: into files, or to an engine that serves them.

Experts travel one by one, a bucket at a time. In FP8, each rank casts its own experts before they travel: a byte for
each weight, and a scale for each tile of 128x128. On Hopper, and with `"scale_block_size": 128` elsewhere, these are
the bytes that training multiplies with. Where they are not, one line says by how much they differ.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Literal, get_args

import deepspeed
import deepspeed.comm as dist
import torch

from ..compute import casts
from ..compute.block_fp8 import Rounding, to_block_fp8
from ..compute.formula import LowRank
from ..compute.merging import KeptShare, merge, merge_as_tiles, merge_update, product, seeds_of
from ..compute.mx import TILE, MXTensor
from ..layers.adapters import unmerged_adapters, whole_low_rank
from ..layers.experts import ExpertBlock, expert_blocks
from ..layers.placement import experts_of
from ..ops.log import log_on_rank_0
from ..transport.agreement import check_same_arguments
from ..transport.deadline import tell_peers, tell_peers_on_error
from .gathering import Gather, given_engine, restore_persistent
from .published import ExpertStack, FrozenRows, Published, published

Format = Literal["model", "fp8"]


@tell_peers_on_error
def export_weights(engine: Any, weights: Format = "model", bucket_bytes: int = 2**30,
                   rank_0_only: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of an engine's model, one by one, as (name in published checkpoints, tensor on the model's device).

        for name, tensor in ds_mxfp8_moe.export_weights(engine):
            ...  # every rank gets every tensor

    Collective: every rank makes the call with the same arguments and iterates, and nothing is trained before all of
    them have ended. A rank that stops early
    still takes part in what remains, when its iterator is closed, as Python does at the end of a for loop that breaks.
    If a loop ends by an error that somebody catches, call the iterator's close(). A rank that never begins leaves the
    others waiting until the deadline, and they raise a PeerError that names it.

    A tensor may be the model's own, or a view of a bucket: read it, do not write to it, and do not keep it longer than
    you need it. Adapters of PEFT that are active are merged into the weights, one weight at a time. Merged weights are
    rounded stochastically, so that the mean over the weights keeps the whole update; see compute/merging.py. With
    "merge_aware", experts have the bits that training computes with.

    Args:
        engine: what `initialize` or `accelerator.prepare` returned, or a Trainer whose `train` has begun.
        weights: "model": all tensors have the model's own dtype. "fp8": weights of experts are float8_e4m3fn, and each
            is followed by its scales: `name` with "_scale_inv" at its end, float32 [N / 128, K / 128], one power of
            two for a tile of 128x128.
        bucket_bytes: how much is gathered at a time, if an expert of each rank fits into it. Beside it, a rank holds
            its own experts of one layer in ZeRO-3, and any other single tensor.
        rank_0_only: rank 0 gets the tensors. The other ranks take part, and their iterators are empty.

    Raises:
        TypeError: there is no engine, or its model is none of transformers and has no classic layers.
        ValueError: arguments differ between ranks; raised on every rank. Or this model has no form in the block FP8
            that vLLM and SGLang document. The error says why.
        RuntimeError: the model is split by tensor parallelism, or something was added to it that cannot be merged.
    """
    check_same_arguments("export_weights", weights=weights, bucket_bytes=bucket_bytes, rank_0_only=rank_0_only)
    return stream(checked(engine, weights), weights, bucket_bytes, rank_0_only)


def checked(engine: Any, weights: str) -> Published:
    """What the model's checkpoint holds in this format. Raises the errors of `export_weights`."""
    if weights not in get_args(Format):
        raise ValueError(f"weights={weights!r} was given; supported are {' and '.join(map(repr, get_args(Format)))}")
    model = published(given_engine(engine))
    if weights == "fp8":
        _check_fp8(model)
    return model


def stream(model: Published, weights: str, bucket_bytes: int = 2**30, rank_0_only: bool = False,
           meet: Callable[[], None] = lambda: None) -> Iterator[tuple[str, torch.Tensor]]:
    """The iterator of `export_weights`. `meet`: called before each exchange, on every rank as often."""
    remaining = _parts(model, weights, bucket_bytes, rank_0_only, meet)
    try:
        for pairs in remaining:  # `yield from remaining` would close it too early
            yield from pairs
    except Exception as error:
        tell_peers(error)
        raise
    finally:
        for _ in remaining:  # the consumer has stopped: peers wait for this rank's experts
            pass


def _check_fp8(model: Published) -> None:
    instead = 'take weights="model"'
    if stacked := model.names.stacked:
        biased = any(block.experts.has_bias for _, block in expert_blocks(model.engine.module))
        raise ValueError(f"published checkpoints of {model.names.skeleton.config.model_type} hold the experts of a "
                         f"layer in one tensor{', with biases' if biased else ''} ({stacked[0]}), and engines read no "
                         f"block FP8 in this form: {instead}")
    if not model.stacks:
        raise ValueError("the model has no spread experts and no converted classic layers, whose experts would be "
                         f"stored in block FP8: {instead}")
    for stack in model.stacks:
        for role, (N, K) in stack.shapes.items():
            if N % TILE or K % TILE:
                raise ValueError(f"{stack.names[role][0]} has shape {(N, K)}; in block FP8, both must be multiples of "
                                 f"{TILE}: vLLM and SGLang refuse other FFN sizes, and transformers takes the size "
                                 f"of tiles for the axis divided by their number. {instead.capitalize()}")


@dataclass(frozen=True, kw_only=True)
class _Merging(Gather):
    """Gathers weights with their adapters merged.

    Attributes:
        names: of the model's modules.
        step: of the training. It decides how merged weights are rounded.
        share: how much of their update rank 0's first experts keep.
    """

    names: dict[torch.nn.Module, str]
    step: int
    share: KeptShare = field(default_factory=KeptShare)

    def whole(self, name: str, value: torch.Tensor) -> torch.Tensor | None:
        layer = self.adapted.get(name)
        if layer is None or not unmerged_adapters(layer):
            return super().whole(name, value)
        self.meet()
        with deepspeed.zero.GatheredParameters([p for p in layer.parameters() if hasattr(p, "ds_id")]):
            if not self.keep:
                return None
            update = sum(layer.get_delta_weight(adapter).detach().float() for adapter in unmerged_adapters(layer))
            return merge_update(value.detach(), update, self.names[layer], self.step)

    def frozen(self, block: ExpertBlock) -> Iterator[torch.Tensor]:
        return block.experts.frozen.dequantized(_adapters_of(block)) if block.experts.merges else super().frozen(block)

    def layer_experts(self, layer: Any, weights: Iterable[torch.Tensor | None]) -> list[torch.Tensor | None]:
        return super().layer_experts(layer, self._merged(layer, weights))

    def _merged(self, layer: Any, weights: Iterable[torch.Tensor | None]) -> Iterator[torch.Tensor | None]:
        """This rank's w1, w2 and w3 of a block, one at a time."""
        adapters = {} if layer.experts.merges else _of_halves(_adapters_of(layer))
        name = self.names[layer]
        for role, weight in zip(("gate", "down", "up"), weights, strict=True):
            if weight is not None and role in adapters:
                weight = self.unpartitioned(weight)
                seeds = seeds_of([f"{name}.{role}.{i}" for i in experts_of(layer, layer.ep_rank)], self.step,
                                 weight.device)
                before, weight = weight, merge(weight, adapters[role], seeds)
                self.measure(before[:1], weight[:1], adapters[role])
            yield weight

    def measure(self, before_1NK: torch.Tensor, after_1NK: torch.Tensor, adapter: LowRank) -> None:
        """Adds a weight of this rank's first expert of a layer to the share. Reads from the device."""
        if dist.get_rank() == 0:
            update = product(LowRank(adapter.a_ERK[:1], adapter.b_ENR[:1]))
            self.share.add(_plain(before_1NK).float(), _plain(after_1NK).float(), update)


def _parts(model: Published, weights: str, bucket_bytes: int, rank_0_only: bool,
           meet: Callable[[], None]) -> Iterator[Iterable[tuple[str, torch.Tensor]]]:
    """The pairs of `export_weights`, in parts. Only the step from one part to the next is collective."""
    gather = _Merging(keep=not rank_0_only or dist.get_rank() == 0, on_host=False, to_all=not rank_0_only,
                      where="export_weights", meet=meet, adapted=model.adapted, step=model.engine.global_steps,
                      names={module: name for name, module in model.engine.module.named_modules()})
    rounding = Rounding()
    for stack in model.stacks:
        experts = _Experts(stack, gather, weights == "fp8")
        if dist.get_rank() == 0:
            experts.compare(rounding)
        step = min(max(bucket_bytes // experts.bytes_of_one, 1), stack.layer.num_local_experts)
        for first in range(0, stack.layer.num_local_experts, step):
            yield from experts.bucket(slice(first, first + step))
        del experts  # in ZeRO-3, copies
    for pair in model.rest(gather):
        yield pair,
    meet()
    restore_persistent(model.engine)
    if rounding.changed:
        trained = {f"blocks of {stack.recipe.block_size}" if stack.recipe else "unquantized weights"
                   for stack in model.stacks}
        log_on_rank_0(f"mxfp8_moe: experts were exported in tiles of {TILE}x{TILE}, and training multiplies with "
                        f"{' and '.join(sorted(trained))}: SQNR {rounding.sqnr_db:.1f} dB between the two, over the "
                        "first expert of each layer")
    if any(block.experts.merges for _, block in expert_blocks(model.engine.module)):
        log_on_rank_0("mxfp8_moe: adapters were merged into experts, with the values that training computes with")
    if gather.share:
        log_on_rank_0(f"mxfp8_moe: adapters were merged into experts{' in FP8' if weights == 'fp8' else ''}, which "
                        f"keep {gather.share.percent:.1f} % of the update, measured over rank 0's first expert of "
                        "each layer")


class _Experts:
    """The experts of one layer on their way out. `bytes_of_one`: of one expert of each rank."""

    def __init__(self, stack: ExpertStack, gather: _Merging, fp8: bool):
        """Collective in ZeRO-3."""
        self.stack, self.layer, self.gather, self.fp8 = stack, stack.layer, gather, fp8
        self.local = {role: _local(gather, weights) for role, weights in stack.weights.items()}
        self.adapters = _adapters_of(stack.layer)
        if isinstance(self.layer, ExpertBlock) and self.layer.experts.merges:
            self.local = {role: replace(rows, adapters=self.adapters) for role, rows in self.local.items()}
            self.adapters = {}
        elif "gate" in self.local:
            self.adapters = _of_halves(self.adapters)
        width = 1 if fp8 else max((w.frozen if isinstance(w, FrozenRows) else casts.sample(w)).dtype.itemsize
                                  for w in self.local.values())
        self.bytes_of_one = self.layer.ep_size * width * sum(N * K for N, K in stack.shapes.values())

    def bucket(self, part: slice) -> Iterator[Iterable[tuple[str, torch.Tensor]]]:
        """The (name, tensor) of a part of each rank's experts, rank by rank. Collective. Nothing where not kept."""
        sent = []
        for role in self.local:
            w_LNK = self._merged(role, part) if role in self.adapters else self._unmerged(role, part)
            sent += [w_LNK.qdata, w_LNK.scale_bytes] if self.fp8 else [w_LNK]
        for rank, received in enumerate(self.gather.parts(self.layer, sent)):
            columns = []
            for role in self.local:
                names = [self.stack.names[role][number] for number in experts_of(self.layer, rank)[part]]
                for ending, tensor in self._named(received):
                    columns.append(zip([name + ending for name in names], tensor.unbind(), strict=True))
            yield chain.from_iterable(zip(*columns, strict=True))  # no Python between one pair and the next

    def compare(self, rounding: Rounding) -> None:
        """Looks at this rank's first expert: how much of an update it keeps, or how much the FP8 weight differs from
        what training multiplies with, if it may differ."""
        recipe, one = self.stack.recipe, slice(0, 1)
        for role, adapter in self.adapters.items():
            if role in self.local:
                self.gather.measure(self._unmerged(role, one), self._merged(role, one), adapter)
        if not self.fp8 or self.adapters or recipe and recipe.block_size == TILE:
            return
        for role, w_LNK in self.local.items():
            trained = _plain(w_LNK[one])
            if recipe is not None and not isinstance(w_LNK, FrozenRows):
                mx = casts.quantize_weights([trained], recipe.block_size, recipe.scaling_mode)
                trained = casts.dequantize(mx, torch.float32)
            rounding.add(trained.float(), self._unmerged(role, one))

    def _named(self, received: list[torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
        """(ending of the name, tensor) of one weight of several experts. Takes it out of `received`."""
        if not self.fp8:
            return [("", received.pop(0))]
        weight, factors = to_block_fp8(MXTensor(received.pop(0), received.pop(0), TILE, tiled=True))
        return [("", weight), ("_scale_inv", factors)]

    @property
    def _scaling_mode(self) -> str:
        return self.stack.recipe.scaling_mode if self.stack.recipe else "rceil"

    def _unmerged(self, role: str, part: slice) -> torch.Tensor | MXTensor:
        """A weight of some of this rank's experts, in the format of the export."""
        if not self.fp8:
            return self._plain(role, part)
        w_LNK = self.local[role][part]
        return w_LNK if isinstance(w_LNK, MXTensor) else casts.quantize_weights([w_LNK], TILE, self._scaling_mode)

    def _merged(self, role: str, part: slice) -> torch.Tensor | MXTensor:
        """The same with the adapter."""
        w_LNK: Any = self.local[role][part] if self.fp8 else self._plain(role, part)
        adapter = self.adapters[role]
        experts = experts_of(self.layer, self.layer.ep_rank)[part]
        seeds = seeds_of([self.stack.names[role][i] for i in experts], self.gather.step, w_LNK.device)
        adapter = LowRank(adapter.a_ERK[part], adapter.b_ENR[part])
        if self.fp8:
            return merge_as_tiles(w_LNK, adapter, seeds, self._scaling_mode)
        return merge(w_LNK, adapter, seeds)

    def _plain(self, role: str, part: slice) -> torch.Tensor:
        """The weight of some of this rank's experts, dequantized."""
        weights = self.local[role]
        return weights.plain(part) if isinstance(weights, FrozenRows) else _plain(weights[part])


def _plain(w_LNK: casts.Stack) -> torch.Tensor:
    return casts.dequantize(w_LNK, w_LNK.dtype) if isinstance(w_LNK, MXTensor) else casts.joined([w_LNK])


def _local(gather: Gather, weights: Any) -> Any:
    """Weights of an ExpertStack without ZeRO-3's partitions. Collective."""
    if isinstance(weights, FrozenRows):
        return weights
    if isinstance(weights, torch.Tensor):
        return gather.unpartitioned(weights)
    parts = [gather.unpartitioned(one) for one in weights]
    return torch.cat(parts, dim=1) if isinstance(weights, tuple) else parts


def _adapters_of(layer: Any) -> dict[str, LowRank]:
    """Name of a GEMM -> the adapter of this rank's experts of a layer. Collective in ZeRO-3."""
    found = whole_low_rank(layer.experts) if isinstance(layer, ExpertBlock) else {}
    return {gemm: LowRank(low.a_ERK.detach(), low.b_ENR.detach()) for gemm, low in found.items()}


def _of_halves(adapters: dict[str, LowRank]) -> dict[str, LowRank]:
    """Adapters of the upper and the lower rows of the first GEMM's weight, as of "gate" and "up"."""
    if "up" not in adapters:
        return adapters
    a_ERK, (gate_EFR, up_EFR) = adapters["up"].a_ERK, adapters["up"].b_ENR.chunk(2, dim=1)
    return adapters | {"gate": LowRank(a_ERK, gate_EFR), "up": LowRank(a_ERK, up_EFR)}
