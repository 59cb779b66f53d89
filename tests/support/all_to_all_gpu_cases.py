# SPDX-License-Identifier: Apache-2.0
"""AllToAll on GPUs, within a node and over NVSHMEM: repeated calls, and calls in CUDA graphs."""

import random
from functools import cache

import deepspeed.comm as dist
import torch
import torch.distributed

from ds_mxfp8_moe.all_to_all import AllToAll
from ds_mxfp8_moe.ops.op_builder.nvlink import try_load
from ds_mxfp8_moe.transport.peer_memory import PeerMemory
from tests.gpu.capture import capture
from tests.support import all_to_all_cases as cases
from tests.support.all_to_all_cases import BF16, FP16, Call, Case

NVSHMEM = {"NVSHMEM_REMOTE_TRANSPORT": "none", "NVSHMEM_DISABLE_NVLS": "1", "NVSHMEM_SYMMETRIC_SIZE": "512M",
           "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME": "lo"}
FIRST_EPOCH = 2**32 - 24  # wraps within the first cases
SECONDS = 240.0  # of a case: the first one builds the extension
CYCLES_PER_MS = 2_000_000
TURNS = 3

BIG_CASES = {
    "DeepSeek-V3": Case(max_tokens=128, local_experts=32, top_k=8, hidden=7168, rows="quantize", float_scales=True,
                        bound=True, index_dtype=torch.uint32),
    "DeepSeek-V3, e4m3": Case(max_tokens=32, local_experts=32, top_k=8, hidden=7168, rows="e4m3", float_scales=True),
    "DeepSeek-V2-Lite": Case(max_tokens=128, local_experts=8, top_k=6, hidden=2048, rows="quantize", block=32),
    "most tokens": Case(max_tokens=1023, local_experts=4, top_k=8, hidden=256, out_dtype=FP16),
    "most choices": Case(max_tokens=600, local_experts=32, top_k=32, hidden=32),
}
REPLAYED = {
    "plain": Case(bound=True, max_tokens=33, top_k=4, hidden=512),
    "e4m3": Case(bound=True, rows="e4m3", float_scales=True, hidden=256, max_tokens=9),
    "quantize": Case(bound=True, rows="quantize", hidden=2048, top_k=6, local_experts=8, max_tokens=64),
    "ranks without tokens": Case(bound=True, routing="ranks without tokens", rows="quantize", block=32),
    "dropped": Case(bound=True, routing="dropped", top_k=4, local_experts=4),
    "send apart from receive": Case(bound=True, split=True, rows="quantize", hidden=544),
}


@cache
def memory() -> PeerMemory:
    """The staging of all cases of this process, over a group of its own. As large as they need, since it cannot grow
    once a graph holds it."""
    module, reason = try_load()
    assert module is not None, reason
    memory = PeerMemory(torch.distributed.new_group(), module, FIRST_EPOCH)
    memory.reserve(64 << 20, "all cases")
    return memory


def make(case: Case) -> tuple[AllToAll, Call]:
    return cases.make(case, memory()), Call(case, torch.device("cuda", torch.cuda.current_device()))


def none_wrong(pool, *args) -> None:
    assert pool.run(*args, seconds=SECONDS) == [[] for _ in range(pool.world_size)]


def gemm() -> None:
    a = torch.randn(4096, 4096, device="cuda", dtype=BF16)
    a @ a


def repeated(case: Case, repetitions: int) -> list[str]:
    """Compared on the device, so that the host runs ahead and repetitions of different ranks meet."""
    (a2a, call), delays = make(case), random.Random(dist.get_rank())
    wrong = cases.check(call, a2a, 0)
    outputs = [x for x in (call.counts, call.out.view(torch.uint8), call.scales, call.given["out_tokens"])
               if x is not None]
    first, differing = [x.clone() for x in outputs], torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(repetitions):
        for x in outputs:
            x.fill_(cases.POISON)
        for exchange in (call.dispatch, call.combine):
            torch.cuda._sleep(int(delays.choice((0, 0.05, 1)) * delays.random() * CYCLES_PER_MS))
            exchange(a2a)
        differing += sum((x != before).sum() for x, before in zip(outputs, first, strict=True))
    a2a.check()
    return wrong + ([f"{differing.item()} elements differ"] if differing.item() else [])


def replayed(case: Case) -> list[str]:
    """A graph for each way, replayed over other tokens, numbers of tokens and routes."""
    a2a, call = make(case)
    wrong = cases.check(call, a2a, 0)  # sets up what is set up once
    gemm()  # as cuBLAS does, which cannot within a capture
    parts = ({"do_recv": False}, {"do_send": False}) if case.split else ({}, )
    torch.cuda.synchronize(), dist.barrier()
    graphs = []
    for exchange in (call.dispatch, call.combine):
        graphs.append(torch.cuda.CUDAGraph())
        with capture(graphs[-1]):
            for part in parts:
                exchange(a2a, **part)
                gemm()
    for turn in range(6):
        call.bring(turn)
        graphs[0].replay()
        wrong += call.wrong_rows()
        call.answer()
        graphs[1].replay()
        wrong += call.wrong_tokens()
    wrong += cases.check(call, a2a, 7)  # and without a graph again
    a2a.check()
    torch.cuda.synchronize(), dist.barrier()  # before the graphs' memory goes
    return wrong
