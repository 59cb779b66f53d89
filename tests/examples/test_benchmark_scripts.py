# SPDX-License-Identifier: Apache-2.0
"""Each benchmark's script from its arguments to its result file, on CPUs with tiny sizes. All its results are right.

mx.py and plain torch stand in for the kernels. NVLink is played by the collective transport under its name.
test_two_nodes.py and test_convergence.py run theirs. test_benchmarks.py tests once, for all, that wrong results are
noticed.
"""

from unittest import mock

import pytest
import torch.distributed as dist

from ds_mxfp8_moe.all_to_all import AllToAll
from ds_mxfp8_moe.transport.collective import Collective
from ds_mxfp8_moe.transport.peer_memory import PeerMemory
from exchange import dispatch_combine, ep_pipeline, latency, moe_layer
from kernels import expert_ffn, grouped_gemm, host, quantize
from lib import world
from tests.support import emulator
from tests.support.benchmark_runs import run_script
from training import replay_cost, step_parts, train, whole_model

pytestmark = pytest.mark.slow
BRIEF = ("--budget", "0.001", "--seconds", "600")


class NVLink(Collective):
    """The collective transport under the name of NVLink's."""


def with_nvlink(name, out, *arguments, **constants) -> list[dict]:
    """A script on this rank of a pool, whose machine has the NVLink above."""

    def choose(group, name, config):
        return (Collective if config.transport == "collective" else NVLink)(group, name)

    with mock.patch.object(world, "choose", choose):
        return run_script(name, out, *arguments, **constants)


def contenders(rows, operation=None) -> list[str]:
    return [row["contender"] for row in rows if operation in (None, row["case"].get("operation"))]


# ---- one GPU ------------------------------------------------------------------------------------------------------


def test_grouped_gemm(tmp_path):
    rows = run_script("kernels.grouped_gemm", tmp_path / "x.json", *BRIEF)
    assert contenders(rows, "wgrad") == 3 * [grouped_gemm.TORCH, grouped_gemm.LOOP, grouped_gemm.OURS_BF16,
                                             grouped_gemm.FROM_MXFP8, grouped_gemm.MXFP8]
    assert {row["case"]["split"] for row in rows if "split" in row["case"]} == {"even", "skewed"}


@pytest.mark.wide
def test_quantize(tmp_path):
    rows = run_script("kernels.quantize", tmp_path / "x.json", *BRIEF)
    moved = {row["case"]["kernel"]: row["case"]["bytes"] for row in rows if "kernel" in row["case"]}
    assert len(moved) == 4 + 5 + 3 and moved["rows"] == 512 * 256 * 3 + 512 * 2
    for shape in (*quantize.ROWS, *quantize.HIDDEN):
        assert shape[0] * shape[1] * 2 >= 256 << 20  # larger than any L2


@pytest.mark.wide
def test_expert_ffn(tmp_path):
    rows = run_script("kernels.expert_ffn", tmp_path / "x.json", *BRIEF, "--min-tokens-per-expert", "65")
    assert contenders(rows) == 3 * [expert_ffn.PLAIN, *expert_ffn.RECIPES]
    for row in rows:
        few, plain = row["case"]["tokens_per_expert"] < 65, row["contender"] in ("bf16", expert_ffn.PLAIN)
        assert ("median_ms" in row) == (row["contender"] not in expert_ffn.UNTIMED)
        # Only what is quantised is far from plain PyTorch. With few tokens, nothing is.
        assert (row["sqnr_db"]["y"] > 38) == (few or plain) and row.get("unquantized", False) == (few and not plain)


@pytest.mark.wide
@pytest.mark.wide
def test_host(ranks1, tmp_path):
    rows = ranks1.run(run_script, "kernels.host", tmp_path / "x.json", SAMPLES=1, WARM_UP=1)[0]
    assert contenders(rows) == list(host.SHOWN.contenders[:-1])
    assert all(row["host_ms"] > 0 and "kernels_ms" not in row for row in rows)
    assert {row["contender"] for row in rows if row["sqnr_db"]["y"] > 35} == {
        host.AUTOEP, host.BF16_RECIPE, host.CLASSIC, "classic, ours, bf16"}


# ---- several GPUs -------------------------------------------------------------------------------------------------


@pytest.mark.wide
def test_ep_pipeline(ranks2, tmp_path):
    rows = ranks2.run(with_nvlink, "exchange.ep_pipeline", tmp_path / "x.json", *BRIEF, EXPERTS=2)[0]
    noise = {row["contender"]: row["sqnr_db"]["y"] for row in rows if row["case"]["operation"] == "total"}
    assert list(noise) == [ep_pipeline.NCCL_BF16, ep_pipeline.NCCL_MXFP8_GEMM, *ep_pipeline.OURS]
    # Only what is quantised is far from float32, and each further wire adds its noise.
    assert noise["ours, mxfp8"] < noise["ours, mxfp8_wgrad_with_hp"] < 35 < 45 < noise["NCCL bf16"]


def test_dispatch_combine(ranks2, tmp_path):
    rows = ranks2.run(with_nvlink, "exchange.dispatch_combine", tmp_path / "x.json", *BRIEF)[0]
    assert {row["case"]["routing"] for row in rows} == set(dispatch_combine.ROUTINGS)
    assert contenders(rows, "plan") == 2 * [dispatch_combine.TODAY, "collective", "nvlink"]
    assert set(contenders(rows)) == set(dispatch_combine.CONTENDERS)
    moved = {row["contender"]: row["bytes"] for row in rows if row["case"]["operation"] == "combine"}
    assert moved[dispatch_combine.TODAY] > moved["nvlink, bf16"]
    assert moved["nvlink, bf16"] * (256 + 8) == moved["nvlink, mxfp8"] * 512


@pytest.mark.wide
def test_moe_layer(ranks2, tmp_path):
    """Over the machine's own transport."""
    rows = ranks2.run(run_script, "exchange.moe_layer", tmp_path / "x.json", *BRIEF)[0]
    totals = {row["contender"]: row for row in rows if row["case"]["operation"] == "total"}
    assert set(totals) == {moe_layer.AUTOEP, moe_layer.CLASSIC, moe_layer.DROPLESS,
                           *(f"collective, {recipe}" for recipe in moe_layer.RECIPES),
                           "collective, mxfp8_wgrad_with_hp, classic"}
    assert all(("counted_waits" in row) == name.startswith("collective") for name, row in totals.items())
    assert totals["collective, bf16"]["sqnr_db"] > 38 > totals["collective, mxfp8"]["sqnr_db"]


@pytest.mark.wide
def test_two_hops(ranks4, tmp_path):
    rows = ranks4.run(run_script, "exchange.two_hops", tmp_path / "x.json", *BRIEF)[0]
    sent = {(row["case"]["operation"], row["case"]["dtype"], row["contender"]): row["bytes"] for row in rows}
    assert len(sent) == 8 and all(sent["dispatch", dtype, "two hops"] > 0 for dtype in ("bf16", "mxfp8"))
    assert sent["combine", "bf16", "two hops"] > sent["combine", "bf16", "flat"]  # sums travel in float32


def _latency(out):
    """With AllToAll over the emulator of CUDA."""
    memory = PeerMemory(dist.group.WORLD, emulator.load(dist.get_rank()), provider=emulator.Shared)

    def intranode(rank, world_size, dp_size, group, **sizes):
        return AllToAll(memory, **sizes)

    with mock.patch.object(latency.AllToAll, "intranode", intranode):
        return with_nvlink("exchange.latency", out, *BRIEF)


@pytest.mark.skipif(emulator.obstacle() is not None, reason=f"the emulator needs nvcc: {emulator.obstacle()}")
@pytest.mark.wide
def test_latency(ranks2, tmp_path):
    emulator.build()
    rows = ranks2.run(_latency, tmp_path / "x.json")[0]
    for operation in ("dispatch", "combine", "total"):
        assert set(contenders(rows, operation)) == {*latency.OURS, *latency.NCCL}
    assert all(row["median_ms"] > 0 for row in rows)


# ---- trainings ----------------------------------------------------------------------------------------------------


def _train(out, *arguments):
    with mock.patch.object(train.models, "LEARNING_RATE", 1.3e-3):
        return run_script("training.train", out, *arguments, WARM_UP=1)


def test_train(ranks2, tmp_path):
    """Both families are what the classic layer computes. A second run adds what the first one lacks."""
    given = tmp_path / "x.json", "--sizes", "tiny", "tiny-mixtral", "--steps", "1", "--accumulation", "1"
    ranks2.run(_train, *given, "--contenders", train.AUTOEP, train.HP)
    names = train.AUTOEP, train.HP, train.CLASSIC
    rows = ranks2.run(_train, *given, "--contenders", *names)[0]
    assert contenders(rows) == [name for name in names[:2] for _ in "12"] * 2 + [train.CLASSIC] * 4
    for row in rows:
        # Whole tokens a second, of which a slow machine has few.
        assert row["tokens_per_s"] == pytest.approx(2 * 128 / row["median_ms"] * 1e3, rel=1e-3, abs=0.5)
        # Each stage's and the step's are the slowest rank's.
        assert row["forward_ms"] + row["backward_ms"] + row["optimizer_ms"] > 0.999 * row["median_ms"]
        assert row.get("experts_in") == ("MXFP8" if row["contender"] == train.HP else None)


def _alone(out):
    with mock.patch.object(train.timing, "profiled", lambda step: step() or {"kernels_ms": 7.0}), \
            mock.patch.object(train, "on_gpu", lambda: False):
        return _train(out, "--sizes", "tiny", "--steps", "1", "--contenders", train.HP_CLASSIC)


@pytest.mark.wide
def test_train_on_one_rank_with_and_without_the_check_for_overflow(ranks1, tmp_path):
    rows = ranks1.run(_alone, tmp_path / "x.json")[0]
    assert [row["case"]["overflow_check"] for row in rows] == [True, False]
    assert all(row["case"]["routing"] == "even" and row["host_ms"] > 0 for row in rows)
    assert all(row["parameters"] == 3 + 2 * (2 + 4 + 2 + 1 + 3 * 8) for row in rows)


def _whole_model(out, *arguments):
    return run_script("training.whole_model", out, *BRIEF, *arguments, WARM_UP=1, LEAST=1, MOST=1)


@pytest.mark.wide
def test_whole_model(ranks1, tmp_path):
    """Full finetuning with and without checkpointing, and LoRA. A second run adds where the time goes."""
    out, names = tmp_path / "x.json", list(whole_model.CONTENDERS[:-3])
    rows = ranks1.run(_whole_model, out, "--no-parts")[0]
    *_, changed = rows
    assert contenders(rows) == 2 * names + [name for name in names if name != whole_model.AUTOEP] + [
        whole_model.DEFAULT]
    assert [row["case"]["checkpointing"] is None for row in rows] == len(names) * [True] + (
        len(rows) - len(names) - 1) * [False] + [True]
    assert all(changed["case"][key] for key in whole_model.CHANGES) and 0 < changed["loss_off"] < 0.002
    assert all(len(row["losses"]) == whole_model.COMPARED and row["tokens_per_s"] > 0 for row in rows)
    chosen = [whole_model.PLAIN, whole_model.DEFAULT]
    rows = ranks1.run(_whole_model, out, "--training", "full", "--contenders", *chosen)[0]
    parts = [row for row in rows if "busy_ms" in row]
    assert len(rows) == 3 * len(names) and contenders(parts) == 2 * chosen + chosen[1:]
    for row in parts:
        times = {name: row[f"{name}_ms"] for name in step_parts.PARTS}
        assert all(ms > 0 for name, ms in times.items() if name != step_parts.IDLE)
        assert sum(times.values()) == pytest.approx(row["busy_ms"] + row["idle_ms"], rel=0.02)


def _replay_cost(out):
    return run_script("training.replay_cost", out, "--rounds", "1", STEPS=1)


@pytest.mark.wide
def test_replay_cost(ranks1, tmp_path):
    live, *others = ranks1.run(_replay_cost, tmp_path / "x.json")[0]
    assert [row["contender"] for row in (live, *others)] == list(replay_cost.CONTENDERS)
    for row in others:
        assert row["cost_share"] == pytest.approx(row["median_ms"] / live["median_ms"] - 1)


def _frozen_quality(out):
    return run_script("training.frozen_quality", out, "--base", str(out.parent / "base"), "--base_steps", "2",
                      "--steps", "2", "--seeds", "1", HELDOUT_WINDOWS=8)


@pytest.mark.wide
def test_frozen_quality(ranks1, tmp_path):
    """Two steps say nothing about quality: what is held in MXFP8 is used, and gives nearly the same."""
    in_bf16, frozen = ranks1.run(_frozen_quality, tmp_path / "x.json")[0]
    assert frozen["cost"] == frozen["heldout_loss"] / in_bf16["heldout_loss"] - 1
    assert 0 < abs(frozen["cost"]) < 0.01


def _export(out):
    return run_script("training.export", out, "--layers", "1", "--repeats", "1")


@pytest.mark.wide
def test_export(ranks2, tmp_path):
    plain, bf16, fp8 = ranks2.run(_export, tmp_path / "x.json")[0]
    assert plain["bytes"] == bf16["bytes"] == 3 * 8 * 128 * 128 * 2
    assert fp8["bytes"] == 3 * 8 * (128 * 128 + 4) and fp8["gb_per_s"] > 0


def _from_files(out):
    return run_script("training.from_files", out, *BRIEF, "--folders", out.parent)


@pytest.mark.wide
def test_from_files(ranks1, tmp_path):
    """From FP8, bf16 and MXFP4. The files are gone afterwards."""
    rows = ranks1.run(_from_files, tmp_path / "x.json")[0]
    assert [row["case"]["files"] for row in rows] == ["FP8", "bf16", "MXFP4"]
    for row in rows:
        assert row["load_s"] > 0 and row["tokens_per_s"] > 0 and row["trained"] > 0
        assert 0.5 < row["file_gb"] * 1e9 / (row["parameters"] * (2 if row["case"]["files"] == "bf16" else 1)) < 1.5
    assert {path.name for path in tmp_path.iterdir()} == {"x.json", "x.png"}
