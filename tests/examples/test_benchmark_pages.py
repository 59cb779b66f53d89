# SPDX-License-Identifier: Apache-2.0
"""What benchmarks show: tables, bars and plots say what result files say."""

import re
from pathlib import Path
from unittest import mock

import pytest
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

import report
from lib import gains, results_file, show
from lib.show import Measure, bar
from training import front_page, whole_model
from training.train import AUTOEP, HP, OURS_BF16

pytestmark = pytest.mark.slow


# ---- tables and bars ------------------------------------------------------------------------------------------------


def row(name, ms, correct=True, **case):
    return {"case": {"flops": 1} | case, "contender": name, "median_ms": ms, "correct": correct}


def plot(result, pyplot):
    show.lines(pyplot, show.points_over(result, "tokens", ("split", ), ("a", "b")), "tokens", "ms")


SHOWN = show.Shown("expert_ffn", [
    Measure("b over a", ("b", ), "a", bars=(bar(3.1, tokens=8), bar(1.1))),
    Measure("b of a", ("b", ), "a", better=show.SMALLER, form="{:.0%}"),
    Measure("ms", ("a", "b"), better=show.SMALLER, form="{}", bars=(bar(6), ))], [show.MS], plot,
    ratios=(("a", "b"), ))
ROWS = [row("a", 6, tokens=8, split="even"), row("b", 2, tokens=8, split="even"),
        row("a", 6, tokens=64, split="even"), row("b", 5, tokens=64, split="even"),
        row("a", 1, False, tokens=64, split="skewed")]


def test_the_worst_case_is_stated_and_missed_bars_are_a_line_each(tmp_path, capsys):
    measures, failures, _ = show.texts(SHOWN, {"rows": ROWS})
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in measures.splitlines()[2:]]
    assert lines == [["b over a", "1.20x", "2.10x", "3.00x", "tokens 64, even"],
                     ["b of a", "83%", "58%", "33%", "tokens 64, even"], ["ms", "6", "5.5", "2", "a, tokens 8, even"]]
    assert "a" in failures.splitlines()[2] and "tokens 64, skewed" in failures
    path = tmp_path / "x.json"
    results_file.write("expert_ffn", ROWS[:4], path, "abc")
    assert show.show(SHOWN, path) == "" and path.with_suffix(".png").exists()
    capsys.readouterr()
    assert show.show(SHOWN, path, check=True) == "bars not reached: 1"
    assert capsys.readouterr().err.splitlines() == ["expert_ffn: b over a is 3 (tokens 8); the bar is 3.1"]
    results_file.write("expert_ffn", ROWS, path, "abc")
    assert show.show(SHOWN, path) == "some results were wrong"


# ---- pages ----------------------------------------------------------------------------------------------------------


def test_the_pages_say_what_the_result_files_say():
    for path, text in report.texts().items():
        assert path.read_text() == text, f"{path.name}: run make report"


def in_bf16(result):
    """The default recipe's experts ran in bf16, as on a device where these tokens are too few for it."""
    default = {"contender": whole_model.DEFAULT}
    return {**result, "rows": [row | ({"experts_in": "bf16"} if default.items() <= row.items() else {})
                               for row in result["rows"]]}


def test_nothing_is_called_mxfp8_that_ran_in_bf16(monkeypatch):
    """Neither a figure of the README nor a bar of its picture; other plots say it, and measures leave it out."""
    stored = report.results
    monkeypatch.setattr(report, "results", lambda name: [(path, in_bf16(result)) for path, result in stored(name)])
    for shown in (report.texts, lambda: report.gains(report.results("whole_model"), report.results("train"))):
        with pytest.raises(ValueError, match="'ours, default' in .* ran its experts in bf16: .* as MXFP8"):
            shown()
    rows = [row(HP, 5, n=1) | {"experts_in": "bf16"}, row(HP, 5, n=2) | {"experts_in": "MXFP8"}, row(AUTOEP, 9, n=2),
            row(AUTOEP, 9, n=1), row(OURS_BF16, 7, n=1) | {"experts_in": "bf16"}]
    assert [results_file.shown_name(row) for row in rows] == [f"{HP}, ran in bf16", HP, AUTOEP, AUTOEP, OURS_BF16]
    found = Measure("speed", (HP, OURS_BF16), AUTOEP).values({"rows": rows})
    assert [(one.contender, one.case["n"]) for one in found] == [(OURS_BF16, 1), (HP, 2)]


def test_a_bar_is_made_of_what_was_measured():
    """By this package in bf16, and by MXFP8 on top: in one part where the first was not measured apart."""
    base, bf16, mxfp8 = ({"contender": name, "case": {}, "tokens_per_s": rate, "peak_bytes": rate} | more
                         for name, rate, more in ((AUTOEP, 100, {}), (OURS_BF16, 150, {"experts_in": "bf16"}),
                                                  (HP, 180, {"experts_in": "MXFP8"})))
    made = [front_page.gain("a", AUTOEP, base, bf16, mxfp8), front_page.gain("b", AUTOEP, base, None, mxfp8),
            front_page.gain("c", AUTOEP, base, bf16, None)]
    assert [one.times(one.mxfp8 or one.bf16) for one in made] == ["1.80x", "1.80x", "1.50x"]
    figure = Figure()
    pyplot = mock.Mock(subplots=lambda **_: (figure, figure.subplots()), Rectangle=Rectangle)
    gains.plot({"title": made}, pyplot)
    drawn = [(round(bar.get_x(), 2), round(bar.get_width(), 2)) for bar in figure.axes[0].patches]
    assert drawn == [(0, 1), (1, 0.5), (1.5, 0.3), (0, 1), (1, 0.8), (0, 1), (1, 0.5)]
    assert figure.axes[0].get_xlim()[0] == 0


def test_bars_are_checked_in_stored_files(monkeypatch):
    monkeypatch.setattr(Path, "write_text", lambda *_: pytest.fail("written"))
    with pytest.raises(SystemExit) as ended:
        report.main(["--check"])
    assert all(re.match(r"\w+\.json: \w+: .* is .*; the bar is ", line) for line in str(ended.value.code).splitlines())
