# SPDX-License-Identifier: Apache-2.0
"""The benchmarks: wrong results are noticed, every script runs with tiny sizes, and pages say what result files
say."""

import importlib
import io
import json
import os
import re
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import yaml
from deepspeed.moe.utils import is_moe_param
from deepspeed.utils import safe_get_full_fp32_param
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from transformers import AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import report
from ds_mxfp8_moe.all_to_all import AllToAll
from ds_mxfp8_moe.compute import mx
from ds_mxfp8_moe.transport.collective import Collective
from ds_mxfp8_moe.transport.peer_memory import PeerMemory
from exchange import dispatch_combine, latency, moe_layer, two_nodes
from kernels import expert_ffn, grouped_gemm, host
from kernels.shapes import Case
from lib import gains, models, paired, results_file, show, timing, trainings, world
from lib.show import Measure, bar
from lib.timing import Contender
from tests.support import emulator
from tests.support.launched_model import MODEL
from tests.support.rank_pool import free_port
from tests.support.slow import slow_except
from training import (
    changes,
    convergence,
    convergence_results,
    front_page,
    frozen_quality,
    long_sequences,
    long_sequences_results,
    memory,
    routes,
    train,
    whole_model,
)
from training.convergence import BF16, NUDGED, OWN, RECIPES, YARDSTICK, Run
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
    frozen = memory.state_bytes(QWEN3, "LoRA", 1, 1)
    of_expert, held, spread = memory.bytes_of("`FlashAdamW`, masters in bf16", 2)
    experts, others = memory.parameters_of(QWEN3)
    states, ours = of_expert * experts / 2 + (held + spread / 2) * others, long_sequences.SMALLEST
    rows = [long_row("LoRA", whole_model.IN_8_BITS, 2**17, 1, frozen, 300),
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


# ---- the paired study -----------------------------------------------------------------------------------------------


def green_bottles(folder, copies=1):
    """A tiny model, and texts for it."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
             "head_dim": 16, "moe_intermediate_size": 64, "num_experts": 4, "max_position_embeddings": 32}
    model = yaml.safe_load((convergence.ROOT / "configs/models/qwen3_moe_tiny.yaml").read_text())
    (folder / "model.yaml").write_text(yaml.safe_dump(model | sizes))
    (folder / "texts").mkdir()
    for i in range(200 * copies):
        (folder / f"texts/{i}.txt").write_text(f"{i % 200:05} green bottles hanging on the wall\n" * 4)


def tiny(folder):
    """The size of the model in this folder."""
    return mock.patch.dict(convergence.SIZES, {"tiny": convergence.Size(str(folder / "model.yaml"), 1e-2, 8, 32)})


def _pairs(folder):
    """Runs of recipes and seeds, and whether a nudge rounds the experts' weights and the optimizer's."""
    args = convergence.parse_args(["--out", "unused", "--tokens", str(folder), "--heldout_windows", "16", "--steps",
                                   "6"])
    with tiny(folder):
        found = {(recipe, seed): convergence.train_run(Run("tiny", recipe, seed), args)
                 for recipe, seed in ((BF16, 0), (YARDSTICK, 0), ("mxfp8_128", 0), (NUDGED, 0), (BF16, 1))}
        again = convergence.train_run(Run("tiny", "mxfp8_128", 0), args)
        assert again["curves"] == found["mxfp8_128", 0]["curves"]  # a run repeats itself
        engine, *_ = convergence.build(Run("tiny", NUDGED, 0), args)
    for p in engine.module.parameters():
        if is_moe_param(p) and p.dim() > 1:
            rounded = mx.quantize_tiles(p.detach().clone()).dequantize(torch.float32)
            convergence.nudge(engine)
            assert torch.equal(p.float(), rounded) and torch.equal(safe_get_full_fp32_param(p).float(), rounded)
            break
    engine.destroy()
    return found


@pytest.mark.wide
def test_runs_of_a_seed_are_pairs(ranks2, tmp_path):
    green_bottles(tmp_path)
    convergence.store_tokens(str(tmp_path / "texts"), tmp_path)
    rows = ranks2.run(_pairs, tmp_path)[0]
    assert all(row["correct"] for row in rows.values()), rows
    curves = {of: row["curves"] for of, row in rows.items()}
    losses = {of: list(found["loss"].values()) for of, found in curves.items()}
    base = losses[BF16, 0]
    # The same weights before the first step, and the same batches.
    start = curves[BF16, 0]["heldout_loss"]["0"]
    assert curves[YARDSTICK, 0]["heldout_loss"]["0"] == curves["mxfp8_128", 0]["heldout_loss_bf16"]["0"] == start
    assert curves["mxfp8_128", 0]["heldout_loss"] != curves["mxfp8_128", 0]["heldout_loss_bf16"]
    for name in (YARDSTICK, "mxfp8_128", NUDGED):
        # In float32, another order of sums may not show in six digits.
        assert name == YARDSTICK or losses[name, 0] != base
        assert losses[name, 0] == pytest.approx(base, rel=0.01)
    assert abs(losses[BF16, 1][0] - base[0]) > 10 * abs(losses[YARDSTICK, 0][0] - base[0])
    for (name, _), row in rows.items():
        assert row["heldout_loss"] == row["curves"]["heldout_loss"]["6"] < row["curves"]["heldout_loss"]["0"]
        assert row["layers_quantized"] == (2 if name == "mxfp8_128" else 0)
        assert row["case"]["expert_parallel"] == row["case"]["ranks"] == 2


def test_a_run_that_is_not_what_it_should_be_says_so():
    right = {"curves": {"loss": {"1": 2.0}, "heldout_loss": {"0": 3.0, "1": 2.0}}, "moe_layers": 2,
             "layers_converted": 2, "layers_quantized": 2, "section": RECIPES["default_128"]}
    assert convergence.failure_of(right) is None
    for changed, told in (({"curves": right["curves"] | {"loss": {"1": float("nan")}}}, "the loss is not finite"),
                          ({"curves": right["curves"] | {"heldout_loss": {"0": 2.0, "1": 2.0}}}, "did not fall"),
                          ({"layers_converted": 1}, "1 layers were converted, expected 2 of 2"),
                          ({"section": RECIPES[BF16]}, "2 layers were quantized, expected 0 of 2")):
        assert told in convergence.failure_of(right | changed)


def test_copies_of_a_text_are_left_out_and_none_is_on_both_sides(tmp_path):
    green_bottles(tmp_path, copies=2)
    convergence.store_tokens(str(tmp_path / "texts"), tmp_path)
    size = 1 + 4 * len("00000 green bottles hanging on the wall\n")
    sides = [{bytes(text[1:].astype(np.uint8)) for text in np.load(tmp_path / f"{name}.npy").reshape(-1, size)}
             for name in ("training", "heldout")]
    assert len(sides[0] | sides[1]) == 200 and not sides[0] & sides[1] and len(sides[1]) < 40
    with pytest.raises(SystemExit, match="has those of --data .*texts, not of pydoc"):
        convergence.store_tokens("pydoc", tmp_path)


# 97.5 % quantiles, as tables print them.
@pytest.mark.parametrize("freedom, t", [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (15, 2.131), (120, 1.980)])
def test_an_interval_by_hand(freedom, t):
    assert paired.t_quantile(freedom) == pytest.approx(t, abs=5.1e-4)
    values = [1.0, *range(2, freedom + 2)]
    found = paired.interval(values)
    assert (found.mean, found.spread) == (statistics.fmean(values), statistics.stdev(values))
    half = t * found.spread / len(values)**0.5
    assert (found.low, found.high) == pytest.approx((found.mean - half, found.mean + half), rel=1e-3)
    assert paired.interval([2.0]) == (2.0, None, None, None, 1)


def run_of(recipe, seed, heldout, start=5.6, steps=200):
    """A row of the study."""
    in_bf16 = {"0": start, str(steps): heldout - 0.05} if recipe in convergence_results.JUDGED else {}
    return {"case": {"size": "tiny", "steps": steps, "tokens_per_step": 64, "expert_parallel": 2, "seed": seed},
            "contender": recipe, "heldout_loss": heldout, "correct": True,
            "curves": {"heldout_loss": {"0": start, str(steps): heldout}, "heldout_loss_bf16": in_bf16}}


def prepared(rows):
    return {one["contender"]: one for one in convergence_results.prepare({"rows": rows})}


def test_differences_are_paired_by_seed():
    noise = [0.0, 0.3, -0.2, 0.1]  # of seeds, far larger than the differences
    costs = {BF16: [0] * 4, "mxfp8_128": [0.001, 0.002, 0.003, 0.002], YARDSTICK: [0, 4e-3, 0, -4e-3]}
    rows = [run_of(name, seed, (1 + noise[seed]) * (1 + cost)) for name, of in costs.items()
            for seed, cost in enumerate(of)]
    rows.append(run_of("default_128", 7, 1.0))  # without a partner
    found = prepared(rows)
    of = found["mxfp8_128"]
    assert (of["difference"], of["low"], of["high"]) == pytest.approx(paired.interval(costs["mxfp8_128"])[:3])
    ends = [(1 + n) * (1 + cost) for n, cost in zip(noise, costs["mxfp8_128"], strict=True)]
    assert of["in_use"] == pytest.approx(np.mean([end / (end - 0.05) - 1 for end in ends]))
    assert of["less"] == pytest.approx(0.002) and of["pairs"] == 4
    assert "difference" not in found[BF16] and "difference" not in found["default_128"]
    assert "verdict" not in found[YARDSTICK] and found[YARDSTICK]["difference"] == pytest.approx(0)


def test_runs_that_do_not_start_alike_are_no_pair():
    base = [run_of(BF16, 0, 1.0), run_of(BF16, 1, 1.0)]
    of = prepared([*base, run_of("mxfp8_128", 0, 1.0), run_of("mxfp8_128", 1, 1.0, start=5.7)])["mxfp8_128"]
    assert not of["correct"] and of["failure"] == "seeds [1] do not start with the loss of bf16"
    assert prepared([*base, run_of(NUDGED, 0, 1.0, start=5.7)])[NUDGED]["correct"]  # its weights are others


@pytest.mark.parametrize("costs, yardstick, said, beyond", [
    ([0.001, 0.0012, 0.0011], [0.0, 0.001, -0.001], "at most 0.135% above bf16.", False),
    ([0.01, -0.01, 0.002], [0.011, -0.012, 0.001], "not distinguishable from reordered bf16, at most 0.446% above "
     "that; at most 2.567% above bf16.", False),
    ([0.01, -0.001, 0.004], [0.0, 0.001, -0.001], "open: at most 1.801% above bf16.", True)])
def test_verdicts(costs, yardstick, said, beyond):
    rows = [one for seed, (cost, other) in enumerate(zip(costs, yardstick, strict=True))
            for one in (run_of(BF16, seed, 1.0), run_of("default_128", seed, 1 + cost),
                        run_of(YARDSTICK, seed, 1 + other))]
    of = prepared(rows)["default_128"]
    assert of["verdict"] == said
    assert of["beyond"] == (pytest.approx(of["high"] - 0.0025) if beyond else 0)


# ---- two nodes ------------------------------------------------------------------------------------------------------


def test_the_guide_gives_commands_that_the_script_takes():
    guide = (two_nodes.ROOT / "examples/guides/several_nodes.md").read_text()
    commands = re.findall(r"two_nodes\.py (.+)", guide.replace("\\\n", " "))
    assert len(commands) == 2
    for command in commands:
        args = two_nodes.parse(re.sub(r"[#&].*", "", command).replace("$node", "1").split())
        assert args.node_rank in (0, 1) and args.master


def arguments_of(node: int, folder: Path, port: int) -> list[str]:
    return ["--node-rank", str(node), "--master", "127.0.0.1", "--one-host", "--port", str(port), "--model",
            str(folder / "model.yaml"), "--data", str(folder / "text"), "--steps", "3", "--out",
            str(folder / f"node{node}.json")]


def test_two_launchers_on_one_machine_start_all_ranks(tmp_path):
    program, port = tmp_path / "program.py", free_port()
    program.write_text("import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])")
    nodes = [two_nodes.Node(two_nodes.parse(arguments_of(node, tmp_path, port))) for node in range(2)]
    with ThreadPoolExecutor(2) as both:
        list(both.map(lambda node: node.launch("ranks", [program]), nodes))
    said = [(node.folder / "ranks.log").read_text() for node in nodes]
    assert all(f"rank {rank} of 4" in said[rank // 2] for rank in range(4)), said


def run_on_rank(program: str, arguments: list[str]) -> str:
    """The exchange or examples/gpt_moe/train.py on a rank of a pool. What it prints."""
    with mock.patch.object(world, "start"), mock.patch.object(world, "leave"), redirect_stdout(io.StringIO()) as out:
        if Path(program).name == "train.py":
            sys.path.insert(0, str(Path(program).parent))
            import train
            train.run(train.parse_args(arguments))
        else:
            two_nodes.exchange_main(two_nodes.parse(arguments))
    return out.getvalue()


@pytest.mark.wide
def test_the_script_for_two_nodes(ranks4, tmp_path):
    """All ranks, those of the exchange and those of the trainings, are a pool's."""
    (tmp_path / "model.yaml").write_text(MODEL)
    (tmp_path / "text").write_text("the quick brown fox jumps over the lazy dog\n" * 500)
    said = {}

    def launch(node, name, program):
        program, *arguments = map(str, program)
        said[name] = ranks4.run(run_on_rank, program, arguments)[0]

    with mock.patch.object(two_nodes.Node, "launch", launch), pytest.raises(SystemExit) as end, \
            mock.patch.object(sys, "argv", ["two_nodes.py", *arguments_of(0, tmp_path, free_port())]):
        two_nodes.main()
    assert not end.value.code
    rows = json.loads((tmp_path / "node0.json").read_text())["rows"]
    assert all(row["correct"] for row in rows)
    of = {(row["case"]["operation"], row["contender"]): row for row in rows}
    assert {"hierarchical, mxfp8", "collective, mxfp8"} <= {name for operation, name in of if operation == "dispatch"}
    assert ("rail, 4 bytes", "send and receive") in of and ("training step", "hierarchical") in of
    assert "2 nodes of 2 ranks" in said["train_hierarchical"] and "2 nodes" not in said["train_collective"]


# ---- scripts --------------------------------------------------------------------------------------------------------

BRIEF = "--budget", "0.001", "--seconds", "600"


def run_script(name: str, out: Path, *arguments, **constants) -> list[dict]:
    """Runs a script's `main` on this rank, whose process group stays. Returns the rows of its result file.

    All of them are right, and the plot is there.

    Args:
        name: of the script's module.
        constants: of the module, for this run.
    """
    module = importlib.import_module(name)
    argv = [f"{name}.py", "--out", *map(str, (out, *arguments))]
    with (mock.patch.object(sys, "argv", argv), mock.patch.object(world, "start"),
          mock.patch.dict(vars(module), constants),
          mock.patch.object(world, "FAILURES", []),  # the ranks of other tests met some
          mock.patch.object(world, "leave") as left):
        module.main()
    world.barrier()
    left.assert_called_once_with("")
    result = json.loads(out.read_text())
    wrong = [row for row in result["rows"] if not row["correct"]]
    assert result["rows"] and not wrong, wrong
    assert result["benchmark"] == module.SHOWN.benchmark and out.with_suffix(".png").exists()
    return result["rows"]


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


def study(name, out) -> list[dict]:
    """The paired study, on tiny models of some texts: a second run goes on where the first one ended."""
    if dist.get_rank() == 0:
        green_bottles(out.parent)
    dist.barrier()
    given = ("--sizes", "tiny", "--steps", "2", "--data", out.parent / "texts", "--tokens", out.parent,
             "--heldout_windows", "4", "--seeds", "1", "--recipes", BF16)
    with tiny(out.parent):
        first = run_script(name, out, *given)
        rows = run_script(name, out, *given, "default_128", *convergence.OPTIMIZERS)
    assert rows[:1] == first
    return rows


def own_study(name, out) -> list[dict]:
    """A user's model and config beside the same in bf16. Before, what a section without MXFP8 is told."""
    folder, path = out.parent, out.with_name("ds_config.json")
    given = ("--ds_config", path, "--hf_model", folder / "model.yaml", "--seq_len", "32", "--steps", "2", "--data",
             folder / "texts", "--tokens", folder, "--heldout_windows", "4", "--seeds", "1")
    config = json.loads((convergence.ROOT / "configs/ds/autoep_zero2.json").read_text())
    config |= {"expert_parallel": {"enabled": True, "autoep_size": 2}, "train_micro_batch_size_per_gpu": 1,
               "gradient_accumulation_steps": 2}
    if dist.get_rank() == 0:
        green_bottles(folder)
        path.write_text(json.dumps(config | {"mxfp8_moe": {"enabled": True, "recipe": "bf16"}}))
    dist.barrier()
    with pytest.raises(SystemExit, match='expected a section "mxfp8_moe" .* another recipe than "bf16"'):
        convergence.parse_args(["--out", "unused", *map(str, given)])
    dist.barrier()
    own = {"enabled": True, "recipe": "mxfp8", "min_tokens_per_expert": 0, "combine_fwd_dtype": "mxfp8"}
    if dist.get_rank() == 0:
        path.write_text(json.dumps(config | {"mxfp8_moe": own}))
    dist.barrier()
    rows = run_script(name, out, *given)
    sections = {row["contender"]: row["section"] for row in rows}
    assert sections[OWN] == own and sections[BF16] == {"enabled": True, "min_tokens_per_expert": 0, "recipe": "bf16"}
    assert str(folder) not in out.read_text()
    return rows


# The run of a script, its ranks, arguments and constants, and contenders whose results it has to have.
TINY = "--steps", "1", "--sizes", "tiny"
SCRIPTS = {
    "kernels.grouped_gemm": (run_script, 1, BRIEF, {}, {grouped_gemm.OURS_BF16, grouped_gemm.MXFP8}),
    "kernels.quantize": (run_script, 1, BRIEF, {}, set()),
    "kernels.expert_ffn": (run_script, 1, (*BRIEF, "--min-tokens-per-expert", "65"), {}, {*expert_ffn.RECIPES}),
    "kernels.host": (run_script, 1, (), dict(SAMPLES=1, WARM_UP=1), {*host.SHOWN.contenders[:-1]}),
    "exchange.dispatch_combine": (with_nvlink, 2, BRIEF, {}, {*dispatch_combine.CONTENDERS}),
    "exchange.moe_layer": (run_script, 2, BRIEF, {}, {moe_layer.AUTOEP, moe_layer.CLASSIC}),
    "exchange.two_hops": (run_script, 4, BRIEF, {}, {"two hops", "flat"}),
    "exchange.latency": (with_all_to_all, 2, BRIEF, {}, {*latency.OURS, *latency.NCCL}),
    "training.train": (train_quickly, 2, (*TINY, "tiny-mixtral", "--accumulation", "1", "--routings",
                                          *train.ROUTINGS, models.AS_RECORDED, "--contenders", AUTOEP, HP, CLASSIC),
                       {}, {AUTOEP, HP, CLASSIC}),
    "training.whole_model": (run_script, 1, (*BRIEF, "--training", "full", "--contenders", whole_model.PLAIN,
                                             whole_model.DEFAULT), dict(WARM_UP=1, LEAST=1, MOST=1),
                             {whole_model.PLAIN, whole_model.DEFAULT}),
    "training.activations": (run_script, 1, (), {}, {whole_model.AUTOEP, whole_model.DEFAULT}),
    "training.frozen_quality": (run_script, 1, ("--base", "base", "--base_steps", "2", "--steps", "2", "--seeds", "1"),
                                dict(HELDOUT_WINDOWS=8), set()),
    "training.merge_quality": (run_script, 1, ("--base", "base", "--base_steps", "2", "--steps", "2", "--seeds", "1",
                                               "--rate", "0.01"), {}, set()),
    "training.routes": (run_script, 1, ("--experts", "16", "4", "--base_steps", "1", "--steps", "8"),
                        dict(DOMAINS=("pydoc", ), APART=2, AVERAGED=2), {"router"}),
    "training.convergence": (study, 2, (), {}, {BF16, "default_128", *convergence.OPTIMIZERS}),
    "training.convergence, own": (own_study, 2, (), {}, {BF16, OWN, YARDSTICK}),
    "training.long_sequences": (run_script, 2, (), dict(STARTS=dict.fromkeys(long_sequences.STARTS, 1), MOST=2),
                                {whole_model.AUTOEP, whole_model.DEFAULT, long_sequences.SMALLEST}),
    "training.long_sequences, LoRA": (run_script, 1, (), {}, {whole_model.IN_8_BITS, long_sequences.IN_TURNS}),
    "training.from_files": (run_script, 1, (*BRIEF, "--folders", "."), {}, set()),
    "training.from_files, ranks": (run_script, 2, (*BRIEF, "--folders", ".", "--models", "tiny"), {},
                                   {whole_model.DEFAULT, whole_model.IN_4_BITS}),
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
    rows = request.getfixturevalue(f"ranks{ranks}").run(run, name.split(",")[0], tmp_path / "x.json", *arguments,
                                                        **constants)[0]
    assert names <= {row["contender"] for row in rows}


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


# ---- result files, tables and bars ----------------------------------------------------------------------------------


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
