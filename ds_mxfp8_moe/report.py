# SPDX-License-Identifier: Apache-2.0
"""`ds_mxfp8_report [ds_config.json]`: what this machine would use and why. Reads only; never starts torch.distributed.

Also `python -m ds_mxfp8_moe.report`. The form is ds_report's: names, dots, values.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import sys
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder.builder import probe_is_compatible
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from .config import NVLINK_KEYS, WIRE_KEYS, ConfigError, MXFP8MoEConfig, current_device, parse, resolve
from .grouped_gemm import multiplies_mxfp8
from .mx import BLOCK_SIZES
from .ops import op_builder
from .ops.op_builder.nvlink import dotted, nvcc_version

PACKAGE = "ds_mxfp8_moe"
REPORTED_PACKAGES = ("torch", "triton", "deepspeed", "transformers", "mpi4py")

_NAME_WIDTH = 25
_RULE = "-" * 75
_COLOURS = {"OKAY": "\033[92m", "YES": "\033[92m", "NO": "\033[93m", "WARNING": "\033[93m", "FAIL": "\033[91m"}


class Transport(NamedTuple):
    """Whether a transport can be used on this machine, and what speaks for or against it."""

    name: str
    available: bool
    reason: str


class Package(NamedTuple):
    """A package's version, None where absent, and the verdict: "OKAY", "WARNING", "FAIL", "NO" or "" (no range)."""

    name: str
    version: str | None
    mark: str
    note: str


def gemm_line(block_size: int) -> str:
    """How this machine multiplies MXFP8 operands of that block size."""
    device_type, _ = current_device()
    if device_type == "cuda" and multiplies_mxfp8(torch.device(device_type), block_size):
        return "on the tensor cores, as MXFP8"
    return "operands are dequantised (exact), then torch._grouped_mm in bf16"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report; returns the exit status, 1 where the config given is in error or cannot run here."""
    parser = argparse.ArgumentParser(prog="ds_mxfp8_report", description="What ds_mxfp8_moe would use here, and why.")
    parser.add_argument("config", nargs="?", help="a DeepSpeed config file, to see its mxfp8_moe section resolved")
    path = parser.parse_args(argv).config

    _heading("ds_mxfp8_moe: what this machine would use and why")
    for name, text in device_lines():
        _line(name, text)
    for block_size in BLOCK_SIZES:
        _line(f"expert GEMMs, block {block_size}", gemm_line(block_size))
    statuses = transports()
    for transport in statuses:
        _line(f"transport {transport.name}", f"{_mark('OKAY' if transport.available else 'NO')} {transport.reason}")

    _heading(f'section "mxfp8_moe" of {path}' if path else 'a section {"enabled": true} would mean')
    try:
        config = parse(path) if path else MXFP8MoEConfig(enabled=True)
    except ConfigError as error:
        problem = str(error)
    else:
        for name, text in section_lines(config, statuses):
            _line(name, text)
        problem = _transport_problem(config, statuses)
    if problem:
        print("\n".join(f"{_mark('FAIL')} {line}" for line in problem.splitlines()))

    _print_ops()

    _heading("versions")
    for package in packages():
        mark = f" {_mark(package.mark)}" if package.mark else ""
        _line(package.name, f"{package.version or 'not installed'}{mark} {package.note}".rstrip())
    _line("cuda (of torch)", torch.version.cuda or "none: torch is built without it")
    return 1 if problem else 0


def device_lines() -> list[tuple[str, str]]:
    """The accelerator that DeepSpeed uses here as (name, text): each kind of device and its count, or why the CPU."""
    device_type, _ = current_device()
    accelerator = get_accelerator()
    if device_type == "cuda":
        indices = range(accelerator.device_count())
        kinds = Counter((torch.cuda.get_device_name(i), torch.cuda.get_device_capability(i)) for i in indices)
        lines = [("device", f"{count} x {name}, {_sm(sm)}") for (name, sm), count in kinds.items()]
        if len({sm for _, sm in kinds}) > 1:
            lines.append(("", f"{_mark('WARNING')} mixed devices: write scale_block_size, so that all ranks agree"))
        return lines
    if device_type != "cpu":
        return [("device", f"{accelerator.device_count()} x {device_type}, not tested with this package")]
    if "DS_ACCELERATOR" in os.environ:
        reason = f"DS_ACCELERATOR={os.environ['DS_ACCELERATOR']}"
    elif torch.version.cuda is None:
        reason = "torch is built without CUDA"
    else:
        reason = "torch sees no CUDA device"
    return [("device", f"cpu, {platform.machine()}, {os.cpu_count()} cores ({reason})")]


def transports() -> list[Transport]:
    """Every transport in order of preference, with the reasons that rule it out on this machine."""
    return [_nvlink(), _nvshmem(), _collective()]


def _collective() -> Transport:
    backend = get_accelerator().communication_backend_name()
    against = []
    if not torch.distributed.is_available():
        against.append("torch is built without torch.distributed")
    elif not torch.distributed.is_backend_available(backend):
        against.append(f"torch is built without {backend}, which {get_accelerator().device_name()} needs")
    version = ""
    if backend == "nccl" and not against:
        version = " " + ".".join(map(str, torch.cuda.nccl.version()))
    return Transport("collective", not against, "; ".join(against) or f"{backend}{version} through deepspeed.comm")


def _nvlink() -> Transport:
    """Inside one host; whether ranks share one is known when they meet."""
    against = []
    if get_accelerator().device_name() != "cuda":
        against.append("no CUDA device")
    else:
        count = get_accelerator().device_count()
        pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
        apart = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
        if count < 2:
            against.append("fewer than two GPUs")
        if apart:
            against.append(f"GPU {apart[0][0]} cannot reach the memory of GPU {apart[0][1]}")
    builder = op_builder.NVLinkBuilder()
    if not builder.is_compatible():
        against.append(f"the extension cannot be built: {builder.error_log}")
    elif builder.last_failure():
        against.append(f"the extension was not built last time: {builder.last_failure()}")
    if against:
        return Transport("nvlink", False, "; ".join(against))
    built = "is built" if builder.is_built() else f"is built at first use, by nvcc {dotted(nvcc_version())}"
    return Transport("nvlink", True, f"every GPU reaches every other's memory; the extension {built}")


def _nvshmem() -> Transport:
    return Transport("nvshmem", False, "not implemented: peer memory over InfiniBand or EFA has no provider yet, so "
                     "ranks of several hosts take the collective transport")


def section_lines(config: MXFP8MoEConfig, statuses: Sequence[Transport]) -> list[tuple[str, str]]:
    """Every key of the section as (key, text): its value on this machine, in JSON, and where the value comes from."""
    device_type, capability = current_device()
    recipe = resolve(config, device_type, capability)
    chosen = {key: getattr(recipe, key.removesuffix("_dtype")) for key in (*WIRE_KEYS, "preactivation_dtype")}
    chosen["scale_block_size"] = recipe.block_size
    usable = [transport.name for transport in statuses if transport.available]
    chosen["transport"] = config.transport or (usable[0] if usable else None)

    lines = []
    for key in type(config).model_fields:
        value = chosen.get(key, getattr(config, key))
        origin = _origin(config, key, device_type, capability)
        if key in NVLINK_KEYS and origin == "given" and "nvlink" not in usable:
            origin += "; without effect: nvlink's, which cannot be used here"
        lines.append((key, f"{json.dumps(value)} ({origin})"))
    return lines


def _transport_problem(config: MXFP8MoEConfig, statuses: Sequence[Transport]) -> str | None:
    """Why the transport that the config names cannot be used here; None where it can, or where none is named."""
    for transport in statuses:
        if transport.name == config.transport and not transport.available:
            return f'"transport" is "{transport.name}", which cannot be used here: {transport.reason}'
    return None


def _origin(config: MXFP8MoEConfig, key: str, device_type: str, capability: tuple[int, int] | None) -> str:
    if key in config.model_fields_set and getattr(config, key) is not None:
        return "given"
    if key == "enabled":
        return 'default: plain DeepSpeed; write "enabled": true'
    if key == "scale_block_size":
        if capability == (9, 0):
            return "chosen for sm_90, whose FP8 tensor cores run at full speed with one scale per 128"
        return f"chosen for {_sm(capability) if capability else device_type}: the format's own granularity"
    if key == "transport":
        return "chosen: the first that is available, where the ranks of a layer share a host"
    if key == "nvlink_sms":
        return "chosen by a model of the links"
    if key == "min_tokens_per_expert":
        return "chosen for each layer, by its shape, recipe and device"
    if key == "capacity_factor":
        return "default: exact, any routing fits"
    if config.recipe == "bf16" and key in (*WIRE_KEYS, "preactivation_dtype"):
        return "recipe bf16 quantises nothing"
    return "default"


def packages() -> list[Package]:
    """Versions of everything that the package stands on, against the ranges in its own metadata."""
    try:
        metadata = importlib.metadata.metadata(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        ranges, own, python_range = {}, None, SpecifierSet()
    else:
        requirements = [Requirement(text) for text in metadata.get_all("Requires-Dist") or ()]
        ranges = {requirement.name: requirement for requirement in reversed(requirements)}
        own, python_range = metadata["Version"], SpecifierSet(metadata["Requires-Python"] or "")

    note = "" if own else "runs from a checkout: no ranges to compare the versions with"
    found = [Package(PACKAGE, own, "", note)]
    found.append(_verdict("python", platform.python_version(), python_range, required=True))
    for name in REPORTED_PACKAGES:
        requirement = ranges.get(name)
        specifier = requirement.specifier if requirement else SpecifierSet()
        marker = requirement.marker if requirement else None
        required = requirement is not None and (marker is None or marker.evaluate({"extra": ""}))
        found.append(_verdict(name, _installed_version(name), specifier, required))
    return found


def _installed_version(name: str) -> str | None:
    # What is imported counts, where it is imported anyway: PYTHONPATH may put another copy before the installed one.
    if name in ("torch", "deepspeed"):
        return {"torch": torch, "deepspeed": deepspeed}[name].__version__
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _verdict(name: str, version: str | None, specifier: SpecifierSet, required: bool) -> Package:
    if version is None:
        return Package(name, None, "FAIL" if required else "NO", f"needed: {specifier}" if required else "optional")
    if not specifier:
        return Package(name, version, "", "")
    try:
        # The base version: builds such as 2.11.0a0+nv count as their release.
        inside = Version(Version(version).base_version) in specifier
    except InvalidVersion:
        inside = False
    return Package(name, version, "OKAY" if inside else "WARNING", f"supported: {specifier}")


def _print_ops() -> None:
    _heading("ds_mxfp8_moe C++/CUDA extension op report")
    _line("op name", "built .. compatible (nvcc builds at first use)")
    for name, builder in op_builder.ALL_OPS.items():
        compatible = probe_is_compatible(builder, verbose=True)
        built = _mark("YES" if compatible and builder.is_built() else "NO")
        _line(name, f"{built} ..... {_mark('OKAY' if compatible else 'NO')}")


def _sm(capability: tuple[int, int]) -> str:
    return f"sm_{capability[0]}{capability[1]}"


def _heading(text: str) -> None:
    print(f"{_RULE}\n{text}\n{_RULE}")


def _line(name: str, text: str) -> None:
    print(f"{name} {'.' * (_NAME_WIDTH - len(name))} {text}" if name else f"{'':{_NAME_WIDTH + 1}} {text}")


def _mark(word: str) -> str:
    return f"{_COLOURS[word]}[{word}]\033[0m" if sys.stdout.isatty() else f"[{word}]"


if __name__ == "__main__":
    sys.exit(main())
