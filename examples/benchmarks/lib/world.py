# SPDX-License-Identifier: Apache-2.0
"""The device and the ranks that a benchmark runs on. Without a launcher there is one rank, this process.

Every rank runs the same calls in the same order.
"""

import os
import shlex
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterator
from datetime import timedelta

import deepspeed
import psutil
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from ds_mxfp8_moe.config import MXFP8MoEConfig, Recipe, current_device, resolve
from ds_mxfp8_moe.transport.choose import choose
from ds_mxfp8_moe.transport.deadline import PeerError

BF16 = torch.bfloat16
TIMEOUT = timedelta(minutes=1)
STARTED = psutil.Process().create_time()
ENDING_S = 6.0  # of a run's time, for its tables and its plot
FAILURES: list[str] = []  # that `everywhere` met; equal on all ranks


def device() -> torch.device:
    return torch.device(get_accelerator().current_device_name())


def on_gpu() -> bool:
    return get_accelerator().device_name() == "cuda"


def start(alone: bool = False, timeout: timedelta = TIMEOUT) -> None:
    """Sets up this rank's device, process group and random numbers from the launcher's environment.

    Args:
        alone: without a launcher, this process is the only rank.
        timeout: of the process group.
    """
    if alone and "LOCAL_RANK" not in os.environ:
        with socket.create_server(("127.0.0.1", 0)) as free:
            os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1",
                              MASTER_PORT=str(free.getsockname()[1]))
    if "LOCAL_RANK" not in os.environ:
        sys.exit(f"this runs on ranks that a launcher starts: torchrun --nproc-per-node 2 {shlex.join(sys.argv)}")
    accelerator, local_rank = get_accelerator(), int(os.environ["LOCAL_RANK"])
    if on_gpu() and int(os.environ.get("LOCAL_WORLD_SIZE", 1)) > accelerator.device_count():
        # torch and NCCL refuse ranks that share a GPU. NCCL is told that each is a machine of its own.
        local_rank %= accelerator.device_count()
        os.environ.update(LOCAL_RANK=str(local_rank), TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES="1",
                          NCCL_HOSTID=f"of-rank-{os.environ['RANK']}", NCCL_SOCKET_IFNAME="lo")
    accelerator.set_device(local_rank)
    deepspeed.init_distributed(accelerator.communication_backend_name(), auto_mpi_discovery=False, verbose=False,
                               timeout=timeout)
    torch.manual_seed(rank())


def leave(error: str) -> None:
    """Ends this rank: with status 1 and one line if `error` says something."""
    if not FAILURES:
        if dist.is_initialized():
            dist.destroy_process_group()
        if error:
            sys.exit(error)
        return
    # NCCL's farewell would wait for what a failed contender left unfinished.
    if error:
        print(error, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1 if error else 0)


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def group() -> dist.ProcessGroup:
    return dist.group.WORLD


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def say(line: str) -> None:
    if rank() == 0:
        print(f"{time.time() - STARTED:5.1f} s  {line}", file=sys.stderr, flush=True)


def in_time(items: Collection, seconds: float) -> Iterator:
    """Announces and yields items while the next one, if it takes as long as the last one, ends ENDING_S before this
    process is `seconds` old."""
    left = seconds - ENDING_S
    for i, item in enumerate(items):
        before, left = left, seconds - ENDING_S - largest(torch.tensor([time.time() - STARTED])).item()
        if left < (before - left if i else 0):
            say(f"no time for {len(items) - i} of {len(items)}, beginning with {item}")
            return
        say(f"{i + 1}/{len(items)}: {item}")
        yield item


def recipe(**keys) -> Recipe:
    """What the section "mxfp8_moe" with these keys means on this machine."""
    return resolve(MXFP8MoEConfig(enabled=True, **keys), *current_device())


def transport(requested: str | None = None):
    """The transport that a layer over all ranks takes."""
    return choose(group(), "the benchmark", MXFP8MoEConfig(transport=requested))


def name_of(some_transport) -> str:
    return type(some_transport).__name__.lower()


def transports() -> dict:
    """All transports of this machine, by name."""
    found = (transport("collective"), transport())
    return {name_of(one): one for one in found}


def randn(*shape: int) -> torch.Tensor:
    """bf16 random numbers of this rank's own, on the device."""
    return torch.randn(*shape, dtype=BF16, device=device())


def gathered(x: torch.Tensor) -> torch.Tensor:
    """[W, ...]: every rank's x. Its shape is the same on all ranks."""
    message = x.contiguous().view(-1).view(torch.uint8)  # gloo does not know every dtype
    parts = [torch.empty_like(message) for _ in range(size())]
    dist.all_gather(parts, message)
    return torch.cat(parts).view(x.dtype).view(size(), *x.shape)


def largest(x: torch.Tensor) -> torch.Tensor:
    """The maximum over ranks, element by element, on the host."""
    if not dist.is_initialized():
        return x
    x = x.to(device())
    dist.all_reduce(x, dist.ReduceOp.MAX)
    return x.cpu()


def everywhere(call: Callable[[], dict]) -> dict:
    """What `call` returns on rank 0. "correct" is False, with the first "failure", if it raises on any rank.

    If some rank does not come to its end, the process group's timeout ends the run. It also ends when ranks have lost
    each other.
    """
    try:
        found = call()
    except (dist.DistError, PeerError) as error:
        sys.exit(f"rank {rank()}: {type(error).__name__}: {error}")
    except Exception as error:  # one contender's failure must not cost the run, whose machine is lent for minutes
        found = {"correct": False, "failure": f"{type(error).__name__}: {error}"[:300]}
        print(f"rank {rank()}: {found['failure']}", file=sys.stderr, flush=True)  # peers may be stuck without it
    if not dist.is_initialized():
        return found
    found_by: list = [None] * size()
    dist.all_gather_object(found_by, found)
    failures = [f"rank {r}: {one['failure']}" for r, one in enumerate(found_by) if "failure" in one]
    FAILURES.extend(failures)
    return {**found_by[0], "correct": all(one.get("correct", True) for one in found_by),
            **({"failure": failures[0]} if failures else {})}
