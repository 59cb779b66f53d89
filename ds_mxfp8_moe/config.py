# SPDX-License-Identifier: Apache-2.0
"""The section "mxfp8_moe" of a DeepSpeed config: its keys, its errors, and the `Recipe` that it means on a device.

No function here communicates: a mistake in the config is a `ConfigError` before any collective.
"""

import difflib
import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from deepspeed.runtime.tensor_parallel.init_utils import load_ds_config
from pydantic import ConfigDict, Field, ValidationError, field_validator

SECTION = "mxfp8_moe"
WIRE_KEYS = ("dispatch_fwd_dtype", "combine_fwd_dtype", "dispatch_bwd_dtype", "combine_bwd_dtype")
# Keys that not every transport reads, and the transports that do.
READERS = {"nvlink_sms": ("nvlink", ), "capacity_factor": ("nvlink", ), "node_size": ("hierarchical", ),
           "wire": ("hierarchical", )}

Dtype = Literal["mxfp8", "bf16"]


class ConfigError(ValueError):
    """The config asks for something that does not exist or is not possible. Each problem is one line, with a cure."""


class MetricsConfig(DeepSpeedConfigModel):
    """The keys of "metrics" in the section."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    every: int = Field(ge=1)


class MXFP8MoEConfig(DeepSpeedConfigModel):
    """The keys of the section "mxfp8_moe". Every key may be left out. The string "auto" is no value for any of them.

    Arguments:
        enabled: true converts the model's MoE layers. The default is false, as in DeepSpeed's own sections: training
            is then exactly plain DeepSpeed's.
        recipe: what the expert GEMMs compute in. "mxfp8_wgrad_with_hp": forward and input gradient in MXFP8, weight
            gradient in bf16. "mxfp8": all three in MXFP8. "bf16": nothing is quantised, neither in GEMMs nor between
            ranks.
        scale_block_size: how many values share one scale, 32 or 128. Default: 128 on sm_90, 32 elsewhere.
        scaling_mode: how a block's scale is rounded, "rceil" or "floor".
        dispatch_fwd_dtype: the format of tokens on their way to the experts. "mxfp8" quantises them. "bf16" sends them
            in the tokens' own dtype. The next three keys have the same values.
        combine_fwd_dtype: the format of results on their way back.
        combine_bwd_dtype: the format of the output's gradient on its way to the experts.
        dispatch_bwd_dtype: the format of the input's gradient on its way back.
        transport: how rows travel. "collective": NCCL or gloo through deepspeed.comm. "nvlink": kernels that write
            into the memory of the host's other GPUs. "hierarchical": two hops for groups that span nodes, so that a
            token crosses to each node once. Default: nvlink wherever it is possible; hierarchical for groups that
            span 2 to 8 nodes of the same number of ranks; else collective.
        node_size: how many consecutive ranks make a node. Only for hierarchical. Default: the ranks that run on one
            machine make a node.
        wire: what carries rows between nodes. "host": NCCL or gloo through deepspeed.comm. "peer_memory": stores into
            the memory of GPUs, where all nodes are on one host. "nvshmem": transfers that the GPU starts, over the
            network that NVSHMEM's environment names. Only for hierarchical. Default: host.
        nvlink_sms: how many multiprocessors the nvlink kernels take at most. Default: 128, and an estimated best share
            beside a GEMM.
        capacity_factor: fixes the buffer size of each rank: `capacity_factor` times its even share of the rows. The
            host then does not wait for exchanges in the layer, and CUDA graphs can capture it. All ranks must bring
            the same number of tokens. Only for nvlink. Default: buffers fit the routing of each step.
        on_overflow: what happens if routing sends a rank more rows than fit by `capacity_factor`. "error": every rank
            raises an error. "drop": choices that do not fit are dropped. The rank's experts with the most rows lose
            them. Tokens keep their other choices. A warning says how many were dropped. Only with `capacity_factor`.
        overlap: true lets nvlink send the input gradient while the weight gradient is computed, where an estimate
            finds this faster. Both gradients are then in memory at once. false computes and sends one after the other.
        preactivation_dtype: the format in which the experts' pre-activations are kept for backward, "mxfp8" or "bf16".
        min_tokens_per_expert: a layer with fewer tokens per expert runs the bf16 recipe, which is faster there. The
            number is compared with the mean over the experts of the group. 0 means always MXFP8. Default: estimated
            from the layer's shape, its recipe and the device (crossover.py).
        include, exclude: regular expressions, each matched against a module's whole name. A layer is converted if one
            of `include` matches and none of `exclude` does.
        batch_gradients: true lets ZeRO-1 and 2 handle the gradients of many parameters in one call: copies, averages,
            checks for overflow, norms. Results stay the same bit for bit. It has no effect in three cases: with
            offload; in ZeRO-1 with bf16 and fp32 accumulation; where DeepSpeed's functions are not those that zero.py
            knows. false leaves all to DeepSpeed, which makes these calls for each parameter.
        keep_quantized_weights: true quantises the experts' weights once in a step, for all micro-batches and
            recomputations in training mode. Until the optimizer's step, this takes 2 bytes for each weight. Those of
            frozen experts are quantised once for all steps, and their bytes stay. It has no effect without an engine,
            in ZeRO-3 and with ZenFlow. false quantises them in every forward and backward.
        load_balance_coeff: balances the load of AutoEP's experts without an auxiliary loss. After each step, a bias
            that acts on the choice of experts alone moves by this much: up for experts that got fewer tokens than the
            mean over all ranks, down for the others. Usually 0.001. Default: nothing moves.
        metrics: {"every": N} writes figures of each layer to DeepSpeed's monitors in one step of N. metrics.py lists
            them, and the command ds_mxfp8_plot_metrics draws those of the CSV monitor. By default nothing is written.
        self_check: true runs each kernel that the layers will launch once on a small case, where a chip, a driver and
            these releases meet for the first time, and compares it with plain torch. If one is broken, the layers run
            in bf16, or DeepSpeed's own path, and a start-up line names it. The verdict is remembered beside Triton's
            cache.
        force_load_balance: true assigns experts round robin and keeps the router's scores. For benchmarks only.

    Errors: ConfigError for unknown keys and for values that do not exist. Instances are immutable and hashable.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    enabled: bool = False
    recipe: Literal["mxfp8_wgrad_with_hp", "mxfp8", "bf16"] = "mxfp8_wgrad_with_hp"
    scale_block_size: Literal[32, 128] | None = None
    scaling_mode: Literal["rceil", "floor"] = "rceil"
    dispatch_fwd_dtype: Dtype = "mxfp8"
    combine_fwd_dtype: Dtype = "bf16"
    dispatch_bwd_dtype: Dtype = "bf16"
    combine_bwd_dtype: Dtype = "mxfp8"
    transport: Literal["collective", "nvlink", "hierarchical"] | None = None
    node_size: int | None = Field(default=None, ge=1)
    wire: Literal["host", "nvshmem", "peer_memory"] | None = None
    nvlink_sms: int | None = Field(default=None, ge=1)
    capacity_factor: float | None = Field(default=None, ge=1, allow_inf_nan=False)
    on_overflow: Literal["error", "drop"] = "error"
    overlap: bool = True
    preactivation_dtype: Dtype = "mxfp8"
    min_tokens_per_expert: int | None = Field(default=None, ge=0)
    include: tuple[str, ...] = (".*",)
    exclude: tuple[str, ...] = ()
    batch_gradients: bool = True
    keep_quantized_weights: bool = False
    load_balance_coeff: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    metrics: MetricsConfig | None = None
    self_check: bool = True
    force_load_balance: bool = False

    def __init__(self, /, **data: Any):
        try:
            super().__init__(strict=True, **data)  # DeepSpeed's base class drops "auto" silently if not strict
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
            raise ValueError(f"is {_text(patterns)}, expected a list of regular expressions")
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"has {_text(pattern)}, which is no valid regular expression: {error}") from None
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
        problems += [f'"recipe" is "bf16", which quantises nothing, but "{key}" is "mxfp8": leave one of the two out'
                     for key in (*WIRE_KEYS, "preactivation_dtype")
                     if key in written and self.recipe == "bf16" and getattr(self, key) == "mxfp8"]
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


@dataclass(frozen=True)
class Recipe:
    """What a layer computes, with every choice made. Hashable. Equal recipes compute the same bits.

    Arguments:
        quantize_gemm: whether the expert GEMMs of forward and input gradient take MXFP8 operands.
        wgrad: the operands of the weight gradient: "hp" (unquantised) or "mxfp8".
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
    if not isinstance(config, dict):
        try:
            config = load_ds_config(os.fspath(config))
        except (ValueError, OSError, TypeError) as error:
            raise ConfigError(f"the DeepSpeed config {config!r} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"the DeepSpeed config is {_text(config)}, expected an object")
    _check_section_name(config)
    if SECTION not in config:
        return MXFP8MoEConfig()
    section = config[SECTION]
    if not isinstance(section, dict):
        raise ConfigError(f'"{SECTION}" is {_text(section)}, expected an object, for example {{"enabled": true}}')
    return MXFP8MoEConfig(**{str(key): value for key, value in section.items()})


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
    wires = {key.removesuffix("_dtype"): getattr(config, key) if quantize else "bf16" for key in WIRE_KEYS}
    return Recipe(
        quantize_gemm=quantize,
        wgrad="mxfp8" if config.recipe == "mxfp8" else "hp",
        block_size=config.scale_block_size or (128 if hopper else 32),
        scaling_mode=config.scaling_mode,
        preactivation=config.preactivation_dtype if quantize else "bf16",
        **wires,
    )


def _check_section_name(config: dict) -> None:
    """Raises ConfigError for a key that looks like "mxfp8_moe". DeepSpeed ignores unknown keys, so a misspelt section
    would have no effect."""
    for key, value in config.items():
        if key == SECTION:
            continue
        letters = re.sub(r"[^a-z0-9]", "", str(key).lower())
        # A dropped, doubled or swapped letter and "mxfp8" alone pass 0.75. No key that DeepSpeed reads does.
        if difflib.get_close_matches(letters, ("mxfp8moe", "moemxfp8"), cutoff=0.75):
            raise ConfigError(f'the DeepSpeed config has a section {_text(key)}: did you mean "{SECTION}"? '
                              '(to switch the section off, write "enabled": false in it)')
        if isinstance(value, dict) and SECTION in value:
            raise ConfigError(f'the DeepSpeed config has "{SECTION}" inside {_text(key)}: move it to the top level of '
                              "the config")


def _problem(item: dict) -> str:
    """One of pydantic's errors as a line."""
    *inside, key = item["loc"]  # inside of "metrics", or of nothing
    given, key = _text(item["input"]), str(key)
    if item["type"] == "extra_forbidden":
        if key in ("expert_parallel", "autoep_size", "ep_size"):
            return (f'"{key}" (given {given}) is no key of this section: AutoEP\'s stand in "expert_parallel" at the '
                    "top level of the config, and a classic layer has MoE(ep_size=...)")
        valid_keys = list((MetricsConfig if inside else MXFP8MoEConfig).model_fields)
        near = difflib.get_close_matches(key.lower(), valid_keys, n=1, cutoff=0.5)
        meant = f"did you mean {_text(near[0])}? " if near else ""
        return f"unknown key {_text(key)} (given {given}); {meant}Valid: {', '.join(map(_text, valid_keys))}"
    if item["input"] == "auto":
        return f'"{key}" is "auto", which is no value here: leave the key out to have it chosen'
    if item["type"] == "value_error":
        return f'"{key}" {item["ctx"]["error"]}'
    if item["type"] in ("model_type", "missing"):  # of "every" in it
        return f'"{[*inside, key][0]}" is {given}, expected {{"every": N}}'
    return f'"{key}" is {given}. {item["msg"]}'


def _text(value: Any) -> str:
    """The value as JSON text."""
    return json.dumps(value, ensure_ascii=False, default=str)
