# SPDX-License-Identifier: Apache-2.0
"""Every name of another library that this package reads, calls, overrides or patches although it is not promised.

Names that the library documents need no row: DeepSpeedEngine.save_checkpoint, PeftModel.save_pretrained, Gluon, what
transformers' use_experts_implementation asks of a module.

    missing("metrics")    # None: all names of this feature are there. Else what is not

A release may take a name away or give a function other parameters. Then the package leaves the feature out, and one
start-up line says so. The rest goes on. Without the names of the feature "import", the package cannot be imported, and
the ImportError says so. Names without an underscore that the package imports at its start need no row for that.

A row of NAMES has a feature, a place, and what is used there. The place is a module, or a module and a class. What is
used is one string, with a space after each name:

    name                an attribute
    .name               an attribute that instances get
    name(a, b)          a function with exactly these parameters, since the package overrides it or calls it by place
    name(a, b, ...)     a function that has at least these parameters, in this order
    name#0123abcd       a function or a class whose source has a SHA-256 that begins so, since the package
                        rewrites what it does

The features "recordings" and "nvlink" do not ask here, since they decide by themselves: an exchange that fails is left
out by a check at first use, and an unknown launcher by its release.
"""

import importlib
import importlib.metadata
import importlib.util
import inspect
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from hashlib import sha256
from typing import Any, NamedTuple

from ..ops.log import log_on_rank_0

# The oldest release of each library in which all of its names were seen. Newer ones that were tested: works_with.md.
SINCE = {"deepspeed": "0.19.8", "transformers": "5.17.0", "peft": "0.21.2", "torch": "2.11.0",
         "triton": "3.6.0"}

# What a user loses without a feature.
FEATURES = {
    "import": "ds_mxfp8_moe cannot be imported",
    "classic layers": "classic MoE layers run DeepSpeed's own path",
    "stacked experts": "experts of transformers run DeepSpeed's AutoEP",
    "LoRA on experts": "PEFT's adapters on experts are an error",
    "FP8 experts": "transformers' FP8 experts are not converted",
    "from_pretrained": "models load by transformers alone",
    "own optimizer": "an optimizer of your own needs expert groups, and experts must be trained",
    "batch_gradients": "DeepSpeed handles each parameter's gradient by itself",
    "steps": "errors of exchanges that the host did not wait for come one step late; experts are not balanced, "
             "\"metrics\" has no effect, no line names the first NaN, and only \"keep_quantized_weights\": true keeps "
             "weights",
    "clipping": "in ZeRO-0, gradients are clipped by a norm that takes ranks or experts for the whole model",
    "sparing the host": "the host waits for the device at the end of each micro-batch",
    "keep_quantized_weights": "\"keep_quantized_weights\" has no effect",
    "graph_attention": "attention runs without CUDA graphs",
    "metrics": "\"metrics\" has no effect",
    "saving": "saved models hold one rank's experts: use checkpoints",
    "saving by Trainer and Accelerate": "what they save holds one rank's experts: use ds_mxfp8_moe.save_pretrained",
    "exporting": "ds_mxfp8_moe.export_weights, and save_pretrained with weights=\"fp8\", do not work",
    "loading": "checkpoints load as DeepSpeed loads them",
    "router replay": "routes are neither recorded nor replayed",
    "recordings": "the host launches each kernel from Python, which is slower",
    "nvlink": "tokens travel by NCCL",
}

_ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
_ZERO = "deepspeed.runtime.zero.stage_1_and_2"


class Row(NamedTuple):
    """Names of one place, see above."""

    feature: str
    place: str
    names: str

    def each(self) -> list[str]:
        """The names, one by one, with their parameters."""
        return re.findall(r"\.?\w+(?:\([^)]*\)|#\w+)?", self.names)


NAMES = tuple(Row(*row) for row in (
    ("import", _ENGINE, ".config"),
    ("import", "torch:Tensor", "_make_wrapper_subclass"),
    ("import", "torch._ops:OpOverload", "._schema"),
    ("import", "torch:ops.aten", "_unsafe_view"),
    ("import", "torch.distributed:ProcessGroupGloo._Options", "_timeout"),
    ("import", "torch.distributed:ProcessGroup", "_get_backend"),
    ("import", "torch.distributed.distributed_c10d", "_resolve_process_group"),

    ("classic layers", "deepspeed.moe.layer:MoE", ".deepspeed_moe"),
    ("classic layers", "deepspeed.moe.sharded_moe:MOELayer",
     "forward(self, input, kwargs) .ep_group .ep_size .exp_counts .experts .gate .l_aux .num_local_experts"),
    ("classic layers", "deepspeed.moe.sharded_moe:TopKGate",
     "forward(self, input, used_token, ...) .min_capacity"),
    ("classic layers", "deepspeed.moe.experts:Experts", ".deepspeed_experts"),
    ("classic layers", "torch.nn:Module",
     "._backward_hooks ._backward_pre_hooks ._forward_hooks ._forward_pre_hooks ._modules ._parameters"),
    ("classic layers", "deepspeed.utils.groups", "_get_expert_model_parallel_world_size mpu"),

    ("stacked experts", _ENGINE,
     "_configure_expert_parallel(self, model, ...) get_data_types zero_optimization_stage"),
    ("stacked experts", "deepspeed.module_inject.auto_ep:AutoEP",
     "__init__(self, model, config) ep_parser(self) "
     "replace_moe_layers(self, specs, ep_size, ep_rank, collect_sources, on_moe_layer_replaced)"),
    ("stacked experts", "deepspeed.module_inject.auto_ep_layer:ReplacementSourceMap", ".sources .discarded"),
    ("stacked experts", "deepspeed.checkpoint.autoep_affine",
     "autoep_placement_to_affine_map legacy_uniform_autoep_placement_descriptor"),
    ("stacked experts", "deepspeed.checkpoint.constants",
     "AFFINE_MAP AUTOEP_EXPERT_PLACEMENT AUTOEP_PARAM_EP_RANK AUTOEP_PARAM_LOCAL_EXPERTS AUTOEP_PARAM_LOGICAL_SHAPE "
     "DS_AUTOEP_UC_META"),
    ("stacked experts", "deepspeed.utils.groups", "_get_expert_data_parallel_group"),
    ("stacked experts", "transformers.models.mixtral.modeling_mixtral:MixtralExperts", "_apply_gate"),

    ("LoRA on experts", "peft.tuners.lora.layer:ParamWrapper", ".parameter_name"),
    ("LoRA on experts", "peft.tuners.lora.layer:LoraLayer", ".base_layer .lora_A .lora_B .scaling"),

    ("FP8 experts", "transformers.integrations.finegrained_fp8:FP8Experts",
     ".down_proj_scale_inv .gate_up_proj_scale_inv"),
    ("FP8 experts", "transformers.integrations.mxfp4:Mxfp4GptOssExperts",
     ".down_proj_bias .down_proj_precision_config .gate_up_proj_bias .gate_up_proj_precision_config"),
    ("FP8 experts", "torch.nn:Module", "_apply(self, fn, recurse) ._parameters"),
    ("FP8 experts", _ENGINE, "_cast_module_mixed_precision"),
    ("from_pretrained", "transformers.modeling_utils:PreTrainedModel",
     "_load_pretrained_model(model, state_dict, checkpoint_files, load_config, ...) ._is_hf_initialized"),
    ("from_pretrained", "transformers.modeling_utils:LoadStateDictConfig",
     ".dtype .ignore_mismatched_sizes .weight_mapping"),
    ("from_pretrained", "transformers.modeling_utils:LoadStateDictInfo", ".conversion_errors .mismatched_keys"),
    ("from_pretrained", "transformers.core_model_loading",
     "rename_source_key(source_key, weight_renamings, weight_converters, base_model_prefix, "
     "meta_state_dict, ...)"),
    ("from_pretrained", "transformers.integrations.deepspeed", "_hf_deepspeed_config_weak_ref"),
    ("from_pretrained", "transformers.quantizers.auto:AutoHfQuantizer", "supports_quant_method"),
    ("own optimizer", _ENGINE,
     "_configure_bf16_optimizer(self, optimizer) _configure_optimizer(self, client_optimizer, model_parameters) "
     "zero_optimization_stage .has_moe_layers"),
    ("own optimizer", "torch.optim.lr_scheduler:LRScheduler", "._opt_called"),

    # zero.py rewrites about a third of this class, for which it has to know the rest.
    ("batch_gradients", _ZERO, "DeepSpeedZeroOptimizer#97bb3f8b"),
    ("batch_gradients", f"{_ZERO}:DeepSpeedZeroOptimizer",
     "_get_compact_grad_partition_buffer _link_all_hp_params _model_parallel_all_reduce ._backward_active_depth "
     "._coalesce_grad_reduction"),
    ("batch_gradients", "torch", "_foreach_add_ _foreach_copy_ _foreach_div_ _foreach_norm"),
    ("batch_gradients", f"{_ZERO}:GradPartitionBufferGroup", "._view_specs"),
    ("batch_gradients", "torch._C", "_current_graph_task_id _will_engine_execute_node"),
    ("batch_gradients", "torch:Tensor", "_backward_hooks _post_accumulate_grad_hooks"),

    ("steps", "torch._C", "_current_autograd_node"),
    ("steps", _ENGINE, "_take_model_step"),
    ("clipping", _ENGINE, "clip_fp32_gradients(self) gradient_clipping zero_optimization_stage .has_moe_layers .mpu"),
    ("clipping", "deepspeed.runtime.fp16.unfused_optimizer:FP16_UnfusedOptimizer",
     "unscale_and_clip_grads(self, total_norm, ...) ._global_grad_norm"),
    ("sparing the host", _ENGINE, "._config"),
    ("sparing the host", "deepspeed.runtime.config:DeepSpeedConfig", ".timers_config"),
    ("keep_quantized_weights", _ENGINE, "_take_model_step zero_optimization_stage"),
    ("graph_attention", _ENGINE, "zero_optimization_stage .sequence_parallel_size"),
    ("graph_attention", "torch._C", "_current_autograd_node"),
    ("graph_attention", "torch._C:_autograd", "_top_saved_tensors_default_hooks"),
    ("graph_attention", "torch.utils._python_dispatch", "is_in_torch_dispatch_mode"),
    ("graph_attention", "torch:Tensor", "_backward_hooks _version"),
    ("graph_attention", "torch.nn:Module",
     "._backward_hooks ._backward_pre_hooks ._forward_hooks ._forward_pre_hooks ._parameters"),
    ("metrics", _ENGINE, ".global_samples"),

    ("saving", _ENGINE, "_zero3_consolidated_16bit_state_dict"),
    ("saving", "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3", "checkpoint_event_epilogue(self)"),
    ("saving", "transformers.core_model_loading", "._weight_conversions"),
    ("saving by Trainer and Accelerate", "transformers.core_model_loading", "revert_weight_conversion"),

    ("exporting", "transformers.core_model_loading", "revert_weight_conversion(model, state_dict)"),
    ("exporting", "peft.tuners.lora.layer:LoraLayer", ".lora_variant .scaling"),
    ("exporting", "peft.tuners.lora.layer:Linear", "get_delta_weight(self, adapter)"),

    ("loading", _ENGINE,
     "load_module_state_dict(self, checkpoint, ...) _copy_recovery_script(self, save_path) zero_optimization_stage "
     ".checkpoint_engine .has_moe_layers .param_names"),
    ("loading", "deepspeed.runtime.checkpoint_engine:TorchCheckpointEngine",
     "load(self, path, ...) makedirs(self, path, exist_ok) "
     "save(self, state_dict, path)"),

    ("router replay", "torch._C", "_current_autograd_node"),
    ("router replay", "torch.autograd.graph:Node", "_sequence_nr"),

    ("recordings", "torch._ops:OpOverload", "._schema"),
    ("recordings", "torch:UntypedStorage", "_cdata"),
    ("recordings", "torch.utils._python_dispatch", "TorchDispatchMode"),
    ("recordings", "triton", "JITFunction knobs"),
    ("recordings", "triton.runtime", "driver"),
    ("recordings", "triton.runtime.jit:JITFunction", ".params"),
    ("recordings", "triton.runtime.jit:KernelParam", "is_constexpr name"),
    ("recordings", "triton.compiler.compiler:CompiledKernel", "run .function .metadata .packed_metadata .src"),
    ("recordings", "triton.compiler.compiler:ASTSource", ".signature"),
    ("recordings", "triton.backends.nvidia.driver", "TMA_DTYPE_DEVICE_TO_HOST"),
    ("recordings", "triton.backends.nvidia.driver:CudaLauncher",
     ".global_scratch_size .launch .launch_cooperative_grid .launch_pdl .profile_scratch_size"),
    ("recordings", "triton.knobs:runtime", "launch_enter_hook launch_exit_hook"),
    ("nvlink", "torch._C", "_cuda_getCurrentRawStream"),
    ("nvlink", "torch.distributed._symmetric_memory", "_SymmetricMemory rendezvous(tensor, group)"),
    ("nvlink", "torch.distributed.distributed_c10d", "_register_process_group"),
))


def missing(feature: str) -> str | None:
    """What another library lacks of a feature's names, with its release. None: all of them are there.

    Names in modules that nobody has imported yet are taken to be there, and looked at once somebody has. Only modules
    of DeepSpeed are imported here.
    """
    for row in NAMES:
        if row.feature == feature:
            imported = row.place.partition(":")[0] in sys.modules
            if gone := _absent(row) if imported else absent(row):
                return _with_releases(re.match(r"\w+", row.place)[0], gone)
    return None


def _with_releases(library: str, gone: str) -> str:
    return (f"{library} {importlib.metadata.version(library)} {gone} (the package was made for {library} "
            f"{SINCE[library]})")


@contextmanager
def importing() -> Iterator[None]:
    """Goes around the package's imports. If another library lacks what they need, the error names its release."""
    try:
        yield
    except ImportError as error:
        library = (error.name or "").partition(".")[0]
        if library not in SINCE or importlib.util.find_spec(library) is None:
            raise
        raise ImportError(f"{FEATURES['import']}: {_with_releases(library, f'does not fit: {error}')}") from error
    if gone := missing("import"):
        raise ImportError(f"{FEATURES['import']}: {gone}")


def line_about(feature: str) -> str:
    """The start-up line about a feature of which `missing` found something."""
    return f"mxfp8_moe: WARNING: {FEATURES[feature]}: {missing(feature)}"


def say_if_missing(feature: str) -> bool:
    """Whether another library lacks a name that a feature needs. Rank 0 says so."""
    if missing(feature) is None:
        return False
    log_on_rank_0(line_about(feature))
    return True


def absent(row: Row) -> str | None:
    """What of a row is not there, or has other parameters. None: all is there, or nobody has imported the module."""
    module_name, _, class_name = row.place.partition(":")
    try:
        if module_name.startswith("deepspeed"):
            importlib.import_module(module_name)
        elif module_name not in sys.modules:
            package = module_name.rpartition(".")[0]
            gone = package in sys.modules and importlib.util.find_spec(module_name) is None
            return f"has no {module_name}" if gone else None
    except ModuleNotFoundError:
        return f"has no {module_name}"
    place: Any = sys.modules[module_name]
    for part in filter(None, class_name.split(".")):
        place = getattr(place, part, None)
        if place is None:
            return f"has no {class_name} in {module_name}"
    where = class_name or module_name
    for name in row.each():
        if name.startswith("."):
            if not _instances_have(place, name[1:]):
                return f"gives instances of {class_name} no {name[1:]}"
            continue
        name, _, parameters = name.partition("(")
        name, _, digest = name.partition("#")
        if not hasattr(place, name):
            return f"has no {where}.{name}"
        if digest and not _source_digest(getattr(place, name)).startswith(digest):
            return f"has another {where}.{name}"
        if parameters and not _takes(getattr(place, name), parameters.rstrip(")").split(", ")):
            return f"has another signature of {where}.{name}: {inspect.signature(getattr(place, name))}"
    return None


_absent = cache(absent)


def _instances_have(kind: type, name: str) -> bool:
    """Whether a method of a class, or of one that it inherits from, sets the attribute. Fields count, of dataclasses
    and of pydantic models. Private names also count where a method, or a function of a module, uses them on others.
    """
    if hasattr(kind, name) or any(name in getattr(kind, fields, ())
                                  for fields in ("__dataclass_fields__", "model_fields")):
        return True
    owner = r"\w+" if name.startswith("_") else r"\bself"
    pattern = re.compile(rf"{owner}\.{name}\b|register_(?:buffer|parameter)\(\s*[\"']{name}[\"']")
    return any(pattern.search(_source(base)) for base in getattr(kind, "__mro__", (kind, object))[:-1])


@cache  # reading the source of a class takes a second in a large file
def _source(of: Any) -> str:
    try:
        return inspect.getsource(of)
    except (OSError, TypeError):
        return ""  # compiled, or made while the program runs


def _source_digest(function: Any) -> str:
    return sha256(_source(function).encode()).hexdigest()


def _takes(function: Any, names: list[str]) -> bool:
    found = [name for name in inspect.signature(function).parameters]
    if names[-1] != "...":
        return found == names
    rest = iter(found)
    return all(name in rest for name in names[:-1])
