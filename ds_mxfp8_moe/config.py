# SPDX-License-Identifier: Apache-2.0
"""The section "mxfp8_moe" of a DeepSpeed config: its keys, its errors, and the `Recipe` that it means on a device.

No function here communicates: a mistake in the config is a `ConfigError` before any collective.
"""

import difflib
import json
import os
import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from deepspeed.runtime.tensor_parallel.init_utils import load_ds_config
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

SECTION = "mxfp8_moe"
MOST = 2**31 - 1  # of tokens or steps
LONGEST_VALUE = 120  # in characters, as shown in a message
FORMAT_KEYS = ("dispatch_fwd_dtype", "combine_fwd_dtype", "dispatch_bwd_dtype", "combine_bwd_dtype")
Dtype = Literal["mxfp8", "bf16"]


class ConfigError(ValueError):
    """The config asks for something that does not exist or is not possible. Each problem is one line, with a cure."""


class MetricsConfig(BaseModel):
    """The keys of "metrics" in the section."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    every: int = Field(ge=1, le=MOST)


def _key(default: Any, *, origin: str = "default", readers: tuple[str, ...] = (), mxfp8: bool = False,
         engine: bool = False, debug: bool = False, **bounds: Any) -> Any:
    """A key of the section, with all that is said about it elsewhere.

    Args:
        origin: where the value comes from if the key is left out.
        readers: the transports that read it. (): all do, or it is not about transports.
        mxfp8: it has no effect if the recipe is "bf16".
        engine: it has no effect without an engine, which makes the steps.
        debug: it stands in "debug", and is for measurements and tests.
        bounds: of pydantic's Field.
    """
    about = {"origin": origin, "readers": readers, "mxfp8": mxfp8, "engine": engine, "debug": debug}
    return Field(default=default, json_schema_extra=about, **bounds)


class MXFP8MoEConfig(DeepSpeedConfigModel):
    """The keys of the section "mxfp8_moe", which examples/guides/config.md explains one by one.

    Every key may be left out. With None, it is chosen for the machine or the layer. Instances are immutable and
    hashable. In JSON, the keys of DEBUG_KEYS stand in an object "debug".

    Errors: ConfigError for unknown keys and for values that do not exist. The string "auto" is no value for any key.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    enabled: bool = _key(False, origin='default: plain DeepSpeed; write "enabled": true to convert')
    recipe: Literal["mxfp8_wgrad_with_hp", "mxfp8", "bf16"] = _key("mxfp8_wgrad_with_hp")
    scale_block_size: Literal[32, 128] | None = _key(
        None, mxfp8=True, origin="chosen for this device: 128 on sm_90, 32 elsewhere")
    dispatch_fwd_dtype: Dtype = _key("mxfp8")
    combine_fwd_dtype: Dtype = _key("bf16")
    dispatch_bwd_dtype: Dtype = _key("bf16")
    combine_bwd_dtype: Dtype = _key("mxfp8")
    transport: Literal["collective", "nvlink", "hierarchical"] | None = _key(
        None, origin="chosen: nvlink inside a host, hierarchical between hosts if they are even, else collective")
    node_size: int | None = _key(
        None, ge=1, le=1024, readers=("hierarchical", ), origin="chosen: the ranks of one host")
    wire: Literal["host", "nvshmem", "peer_memory"] | None = _key(
        None, readers=("hierarchical", ), origin="chosen: NCCL supports every network")
    capacity_factor: float | None = _key(
        None, ge=1, le=1024, allow_inf_nan=False, readers=("nvlink", ),
        origin="default: buffers fit the routing of each step")
    on_overflow: Literal["error", "drop"] = _key("error")
    preactivation_dtype: Dtype = _key("mxfp8")
    min_tokens_per_expert: int | None = _key(
        None, ge=0, le=MOST, mxfp8=True, origin="estimated for each layer from its shape, recipe and device")
    include: tuple[str, ...] = _key((".*",))
    exclude: tuple[str, ...] = _key(())
    batch_gradients: bool = _key(True)
    keep_quantized_weights: bool | None = _key(
        None, mxfp8=True, engine=True,
        origin="decided after the first step, by the casts that it saves and the memory that is free")
    frozen_experts: Literal["mxfp8", "mxfp4", "keep"] | None = _key(
        None, origin="chosen: mxfp4 from files in MXFP4; else mxfp8 with adapters by PEFT, keep without")
    merge_aware: bool = _key(False)
    expert_turns: int = _key(1, ge=1, le=1024)
    expert_placement: Literal["fixed", "balanced"] = _key("fixed", engine=True)
    load_balance_coeff: float | None = _key(None, gt=0, le=1, allow_inf_nan=False, engine=True)
    metrics: MetricsConfig | None = _key(None, engine=True)
    graph_attention: bool | None = _key(
        None, origin="decided once two steps have calls of the same form, by the memory that is free")
    scaling_mode: Literal["rceil", "floor"] = _key("rceil", mxfp8=True, debug=True)
    nvlink_sms: int | None = _key(
        None, ge=1, le=1024, readers=("nvlink", ), debug=True, origin="chosen for each exchange")
    self_check: bool = _key(True, debug=True)
    force_load_balance: bool = _key(False, debug=True)

    def __init__(self, /, **data: Any):
        data = _without_debug(data)
        try:
            # Not DeepSpeed's own, which has an argument `strict` and drops "auto" silently.
            BaseModel.__init__(self, **{printable(key): value for key, value in data.items()})
        except ValidationError as error:
            problems = [_problem(item) for item in error.errors()]
        else:
            problems = self._contradictions()
        if problems:
            raise ConfigError("\n".join(f'"{SECTION}": {problem}' for problem in problems))

    @field_validator("include", "exclude", mode="before")
    @classmethod
    def _check_patterns(cls, patterns: Any) -> tuple[str, ...]:
        if not isinstance(patterns, (list, tuple)) or not all(isinstance(pattern, str) for pattern in patterns):
            raise ValueError(f"is {shown(patterns)}, expected a list of regular expressions")
        for pattern in patterns:
            try:
                pattern.encode()  # start-up lines print it
                re.compile(pattern)
            except (re.error, ValueError, OverflowError, RecursionError) as error:
                raise ValueError(f"has {shown(pattern)}, which is no valid regular expression: {error}") from None
        return tuple(patterns)

    def _contradictions(self) -> list[str]:
        """Pairs of keys that exclude each other. A default gives way to the recipe, a written value does not."""
        written = [key for key in self.model_fields_set if getattr(self, key) is not None]
        problems = []
        problems += [f'"{key}" needs the transport {" or ".join(needed)}, but "transport" is "{self.transport}": '
                     "leave one of the two out" for key, needed in READERS.items()
                     if key in written and self.transport not in (None, *needed)]
        if self.on_overflow == "drop" and self.capacity_factor is None:
            problems.append('"on_overflow" is "drop", but without "capacity_factor" buffers fit the routing of each '
                            'step and nothing overflows: write a "capacity_factor", or leave "on_overflow" out')
        problems += [f'"merge_aware" needs frozen experts in MXFP8 or MXFP4, but "{key}" is "{value}": leave one of '
                     "the two out" for key, value in (("recipe", "bf16"), ("frozen_experts", "keep"))
                     if self.merge_aware and getattr(self, key) == value]
        problems += [f'"recipe" is "bf16", which quantizes nothing, but "{key}" is "{getattr(self, key)}": leave '
                     "one of the two out"
                     for key in (*FORMAT_KEYS, "preactivation_dtype", "frozen_experts")
                     if key in written and self.recipe == "bf16" and getattr(self, key) in ("mxfp8", "mxfp4")]
        return problems

    def selects(self, module_name: str) -> bool:
        """Whether `include` and `exclude` allow the conversion of the module with this dotted name."""
        included = any(re.fullmatch(pattern, module_name) for pattern in self.include)
        return included and not any(re.fullmatch(pattern, module_name) for pattern in self.exclude)

    def idle_patterns(self, module_names: Iterable[str]) -> list[str]:
        """Patterns of `include` and `exclude` that match none of these dotted names."""
        names = list(module_names)
        return [pattern for pattern in (*self.include, *self.exclude)
                if not any(re.fullmatch(pattern, name) for name in names)]


KEYS: dict[str, dict[str, Any]] = {key: field.json_schema_extra for key, field in MXFP8MoEConfig.model_fields.items()}
READERS = {key: about["readers"] for key, about in KEYS.items() if about["readers"]}
DEBUG_KEYS = tuple(key for key, about in KEYS.items() if about["debug"])


def _without_debug(data: dict[str, Any]) -> dict[str, Any]:
    """The section, with the keys of its object "debug" beside the others."""
    debug = data.get("debug", {})
    if not isinstance(debug, dict) or not set(debug) <= set(DEBUG_KEYS):
        raise ConfigError(f'"{SECTION}": "debug" is {shown(debug)}, expected an object with some of '
                          f"{', '.join(map(shown, DEBUG_KEYS))}")
    if twice := sorted(set(debug) & set(data)):
        raise ConfigError(f'"{SECTION}": "{twice[0]}" stands both in "debug" and beside it: leave one of the two out')
    return {key: value for key, value in data.items() if key != "debug"} | debug


def _say_moved(section: dict) -> None:
    if moved := [key for key in DEBUG_KEYS if key in section]:
        warnings.warn(f'"{SECTION}": {", ".join(map(shown, moved))} in the section itself is deprecated: write '
                      f'"debug": {shown({key: section[key] for key in moved})}', FutureWarning, stacklevel=3)


@dataclass(frozen=True)
class Recipe:
    """What a layer computes, with every choice made. Hashable. Equal recipes compute the same bits.

    Arguments:
        quantize_gemm: whether the expert GEMMs of forward and input gradient take MXFP8 operands.
        wgrad: the operands of the weight gradient: "hp" (unquantized) or "mxfp8".
        block_size: the config's scale_block_size. The other fields are those of the config without "_dtype".
    """

    quantize_gemm: bool
    wgrad: Literal["hp", "mxfp8"]
    block_size: int
    scaling_mode: Literal["rceil", "floor"]
    dispatch_fwd: Dtype
    combine_fwd: Dtype
    dispatch_bwd: Dtype
    combine_bwd: Dtype
    preactivation: Dtype


def parse(config: str | os.PathLike | dict | MXFP8MoEConfig | None) -> MXFP8MoEConfig:
    """Read the section "mxfp8_moe" out of what `deepspeed.initialize` takes as `config=`.

    Arguments:
        config: a dict, the path of a JSON or HJSON file, or its urlsafe base64. None and a config without the section
            give the disabled config. A parsed config is returned as it is.

    Errors: ConfigError if the config cannot be read, if the section's name is misspelt or the section is not at the
    top level, and for every problem inside it.
    """
    if isinstance(config, MXFP8MoEConfig):
        return config
    if config is None:
        return MXFP8MoEConfig()
    config = read_ds_config(config)
    _check_section_name(config)
    if SECTION not in config:
        return MXFP8MoEConfig()
    section = config[SECTION]
    if not isinstance(section, dict):
        raise ConfigError(f'"{SECTION}" is {shown(section)}, expected an object, for example {{"enabled": true}}')
    _say_moved(section)
    return MXFP8MoEConfig(**{str(key): value for key, value in section.items()})


def read_ds_config(config: str | os.PathLike | dict) -> dict:
    """The whole DeepSpeed config, from a dict, the path of a JSON or HJSON file, or its urlsafe base64.

    Errors: ConfigError if it cannot be read.
    """
    if isinstance(config, dict):
        return config
    try:
        read = load_ds_config(os.fspath(config))
    except Exception as error:  # hjson lets through what Python's conversions raise
        reason, cause = printable(error), error
        if not (isinstance(config, (str, os.PathLike)) and os.path.exists(config)):
            # DeepSpeed's error repeats a config in base64, which may hold keys of other services.
            reason, cause = "expected the path of an existing file, a dictionary, or a config in urlsafe base64", None
        raise ConfigError(f"the DeepSpeed config {name_of(config)} cannot be read: {reason}") from cause
    if not isinstance(read, dict):
        raise ConfigError(f"the DeepSpeed config {name_of(config)} holds a {type(read).__name__}, expected an object")
    return read


def ds_setting(engine: Any, section: str, key: str) -> Any:
    """A value of an engine's whole DeepSpeed config. None: the config does not have it."""
    found = engine.config.get(section)
    return found.get(key) if isinstance(found, dict) else None


def is_tensor_parallel(engine: Any) -> bool:
    """Whether AutoTP splits an engine's model."""
    return (ds_setting(engine, "tensor_parallel", "autotp_size") or 0) > 1


def name_of(config: Any) -> str:
    """A DeepSpeed config for a message: its path, or the first characters of its base64."""
    if not isinstance(config, (str, os.PathLike)):
        return shown(config)
    path = os.fspath(config)
    return shown(path, 1000 if "." in str(path) or os.path.exists(path) else 20)  # base64 has no dots


def current_device() -> tuple[str, tuple[int, int] | None]:
    """The accelerator that DeepSpeed uses in this process: its device type, and on CUDA its compute capability."""
    device_type = get_accelerator().device_name()
    return device_type, torch.cuda.get_device_capability() if device_type == "cuda" else None


def resolve(config: MXFP8MoEConfig, device_type: str, capability: tuple[int, int] | None = None) -> Recipe:
    """Fix every choice that the config leaves to the device.

    Arguments:
        config: the section. "enabled" makes no difference here.
        device_type: torch's name of the device, for example "cuda" or "cpu".
        capability: CUDA compute capability as (major, minor); None off CUDA. `current_device` gives both.
    """
    # Hopper's FP8 wgmma runs at full speed only if its accumulator is promoted once per 128 along K. Other devices
    # take the format's own 32. The pair must be exact: ROCm reports (9, 4) and (9, 5) for its own chips.
    hopper = device_type == "cuda" and capability == (9, 0)
    quantize = config.recipe != "bf16"
    formats: dict[str, Any] = {key.removesuffix("_dtype"): getattr(config, key) if quantize else "bf16"
                             for key in FORMAT_KEYS}
    return Recipe(
        quantize_gemm=quantize,
        wgrad="mxfp8" if config.recipe == "mxfp8" else "hp",
        block_size=config.scale_block_size or (128 if hopper else 32),
        scaling_mode=config.scaling_mode,
        preactivation=config.preactivation_dtype if quantize else "bf16",
        **formats,
    )


def _check_section_name(config: dict) -> None:
    """Raises ConfigError for a key that looks like "mxfp8_moe". DeepSpeed ignores unknown keys, so a misspelt section
    would have no effect."""
    for key, value in config.items():
        if key == SECTION:
            continue
        letters = re.sub(r"[^a-z0-9]", "", str(key).lower())
        # Another format, as in "fp8_moe" or "mxfp4_moe", is no misspelling. A dropped, doubled or swapped letter and
        # "mxfp8" alone pass 0.75. No key that DeepSpeed reads does.
        formats = re.findall(r"(?:mx|nv)?fp\d+", letters)
        if formats in ([], ["mxfp8"]) and difflib.get_close_matches(letters, ("mxfp8moe", "moemxfp8"), cutoff=0.75):
            raise ConfigError(f'the DeepSpeed config has a section {shown(key)}: did you mean "{SECTION}"? '
                              '(to switch the section off, write "enabled": false in it)')
        if isinstance(value, dict) and SECTION in value:
            raise ConfigError(f'the DeepSpeed config has "{SECTION}" inside {shown(key)}: move it to the top level of '
                              "the config")


def _problem(item: dict) -> str:
    """One of pydantic's errors as a line."""
    *inside, key = item["loc"]  # inside of "metrics", or of nothing
    given, key = shown(item["input"]), str(key)
    if item["type"] == "extra_forbidden":
        if key in ("expert_parallel", "autoep_size", "ep_size"):
            return (f'"{key}" (given {given}) is no key of this section: AutoEP\'s stand in "expert_parallel" at the '
                    "top level of the config, and a classic layer has MoE(ep_size=...)")
        if key == "overlap":
            return f'"{key}" is no key any more: exchanges and GEMMs run one after the other. Leave it out'
        valid_keys = list(MetricsConfig.model_fields if inside else KEYS)
        near = difflib.get_close_matches(key.lower(), valid_keys, n=1, cutoff=0.5)
        meant = f"did you mean {shown(near[0])}? " if near else ""
        valid_keys = [key for key in valid_keys if key not in DEBUG_KEYS] + ([] if inside else ["debug"])
        return f"unknown key {shown(key)} (given {given}); {meant}Valid: {', '.join(map(shown, valid_keys))}"
    if isinstance(item["input"], str) and item["input"] == "auto":
        return f'"{key}" is "auto", which is no value here: leave the key out to have it chosen'
    if item["type"] == "value_error":
        return f'"{key}" {item["ctx"]["error"]}'
    if item["type"] in ("model_type", "missing"):  # of "every" in it
        return f'"{[*inside, key][0]}" is {given}, expected {{"every": N}}'
    return f'"{key}" is {given}. {item["msg"]}'


def shown(value: Any, longest: int = LONGEST_VALUE) -> str:
    """A value for a message: JSON text that can be printed, and at most `longest` characters of it."""
    try:
        text = printable(json.dumps(value, ensure_ascii=False, default=str))
    except (TypeError, ValueError, RecursionError):  # keys of other types, endless or deep nesting, 5000 digits
        return f"a {type(value).__name__} that is no JSON"
    return text if len(text) <= longest else f"{text[:longest]}..."


def printable(text: Any) -> str:
    """The text with \\ud800 and so on in place of halves of surrogate pairs, which no stream can encode."""
    return str(text).encode(errors="backslashreplace").decode()
