# SPDX-License-Identifier: Apache-2.0
"""examples/expert_parallel/compare.py on the ranks of a pool. It checks its own bars."""

import importlib
import io
import os
import sys
from contextlib import redirect_stdout
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples/expert_parallel"


def compared(*arguments: str) -> tuple[str, str]:
    """What it prints on this rank, whose process group stays, and the error."""
    sys.path.insert(0, str(EXAMPLE))
    with (mock.patch.object(sys, "argv", ["compare.py", *arguments]), redirect_stdout(io.StringIO()) as out,
          mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=os.environ["WORLD_SIZE"]),
          mock.patch.object(torch.cuda, "device_count", return_value=0),
          mock.patch.object(torch.distributed, "init_process_group"),
          mock.patch.object(torch.distributed, "destroy_process_group")):
        try:
            importlib.import_module("compare").main()
        except SystemExit as error:
            return out.getvalue(), str(error)
    return out.getvalue(), ""


@pytest.mark.slow
@pytest.mark.parametrize("ranks, arguments", [("ranks2", ("--block-size", "128")),
                                              ("ranks4", ("--dp", "2", "--style", "own"))])
def test_it_is_above_its_bars(request, ranks, arguments):
    (printed, error), *others = request.getfixturevalue(ranks).run(compared, "--tokens", "128", *arguments)
    assert printed.count(" dB   bar ") == 6 and not error and set(others) == {("", "")}


@pytest.mark.slow
def test_nan_is_below_its_bars(ranks2):
    for rank, (printed, error) in enumerate(ranks2.run(compared, "--tokens", "0")):
        assert error == "below the bar" and ("nan dB" in printed) == (rank == 0)


@pytest.mark.parametrize("arguments, error", ((["--dp", "4"], "--dp 4 does not divide the 2 ranks"),
                                              (["--style", "own", "--block-size", "128"], "takes blocks of 32")))
def test_what_it_cannot_do_is_an_error(monkeypatch, capsys, arguments, error):
    monkeypatch.syspath_prepend(EXAMPLE)
    monkeypatch.setattr(sys, "argv", ["compare.py", *arguments])
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit):
        importlib.import_module("compare").main()
    assert error in capsys.readouterr().err
