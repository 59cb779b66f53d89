# SPDX-License-Identifier: Apache-2.0
"""A pool of ranks that lives as long as its fixture: spawned once, used by every case, and spawned again after a case
that failed on some rank. gloo on the CPU, NCCL on GPUs. All ranks may share one GPU: NCCL, which refuses that, is told
that each is on a machine of its own.

A case hands the pool a top-level function; every rank runs it and its return values come back in rank order:

    def body(k):                       # runs on every rank; torch.distributed is initialized
        return deepspeed.comm.get_rank() * k

    def test_body(ranks2):
        assert ranks2.run(body, 3) == [0, 3]
"""

import ctypes
import faulthandler
import functools
import gc
import io
import multiprocessing as mp
import os
import signal
import socket
import sys
import time
import traceback
from multiprocessing import connection
from pathlib import Path
from weakref import WeakSet

import torch
from torch.distributed import distributed_c10d as c10d

# Of a group, or of the default group if none is given. From torch 2.15 on the function has a public name.
set_timeout = getattr(c10d, "set_timeout", None) or c10d._set_pg_timeout

PRELOADED = ["tests.support.preloaded"]  # from the root of the checkout; elsewhere, ranks import for themselves
CASE_SECONDS = 120.0
START_SECONDS = 90.0
GRACE_SECONDS = 5.0  # for the others of a rank that failed
SIGNAL_AT_PARENTS_DEATH = 1  # PR_SET_PDEATHSIG


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _dump(value) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _load(data: bytes):
    return torch.load(io.BytesIO(data), weights_only=False)


def reset_deepspeed_groups() -> None:
    """Forgets what DeepSpeed keeps for the whole process: expert-parallel groups by name, and that a case trained
    under autocast.
    """
    from deepspeed.runtime import torch_autocast
    from deepspeed.utils import groups
    torch_autocast.TORCH_AUTOCAST_INITIALIZED = False
    for name in ("_EXPERT_PARALLEL_GROUP", "_EXPERT_PARALLEL_GROUP_RANKS", "_EXPERT_DATA_PARALLEL_GROUP",
                 "_EXPERT_DATA_PARALLEL_GROUP_RANKS"):
        if hasattr(groups, name):
            getattr(groups, name).clear()
    groups.mpu = None


def reset_hugging_face() -> None:
    """Forgets the Trainer and the Accelerator of the case before: after ZeRO-3, models would be made partitioned."""
    if integration := sys.modules.get("transformers.integrations.deepspeed"):
        integration.unset_hf_deepspeed_config()
    if state := sys.modules.get("accelerate.state"):
        state.AcceleratorState._reset_state(reset_partial_state=True)


KEPT_GROUPS: set = set()  # that a case made for those after it


ENGINES: WeakSet = WeakSet()


def note_engines() -> None:
    """Keeps ENGINES, for `destroy_engines`."""
    from deepspeed.runtime.engine import DeepSpeedEngine
    plain = DeepSpeedEngine.__init__

    @functools.wraps(plain)
    def noting(self, *args, **kwargs):
        plain(self, *args, **kwargs)
        ENGINES.add(self)

    DeepSpeedEngine.__init__ = noting


def destroy_engines() -> None:
    """Ends the engines of the case before. From ZeRO-1 on, DeepSpeed's hooks hold an engine and its process groups
    until that, since garbage collection does not see what autograd holds."""
    engines = [engine for engine in ENGINES if vars(engine.module)]  # else the case has taken its model apart
    for engine in engines:
        engine.destroy()
    for module in {module for engine in engines for module in engine.module.modules()}:
        vars(module).clear()  # by which ZeRO-3 holds all the rest
    ENGINES.clear()


def destroy_groups() -> None:
    """Ends the process groups of the case before, but for those that DeepSpeed keeps for the whole process. A gloo
    group is three threads, one of which wakes a hundred times a second: after twenty cases, more work than the cases.
    """
    from deepspeed.utils import groups
    kept = {torch.distributed.group.WORLD, *KEPT_GROUPS}
    for value in vars(groups).values():
        found = value.values() if isinstance(value, dict) else [value]
        kept |= {group for group in found if isinstance(group, torch.distributed.ProcessGroup)}
    if ended := [group for group in torch.distributed.distributed_c10d._world.pg_map if group not in kept]:
        for group in ended:
            torch.distributed.destroy_process_group(group)
        if "torch.distributed.tensor" in sys.modules:
            from torch.distributed.tensor import debug
            debug._clear_sharding_prop_cache()  # it holds meshes of ended groups, which equal those of later cases
        gc.collect()  # engines hold their groups, and each other


def _worker(rank: int, world_size: int, port: int, path: list, accelerator: str, backend: str | None,
            share_gpu: bool, conn) -> None:
    sys.path[:] = path
    local_rank = 0 if share_gpu else rank
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(local_rank),
                      LOCAL_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
                      DS_ACCELERATOR=accelerator)
    if share_gpu:
        os.environ.update(TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES="1", NCCL_HOSTID=f"of-rank-{rank}",
                          NCCL_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    if accelerator == "cpu":
        ctypes.CDLL(None).prctl(SIGNAL_AT_PARENTS_DEATH, signal.SIGKILL)  # else it would be paused for ever
        # DataLoaders of a rank fork their workers. Those of a fork server would import torch and DeepSpeed again.
        mp.set_start_method("fork", force=True)
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from deepspeed.module_inject.auto_ep_presets import base
    from deepspeed.utils import nvtx

    modules = 0
    note_engines()
    gc.set_threshold(100_000, 50, 100)  # engines make more objects than Python's own thresholds are meant for
    nvtx.enable_nvtx = False  # DeepSpeed's names for a profiler
    torch.nn.Parameter.__repr__ = object.__repr__  # ZeRO-3 formats parameters for lines that it does not print
    # With transformers from 5.23 on, plain AutoEP does not start: it takes names for keys where models are expected.
    base._install_instance_transformers_output_recorders = lambda *args: None
    linear = torch.nn.functional.linear
    if accelerator == "cuda":
        get_accelerator().set_device(local_rank)
    deepspeed.init_distributed(backend or get_accelerator().communication_backend_name(), auto_mpi_discovery=False,
                               verbose=False)
    faulthandler.register(signal.SIGUSR1)
    conn.send("ready")
    while True:
        try:
            message = conn.recv()
        except EOFError:
            return
        if message is None:
            return
        fn, args, kwargs = message
        if modules < len(sys.modules):
            # DeepSpeed and this pool collect garbage for each engine and case: a tenth of a second over all that is
            # imported, and with it of what a rank does.
            modules = len(sys.modules)
            gc.collect()
            gc.freeze()
        try:
            reset_deepspeed_groups()
            reset_hugging_face()
            destroy_engines()
            if accelerator == "cpu":
                destroy_groups()
                set_timeout(c10d.default_pg_timeout)  # some cases shorten it
            torch.manual_seed(1234)
            torch.nn.functional.linear = linear  # ZeRO-3 replaces it, and rounds bf16 otherwise
            conn.send_bytes(_dump((True, fn(*args, **kwargs))))
        except BaseException:  # every failure of a case is data for the parent, which raises it
            conn.send_bytes(_dump((False, traceback.format_exc())))


class RankFailure(AssertionError):
    """A case failed on some rank; `errors` maps the rank to its traceback."""

    def __init__(self, errors: dict):
        self.errors = errors
        super().__init__("\n".join(f"--- rank {r}\n{e}" for r, e in sorted(errors.items())))


class RankPool:

    def __init__(self, world_size: int, accelerator: str = "cpu", backend: str | None = None,
                 share_gpu: bool = False):
        """`backend`: None is the accelerator's own. `share_gpu`: every rank is on the first GPU."""
        self.world_size = world_size
        self.accelerator = accelerator
        self._start_with = (backend, share_gpu)
        self._procs: list = []
        self._port = 0

    def _start(self) -> None:
        for _ in range(3):  # another process may take the port between its choice and its use
            self._spawn()
            if all(self._is_ready(conn) for conn in self._conns):
                return
            self.close()
        raise RuntimeError(f"{self.world_size} ranks did not come up")

    @staticmethod
    def _is_ready(conn) -> bool:
        try:
            return conn.poll(START_SECONDS) and conn.recv() == "ready"
        except (EOFError, OSError):
            return False

    def _spawn(self) -> None:
        if self.accelerator == "cpu":
            context = mp.get_context("forkserver")
            context.set_forkserver_preload(PRELOADED)
        else:
            context = mp.get_context("spawn")
        port = self._port = free_port()
        self._conns, self._procs = [], []
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            proc = context.Process(target=_worker, args=(rank, self.world_size, port, list(sys.path),
                                                          self.accelerator, *self._start_with, theirs))
            proc.start()
            theirs.close()
            self._conns.append(ours)
            self._procs.append(proc)

    def run(self, fn, *args, seconds: float = CASE_SECONDS, **kwargs) -> list:
        """Runs `fn(*args, **kwargs)` on every rank; returns the results in rank order or raises RankFailure."""
        if not self._procs:
            self._start()
        self._signal(signal.SIGCONT)
        for conn in self._conns:
            conn.send((fn, args, kwargs))
        results, errors = {}, {}
        deadline = time.monotonic() + seconds
        waiting = set(range(self.world_size))
        # Once a rank has failed its peers may be stuck in a collective: give them a short grace, then stop them.
        while waiting and (left := deadline - time.monotonic()) > 0:
            for conn in connection.wait([self._conns[rank] for rank in waiting], left):
                rank = self._conns.index(conn)
                try:
                    ok, value = _load(conn.recv_bytes())
                except EOFError:
                    ok, value = False, f"the process of rank {rank} ended"
                (results if ok else errors)[rank] = value
                waiting.discard(rank)
                if not ok:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if waiting or errors:
            for rank in waiting:  # which print where each of their threads stands
                os.kill(self._procs[rank].pid, signal.SIGUSR1)
            time.sleep(0.5 if waiting else 0)
            for rank in waiting:
                errors[rank] = f"no answer within {seconds} s, or {GRACE_SECONDS} s after a peer's failure"
            self.close()
            raise RankFailure(errors)
        self._signal(signal.SIGSTOP)
        return [results[r] for r in range(self.world_size)]

    def _signal(self, number: int) -> None:
        """Pauses CPU ranks between cases, or lets them go on: gloo's threads wake a hundred times a second, and those
        of ZeRO-3's models never end.
        """
        for proc in self._procs if self.accelerator == "cpu" else ():
            os.kill(proc.pid, number)

    def close(self) -> None:
        for proc in self._procs:
            proc.kill()
        for proc in self._procs:
            proc.join()
        self._procs = []
        # DeepSpeed's CPU all-reduce leaves 66 MiB of shared memory behind for every rank.
        for leftover in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{self._port}_*"):
            leftover.unlink()
