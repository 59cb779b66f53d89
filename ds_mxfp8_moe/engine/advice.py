# SPDX-License-Identifier: Apache-2.0
"""What to do about a config that runs, but probably not as its author meant: one line each.

Also: which version of transformers to install if AutoEP does not start with this one.
"""

import difflib
import importlib.metadata
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import deepspeed
import torch
from deepspeed.module_inject.auto_ep_config import AutoEPConfig
from packaging.specifiers import SpecifierSet

from ..config import READERS, ConfigError, MXFP8MoEConfig
from ..layers.frozen_experts import frozen_of

# Tested: 5.17.0, 5.20.2, 5.21.1, 5.22.2, 5.23.0, 5.24.0. The last two need layers/recorders.py. setup.py has
# the same bounds.
TRANSFORMERS = SpecifierSet(">=5.17,<5.25")

SECTION = "expert_parallel"  # DeepSpeed's own, for AutoEP
MXFP8_KEYS = ("scale_block_size", "scaling_mode", "min_tokens_per_expert", "keep_quantized_weights")


def about_expert_parallel(config: dict, ranks: int) -> list[str]:
    """What DeepSpeed passes over in its section for AutoEP without a word: misspelt keys, and a size left out.

    Args:
        config: the whole DeepSpeed config.
        ranks: of the job.
    """
    if SECTION not in config:
        near = difflib.get_close_matches(SECTION, map(str, config), n=1, cutoff=0.85)
        return [f'the config has "{near[0]}", which DeepSpeed ignores: did you mean "{SECTION}"?'] if near else []
    section = config[SECTION]
    if not isinstance(section, dict) or not section.get("enabled", False):
        return []
    valid = [key for key in AutoEPConfig.__dataclass_fields__ if not key.startswith("_")]
    lines = []
    for key in section:
        if key not in valid:
            near = difflib.get_close_matches(str(key).lower(), valid, n=1)
            meant = f'did you mean "{near[0]}"?' if near else f"valid are {', '.join(valid)}"
            lines.append(f'"{SECTION}" has "{key}", which DeepSpeed ignores: {meant}')
    if "autoep_size" not in section and ranks > 1:
        lines.append(f'"{SECTION}" has no "autoep_size", so every rank holds all experts and no tokens travel. Write '
                     f'how many ranks share the experts of a layer, for example "autoep_size": {ranks}')
    return lines


def about_enabled(config: MXFP8MoEConfig) -> list[str]:
    """A section with keys that does not say whether it is enabled."""
    if not config.model_fields_set or "enabled" in config.model_fields_set:
        return []
    return ['the section lacks "enabled": true: all layers stay DeepSpeed\'s']


def about_keys(config: MXFP8MoEConfig, layers: Iterable[torch.nn.Module]) -> list[str]:
    """Keys of the section that have no effect on the converted layers."""
    layers, lines = list(layers), []
    if layers and all(layer.ep_size == 1 for layer in layers):
        keys = ["transport"] if config.transport == "nvlink" else []
        keys += [key for key, names in READERS.items() if "nvlink" in names and getattr(config, key) is not None]
        lines += [f'"{key}" has no effect: every rank holds all experts of its layers, so no tokens travel'
                  for key in keys]
    if config.recipe == "bf16":
        lines += [f'"{key}" has no effect: the recipe "bf16" quantises nothing'
                  for key in MXFP8_KEYS if key in config.model_fields_set]
    held = [frozen_of(layer.experts) is not None for layer in layers]
    if layers and config.frozen_experts == "mxfp8" and not any(held):
        lines.append('"frozen_experts": "mxfp8" has no effect: no layer of AutoEP has experts that are all frozen. '
                     "Classic layers keep theirs in the model's dtype, and so does ZeRO-3 in an engine that exists")
    if layers and all(held):
        lines += [f'"{key}" has no effect: all experts are frozen and held in MXFP8, which no call casts'
                  for key in ("min_tokens_per_expert", "keep_quantized_weights") if getattr(config, key)]
    return lines


@contextmanager
def explaining_transformers(config: MXFP8MoEConfig) -> Iterator[None]:
    """Names the versions that work, where AutoEP fails to start an engine with another version of transformers.

    Raises:
        ConfigError: in place of errors by which a changed library shows.
    """
    try:
        yield
    except (AttributeError, ImportError, KeyError, TypeError) as error:
        in_autoep = any("auto_ep" in frame.filename for frame in traceback.extract_tb(error.__traceback__))
        if not config.enabled or not in_autoep:
            raise
        version = importlib.metadata.version("transformers")
        if TRANSFORMERS.contains(version, prereleases=True):
            raise
        raise ConfigError(f"AutoEP of DeepSpeed {deepspeed.__version__} cannot convert this model with transformers "
                          f"{version} ({type(error).__name__}: {error}). Versions that work: pip install "
                          f"'transformers{TRANSFORMERS}'") from error
