# SPDX-License-Identifier: Apache-2.0
"""Loads a Hugging Face model whose experts never exist in high precision: from files into MXFP8 or MXFP4.

transformers builds the model without memory and loads all of it but the experts. The experts' tensors are read from
the files a few at a time, each rank only its own, and quantized on the device: bf16, block FP8, MXFP4 or NVFP4, single
experts or stacks of them.
"""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.comm as dist
import torch
from deepspeed.accelerator import get_accelerator
from torch import nn

from ..compat.patches import lent, patched
from ..compat.private_names import missing
from ..compute.block_fp8 import Rounding
from ..config import ConfigError, parse, read_ds_config, shown
from ..ffn.frozen_weights import FORMATS, FrozenWeights
from ..layers.held_experts import HeldExperts, holds_experts, read_before, say_rounding
from ..recognition.stacked import DOWN, Layout, is_stacked
from ..transport.agreement import check_same_arguments
from ..transport.deadline import failure_in_world
from .nvfp4 import is_nvfp4


def from_pretrained(name_or_path: str | os.PathLike, ds_config: dict | str | os.PathLike, model_class: Any = None,
                    **kwargs) -> nn.Module:
    """`AutoModelForCausalLM.from_pretrained` with quantized experts, for training in which they stay frozen.

    Collective over all ranks. A rank reads the experts that DeepSpeed will give to it. The experts lie on the
    accelerator, in the format of "frozen_experts"; without this key in MXFP4 if the files are, else in MXFP8. Host
    memory holds a few experts at a time; with a GPU, 64 MiB of pinned buffers. Give the result to
    `peft.get_peft_model`, then to `initialize`, the Trainer or Accelerate. It computes nothing before.

    Args:
        name_or_path: of a checkpoint in safetensors files: a folder, or a name on the hub.
        ds_config: the DeepSpeed config of the later engine, with the sections "mxfp8_moe" and "expert_parallel".
        model_class: transformers' class or auto class. Default: AutoModelForCausalLM.
        kwargs: for its `from_pretrained`, among them `config`, the model's own.

    Raises:
        ConfigError: the config does not allow quantized experts, or does not fit the model, or the model has no
            stacked experts.
        ValueError: ranks differ in `model_class`, `dtype`, or what they read of `ds_config`. Raised on every rank.
        RuntimeError: a file is missing or cut short, a tensor lies in two files, or one of the experts' tensors is
            missing or has another form. Raised on every rank, with the name of the tensor or the file. A missing
            tensor of another layer is no error: transformers fills it with new values and says so.
    """
    if gone := missing("from_pretrained") or missing("stacked experts"):
        raise ConfigError(f"from_pretrained does not work with these releases: {gone}")
    loader = _Loader(ds_config)
    failure = error = None
    try:
        model = loader.load(name_or_path, model_class, kwargs)
    except Exception as raised:
        error = _with_name(raised, name_or_path)
        failure = f"{type(error).__name__}: {error}"
    failure = failure_in_world(failure, "from_pretrained")
    if error is not None:
        raise error
    if failure is not None:
        raise RuntimeError(f"the model was not loaded: {failure}")
    say_rounding(loader.rounding)
    return model


def _with_name(error: Exception, name_or_path: str | os.PathLike) -> Exception:
    """The error. In place of Python's own, which name nothing, one that names the checkpoint."""
    if isinstance(error, (RuntimeError, ValueError, OSError, ImportError)):
        return error
    named = RuntimeError(f"transformers cannot read {name_or_path}: its config.json or an argument of from_pretrained "
                         f"has another form than expected ({type(error).__name__}: {error})")
    named.__cause__ = error
    return named


class _Loader:
    """Where this rank's experts are, and how they are quantized.

    Attributes:
        rounding: what differs from the files.
    """

    def __init__(self, ds_config: dict | str | os.PathLike):
        given = read_ds_config(ds_config)
        section = parse(given)
        self.expert_parallel = given.get("expert_parallel", {})
        if not isinstance(self.expert_parallel, dict):
            raise ConfigError(f'"expert_parallel" is {shown(self.expert_parallel)}, expected an object, for example '
                              '{"enabled": true, "autoep_size": 2}')
        if not section.enabled or not self.expert_parallel.get("enabled"):
            raise ConfigError('from_pretrained quantizes experts, which engines with "mxfp8_moe": {"enabled": '
                              'true} and "expert_parallel": {"enabled": true, "autoep_size": ...} compute: write both '
                              "into the config, or use transformers' from_pretrained")
        if section.recipe == "bf16" or section.frozen_experts == "keep":
            raise ConfigError('from_pretrained holds experts quantized alone, which "recipe": "bf16" and '
                              '"frozen_experts": "keep" do not compute: leave these keys out, or use transformers\' '
                              "from_pretrained")
        self.ep_size = self.expert_parallel.get("autoep_size", 1)
        if type(self.ep_size) is not int or self.ep_size < 1:
            raise ConfigError(f'"autoep_size" in "expert_parallel" is {shown(self.ep_size)}, expected how many ranks '
                              "share the experts of a layer: an integer, at least 1")
        if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE") or 1) > 1:
            deepspeed.init_distributed()
        self.section, self.rounding = section, Rounding()
        self.ep_rank = dist.get_rank() % self.ep_size if dist.is_initialized() else 0

    def load(self, name_or_path: str | os.PathLike, model_class: Any, kwargs: dict) -> nn.Module:
        """This rank's part of `from_pretrained`."""
        import transformers
        from transformers.integrations import deepspeed as zero3
        from transformers.quantizers import AutoHfQuantizer

        from .shards import check_index  # safetensors comes with transformers

        if "LOCAL_RANK" in os.environ:  # as DeepSpeed does later
            get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
        check_same_arguments("from_pretrained", autoep_size=self.ep_size, scaling_mode=self.section.scaling_mode,
                             frozen_experts=self.section.frozen_experts, model_class=model_class,
                             dtype=kwargs.get("dtype", kwargs.get("torch_dtype")))
        device = torch.device(get_accelerator().current_device_name())
        placed = {} if device.type == "cpu" or "device_map" in kwargs else {"device_map": {"": device}}
        folder = name_or_path if os.path.isdir(name_or_path) else None  # else the hub's client checks names of files
        if folder is not None:
            variant = f".{kwargs['variant']}" if kwargs.get("variant") else ""
            index = Path(folder, kwargs.get("subfolder") or "", f"model.safetensors.index{variant}.json")
            if index.is_file() and not index.with_name(f"model{variant}.safetensors").exists():  # which comes first
                check_index(index)
        with ExitStack() as stack:
            stack.enter_context(patched(transformers.PreTrainedModel, "_load_pretrained_model",
                                        partial(self._load_weights, device, folder)))
            stack.enter_context(patched(AutoHfQuantizer, "supports_quant_method", _needs_quantizer))
            # The engine partitions what there is to partition. transformers would make experts in bf16 for that.
            stack.enter_context(lent(zero3, "_hf_deepspeed_config_weak_ref", None))
            model = (model_class or transformers.AutoModelForCausalLM).from_pretrained(
                name_or_path, **placed, **kwargs)
        if placed and hasattr(model, "hf_device_map"):  # for which the Trainer refuses several ranks
            del model.hf_device_map
        return model

    def _load_weights(self, device: torch.device, folder: str | os.PathLike | None, plain: Any, model: nn.Module,
                      state_dict: dict | None, checkpoint_files: Sequence[str] | None, load_config: Any, *args,
                      **kwargs) -> tuple:
        """transformers' loading of a model that it has built, without the experts; then these.

        `folder`: of a local checkpoint.
        """
        from .expert_tensors import ExpertTensors, expert_sources
        from .shards import ShardReader

        if holds_experts(model):  # an adapter
            return plain(model, state_dict, checkpoint_files, load_config, *args, **kwargs)
        if state_dict is not None or not checkpoint_files or not checkpoint_files[0].endswith(".safetensors"):
            given = "a state_dict" if state_dict is not None else ", ".join(map(str, checkpoint_files or ["no files"]))
            raise ConfigError("from_pretrained reads experts from safetensors files, and was given "
                              f"{shown(given)}: use transformers' from_pretrained")
        found = self._find_experts(model)
        names = [f"{name}.{stack}" for name, experts in found.items() for stack in Layout.of(experts).names]
        with ShardReader(checkpoint_files, device, folder) as shards:
            read_here, sources = expert_sources(shards.names, names, load_config.weight_mapping or [],
                                                model.base_model_prefix)
            held = {name: _hold(model, name, experts, load_config.dtype, device) for name, experts in found.items()}
            others = {name: shards.lazy(name) for name in shards.names if name not in read_here}
            result = plain(model, others, None, load_config, *args, **kwargs)
            _check_loaded(result[0], load_config, held)
            for name, experts in held.items():
                tensors = ExpertTensors(shards, sources, name, experts, load_config.dtype, self.rounding)
                first, weights = self._read(name, experts, tensors, load_config.dtype, device)
                experts.weights_of = partial(read_before, weights, first)
        return result

    def _find_experts(self, model: nn.Module) -> dict[str, nn.Module]:
        found = {name: module for name, module in model.named_modules() if is_stacked(module)}
        if not found:
            raise ConfigError(f"a {type(model).__name__} has no stacked experts, which this function quantizes: "
                              "use transformers' from_pretrained")
        for name, experts in found.items():
            if experts.num_experts % self.ep_size:
                raise ConfigError(f'"autoep_size" in "expert_parallel" is {self.ep_size}, which does not divide the '
                                  f"{experts.num_experts} experts of {name}")
            for stack in Layout.of(experts).names:
                shape = tuple(getattr(experts, stack).shape)
                if any(size % 32 for size in shape[1:]):
                    raise ConfigError(f"{name}.{stack} has shape {shape}; in MXFP8 and MXFP4, the sizes of an expert "
                                      "are multiples of 32: use transformers' from_pretrained")
        return found

    def _read(self, name: str, experts: HeldExperts, tensors: Any, dtype: torch.dtype,
              device: torch.device) -> tuple[int, FrozenWeights]:
        """The first of this rank's experts of a block, and the weights of all of them.

        `tensors`: the block's ExpertTensors.
        """
        layout, count = experts.layout, experts.num_experts // self.ep_size
        first = self.ep_rank * count
        at = range(first, first + count)
        try:
            _, H, F = layout.split_down(experts.down_proj).shape
            kind = FORMATS[self.section.frozen_experts or ("mxfp4" if tensors.in_mxfp4 else "mxfp8")]
            weights = kind(count, H, F, dtype, device, layout.has_gate)
            for at, stack, read in tensors.weights(range(first, first + count)):
                weights.write("down" if stack == DOWN else "up", slice(at.start - first, at.stop - first), read,
                              self.section.scaling_mode)
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise RuntimeError(f"out of memory at experts {at.start} to {at.stop - 1} of {name}: {error}") from error
        except (TypeError, ValueError) as error:  # which name the tensor
            raise RuntimeError(str(error)) from error
        return first, weights


def _check_loaded(info: Any, load_config: Any, held: dict[str, HeldExperts]) -> None:
    """Raises RuntimeError: tensors do not fit the model, or a bias of the experts is missing.

    transformers names the former in its log alone. The latter would stay uninitialized, since transformers does not
    know HeldExperts. Zeros are no substitute: these experts are frozen, so training cannot make up for them.
    """
    problems = {f"{name}.{one}": "is in no file of the checkpoint, or has another shape there"
                for name, experts in held.items() for one, p in experts.named_parameters() if p.is_meta}
    if not load_config.ignore_mismatched_sizes:
        problems |= {name: f"has shape {tuple(found)}; the model's config asks for {tuple(expected)}"
                     for name, found, expected in info.mismatched_keys}
    problems |= {name: f"cannot be made of the checkpoint's tensors: {str(text).strip().splitlines()[-1]}"
                 for name, text in info.conversion_errors.items()}
    if problems:
        raise RuntimeError("; ".join(f"{name} {problem}" for name, problem in sorted(problems.items())[:10]))


def _needs_quantizer(plain: Any, quantization: dict) -> bool:
    """Whether transformers has to quantize a model before it loads it. Only experts are in MXFP4. Weights in NVFP4 are
    read as if the files had them in high precision."""
    if is_nvfp4(quantization) or quantization.get("quant_method") == "mxfp4":
        return False
    if quantization.get("quant_method") == "modelopt":  # of which transformers would take values without their scales
        raise ConfigError(f"the checkpoint is in ModelOpt's format {shown(quantization.get('quant_algo'))}, and "
                          "from_pretrained reads NVFP4 alone of ModelOpt's: use the model's files in bf16")
    return plain(quantization)


def _hold(model: nn.Module, name: str, experts: nn.Module, dtype: torch.dtype, device: torch.device) -> HeldExperts:
    """Puts HeldExperts in the place of experts that have no memory yet."""
    shapes = tuple(getattr(experts, stack).shape for stack in Layout.of(experts).names)
    held = HeldExperts(experts, shapes, dtype, device)
    model.set_submodule(name, held)
    return held
