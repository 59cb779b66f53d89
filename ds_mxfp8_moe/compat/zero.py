# SPDX-License-Identifier: Apache-2.0
"""Lets ZeRO-1 and 2 handle the gradients of many parameters at once.

DeepSpeed copies, averages, checks and measures the gradient of each parameter by itself. A classic MoE model has three
parameters an expert, often a thousand and more, and the host spends its step on them while the device waits. Here a
few calls handle many gradients. Everything else is DeepSpeed's: parameters, autograd and its hooks, the order of
gradients in a bucket, what is communicated, the partitions, the optimizer and its checkpoints. All results are equal
to DeepSpeed's bit for bit.

The way of a gradient, in DeepSpeed's names:

    parameter.grad -> bucket (`ipg_buckets`) -> averaged over ranks -> sum of this rank's partition (`flat_partition`)
                   -> in float32, unscaled and clipped -> optimizer

A gradient that no other rank has a part of needs no communication. It goes from `parameter.grad` to the sum at once,
or is there already (sums.py).
"""

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import deepspeed.comm as dist
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.constants import PIPE_REPLICATED
from deepspeed.runtime.torch_autocast import is_autocast_initialized
from deepspeed.runtime.utils import is_model_parallel_parameter, mask_nan_or_inf_with_val_inplace
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer, GradPartitionBufferGroup
from deepspeed.runtime.zero.utils import get_norm_dtype
from deepspeed.utils import lazy_init_hp_params_optimizer_state
from torch.autograd.graph import Node
from torch.distributed import ProcessGroup
from torch.nn.utils import get_total_norm

from ..compute.sums import Sum
from .sums import Sums

AT_ONCE = 2**26  # elements of one call. More need more memory. Fewer leave the device waiting for the host's next call


def batch_gradients(optimizer: Any, on: bool) -> str | None:
    """Lets an engine's optimizer handle many gradients at once. If `on` is false, it is DeepSpeed's own again.

    Returns:
        Why this optimizer of ZeRO-1 or 2 cannot do this. None if it can, and for other optimizers, which are left
        alone.
    """
    if type(optimizer) not in (DeepSpeedZeroOptimizer, BatchedChecks, BatchedGradients):
        return None
    if isinstance(optimizer, BatchedGradients):
        optimizer.mxfp8_batching.sums.leave(optimizer)
    vars(optimizer).pop("mxfp8_batching", None)
    kind = BatchedGradients if _copies_alike(optimizer) else BatchedChecks
    optimizer.__class__ = kind if on and not optimizer.cpu_offload else DeepSpeedZeroOptimizer
    _share_masters(optimizer, isinstance(optimizer, BatchedChecks))
    if on and optimizer.cpu_offload:
        return "ZeRO-Offload is on, whose gradients leave the device one by one"
    if isinstance(optimizer, BatchedGradients):
        optimizer.mxfp8_batching = _Batching(
            optimizer.ipg_buckets[optimizer.dtype], optimizer.partition_gradients or optimizer.overlap_comm,
            dist.get_world_size(group=optimizer.dp_process_group) if optimizer.gradient_average else 1,
            Sums(optimizer))
    return None


def _copies_alike(optimizer: DeepSpeedZeroOptimizer) -> bool:
    """Whether all gradients go through one bucket of their own dtype. They do unless the config says otherwise."""
    return (optimizer.contiguous_gradients and optimizer.reduce_scatter and not optimizer.zenflow
            and not optimizer.use_grad_accum_attribute and list(optimizer.ipg_buckets) == [optimizer.dtype]
            and optimizer.sequence_parallel_size == 1 and not is_autocast_initialized()
            and optimizer.autoep_folding_tp_group is None
            and "muon" not in type(optimizer.optimizer).__name__.lower())


def _share_masters(optimizer: DeepSpeedZeroOptimizer, on: bool) -> None:
    """Masters in the weights' own dtype are the weights of this rank's partition: one tensor holds both.

    After its step, DeepSpeed copies the master into the weights. That copies nothing where they are the same tensor.
    """
    changed = False
    for master, partitions, group in zip(optimizer.single_partition_of_fp32_groups,
                                         optimizer.parallel_partitioned_bit16_groups, optimizer.real_dp_process_group,
                                         strict=True):
        weights = partitions[dist.get_rank(group=group)]
        if master.dtype == weights.dtype and (master.data_ptr() == weights.data_ptr()) != on:
            master.data = weights.detach() if on else weights.detach().clone()
            changed = True
    if changed:  # DeepSpeed gives access to the masters of single parameters, and to their moments once they are there
        optimizer._link_all_hp_params()
        if states := optimizer.optimizer.state:
            for parameters, master in zip(optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups,
                                          strict=True):
                lazy_init_hp_params_optimizer_state(parameters, master, states)


class BatchedChecks(DeepSpeedZeroOptimizer):
    """Checks all gradients for overflow at once, and computes their norms at once. Skips loops that change nothing."""

    def reload_states(self, *args, **kwargs) -> None:
        """As DeepSpeed's."""
        super().reload_states(*args, **kwargs)
        _share_masters(self, on=True)

    def _get_groups_without_padding(self, groups_with_padding: list) -> list:
        """What a checkpoint has of the masters. A file that holds a part of the weights would hold all of them."""
        return [part.clone() if 2 * part.nbytes <= part.untyped_storage().nbytes() else part
                for part in super()._get_groups_without_padding(groups_with_padding)]

    def should_refresh_expected_hook_count(self) -> bool:
        """Whether DeepSpeed now counts the parameters that get gradients in this backward pass.

        By the count it knows when the pass has ended. In a pass by engine.backward, autograd says so, and nothing
        reads the count: then DeepSpeed counts nothing.
        """
        return self._backward_active_depth == 0 and super().should_refresh_expected_hook_count()

    def has_overflow_partitioned_grads_serial(self) -> torch.Tensor:
        """Whether any gradient of this rank's partitions holds a NaN or an Inf: bool [1], on the device."""
        gradients = [g for i in range(len(self.bit16_groups)) for g in _whole(self.averaged_gradients[i])
                     if g is not None and g.numel()]
        if not gradients:
            return torch.zeros(1, dtype=torch.bool, device=get_accelerator().current_device_name())
        return get_total_norm(gradients, math.inf).isfinite().logical_not().view(1)

    def get_grad_norm_direct(self, gradients: list, params: list, norm_type: float = 2) -> torch.Tensor:
        """As DeepSpeed's. Each gradient's norm is a float64, as there, and their sum is rounded to float32."""
        if norm_type != 2:
            return super().get_grad_norm_direct(gradients, params, norm_type)
        parts = (g for g in gradients if not getattr(g, "_mxfp8_padding", False))
        counted = [g.detach() for g, p in zip(parts, params, strict=False)
                   if not (hasattr(p, PIPE_REPLICATED) and p.ds_pipe_replicated)
                   and (self.model_parallel_rank == 0 or is_model_parallel_parameter(p))]
        if counted:
            norms = torch._foreach_norm(counted, 2, dtype=get_norm_dtype())
            total = torch.stack(norms).pow(2).sum().float()
        else:
            total = torch.tensor(0.0, dtype=torch.float32, device=self.device)
        dist.all_reduce(total, op=dist.ReduceOp.SUM, group=self.dp_process_group)
        self._model_parallel_all_reduce(tensor=total, op=dist.ReduceOp.SUM)
        total = total.pow(1. / norm_type)
        mask_nan_or_inf_with_val_inplace(total, device=self.device)
        return total

    def _update_model_bit16_weights(self, group_index: int) -> None:
        """Points parameters at their places in the flat weights, unless all of them point there."""
        flat = self.bit16_groups_flat[group_index]
        start, size = flat.data_ptr(), flat.element_size()
        if any(p.data_ptr() != start + offset * size or p.shape != meta.shape or not p.is_contiguous()
               for p, meta, offset in zip(self.round_robin_bit16_groups[group_index],
                                          self.round_robin_bit16_meta[group_index],
                                          self.round_robin_bit16_offsets[group_index], strict=True)):
            super()._update_model_bit16_weights(group_index)


def _whole(gradients: list) -> Sequence[torch.Tensor]:
    """The gradients of a group. If they are parts of one tensor, large pieces of that tensor instead."""
    whole = getattr(gradients, "flat_partition", None)
    return gradients if whole is None else whole.split(2**30)  # kernels may count the elements of a tensor in 32 bits


def _split(flat: torch.Tensor, likes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The parts of a flat tensor that have the shapes of `likes`, one after the other."""
    parts = flat.split([like.numel() for like in likes])
    return [part.view(like.shape) for part, like in zip(parts, likes, strict=True)]


class _Place(NamedTuple):
    """Where the gradient of a parameter goes.

    Attributes:
        process_group: the ranks that it is averaged over.
        pieces: (rank of that group, elements) for each partition that it touches, in their order in the gradient.
        own: (start in the gradient, start in this rank's partition, elements), or None if this rank has no piece.
        alone: whether this rank is the only one of its group, and sums are in the gradients' dtype.
    """

    process_group: ProcessGroup
    pieces: list[tuple[int, int]]
    own: tuple[int, int, int] | None
    alone: bool


class _Batching:
    """What BatchedGradients knows beside DeepSpeed's attributes.

    Attributes:
        waiting: parameters whose gradients are not in the bucket yet. `bucket.grads` holds the gradients. The bucket
            counts their elements already.
        elements: how many elements these gradients have.
        alone: parameters that no other rank has, and whose gradients are not in the sums yet, with their keys.
        alone_elements: how many elements these gradients have.
        in_hooks: gradients come from autograd's hooks, which may run on different streams. If false, they come after
            the backward pass.
        divisor: by which sums over ranks become averages.
        stream: the one that computed the gradients that wait. None: the current one.
        places: parameter id -> its place.
        fresh: groups whose sum began since the last epilogue: in this pass (ZeRO-2), or in this step (ZeRO-1).
            Gradients are copied into such a sum, and added to others.
        specs, likes: for each group, DeepSpeed's description of the parts of its sum, and tensors of their shapes.
        norm: of all gradients in this step, as DeepSpeed computed it.
        scaled: gradients that are unscaled and clipped already.
        sums: which gradients are in the sums already.
    """

    def __init__(self, bucket: Any, in_hooks: bool, divisor: int, sums: Sums):
        self.bucket, self.in_hooks, self.divisor, self.sums = bucket, in_hooks, divisor, sums
        self.waiting: list[torch.nn.Parameter] = []
        self.elements = 0
        self.alone: list[tuple[torch.nn.Parameter, tuple]] = []
        self.alone_elements = 0
        self.stream: Any = None
        self.places: dict[int, _Place] = {}
        self.fresh: set[int] = set()
        self.specs: dict[int, list] = {}
        self.likes: dict[int, list] = {}
        self.norm: torch.Tensor | None = None
        self.scaled: torch.Tensor | None = None


class _Parts(GradPartitionBufferGroup):
    """The sum of a group's gradients in this rank's partition, and its parts, one for each parameter."""

    def __init__(self, flat_partition: torch.Tensor, likes: list, specs: list):
        list.__init__(self, _split(flat_partition, likes))
        self.flat_partition, self._view_specs = flat_partition, specs
        for part, (_, _, is_padding) in zip(self, specs, strict=True):
            if is_padding:
                part._mxfp8_padding = True


class BatchedGradients(BatchedChecks):
    """Also copies many gradients at once into the bucket, and from there to the sums of partitions.

    A gradient waits in `parameter.grad` until the bucket is full, or AT_ONCE elements wait. It is averaged in the
    bucket as in DeepSpeed, and then added to the sum of its partition. DeepSpeed keeps one sum for a partition where
    it accumulates in float32. In other dtypes it keeps one for each parameter, and joins them in the step.
    """

    mxfp8_batching: _Batching

    def reduce_independent_p_g_buckets_and_remove_grads(self, param: torch.nn.Parameter, i: int) -> None:
        """Appends the gradient of a parameter of group i to the bucket, which is averaged first if it is full."""
        batching, size = self.mxfp8_batching, param.numel()
        if size == 0:
            return
        bucket, key = batching.bucket, (i, param.param_idx_in_group, self.param_id[id(param)])
        alone = self._place(*key).alone
        if alone and batching.sums.takes(self, param, key):
            return
        if not alone and bucket.elements + size > self.reduce_bucket_size:
            self.reduce_ipg_grads()
            if self.overlap_comm:
                bucket.index = 1 - bucket.index
        if not getattr(param, "ds_grad_is_ready", True):
            return
        if batching.in_hooks and not get_accelerator().resolves_data_dependency():
            stream = get_accelerator().current_stream()
            if stream != batching.stream:
                self._fill_bucket()
                self._add_alone()
                batching.stream = stream
        if alone:
            batching.alone.append((param, key))
            batching.alone_elements += size
            if batching.alone_elements > AT_ONCE:
                self._add_alone()
            return
        if batching.elements + size > AT_ONCE:
            self._fill_bucket()
        bucket.grads.append(param.grad)
        bucket.params.append(key)
        bucket.elements += size
        batching.waiting.append(param)
        batching.elements += size

    def sum_of(self, param: torch.nn.Parameter, node: Node) -> Sum | None:
        """Where the gradient of a parameter goes that backward computes now. None: into memory of its own."""
        return self.mxfp8_batching.sums.sum_of(self, param, node)

    def _fill_bucket(self) -> None:
        """Copies the gradients that wait into the bucket, on the stream that computed them, and lets go of them."""
        batching = self.mxfp8_batching
        if not batching.waiting:
            return
        bucket = batching.bucket
        with torch.no_grad(), get_accelerator().stream(batching.stream):
            room = bucket.buffer[bucket.index].narrow(0, bucket.elements - batching.elements, batching.elements)
            torch._foreach_copy_(_split(room, bucket.grads), bucket.grads)
        if batching.stream is not None:
            bucket.copy_streams.add(batching.stream)
        self._let_go()

    def _let_go(self) -> None:
        """Frees the gradients that wait."""
        batching = self.mxfp8_batching
        batching.bucket.grads.clear()
        for param in batching.waiting:
            param.grad = None
        batching.waiting.clear()
        batching.elements = 0

    def reduce_ipg_grads(self, comm_dtype: torch.dtype | None = None) -> None:
        """Averages the gradients in the bucket, adds them to the sums of the partitions, and empties the bucket."""
        batching, bucket = self.mxfp8_batching, self.mxfp8_batching.bucket
        in_place = bucket.elements > self.reduce_bucket_size  # one gradient, which is averaged where it is
        if in_place:
            gradients = bucket.grads[0].view(-1)
            if batching.stream is not None:
                bucket.copy_streams.add(batching.stream)
        elif bucket.elements:
            self._fill_bucket()
            gradients = bucket.buffer[bucket.index].narrow(0, 0, bucket.elements)
        else:
            return
        places = [self._place(*key) for key in bucket.params]
        stream = self._wait_for_gradients()
        with torch.no_grad(), get_accelerator().stream(stream):
            self._average(gradients, places)
            self._add_to_sums(gradients, places)
        if in_place and stream is not None:
            gradients.record_stream(stream)  # it is let go of before that stream has read it
        self._mark_reduced(bucket.params)
        self._let_go()
        bucket.clear()

    def _add_alone(self) -> None:
        """Adds gradients that no other rank has to the sums of the partitions, or begins the sums with them."""
        batching = self.mxfp8_batching
        alone, batching.alone, batching.alone_elements = batching.alone, [], 0
        if not alone:
            return
        if batching.stream is not None:
            batching.bucket.copy_streams.add(batching.stream)
        stream = self._wait_for_gradients()
        with torch.no_grad(), get_accelerator().stream(stream):
            gradients = [param.grad.reshape(-1) for param, _ in alone]
            if (divisor := batching.divisor) != 1:
                torch._foreach_div_(gradients, divisor)
            for i, run in groupby(zip(alone, gradients, strict=True), lambda item: item[0][1][0]):
                keys, sources = zip(*((key, gradient) for (_, key), gradient in run), strict=True)
                flat = self._sum(i).flat_partition
                goals = [self._place(*key).own[1:] for key in keys]
                sums = [flat.narrow(0, goal, elements) for goal, elements in goals]
                (torch._foreach_copy_ if i in batching.fresh else torch._foreach_add_)(sums, sources)
        elsewhere = stream is not None and (self.overlap_comm or batching.stream not in (None, stream))
        for param, _ in alone:
            if elsewhere:
                param.grad.record_stream(stream)  # it is let go of before that stream has read it
            param.grad = None
        self._mark_reduced([key for _, key in alone])

    def _mark_reduced(self, keys: list[tuple]) -> None:
        for _, _, param_id in keys:
            assert not self.params_already_reduced[param_id], (
                f"The gradient of parameter {self.param_names[self.param_dict[param_id]]} was computed twice in one "
                "backward pass, and was averaged after the first time. ZeRO does not support this")
            self.params_already_reduced[param_id] = True

    def _place(self, i: int, index: int, param_id: int) -> _Place:
        place = self.mxfp8_batching.places.get(param_id)
        if place is None:
            place = self.mxfp8_batching.places[param_id] = self._find_place(i, index, param_id)
        return place

    def _find_place(self, i: int, index: int, param_id: int) -> _Place:
        param = self.bit16_groups[i][index]
        is_expert = is_moe_param(param)
        process_group = self.expert_dp_process_group[param.group_name] if is_expert else self.dp_process_group
        starts = sorted((int(self.grad_start_offset[i][rank][param_id]), rank)
                        for rank in self.param_to_partition_ids[i][param_id])
        ends = [start for start, _ in starts[1:]] + [param.numel()]
        pieces = [(rank, end - start) for (start, rank), end in zip(starts, ends, strict=True)]
        own, mine = None, dist.get_rank(group=self.real_dp_process_group[i])
        for (start, rank), (_, elements) in zip(starts, pieces, strict=True):
            if rank == mine:
                own = start, int(self.grad_partition_insertion_offset[i][rank][param_id]), elements
        alone = dist.get_world_size(group=process_group) == 1 and self.gradient_accumulation_dtype == self.dtype
        return _Place(process_group, pieces, own, alone)

    def _wait_for_gradients(self) -> Any:
        """The stream for averages, which waits for the copies into the bucket. None: the device has no streams."""
        accelerator = get_accelerator()
        current = accelerator.current_stream()
        stream = self.reduction_stream if self.overlap_comm else current
        if not accelerator.resolves_data_dependency():
            for producer in self.mxfp8_batching.bucket.copy_streams or {current}:
                if producer != stream:
                    stream.wait_stream(producer)
            if self.overlap_comm:
                current.wait_stream(stream)
        return stream

    def _average(self, gradients: torch.Tensor, places: list[_Place]) -> None:
        """Averages over ranks, in place. Only the rank whose partition holds a piece gets its average."""
        if (divisor := self.mxfp8_batching.divisor) != 1:
            gradients.div_(divisor)
        pieces = [(place.process_group, rank, elements) for place in places for rank, elements in place.pieces]
        calls: dict[tuple, list] = {}
        start = 0
        for (process_group, rank), run in groupby(pieces, itemgetter(0, 1)):  # pieces of one rank that touch
            elements = sum(size for *_, size in run)
            key = (process_group, None if self.use_multi_rank_bucket_allreduce else rank)
            calls.setdefault(key, []).append((rank, gradients.narrow(0, start, elements)))
            start += elements
        for (process_group, rank), parts in calls.items():
            arguments = dict(numel_per_bucket=self.reduce_bucket_size, divide=False, process_group=process_group)
            if rank is None:
                self.allreduce_and_scatter(parts, self.communication_data_type, **arguments)
            else:
                self.allreduce_no_retain([part for _, part in parts], self.communication_data_type, rank=rank,
                                         **arguments)

    def _add_to_sums(self, gradients: torch.Tensor, places: list[_Place]) -> None:
        """Adds averaged gradients to the sums of the partitions that they are in, or begins the sums with them."""
        # Group -> [start in gradients, start in the sum, elements]. Pieces that touch in both are one run.
        runs: dict[int, list] = {}
        start = 0
        for (i, _, _), place in zip(self.mxfp8_batching.bucket.params, places, strict=True):
            if place.own is not None:
                of_group, (skipped, goal, elements) = runs.setdefault(i, []), place.own
                begin = start + skipped
                if (of_group and of_group[-1][0] + of_group[-1][2] == begin
                        and of_group[-1][1] + of_group[-1][2] == goal):
                    of_group[-1][2] += elements
                else:
                    of_group.append([begin, goal, elements])
            start += sum(elements for _, elements in place.pieces)
        for i, of_group in runs.items():
            flat = self._sum(i).flat_partition
            copies = i in self.mxfp8_batching.fresh
            for first, last, part in _portions(of_group):
                same = gradients.narrow(0, first, last - first).to(flat.dtype)
                sources = [same.narrow(0, begin - first, elements) for begin, _, elements in part]
                sums = [flat.narrow(0, goal, elements) for _, goal, elements in part]
                (torch._foreach_copy_ if copies else torch._foreach_add_)(sums, sources)

    def _sum(self, i: int) -> GradPartitionBufferGroup:
        """The sum of group i's gradients since the last step, where DeepSpeed keeps it."""
        if self._deepspeed_keeps_sum(i):
            return self._get_compact_grad_partition_buffer(i)
        if self.all_grad_tensors.get(i) is None:
            self.all_grad_tensors[i] = self._zeros(i)
            self.mxfp8_batching.fresh.add(i)
        return self.all_grad_tensors[i]

    def _deepspeed_keeps_sum(self, i: int) -> bool:
        """Whether DeepSpeed itself keeps one sum for the partition of group i."""
        return super()._use_compact_grad_partition_buffer(i)

    def _use_compact_grad_partition_buffer(self, group_idx: int) -> bool:
        """True: DeepSpeed takes the sum from `_build_compact_grad_partition_buffer`, whatever its dtype."""
        return True

    def _build_compact_grad_partition_buffer(self, group_idx: int) -> GradPartitionBufferGroup:
        found, self.all_grad_tensors[group_idx] = self.all_grad_tensors.get(group_idx), None
        return self._zeros(group_idx) if found is None else found

    def _zeros(self, i: int) -> GradPartitionBufferGroup:
        batching = self.mxfp8_batching
        if i not in batching.specs:
            parts = super()._build_compact_grad_partition_buffer(i)
            batching.specs[i] = parts._view_specs
            batching.likes[i] = [torch.empty(part.shape, device="meta") for part in parts]
            return parts
        flat = torch.zeros(int(self.partition_size[i]), dtype=self.gradient_accumulation_dtype,
                           device=get_accelerator().current_device_name())
        return _Parts(flat, batching.likes[i], batching.specs[i])

    def independent_gradient_partition_epilogue(self) -> None:
        """Ends a backward pass."""
        self.mxfp8_batching.sums.end(self)
        self._add_alone()
        if self.is_gradient_accumulation_boundary():
            for i in range(len(self.bit16_groups)):
                # Drops a sum that was complete before, but that no step has used. DeepSpeed does so too, unless it
                # keeps one sum for the group itself.
                if not self._deepspeed_keeps_sum(i):
                    self.averaged_gradients[i] = None
        super().independent_gradient_partition_epilogue()
        self.mxfp8_batching.fresh.clear()
        self.mxfp8_batching.sums.clear()

    def scaled_global_norm(self, norm_type: float = 2) -> torch.Tensor:
        """As DeepSpeed's, and remembers it."""
        self.mxfp8_batching.norm = super().scaled_global_norm(norm_type)
        return self.mxfp8_batching.norm

    def _get_preflattened_grad_partition(self, group_idx: int) -> torch.Tensor | None:
        """The sum of a group's gradients. If the step would convert it to float32, it is converted, unscaled and
        clipped here in one pass over memory."""
        flat = super()._get_preflattened_grad_partition(group_idx)
        if (flat is None or flat.dtype == torch.float32
                or self.single_partition_of_fp32_groups[group_idx].dtype != torch.float32):
            return flat
        factor = torch.ones(1, device=flat.device)
        super().unscale_and_clip_grads([factor], self.mxfp8_batching.norm if self.compute_grad_norm else None)
        self.mxfp8_batching.scaled = flat * factor  # in float32, as the factor is
        return self.mxfp8_batching.scaled

    def unscale_and_clip_grads(self, grad_groups_flat: list, total_norm: Any) -> None:
        """As DeepSpeed's, but not a second time."""
        scaled, self.mxfp8_batching.scaled = self.mxfp8_batching.scaled, None
        if scaled is None or grad_groups_flat[0] is not scaled:
            super().unscale_and_clip_grads(grad_groups_flat, total_norm)


def _portions(runs: list) -> Iterator[tuple[int, int, list]]:
    """Cuts runs of [start, goal, elements] into portions of at most AT_ONCE elements, or of one longer run.

    Yields:
        (start of the first run, end of the last one, the portion)
    """
    portion: list = []
    for run in runs:
        if portion and run[0] + run[2] - portion[0][0] > AT_ONCE:
            yield portion[0][0], portion[-1][0] + portion[-1][2], portion
            portion = []
        portion.append(run)
    if portion:
        yield portion[0][0], portion[-1][0] + portion[-1][2], portion
