# SPDX-License-Identifier: Apache-2.0
"""`ds_mxfp8_report` on this machine, and on machines whose answers the tests make up."""

import email
import importlib.metadata
import json
import subprocess
import sys

import pytest
import torch
from deepspeed.ops.op_builder.builder import OpBuilder

from ds_mxfp8_moe import report
from ds_mxfp8_moe.config import MXFP8MoEConfig
from ds_mxfp8_moe.ops import op_builder

METADATA = """\
Version: 1.2.3
Requires-Python: >=3.10,<4
Requires-Dist: torch>=2.11
Requires-Dist: deepspeed<0.20,>=0.19.8
Requires-Dist: triton>=3.6; sys_platform == "linux"
Requires-Dist: transformers<5.21,>=5.17; extra == "examples"
Requires-Dist: mpi4py>=4.0; extra == "mpi"
"""


class Builder(OpBuilder):
    """An op builder as ds_report meets it; `compatible` may be an exception."""

    def __init__(self, name, compatible):
        super().__init__(name)
        self.compatible = compatible

    def absolute_name(self):
        return f"ds_mxfp8_moe.ops.{self.name}_op"

    def sources(self):
        return []

    def is_compatible(self, verbose=False):
        if isinstance(self.compatible, Exception):
            raise self.compatible
        return self.compatible

    def is_built(self):
        return True


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


@pytest.fixture
def versions(monkeypatch):
    """The package's metadata as METADATA, and the installed versions as the dict that the test fills."""
    installed = {"triton": "3.6.0", "transformers": "5.20.2", "mpi4py": "4.1.2"}

    def version(name):
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(importlib.metadata, "metadata", lambda name: email.message_from_string(METADATA))
    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    monkeypatch.setattr(report.deepspeed, "__version__", "0.19.8")
    return installed


def values(lines):
    return dict(lines)


def test_report_on_this_machine(capsys):
    assert report.main([]) == 0
    text = capsys.readouterr().out
    for part in (
        "device ................... cpu",
        "DS_ACCELERATOR=cpu",
        "transport collective ..... [OKAY] gloo through deepspeed.comm",
        'a section {"enabled": true} would mean',
        'recipe ................... "mxfp8_wgrad_with_hp" (default)',
        "scale_block_size ......... 32 (chosen for cpu",
        'transport ................ "collective" (chosen',
        "min_tokens_per_expert .... null (estimated for each layer",
        "extension op report",
        f"torch .................... {torch.__version__}",
    ):
        assert part in text
    assert "\033" not in text
    assert all(line == line.rstrip() for line in text.splitlines())


def test_runs_as_a_module_without_optional_packages_and_without_distributed():
    code = (
        "import sys, runpy\n"
        "sys.modules['transformers'] = sys.modules['mpi4py'] = None\n"
        "sys.argv = ['ds_mxfp8_report']\n"
        "try: runpy.run_module('ds_mxfp8_moe.report', run_name='__main__')\n"
        "except SystemExit as end: assert end.code == 0, end.code\n"
        "import torch; assert not torch.distributed.is_initialized()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "what this machine would use" in done.stdout and "versions" in done.stdout


def test_config_file_is_resolved(tmp_path, capsys):
    path = tmp_path / "ds_config.json"
    section = {"enabled": True, "scale_block_size": 128, "exclude": [".*3"], "transport": "collective"}
    path.write_text(json.dumps({"train_batch_size": 8, "mxfp8_moe": section}))
    assert report.main([str(path)]) == 0
    text = capsys.readouterr().out
    assert f'section "mxfp8_moe" of {path}' in text
    assert "enabled .................. true (given)" in text
    assert "scale_block_size ......... 128 (given)" in text
    assert 'exclude .................. [".*3"] (given)' in text
    assert 'transport ................ "collective" (given)' in text
    assert 'scaling_mode ............. "rceil" (default)' in text


def test_config_without_the_section_is_plain_deepspeed(tmp_path, capsys):
    path = tmp_path / "ds_config.json"
    path.write_text('{"train_batch_size": 8}')
    assert report.main([str(path)]) == 0
    text = capsys.readouterr().out
    assert 'enabled .................. false (default: plain DeepSpeed; write "enabled": true to convert)' in text


def test_config_in_error_is_reported_and_ends_with_1(tmp_path, capsys):
    path = tmp_path / "ds_config.json"
    path.write_text('{"mxfp8_moe": {"recipie": "mxfp8", "overlap": "yes"}}')
    assert report.main([str(path)]) == 1
    text = capsys.readouterr().out
    assert text.count('[FAIL] "mxfp8_moe":') == 2 and 'did you mean "recipe"' in text
    assert "versions" in text  # the rest of the report stands
    assert report.main([str(tmp_path / "absent.json")]) == 1
    assert "cannot be read" in capsys.readouterr().out


def test_a_transport_that_is_not_there(tmp_path, capsys):
    path = tmp_path / "ds_config.json"
    path.write_text('{"mxfp8_moe": {"enabled": true, "transport": "nvlink"}}')
    assert report.main([str(path)]) == 1
    assert '[FAIL] "transport" is "nvlink", which cannot be used here:' in capsys.readouterr().out
    path.write_text('{"mxfp8_moe": {"enabled": true, "capacity_factor": 1.5}}')
    assert report.main([str(path)]) == 0  # training goes on without it, and says so
    text = capsys.readouterr().out
    assert "capacity_factor .......... 1.5 (given; has no effect here: only nvlink reads it)" in text
    assert "nvlink_sms ............... null (chosen for each exchange)" in text


@pytest.mark.parametrize(
    "capability, block_size, reason", [((9, 0), 128, "sm_90"), ((10, 0), 32, "sm_100"), ((8, 0), 32, "sm_80")]
)
def test_gpu_and_its_block_size(monkeypatch, capability, block_size, reason):
    Machine(monkeypatch, ("GPU X", capability), ("GPU X", capability))
    assert report.device_lines() == [("device", f"2 x GPU X, {reason}")]
    text = values(report.section_lines(MXFP8MoEConfig(), report.transports()))["scale_block_size"]
    assert text.startswith(f"{block_size} (chosen for {reason}")


def test_mixed_gpus_are_listed_with_a_warning(monkeypatch):
    Machine(monkeypatch, ("H", (9, 0)), ("B", (10, 0)), ("H", (9, 0)))
    lines = report.device_lines()
    assert [text for _, text in lines[:2]] == ["2 x H, sm_90", "1 x B, sm_100"]
    assert "WARNING" in lines[2][1] and "scale_block_size" in lines[2][1]


def test_why_the_cpu(monkeypatch):
    assert "DS_ACCELERATOR=cpu" in values(report.device_lines())["device"]
    monkeypatch.delenv("DS_ACCELERATOR")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "torch is built without CUDA" in values(report.device_lines())["device"]
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "torch sees no CUDA device" in values(report.device_lines())["device"]


def test_transports_and_their_reasons(monkeypatch):
    builder = Extension()
    monkeypatch.setattr(op_builder, "NVLinkBuilder", lambda: builder)
    monkeypatch.setattr(report, "nvcc_version", lambda: (13, 0))

    def nvlink():
        return next(transport for transport in report.transports() if transport.name == "nvlink")

    def collective():
        return next(transport for transport in report.transports() if transport.name == "collective")

    assert collective() == ("collective", True, "gloo through deepspeed.comm")
    assert nvlink() == ("nvlink", False, "no CUDA device")
    monkeypatch.setattr(torch.distributed, "is_backend_available", lambda backend: backend == "nccl")
    assert collective() == ("collective", False, "torch is built without gloo, which cpu needs")

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


def test_nvshmem_is_named_with_the_reason_for_its_absence():
    nvshmem = next(transport for transport in report.transports() if transport.name == "nvshmem")
    assert not nvshmem.available and "several hosts use the collective transport" in nvshmem.reason


def test_recipe_bf16_shows_what_it_means():
    shown = values(report.section_lines(MXFP8MoEConfig(recipe="bf16"), report.transports()))
    assert shown["recipe"] == '"bf16" (given)'
    for key in ("dispatch_fwd_dtype", "combine_bwd_dtype", "preactivation_dtype"):
        assert shown[key] == '"bf16" (recipe bf16 quantises nothing)'


def test_versions_inside_their_ranges(versions):
    found = {package.name: package for package in report.packages()}
    assert found["ds_mxfp8_moe"].version == "1.2.3"
    assert {name for name in found if found[name].mark == "OKAY"} == {"python", *report.REPORTED_PACKAGES}
    assert found["transformers"].note == "supported: <5.21,>=5.17"


def test_versions_outside_or_absent(versions, monkeypatch):
    versions["transformers"] = "5.23.0"
    versions.pop("mpi4py")
    versions.pop("triton")
    monkeypatch.setattr(torch, "__version__", "2.11.0a0+nv26.1")  # a container's build of 2.11
    monkeypatch.setattr(report.deepspeed, "__version__", "odd")
    found = {package.name: package for package in report.packages()}
    assert found["torch"].mark == "OKAY"
    assert found["deepspeed"].mark == "WARNING"
    assert found["transformers"].mark == "WARNING" and "<5.21" in found["transformers"].note
    assert found["mpi4py"] == ("mpi4py", None, "NO", "optional")
    if sys.platform == "linux":
        assert found["triton"] == ("triton", None, "FAIL", "needed: >=3.6")


def test_versions_in_a_checkout_that_is_not_installed(versions, monkeypatch):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "metadata", absent)
    found = {package.name: package for package in report.packages()}
    assert found["ds_mxfp8_moe"].version is None and "checkout" in found["ds_mxfp8_moe"].note
    assert found["torch"] == ("torch", "2.13.0+cpu", "", "")


def test_ops_in_the_form_of_ds_report(monkeypatch, capsys):
    report.main([])
    assert "ds_mxfp8_moe_nvlink ......" in capsys.readouterr().out
    builders = [Builder("fits", True), Builder("fits_not", False), Builder("breaks", RuntimeError("no toolkit"))]
    monkeypatch.setattr(op_builder, "ALL_OPS", {builder.name: builder for builder in builders})
    report.main([])
    text = capsys.readouterr().out
    assert "fits ..................... [YES] ..... [OKAY]" in text
    assert "fits_not ................. [NO] ..... [NO]" in text
    assert "breaks ................... [NO] ..... [NO]" in text and "no toolkit" in text


def test_colours_on_a_terminal_only(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    report.main([])
    assert "\033[92m[OKAY]\033[0m" in capsys.readouterr().out
