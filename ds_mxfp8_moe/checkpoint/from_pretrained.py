# SPDX-License-Identifier: Apache-2.0
"""Loads a Hugging Face model whose experts never exist in high precision: from the checkpoint's files into MXFP8.

transformers builds the model without memory and loads all of it but the experts. The experts' tensors are read from
the files one by one, each rank only its own, and quantised on the device: bf16, block FP8 or MXFP4, single experts or
stacks of them.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import deepspeed
import deepspeed.comm as dist
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.module_inject.auto_ep import AutoEP
from deepspeed.module_inject.auto_ep_config import MoELayerSpec
from deepspeed.runtime.tensor_parallel.init_utils import load_ds_config
from torch import nn

from ..compute.block_fp8 import Rounding
from ..compute.mx import MXTensor
from ..config import ConfigError, parse
from ..ffn.frozen_weights import FrozenWeights
from ..layers.held_experts import STACKS, HeldExperts, holds_experts, read_before, say_rounding
from ..layers.patches import lent, patched
from ..layers.presets import added_preset
from ..ops.private_names import missing
from ..transport.deadline import failure_in_world


def from_pretrained(name_or_path: str | os.PathLike, ds_config: dict | str | os.PathLike, model_class: Any = None,
                    **kwargs) -> nn.Module:
    """`AutoModelForCausalLM.from_pretrained` with the experts in MXFP8, for training in which they stay frozen.

    Collective over all ranks. A rank reads the experts that DeepSpeed will give to it. The experts lie on the
    accelerator. Host memory holds one expert at a time. Give the result to `peft.get_peft_model`, then to
    `initialize`, the Trainer or Accelerate. It computes nothing before.

    Args:
        name_or_path: of a checkpoint in safetensors files: a folder, or a name on the hub.
        ds_config: the DeepSpeed config of the later engine, with the sections "mxfp8_moe" and "expert_parallel".
        model_class: transformers' class or auto class. Default: AutoModelForCausalLM.
        kwargs: for its `from_pretrained`, among them `config`, the model's own.

    Raises:
        ConfigError: the config does not allow experts in MXFP8 alone, or AutoEP finds no experts in the model.
        RuntimeError: a file is missing or cut short, or a tensor is missing or has another form. Raised on every rank,
            with the name of the tensor or the file.
    """
    if gone := missing("from_pretrained") or missing("frozen_experts"):
        raise ConfigError(f"from_pretrained does not work with these releases: {gone}")
    loader = _Loader(ds_config)
    failure = error = None
    try:
        model = loader.load(name_or_path, model_class, kwargs)
    except Exception as raised:
        failure, error = f"{type(raised).__name__}: {raised}", raised
    failure = failure_in_world(failure, "from_pretrained")
    if error is not None:
        raise error
    if failure is not None:
        raise RuntimeError(f"the model was not loaded: {failure}")
    say_rounding(loader.rounding)
    return model


class _Loader:
    """Where this rank's experts are, and how they are quantised.

    Attributes:
        rounding: what differs from the files.
    """

    def __init__(self, ds_config: dict | str | os.PathLike):
        section = parse(ds_config)
        given = ds_config if isinstance(ds_config, dict) else load_ds_config(os.fspath(ds_config))
        self.expert_parallel = given.get("expert_parallel", {})
        if not section.enabled or not self.expert_parallel.get("enabled"):
            raise ConfigError('from_pretrained holds experts in MXFP8, which engines with "mxfp8_moe": {"enabled": '
                              'true} and "expert_parallel": {"enabled": true, "autoep_size": ...} compute: write both '
                              "into the config, or use transformers' from_pretrained")
        if section.recipe == "bf16" or section.frozen_experts == "keep":
            raise ConfigError('from_pretrained holds experts in MXFP8 alone, which "recipe": "bf16" and '
                              '"frozen_experts": "keep" do not compute: leave these keys out, or use transformers\' '
                              "from_pretrained")
        if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", 1)) > 1:
            deepspeed.init_distributed()
        self.scaling_mode, self.rounding = section.scaling_mode, Rounding()
        self.ep_size = self.expert_parallel.get("autoep_size", 1)
        self.ep_rank = dist.get_rank() % self.ep_size if dist.is_initialized() else 0

    def load(self, name_or_path: str | os.PathLike, model_class: Any, kwargs: dict) -> nn.Module:
        """This rank's part of `from_pretrained`."""
        import transformers
        from transformers.integrations import deepspeed as zero3
        from transformers.quantizers.quantizer_mxfp4 import Mxfp4HfQuantizer

        if "LOCAL_RANK" in os.environ:  # as DeepSpeed does later
            get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
        device = torch.device(get_accelerator().current_device_name())
        placed = {} if device.type == "cpu" or "device_map" in kwargs else {"device_map": {"": device}}
        with ExitStack() as stack:
            stack.enter_context(patched(transformers.PreTrainedModel, "_load_pretrained_model",
                                        partial(self._load_weights, device)))
            # Experts are all that is in MXFP4, so transformers reads the rest as in a model in bf16.
            stack.enter_context(patched(Mxfp4HfQuantizer, "validate_environment", _dequantizing))
            # The engine partitions what there is to partition. transformers would make experts in bf16 for that.
            stack.enter_context(lent(zero3, "_hf_deepspeed_config_weak_ref", None))
            model = (model_class or transformers.AutoModelForCausalLM).from_pretrained(
                name_or_path, **placed, **kwargs)
        if placed and hasattr(model, "hf_device_map"):  # for which the Trainer refuses several ranks
            del model.hf_device_map
        return model

    def _load_weights(self, device: torch.device, plain: Any, model: nn.Module, state_dict: dict | None,
                      checkpoint_files: Sequence[str] | None, load_config: Any, *args, **kwargs) -> tuple:
        """transformers' loading of a model that it has built, without the experts; then these."""
        from deepspeed.module_inject.auto_ep_config import parse_autoep_config

        from .expert_tensors import ExpertTensors, expert_sources  # safetensors comes with transformers
        from .shards import Shards

        if holds_experts(model):  # an adapter
            return plain(model, state_dict, checkpoint_files, load_config, *args, **kwargs)
        if state_dict is not None or not checkpoint_files or not checkpoint_files[0].endswith(".safetensors"):
            raise ConfigError("from_pretrained reads experts from safetensors files, which this checkpoint has not: "
                              "use transformers' from_pretrained")
        with added_preset(model):
            specs = AutoEP(model, parse_autoep_config(self.expert_parallel)).ep_parser()
        if not specs:
            raise ConfigError(f"AutoEP finds no experts in a {type(model).__name__}: use transformers' "
                              "from_pretrained")
        shards = Shards(checkpoint_files)
        names = [f"{spec.moe_module_name}.{spec.experts_name}.{stack}" for spec in specs for stack in STACKS]
        read_here, sources = expert_sources(list(shards.file_of), names, load_config.weight_mapping or [],
                                            model.base_model_prefix)
        held = [_hold(model.get_submodule(spec.moe_module_name), spec, load_config.dtype, device) for spec in specs]
        with shards.slices(name for name in shards.file_of if name not in read_here) as others:
            result = plain(model, others, None, load_config, *args, **kwargs)
        for spec, experts in zip(specs, held, strict=True):
            tensors = ExpertTensors(shards, sources, spec, experts.is_transposed, load_config.dtype, device,
                                    self.scaling_mode, self.rounding)
            first, weights = self._read(spec, tensors.tiles, load_config.dtype, device)
            experts.weights_of = partial(read_before, weights, first)
        return result

    def _read(self, spec: MoELayerSpec, tiles_of: Callable[[str, int], MXTensor], dtype: torch.dtype,
              device: torch.device) -> tuple[int, FrozenWeights]:
        """The first of this rank's experts of a block, and the weights of all of them."""
        count = spec.num_experts // self.ep_size
        first = at = self.ep_rank * count
        try:
            weights = FrozenWeights(count, spec.hidden_size, spec.ffn_hidden_size, dtype, device)
            for at in range(first, first + count):
                for gemm, stack in zip(("up", "down"), STACKS, strict=True):
                    weights.put_tiles(gemm, at - first, tiles_of(stack, at))
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise RuntimeError(f"out of memory at expert {at} of {spec.moe_module_name}.{spec.experts_name}: "
                               f"{error}") from error
        return first, weights


def _dequantizing(plain: Any, quantizer: Any, *args, **kwargs) -> None:
    quantizer.quantization_config.dequantize = True


def _hold(block: nn.Module, spec: MoELayerSpec, dtype: torch.dtype, device: torch.device) -> HeldExperts:
    """Puts HeldExperts into a block that has no memory yet."""
    source = getattr(block, spec.experts_name)
    if (spec.expert_w1_name, spec.expert_w2_name, spec.expert_w3_name) != (*STACKS, None):
        raise ConfigError(f"{spec.moe_module_name}.{spec.experts_name} is a {type(source).__name__} without "
                          f"{' and '.join(STACKS)}: use transformers' from_pretrained")
    held = HeldExperts(source, tuple(getattr(source, stack).shape for stack in STACKS),
                       getattr(source, "is_transposed", False), dtype, device)
    setattr(block, spec.experts_name, held)
    return held
