# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism as a ParallelStyle, for modules that hold the weights of all experts in 3-D parameters.

    parallelize_module(moe.experts, ep_mesh, MXFP8ExpertParallel())
    y_TN = moe.experts(x_TD, num_tokens_per_expert)

The module's forward takes rows sorted by expert and the number of rows of each expert. Its code does not change. Under
the style it sees only the experts of its rank: their rows as an MXTensor with padded groups, and their weights.
"""

import zlib
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from .compute.arguments import check_int, check_one_of
from .compute.mx import BLOCK_SIZES, SCALING_MODES, ScaleCalculationMode, check_quantizable
from .ep import (
    a2a_combine_hp_fwd_mxfp8_bwd,
    a2a_dispatch_mxfp8_fwd_hp_bwd,
    check_counts,
    check_rows,
    permute_mxfp8_fwd_hp_bwd,
    unpermute_hp_fwd_mxfp8_bwd,
)
from .transport.deadline import all_to_all, check_same_calls, tell_peers_on_error

__all__ = ["MXFP8ExpertParallel"]


class MXFP8ExpertParallel(ParallelStyle):
    """Shards every parameter over dim 0 (experts), and sends rows to their experts and back in MXFP8.

    The module's class becomes a subclass whose forward dispatches, runs the module's own forward and combines. Nothing
    is kept on the module between calls: a layer may run any number of times before backward, and under recomputation.
    Hooks of the module and `fully_shard` see the rows of this rank before dispatch. Apply `fully_shard` afterwards, on
    another axis of the same mesh.

    Args:
        group_size_multiple_of: each expert's group is padded to a multiple of this number of rows.
        block_size: how many values share a scale, 32 or 128.
        scaling_mode: RCEIL or FLOOR, the rounding of scales.
        mxfp8_bwd: True sends the gradient of combine in MXFP8. False sends it unquantized.

    Raises:
        TypeError, ValueError: the block size, scaling mode or multiple is not valid. The module's forward raises them,
            before any collective, for rows or counts that do not fit. The values of counts are checked only on the
            CPU.
        PeerError: raised by the module's forward on every rank whose width, dtype or formats differ from another's.
    """

    def __init__(self, group_size_multiple_of: int = 32, block_size: int = 32,
                 scaling_mode: ScaleCalculationMode = ScaleCalculationMode.RCEIL, mxfp8_bwd: bool = True):
        super().__init__()
        check_one_of("MXFP8ExpertParallel: block_size", block_size, BLOCK_SIZES)
        check_one_of("MXFP8ExpertParallel: scaling_mode", scaling_mode, SCALING_MODES)
        check_int("MXFP8ExpertParallel: group_size_multiple_of", group_size_multiple_of, 1)
        self.group_size_multiple_of = group_size_multiple_of
        self.cast: dict[str, Any] = {"block_size": block_size, "scaling_mode": scaling_mode}
        self.mxfp8_bwd = mxfp8_bwd

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        num_experts = self._check(module, device_mesh)
        distribute_module(module, device_mesh, partition_fn=self._shard)
        style, inner = self, type(module)

        def forward(self, x, num_tokens_per_expert):
            style._check_call(x, num_tokens_per_expert, num_experts)
            return style._run(super(cls, self).forward, x, num_tokens_per_expert, device_mesh)

        cls = type(f"ExpertParallel{inner.__name__}", (inner, ), {"forward": forward, "__module__": inner.__module__})
        module.__class__ = cls
        return module

    @staticmethod
    def _check(module: nn.Module, device_mesh: DeviceMesh) -> int:
        """Raises an error if the style cannot be applied. Returns the number of experts."""
        name = type(module).__name__
        if device_mesh.ndim != 1:
            raise ValueError(f"MXFP8ExpertParallel takes a mesh with one axis, for expert parallelism; got the axes "
                             f"{device_mesh.mesh_dim_names or device_mesh.ndim}: pass mesh['ep']")
        shapes = {key: parameter.shape for key, parameter in module.named_parameters()}
        if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
            raise ValueError(f"{name} is distributed already: apply MXFP8ExpertParallel once, before fully_shard")
        experts = {shape[0] if len(shape) > 1 else None for shape in shapes.values()}
        num_experts = experts.pop() if len(experts) == 1 else None
        if not num_experts or num_experts % device_mesh.size():
            given = ", ".join(f"{key} {list(shape)}" for key, shape in shapes.items())
            raise ValueError(f"every parameter of {name} must be [experts, ...] with the same number of experts, a "
                             f"multiple of the {device_mesh.size()} ranks; got {given or 'none'}")
        return num_experts

    @torch.compiler.disable(reason="reads the counts")
    @tell_peers_on_error
    def _check_call(self, x_TD: torch.Tensor, counts: torch.Tensor, num_experts: int) -> None:
        """Raises an error before the other ranks wait for this one in a collective."""
        check_rows("MXFP8ExpertParallel: input", x_TD)
        check_quantizable(x_TD, **self.cast, name="MXFP8ExpertParallel: input")
        check_counts("MXFP8ExpertParallel", counts, num_experts, "the rows of each expert", x_TD)
        if counts.device.type == "cpu" and counts.sum() != x_TD.shape[0]:
            raise ValueError(f"MXFP8ExpertParallel: num_tokens_per_expert {counts.tolist()} sum to "
                             f"{int(counts.sum())}, but the input has {x_TD.shape[0]} rows")

    @staticmethod
    def _shard(name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        for key, parameter in module.named_parameters(recurse=False):
            shard = distribute_tensor(parameter, device_mesh, [Shard(0)])
            module.register_parameter(key, nn.Parameter(shard, requires_grad=parameter.requires_grad))

    def _run(self, experts, x_TD: torch.Tensor, num_tokens_per_expert: torch.Tensor,
             device_mesh: DeviceMesh) -> torch.Tensor:
        """Dispatch, the module's own forward, combine."""
        group, ranks = device_mesh.get_group(), device_mesh.size()
        rows = f"rows [., {x_TD.shape[1]}] of {x_TD.dtype}, {self.cast}, mxfp8_bwd={bool(self.mxfp8_bwd)}"
        output_splits, input_splits, arriving = self._exchange_counts(num_tokens_per_expert, group, ranks, rows)
        mx_RD = a2a_dispatch_mxfp8_fwd_hp_bwd(x_TD, output_splits, input_splits, group.group_name, **self.cast)
        shape, rows_PD, indices_P, sizes_E, _ = permute_mxfp8_fwd_hp_bwd(
            mx_RD, arriving, ranks, arriving.shape[0] // ranks, group_size_multiple_of=self.group_size_multiple_of)
        out_RN = unpermute_hp_fwd_mxfp8_bwd(experts(rows_PD, sizes_E), indices_P, shape)
        return a2a_combine_hp_fwd_mxfp8_bwd(out_RN, input_splits, output_splits, group.group_name, **self.cast,
                                            mxfp8_bwd=self.mxfp8_bwd)

    @staticmethod
    @torch.compiler.disable(reason="reads the splits on the host")
    @torch.no_grad()
    def _exchange_counts(counts: torch.Tensor, group, ranks: int, rows: str) -> tuple:
        """Exchanges the counts of rows. Here the host waits for the GPU, once a call.

        Args:
            rows: a text, not data. It describes the rows: everything about them that must be equal on all ranks.

        Returns:
            output_splits and input_splits, lists of ints.
            The rows that arrive from each rank for each local expert: int [ranks * local experts], rank-major.
        """
        counts_WE = counts.long().view(ranks, -1)  # ranks may have been given different integer dtypes
        signature_W = counts_WE.new_full((ranks, 1), zlib.crc32(rows.encode()))
        arriving, ones = counts_WE.new_empty(ranks, counts_WE.shape[1] + 1), (1, ) * ranks
        all_to_all(arriving, torch.cat([signature_W, counts_WE], dim=1), ones, ones, group, "counts")
        arriving_WE = arriving[:, 1:]
        signatures, *splits = torch.stack([arriving[:, 0], arriving_WE.sum(1), counts_WE.sum(1)]).tolist()
        check_same_calls(group, signatures, f"MXFP8ExpertParallel with {rows}")
        return *splits, arriving_WE.reshape(-1)
