# SPDX-License-Identifier: Apache-2.0
"""Every architecture that AutoEP or presets.py knows computes what transformers' own layers do."""

import io
from contextlib import redirect_stdout

import deepspeed
import pytest
import torch
import transformers
from deepspeed.module_inject.auto_ep import AutoEP
from deepspeed.module_inject.auto_ep_presets import registry
from preset_models import ARCHITECTURES, COMMON, NARROW, difference, losses, tiny_model
from rank_pool import RankFailure
from slow import slow_except
from test_engine import converted, enabled
from test_pretrained import held_out_loss, loaded

import ds_mxfp8_moe
from ds_mxfp8_moe import ConfigError
from ds_mxfp8_moe.layers.presets import PRESETS

BF16 = {"enabled": True, "recipe": "bf16"}  # in float32 models, this is float32
# Without clipping: in ZeRO-0 with expert parallelism, DeepSpeed's norm of all gradients is another one.
SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "zero_allow_untested_optimizer": True,
       "gradient_clipping": 0.0}


def model_of(model_type: str, **changes):
    return tiny_model(model_type, torch.float32, **changes)


def train(model_type, section=BF16, stage=1, expert_parallel=None, model_changes=None, **changes):
    changes = {**SGD, "zero_optimization": {"stage": stage}, **changes}
    return losses(model_of(model_type, **(model_changes or {})), section, expert_parallel, steps=3, **changes)


def beside_hugging_face(*args, **kwargs):
    return train(args[0], None, *args[2:], **kwargs)[0], *train(*args, **kwargs)


QUICK = ["afmoe", "glm4_moe", "gpt_oss", "lfm2_moe", "minimax_m3_vl_text", "mixtral", "olmoe", "phimoe", "qwen3_next"]
STAGES = [*((model_type, 1) for model_type in ARCHITECTURES), ("lfm2_moe", 3), ("qwen3_next", 3)]


@pytest.mark.parametrize("model_type, stage", slow_except(
    STAGES, *((model_type, 1) for model_type in QUICK), ("lfm2_moe", 3)))
def test_trains_like_hugging_face(ranks2, model_type, stage):
    results = ranks2.run(beside_hugging_face, model_type, BF16, stage)
    for own, ours, found, of_ours, _ in results:
        assert found == of_ours > 0 and difference(ours, own) < 1e-5
    printed = results[0][-1]
    assert printed.count(f"AutoEP has no preset for {model_type}: took") == (model_type in PRESETS)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [
    {"expert_selection_fn": "sigmoid"}, {"expert_selection_fn": "sigmoid", "norm_topk_prob": False},
    {"norm_topk_prob": False, "num_shared_experts": 0, "shared_expert_combination_strategy": "average"}])
def test_the_routers_of_cohere2_moe(ranks2, changes):
    for own, ours, *counts, _ in ranks2.run(beside_hugging_face, "cohere2_moe", model_changes=changes):
        assert counts == [2, 2] and difference(ours, own) < 1e-5


def averaged():
    with pytest.raises(ConfigError, match='strategy is "average", and AutoEP adds shared experts; expected "sum"'):
        losses(model_of("cohere2_moe", shared_expert_combination_strategy="average"), BF16)


def test_shared_experts_that_are_averaged_are_refused(ranks2):
    ranks2.run(averaged)


def born_partitioned(model_type):
    """A model whose parameters ZeRO-3 has partitioned before AutoEP sees it, as the Trainer loads models."""
    model = model_of(model_type)
    changes = {**SGD, "zero_optimization": {"stage": 3}}
    deepspeed.zero.Init(module=model, config_dict_or_path={**changes, "train_micro_batch_size_per_gpu": 4})
    assert not any(p.numel() for p in model.parameters())
    return train(model_type, None)[0], losses(model, BF16, steps=3, **changes)[0]


@pytest.mark.parametrize("model_type", ["afmoe", "ernie4_5_moe", "gpt_oss", "phimoe"])
def test_models_that_were_partitioned_before(ranks2, model_type):
    for own, ours in ranks2.run(born_partitioned, model_type):
        assert difference(ours, own) < 1e-5


def with_the_auxiliary_loss(model_type, weight):
    """Hugging Face's losses without it and with it, and ours with it."""
    return train(model_type, None)[0], *beside_hugging_face(model_type, model_changes=weight)[:2]


RECORDED = ["flex_olmo", "granitemoe", "jamba", "minimax", "minimax_m2", "olmoe", "phimoe", "qwen3_next"]


@pytest.mark.parametrize("model_type", slow_except(RECORDED, "granitemoe", "olmoe"))
def test_the_auxiliary_loss_sees_the_routers_logits(ranks2, model_type):
    if "router_logits" not in model_of(model_type)._can_record_outputs:
        pytest.skip("this transformers records none for it")  # 5.17, for granitemoe
    weight = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    without, own, ours = ranks2.run(with_the_auxiliary_loss, model_type, weight)[0]
    assert difference(ours, own) < 1e-5
    assert difference(without, own) > 1e-2


def with_other_keys(model_type, several):
    own, *_ = train(model_type, None)
    return [difference(train(model_type, expert_parallel=keys)[0], own) for keys in several]


PHIMOE_AS_MIXTRAL = {"preset_model": "mixtral", "router_pattern": "router"}


@pytest.mark.parametrize("model_type", slow_except(("deepseek_v3", "minimax", "olmoe", "phimoe"), "olmoe", "phimoe"))
def test_keys_that_the_user_wrote_win(ranks2, model_type):
    """One of two keys is wrong. It also shows that the comparison above notices another router."""
    keys = [PHIMOE_AS_MIXTRAL] if model_type == "phimoe" else [{"route_norm": False}, {"route_norm": True}]
    assert max(ranks2.run(with_other_keys, model_type, keys)[0]) > 3e-5


def without_the_flag():
    before = dict(registry.PRESET_MODELS), dict(registry._PRESET_ADAPTERS), AutoEP._replace_moe_layer_without_retarget
    train("olmoe")
    with pytest.raises(ValueError, match="AutoEP detection is ambiguous"):
        train("olmoe", {"enabled": False})
    with pytest.raises(ValueError, match="Unknown preset_model 'nonsense'"):
        train("olmoe", expert_parallel={"preset_model": "nonsense"})
    return before == (registry.PRESET_MODELS, registry._PRESET_ADAPTERS, AutoEP._replace_moe_layer_without_retarget)


def test_without_the_flag_and_after_an_error_deepspeed_is_as_before(ranks2):
    assert ranks2.run(without_the_flag) == [True, True]


def config_of(section):
    return {**SGD, "train_micro_batch_size_per_gpu": 2, "mxfp8_moe": section,
            "expert_parallel": {"enabled": True, "autoep_size": 2}}


@enabled()
def trained_by_others():
    with redirect_stdout(io.StringIO()) as printed:
        engine = deepspeed.initialize(model=model_of("lfm2_moe"), config=config_of(BF16))[0]
    return converted(engine), "AutoEP has no preset for lfm2_moe" in printed.getvalue()


def test_enable_adds_presets_too(ranks2):
    assert ranks2.run(trained_by_others) == [(2, True), (2, False)]


def saved(directory, model_type):
    engine = ds_mxfp8_moe.initialize(model=model_of(model_type), config=config_of(BF16))[0]
    ds_mxfp8_moe.save_pretrained(engine, directory)
    return held_out_loss(engine.module)


@pytest.mark.parametrize("model_type", slow_except(sorted(PRESETS), "afmoe", "ernie4_5_moe", "lfm2_moe", "olmoe"))
def test_transformers_loads_what_save_pretrained_wrote(ranks2, tmp_path, model_type):
    found = ranks2.run(saved, tmp_path, model_type)
    assert found == pytest.approx([held_out_loss(loaded(tmp_path))] * 2, abs=1e-5)


UNSUPPORTED_MODELS = {
    "llama4_text": ("Llama4TextConfig", dict(**{**COMMON, "num_experts_per_tok": 1}, num_local_experts=8, head_dim=16,
                                             intermediate_size_mlp=96, interleave_moe_layer_step=1)),
    "llama": ("LlamaConfig", COMMON),
    "hunyuan_v1_moe": ("HunYuanMoEV1Config", dict(**NARROW, num_experts=8, moe_topk=2, head_dim=16)),
}


def unsupported(model_type, section=BF16):
    name, arguments = UNSUPPORTED_MODELS[model_type]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**arguments))
    return losses(model, section, steps=3, **SGD)


@pytest.mark.parametrize("model_type, told", [
    ("llama4_text", "mxfp8_moe: llama4_text: it multiplies the tokens by the router's scores before the experts; its "
                    "MoE layers stay Hugging Face's own\n"),
    ("llama", "mxfp8_moe: llama: DeepSpeed's AutoEP finds no MoE layers in it; its MoE layers stay Hugging Face's "
              "own. If it has MoE layers, name a preset that resembles them by \"preset_model\""),
])
def test_a_model_without_autoep_layers_is_told_by_its_type(ranks2, model_type, told):
    *_, printed = ranks2.run(unsupported, model_type)[0]
    assert told in printed and "no MoE layers found" not in printed


def test_a_model_that_autoep_refuses_trains_like_hugging_face(ranks2):
    """Its router may choose another number of experts in each layer."""
    both = [ranks2.run(unsupported, "hunyuan_v1_moe", section) for section in (None, BF16)]
    for (own, *_), (ours, found, *_) in zip(*both, strict=True):
        assert found == 2 and difference(ours, own) < 1e-5


def test_noise_that_would_be_left_out_is_an_error(ranks2):
    with pytest.raises(RankFailure, match="ConfigError: phimoe: the model's input_jitter_noise is 0.1"):
        ranks2.run(train, "phimoe", model_changes={"input_jitter_noise": 0.1})


def test_a_router_without_a_place_for_the_balancing_bias_is_an_error(ranks2):
    with pytest.raises(RankFailure, match="ConfigError: phimoe: its router chooses by chance and takes no bias"):
        ranks2.run(train, "phimoe", {**BF16, "load_balance_coeff": 1e-3})
    for losses_, *counts, _ in ranks2.run(train, "lfm2_moe", {**BF16, "load_balance_coeff": 1e-3}):
        assert counts == [2, 2] and losses_[-1] < losses_[0]
