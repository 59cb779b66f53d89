# SPDX-License-Identifier: Apache-2.0
"""Every benchmark runs with tiny sizes, from its arguments to its result file."""

import importlib
import io
import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ds_mxfp8_moe.all_to_all import AllToAll
from ds_mxfp8_moe.transport.collective import Collective
from ds_mxfp8_moe.transport.peer_memory import PeerMemory
from exchange import dispatch_combine, latency, moe_layer, two_nodes
from kernels import expert_ffn, grouped_gemm, host
from lib import models, world
from tests.support import emulator
from tests.support.green_bottles import green_bottles, tiny
from tests.support.launched_model import MODEL
from tests.support.rank_pool import free_port
from tests.support.slow import slow_except
from training import convergence, long_sequences, train, whole_model
from training.convergence import BF16, OWN, YARDSTICK
from training.train import AUTOEP, CLASSIC, HP

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(3)


# ---- two nodes ------------------------------------------------------------------------------------------------------


def test_the_guide_gives_commands_that_the_script_takes():
    guide = (two_nodes.ROOT / "examples/guides/several_nodes.md").read_text()
    commands = re.findall(r"two_nodes\.py (.+)", guide.replace("\\\n", " "))
    assert len(commands) == 2
    for command in commands:
        args = two_nodes.parse(re.sub(r"[#&].*", "", command).replace("$node", "1").split())
        assert args.node_rank in (0, 1) and args.master


def arguments_of(node: int, folder: Path, port: int) -> list[str]:
    return ["--node-rank", str(node), "--master", "127.0.0.1", "--one-host", "--port", str(port), "--model",
            str(folder / "model.yaml"), "--data", str(folder / "text"), "--steps", "3", "--out",
            str(folder / f"node{node}.json")]


def test_two_launchers_on_one_machine_start_all_ranks(tmp_path):
    program, port = tmp_path / "program.py", free_port()
    program.write_text("import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])")
    nodes = [two_nodes.Node(two_nodes.parse(arguments_of(node, tmp_path, port))) for node in range(2)]
    with ThreadPoolExecutor(2) as both:
        list(both.map(lambda node: node.launch("ranks", [program]), nodes))
    said = [(node.folder / "ranks.log").read_text() for node in nodes]
    assert all(f"rank {rank} of 4" in said[rank // 2] for rank in range(4)), said


def run_on_rank(program: str, arguments: list[str]) -> str:
    """The exchange or examples/gpt_moe/train.py on a rank of a pool. What it prints."""
    with mock.patch.object(world, "start"), mock.patch.object(world, "leave"), redirect_stdout(io.StringIO()) as out:
        if Path(program).name == "train.py":
            sys.path.insert(0, str(Path(program).parent))
            import train
            train.run(train.parse_args(arguments))
        else:
            two_nodes.exchange_main(two_nodes.parse(arguments))
    return out.getvalue()


@pytest.mark.wide
def test_the_script_for_two_nodes(ranks4, tmp_path):
    """All ranks, those of the exchange and those of the trainings, are a pool's."""
    (tmp_path / "model.yaml").write_text(MODEL)
    (tmp_path / "text").write_text("the quick brown fox jumps over the lazy dog\n" * 500)
    said = {}

    def launch(node, name, program):
        program, *arguments = map(str, program)
        said[name] = ranks4.run(run_on_rank, program, arguments)[0]

    with mock.patch.object(two_nodes.Node, "launch", launch), pytest.raises(SystemExit) as end, \
            mock.patch.object(sys, "argv", ["two_nodes.py", *arguments_of(0, tmp_path, free_port())]):
        two_nodes.main()
    assert not end.value.code
    rows = json.loads((tmp_path / "node0.json").read_text())["rows"]
    assert all(row["correct"] for row in rows)
    of = {(row["case"]["operation"], row["contender"]): row for row in rows}
    assert {"hierarchical, mxfp8", "collective, mxfp8"} <= {name for operation, name in of if operation == "dispatch"}
    assert ("rail, 4 bytes", "send and receive") in of and ("training step", "hierarchical") in of
    assert "2 nodes of 2 ranks" in said["train_hierarchical"] and "2 nodes" not in said["train_collective"]


# ---- all scripts ----------------------------------------------------------------------------------------------------


BRIEF = "--budget", "0.001", "--seconds", "600"


def run_script(name: str, out: Path, *arguments, **constants) -> list[dict]:
    """Runs a script's `main` on this rank, whose process group stays. Returns the rows of its result file.

    All of them are right, and the plot is there.

    Args:
        name: of the script's module.
        constants: of the module, for this run.
    """
    module = importlib.import_module(name)
    argv = [f"{name}.py", "--out", *map(str, (out, *arguments))]
    with (mock.patch.object(sys, "argv", argv), mock.patch.object(world, "start"),
          mock.patch.dict(vars(module), constants),
          mock.patch.object(world, "FAILURES", []),  # the ranks of other tests met some
          mock.patch.object(world, "leave") as left):
        module.main()
    world.barrier()
    left.assert_called_once_with("")
    result = json.loads(out.read_text())
    wrong = [row for row in result["rows"] if not row["correct"]]
    assert result["rows"] and not wrong, wrong
    assert result["benchmark"] == module.SHOWN.benchmark and out.with_suffix(".png").exists()
    return result["rows"]


class NVLink(Collective):
    """The collective transport under the name of NVLink's."""


def with_nvlink(name, out, *arguments, **constants) -> list[dict]:
    """A script on this rank of a pool, whose machine has the NVLink above."""

    def choose(group, name, config):
        return (Collective if config.transport == "collective" else NVLink)(group, name)

    with mock.patch.object(world, "choose", choose):
        return run_script(name, out, *arguments, **constants)


def with_all_to_all(name, out, *arguments) -> list[dict]:
    """With AllToAll over the emulator of CUDA."""
    memory = PeerMemory(dist.group.WORLD, emulator.load(dist.get_rank()), provider=emulator.Shared)

    def intranode(rank, world_size, dp_size, group, **sizes):
        return AllToAll(memory, **sizes)

    with mock.patch.object(latency.AllToAll, "intranode", intranode):
        return with_nvlink(name, out, *arguments)


def train_quickly(name, out, *arguments):
    with mock.patch.object(train.models, "LEARNING_RATE", 1.3e-3):
        return run_script(name, out, *arguments, WARM_UP=1)


def study(name, out) -> list[dict]:
    """The paired study, on tiny models of some texts: a second run goes on where the first one ended."""
    if dist.get_rank() == 0:
        green_bottles(out.parent)
    dist.barrier()
    given = ("--sizes", "tiny", "--steps", "2", "--data", out.parent / "texts", "--tokens", out.parent,
             "--heldout_windows", "4", "--seeds", "1", "--recipes", BF16)
    with tiny(out.parent):
        first = run_script(name, out, *given)
        rows = run_script(name, out, *given, "default_128", *convergence.OPTIMIZERS)
    assert rows[:1] == first
    return rows


def own_study(name, out) -> list[dict]:
    """A user's model and config beside the same in bf16. Before, what a section without MXFP8 is told."""
    folder, path = out.parent, out.with_name("ds_config.json")
    given = ("--ds_config", path, "--hf_model", folder / "model.yaml", "--seq_len", "32", "--steps", "2", "--data",
             folder / "texts", "--tokens", folder, "--heldout_windows", "4", "--seeds", "1")
    config = json.loads((convergence.ROOT / "configs/ds/autoep_zero2.json").read_text())
    config |= {"expert_parallel": {"enabled": True, "autoep_size": 2}, "train_micro_batch_size_per_gpu": 1,
               "gradient_accumulation_steps": 2}
    if dist.get_rank() == 0:
        green_bottles(folder)
        path.write_text(json.dumps(config | {"mxfp8_moe": {"enabled": True, "recipe": "bf16"}}))
    dist.barrier()
    with pytest.raises(SystemExit, match='expected a section "mxfp8_moe" .* another recipe than "bf16"'):
        convergence.parse_args(["--out", "unused", *map(str, given)])
    dist.barrier()
    own = {"enabled": True, "recipe": "mxfp8", "min_tokens_per_expert": 0, "combine_fwd_dtype": "mxfp8"}
    if dist.get_rank() == 0:
        path.write_text(json.dumps(config | {"mxfp8_moe": own}))
    dist.barrier()
    rows = run_script(name, out, *given)
    sections = {row["contender"]: row["section"] for row in rows}
    assert sections[OWN] == own and sections[BF16] == {"enabled": True, "min_tokens_per_expert": 0, "recipe": "bf16"}
    assert str(folder) not in out.read_text()
    return rows


# The run of a script, its ranks, arguments and constants, and contenders whose results it has to have.
TINY = "--steps", "1", "--sizes", "tiny"
SCRIPTS = {
    "kernels.grouped_gemm": (run_script, 1, BRIEF, {}, {grouped_gemm.OURS_BF16, grouped_gemm.MXFP8}),
    "kernels.quantize": (run_script, 1, BRIEF, {}, set()),
    "kernels.expert_ffn": (run_script, 1, (*BRIEF, "--min-tokens-per-expert", "65"), {}, {*expert_ffn.RECIPES}),
    "kernels.host": (run_script, 1, (), dict(SAMPLES=1, WARM_UP=1), {*host.SHOWN.contenders[:-1]}),
    "exchange.dispatch_combine": (with_nvlink, 2, BRIEF, {}, {*dispatch_combine.CONTENDERS}),
    "exchange.moe_layer": (run_script, 2, BRIEF, {}, {moe_layer.AUTOEP, moe_layer.CLASSIC}),
    "exchange.two_hops": (run_script, 4, BRIEF, {}, {"two hops", "flat"}),
    "exchange.latency": (with_all_to_all, 2, BRIEF, {}, {*latency.OURS, *latency.NCCL}),
    "training.train": (train_quickly, 2, (*TINY, "tiny-mixtral", "--accumulation", "1", "--routings",
                                          *train.ROUTINGS, models.AS_RECORDED, "--contenders", AUTOEP, HP, CLASSIC),
                       {}, {AUTOEP, HP, CLASSIC}),
    "training.whole_model": (run_script, 1, (*BRIEF, "--training", "full", "--contenders", whole_model.PLAIN,
                                             whole_model.DEFAULT), dict(WARM_UP=1, LEAST=1, MOST=1),
                             {whole_model.PLAIN, whole_model.DEFAULT}),
    "training.activations": (run_script, 1, (), {}, {whole_model.AUTOEP, whole_model.DEFAULT}),
    "training.frozen_quality": (run_script, 1, ("--base", "base", "--base_steps", "2", "--steps", "2", "--seeds", "1"),
                                dict(HELDOUT_WINDOWS=8), set()),
    "training.merge_quality": (run_script, 1, ("--base", "base", "--base_steps", "2", "--steps", "2", "--seeds", "1",
                                               "--rate", "0.01"), {}, set()),
    "training.routes": (run_script, 1, ("--experts", "16", "4", "--base_steps", "1", "--steps", "8"),
                        dict(DOMAINS=("pydoc", ), APART=2, AVERAGED=2), {"router"}),
    "training.convergence": (study, 2, (), {}, {BF16, "default_128", *convergence.OPTIMIZERS}),
    "training.convergence, own": (own_study, 2, (), {}, {BF16, OWN, YARDSTICK}),
    "training.long_sequences": (run_script, 2, (), dict(START=1, MOST=2),
                                {whole_model.AUTOEP, whole_model.DEFAULT, long_sequences.SMALLEST}),
    "training.long_sequences, LoRA": (run_script, 1, (), {}, {whole_model.IN_8_BITS, long_sequences.IN_TURNS}),
    "training.from_files": (run_script, 1, (*BRIEF, "--folders", "."), {}, set()),
    "training.from_files, ranks": (run_script, 2, (*BRIEF, "--folders", ".", "--models", "tiny"), {},
                                   {whole_model.DEFAULT, whole_model.IN_4_BITS}),
}


@pytest.mark.parametrize("name", slow_except(SCRIPTS, "kernels.grouped_gemm", "exchange.dispatch_combine",
                                             "training.train"))
def test_all_results_of_a_script_are_right(request, name, tmp_path, monkeypatch):
    """From its arguments to its result file, with tiny sizes. mx.py and plain torch stand in for the kernels."""
    run, ranks, arguments, constants, names = SCRIPTS[name]
    if run is with_all_to_all:
        if reason := emulator.obstacle():
            pytest.skip(f"the emulator needs nvcc: {reason}")
        emulator.build()
    arguments = [str(tmp_path / one) if one in ("base", ".") else one for one in arguments]
    rows = request.getfixturevalue(f"ranks{ranks}").run(run, name.split(",")[0], tmp_path / "x.json", *arguments,
                                                        **constants)[0]
    assert names <= {row["contender"] for row in rows}
