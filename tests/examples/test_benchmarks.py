# SPDX-License-Identifier: Apache-2.0
"""The benchmarks: wrong results are noticed, every script runs with tiny sizes, and pages say what result files
say. test_two_nodes.py and test_convergence.py run theirs."""

import re
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from transformers import AutoModelForCausalLM

import report
from ds_mxfp8_moe.all_to_all import AllToAll
from ds_mxfp8_moe.transport.collective import Collective
from ds_mxfp8_moe.transport.peer_memory import PeerMemory
from exchange import dispatch_combine, ep_pipeline, latency, moe_layer
from kernels import expert_ffn, grouped_gemm, host
from kernels.shapes import Case
from lib import gains, models, results_file, show, timing, trainings, world
from lib.show import Measure, bar
from lib.timing import Contender
from tests.support import emulator
from tests.support.benchmark_runs import run_script
from tests.support.slow import slow_except
from training import changes, front_page, replay_cost, train, whole_model
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


# ---- scripts --------------------------------------------------------------------------------------------------------

BRIEF = "--budget", "0.001", "--seconds", "600"


class NVLink(Collective):
    """The collective transport under the name of NVLink's."""


def with_nvlink(name, out, *arguments, **constants) -> list[dict]:
    """A script on this rank of a pool, whose machine has the NVLink above."""

    def choose(group, name, config):
        return (Collective if config.transport == "collective" else NVLink)(group, name)

    with mock.patch.object(world, "choose", choose):
        return run_script(name, out, *arguments, **constants)


def with_all_to_all(name, out, *arguments) -> list[dict]:
    """With AllToAll over the emulator of CUDA."""
    memory = PeerMemory(dist.group.WORLD, emulator.load(dist.get_rank()), provider=emulator.Shared)

    def intranode(rank, world_size, dp_size, group, **sizes):
        return AllToAll(memory, **sizes)

    with mock.patch.object(latency.AllToAll, "intranode", intranode):
        return with_nvlink(name, out, *arguments)


def train_quickly(name, out, *arguments):
    with mock.patch.object(train.models, "LEARNING_RATE", 1.3e-3):
        return run_script(name, out, *arguments, WARM_UP=1)


# The run of a script, its ranks, arguments and constants, and contenders whose results it has to have.
TINY = "--steps", "1", "--sizes", "tiny"
SCRIPTS = {
    "kernels.grouped_gemm": (run_script, 1, BRIEF, {}, {grouped_gemm.OURS_BF16, grouped_gemm.MXFP8}),
    "kernels.quantize": (run_script, 1, BRIEF, {}, set()),
    "kernels.expert_ffn": (run_script, 1, (*BRIEF, "--min-tokens-per-expert", "65"), {}, {*expert_ffn.RECIPES}),
    "kernels.host": (run_script, 1, (), dict(SAMPLES=1, WARM_UP=1), {*host.SHOWN.contenders[:-1]}),
    "exchange.ep_pipeline": (with_nvlink, 2, BRIEF, dict(EXPERTS=2), {*ep_pipeline.OURS}),
    "exchange.dispatch_combine": (with_nvlink, 2, BRIEF, {}, {*dispatch_combine.CONTENDERS}),
    "exchange.moe_layer": (run_script, 2, BRIEF, {}, {moe_layer.AUTOEP, moe_layer.CLASSIC}),
    "exchange.two_hops": (run_script, 4, BRIEF, {}, {"two hops", "flat"}),
    "exchange.latency": (with_all_to_all, 2, BRIEF, {}, {*latency.OURS, *latency.NCCL}),
    "training.train": (train_quickly, 2, (*TINY, "tiny-mixtral", "--accumulation", "1", "--contenders", AUTOEP, HP,
                                          CLASSIC), {}, {AUTOEP, HP, CLASSIC}),
    "training.whole_model": (run_script, 1, (*BRIEF, "--training", "full", "--contenders", whole_model.PLAIN,
                                             whole_model.DEFAULT), dict(WARM_UP=1, LEAST=1, MOST=1),
                             {whole_model.PLAIN, whole_model.DEFAULT}),
    "training.replay_cost": (run_script, 1, ("--rounds", "1"), dict(STEPS=1), {*replay_cost.CONTENDERS}),
    "training.frozen_quality": (run_script, 1, ("--base", "base", "--base_steps", "2", "--steps", "2", "--seeds", "1"),
                                dict(HELDOUT_WINDOWS=8), set()),
    "training.export": (run_script, 2, ("--layers", "1", "--repeats", "1"), {}, set()),
    "training.from_files": (run_script, 1, (*BRIEF, "--folders", "."), {}, set()),
}


@pytest.mark.parametrize("name", slow_except(SCRIPTS, "kernels.grouped_gemm", "exchange.dispatch_combine",
                                             "training.train"))
def test_all_results_of_a_script_are_right(request, name, tmp_path, monkeypatch):
    """From its arguments to its result file, with tiny sizes. mx.py and plain torch stand in for the kernels."""
    run, ranks, arguments, constants, names = SCRIPTS[name]
    if run is with_all_to_all:
        if reason := emulator.obstacle():
            pytest.skip(f"the emulator needs nvcc: {reason}")
        emulator.build()
    arguments = [str(tmp_path / one) if one in ("base", ".") else one for one in arguments]
    rows = request.getfixturevalue(f"ranks{ranks}").run(run, name, tmp_path / "x.json", *arguments, **constants)[0]
    assert names <= {row["contender"] for row in rows}


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
