# SPDX-License-Identifier: Apache-2.0
"""examples/expert_parallel/compare.py under torchrun. It checks its own bars."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples/expert_parallel"


def run_example(ranks, *arguments):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks,
               EXAMPLE / "compare.py", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, timeout=280)


@pytest.mark.slow
@pytest.mark.parametrize("ranks, arguments", ((2, ["--block-size", "128"]), (4, ["--dp", "2", "--style", "own"])))
def test_it_is_above_its_bars(ranks, arguments):
    done = run_example(ranks, "--tokens", "128", *arguments)
    assert done.returncode == 0 and done.stdout.count(" dB   bar ") == 6, done.stdout + done.stderr[-3000:]


@pytest.mark.slow
def test_nan_is_below_its_bars():
    done = run_example(1, "--tokens", "0")
    assert done.returncode and "nan dB" in done.stdout and "below the bar" in done.stderr


@pytest.mark.parametrize("arguments, error", ((["--dp", "4"], "--dp 4 does not divide the 2 ranks"),
                                              (["--style", "own", "--block-size", "128"], "takes blocks of 32")))
def test_what_it_cannot_do_is_an_error(monkeypatch, capsys, arguments, error):
    monkeypatch.syspath_prepend(EXAMPLE)
    monkeypatch.setattr(sys, "argv", ["compare.py", *arguments])
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit):
        importlib.import_module("compare").main()
    assert error in capsys.readouterr().err
