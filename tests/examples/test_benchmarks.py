# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks share: timing, checks that notice wrong results, result files, tables, plots, bars and
pages. test_benchmark_scripts.py runs each script."""

import re
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from transformers import AutoModelForCausalLM

import report
from kernels import grouped_gemm, quantize
from kernels.shapes import Case
from lib import gains, models, results_file, show, timing, trainings, world
from lib.show import Measure, bar
from lib.timing import Contender
from training import changes, front_page, memory, train, whole_model, whole_model_results
from training.train import AUTOEP, CLASSIC, HP, MXFP8, OURS_BF16

PADDED, SKEWED = Case(160, 96, 4, 64, "even"), Case(160, 96, 4, 256, "skewed")

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(3)


# ---- rows -----------------------------------------------------------------------------------------------------------


def _agree():
    def fails():
        if world.rank() == 1:
            raise ValueError("no such size")
        return {"correct": True}

    stages = {"first": lambda: time.sleep(0.01 * (1 + world.rank())), "second": lambda _: 4}
    assert timing.run(stages) == 4
    contenders = {"good": Contender(stages, lambda: {"correct": True}, {"bytes": 7}),
                  "bad": Contender(stages, lambda: {"correct": world.rank() == 0}),
                  "failing": Contender({"only": lambda: None}, fails)}
    return timing.rows({"n": 1}, contenders, 0.001)


@pytest.mark.wide
def test_a_row_for_each_stage_and_what_one_rank_finds_wrong_is_wrong(ranks2):
    rows = ranks2.run(_agree)[0]
    assert [(row["contender"], row["case"]["operation"], row["correct"]) for row in rows] == [
        *(("good", name, True) for name in ("first", "second", "total")),
        *(("bad", name, False) for name in ("first", "second", "total")), ("failing", "only", False)]
    assert all(row["bytes"] == 7 and row["repeats"] >= 5 for row in rows[:3])
    assert rows[0]["case"] == {"operation": "first", "ranks": 2, "n": 1}
    assert min(rows[0]["median_ms"], rows[2]["median_ms"]) > 20  # the slowest rank's
    assert rows[2]["p10_ms"] <= rows[2]["median_ms"] <= rows[2]["p90_ms"]
    assert "rank 1: ValueError: no such size" in rows[-1]["failure"] and "median_ms" not in rows[-1]


def _alone():
    def call():
        if world.rank() == 0:
            raise MemoryError("too much")
        time.sleep(1.5)  # as in an exchange to which rank 0 does not come
        return {}

    with mock.patch.object(world, "ALONE_S", 0.5):
        try:
            return world.everywhere(call)
        except SystemExit as end:
            torch.distributed.all_gather_object([None, None], {})  # for this test's rank 1
            return str(end)


def test_a_rank_that_fails_alone_ends_the_run(ranks2):
    assert ranks2.run(_alone)[0].startswith("rank 0: MemoryError: too much; 1 of 2 ranks have not come")


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


# ---- trainings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails_at, told", [("build", "no such engine"), ("step", "ZeroDivisionError")])
def test_after_a_failure_nothing_is_measured_and_the_engine_is_freed(monkeypatch, fails_at, told):
    freed = mock.Mock()
    monkeypatch.setattr(models, "free", freed)

    def build():
        if fails_at == "build":
            raise ValueError("no such engine")
        return mock.Mock(engine="the engine")

    calls = [lambda training, before: {"step": 1}, lambda training, before: 1 / 0, mock.Mock()]
    rows = list(trainings.found(build, calls))
    assert ["failure" in row for row in rows] == [fails_at == "build", True, True] and not calls[-1].called
    assert all(told in row["failure"] for row in rows[1:])
    assert freed.mock_calls == [mock.call("the engine")] * (fails_at == "step")


def _updates():
    """Master weights and gradient norms after steps of one and of two micro-batches: ours, and DeepSpeed's own."""
    size = models.SIZES["tiny"]
    found = []
    for by_deepspeed in (False, True):
        engine = train.CONTENDERS[AUTOEP](size, 1, 2, 1)
        training = train.Training(engine, size)
        training.step()
        training.noted()
        if by_deepspeed:
            engine.set_gradient_accumulation_boundary(None)
            engine.micro_steps = 0
            engine.set_train_batch_size(2 * 2 * size.batch)
            for batch in reversed(training.batches):
                engine.backward(engine(input_ids=batch, labels=batch).loss)
                engine.step()
        else:
            training.accumulation = 2
            training.step()
        training.noted()
        flat = torch.cat([part.detach().flatten() for part in engine.optimizer.single_partition_of_fp32_groups])
        found.append((flat.clone(), training.norms))
        models.free(engine)
    return found


def test_gradients_are_accumulated_as_deepspeed_does(ranks2):
    for (ours, norms), (expected, expected_norms) in ranks2.run(_updates):
        assert torch.equal(ours, expected) and norms == expected_norms


def _losses(name, losses, norm=1.0, routing="even"):
    return {"case": {"routing": routing}, "contender": name, "losses": losses, "gradient_norm": norm, "correct": True}


def test_losses_are_compared_within_their_case():
    rows = [_losses(HP, [5.0, 4.01]), _losses(AUTOEP, [5.0, 4.0]), _losses(CLASSIC, [5.0, 4.01]),
            _losses(MXFP8, [5.0, 4.0], norm=1.2), _losses(OURS_BF16, [5.0, float("nan")]),
            _losses(HP, [9.0, 9.0], routing="router"),
            {"case": {"routing": "even"}, "contender": "x", "correct": False, "failure": "so"}]
    trainings.settle(rows, train.REFERENCES)
    assert [row["correct"] for row in rows] == [True, True, False, False, False, True, False]
    assert rows[0]["loss_off"] == pytest.approx(0.0025) and "20.00%" in rows[3]["error"]


def test_model_flops_are_those_that_others_count():
    """NeMo AutoModel publishes 277 TFLOP/s at 12,040 tokens/s for Qwen3-30B-A3B."""
    case = whole_model.Case("Qwen3-30B-A3B", "full", 1, 4, 16, 48, 1)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(case.config())
    trained = whole_model.flops_per_token(model, case)
    assert trained == pytest.approx(277e12 / 12040, rel=0.01)
    attention = 12 * 48 * 2048 * 32 * 128
    assert whole_model.flops_per_token(model.requires_grad_(False), case) - attention == pytest.approx(
        4 / 6 * (trained - attention))


def test_what_follows_from_the_rows_of_a_whole_model():
    """The loss counts once, five parts of layers twice, and three quarters of two others, which lie in layers."""
    parts = dict.fromkeys((f"{name}_ms" for name in whole_model.PARTS), 10.0)
    case = whole_model.Case("GLM-4.5-Air", "full", 8, 1, 8, layers=23, ranks=1).described()
    row = {"case": case, "contender": whole_model.DEFAULT, "correct": True, "median_ms": 80.0, "tokens_per_s": 1000,
           "trained": 4, "trained_outside_layers": 1, "busy_ms": 70.0, "experts_in": "MXFP8", **parts}
    slower = {"case": case, "correct": True, "contender": whole_model.PLAIN, "median_ms": 100.0, "tokens_per_s": 800}
    first, second = whole_model_results.prepare({"rows": [row, slower]})
    assert first["over_deepspeed"] == 1.25 and first["tokens_per_s_all_layers"] == round(80 / (10 + 100 + 35) * 1000)
    assert first["tokens_per_s_exchange"] < 1000 and "tokens_per_s_exchange" not in second


@pytest.mark.parametrize("loss", [changes.IN_CHUNKS, changes.TILED])
def test_other_losses_have_the_gradients_of_the_models(monkeypatch, loss):
    monkeypatch.setattr(changes, "CHUNK", 48)  # of 2 x 40 tokens
    config = whole_model.Case("tiny", "full", 2, 2, 2, 1, 1).config()
    found = []
    for kind in (None, loss):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
        changes.change_loss(model, kind, micro_batches=2)
        ids = torch.randint(config.vocab_size, (2, 40), generator=torch.Generator().manual_seed(0))
        labels = ids.masked_fill(torch.arange(40) < 7, -100)
        got = model(input_ids=ids, labels=labels).loss
        (got / 2).backward()  # as an engine with two micro-batches
        found.append([got.detach(), *(p.grad for p in model.parameters())])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)


def test_the_tables_of_the_guide_have_what_was_measured():
    def row(contender, ms, peak=2**30, **changed):
        case = whole_model.CASES["short"][0] | {"layers": 48, "ranks": 1} | changed
        return {"case": case, "contender": contender, "correct": True, "median_ms": ms, "peak_bytes": peak,
                "tokens_per_s": round(1e6 / ms)}

    results = whole_model_results
    fastest = results.FASTEST
    rows = [row(results.PLAIN, 200.0), row(results.DEFAULT, 100.0), row(results.DEFAULT, 80.0, **results.LIGER),
            row(results.DEFAULT, 50.0, **fastest), row(results.NOT_KEPT, 60.0, **fastest),
            row(results.DEFAULT, 99.0, **fastest, attention="sdpa, flash"),
            {**row(results.DEFAULT, 1.0, **results.LARGER), "failure": "OutOfMemoryError: CUDA out of memory"}]
    del rows[-1]["median_ms"]
    gpt_oss = whole_model.CASES["full"][0] | {"checkpointing": "checkpointing"} | results.LIGER
    rows += [row(results.DEFAULT, 20.0, **gpt_oss), row(results.DEFAULT, 50.0, **gpt_oss, attention="eager")]
    text = results.steps_text({"rows": rows, "machine": "1 x NVIDIA X", "date": "2026-11-26", "commit": "abc"})
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    assert ["transformers with DeepSpeed", "5000", "", "1.00"] in cells and len(cells) == 2 + 4 + 2 + 3
    assert ["its loss in large chunks", "20000", "1.60x", "1.00"] in cells
    assert ["quantised weights not kept", "16667", "0.83x", "1.00"] in cells
    assert ["4 micro-batches of 2 sequences", "out of memory", "", ""] in cells
    assert "`flex_attention` has 2.50 times" in text


def _with_a_client_optimizer():
    """FlashAdamW needs a GPU: torch's takes its place."""
    case = whole_model.Case("tiny", "full", 2, 2, 1, 1, 1, sequence=128, optimizer=changes.FLASH)
    with mock.patch.dict("sys.modules", flashoptim=mock.Mock(FlashAdamW=torch.optim.AdamW)):
        training = whole_model.Training(case, whole_model.DEFAULT, 1)
    training.step()
    found = type(training.engine.optimizer.optimizer).__name__
    models.free(training.engine)
    return found


def test_a_case_may_bring_an_optimizer_that_deepspeed_does_not_know(ranks1):
    assert ranks1.run(_with_a_client_optimizer) == ["AdamW"]


def test_moments_in_8_bits_halve_the_gpus_of_80_gb():
    """Both runs held the same beside their states."""
    plain = {"case": whole_model.Case("Qwen3-30B-A3B", "full", 8, 1, 8, 48, 1, liger=True).described(),
             "contender": whole_model.DEFAULT, "machine": "1 x NVIDIA H200", "experts_in": "MXFP8",
             "tokens_per_s": 15949, "peak_bytes": 100.12 * 2**30}
    flash = {**plain, "case": plain["case"] | {"optimizer": changes.FLASH}, "peak_bytes": 72 * 2**30}
    other = {**plain, "case": plain["case"] | {"optimizer": "DeepSpeed's AdamW"}}
    lines = [re.split(r" *\| *", line.strip("| ")) for line in memory.memory_text([plain, flash, other]).splitlines()]
    assert [line[1] for line in lines[2:]] == ["full", f"full, {changes.FLASH}"]
    at = lines[0].index("GPUs of 80 GiB")
    assert [line[at - 1:at + 2] for line in lines[2:]] == [["23.16", "16", "8"], ["23.30", "8", "4"]]


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


@pytest.mark.parametrize("module", [grouped_gemm, quantize])
def test_a_device_whose_rates_could_not_be_measured_has_no_shares_of_them(module, tmp_path):
    kernel = {"kernel": "rows", "shape": "8x8", "block_size": 32, "dtype": "bfloat16", "bytes": 64}
    product = {"dim": 8, "hidden": 8, "experts": 1, "tokens_per_expert": 8, "split": "even", "flops": 1024,
               "least_bytes": 64}
    failed = {"correct": False, "failure": "out of memory"}
    case, name = (kernel, "ours") if module is quantize else (product, grouped_gemm.MXFP8)
    rows = [{"case": {"operation": "device copy", "bytes": 2}, "contender": "copy_", **failed},
            {"case": {"operation": "fp8 product", "flops": 2}, "contender": "torch._scaled_mm", **failed},
            {"case": {"operation": "forward", **case}, "contender": name, "median_ms": 1.0, "correct": True}]
    path = tmp_path / "x.json"
    results_file.write(module.SHOWN.benchmark, rows, path, "abc")
    show.show(module.SHOWN, path)
    assert path.with_suffix(".png").exists()
    row, *_ = module.SHOWN.prepare({"rows": rows})
    assert row["contender"] == name and row.get("share") is None


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


@pytest.mark.parametrize("top_k, experts, ranks, fullest", [(6, 64, 4, 1.5), (2, 8, 4, 3), (8, 128, 8, 5)])
def test_uneven_routes_fill_the_first_rank_as_asked(top_k, experts, ranks, fullest):
    routes_TK = models.uneven_routes(4096, top_k, experts, ranks, fullest)
    assert all(len(set(row)) == top_k for row in routes_TK.tolist())
    rows_R = torch.bincount(routes_TK.flatten(), minlength=experts).view(ranks, -1).sum(1)
    assert rows_R[0] == fullest * rows_R.sum() / ranks == fullest * 4096 * top_k / ranks
