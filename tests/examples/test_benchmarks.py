# SPDX-License-Identifier: Apache-2.0
"""examples/benchmarks on the CPU: cases, timing, checks that notice wrong results, tables and plots of stored files.

Sizes are tiny, and mx.py and plain torch stand in for the kernels, as they do wherever there is no GPU.
"""

import json
import re
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples/benchmarks"))

import report
from ds_mxfp8_moe import casts, mx
from ds_mxfp8_moe import grouped_gemm as recipe
from ds_mxfp8_moe.mx import MXTensor, sqnr_db
from ds_mxfp8_moe.transport import Wire
from kernels import expert_ffn, grouped_gemm, quantize
from lib import options, results_file, shapes, show, timing
from lib.shapes import Case
from training import parity

BF16 = torch.bfloat16
EVEN, PADDED, SKEWED = (Case(160, 96, 4, 128, "even"), Case(160, 96, 4, 64, "even"), Case(160, 96, 4, 256, "skewed"))
TINY = (EVEN, PADDED, SKEWED)

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(3)


def test_the_full_set_is_what_was_asked_for():
    full = shapes.cases("full")
    assert len(full) == len(set(full)) == 5 * 3 * 6 * 2
    assert set(shapes.cases("short")) <= set(full)
    short = shapes.cases("short")
    assert all(Case(*dims, 8, 16384, "even") in short for dims in shapes.SEED_SHAPES)
    for found in (full, short):  # shape by shape
        dims = [(case.dim, case.hidden) for case in found]
        assert len(set(dims)) == sum(a != b for a, b in zip(dims, dims[1:], strict=False)) + 1


def test_splits():
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
    parser = options.parser("")
    options.add_shapes(parser)
    return parser.parse_args(arguments)


def test_cases_can_be_narrowed_down_and_must_fit():
    args = args_of("--cases", "full", "--shapes", "2048x768", "--experts", "4", "8", "--tokens", "64", "--splits",
                   "even")
    assert options.chosen(args, lambda case: 0) == [Case(2048, 768, 4, 64, "even"), Case(2048, 768, 8, 64, "even")]
    assert options.chosen(args, lambda case: 25e9 * case.experts) == [Case(2048, 768, 4, 64, "even")]
    everything = options.chosen(args_of("--cases", "full"), expert_ffn.bytes_needed)
    assert Case(8192, 5120, 32, 16384, "even") not in everything
    assert Case(7168, 2048, 32, 16384, "even") in everything and Case(8192, 5120, 8, 16384, "even") in everything


def test_a_shape_that_is_not_there_is_an_error_with_those_that_are():
    with pytest.raises(SystemExit, match="--cases short .* --shapes 7168x2048 8192x5120 2048x1408 2048x768; --exp"):
        options.chosen(args_of("--cases", "short", "--shapes", "128x256"), lambda case: 0)


def test_without_a_gpu_cases_are_tiny_and_the_result_file_must_be_named(monkeypatch, capsys):
    parser = options.parser("")
    args = results_file.parse(parser, ["--out", "x.json"])
    assert (args.cases, args.jobs) == ("tiny", 0)
    assert max(case.rows() * case.dim for case in shapes.cases("tiny")) < 1e6 and len(quantize.families("tiny")) == 4
    with pytest.raises(SystemExit):
        results_file.parse(parser, [])
    assert "name the result file with --out" in capsys.readouterr().err
    assert results_file.parse(parser, ["--show", "x.json"]).out is None
    for module in (timing, results_file):
        monkeypatch.setattr(module, "on_gpu", lambda: True)
    args = results_file.parse(options.parser(""), [])
    assert (args.cases, args.jobs, args.out) == ("full", 8, None)


def test_names_that_no_result_file_can_have_are_refused_at_the_start(tmp_path, capsys):
    (tmp_path / "file").touch()
    for out, told in ((tmp_path, "expected the name of a JSON file"), (tmp_path / "x.png", "its plot goes beside it"),
                      (tmp_path / "file/folder/x.json", "file is no folder")):
        with pytest.raises(SystemExit):
            results_file.parse(options.parser(""), ["--out", str(out)])
        assert told in capsys.readouterr().err.splitlines()[-1]
    results_file.parse(options.parser(""), ["--out", str(tmp_path / "folder/x.json")])


def test_a_write_that_is_cut_short_leaves_the_rows_of_before(tmp_path, monkeypatch):
    path = tmp_path / "x.json"
    results_file.write("quantize", [{"correct": True}], path, of_commit="abc")
    before = path.read_text()

    def cut_short(file, text):
        with file.open("w") as opened:
            opened.write(text[:9])
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "write_text", cut_short)
    with pytest.raises(OSError, match="no space"):
        results_file.write("quantize", [{"correct": True}] * 2, path, of_commit="abc")
    assert path.read_text() == before


def test_parts_of_the_warm_up_cover_everything_once():
    items, args = list(range(7)), SimpleNamespace(jobs=3)
    parts = [options.part(items, SimpleNamespace(jobs=args.jobs, warm_up=part)) for part in range(3)]
    assert sorted(sum(parts, [])) == items


def test_quantiles_are_in_order_and_calls_go_to_and_fro():
    called = []
    calls = {name: lambda name=name: called.append(name) for name in "ab"}
    times = timing.quantiles_ms(calls, repeats=5)
    assert called == ["a", "b"] + ["b", "a", "a", "b"] * 2 + ["b", "a"]
    assert all(0 <= t["p10_ms"] <= t["median_ms"] <= t["p90_ms"] and t["repeats"] == 5 for t in times.values())
    assert timing.quantiles_ms(calls, budget_s=0)["a"]["repeats"] == 3


def test_a_contender_that_raises_costs_only_its_own_row():
    def fails():
        raise ValueError("no such size")

    calls = {"good": (lambda: None, lambda: {"correct": True}), "bad": (fails, fails),
             "unseen": (lambda: None, lambda: {"correct": True, "held_bytes": 7})}
    good, bad, unseen = timing.rows({"n": 1}, calls, 0.01, ("unseen", ))
    assert good["correct"] and good["median_ms"] >= 0
    assert not bad["correct"] and "no such size" in bad["failure"] and "median_ms" not in bad
    assert unseen["held_bytes"] == 7 and "median_ms" not in unseen


def test_new_memory_is_poisoned_for_checks():
    with timing.poisoned():
        assert torch.empty(8).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("case", TINY, ids=str)
def test_gemm_contenders_are_correct_by_their_own_check(case):
    rows = list(grouped_gemm.run([case], 0.001))
    assert [row["contender"] for row in rows if row["case"]["operation"] == "wgrad"] == [
        "torch._grouped_mm", "cuBLAS loop", "ours, bf16", "ours, bf16 from MXFP8", "ours, MXFP8"]
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
                return out * 1.01
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
    assert [grouped_gemm.check(operation, way)["correct"] for way in ways] == [True] * (len(ways) - 1) + [False]


def test_values_of_rowwise_operands():
    x = torch.randn(6, 64).to(BF16)
    rowwise = grouped_gemm.Rowwise.of(x)
    values = grouped_gemm.values(rowwise, torch.tensor([1, 4]), torch.arange(64))
    assert sqnr_db(x[[1, 4]].float(), values) > 28


def test_least_work():
    case = Case(256, 128, 4, 128, "skewed")
    counts = case.counts()
    filled = sum(count > 0 for count in counts)
    assert filled < 4
    work = grouped_gemm.least_work("forward", case)
    assert work == {"flops": 2 * 512 * 256 * 128, "least_bytes": 512 * (256 + 2) + filled * 256 * 128 + 512 * 128 * 2}
    assert grouped_gemm.least_work("wgrad", case)["least_bytes"] == 512 * (384 + 3) + 4 * 256 * 128 * 2
    # Bound by arithmetic, then by memory.
    assert show.floor_ms(work, 1e12, 1.0) == work["flops"]
    assert show.floor_ms(work, 1.0, 1e12) == work["least_bytes"]


def test_casts_are_correct_by_their_own_check():
    made = [make for block in (128, 32) for make in (
        partial(quantize.of_rows, 512, 160, block), partial(quantize.of_weights, 3, 160, 96, block, torch.float32),
        partial(quantize.of_activation, 512, 128, block))]
    rows = list(quantize.run(made, 0.001))
    assert len(rows) == 2 * (6 + 4 + 3)
    assert all(row["correct"] for row in rows), [row for row in rows if not row["correct"]]
    moved = {(row["case"]["kernel"], row["case"]["block_size"]): row["case"]["bytes"] for row in rows}
    assert moved["rows", 128] == 512 * 160 * 3 + 512 * 2
    assert moved["rows and columns", 32] == 512 * 160 * 4 + 2 * 512 * 5
    assert moved["weights, scattered", 128] == 3 * (160 * 96 * 5 + 2 * 1)
    assert moved["weights, transposed", 32] == 3 * 96 * (160 * 5 + 5)
    assert moved["SwiGLU backward, rows, columns", 32] == 512 * (128 * 2 + 256 + 8 + 4 + 4 + 2 * 256 + 2 * 8)


def test_every_family_of_casts_is_large_enough():
    for shape in (*quantize.ROWS, *quantize.HIDDEN):
        assert shape[0] * shape[1] * 2 >= 256 << 20
    assert all(E * N * K * 2 >= 256 << 20 for E, N, K in quantize.WEIGHTS)
    assert len(quantize.families("full")) == 2 * 2 + 2 * 2 * 2 + 2 * 2 and len(quantize.families("short")) == 4


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
    rows = list(expert_ffn.run([case], 0.001, 0))
    assert [row["contender"] for row in rows] == [expert_ffn.PLAIN, *expert_ffn.RECIPES]
    assert all(row["correct"] for row in rows), rows
    assert all(("median_ms" in row) == (row["contender"] not in expert_ffn.UNTIMED) for row in rows)
    # Of the recipes, only those that quantise are far from float32.
    assert all((row["sqnr_db"]["y"] > 38) == (row["contender"] in ("bf16", expert_ffn.PLAIN)) for row in rows)


def test_below_the_selection_s_count_every_recipe_is_bf16():
    rows = list(expert_ffn.run([PADDED], 0.001, 65))
    assert all(row["sqnr_db"]["y"] > 38 for row in rows)
    assert [row.get("unquantized") for row in rows] == [None, False, True, True, True]


@pytest.mark.parametrize("part", ["y", "x", "weight", "up", "down"])
def test_wrong_ffns_are_noticed(part):
    shape = expert_ffn.Shape([SKEWED])
    step, expected = expert_ffn.our_step(shape, SKEWED, "bf16", 0), expert_ffn.Expected(shape, SKEWED)
    y, grads = step()
    grads = list(grads)
    E = SKEWED.experts
    spoilt = {"y": [y], "x": grads[:1], "weight": grads[1:2], "up": grads[2 + E:2 + 2 * E], "down": grads[2 + 2 * E:]}
    for x in spoilt[part]:
        x.mul_(1.2)
    worst = {name for name, value in expected.sqnr_db(step, (y, tuple(grads))).items() if value < 20}
    assert worst == {part}


def test_the_transport_in_place_keeps_rows_where_they_are():
    transport = expert_ffn.InPlace.of((64, 0, 200))
    plan = transport.plan(None, 3)
    assert plan.group_ends == (128, 128, 384) and plan.group_ends_E.tolist() == [128, 128, 384]
    assert plan.num_rows == plan.num_tokens == 384 and plan.tokens_per_expert == 88
    x, weight = torch.randn(384, 96).to(BF16), torch.rand(384, 1)
    plain, weight_P = transport.dispatch(plan, x, Wire(False), weight)
    assert plain is x and torch.equal(weight_P, weight.view(-1))
    for block in (32, 128):
        wire = Wire(True, block, "floor")
        rows, nothing = transport.dispatch(plan, x, wire)
        expected = mx.quantize(x, block, "floor")
        assert nothing is None and torch.equal(rows.qdata.view(torch.uint8), expected.qdata.view(torch.uint8))
        assert torch.equal(rows.scale_bytes, expected.scale_bytes)
        y, weight_TK = transport.combine(plan, x.float(), wire, BF16, weight_P)
        assert torch.equal(y, mx.quantize(x.float(), block, "floor").dequantize(BF16))
        assert torch.equal(weight_TK, weight)


def test_padding_rows_get_no_gradient_and_the_experts_none_of_theirs():
    shape = expert_ffn.Shape([PADDED])
    step = expert_ffn.our_step(shape, PADDED, "mxfp8", 0)
    y, (dx, dweight, *_) = step()
    padding = torch.arange(y.shape[0]) % 128 >= 64
    assert not y[padding].any() and not dx[padding].any() and not dweight[padding].any()
    assert y[~padding].any(dim=1).all() and dx[~padding].any(dim=1).all()


def test_the_first_step_of_a_process_is_a_row(monkeypatch):
    monkeypatch.setattr(expert_ffn.subprocess, "run", lambda command, **_: SimpleNamespace(
        returncode=int("broken" in command), stdout="logging\n1.25\n", stderr="what went wrong"))
    good, bad = expert_ffn.first_steps(EVEN, ("mxfp8", "broken"), 0)
    assert good["first_s"] == 1.25 and good["correct"]
    assert not bad["correct"] and bad["failure"] == "what went wrong"
    assert expert_ffn.first_step_s(EVEN, "mxfp8", 0) > 0


def stored(benchmark, rows, path):
    results_file.write(benchmark, rows, path, of_commit="abc")
    result = json.loads(path.read_text())
    assert result["rows"] == rows and result["benchmark"] == benchmark and result["commit"] == "abc"
    return result


@pytest.fixture(scope="module")
def rates():
    rows = timing.rate_rows(1 << 16, 64)
    assert all(row["correct"] for row in rows)
    return rows


def test_table_and_plot_of_gemms(tmp_path, capsys, rates):
    cases = [Case(7168, 2048, 8, tokens, split) for tokens in (64, 16384) for split in shapes.SPLITS]
    ms = {"torch._grouped_mm": 8.0, "cuBLAS loop": 7.0, "ours, bf16": 7.5, "ours, bf16 from MXFP8": 8.5,
          "ours, MXFP8": 5.0}
    rows = [{"case": {"operation": operation, **case.as_dict(), **grouped_gemm.least_work(operation, case)},
             "contender": name, "median_ms": value, "correct": True}
            for case in cases for operation in ("forward", "dgrad", "wgrad") for name, value in ms.items()]
    path = tmp_path / "grouped_gemm.json"
    stored("grouped_gemm", rates + rows, path)
    assert show.show(path) and path.with_suffix(".png").stat().st_size > 10000
    printed = capsys.readouterr().out
    lines = {line.split("  ")[0]: line for line in printed.splitlines()}
    assert "1.6 " in lines["16384 tokens each, seed shapes: forward, dgrad over torch"]
    assert lines["16384 tokens each, seed shapes: forward, dgrad over torch"].endswith("bar")
    assert "1.4 " in lines["16384 tokens each, seed shapes: the same over the fastest bf16"]
    assert "0.941" in lines["16384 tokens each, seed shapes: wgrad, bf16 from MXFP8, over torch"]
    assert lines["16384 tokens each, seed shapes: wgrad, MXFP8, over the row above"].endswith("aim")

    rows[4] = {key: value for key, value in rows[4].items() if key != "median_ms"} | {
        "correct": False, "failure": "out of memory"}
    stored("grouped_gemm", rates + rows, path)
    assert not show.show(path)
    assert "WRONG: ours, MXFP8" in capsys.readouterr().out


def test_table_and_plot_of_casts(tmp_path, capsys, rates):
    cases = [{"kernel": kernel, "shape": "8x8", "block_size": 32, "dtype": "bf16", "bytes": 1 << 20}
             for kernel in ("rows", "columns")]
    rate = rates[0]["case"]["bytes"] / rates[0]["median_ms"]
    rows = [{"case": case, "contender": "ours", "median_ms": (1 << 20) / rate / share, "correct": True}
            for case, share in zip(cases, (0.97, 0.9), strict=True)]
    path = tmp_path / "quantize.json"
    stored("quantize", rates + rows, path)
    assert show.show(path) and path.with_suffix(".png").exists()
    printed = capsys.readouterr().out
    casts, fused = printed.splitlines()[-2:]
    assert "97.0%" in printed and "columns, 8x8" in casts and casts.endswith("bar") and fused.endswith("measured")


def test_table_and_plot_of_ffns(tmp_path, capsys):
    figures = {"plain torch": (10.5, 100, 200), "bf16": (10.0, 100, 200), "mxfp8_wgrad_with_hp": (8.0, 50, 180),
               "mxfp8_wgrad_with_hp, pre-activation bf16": (None, 76, 190), "mxfp8": (6.0, 50, 210)}
    rows = []
    for case in (Case(8192, 5120, 8, 16384, "even"), Case(2048, 768, 8, 2048, "skewed")):
        described = {"operation": "forward and backward", **case.as_dict(), "flops": 1}
        for name, (ms, held, peak) in figures.items():
            rows.append({"case": described, "contender": name, "held_bytes": held, "peak_bytes": peak, "correct": True}
                        | ({} if ms is None else {"median_ms": ms, "host_ms": 1.0}))
    rows.append({"case": {"operation": "first step of a process", **EVEN.as_dict()}, "contender": "mxfp8",
                 "first_s": 3.5, "correct": True})
    path = tmp_path / "expert_ffn.json"
    stored("expert_ffn", rows, path)
    assert show.show(path) and path.with_suffix(".png").exists()
    bars = [line.split() for line in capsys.readouterr().out.splitlines()[-9:]]
    assert [line[-1] for line in bars] == ["bar", "aim", "aim", "aim", "aim", "aim", "bar", "MISSED", "bar"]


def test_what_a_run_takes_is_written_on_its_way(tmp_path, monkeypatch, rates):
    monkeypatch.setattr(options, "SECONDS_BETWEEN_WRITES", 0)
    path = tmp_path / "grouped_gemm.json"

    def rows():
        yield from rates
        assert len(json.loads(path.read_text())["rows"]) == 2
        yield from grouped_gemm.run([EVEN], 0.001)

    options.finish("grouped_gemm", rows(), args_of("--out", str(path)))
    assert len(json.loads(path.read_text())["rows"]) == 2 + 4 + 4 + 5


def test_the_pages_say_what_the_result_files_say():
    assert report.outdated() == [], "run make report"


def test_links_between_the_pages_lead_somewhere():
    """Anchors as GitHub makes them: headings in small letters."""
    root = report.README.parent
    for page in (report.README, *sorted((root / "examples").rglob("*.md"))):
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            path, _, anchor = link.partition("#")
            if not path.startswith("http"):
                target = page.parent / path if path else page
                assert target.exists(), f"{page}: {link}"
                headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE) if anchor else []
                anchors = [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]
                assert not anchor or anchor in anchors, f"{page}: {link}"


def test_help_of_the_report_writes_nothing(monkeypatch, capsys):
    monkeypatch.setattr(Path, "write_text", lambda *_: pytest.fail("written"))
    for arguments, end in ((["--help"], 0), (["--chek"], 2)):
        with pytest.raises(SystemExit) as ended:
            report.main(arguments)
        assert ended.value.code == end
    told = capsys.readouterr()
    assert "usage:" in told.out and "--check" in told.out and "unrecognized arguments: --chek" in told.err


def test_help_of_show_and_a_file_left_out(capsys):
    for arguments, end in ((["--help"], 0), ([], 2)):
        with pytest.raises(SystemExit) as ended:
            show.main(arguments)
        assert ended.value.code == end
    told = capsys.readouterr()
    assert "usage:" in told.out and "are required: FILE" in told.err


@pytest.mark.parametrize("text, told", [
    (None, "No such file"), ("\x89PNG", "no result file"), ("[1]", "expected what a benchmark writes"),
    ('{"rows": []}', "expected what a benchmark writes"),
    ('{"benchmark": "other", "machine": "", "commit": "", "date": "", "rows": []}', "has results of other")])
@pytest.mark.parametrize("of", [show, parity])
def test_a_file_that_is_no_result_ends_in_one_line(tmp_path, of, text, told):
    path = tmp_path / "file.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit) as ended:
        of.show(path)
    assert told in ended.value.code and str(path) in ended.value.code and "\n" not in ended.value.code


def test_results_older_than_the_code_are_marked(monkeypatch):
    result = {"benchmark": "quantize", "commit": "abc+"}
    for_git = SimpleNamespace(returncode=0, stdout="f00\n")
    monkeypatch.setattr(report.subprocess, "run", lambda *args, **options: for_git)
    assert report.is_older(result) and not report.is_older({**result, "commit": None})
    for_git.stdout = ""
    assert not report.is_older(result)
    monkeypatch.undo()
    monkeypatch.setenv("PATH", "")  # no git at all
    assert not report.is_older(result)


def test_the_readme_shows_the_last_day_of_each_benchmark_and_of_that_the_most_ranks():
    names = {"train_2ranks": ("train", 1), "moe_layer_8ranks": ("moe_layer", 1), "train_8ranks": ("train", 1),
             "parity": ("parity", 2), "moe_layer_2ranks": ("moe_layer", 2), "train_4ranks": ("train", 1),
             "moe_layer_4ranks": ("moe_layer", 2), "expert_ffn": ("expert_ffn", 1), "convergence": ("convergence", 1),
             "convergence_300M": ("convergence", 2)}
    found = [(Path(f"{name}.json"), {"benchmark": benchmark, "date": f"2026-11-2{day}T{23 - i:02}:00:00+00:00"})
             for i, (name, (benchmark, day)) in enumerate(names.items())]
    assert [path.stem for path, _ in report.latest(found)] == ["convergence", "convergence_300M", "train_8ranks",
                                                              "moe_layer_4ranks", "expert_ffn"]


def test_spread_of_a_file():
    rows = [{"median_ms": 2.0, "p10_ms": 1.9, "p90_ms": 2.1}, {"median_ms": 1.0, "p10_ms": 1, "p90_ms": 1.5}, {}]
    assert "10.0% in nine of ten, at most 50.0%" in report.spread({"rows": rows})
    assert report.spread({"rows": [{}]}) == ""
