# SPDX-License-Identifier: Apache-2.0
"""`ds_mxfp8_report [ds_config.json]`: what ds_mxfp8_moe would use on this machine, and why.

It only reads, and never starts torch.distributed. `python -m ds_mxfp8_moe.report` is the same. The form is that of
DeepSpeed's ds_report: names, dots, values.
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


class TransportStatus(NamedTuple):
    """Whether this machine can use a transport, and why."""

    name: str
    available: bool
    reason: str


class Package(NamedTuple):
    """A package's version and what the report says about it.

    version: None if the package is not installed.
    mark: "OKAY", "WARNING", "FAIL" or "NO". "" if no range of versions is known.
    """

    name: str
    version: str | None
    mark: str
    note: str


def gemm_line(block_size: int) -> str:
    """How this machine multiplies MXFP8 operands of this block size."""
    device_type, _ = current_device()
    if device_type == "cuda" and multiplies_mxfp8(torch.device(device_type), block_size):
        return "MXFP8, on the tensor cores"
    return "operands are dequantised exactly, then multiplied by torch._grouped_mm in bf16"


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the report. Returns the exit status: 1 if the given config has an error or cannot run here, else 0."""
    parser = argparse.ArgumentParser(prog="ds_mxfp8_report", description="What ds_mxfp8_moe would use here, and why.")
    parser.add_argument("config", nargs="?", help="a DeepSpeed config file, to see what its section means here")
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
    _line("cuda (of torch)", torch.version.cuda or "none: torch is built without CUDA")
    return 1 if problem else 0


def device_lines() -> list[tuple[str, str]]:
    """The accelerator that DeepSpeed uses here, as (name, text): each kind of GPU and its count, or why the CPU."""
    device_type, _ = current_device()
    accelerator = get_accelerator()
    if device_type == "cuda":
        indices = range(accelerator.device_count())
        kinds = Counter((torch.cuda.get_device_name(i), torch.cuda.get_device_capability(i)) for i in indices)
        lines = [("device", f"{count} x {name}, {_sm(sm)}") for (name, sm), count in kinds.items()]
        if len({sm for _, sm in kinds}) > 1:
            lines.append(("", f"{_mark('WARNING')} different GPUs: set scale_block_size, so that all ranks agree"))
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


def transports() -> list[TransportStatus]:
    """Every transport in order of preference, and the reasons why this machine cannot use it."""
    return [_nvlink(), _nvshmem(), _collective()]


def _collective() -> TransportStatus:
    backend = get_accelerator().communication_backend_name()
    against = []
    if not torch.distributed.is_available():
        against.append("torch is built without torch.distributed")
    elif not torch.distributed.is_backend_available(backend):
        against.append(f"torch is built without {backend}, which {get_accelerator().device_name()} needs")
    if against:
        return TransportStatus("collective", False, "; ".join(against))
    version = " " + ".".join(map(str, torch.cuda.nccl.version())) if backend == "nccl" else ""
    return TransportStatus("collective", True, f"{backend}{version} through deepspeed.comm")


def _nvlink() -> TransportStatus:
    """Looks at this host alone. Whether the ranks of a layer share a host is checked when training starts."""
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
        against.append(f"the last build of the extension failed: {builder.last_failure()}")
    if against:
        return TransportStatus("nvlink", False, "; ".join(against))
    built = "is built" if builder.is_built() else f"will be built at first use, by nvcc {dotted(nvcc_version())}"
    return TransportStatus("nvlink", True, f"the GPUs reach each other's memory; the extension {built}")


def _nvshmem() -> TransportStatus:
    return TransportStatus("nvshmem", False, "not implemented: ranks on several hosts use the collective transport")


def section_lines(config: MXFP8MoEConfig, statuses: Sequence[TransportStatus]) -> list[tuple[str, str]]:
    """Every key of the section as (key, text): its value on this machine as JSON, and where the value comes from."""
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
            origin += "; has no effect here: only nvlink reads it"
        lines.append((key, f"{json.dumps(value)} ({origin})"))
    return lines


def _transport_problem(config: MXFP8MoEConfig, statuses: Sequence[TransportStatus]) -> str | None:
    """Why this machine cannot use the transport that the config names. None if it can, or if none is named."""
    for transport in statuses:
        if transport.name == config.transport and not transport.available:
            return f'"transport" is "{transport.name}", which cannot be used here: {transport.reason}'
    return None


def _origin(config: MXFP8MoEConfig, key: str, device_type: str, capability: tuple[int, int] | None) -> str:
    if key in config.model_fields_set and getattr(config, key) is not None:
        return "given"
    if key == "enabled":
        return 'default: plain DeepSpeed; write "enabled": true to convert'
    if key == "scale_block_size":
        if capability == (9, 0):
            return "chosen for sm_90: its FP8 tensor cores run at full speed with one scale per 128 values"
        return f"chosen for {_sm(capability) if capability else device_type}: the format's own granularity"
    if key == "transport":
        return "chosen: the first one available; collective between hosts"
    if key == "nvlink_sms":
        return "chosen for each exchange"
    if key == "min_tokens_per_expert":
        return "estimated for each layer from its shape, recipe and device"
    if key == "capacity_factor":
        return "default: buffers fit the routing of each step"
    if config.recipe == "bf16" and key in (*WIRE_KEYS, "preactivation_dtype"):
        return "recipe bf16 quantises nothing"
    return "default"


def packages() -> list[Package]:
    """Versions of this package and of what it needs, compared with the ranges in its own metadata."""
    try:
        metadata = importlib.metadata.metadata(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        ranges, own, python_range = {}, None, SpecifierSet()
    else:
        requirements = [Requirement(text) for text in metadata.get_all("Requires-Dist") or ()]
        ranges = {requirement.name: requirement for requirement in reversed(requirements)}
        own, python_range = metadata["Version"], SpecifierSet(metadata["Requires-Python"] or "")

    note = "" if own else "runs from a checkout that is not installed: no ranges to compare versions with"
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
    # For a package that is imported here, the imported copy counts: PYTHONPATH may put it before the installed one.
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
        # The base version: a build like 2.11.0a0+nv counts as its release.
        inside = Version(Version(version).base_version) in specifier
    except InvalidVersion:
        inside = False
    return Package(name, version, "OKAY" if inside else "WARNING", f"supported: {specifier}")


def _print_ops() -> None:
    _heading("ds_mxfp8_moe C++/CUDA extension op report")
    _line("op name", "built .. compatible (nvcc builds it at first use)")
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
