# SPDX-License-Identifier: Apache-2.0
"""The training benchmark on two gloo ranks: gradients, failures, how rows are added to and compared."""

import json
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM

from lib import models, results_file, trainings
from training import changes, train, whole_model, whole_model_results
from training.train import AUTOEP, CLASSIC, HP, MXFP8, OURS_BF16

pytestmark = pytest.mark.slow


def _args(*more):
    with mock.patch("sys.argv", ["train.py", "--layers", "2", "--out", "unused", *map(str, more)]):
        return train.parse_args()


def _updates(zero):
    """Master weights and gradient norms after steps of one and of two micro-batches: ours, and DeepSpeed's own."""
    size = models.SIZES["tiny"]
    found = []
    for by_deepspeed in (False, True):
        engine = train.CONTENDERS[AUTOEP](size, 1, 2, zero)
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


@pytest.mark.parametrize("zero", (1, 2))
def test_gradients_are_accumulated_as_deepspeed_does(ranks2, zero):
    for (ours, norms), (expected, expected_norms) in ranks2.run(_updates, zero):
        assert torch.equal(ours, expected) and norms == expected_norms


def _failing(fails_at):
    """The rows of an engine that cannot be made, or that fails in a step."""

    def engine_of(*args):
        if fails_at == "build":
            raise ValueError("no such engine")
        engine = models.engine_of(*args, classic=False, section=None)
        engine.module.register_forward_hook(lambda *_: 1 / 0)
        return engine

    with mock.patch.dict(train.CONTENDERS, {AUTOEP: engine_of}):
        cases, = train.cases_of(_args("--sizes", "tiny", "--steps", 1, "--accumulation", 1))
        rows: dict = {}
        list(train.fill([train.Run(cases, AUTOEP)], rows, float("inf"), "abc"))
    return list(rows.values())


@pytest.mark.parametrize("fails_at, told", [("build", "no such engine"), ("step", "ZeroDivisionError")])
def test_after_a_failure_nothing_is_measured(ranks2, fails_at, told):
    rows = ranks2.run(_failing, fails_at)[0]
    assert [row["correct"] for row in rows] == [False] * 2 and all(told in row["failure"] for row in rows)


# ---- rows ---------------------------------------------------------------------------------------------------------


def test_rows_are_added_to_what_is_there(tmp_path):
    once, more = (train.Case("tiny", 2, 1, 2, 2, 6, "even", count) for count in (1, 4))
    wanted = train.wanted([(once, more)], [AUTOEP, HP], {})
    assert wanted == [((once, more), AUTOEP), ((once, more), HP)]
    row = {"case": once.described(), "contender": AUTOEP, "correct": True, "losses": [1.0]}
    rows = {trainings.key(r): r for r in (row, {**row, "case": more.described()}, {**row, "contender": HP})}
    assert train.wanted([(once, more)], [AUTOEP, HP], rows) == [((once, more), HP)]

    path = tmp_path / "train.json"
    assert trainings.stored(path, "train") == []
    results_file.write("train", [row], path, of_commit="abc")
    assert trainings.stored(path, "train") == [json.loads(json.dumps(row))]
    results_file.write("moe_layer", [row], path, of_commit="abc")
    with pytest.raises(SystemExit, match="has results of moe_layer, expected train"):
        trainings.stored(path, "train")


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


# ---- whole models -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def qwen3():
    """Qwen3-30B-A3B without weights."""
    from transformers import AutoModelForCausalLM
    case = whole_model.Case("Qwen3-30B-A3B", "full", 1, 4, 16, 48, 1)
    with torch.device("meta"):
        return case, AutoModelForCausalLM.from_config(case.config())


def test_model_flops_are_those_that_others_count(qwen3):
    """NeMo AutoModel publishes 277 TFLOP/s at 12,040 tokens/s."""
    case, model = qwen3
    trained = whole_model.flops_per_token(model, case)
    assert trained == pytest.approx(277e12 / 12040, rel=0.01)
    attention = 12 * 48 * 2048 * 32 * 128
    assert whole_model.flops_per_token(model.requires_grad_(False), case) - attention == pytest.approx(
        4 / 6 * (trained - attention))


def test_what_follows_from_the_rows_of_a_whole_model():
    parts = dict.fromkeys((f"{name}_ms" for name in whole_model.PARTS), 10.0)
    case = whole_model.Case("GLM-4.5-Air", "full", 8, 1, 8, layers=23, ranks=1).described()
    row = {"case": case, "contender": whole_model.DEFAULT, "correct": True, "median_ms": 80.0, "tokens_per_s": 1000,
           "trained": 4, "trained_outside_layers": 1, "busy_ms": 70.0, "experts_in": "MXFP8", **parts}
    slower = {"case": case, "correct": True, "contender": whole_model.PLAIN, "median_ms": 100.0, "tokens_per_s": 800}
    # The loss, five parts of layers twice, two parts of which three quarters are in layers.
    assert whole_model_results.all_layers_ms(row) == 10 + 2 * 50 + 1.75 * 20
    assert whole_model_results.all_layers_ms(row | {"case": case | {"layers": 46}}) is None
    exchange = whole_model_results.exchange_ms(row)
    again = row | {"case": case | {"checkpointing": "checkpointing"}}
    assert exchange > 0 and whole_model_results.exchange_ms(again) == pytest.approx(1.5 * exchange)
    assert whole_model_results.exchange_ms(row | {"case": case | {"one_rank_of": 16}}) is None
    first, second, failed = whole_model_results.prepare({"rows": [row, slower, {
        "case": case, "contender": whole_model.AUTOEP, "correct": False, "failure": "out of memory"}]})
    assert first["over_deepspeed"] == 1.25 and first["of_best"] == 1 and first["tokens_per_s_all_layers"] == 552
    assert first["tokens_per_s_exchange"] < 1000 and "tokens_per_s_exchange" not in second
    assert failed["failure"] == "out of memory"


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
    assert "--cases guide" in results.steps_text(None)
