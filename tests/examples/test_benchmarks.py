# SPDX-License-Identifier: Apache-2.0
"""The benchmarks of one GPU on the CPU, and what all share: cases, timing, checks that notice wrong results, result
files, tables, plots, bars and pages.

Sizes are tiny. mx.py and plain torch stand in for the kernels, as they do wherever there is no GPU.
"""

import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples/benchmarks"))

import report
from ds_mxfp8_moe import casts, mx
from ds_mxfp8_moe import grouped_gemm as recipe
from ds_mxfp8_moe.mx import MXTensor
from ds_mxfp8_moe.transport import Wire
from exchange import moe_layer
from kernels import expert_ffn, grouped_gemm, quantize, shapes
from kernels.shapes import Case
from lib import colors, results_file, run, show, timing, world
from lib.show import Measure
from lib.timing import Contender
from training import train

BF16 = torch.bfloat16
EVEN, PADDED, SKEWED = (Case(160, 96, 4, 128, "even"), Case(160, 96, 4, 64, "even"), Case(160, 96, 4, 256, "skewed"))
TINY = (EVEN, PADDED, SKEWED)

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(3)


def flat(batches) -> list[dict]:
    return [row for rows in batches for row in rows]


# ---- cases and arguments --------------------------------------------------------------------------------------------


def test_the_full_set_of_cases_goes_shape_by_shape():
    full, short = shapes.cases("full"), shapes.cases("short")
    assert len(full) == len(set(full)) == 5 * 3 * 6 * 2
    assert {case for case in short if case.dim != 2880} <= set(full)
    assert all(Case(*dims, 8, 16384, "even") in short for dims in shapes.SEED_SHAPES)
    for found in (full, short):
        dims = [(case.dim, case.hidden) for case in found]
        assert len(set(dims)) == sum(a != b for a, b in zip(dims, dims[1:], strict=False)) + 1


def test_skewed_splits_have_one_heavy_expert_and_empty_ones():
    for case in shapes.cases("full"):
        counts = case.counts()
        assert len(counts) == case.experts and sum(counts) == case.experts * case.tokens_per_expert
        assert counts == case.counts() and case.rows() == shapes.ends(shapes.padded(counts))[-1]
        if case.split == "even":
            assert len(set(counts)) == 1
        else:
            assert all(count % 128 == 0 for count in counts) and 0 in counts
            assert sum(counts) <= 3 * counts[case.experts // 2] < sum(counts) + 3 * 128


def args_of(*arguments):
    parser = run.timed_parser("", 0.1, jobs=True)
    shapes.add_arguments(parser)
    return parser.parse_args(arguments)


def test_cases_can_be_narrowed_down_and_must_fit():
    args = args_of("--cases", "full", "--shapes", "2048x768", "--experts", "4", "8", "--tokens", "64", "--splits",
                   "even")
    assert shapes.chosen(args, lambda case: 0) == [Case(2048, 768, 4, 64, "even"), Case(2048, 768, 8, 64, "even")]
    assert shapes.chosen(args, lambda case: 25e9 * case.experts) == [Case(2048, 768, 4, 64, "even")]
    everything = shapes.chosen(args_of("--cases", "full"), expert_ffn.bytes_needed)
    assert Case(8192, 5120, 32, 16384, "even") not in everything
    assert Case(7168, 2048, 32, 16384, "even") in everything and Case(8192, 5120, 8, 16384, "even") in everything
    with pytest.raises(SystemExit, match="--cases short .* its shapes: 7168x2048, .*, 2048x768, 2880x2880$"):
        shapes.chosen(args_of("--cases", "short", "--shapes", "128x256"), lambda case: 0)


def test_without_a_gpu_cases_are_tiny_and_the_result_file_must_be_named(monkeypatch, capsys):
    parser = run.timed_parser("", 0.1, jobs=True)
    args = run.parse(parser, ["--out", "x.json"])
    assert (args.cases, args.jobs) == ("tiny", 0)
    with pytest.raises(SystemExit):
        run.parse(parser, [])
    assert "name the result file with --out" in capsys.readouterr().err.splitlines()[-1]
    assert run.parse(parser, ["--show", "x.json"]).out is None
    monkeypatch.setattr(world, "on_gpu", lambda: True)
    args = run.parse(run.timed_parser("", 0.1, jobs=True), [])
    assert (args.cases, args.jobs, args.out) == ("full", 8, None)


def test_names_that_no_result_file_can_have_are_refused_at_the_start(tmp_path, capsys):
    (tmp_path / "file").touch()
    for out, told in ((tmp_path, "expected the name of a JSON file"), (tmp_path / "x.png", "its plot goes beside it"),
                      (tmp_path / "file/folder/x.json", "file is no folder")):
        with pytest.raises(SystemExit):
            run.parse(run.parser(""), ["--out", str(out)])
        assert told in capsys.readouterr().err.splitlines()[-1]


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


def test_new_memory_is_poisoned_for_checks():
    with timing.poisoned():
        assert torch.empty(8).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


# ---- contenders are right, and wrong ones are noticed ---------------------------------------------------------------


@pytest.mark.parametrize("case", TINY, ids=str)
def test_gemm_contenders_are_correct_by_their_own_check(case):
    rows = flat(grouped_gemm.measured_rows([case], 0.001))
    assert [row["contender"] for row in rows if row["case"]["operation"] == "wgrad"] == [
        grouped_gemm.TORCH, grouped_gemm.LOOP, grouped_gemm.OURS_BF16, grouped_gemm.FROM_MXFP8, grouped_gemm.MXFP8]
    assert all(row["correct"] for row in rows), rows
    assert {row["case"]["flops"] for row in rows} == {2 * sum(case.counts()) * 160 * 96}


@pytest.mark.parametrize("wrong", ["scaled", "unwritten", "stray", "other expert"])
@pytest.mark.parametrize("operation", ["forward", "dgrad", "wgrad"])
def test_wrong_gemms_are_noticed(monkeypatch, operation, wrong):
    case = SKEWED if operation == "wgrad" else PADDED
    counts = case.counts()

    def spoilt(of):
        def call(a, b, ends, *args, **options):
            out = of(a, b, ends, *args, **options)
            if not isinstance(a, MXTensor):
                return out
            if wrong == "scaled":
                return out * 1.2
            if wrong == "unwritten":
                out[-1 if operation == "wgrad" else -64 - 1] = float("nan")
            elif wrong == "stray":
                out[counts.index(0) if operation == "wgrad" else 64] += 1
            else:
                out = out.roll(1 if operation == "wgrad" else 128, 0)
            return out
        return call

    for name in ("grouped_mm", "grouped_mm_wgrad"):
        monkeypatch.setattr(recipe, name, spoilt(getattr(recipe, name)))
    ways = grouped_gemm.contenders(grouped_gemm.Shape([case]), case)[operation]
    assert [grouped_gemm.check(operation, case, ways[0], way)["correct"] for way in ways] == (
        [True] * (len(ways) - 1) + [False])


def test_casts_are_correct_by_their_own_check():
    made = [make for block in (128, 32) for make in (
        partial(quantize.of_rows, 512, 160, block), partial(quantize.of_weights, 3, 160, 96, block, torch.float32),
        partial(quantize.of_activation, 512, 128, block))]
    rows = flat(quantize.measured_rows(made, 0.001))
    assert len(rows) == 2 * (5 + 4 + 3)
    assert all(row["correct"] for row in rows), [row for row in rows if not row["correct"]]
    moved = {(row["case"]["kernel"], row["case"]["block_size"]): row["case"]["bytes"] for row in rows}
    assert moved["rows", 128] == 512 * 160 * 3 + 512 * 2
    assert moved["rows and columns", 32] == 512 * 160 * 4 + 2 * 512 * 5
    assert moved["weights, scattered", 128] == 3 * (160 * 96 * 5 + 2 * 1)
    assert moved["SwiGLU backward, rows, columns", 32] == 512 * (128 * 2 + 256 + 8 + 4 + 4 + 2 * 256 + 2 * 8)
    for shape in (*quantize.ROWS, *quantize.HIDDEN):
        assert shape[0] * shape[1] * 2 >= 256 << 20  # larger than any L2


def test_wrong_casts_are_noticed(monkeypatch):
    def off(of):
        def call(*args):
            x = of(*args)
            data = x.qdata.view(torch.uint8).clone()
            data[0, -1] ^= 1
            return x.with_parts(data.view(torch.float8_e4m3fn), x.scale)
        return call

    for name in ("quantize_columns", "rescale_columns"):
        monkeypatch.setattr(casts, name, off(getattr(casts, name)))
    found = {kernel.case["kernel"]: quantize.check(kernel)["correct"] for kernel in quantize.of_rows(512, 160, 128)}
    assert [name for name, correct in found.items() if not correct] == [
        "columns", "rows and columns", "re-scale, transposed"]


@pytest.mark.parametrize("case", TINY, ids=str)
def test_ffn_contenders_are_correct_by_their_own_check(case):
    rows = flat(expert_ffn.measured_rows([case], 0.001, 0))
    assert [row["contender"] for row in rows] == [expert_ffn.PLAIN, *expert_ffn.RECIPES]
    assert all(row["correct"] for row in rows), rows
    assert all(("median_ms" in row) == (row["contender"] not in expert_ffn.UNTIMED) for row in rows)
    # Of the recipes, only those that quantise are far from plain PyTorch.
    assert all((row["sqnr_db"]["y"] > 38) == (row["contender"] in ("bf16", expert_ffn.PLAIN)) for row in rows)


def test_below_min_tokens_per_expert_every_recipe_is_bf16():
    rows = flat(expert_ffn.measured_rows([PADDED], 0.001, 65))
    assert all(row["sqnr_db"]["y"] > 38 for row in rows)
    assert [row.get("unquantized") for row in rows] == [None, False, True, True, True]


@pytest.mark.parametrize("part", ["y", "x", "weight", "up", "down"])
def test_wrong_ffns_are_noticed(monkeypatch, part):
    shape = expert_ffn.Shape([SKEWED])
    step, plain = expert_ffn.our_step(shape, SKEWED, "bf16", 0), expert_ffn.plain_step(shape, SKEWED)
    E, call = SKEWED.experts, expert_ffn.Step.__call__

    def spoilt(called):
        y, grads = call(called)
        if called is step:
            parts = {"y": [y], "x": grads[:1], "weight": grads[1:2], "up": grads[2 + E:2 + 2 * E],
                     "down": grads[2 + 2 * E:]}
            for x in parts[part]:
                x.mul_(1.2)
        return y, grads

    assert expert_ffn.check("bf16", step, plain)["correct"]
    monkeypatch.setattr(expert_ffn.Step, "__call__", spoilt)
    found = expert_ffn.check("bf16", step, plain)
    assert not found["correct"] and {name for name, value in found["sqnr_db"].items() if value < 20} == {part}


def test_the_transport_in_place_keeps_rows_where_they_are():
    transport = expert_ffn.InPlace.of((64, 0, 200))
    plan = transport.plan(None, 3)
    assert plan.group_ends_E.tolist() == [128, 128, 384]
    assert plan.num_rows == plan.num_tokens == 384 and plan.tokens_per_expert == 88
    x, weight = torch.randn(384, 96).to(BF16), torch.rand(384, 1)
    plain, weight_P = transport.dispatch(plan, x, Wire(False), weight)
    assert plain is x and torch.equal(weight_P, weight.view(-1))
    rows, nothing = transport.dispatch(plan, x, Wire(True, 32, "floor"))
    assert nothing is None and quantize.same(rows, mx.quantize(x, 32, "floor"))
    y, weight_TK = transport.combine(plan, x.float(), Wire(True, 32, "floor"), BF16, weight_P)
    assert torch.equal(y, mx.quantize(x.float(), 32, "floor").dequantize(BF16)) and torch.equal(weight_TK, weight)


# ---- result files, tables and bars ----------------------------------------------------------------------------------


def test_a_script_runs_stores_and_shows(tmp_path):
    script = Path(grouped_gemm.__file__)
    path = tmp_path / "folder/gemm.json"
    command = [sys.executable, script, "--out", path, "--budget", "0.001", "--commit", "abc", "--tokens", "128"]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    result = json.loads(path.read_text())
    assert (result["benchmark"], result["commit"], len(result["rows"])) == ("grouped_gemm", "abc", 2 + 4 + 4 + 5)
    assert str(tmp_path) not in result["command"] and path.with_suffix(".png").exists()
    assert "ours, MXFP8 over torch._grouped_mm" in ended.stdout
    for arguments, told in (["--show", tmp_path / "none"], "No such file"), (["--tokens", "3"], "no such case"):
        ended = subprocess.run([sys.executable, script, "--out", path, *arguments], capture_output=True, text=True,
                               check=False)
        assert ended.returncode == 1 and told in ended.stderr.splitlines()[-1] and "Traceback" not in ended.stderr


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
    bars.write_text('expert_ffn: {"b over a": [{where: {tokens: 8}, bar: 3.1}, {bar: 1.1, aim: 1.3}], '
                    '"ms": [{bar: 6}]}')
    path = tmp_path / "x.json"
    results_file.write("expert_ffn", ROWS[:4], path, "abc")
    assert show.show(SHOWN, path) == ""
    capsys.readouterr()
    assert show.show(SHOWN, path, check=True) == "bars not reached: 1"
    assert capsys.readouterr().err.splitlines() == ["expert_ffn: b over a is 3 (tokens 8); the bar is 3.1",
                                                    "expert_ffn: b over a is 1.2 (tokens 64); the aim is 1.3"]
    bars.write_text('expert_ffn: {"c over a": [{bar: 1}]}')
    with pytest.raises(SystemExit, match="has bars of expert_ffn that it does not measure: c over a"):
        show.show(SHOWN, path, check=True)
    results_file.write("expert_ffn", ROWS, path, "abc")
    assert show.show(SHOWN, path) == "some results were wrong" and path.with_suffix(".png").exists()
    results_file.write("expert_ffn", [], path, "abc")
    assert "there was no time for any case" in show.show(SHOWN, path)


def test_what_each_benchmark_adds_to_its_rows():
    work = grouped_gemm.least_work("forward", Case(256, 128, 4, 128, "even"))
    assert work == {"flops": 2 * 512 * 256 * 128, "least_bytes": 512 * (256 + 2) + 4 * 256 * 128 + 512 * 128 * 2}
    rates = [{"case": {"operation": "device copy", "bytes": 10}, "contender": "copy_", "median_ms": 1.0,
              "correct": True},
             {"case": {"operation": "fp8 product", "flops": 10}, "contender": "torch._scaled_mm", "median_ms": 1.0,
              "correct": True}]
    gemms = [{"case": {"operation": "dgrad", "flops": 30, "least_bytes": 40}, "contender": name, "median_ms": ms,
              "correct": True} for name, ms in ((grouped_gemm.TORCH, 9.0), (grouped_gemm.LOOP, 8.0))]
    found = {one["contender"]: one["median_ms"] for one in grouped_gemm.prepare({"rows": rates + gemms})}
    assert found == {grouped_gemm.TORCH: 9, grouped_gemm.LOOP: 8, grouped_gemm.FASTEST: 8, grouped_gemm.FLOOR: 4}
    cast = {"case": {"kernel": "rows", "bytes": 30}, "contender": "ours", "median_ms": 6.0}
    assert quantize.prepare({"rows": [*rates, cast]})[0]["share"] == 0.5
    layers = [{"case": {"operation": part, "ranks": 2}, "contender": "x", "median_ms": ms, "correct": True}
              for part, ms in (("forward", 1.0), ("backward", 2.0), ("total", 3.0))]
    assert moe_layer.prepare({"rows": layers}) == [{**layers[2], "case": {"ranks": 2}, "forward_ms": 1.0,
                                                    "backward_ms": 2.0}]


# ---- pages ----------------------------------------------------------------------------------------------------------


def test_the_pages_say_what_the_result_files_say():
    for path, text in report.texts().items():
        assert path.read_text() == text, f"{path.name}: run make report"
    measured = report.between(report.README.read_text(), "measured")
    assert len(measured.splitlines()) <= 15 and not re.search("missed|bar |aim", measured, re.IGNORECASE)


def test_bars_are_checked_in_stored_files(monkeypatch, capsys):
    monkeypatch.setattr(Path, "write_text", lambda *_: pytest.fail("written"))
    with pytest.raises(SystemExit) as ended:
        report.main(["--check"])
    assert all(re.match(r"\w+\.json: \w+: .* is .*; the bar is ", line) for line in str(ended.value.code).splitlines())
    with pytest.raises(SystemExit):
        report.main(["--chek"])
    assert "unrecognized arguments: --chek" in capsys.readouterr().err.splitlines()[-1]


def test_the_latest_file_with_most_ranks_comes_first(tmp_path, monkeypatch):
    monkeypatch.setattr(results_file, "RESULTS", tmp_path)
    for name, day in (("a_2ranks", 2), ("a_8ranks", 1), ("a_4ranks", 2), ("a", 2)):
        head = dict.fromkeys(results_file.HEAD) | {"benchmark": "a", "date": f"2026-11-2{day}T00:00:00+00:00"}
        (tmp_path / f"{name}.json").write_text(json.dumps(head))
    assert [path.stem for path, _ in report.results("a")] == ["a_4ranks", "a_2ranks", "a", "a_8ranks"]
    rows = [{"median_ms": 2.0, "p10_ms": 1.9, "p90_ms": 2.1}, {"median_ms": 1.0, "p10_ms": 1, "p90_ms": 1.5}, {}]
    assert "10.0% in nine of ten, at most 50.0%" in report.spread({"rows": rows})


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


def test_a_contender_has_one_color_in_all_plots():
    assert colors.color_of("ours, mxfp8_wgrad_with_hp") == colors.color_of("AutoEP, ours, mxfp8_wgrad_with_hp, graph")
    assert colors.color_of("nvlink, mxfp8") == colors.color_of("mxfp8") != colors.color_of("nvlink, bf16")
    assert colors.color_of("ours, mxfp8_wgrad_with_hp, classic") == colors.color_of(
        "classic, ours, mxfp8_wgrad_with_hp") != colors.color_of("ours, mxfp8_wgrad_with_hp")
    known = [name for names in colors._CONTENDERS.values() for name in names]
    assert len(known) == len(set(known)) and colors.color_of("floor") is None
    compared = ("AutoEP bf16", "classic bf16", "SonicMoE bf16", "ours, bf16", "ours, mxfp8", "NCCL bf16", "floor")
    assert len(set(colors.colors(compared).values())) == len(compared)
    assert colors.tint("#000000", 0) == (0, 0, 0) < colors.tint("#000000", 1) < colors.tint("#000000", 2)


def test_the_plot_of_the_readme_shows_rates_over_autoep(tmp_path):
    def row(size, name, rate, **case):
        case = {"size": size, "layers": 2, "routing": "even", "accumulation": 1} | case
        return {"case": case, "contender": name, "tokens_per_s": rate, "correct": True}

    rows = [row("a", train.AUTOEP, 10.0), row("a", train.HP, 13.0), row("a", train.HP, 9.0, routing="router"),
            row("b", train.AUTOEP, 5.0), row("b", train.CLASSIC, 2.0), row("c", train.HP, 1.0),
            row("b", train.HP, 99.0, accumulation=4)]
    result = {"rows": rows, "machine": "2 x NVIDIA X"}
    assert train.gained(result) == {"a, 2 layers": {train.AUTOEP: 10, train.HP: 13},
                                    "b, 2 layers": {train.CLASSIC: 2, train.AUTOEP: 5}}
    show.draw(train.plot_gain, tmp_path / "gain.json", result)
    assert (tmp_path / "gain.png").stat().st_size > 5000


def test_the_readmes_rows_name_the_commit_of_their_case():
    rows = [{"case": {"n": 1}, "contender": "a", "commit": "f" * 40}, {"case": {"n": 2}, "contender": "a"}]
    result = {"machine": "X", "date": "2026-11-23T00:00:00", "commit": "e" * 40, "rows": rows}
    assert report.origin_of(show.Value(1.0, "a", {"n": 1}), result).endswith("f" * 10)
    assert report.origin_of(show.Value(1.0, "a", {"n": 2}), result).endswith("e" * 10)
