# SPDX-License-Identifier: Apache-2.0
"""Tables and plots of the benchmarks of several GPUs, and the bars in them, from made-up rows."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples/benchmarks"))


from lib import results_file, show, show_ranks

pytestmark = pytest.mark.slow


def shown(benchmark, rows, path, capsys, expected=True) -> dict[str, str]:
    """How the lines end that a stored file prints, by their beginnings; its plot is drawn."""
    results_file.write(benchmark, rows, path, of_commit="abc")
    assert json.loads(path.read_text())["rows"] == rows
    assert show.show(path) == expected and path.with_suffix(".png").stat().st_size > 5000
    return {line.split("  ")[0].strip(): line.split()[-1] for line in capsys.readouterr().out.splitlines() if line}


def row(operation, contender, ms, case, **figures):
    return {"case": {"operation": operation, "ranks": 8, **case}, "contender": contender, "median_ms": ms,
            "p90_ms": ms, "host_ms": 1.0, "correct": True, **figures}


def test_tables_of_pipelines(tmp_path, capsys):
    case = {"dim": 7168, "hidden": 2048, "rows": 131072, "experts_per_rank": 8, "flops": 1, "block_size": 128}
    ms = dict(zip(show_ranks.PIPELINES, (31.0, 25.0, 28.0, 20.0, 14.0), strict=True))
    rows = [row(part, name, value * share, case) for part, share in (("forward", 0.4), ("backward", 0.6), ("total", 1))
            for name, value in ms.items()]
    rows += [row("all-to-all", "NCCL bf16", 4.84, {**case, "bytes": 131072 * 7168 * 2 * 7 // 8})]
    rows += [row(f"{name} GEMM", dtype, value, case) for name in ("forward", "dgrad", "wgrad")
             for dtype, value in (("bf16", 5.7), ("mxfp8", 3.3))]
    path = tmp_path / "ep_pipeline.json"
    lines = shown("ep_pipeline", rows, path, capsys)
    assert lines["7168x2048: default recipe over NCCL bf16"] == "bar"
    assert lines["7168x2048: all MXFP8 over NCCL bf16"] == "aim"
    assert lines["7168x2048: default recipe over bf16 all-to-all and MXFP8 GEMM"] == "MISSED"
    floor = show_ranks.pipeline_floor_ms(json.loads(path.read_text()), {**case, "ranks": 8}, show_ranks.HP)
    # Forward is bound by what moves: 7168 values in MXFP8 and 2048 in bf16. Backward by its GEMMs.
    assert floor["forward"] == pytest.approx(4.84 / 2 * (1 + 1 / 128 + 2 * 2048 / 7168))
    assert floor["backward"] == pytest.approx(3.3 + 5.7)
    assert show_ranks.pipeline_floor_ms({"rows": rows[:15]}, {**case, "ranks": 8}, show_ranks.HP) == {}


def test_tables_of_latencies(tmp_path, capsys):
    case = {"experts": 256, "top_k": 8, "hidden": 7168}
    rows = [row(part, name, 0.02 if name in (show_ranks.A2A_E4M3, show_ranks.A2A_BF16) else 0.1,
                {**case, "tokens": tokens, "launch": launch})
            for part in ("dispatch", "combine") for name in show_ranks.LATENCIES for tokens in (1, 4, 128)
            for launch in ("eager", "graph")]
    rows += [row("send, GEMM, receive", name, ms, {**case, "tokens": 128, "launch": "eager"}) for name, ms in (
        (show_ranks.A2A_E4M3, 0.06), (show_ranks.GEMM_ALONE, 0.1), (show_ranks.GEMM_BETWEEN, 0.115))]
    lines = shown("latency", rows, tmp_path / "latency.json", capsys)
    assert lines["AllToAll, bf16 in, graph: of pplx-kernels' time"] == "bar"
    assert "75%" in lines.values()


def test_tables_of_exchanges(tmp_path, capsys):
    rows = [row(part, name, 6.6 if name == show_ranks.TODAY else 2.0, show_ranks.BIG,
                bytes=int(0.4e9))
            for part in ("dispatch", "combine") for name in show_ranks.EXCHANGES]
    rows += [row("plan", name, 0.1, show_ranks.BIG) for name in show_ranks.PLANS]
    lines = shown("dispatch_combine", rows, tmp_path / "dispatch_combine.json", capsys)
    assert lines["dispatch, nvlink MXFP8 over today's NCCL bf16"] == "bar"


def test_tables_of_layers(tmp_path, capsys):
    ms = {show_ranks.AUTOEP: 12.0, show_ranks.DROPLESS: 16.0, show_ranks.HP_EXACT: 7.0, show_ranks.HP_STATIC: 6.0}
    rows = [row(part, name, value * share, show_ranks.LAYER_BAR_CASE, peak_bytes=1 << 30, staging_bytes=0,
                counted_waits=int(name == show_ranks.HP_EXACT), synchronising_calls=0, copies_to_host=0)
            for part, share in (("forward", 0.4), ("backward", 0.6), ("total", 1), (show_ranks.IN_A_ROW, 0.9))
            for name, value in ms.items()]
    rows.append({**row("total", show_ranks.CLASSIC, 1.0, show_ranks.LAYER_BAR_CASE), "correct": False})
    lines = shown("moe_layer", rows, tmp_path / "moe_layer.json", capsys, expected=False)
    assert lines["nvlink, default recipe over AutoEP bf16"] == "bar"
    assert lines["the same over dropless classic bf16"] == "bar"
    assert lines["host waits, exact"] == lines["host waits, static"] == "aim"
    assert lines["synchronising CUDA calls of both"] == "aim"
