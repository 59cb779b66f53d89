# SPDX-License-Identifier: Apache-2.0
"""`ds_mxfp8_report` on this machine, and on machines whose answers the tests make up."""

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from typing import get_args
from unittest import mock

import pytest
import torch

from ds_mxfp8_moe import report
from ds_mxfp8_moe.config import DEBUG_KEYS, MXFP8MoEConfig
from ds_mxfp8_moe.ops.op_builder import NVLinkBuilder
from tests.support.config_cases import ALL_KEYS, OF_TWO_HOPS

WITHOUT_TRANSPORT = {key: value for key, value in ALL_KEYS.items() if key != "transport"}  # nvlink, which needs GPUs


class Extension(NVLinkBuilder):
    """The builder of an extension, as a machine may have it."""

    compatible, built, failure = True, False, None

    def is_compatible(self):
        return self.compatible

    def is_built(self):
        return self.built

    def last_failure(self):
        return self.failure


class Machine:
    """Stands in for DeepSpeed's accelerator and torch.cuda on a machine with the given GPUs."""

    def __init__(self, monkeypatch, *gpus, peers=True):
        self.gpus = gpus
        monkeypatch.setattr("deepspeed.accelerator.real_accelerator.ds_accelerator", self)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=0: gpus[index][0])
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=0: gpus[index][1])
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda i, j: peers)
        monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))

    def device_name(self):
        return "cuda"

    def device_count(self):
        return len(self.gpus)

    def communication_backend_name(self):
        return "nccl"


@pytest.fixture
def reported(tmp_path, capsys):
    """Runs the report on a config, or on a text, in a file of this name. Returns what it prints."""
    def reported(config, *arguments, name="ds_config.json", status=0):
        (tmp_path / name).write_text(config if isinstance(config, str) else json.dumps(config))
        assert report.main([str(tmp_path / name), *map(str, arguments)]) == status
        return capsys.readouterr().out

    return reported


def test_report_on_this_machine(capsys):
    assert report.main([]) == 0
    text = capsys.readouterr().out
    for part in (
        "device ................... cpu",
        "transport collective ..... [OKAY] gloo through deepspeed.comm",
        "transport hierarchical ... [OKAY] between hosts with the same number of ranks, at least two; wire host: gloo",
        "node_size ................ null (chosen: the ranks of one host)",
        'wire ..................... "host" (chosen: NCCL supports every network)',
        'a section {"enabled": true} would mean',
        'recipe ................... "mxfp8_wgrad_with_hp" (default)',
        "scale_block_size ......... 32 (chosen for this device",
        'transport ................ "collective" (chosen',
        "min_tokens_per_expert .... null (estimated for each layer",
        *(f"{name} {'.' * (25 - len(name))} {importlib.metadata.version(name)}"
          for name in ("torch", "transformers", "peft", "accelerate")),
    ):
        assert part in text
    assert "\033" not in text
    assert all(line == line.rstrip() for line in text.splitlines())


@pytest.mark.slow
def test_runs_as_a_module_without_optional_packages_and_without_distributed():
    code = (
        "import sys, runpy\n"
        "sys.modules['transformers'] = sys.modules['safetensors'] = sys.modules['mpi4py'] = None\n"
        "sys.argv = ['ds_mxfp8_report']\n"
        "try: runpy.run_module('ds_mxfp8_moe.report', run_name='__main__')\n"
        "except SystemExit as end: assert end.code == 0, end.code\n"
        "import torch; assert not torch.distributed.is_initialized()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "what this machine would use" in done.stdout and "versions" in done.stdout


@pytest.mark.parametrize("section", [WITHOUT_TRANSPORT, OF_TWO_HOPS], ids=["all keys", "two hops"])
def test_every_key_of_a_config(reported, section):
    text = reported({"mxfp8_moe": section})
    for key, value in section.items():
        key = f"debug.{key}" if key in DEBUG_KEYS else key
        assert f"{key} {'.' * (25 - len(key))} {json.dumps(value)} (given" in text


ENABLED = {"mxfp8_moe": {"enabled": True}}
SPREAD = {"expert_parallel": {"enabled": True, "autoep_size": 2}}


@pytest.mark.parametrize("config, line", [
    (ENABLED | {"expert_parallel": {"enabled": True, "autoep_sise": 2}},
     '[WARN] "expert_parallel" has "autoep_sise", which DeepSpeed ignores: did you mean "autoep_size"?'),
    ({"mxfp8_moe": {"enabled": True, "recipe": "bf16", "scaling_mode": "floor"}},
     '[WARN] "scaling_mode" has no effect: the recipe "bf16" quantizes nothing'),
    ({"mxfp8_moe": {"recipe": "mxfp8"}}, '[WARN] the section lacks "enabled": true'),
    ({"mxfp8_moe_config": {"enabled": True}}, '[WARN] there is no section "mxfp8_moe" in it'),
    ({"train_batch_size": 8}, 'enabled .................. false (default: plain DeepSpeed; write "enabled": true to'),
    (ENABLED | SPREAD, "MoE layers are converted, in any program that passes it to DeepSpeed"),
    (ENABLED, 'models of transformers need "expert_parallel": {"enabled": true, "autoep_size": N}'),
    (SPREAD | {"mxfp8_moe": {"enabled": False}}, "... plain DeepSpeed"),
    ({"mxfp8_moe": {"enabled": True, "capacity_factor": 1.5}},  # training goes on without it, and says so
     "capacity_factor .......... 1.5 (given; has no effect here: read by nvlink alone)")])
def test_what_will_happen_and_what_training_would_warn_of(reported, monkeypatch, config, line):
    monkeypatch.setattr(report, "hook_off", lambda: None)
    text = reported(config)
    assert line in text and ("[WARN]" not in text or config != ENABLED | SPREAD)


def test_without_the_hook_a_program_has_to_enable_it(reported, monkeypatch):
    monkeypatch.setattr(report, "hook_off", lambda: "DS_MXFP8_MOE_AUTO is 0")
    assert "MoE layers are converted, only after ds_mxfp8_moe.enable()" in reported(ENABLED | SPREAD)


@pytest.mark.parametrize("name, text", [
    ("sft.yaml", "model: qwen\ndeepspeed: ds_config.json\n"),  # Axolotl, LLaMA-Factory, ms-swift, TRL
    ("args.json", '{"model": "qwen", "deepspeed": "ds_config.json"}'),
    ("trl.yaml", "deepspeed: null\naccelerate_config: folder/accelerate.yml\n"),
    ("inside.yaml", "deepspeed: {mxfp8_moe: {enabled: true, load_balance_coeff: 0.25}}")])
def test_a_clients_file_leads_to_its_deepspeed_config(tmp_path, reported, name, text):
    (tmp_path / "folder").mkdir()
    (tmp_path / "ds_config.json").write_text('{"mxfp8_moe": {"enabled": true, "load_balance_coeff": 0.25}}')
    (tmp_path / "folder/accelerate.yml").write_text("deepspeed_config: {deepspeed_config_file: ../ds_config.json}")
    out = reported(text, name=name)
    assert "load_balance_coeff ....... 0.25 (given)" in out
    assert ("ds_config.json, named by " in out) == (name != "inside.yaml") and f"{name}\n---" in out


@pytest.mark.parametrize("text, line", [
    ("deepspeed: zero2", '[FAIL] "deepspeed" in {path} is "zero2", which is no file here. If it is the name'),
    ("model: qwen", '[FAIL] {path} names no DeepSpeed config, which alone can have the section: write "deepspeed: '),
    ("deepspeed_config: {zero_stage: 2}", "[FAIL] {path} names no DeepSpeed config"),
    ("- a", "[FAIL] {path} holds a list"), ("a: [", "[FAIL] {path} cannot be read: ")])
def test_a_clients_file_that_leads_nowhere(tmp_path, reported, text, line):
    assert line.format(path=tmp_path / "sft.yaml") in reported(text, name="sft.yaml", status=1)


@pytest.mark.parametrize("section, lines", [
    ({"recipie": "mxfp8", "self_check": "yes"}, ['[FAIL] "mxfp8_moe": unknown key "recipie"',
                                                 '[FAIL] "mxfp8_moe": "self_check" is "yes"']),
    ({"enabled": True, "transport": "nvlink"}, ["[FAIL] the transport nvlink cannot be used here:"])])
def test_a_config_in_error_is_reported_and_ends_with_1(reported, section, lines):
    text = reported({"mxfp8_moe": section}, status=1)
    assert all(line in text for line in lines) and text.count("[FAIL]") == len(lines)
    assert "versions" in text  # the rest of the report stands


@pytest.mark.parametrize("around", [
    '"optimizer": true', '"optimizer": {"type": "AdamW", "params": null}', '"gradient_accumulation_steps": []',
    '"expert_parallel": {"enabled": true, "\\ud800": 1}', '"expert_paralel\\ud800": 1'])
def test_whatever_the_rest_of_the_config_holds_is_no_traceback(reported, around):
    reported('{"mxfp8_moe": {"enabled": true, "keep_quantized_weights": false}, ' + around + "}").encode()


def test_transports_and_their_reasons(monkeypatch):
    builder = Extension()
    monkeypatch.setattr("ds_mxfp8_moe.transport.nvlink.NVLinkBuilder", lambda: builder)
    monkeypatch.setattr("ds_mxfp8_moe.ops.op_builder.builder.nvcc_version", lambda: (13, 0))

    def nvlink():
        return next(transport for transport in report.transports() if transport.name == "nvlink")

    def collective():
        return next(transport for transport in report.transports() if transport.name == "collective")

    values = get_args(get_args(MXFP8MoEConfig.model_fields["transport"].annotation)[0])
    assert {transport.name for transport in report.transports()} == set(values)
    assert collective() == ("collective", True, "gloo through deepspeed.comm")
    assert nvlink() == ("nvlink", False, "no CUDA device")

    Machine(monkeypatch, ("H", (9, 0)))
    assert collective() == ("collective", True, "nccl 2.28.9 through deepspeed.comm")
    assert nvlink() == ("nvlink", False, "fewer than two GPUs")
    Machine(monkeypatch, ("H", (9, 0)), ("H", (9, 0)), peers=False)
    assert nvlink() == ("nvlink", False, "GPU 0 cannot reach the memory of GPU 1")
    Machine(monkeypatch, ("H", (9, 0)), ("H", (9, 0)))
    start = "the GPUs reach each other's memory; the extension "
    assert nvlink() == ("nvlink", True, start + "will be built at first use, by nvcc 13.0")
    builder.built = True
    assert nvlink() == ("nvlink", True, start + "is built")
    assert '"nvlink" (chosen' in dict(report.section_lines(MXFP8MoEConfig(), report.transports()))["transport"]
    builder.failure = "error: no such thing"
    assert nvlink() == ("nvlink", False, "the last build of the extension failed: error: no such thing")
    builder.compatible, builder.error_log = False, "nvcc is not there"
    assert nvlink() == ("nvlink", False, "the extension cannot be built: nvcc is not there")
    assert '"collective" (chosen' in dict(report.section_lines(MXFP8MoEConfig(), report.transports()))["transport"]


def test_launches_and_their_reasons(monkeypatch):
    builder = Extension()
    monkeypatch.setattr(report, "ReplayBuilder", lambda: builder)
    assert report.launches() == "[NO] from Python: no CUDA device"
    Machine(monkeypatch, ("H", (9, 0)))
    builder.built = True
    assert report.launches() == "[OKAY] recorded and replayed; the extension is built"
    builder.compatible, builder.error_log = False, "nvcc is not there"
    assert report.launches() == ("[NO] each from Python, which is slower: the extension cannot be built: nvcc is not "
                                 "there")
    monkeypatch.setattr(report, "unknown_launcher", lambda: "Triton 3.99 has another launcher")
    assert report.launches() == "[NO] each from Python, which is slower: Triton 3.99 has another launcher"


def test_recipe_bf16_shows_what_it_means():
    shown = dict(report.section_lines(MXFP8MoEConfig(recipe="bf16"), report.transports()))
    assert shown["recipe"] == '"bf16" (given)'
    for key in ("dispatch_fwd_dtype", "combine_bwd_dtype", "preactivation_dtype"):
        assert shown[key] == '"bf16" (recipe bf16 quantizes nothing)'


def recorded(folder: Path, **values) -> Path:
    """Files of DeepSpeed's CSV monitor, each with these values in steps 10, 20, ..."""
    folder.mkdir(exist_ok=True)
    for name, rows in values.items():
        rows = [("step", name), *((10 * step, value) for step, value in enumerate(rows, 1))]
        (folder / f"Train_MoE_{name}.csv").write_text("".join(f"{step},{value}\n" for step, value in rows))
    return folder


UNEVEN = {"l0_rank_loads": ["10 6"] * 6, "l0_expert_loads": ["5 1 5 1 1 1 1 1"] * 6,
          "l1_rank_loads": ["79 81"] * 6, "l1_expert_loads": ["20 20 20 19 20 20 20 21"] * 6}


def test_what_metrics_say_of_uneven_routing(tmp_path, capsys):
    folder = recorded(tmp_path / "job", **UNEVEN, l2_rank_loads=["16"] * 6, l2_expert_loads=["16 0"] * 6,
                      exchange_wait_ms=[9, 3, 3], micro_batch_ms=[60, 60, 90])
    with (folder / "Train_MoE_l0_rank_loads.csv").open("a") as file:
        file.write("step,l0_rank_loads\n60,8 8\n")  # the run has resumed, and made a step again
    with mock.patch("matplotlib.pyplot.close") as close:
        assert report.main(["--metrics", str(folder), "--plot", str(tmp_path / "loads.png")]) == 0
    assert capsys.readouterr().out.splitlines()[3:] == [
        "fullest rank, recorded ... 1.07 times the mean load, on average over layers; 1.12 in l0",
        "fullest rank, fixed ...... 1.26 times the mean load, on average over layers; 1.50 in l0",
        "fullest rank, balanced ... 1.01 times the mean load, on average over layers; 1.00 in l0. Predicted: experts "
        "move after 4 recorded steps, then every 100 steps, by the loads of the last 4",
        "waiting for that rank .... 3.00 ms in the forward of a micro-batch, 5.0% of the 60.00 ms that a micro-batch "
        "takes. Backward is not measured"]
    panel, = close.call_args[0][0].axes
    assert [line.get_xydata().tolist() for line in panel.lines] == [
        [[50, 1.25], [60, 1]], [[50, 0.75], [60, 1]], [[50, 1], [60, 1]]]
    assert (tmp_path / "loads.png").stat().st_size > 1000


@pytest.mark.parametrize("files, problem", [
    ({}, "job has no Train_MoE_*_rank_loads.csv of layers on several ranks with more than 4 steps"),
    ({name: rows[:4] for name, rows in UNEVEN.items()}, "with more than 4 steps: give the folder"),
    (UNEVEN | {"l0_rank_loads": ["10 6"] * 5 + ["10 2 2 2"]}, "l0_rank_loads.csv has rows of [2, 4] ranks: give"),
    (UNEVEN | {"l1_expert_loads": ["2 x"]}, "l1_expert_loads.csv: expected rows of a step and a value")],
    ids=["no files", "few steps", "two runs", "other rows"])
def test_metrics_that_say_nothing(tmp_path, capsys, files, problem):
    assert report.main(["--metrics", str(recorded(tmp_path / "job", **files))]) == 1
    assert problem in capsys.readouterr().out.split("[FAIL] ")[1]
