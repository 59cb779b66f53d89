# SPDX-License-Identifier: Apache-2.0
"""`ds_mxfp8_report` on this machine, and on machines whose answers the tests make up."""

import importlib.metadata
import json
import subprocess
import sys

import pytest
import torch

from ds_mxfp8_moe import report
from ds_mxfp8_moe.config import DEBUG_KEYS, MXFP8MoEConfig
from tests.support.autoep_models import model
from tests.support.config_cases import ALL_KEYS, OF_TWO_HOPS

WITHOUT_TRANSPORT = {key: value for key, value in ALL_KEYS.items() if key != "transport"}  # nvlink, which needs GPUs


class Extension:
    """The builder of the NVLink transport's extension, as a machine may have it."""

    compatible, error_log, built, failure = True, None, False, None

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
        monkeypatch.setattr(report, "get_accelerator", lambda: self)
        monkeypatch.setattr("ds_mxfp8_moe.config.get_accelerator", lambda: self)
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


def values(lines):
    return dict(lines)


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
def test_every_key_of_a_config(tmp_path, capsys, section):
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({"mxfp8_moe": section}))
    assert report.main([str(path)]) == 0
    text = capsys.readouterr().out
    for key, value in section.items():
        key = f"debug.{key}" if key in DEBUG_KEYS else key
        assert f"{key} {'.' * (25 - len(key))} {json.dumps(value)} (given" in text


@pytest.mark.parametrize("config, line", [
    ({"expert_parallel": {"enabled": True, "autoep_sise": 2}, "mxfp8_moe": {"enabled": True}},
     '[WARN] "expert_parallel" has "autoep_sise", which DeepSpeed ignores: did you mean "autoep_size"?'),
    ({"mxfp8_moe": {"enabled": True, "recipe": "bf16", "scaling_mode": "floor"}},
     '[WARN] "scaling_mode" has no effect: the recipe "bf16" quantises nothing'),
    ({"mxfp8_moe": {"recipe": "mxfp8"}}, '[WARN] the section lacks "enabled": true'),
    ({"mxfp8_moe_config": {"enabled": True}}, '[WARN] there is no section "mxfp8_moe" in it'),
    ({"mxfp8_moe": {"enabled": True}, "expert_parallel": {"enabled": True, "autoep_size": 2}}, None)])
def test_what_training_would_warn_of_at_start_up(tmp_path, capsys, config, line):
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(config))
    assert report.main([str(path)]) == 0
    text = capsys.readouterr().out
    assert line in text if line else "[WARN]" not in text


def test_what_will_happen(tmp_path, capsys, monkeypatch):
    path, section = tmp_path / "ds_config.json", {"mxfp8_moe": {"enabled": True}}

    def happens(config):
        path.write_text(json.dumps(config))
        assert report.main([str(path)]) == 0
        return next(line for line in capsys.readouterr().out.splitlines() if line.startswith("what will happen ..."))

    monkeypatch.setattr(report, "hook_off", lambda: None)
    autoep = section | {"expert_parallel": {"enabled": True, "autoep_size": 2}, "train_batch_size": "auto"}
    assert happens(autoep).endswith("MoE layers are converted, in any program that gives it to DeepSpeed")
    assert 'models of transformers need "expert_parallel": {"enabled": true, "autoep_size": N}' in happens(section)
    assert happens(autoep | {"mxfp8_moe": {"enabled": False}}).endswith("... plain DeepSpeed")
    monkeypatch.setattr(report, "hook_off", lambda: "DS_MXFP8_MOE_AUTO is 0")
    assert "MoE layers are converted, only after ds_mxfp8_moe.enable()" in happens(autoep)


@pytest.mark.parametrize("name, text", [
    ("sft.yaml", "model: qwen\ndeepspeed: ds_config.json\n"),  # Axolotl, LLaMA-Factory, ms-swift, TRL
    ("args.json", '{"model": "qwen", "deepspeed": "ds_config.json"}'),
    ("accelerate.yml", "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: ds_config.json\n"),
    ("trl.yaml", "deepspeed: null\naccelerate_config: ../folder/accelerate.yml\n"),
    ("inside.yaml", "deepspeed: {mxfp8_moe: {enabled: true, load_balance_coeff: 0.25}}")])
def test_a_clients_file_leads_to_its_deepspeed_config(tmp_path, capsys, name, text):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "ds_config.json").write_text('{"mxfp8_moe": {"enabled": true, "load_balance_coeff": 0.25}}')
    (folder / "accelerate.yml").write_text("deepspeed_config: {deepspeed_config_file: ds_config.json}")
    (folder / name).write_text(text)
    assert report.main([str(folder / name)]) == 0
    out = capsys.readouterr().out
    assert "load_balance_coeff ....... 0.25 (given)" in out
    assert ("ds_config.json, named by " in out) == (name != "inside.yaml") and f"{name}\n---" in out


@pytest.mark.parametrize("text, line", [
    ("deepspeed: zero2", '[FAIL] "deepspeed" in {path} is "zero2", which is no file here. If it is the name'),
    ("model: qwen", '[FAIL] {path} names no DeepSpeed config, which alone can have the section: write "deepspeed: '),
    ("deepspeed_config: {zero_stage: 2}", "[FAIL] {path} names no DeepSpeed config"),
    ("- a", "[FAIL] {path} holds a list"), ("a: [", "[FAIL] {path} cannot be read: ")])
def test_a_clients_file_that_leads_nowhere(tmp_path, capsys, text, line):
    path = tmp_path / "sft.yaml"
    path.write_text(text)
    assert report.main([str(path)]) == 1
    assert line.format(path=path) in capsys.readouterr().out


def test_what_would_be_faster(tmp_path, capsys):
    path, folder = tmp_path / "ds_config.json", tmp_path / "model"
    path.write_text(json.dumps({"mxfp8_moe": {"enabled": True}, "wall_clock_breakdown": True}))
    model("gpt_oss").config.save_pretrained(folder)
    assert report.main([str(path)]) == 0
    assert capsys.readouterr().out.count("[HINT] faster, unless your script does it: ") == 1
    assert report.main([str(path), str(folder)]) == 0
    assert '[HINT] faster, unless your script does it: attention is "eager"' in capsys.readouterr().out
    assert report.main([str(path), str(tmp_path / "absent")]) == 1
    assert "[FAIL] the model" in capsys.readouterr().out


def test_config_without_the_section_is_plain_deepspeed(tmp_path, capsys):
    path = tmp_path / "ds_config.json"
    path.write_text('{"train_batch_size": 8}')
    assert report.main([str(path)]) == 0
    text = capsys.readouterr().out
    assert 'enabled .................. false (default: plain DeepSpeed; write "enabled": true to convert)' in text


def test_config_in_error_is_reported_and_ends_with_1(tmp_path, capsys):
    path = tmp_path / "ds_config.json"
    path.write_text('{"mxfp8_moe": {"recipie": "mxfp8", "self_check": "yes"}}')
    assert report.main([str(path)]) == 1
    text = capsys.readouterr().out
    assert text.count('[FAIL] "mxfp8_moe":') == 2 and 'did you mean "recipe"' in text
    assert "versions" in text  # the rest of the report stands
    assert report.main([str(tmp_path / "absent.json")]) == 1
    assert "cannot be read" in capsys.readouterr().out


@pytest.mark.parametrize("around", [
    '"optimizer": true', '"optimizer": {"type": "AdamW", "params": null}', '"gradient_accumulation_steps": []',
    '"expert_parallel": {"enabled": true, "\\ud800": 1}', '"expert_paralel\\ud800": 1'])
def test_whatever_the_rest_of_the_config_holds_is_no_traceback(tmp_path, capsys, around):
    path = tmp_path / "ds_config.json"
    path.write_text('{"mxfp8_moe": {"enabled": true, "keep_quantized_weights": false}, ' + around + "}")
    assert report.main([str(path)]) == 0
    capsys.readouterr().out.encode()


def test_a_transport_that_is_not_there(tmp_path, capsys):
    path = tmp_path / "ds_config.json"
    path.write_text('{"mxfp8_moe": {"enabled": true, "transport": "nvlink"}}')
    assert report.main([str(path)]) == 1
    assert '[FAIL] the transport nvlink cannot be used here:' in capsys.readouterr().out
    path.write_text('{"mxfp8_moe": {"enabled": true, "capacity_factor": 1.5, "nvlink_sms": 8}}')
    assert report.main([str(path)]) == 0  # training goes on without it, and says so
    text = capsys.readouterr().out
    assert "debug.nvlink_sms ......... 8 (given; has no effect here: read by nvlink alone)" in text
    assert "capacity_factor .......... 1.5 (given; has no effect here: read by nvlink alone)" in text


def test_transports_and_their_reasons(monkeypatch):
    builder = Extension()
    monkeypatch.setattr(report, "NVLinkBuilder", lambda: builder)
    monkeypatch.setattr(report, "nvcc_version", lambda: (13, 0))

    def nvlink():
        return next(transport for transport in report.transports() if transport.name == "nvlink")

    def collective():
        return next(transport for transport in report.transports() if transport.name == "collective")

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
    assert '"nvlink" (chosen' in values(report.section_lines(MXFP8MoEConfig(), report.transports()))["transport"]
    builder.failure = "error: no such thing"
    assert nvlink() == ("nvlink", False, "the last build of the extension failed: error: no such thing")
    builder.compatible, builder.error_log = False, "nvcc is not there"
    assert nvlink() == ("nvlink", False, "the extension cannot be built: nvcc is not there")
    assert '"collective" (chosen' in values(report.section_lines(MXFP8MoEConfig(), report.transports()))["transport"]


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
    shown = values(report.section_lines(MXFP8MoEConfig(recipe="bf16"), report.transports()))
    assert shown["recipe"] == '"bf16" (given)'
    for key in ("dispatch_fwd_dtype", "combine_bwd_dtype", "preactivation_dtype"):
        assert shown[key] == '"bf16" (recipe bf16 quantises nothing)'
