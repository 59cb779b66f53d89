# SPDX-License-Identifier: Apache-2.0
"""A Mixture-of-Experts layer with MXFP8 expert parallelism, compared with a bf16 loop over experts.

    torchrun --nproc-per-node 2 compare.py                    # experts over 2 ranks
    torchrun --nproc-per-node 4 compare.py --dp 2             # and fully_shard over the other axis of a 2 x 2 mesh
    torchrun --nproc-per-node 2 compare.py --style own        # the same with a ParallelStyle written here

Runs over NCCL if there is a GPU for each rank, else on CPUs over gloo. Every rank has its own tokens. Both layers
start from the same weights. Prints the SQNR of output and gradients, and fails if one is below its bar.

T: tokens of a rank, D: model size, R = T * top_k: routed rows.
"""

import argparse
import math
import os
import shlex
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from ds_mxfp8_moe.ep import (
    a2a_combine_hp_fwd_mxfp8_bwd,
    a2a_dispatch_mxfp8_fwd_hp_bwd,
    permute_mxfp8_fwd_hp_bwd,
    unpermute_hp_fwd_mxfp8_bwd,
)
from ds_mxfp8_moe.parallel_style import MXFP8ExpertParallel
from ds_mxfp8_moe.scaled_grouped_mm import _to_mxfp8_then_scaled_grouped_mm

OWN_BLOCK_SIZE = 32  # the default of the building blocks
# dB of a SwiGLU layer in MXFP8 against bf16 on normal inputs. The router's bar is lower: its gradient comes from
# differences between experts' outputs, and each output has its own noise.
BARS = {"output": 23.0, "input gradient": 22.5, "router": 20.0, "w1": 22.5, "w2": 22.5, "w3": 22.5}


class GroupedExperts(nn.Module):
    """SwiGLU experts in three 3-D weights. Takes rows sorted by expert, and the number of rows of each expert."""

    def __init__(self, experts: int, dim: int, hidden: int):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(experts, hidden, dim) / math.sqrt(dim))
        self.w2 = nn.Parameter(torch.randn(experts, dim, hidden) / math.sqrt(hidden))
        self.w3 = nn.Parameter(torch.randn(experts, hidden, dim) / math.sqrt(dim))

    def weights(self) -> list:
        return [w.to_local() if isinstance(w, DTensor) else w for w in (self.w1, self.w2, self.w3)]

    def forward(self, x_RD: torch.Tensor, rows_E: torch.Tensor) -> torch.Tensor:
        w1, w2, w3 = self.weights()
        ends_E = rows_E.cumsum(0, dtype=torch.int32)

        def multiply(x, w):
            return _to_mxfp8_then_scaled_grouped_mm(x, w.transpose(-2, -1), offs=ends_E, wgrad_with_hp=True)

        return multiply(F.silu(multiply(x_RD, w1)) * multiply(x_RD, w3), w2).type_as(x_RD)


class LoopExperts(GroupedExperts):
    """The same in bf16, one expert after the other."""

    def forward(self, x_RD: torch.Tensor, rows_E: torch.Tensor) -> torch.Tensor:
        parts = []
        for x, w1, w2, w3 in zip(x_RD.split(rows_E.tolist()), *self.weights(), strict=True):
            parts.append((F.silu(x @ w1.t()) * (x @ w3.t())) @ w2.t())
        return torch.cat(parts)


class MoE(nn.Module):
    """Top-k routing around the experts. Routing weights are applied after combine."""

    def __init__(self, experts: GroupedExperts, num_experts: int, dim: int, top_k: int):
        super().__init__()
        self.router = nn.Linear(dim, num_experts, bias=False)
        self.experts, self.num_experts, self.top_k = experts, num_experts, top_k

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        weight_TK, expert_TK = self.router(x_TD).float().softmax(-1).topk(self.top_k)
        order_R = expert_TK.flatten().argsort(stable=True)
        token_R = order_R // self.top_k
        rows_E = torch.bincount(expert_TK.flatten(), minlength=self.num_experts)
        y_RD = self.experts(x_TD[token_R], rows_E)
        y_RD = y_RD.float() * weight_TK.flatten()[order_R].unsqueeze(1)
        return torch.zeros_like(x_TD, dtype=torch.float32).index_add(0, token_R, y_RD).type_as(x_TD)


class OwnExpertParallel(ParallelStyle):
    """The four building blocks in a ParallelStyle written here, as hooks around the module's forward.

    Between dispatch and combine, the plan is on a stack on the module. This works for calls that nest or follow each
    other, but not after a forward that failed halfway. MXFP8ExpertParallel keeps the plan in the call instead.
    """

    def _apply(self, module, device_mesh):
        module.plans = []
        return distribute_module(module, device_mesh, self.shard, self.dispatch, self.combine)

    def shard(self, name, module, mesh):
        for key, parameter in module.named_parameters(recurse=False):
            module.register_parameter(key, nn.Parameter(distribute_tensor(parameter, mesh, [Shard(0)])))

    def dispatch(self, module, inputs, mesh):
        x_RD, rows_E = inputs
        group, ranks = mesh.get_group(), mesh.size()
        arriving = torch.empty_like(rows_E)
        dist.all_to_all_single(arriving, rows_E, group=group)
        arrive, send = torch.stack([arriving, rows_E]).view(2, ranks, -1).sum(2).tolist()
        mx = a2a_dispatch_mxfp8_fwd_hp_bwd(x_RD, arrive, send, group_name=group.group_name)
        shape, rows, indices, sizes, _ = permute_mxfp8_fwd_hp_bwd(mx, arriving, ranks, len(arriving) // ranks)
        module.plans.append((arrive, send, indices, shape))
        return rows, sizes

    def combine(self, module, out, mesh):
        arrive, send, indices, shape = module.plans.pop()
        back = unpermute_hp_fwd_mxfp8_bwd(out, indices, shape)
        return a2a_combine_hp_fwd_mxfp8_bwd(back, send, arrive, group_name=mesh.get_group().group_name)


def step(model: nn.Module, x_TD: torch.Tensor, grad_TD: torch.Tensor) -> dict:
    """One forward and backward. Returns the output, the input gradient and the gradients of the weights."""
    x_TD = x_TD.clone().requires_grad_()
    y_TD = model(x_TD)
    y_TD.backward(grad_TD)
    result = {"output": y_TD.detach(), "input gradient": x_TD.grad}
    for name, parameter in model.named_parameters():
        result[name.split(".")[-2] if "router" in name else name.split(".")[-1]] = parameter.grad
    return result


def db(reference: torch.Tensor, actual: torch.Tensor) -> float:
    """SQNR over the values of all ranks together."""
    sums = torch.stack([reference.float().square().sum(), (reference.float() - actual.float()).square().sum()])
    dist.all_reduce(sums)
    return float(10 * torch.log10(sums[0] / sums[1]))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--dp", type=int, default=1, help="ranks over which fully_shard shards the experts")
    parser.add_argument("--style", choices=("package", "own"), default="package")
    parser.add_argument("--tokens", type=int, default=512, help="tokens per rank")
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--block-size", type=int, choices=(32, 128), default=32, help="for --style package")
    args = parser.parse_args()

    if "WORLD_SIZE" not in os.environ:
        parser.error(f"this runs on ranks that a launcher starts: torchrun --nproc-per-node 2 {shlex.join(sys.argv)}")
    ranks = int(os.environ["WORLD_SIZE"])
    if args.dp < 1 or ranks % args.dp:
        parser.error(f"--dp {args.dp} does not divide the {ranks} ranks")
    if not 1 <= args.top_k <= args.experts or args.experts % (ranks // args.dp):
        parser.error(f"expected --experts in a multiple of the {ranks // args.dp} ranks that hold them, and --top-k "
                     "from 1 to --experts")
    if args.style == "own" and args.block_size != OWN_BLOCK_SIZE:
        parser.error(f"--style own takes blocks of {OWN_BLOCK_SIZE}, not --block-size {args.block_size}")
    device = "cuda" if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]) else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    mesh = init_device_mesh(device, (args.dp, ranks // args.dp), mesh_dim_names=("dp", "ep"))

    torch.manual_seed(0)  # the same weights everywhere
    sizes = (args.experts, args.dim, args.hidden)
    loop = MoE(LoopExperts(*sizes), args.experts, args.dim, args.top_k).to(device, torch.bfloat16)
    model = MoE(GroupedExperts(*sizes), args.experts, args.dim, args.top_k).to(device, torch.bfloat16)
    model.load_state_dict(loop.state_dict())

    style = MXFP8ExpertParallel(block_size=args.block_size) if args.style == "package" else OwnExpertParallel()
    parallelize_module(model.experts, mesh["ep"], style)
    if args.dp > 1:
        fully_shard(model.experts, mesh=mesh["dp"])
        fully_shard(model, mesh=init_device_mesh(device, (ranks, )))

    torch.manual_seed(1 + dist.get_rank())  # other tokens on every rank
    x_TD = torch.randn(args.tokens, args.dim, device=device, dtype=torch.bfloat16)
    grad_TD = torch.randn_like(x_TD)
    expected, actual = step(loop, x_TD, grad_TD), step(model, x_TD, grad_TD)

    failed = False
    if dist.get_rank() == 0:
        print(f"{device}, {args.dp} x {ranks // args.dp} ranks (dp x ep), SQNR against a bf16 loop over experts")
    for name, bar in BARS.items():
        reference, ours = expected[name], actual[name]
        if name in ("router", "w1", "w2", "w3"):
            # Expert parallelism sums a gradient over ep. fully_shard takes the mean over its mesh. A router that is
            # not sharded has the gradient of its own rank's loss.
            sharded = isinstance(ours, DTensor)
            ours = ours.full_tensor() if sharded else ours
            if sharded:
                reference = reference.float()
                dist.all_reduce(reference)
                reference /= ranks if name == "router" else args.dp
        value = db(reference, ours)
        failed |= not value >= bar  # also true for NaN
        if dist.get_rank() == 0:
            print(f"{name:15s} {value:5.1f} dB   bar {bar}")
    time.sleep(0.2)  # gloo's threads release the last tensors; one that does so while Python exits aborts the process
    dist.destroy_process_group()
    if failed:
        raise SystemExit("below the bar")


if __name__ == "__main__":
    main()
