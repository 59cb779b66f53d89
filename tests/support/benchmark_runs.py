# SPDX-License-Identifier: Apache-2.0
"""Benchmarks' scripts, run from their arguments to their result files on the ranks of a pool."""

import importlib
import json
import sys
from pathlib import Path
from unittest import mock

from lib import world


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
