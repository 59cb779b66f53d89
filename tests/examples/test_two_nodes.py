# SPDX-License-Identifier: Apache-2.0
"""The script for two nodes, on one machine with two launchers, and its checks: they notice wrong bits and hosts."""

import io
import json
import re
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from unittest import mock

import deepspeed.comm as dist
import pytest
import torch
from rank_pool import free_port
from test_launchers import MODEL, environment

from ds_mxfp8_moe.transport import Wire
from ds_mxfp8_moe.transport.collective import Collective
from ds_mxfp8_moe.transport.hierarchical import Hierarchical
from ds_mxfp8_moe.transport.hops import Hops
from exchange import two_nodes

pytestmark = pytest.mark.slow
SCRIPT = Path(two_nodes.__file__)


class Nudged(Hierarchical):
    """Its combine is wrong in the last bit of one value."""

    def combine(self, plan, y_PH, *args):
        y_TH, weight_TK = super().combine(plan, y_PH, *args)
        y_TH.view(-1)[:1].view(torch.int16).bitwise_xor_(1)
        return y_TH, weight_TK


class Late(Hierarchical):
    """Its dispatch gives a row of another token."""

    def dispatch(self, plan, x_TH, *args):
        return super().dispatch(plan, x_TH.roll(1, 0), *args)


def check_bits(two_hops, routing):
    world = dist.get_world_group()
    transports = {"collective": Collective(world), "hierarchical": two_hops(Hops.of(world, 2, "moe"))}
    torch.manual_seed(dist.get_rank())
    return [two_nodes.right_bits(transports, routing, wire, 2) for wire in (Wire(False), Wire(True))]


@pytest.mark.parametrize("wrong, what", [(Nudged, "combine"), (Late, "dispatch")])
def test_wrong_bits_are_noticed(ranks4, wrong, what):
    for one in ranks4.run(check_bits, wrong, "random")[0]:
        assert not one["correct"] and what in one["failure"]


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


@pytest.mark.parametrize("arguments, error", [
    (["--master", "a"], "--node-rank 0 or 1"), (["--node-rank", "0"], "--master"),
    (["--node-rank", "0", "--master", "a", "--ranks", "1"], "at least two ranks"),
    (["--node-rank", "0", "--master", "a", "--steps", "1"], "between two of them"),
], ids=str)
def test_arguments_that_cannot_be(arguments, error, capsys):
    with pytest.raises(SystemExit):
        two_nodes.parse([*arguments, "--out", "two_nodes.json"])
    assert error in capsys.readouterr().err


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


EXCHANGE = "from exchange import two_nodes; print(len(two_nodes.Node(two_nodes.parse()).exchange()), 'rows')"


def exchanged_by_two_launchers(folder: Path) -> None:
    """Each of the nodes starts its ranks for the exchange."""
    port, here = free_port(), environment() | {"PYTHONPATH": f"{two_nodes.ROOT}:{SCRIPT.parents[1]}"}
    nodes = [subprocess.Popen([sys.executable, "-c", EXCHANGE, *arguments_of(node, folder, port)], env=here,
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
             for node in range(2)]
    try:
        said = [node.communicate(timeout=280)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert not any(node.returncode for node in nodes), "\n".join(said)
    assert said[0].endswith(" rows\n") and said[1].endswith("\n0 rows\n")


def run_train(arguments: list[str]) -> str:
    """examples/gpt_moe/train.py on a rank of a pool. What it prints."""
    sys.path.insert(0, str(two_nodes.ROOT / "examples/gpt_moe"))
    import train
    with redirect_stdout(io.StringIO()) as out:
        train.run(train.parse_args(arguments))
    return out.getvalue()


def test_two_launchers_on_one_machine(ranks4, folder):
    """They start the ranks of the exchange. Those of the trainings are a pool's."""
    exchanged_by_two_launchers(folder)
    said = {}

    def launch(node, name, program):
        program, *arguments = map(str, program)
        if Path(program).name == "train.py":
            said[name] = ranks4.run(run_train, arguments)[0]
        else:
            assert program == str(SCRIPT) and (node.folder / "exchange.json").exists()

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
