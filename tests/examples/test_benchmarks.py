# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks share: cases, timing, checks that notice wrong results, result files, tables, plots, bars and
pages. test_benchmark_scripts.py runs each script."""

import json
import re
from pathlib import Path

import pytest
import torch

import report
from kernels import grouped_gemm, quantize
from kernels.shapes import Case
from lib import results_file, run, show, timing, world
from lib.show import Measure
from lib.timing import Contender
from training import train

PADDED, SKEWED = Case(160, 96, 4, 64, "even"), Case(160, 96, 4, 256, "skewed")

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(3)


# ---- cases and arguments --------------------------------------------------------------------------------------------


def test_without_a_gpu_cases_are_tiny_and_the_result_file_must_be_named(monkeypatch, capsys):
    parser = run.timed_parser("", 0.1)
    args = run.parse(parser, ["--out", "x.json"])
    assert args.cases == "tiny"
    with pytest.raises(SystemExit):
        run.parse(parser, [])
    assert "name the result file with --out" in capsys.readouterr().err.splitlines()[-1]
    assert run.parse(parser, ["--show", "x.json"]).out is None
    monkeypatch.setattr(world, "on_gpu", lambda: True)
    args = run.parse(run.timed_parser("", 0.1), [])
    assert (args.cases, args.out) == ("full", None)


# ---- timing ---------------------------------------------------------------------------------------------------------


def test_calls_go_to_and_fro_and_one_that_raises_costs_only_its_own_row():
    called = []

    def fails():
        raise ValueError("no such size")

    def right(**more):
        return lambda: {"correct": True, **more}

    contenders = {"a": Contender({"op": lambda: called.append("a")}, right()),
                  "b": Contender({"op": lambda: called.append("b")}, right()),
                  "bad": Contender({"op": fails}, fails),
                  "unseen": Contender({"op": fails}, right(held_bytes=7), timed=False)}
    a, b, bad, unseen = timing.rows({"n": 1}, contenders, 0.0)
    assert called == ["a", "b"] + ["b", "a", "a", "b"] * 2 + ["b", "a"]
    assert a["case"] == {"operation": "op", "n": 1} and a["repeats"] == b["repeats"] == 5
    assert 0 <= a["p10_ms"] <= a["median_ms"] <= a["p90_ms"]
    assert not bad["correct"] and "no such size" in bad["failure"] and "median_ms" not in bad
    assert unseen["held_bytes"] == 7 and "median_ms" not in unseen


# ---- wrong results are noticed --------------------------------------------------------------------------------------


@pytest.mark.parametrize("spoil", [
    lambda y: y * 1.2, lambda y: y.roll(1, 0), lambda y: y.index_fill(0, torch.tensor([3]), float("nan")),
    lambda y: y.index_add(0, torch.tensor([3]), torch.full((1, 32), 9.0))], ids=["scaled", "mixed up", "NaN", "stray"])
def test_a_wrong_result_is_noticed(spoil):
    """From the comparison of a contender to what the result file says."""
    x, y = torch.randn(64, 32), torch.randn(64, 32)
    right = timing.close({"x": x, "y": y}, {"x": x, "y": y + 1e-3 * torch.randn(64, 32)}, 38)
    assert right["correct"] and right["sqnr_db"]["x"] == 99 and 55 < right["sqnr_db"]["y"] < 65
    found = timing.close({"x": x, "y": y}, {"x": x, "y": spoil(y)}, 20)
    assert not found["correct"] and found["sqnr_db"].get("y", 0) < 20 < found["sqnr_db"]["x"]
    one, = timing.rows({"n": 1}, {"a": Contender({"op": lambda: None}, lambda: found)}, 0.0)
    assert not one["correct"] and one["sqnr_db"] == found["sqnr_db"]
    assert "a" in show.failures_table({"rows": [one]})


def test_what_stands_where_zeros_belong_is_noticed():
    """In padding rows, and in the gradient of an expert without rows."""
    for operation, case, at in (("forward", PADDED, 64), ("wgrad", SKEWED, SKEWED.counts().index(0))):
        ways = grouped_gemm.contenders(grouped_gemm.Shape([case]), case)[operation]
        out = ways[-1].call()
        assert not grouped_gemm.stray(operation, case, ways[-1], out)
        out[at] += 1
        assert grouped_gemm.stray(operation, case, ways[-1], out)


# ---- result files, tables and bars ----------------------------------------------------------------------------------


def test_a_write_that_is_cut_short_leaves_the_rows_of_before(tmp_path, monkeypatch):
    path = tmp_path / "x.json"
    results_file.write("quantize", [{"correct": True}], path, "abc")
    before = path.read_text()

    def cut_short(file, text):
        with file.open("w") as opened:
            opened.write(text[:9])
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "write_text", cut_short)
    with pytest.raises(OSError, match="no space"):
        results_file.write("quantize", [{"correct": True}] * 2, path, "abc")
    assert path.read_text() == before


@pytest.mark.parametrize("text, told", [
    (None, "No such file"), ("\x89PNG", "no result file"), ("[1]", "expected what a benchmark writes"),
    ('{"rows": []}', "expected what a benchmark writes"),
    (json.dumps(dict.fromkeys(results_file.HEAD) | {"benchmark": "other"}), "has results of other, expected quant")])
def test_a_file_that_is_no_result_ends_in_one_line(tmp_path, text, told):
    path = tmp_path / "file.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit) as ended:
        show.show(quantize.SHOWN, path)
    assert told in ended.value.code and str(path) in ended.value.code and "\n" not in ended.value.code


def row(name, ms, correct=True, **case):
    return {"case": {"flops": 1} | case, "contender": name, "median_ms": ms, "correct": correct}


def plot(result, pyplot):
    show.lines(pyplot, show.points_over(result, "tokens", ("split", ), ("a", "b")), "tokens", "ms")


SHOWN = show.Shown("expert_ffn", [
    Measure("b over a", ("b", ), "a", main=True), Measure("b of a", ("b", ), "a", better=show.SMALLER, form="{:.0%}"),
    Measure("ms", ("a", "b"), better=show.SMALLER, form="{}")], [show.MS], plot, ratios=(("a", "b"), ))
ROWS = [row("a", 6, tokens=8, split="even"), row("b", 2, tokens=8, split="even"),
        row("a", 6, tokens=64, split="even"), row("b", 5, tokens=64, split="even"),
        row("a", 1, False, tokens=64, split="skewed")]


def test_tables_state_the_worst_case_and_what_failed():
    measures, failures, table = show.texts(SHOWN, {"rows": ROWS})
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in measures.splitlines()[2:]]
    assert lines == [["b over a", "1.20x", "2.10x", "3.00x", "tokens 64, even"],
                     ["b of a", "83%", "58%", "33%", "tokens 64, even"], ["ms", "6", "5.5", "2", "a, tokens 8, even"]]
    assert "a" in failures.splitlines()[2] and "tokens 64, skewed" in failures
    assert [cell.strip() for cell in table.splitlines()[0].split("|")[1:-1]] == [
        "tokens", "split", "a: ms", "b: ms", "b over a"]
    assert "3.00x" in table.splitlines()[2]
    long = show.main_table(SHOWN._replace(wide=False), {"rows": ROWS[:2]})
    assert [line.split("|")[-2].strip() for line in long.splitlines()] == ["over a", "-" * 9 + ":", "1.00x", "3.00x"]


def test_missed_bars_are_one_line_each_and_the_exit_status(tmp_path, monkeypatch, capsys):
    bars = tmp_path / "bars.yaml"
    monkeypatch.setattr(show, "BARS", bars)
    bars.write_text('expert_ffn: {"b over a": [{where: {tokens: 8}, bar: 3.1}, {bar: 1.1}], '
                    '"ms": [{bar: 6}]}')
    path = tmp_path / "x.json"
    results_file.write("expert_ffn", ROWS[:4], path, "abc")
    assert show.show(SHOWN, path) == ""
    capsys.readouterr()
    assert show.show(SHOWN, path, check=True) == "bars not reached: 1"
    assert capsys.readouterr().err.splitlines() == ["expert_ffn: b over a is 3 (tokens 8); the bar is 3.1"]
    bars.write_text('expert_ffn: {"c over a": [{bar: 1}]}')
    with pytest.raises(SystemExit, match="has bars of expert_ffn that it does not measure: c over a"):
        show.show(SHOWN, path, check=True)
    results_file.write("expert_ffn", ROWS, path, "abc")
    assert show.show(SHOWN, path) == "some results were wrong" and path.with_suffix(".png").exists()
    results_file.write("expert_ffn", [], path, "abc")
    assert "there was no time for any case" in show.show(SHOWN, path)


# ---- pages ----------------------------------------------------------------------------------------------------------


def test_the_pages_say_what_the_result_files_say():
    for path, text in report.texts().items():
        assert path.read_text() == text, f"{path.name}: run make report"
    begin, end = report.marks("measured")
    measured = report.README.read_text().partition(begin)[2].partition(end)[0]
    assert len(measured.strip().splitlines()) == 2 + 4 and not re.search("missed|bar |aim", measured, re.IGNORECASE)


def test_bars_are_checked_in_stored_files(monkeypatch, capsys):
    monkeypatch.setattr(Path, "write_text", lambda *_: pytest.fail("written"))
    with pytest.raises(SystemExit) as ended:
        report.main(["--check"])
    assert all(re.match(r"\w+\.json: \w+: .* is .*; the bar is ", line) for line in str(ended.value.code).splitlines())
    with pytest.raises(SystemExit):
        report.main(["--chek"])
    assert "unrecognized arguments: --chek" in capsys.readouterr().err.splitlines()[-1]


def test_links_between_the_pages_lead_somewhere():
    """Anchors as GitHub makes them: headings in small letters."""
    root = report.README.parent
    for page in (report.README, *sorted((root / ".github").glob("*.md")), *sorted((root / "examples").rglob("*.md"))):
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            path, _, anchor = link.partition("#")
            if not path.startswith("http"):
                target = page.parent / path if path else page
                assert target.exists(), f"{page}: {link}"
                headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE) if anchor else []
                anchors = [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]
                assert not anchor or anchor in anchors, f"{page}: {link}"


# ---- plots ----------------------------------------------------------------------------------------------------------


def test_the_plot_of_the_readme_compares_layers_of_one_kind(tmp_path):
    def row(size, name, rate, **case):
        case = {"size": size, "layers": 2, "routing": "even", "accumulation": 1} | case
        return {"case": case, "contender": name, "tokens_per_s": rate, "correct": True}

    rows = [row("a", train.AUTOEP, 10.0), row("a", train.HP, 13.0), row("a", train.HP, 9.0, routing="router"),
            row("a", train.CLASSIC, 2.0), row("b", train.CLASSIC, 2.0), row("b", train.HP_CLASSIC, 5.0),
            row("b", train.HP, 99.0, accumulation=4), row("b", train.CLASSIC, 3.0, overflow_check=False)]
    result = {"rows": rows, "machine": "2 x NVIDIA X"}
    shapes = [train.gained(result, *kind) for kind in train.GAINS]
    assert shapes == [{"a, 2 layers, 2 x X": {train.AUTOEP: 10, train.HP: 13}},
                      {"b, 2 layers, 2 x X": {train.CLASSIC: 2, train.HP_CLASSIC: 5}}]
    show.draw(train.plot_gain, tmp_path / "gain.json", shapes[0] | shapes[1])
    assert (tmp_path / "gain.png").stat().st_size > 5000
