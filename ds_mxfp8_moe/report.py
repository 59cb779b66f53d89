# SPDX-License-Identifier: Apache-2.0
"""`ds_mxfp8_report [config]`: what ds_mxfp8_moe would use on this machine, and why.

The config is DeepSpeed's JSON, or a file of a client that names it. The report says what will happen with it. It only
reads, and never starts torch.distributed.
`python -m ds_mxfp8_moe.report` is the same. The form is DeepSpeed's ds_report: names, dots, values.

`ds_mxfp8_report --metrics FOLDER` says from a run's metrics how full the fullest rank was, and how full it would be
with "expert_placement": "balanced".
"""

import argparse
import importlib.metadata
import json
import os
import platform
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from deepspeed.accelerator import get_accelerator

from .compute.grouped_gemm import multiplies_mxfp8
from .compute.mx import BLOCK_SIZES
from .compute.recorded import unknown_launcher
from .config import (
    FORMAT_KEYS,
    KEYS,
    READERS,
    SECTION,
    ConfigError,
    MXFP8MoEConfig,
    current_device,
    parse,
    printable,
    read_ds_config,
    resolve,
    shown,
)
from .engine import skew
from .engine.advice import about_enabled, about_expert_parallel, about_keys
from .engine.self_check import line_about, remembered, worst
from .ops.device import has_kernels
from .ops.op_builder import ReplayBuilder
from .transport.choose import TRANSPORTS

# Keys by which files of Accelerate, Axolotl, LLaMA-Factory, ms-swift and TRL name the DeepSpeed config or one another.
NAMES_CONFIG = ("deepspeed", "deepspeed_config", "deepspeed_config_file", "accelerate_config")

PACKAGES = ("ds_mxfp8_moe", "torch", "triton", "deepspeed", "transformers", "peft", "accelerate", "mpi4py")

class TransportStatus(NamedTuple):
    """Whether this machine can use a transport, and why."""

    name: str
    available: bool
    reason: str


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the report. Returns the exit status: 1 if the given config has an error or cannot run here, else 0."""
    parser = argparse.ArgumentParser(prog="ds_mxfp8_report", description="What ds_mxfp8_moe would use here, and why.")
    parser.add_argument("config", nargs="?", help="a DeepSpeed config, or the YAML or JSON of a client that names one")
    parser.add_argument("--metrics", type=Path, metavar="FOLDER", help='say instead what a run\'s "metrics" say of '
                        "uneven routing. FOLDER: output_path and job_name of DeepSpeed's CSV monitor")
    parser.add_argument("--plot", metavar="FILE", help="with --metrics: the picture of the ranks' loads to write")
    args = parser.parse_args(argv)
    if args.plot and not args.metrics:
        parser.error("--plot draws what --metrics reads: name the folder by --metrics")
    if args.metrics:
        return print_skew(args.metrics, args.plot)

    _heading("ds_mxfp8_moe: what this machine would use and why")
    device_type, _ = current_device()
    for text in devices(device_type):
        _line("device", text)
    for block_size in BLOCK_SIZES:
        text = "operands are dequantized exactly, then multiplied by torch._grouped_mm in bf16"
        if device_type == "cuda" and multiplies_mxfp8(torch.device(device_type), block_size):
            text = "MXFP8, on the tensor cores"
        _line(f"expert GEMMs, block {block_size}", text)
    statuses = transports()
    for transport in statuses:
        _line(f"transport {transport.name}", f"{'[OKAY]' if transport.available else '[NO]'} {transport.reason}")
    _line("kernel launches", launches())
    off = hook_off()
    _line("section without enable()", f"[NO] {off}" if off else "[OKAY] armed; DS_MXFP8_MOE_AUTO=0 is off")
    _line("check of the kernels", kernels_check())

    problem = print_section(args.config, statuses)
    if problem:
        print("\n".join(f"[FAIL] {line}" for line in problem.splitlines()))

    _heading("versions")
    _line("python", platform.python_version())
    for name in PACKAGES:
        _line(name, _version(name))
    _line("cuda (of torch)", torch.version.cuda or "none: torch is built without CUDA")
    return 1 if problem else 0


def print_skew(folder: Path, picture: str | None) -> int:
    """Prints what a run's metrics say of uneven routing. Returns the exit status. `picture`: a file to write."""
    _heading(f"uneven routing in {folder}")
    try:
        layers = skew.read(folder)
        for name, text in skew.lines(folder, layers):
            _line(name, text)
        if picture:
            skew.plot(layers, picture)
    except (ImportError, OSError, ValueError) as error:
        print(f"[FAIL] {error}")
        return 1
    return 0


def print_section(path: str | None, statuses: Sequence[TransportStatus]) -> str | None:
    """Prints what the section of a config file means here, and what training with it would warn of.

    Args:
        path: a DeepSpeed config, or a client's file that names one. None: a section {"enabled": true}.
        statuses: as `transports` returns them.

    Returns:
        Why the config has an error or cannot run here, one line for each problem. None: it can.
    """
    where, given = path, {SECTION: {"enabled": True}}
    try:
        if path:
            where, given = ds_config_of(path)
        config = parse(given)
    except ConfigError as error:
        return str(error)
    finally:
        _heading(printable(f'section "{SECTION}" of {where}') if path else 'a section {"enabled": true} would mean')
    if path:
        _line("what will happen", what_will_happen(given, config))
    for name, text in section_lines(config, statuses):
        _line(name, text)
    problem = next((f"the transport {transport.name} cannot be used here: {transport.reason}"
                    for transport in statuses if transport.name == config.transport and not transport.available), None)
    if path:
        for line in advice(given, config):
            print(f"[WARN] {line}")
    return problem


def ds_config_of(path: str) -> tuple[str, dict]:
    """The DeepSpeed config that a file holds, or that a client's file names, after its path in words.

    Errors: ConfigError if there is none, or a file cannot be read.
    """
    where, found, is_its_own = path, _read(path), not _is_yaml(path)
    while key := next((key for key in NAMES_CONFIG if found.get(key)), None):
        value = found[key]
        if isinstance(value, dict):
            found, is_its_own = value, key == "deepspeed"  # transformers' Trainer takes a whole config there
            continue
        places = str(value), os.path.join(os.path.dirname(path), str(value))
        path = next(filter(os.path.isfile, places), None)
        if path is None:
            raise ConfigError(f'"{key}" in {where} is {shown(value)}, which is no file here. If it is the name of a '
                              "config that comes with a library: that one has no section. Write a JSON that has it, "
                              "and its path in place of the name")
        where, found, is_its_own = f"{path}, named by {where}", _read(path), not _is_yaml(path)
    if not is_its_own:
        raise ConfigError(f'{where} names no DeepSpeed config, which alone can have the section: write '
                          '"deepspeed: ds_config.json" there, or for Accelerate "deepspeed_config_file: '
                          'ds_config.json" under "deepspeed_config"')
    return where, found


def _is_yaml(path: str) -> bool:
    return path.endswith((".yaml", ".yml"))


def _read(path: str) -> dict:
    if not _is_yaml(path):
        return read_ds_config(path)
    import yaml  # every client that has such files has it
    try:
        with open(path, encoding="utf-8") as file:
            found = yaml.safe_load(file)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds a {type(found).__name__}, expected keys with values")
    return found


def what_will_happen(ds_config: dict, config: MXFP8MoEConfig) -> str:
    """What engines with this config do, in a sentence."""
    if not config.enabled:
        return "plain DeepSpeed"
    who = "in any program that passes it to DeepSpeed"
    if hook_off():
        who = "only after ds_mxfp8_moe.enable(), or by ds_mxfp8_moe.initialize"
    spread = ds_config.get("expert_parallel")
    if isinstance(spread, dict) and spread.get("enabled"):
        return f"MoE layers are converted, {who}"
    return (f"classic layers (deepspeed.moe.layer.MoE) are converted, {who}; models of transformers need "
            '"expert_parallel": {"enabled": true, "autoep_size": N} beside the section')


def devices(device_type: str) -> list[str]:
    """The accelerator that DeepSpeed uses here: each kind of GPU and its count."""
    if device_type == "cuda":
        indices = range(get_accelerator().device_count())
        kinds = Counter((torch.cuda.get_device_name(i), torch.cuda.get_device_capability(i)) for i in indices)
        return [f"{count} x {name}, sm_{major}{minor}" for (name, (major, minor)), count in kinds.items()]
    return [f"{device_type}, {platform.machine()}, {os.cpu_count()} cores"]


def transports() -> list[TransportStatus]:
    """The transports in order of preference inside a host, and whether this machine can use them.

    What needs several hosts or ranks is checked when training starts.
    """
    return [TransportStatus(name, *kind.usable_here()) for name, kind in TRANSPORTS.items()]


def launches() -> str:
    """How the host launches the kernels of a layer."""
    if get_accelerator().device_name() != "cuda":
        return "[NO] from Python: no CUDA device"
    if why_not := unknown_launcher():
        return f"[NO] each from Python, which is slower: {why_not}"
    usable, text = ReplayBuilder().status()
    return f"[OKAY] recorded and replayed; {text}" if usable else f"[NO] each from Python, which is slower: {text}"


def hook_off() -> str | None:
    """Why engines do not read the section in programs that do not import the package. None: they do."""
    if not importlib.metadata.entry_points(group="torch.backends", name="ds_mxfp8_moe"):
        return "the package is not installed here: call ds_mxfp8_moe.enable()"
    off = [name for name in ("DS_MXFP8_MOE_AUTO", "TORCH_DEVICE_BACKEND_AUTOLOAD") if os.environ.get(name) == "0"]
    return f"{off[0]} is 0: call ds_mxfp8_moe.enable()" if off else None


def kernels_check() -> str:
    """What the check at first use found on this machine."""
    device = torch.device(get_accelerator().current_device_name())
    if not has_kernels(device):
        return "[NO] there are no kernels for this device"
    verdicts = remembered(device)
    broken = worst(verdicts)
    if broken.runs != "all":
        return f"[FAIL] {line_about(broken, device).partition('WARNING: ')[2]}"
    if not verdicts:
        return "at the start of the first engine"
    return f"[OKAY] {len(verdicts)} kinds of layers were checked with these releases"


def section_lines(config: MXFP8MoEConfig, statuses: Sequence[TransportStatus]) -> list[tuple[str, str]]:
    """Every key of the section as (key, text): its value on this machine as JSON, and where the value comes from."""
    recipe = resolve(config, *current_device())
    chosen = {key: getattr(recipe, key.removesuffix("_dtype")) for key in (*FORMAT_KEYS, "preactivation_dtype")}
    chosen["scale_block_size"] = recipe.block_size
    usable = [transport.name for transport in statuses if transport.available]
    chosen["transport"] = config.transport or (usable[0] if usable else None)
    chosen["wire"] = config.wire or "host"

    lines = []
    for key, written in config.model_dump().items():
        value = chosen.get(key, written)
        origin = _origin(config, key)
        if origin == "given" and not set(READERS.get(key, usable)) & set(usable):
            origin += f"; has no effect here: read by {' and '.join(READERS[key])} alone"
        place = f"debug.{key}" if KEYS[key]["debug"] else key
        lines.append((place, f"{json.dumps(value)} ({origin})"))
    return lines


def advice(ds_config: dict, config: MXFP8MoEConfig) -> list[str]:
    """What training with this config would warn of at start-up, as far as it shows without a model.

    Args:
        ds_config: the whole DeepSpeed config.
        config: its section, which is enabled or not.
    """
    if not config.model_fields_set:
        return ['there is no section "mxfp8_moe" in it, or an empty one: all layers stay DeepSpeed\'s']
    if not config.enabled:
        return about_enabled(config)
    ranks = max(2, get_accelerator().device_count())  # how many will train is not known here
    return about_expert_parallel(ds_config, ranks) + about_keys(config, ())


def _origin(config: MXFP8MoEConfig, key: str) -> str:
    if key in config.model_fields_set and getattr(config, key) is not None:
        return "given"
    if config.recipe == "bf16" and key in (*FORMAT_KEYS, "preactivation_dtype"):
        return "recipe bf16 quantizes nothing"
    return KEYS[key]["origin"]


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _heading(text: str) -> None:
    print(f"{'-' * 75}\n{text}\n{'-' * 75}")


def _line(name: str, text: str) -> None:
    print(f"{name} {'.' * (25 - len(name))} {text}")


if __name__ == "__main__":
    sys.exit(main())
