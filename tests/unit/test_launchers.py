# SPDX-License-Identifier: Apache-2.0
"""One tiny training with MXFP8 on two gloo ranks, started by each launcher: the losses agree to the bit. And one on
two nodes of two ranks, started as on several machines: by one command on each, here by two on one.
"""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rank_pool import free_port

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(sys.executable).parent
MODEL = """
{hidden_size: 32, ffn_size: 64, num_layers: 2, num_heads: 2, seq_len: 32, moe: {num_experts: 4, k: 2}}
"""

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]

pytestmark = pytest.mark.slow


def of_two_machines(port: int) -> list:
    """The commands that several_nodes.md gives for two nodes, for loopback and two ranks each."""
    return [[*TORCHRUN, "--nnodes", "2", "--nproc-per-node", "2", "--node-rank", str(node), "--rdzv-backend", "c10d",
             "--rdzv-endpoint", f"127.0.0.1:{port}"] for node in range(2)]


LAUNCHERS = {
    "deepspeed": lambda: [PROGRAMS / "deepspeed", "--num_gpus", "2", "--master_port", str(free_port())],
    "torchrun": lambda: [*TORCHRUN, "--nproc-per-node", "2", "--master-port", str(free_port())],
    "torchrun of one machine": lambda: [[*TORCHRUN, "--nproc-per-node", "4", "--master-port", str(free_port())]],
    "torchrun of two machines": lambda: of_two_machines(free_port()),
    # Nothing but MPI tells the ranks who they are: DeepSpeed asks mpi4py.
    "mpirun": lambda: ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", sys.executable],
}


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """A function from a launcher's name to the loss of each step, and the summary of its run."""
    folder = tmp_path_factory.mktemp("launchers")
    (folder / "model.yaml").write_text(MODEL)
    (folder / "text").write_text("the quick brown fox jumps over the lazy dog\n" * 500)

    config = json.loads((ROOT / "configs/ds/zero2_mxfp8.json").read_text())
    config["mxfp8_moe"] |= {"transport": "hierarchical", "node_size": 2}
    (folder / "two_nodes.json").write_text(json.dumps(config))

    @functools.cache
    def train(launcher):
        out, commands = folder / launcher, LAUNCHERS[launcher]()
        two_nodes = isinstance(commands[0], list)
        config = folder / "two_nodes.json" if two_nodes else ROOT / "configs/ds/zero2_mxfp8.json"
        program = [ROOT / "examples/gpt_moe/train.py", "--deepspeed_config", config, "--model", folder / "model.yaml",
                   "--data", folder / "text", "--steps", "3", "--log_every", "1", "--save_dir", out]
        without_ranks = {k: v for k, v in os.environ.items()
                         if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")}
        environment = without_ranks | {"PATH": f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}", "DS_ACCELERATOR": "cpu",
                                       "OMP_NUM_THREADS": "1"}
        started = [subprocess.Popen(list(map(str, [*command, *program])), env=environment, stdin=subprocess.DEVNULL,
                                    stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
                   for command in (commands if two_nodes else [commands])]
        try:
            said = [process.communicate(timeout=240)[0] for process in started]
        finally:
            for process in started:
                process.kill()
        assert not any(process.returncode for process in started), "\n".join(text[-4000:] for text in said)
        assert not two_nodes or "hierarchical between ranks [0, 1, 2, 3]: 2 nodes of 2 ranks" in "".join(said)
        rows = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
        return [row["loss"] for row in rows], json.loads((out / "summary.json").read_text())

    return train


def test_deepspeed(train):
    losses, summary = train("deepspeed")
    assert len(losses) == 3 and losses[2] < losses[0]
    assert summary["moe_layers"] == summary["layers_converted"] == 2


@pytest.mark.parametrize("launcher", ["torchrun", "mpirun"])
def test_the_other_launchers_train_alike(train, launcher):
    assert train(launcher)[0] == train("deepspeed")[0]


def test_two_machines_train_as_one(train):
    losses, summary = train("torchrun of two machines")
    assert len(losses) == 3 and losses[2] < losses[0] and summary["layers_converted"] == 2
    assert losses == train("torchrun of one machine")[0]
