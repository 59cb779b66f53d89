# SPDX-License-Identifier: Apache-2.0
"""The parts of benchmarks: wrong results are noticed, trainings are compared, and sizes are those asked for."""

import json
import os
import statistics
import time
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kernels import grouped_gemm
from kernels.shapes import Case
from lib import models, show, timing, trainings, world
from lib.timing import Contender
from training import (
    changes,
    frozen_quality,
    long_sequences,
    long_sequences_results,
    memory,
    routes,
    train,
    whole_model,
)
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


def test_after_a_failure_nothing_is_measured_and_the_engine_is_freed(monkeypatch):
    monkeypatch.setattr(models, "free", freed := mock.Mock())
    calls = [lambda training, before: {"step": 1}, lambda training, before: 1 / 0, mock.Mock()]
    rows = list(trainings.found(lambda: mock.Mock(engine="the engine"), calls))
    assert rows[0]["step"] == 1 and "failure" not in rows[0]
    assert all("ZeroDivisionError" in row["failure"] for row in rows[1:]) and not calls[-1].called
    assert freed.mock_calls == [mock.call("the engine")]


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


@pytest.mark.parametrize("longest", [1, 2, 5, 24, 40, 99, 512, 700, 4096])
def test_the_longest_sequence_is_found_by_few_trials(longest):
    """Powers of two from 64, down to 16 and up to 1024, and the middle between two of them."""
    found = {}
    while length := long_sequences.next_length(found, 64, 1024):
        assert length not in found
        found[length] = length <= longest
    fits, full = max((n for n in found if found[n]), default=0), min((n for n in found if not found[n]), default=0)
    assert len(found) <= 6 and (full <= 1.5 * fits if full and fits else fits == 1024 or full == 8)


QWEN3 = "Qwen3-30B-A3B"


def long_row(part, contender, sequence, ranks, states, rest_kib, **more):
    """A row with a peak of these states, of what checkpoints keep unless that is on the host, and of the rest."""
    host, (experts, others) = part == "longest", memory.parameters_of(QWEN3)
    peak = states + sequence / ranks * (2**10 * rest_kib + (0 if host else 2 * 48 * 2048))
    return {"case": {"part": part, "model": QWEN3, "sequence": sequence, "ranks": ranks, "layers": 48,
                     "checkpointing": f"checkpointing{', kept on the host' * host}"}, "contender": contender,
            "peak_bytes": peak, "expert_parameters": experts // ranks, "other_parameters": others, "correct": True,
            **more}


def test_the_formula_of_long_sequences_counts_as_the_guide_to_memory():
    frozen = memory.state_bytes(QWEN3, "LoRA", 1, 1) + 16 * 10**8
    of_expert, held, spread = memory.bytes_of("`FlashAdamW`, masters in bf16", 2)
    experts, others = memory.parameters_of(QWEN3)
    states, ours = of_expert * experts / 2 + (held + spread / 2) * others, long_sequences.SMALLEST
    rows = [long_row("LoRA", whole_model.IN_8_BITS, 2**17, 1, frozen, 300, trained=10**8),
            long_row("longest", ours, 2**19, 2, states, 60, fits=True),
            long_row("longest", ours, 2**18, 2, states, 61, fits=True),
            long_row("longest", ours, 2**20, 2, states, 0, fits=False, why="host memory"),
            long_row("longest", AUTOEP, 2**17, 2, states, 60, fits=True)]
    found = {row["contender"]: row for row in long_sequences_results.prepare({"rows": rows})}
    assert found[whole_model.IN_8_BITS]["rest_kib"] == pytest.approx(300)
    assert found[ours]["rests"] == {2**18: pytest.approx(61), 2**19: pytest.approx(60)}
    assert [found[ours][name] for name in ("longest", "too_long", "lacking", "times")] == [2**19, 2**20, "host memory",
                                                                                           4]
    needed = long_sequences_results.needed_bytes(found[whole_model.IN_8_BITS], 2**17, 1)
    assert needed == pytest.approx(rows[0]["peak_bytes"])  # 90 GiB: two GPUs of 80 GiB or one of 131
    line, *_ = [line for line in long_sequences_results.guide_text({"rows": rows}).splitlines() if "8 bits" in line]
    assert [cell.strip() for cell in line.split("|")[3:6]] == ["1 / 1", "2 / 1", "8 / 8"]


def test_attention_in_blocks_is_attention_inside_a_block(monkeypatch):
    q, k, v = (torch.randn(1, heads, 12, 16) for heads in (4, 2, 2))
    module = mock.Mock(num_key_value_groups=2, is_causal=True)
    plain = [sdpa_attention_forward(module, *(x[:, :, i:i + 12] for x in (q, k, v)), None)[0] for i in (0, 6)]
    monkeypatch.setattr(long_sequences, "BLOCK", 24)
    torch.testing.assert_close(long_sequences.in_blocks(module, q, k, v, None)[0], plain[0])
    monkeypatch.setattr(long_sequences, "BLOCK", 6)
    halved = long_sequences.in_blocks(module, q, *(x.repeat_interleave(2, 1) for x in (k, v)), None)[0]
    torch.testing.assert_close(halved[:, 6:], plain[1][:, :6])


def test_a_rank_out_of_memory_says_so_in_the_file_and_ends(tmp_path, monkeypatch):
    """The other ranks may wait for it in an exchange."""
    monkeypatch.setattr(world, "size", lambda: 2)
    monkeypatch.setattr(os, "_exit", mock.Mock(side_effect=SystemExit))
    shared, longest, *_ = long_sequences.cases("tiny")
    runs = long_sequences.Runs(mock.Mock(out=tmp_path / "x.json", host_gib=1), {}, "abc")
    for case, contender in ((longest, AUTOEP), (shared, long_sequences.DEFAULT)):
        step = mock.Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory."))
        with pytest.raises(SystemExit):
            runs.or_end(case, contender, step)
    with pytest.raises(ValueError, match="other"):
        runs.or_end(shared, AUTOEP, mock.Mock(side_effect=ValueError("other")))
    tried, failed = json.loads((tmp_path / "x.json").read_text())["rows"]
    assert tried["fits"] is False and tried["correct"] and "out of memory" in tried["why"]
    assert not failed["correct"] and "out of memory" in failed["failure"]
    monkeypatch.setattr(long_sequences, "ulysses", nullcontext)
    args = mock.Mock(parts=[longest.part], seconds=0, model="tiny", host_gib=1)
    assert [*long_sequences.fill(args, {}, "abc")] == []  # without time for a trial, it ends
    # A second run goes on with what is lacking.
    assert not [*runs.lacking(shared, long_sequences.DEFAULT)]
    assert next(runs.lacking(longest, AUTOEP)).sequence == longest.sequence / 2


# ---- weights and routes ---------------------------------------------------------------------------------------------


def test_nf4_is_that_of_bitsandbytes():
    """Its table, by its code. With bitsandbytes 0.50.2, all bits of random weights were the same."""
    values = frozen_quality.nf4_values()
    known = {1: -0.6961928009986877, 6: -0.09105003625154495, 7: 0, 8: 0.07958029955625534, 14: 0.7229568362236023}
    assert len(values) == 16 and values[[0, 15]].tolist() == [-1, 1]
    assert [values[i].item() for i in known] == pytest.approx([*known.values()], abs=1e-8)
    w = torch.randn(4, 96).bfloat16()
    w[0, :64] = 0
    blocks, rounded = (x.float().view(-1, 64) for x in (w, frozen_quality.rounded_to_nf4(w)))
    grid = values * blocks.abs().amax(1, keepdim=True)
    nearest = (blocks.unsqueeze(2) - grid.unsqueeze(1)).abs().min(2).values
    torch.testing.assert_close((blocks - rounded).abs(), nearest, rtol=0, atol=2**-7)


@pytest.mark.parametrize("top_k, experts, ranks, fullest", [(6, 64, 4, 1.5), (2, 8, 4, 3), (8, 128, 8, 5)])
def test_uneven_routes_fill_the_first_rank_as_asked(top_k, experts, ranks, fullest):
    routes_TK = models.uneven_routes(4096, top_k, experts, ranks, fullest)
    assert all(len(set(row)) == top_k for row in routes_TK.tolist())
    rows_R = torch.bincount(routes_TK.flatten(), minlength=experts).view(ranks, -1).sum(1)
    assert rows_R[0] == fullest * rows_R.sum() / ranks == fullest * 4096 * top_k / ranks


def test_routes_as_recorded_have_the_statistics_of_the_records():
    found = []
    for layer in range(4):
        routes_STK = torch.stack([models.skewed_routes(512, 6, 64, layer, step) for step in range(150)])
        assert (routes_STK.sort(2).values.diff(dim=2) > 0).all()  # a token chooses no expert twice
        counts_SE = [routes_TK.flatten().bincount(minlength=64) for routes_TK in routes_STK]
        found.append(routes.statistics(torch.stack(counts_SE)))
    preference, drift, noise = (statistics.mean(one[name] for one in found) for name in found[0])
    assert preference == pytest.approx(models.PREFERENCE, rel=0.2)
    assert drift == pytest.approx(models.DRIFT, rel=0.2) and noise == pytest.approx(models.NOISE, rel=0.1)
