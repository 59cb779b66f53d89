# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the host, on the CPU: its contenders are right, wrong ones are noticed, and its bars are of the
layers that they name. SonicMoE and the profiler are played."""

import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from rank_pool import RankPool
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples/benchmarks"))

from kernels import host
from lib import results_file, show, timing, world
from training import train_models as models

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks1():
    pool = RankPool(1)
    yield pool
    pool.close()


def _rows() -> list[dict]:
    with mock.patch.multiple(host, SAMPLES=1, WARM_UP=1):
        return [row for rows in host.measured_rows(host.CASES["tiny"], float("inf")) for row in rows]


def test_layers_of_the_host_benchmark_compute_what_autoep_computes(ranks1):
    rows = ranks1.run(_rows)[0]
    assert [row["contender"] for row in rows] == list(host.SHOWN.contenders[:-1])
    assert all(row["correct"] for row in rows), rows
    assert all(row["host_ms"] > 0 and "kernels_ms" not in row for row in rows)
    assert {row["contender"] for row in rows if row["sqnr_db"]["y"] > 35} == {
        host.AUTOEP, host.BF16_RECIPE, host.CLASSIC, "classic, ours, bf16"}


def _spoilt() -> None:
    reference, one, *_ = host.wanted(host.TINY)
    tokens = host.Tokens(host.TINY)
    layer = one.build()
    with pytest.raises(RuntimeError, match="AutoEP bf16 failed"):
        host.check(layer, tokens, one)
    assert host.check(layer, tokens, reference)["correct"] and host.check(layer, tokens, one)["correct"]
    with mock.patch.multiple(host, ROUNDS=1, PASSES=2):
        assert host.in_a_row_ms(layer, tokens)["median_ms"] > 0
    with torch.no_grad():
        layer.module.experts.w2 *= 1.2
    assert not host.check(layer, tokens, one)["correct"]
    models.free(layer.engine)


def test_a_layer_of_other_results_is_noticed(ranks1):
    ranks1.run(_spoilt)


def _sonic() -> dict:
    """SonicMoE's check. It is played in plain torch, with the rows of gate and up in turn as it has them."""

    class MoE(torch.nn.Module):

        def __init__(self, experts, top_k, hidden, ffn, *_others):
            super().__init__()
            self.top_k = top_k
            self.router = torch.nn.Linear(hidden, experts, bias=False)
            self.c_fc, self.c_proj = torch.nn.Module(), torch.nn.Module()
            self.c_fc.weight = torch.nn.Parameter(torch.empty(experts, 2 * ffn, hidden))
            self.c_proj.weight = torch.nn.Parameter(torch.empty(experts, hidden, ffn))

        def forward(self, x):
            weight_TK, expert_TK = self.router(x).float().topk(self.top_k)
            weight_TE = torch.zeros(*x.shape[:-1], len(self.c_fc.weight)).scatter(
                -1, expert_TK, weight_TK.softmax(-1)).to(x.dtype)
            y = 0
            for e, (up_GH, down_HF) in enumerate(zip(self.c_fc.weight, self.c_proj.weight, strict=True)):
                pre = x @ up_GH.t()
                y = y + weight_TE[..., e:e + 1] * ((functional.silu(pre[..., ::2]) * pre[..., 1::2]) @ down_HF.t())
            return y, None

    tiles = SimpleNamespace(gemm=lambda tuned=True: tuned)
    modules = {"sonicmoe": mock.Mock(MoE=MoE), "sonicmoe.enums": mock.Mock(),
               "sonicmoe.functional": SimpleNamespace(forward=tiles, backward=SimpleNamespace())}
    tokens, reference = host.Tokens(host.TINY), host.wanted(host.TINY)[0]
    host.built(reference, tokens, host.check)
    with mock.patch.dict(sys.modules, modules):
        layer = host.sonic(host.TINY)
    assert tiles.gemm() is False
    one = reference._replace(name=host.SONIC, least_db=host.LEAST_SQNR_OTHER_ROUTER_DB)
    return host.check(layer, tokens, one)


def test_sonic_gets_the_same_weights(ranks1):
    assert ranks1.run(_sonic)[0]["correct"]


def host_row(name, case, **figures):
    return {"case": dataclasses.asdict(case), "contender": name, "correct": True, "forward_host_ms": 1.0,
            "backward_host_ms": 0.5, **figures}


def test_the_bars_of_the_host_are_of_the_layers_that_they_name(tmp_path, capsys):
    rows = [host_row(name, host.HOST_BOUND, host_ms=ms, median_ms=ms)
            for name, ms in ((host.AUTOEP, 3.0), (host.HP, 1.6))]
    for case in host.LARGE:
        rows += [host_row(name, case, host_ms=9.0, median_ms=ms, kernels_ms=kernels) for name, ms, kernels in (
            (host.SONIC, 10.0, 9.0), (host.BF16_RECIPE, 9.5, 9.4), (host.HP, 9.0, 9.0), (host.MXFP8, 11.0, 10.0))]
    path = tmp_path / "host.json"
    results_file.write("host", rows, path, "abc")
    assert show.show(host.SHOWN, path, check=True) == "bars not reached: 8"
    told = capsys.readouterr()
    missed = [line.split(";")[0] for line in told.err.splitlines() if "the bar is" in line]
    assert [line.split(" is ")[1].split(" ")[0] for line in missed[:3]] == ["1.6", "0.5333", "1.1"]
    assert sum("mxfp8 over SonicMoE" in line for line in missed) == 3
    assert sum("mxfp8_wgrad_with_hp over SonicMoE" in line for line in missed) == 2
    best = [row for row in host.prepare({"rows": rows}) if row["contender"] == host.BEST]
    assert [row["median_ms"] for row in best] == [9.0] * 4 and host.BEST not in show.main_table(
        host.SHOWN, host.SHOWN.prepared({"rows": rows}))


def test_a_profile_sums_what_the_device_did(monkeypatch):
    assert timing.profiled(lambda: pytest.fail("called without a GPU")) == {}
    cuda, cpu = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU

    def event(name, where, us, annotation=False):
        return SimpleNamespace(name=name, device_type=where, is_user_annotation=annotation,
                               time_range=SimpleNamespace(elapsed_us=lambda: us))

    events = [event("gemm", cuda, 1500.0), event("Memcpy DtoH", cuda, 500.0), event("range", cuda, 9e9, True),
              event("cudaStreamSynchronize", cpu, 7.0), event("cudaDeviceSynchronize", cpu, 7.0)]
    profiler = mock.MagicMock()
    profiler.return_value.__enter__.return_value.events.return_value = events
    monkeypatch.setattr(torch.profiler, "profile", profiler)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(world, "on_gpu", lambda: True)
    called = []
    found = timing.profiled(lambda: called.append(1), 2)
    assert found == {"kernels_ms": 1.0, "device_events": 1.0, "host_waits": 0.5} and len(called) == 2
