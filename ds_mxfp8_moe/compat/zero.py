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

from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from typing import Any

import deepspeed.comm as dist
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.torch_autocast import is_autocast_initialized
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer, GradPartitionBufferGroup
from torch.autograd.graph import Node

from ..compute.sums import Sum
from .sums import Sums
from .zero_batching import Batching, Parts, Place, split
from .zero_checks import BatchedChecks, share_masters

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
    share_masters(optimizer, isinstance(optimizer, BatchedChecks))
    if on and optimizer.cpu_offload:
        return "ZeRO-Offload is on, whose gradients leave the device one by one"
    if isinstance(optimizer, BatchedGradients):
        optimizer.mxfp8_batching = Batching(
            optimizer.ipg_buckets[optimizer.dtype], optimizer.partition_gradients or optimizer.overlap_comm,
            dist.get_world_size(group=optimizer.dp_process_group) if optimizer.gradient_average else 1,
            Sums(optimizer))
    return None


def _copies_alike(optimizer: DeepSpeedZeroOptimizer) -> bool:
    """Whether all gradients go through one bucket of their own dtype. They do unless the config says otherwise."""
    return (optimizer.contiguous_gradients and optimizer.reduce_scatter and not optimizer.use_grad_accum_attribute
            and list(optimizer.ipg_buckets) == [optimizer.dtype] and optimizer.sequence_parallel_size == 1
            and not is_autocast_initialized() and optimizer.autoep_folding_tp_group is None
            and "muon" not in type(optimizer.optimizer).__name__.lower())


class BatchedGradients(BatchedChecks):
    """Also copies many gradients at once into the bucket, and from there to the sums of partitions.

    A gradient waits in `parameter.grad` until the bucket is full, or AT_ONCE elements wait. It is averaged in the
    bucket as in DeepSpeed, and then added to the sum of its partition. DeepSpeed keeps one sum for a partition where
    it accumulates in float32. In other dtypes it keeps one for each parameter, and joins them in the step.
    """

    mxfp8_batching: Batching

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
            torch._foreach_copy_(split(room, bucket.grads), bucket.grads)
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

    def _place(self, i: int, index: int, param_id: int) -> Place:
        place = self.mxfp8_batching.places.get(param_id)
        if place is None:
            place = self.mxfp8_batching.places[param_id] = self._find_place(i, index, param_id)
        return place

    def _find_place(self, i: int, index: int, param_id: int) -> Place:
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
        return Place(process_group, pieces, own, alone)

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

    def _average(self, gradients: torch.Tensor, places: list[Place]) -> None:
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

    def _add_to_sums(self, gradients: torch.Tensor, places: list[Place]) -> None:
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
        return Parts(flat, batching.likes[i], batching.specs[i])

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
