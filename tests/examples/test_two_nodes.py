# SPDX-License-Identifier: Apache-2.0
"""The script for two nodes, on one machine. It notices other hosts."""

import io
import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from pathlib import Path
from unittest import mock

import deepspeed.comm as dist
import pytest

from exchange import two_nodes
from lib import world
from tests.support.launched_model import MODEL
from tests.support.rank_pool import free_port

pytestmark = pytest.mark.slow


def meets(host_of: dict, one_host: bool) -> str:
    two_nodes.socket.gethostname = lambda: host_of[dist.get_rank()]
    try:
        two_nodes.meet(2, one_host)
    except SystemExit as stop:
        return str(stop)
    return ""


def test_ranks_on_other_hosts_than_two_nodes_are_an_error(ranks4):
    one, two, mixed = (dict(enumerate(names)) for names in ("aaaa", "aabb", "abab"))
    assert not any(ranks4.run(meets, two, False)) and not any(ranks4.run(meets, one, True))
    for hosts in (one, mixed):
        assert all("expected two hosts of 2 ranks each" in said for said in ranks4.run(meets, hosts, False))


def test_the_guide_gives_commands_that_the_script_takes():
    guide = (Path(two_nodes.ROOT) / "examples/guides/several_nodes.md").read_text()
    commands = re.findall(r"two_nodes\.py (.+)", guide.replace("\\\n", " "))
    assert len(commands) == 3
    for command in commands:
        args = two_nodes.parse(re.sub(r"[#&].*", "", command).replace("$node", "1").split())
        assert args.node_rank in (0, 1) and args.master


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "model.yaml").write_text(MODEL)
    (tmp_path / "text").write_text("the quick brown fox jumps over the lazy dog\n" * 500)
    return tmp_path


def arguments_of(node: int, folder: Path, port: int) -> list[str]:
    return ["--node-rank", str(node), "--master", "127.0.0.1", "--one-host", "--port", str(port), "--model",
            str(folder / "model.yaml"), "--data", str(folder / "text"), "--steps", "3", "--out",
            str(folder / f"node{node}.json")]


PROGRAM = "import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])"


def test_two_launchers_on_one_machine_start_all_ranks(folder):
    (folder / "program.py").write_text(PROGRAM)
    port = free_port()
    nodes = [two_nodes.Node(two_nodes.parse(arguments_of(node, folder, port))) for node in range(2)]
    with ThreadPoolExecutor(2) as both:
        list(both.map(lambda node: node.launch("ranks", [folder / "program.py"]), nodes))
    said = [(node.folder / "ranks.log").read_text() for node in nodes]
    assert all(f"rank {rank} of 4" in said[rank // 2] for rank in range(4)), said


def run_exchange(arguments: list[str]) -> None:
    """A rank of the exchange, on a rank of a pool."""
    with mock.patch.object(world, "start"), mock.patch.object(world, "leave"):
        two_nodes.exchange_main(two_nodes.parse(arguments))


def run_train(arguments: list[str]) -> str:
    """examples/gpt_moe/train.py on a rank of a pool. What it prints."""
    sys.path.insert(0, str(two_nodes.ROOT / "examples/gpt_moe"))
    import train
    with redirect_stdout(io.StringIO()) as out:
        train.run(train.parse_args(arguments))
    return out.getvalue()


@pytest.mark.wide
def test_the_script(ranks4, folder):
    """All ranks, those of the exchange and those of the trainings, are a pool's."""
    said = {}

    def launch(node, name, program):
        program, *arguments = map(str, program)
        run = run_train if Path(program).name == "train.py" else run_exchange
        said[name] = ranks4.run(run, arguments)[0]

    with mock.patch.object(two_nodes.Node, "launch", launch), pytest.raises(SystemExit) as end, \
            mock.patch.object(sys, "argv", ["two_nodes.py", *arguments_of(0, folder, free_port())]):
        two_nodes.main()
    assert not end.value.code
    rows = json.loads((folder / "node0.json").read_text())["rows"]
    assert all(row["correct"] for row in rows)
    of = {(row["case"]["operation"], row["contender"]): row for row in rows}
    assert of["bits", "hierarchical"]["checked"] == 2 * len(two_nodes.ROUTINGS)
    assert of["rail, 4 bytes", "send and receive"]["median_ms"] > 0
    assert {"hierarchical, mxfp8", "collective, mxfp8"} <= {name for operation, name in of if operation == "dispatch"}
    losses = [of["training step", name]["loss"] for name in ("collective", "hierarchical")]
    assert losses[1] == pytest.approx(losses[0], rel=0.01)
    assert "2 nodes of 2 ranks" in said["train_hierarchical"] and "2 nodes" not in said["train_collective"]
