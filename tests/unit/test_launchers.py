# SPDX-License-Identifier: Apache-2.0
"""One tiny training with MXFP8 on two gloo ranks, started by each launcher: the losses agree to the bit."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launched_model import MODEL
from tests.support.rank_pool import free_port
from tests.support.slow import slow_except

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(sys.executable).parent
pytestmark = pytest.mark.slow


LAUNCHERS = {
    "deepspeed": lambda: [PROGRAMS / "deepspeed", "--num_gpus", "2", "--master_port", str(free_port())],
    "torchrun": lambda: [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port",
                         str(free_port())],
    # Nothing but MPI tells the ranks who they are: DeepSpeed asks mpi4py.
    "mpirun": lambda: ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", sys.executable],
}


def environment() -> dict[str, str]:
    """Of a launcher: without ranks."""
    without = {k: v for k, v in os.environ.items()
               if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    return without | {"PATH": f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}", "DS_ACCELERATOR": "cpu",
                      "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """A function from a launcher's name to the loss of each step, and the summary of its run."""
    folder = tmp_path_factory.mktemp("launchers")
    (folder / "model.yaml").write_text(MODEL)
    (folder / "text").write_text("the quick brown fox jumps over the lazy dog\n" * 500)

    @functools.cache
    def train(launcher):
        out = folder / launcher
        command = [*LAUNCHERS[launcher](), ROOT / "examples/gpt_moe/train.py", "--deepspeed_config",
                   ROOT / "configs/ds/zero2_mxfp8.json", "--model", folder / "model.yaml", "--data", folder / "text",
                   "--steps", "3", "--heldout_windows", "2", "--log_every", "1", "--save_dir", out]
        done = subprocess.run(list(map(str, command)), env=environment(), stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240)
        assert done.returncode == 0, done.stdout[-4000:]
        rows = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
        return [row["loss"] for row in rows], json.loads((out / "summary.json").read_text())

    return train


def test_deepspeed(train):
    losses, summary = train("deepspeed")
    assert len(losses) == 3 and losses[2] < losses[0]
    assert summary["moe_layers"] == summary["layers_converted"] == 2


@pytest.mark.parametrize("launcher", slow_except(["torchrun", "mpirun"], "mpirun"))
def test_the_other_launchers_train_alike(train, launcher):
    assert train(launcher)[0] == train("deepspeed")[0]
