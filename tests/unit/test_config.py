# SPDX-License-Identifier: Apache-2.0
"""The section "mxfp8_moe": defaults, one clear error for each kind of mistake, and what each device makes of it."""

import base64
import copy
import importlib
import json
import pickle
import pkgutil
import traceback
import warnings

import deepspeed.runtime
import pytest
import torch

from ds_mxfp8_moe.config import DEBUG_KEYS, ConfigError, MXFP8MoEConfig, Recipe, parse, resolve
from tests.support.config_cases import ALL_KEYS, OF_TWO_HOPS

HOPPER, BLACKWELL, CPU = ("cuda", (9, 0)), ("cuda", (10, 0)), ("cpu", None)


def problems(**section):
    """The error's lines for a section, each without its prefix."""
    with pytest.raises(ConfigError) as caught:
        parse({"mxfp8_moe": section})
    assert caught.value.__cause__ is None and "pydantic" not in str(caught.value)
    lines = str(caught.value).splitlines()
    assert all(line.startswith('"mxfp8_moe": ') for line in lines)
    return [line.removeprefix('"mxfp8_moe": ') for line in lines]


def test_every_key_is_read():
    config = parse({"train_batch_size": 8, "mxfp8_moe": ALL_KEYS})
    assert set(type(config).model_fields) == {*ALL_KEYS, *OF_TWO_HOPS}
    for key, value in ALL_KEYS.items():
        assert config.model_dump()[key] == (tuple(value) if isinstance(value, list) else value)
    config = parse({"mxfp8_moe": OF_TWO_HOPS})
    assert {key: getattr(config, key) for key in OF_TWO_HOPS} == OF_TWO_HOPS


def test_debug_keys_stand_in_an_object_and_are_deprecated_beside_it():
    with warnings.catch_warnings(action="error"):
        nested = parse({"mxfp8_moe": {"enabled": True, "debug": {"scaling_mode": "floor", "self_check": False}}})
    with pytest.warns(FutureWarning, match='"scaling_mode" in the section itself is deprecated: write "debug": '
                                           '{"scaling_mode": "floor"}'):
        assert nested == parse({"mxfp8_moe": {"enabled": True, "scaling_mode": "floor"}}).model_copy(
            update={"self_check": False})


@pytest.mark.parametrize("debug, said", [
    (3, '"debug" is 3, expected an object with some of "scaling_mode",'),
    ({"recipe": "bf16"}, '"debug" is {"recipe": "bf16"}, expected an object'),
    ({"self_check": "no"}, '"self_check" is "no". Input should be a valid boolean'),
    ({"nvlink_sms": 8}, '"nvlink_sms" stands both in "debug" and beside it')])
def test_wrong_debug_keys(debug, said):
    assert problems(debug=debug, nvlink_sms=24)[0].startswith(said)


def test_no_section_or_no_enabled_is_off():
    for config in (None, {"train_batch_size": 8}, {"mxfp8_moe": {}}, {"mxfp8_moe": {"recipe": "mxfp8"}}):
        assert not parse(config).enabled


def test_reads_what_deepspeed_initialize_reads(tmp_path):
    expected = MXFP8MoEConfig(enabled=True, scale_block_size=32)
    text = '{"train_batch_size": 8, "mxfp8_moe": {"enabled": true, "scale_block_size": 32}}'
    path = tmp_path / "ds_config.json"
    path.write_text(text)
    assert parse(path) == parse(str(path)) == parse(json.loads(text)) == expected
    path.write_text("{# hjson, with a comment\n mxfp8_moe: {enabled: true, scale_block_size: 32}\n}")
    assert parse(path) == expected
    assert parse(base64.urlsafe_b64encode(text.encode()).decode()) == expected
    assert parse(expected) is expected


def test_unreadable_configs(tmp_path):
    path = tmp_path / "ds_config.json"
    with pytest.raises(ConfigError, match="cannot be read.*existing"):
        parse(path)
    for text in ('{"mxfp8_moe": {"enabled": true}', '{"mxfp8_moe": {}, "mxfp8_moe": {}}'):
        path.write_text(text)
        with pytest.raises(ConfigError, match="ds_config.json.*cannot be read"):
            parse(path)
    for config in (tmp_path, 5, b"{}"):
        with pytest.raises(ConfigError, match="cannot be read"):
            parse(config)
    path.write_text("[1]")
    with pytest.raises(ConfigError, match='ds_config.json" holds a list, expected an object'):
        parse(path)


def test_what_a_config_in_base64_holds_is_not_printed():
    text = '{"train_batch_size": 8, "wandb": {"api_key": "0123456789"}, "mxfp8_moe": {"enabled": true}}'
    encoded = base64.urlsafe_b64encode(text.encode()).decode()
    for damaged in (encoded[:-7], encoded[:50] + "$" + encoded[51:], base64.urlsafe_b64encode(b"0123456789").decode()):
        with pytest.raises(ConfigError) as caught:
            parse(damaged)
        told = "".join(traceback.format_exception(caught.value))
        assert encoded[21:40] not in told and "0123456789" not in told


@pytest.mark.parametrize("section, key", [
    ('{"enabled": true, "strict": true}', "strict"), ('{"self": 1}', "self"), ('{"\\ud800": 1}', "ud800"),
    ('{"metrics": {"every": 1, "self": 1}}', "self"), ('{"metrics": {"every": "auto"}}', '"every" is "auto"'),
    ('{"metrics": {"every": 1, "\\ud800": 1}}', "metrics"), ('{"include": "\\ud800"}', "include"),
    ('{"include": ["\\ud800"]}', "include"), ('{"include": ["(?L)a"]}', "include"),
    ('{"capacity_factor": 1e999}', "ds_config.json"), ('{"include": ["a{1,99999999999}"]}', "include"),
    (json.dumps({"exclude": ["(" * 3000 + ")" * 3000]}), "exclude"),
    ('{"recipe": ' + "[" * 90 + "]" * 90 + "}", "recipe"),
    ('{"recipe": ' + "[" * 900 + "]" * 900 + "}", "ds_config.json"),
    (json.dumps({"transport": "a" * 10000}), "transport"),
    *((json.dumps({key: 10**400}), key) for key in ("node_size", "nvlink_sms", "capacity_factor",
                                                    "min_tokens_per_expert", "load_balance_coeff"))])
def test_hostile_sections_are_config_errors_that_name_the_key(tmp_path, section, key):
    path = tmp_path / "ds_config.json"
    path.write_text(f'{{"mxfp8_moe": {section}}}')
    with pytest.raises(ConfigError, match=key) as caught:
        parse(path)
    assert len(str(caught.value).encode()) < 1200


def test_objects_that_are_no_json_are_shown_by_their_type():
    endless: list = []
    endless.append(endless)
    for value in (endless, {(1, 2): 3}, 10**5000):
        (line,) = problems(recipe=value)
        assert line.startswith(f'"recipe" is a {type(value).__name__} that is no JSON')
    assert problems(min_tokens_per_expert=torch.ones(2))[0].startswith('"min_tokens_per_expert" is ')


def test_unknown_key_names_the_nearest_and_all_valid_ones():
    (line,) = problems(enabled=True, recipie="mxfp8")
    with pytest.raises(ConfigError, match='unknown key "recipie".*did you mean "recipe"'):
        MXFP8MoEConfig(recipie="mxfp8")
    assert line.startswith('unknown key "recipie" (given "mxfp8"); did you mean "recipe"? Valid: "enabled", "recipe",')
    assert all(f'"{key}"' in line for key in {*ALL_KEYS, "debug"} - {*DEBUG_KEYS})
    for key, nearest in (("Enabled", "enabled"), ("block_size", "scale_block_size"), ("excludes", "exclude")):
        assert f'did you mean "{nearest}"?' in problems(**{key: 1})[0]


@pytest.mark.parametrize("key", ["expert_parallel", "autoep_size", "ep_size"])
def test_keys_of_deepspeeds_own_section_are_sent_there(key):
    (line,) = problems(enabled=True, **{key: 2})
    assert line.startswith(f'"{key}" (given 2) is no key of this section: ')
    assert 'AutoEP\'s stand in "expert_parallel" at the top level' in line


@pytest.mark.parametrize(
    "key, value, expected",
    [
        ("recipe", "mxfp8_rceil_wgrad_with_hp", 'is "mxfp8_rceil_wgrad_with_hp". Input should be '
         "'mxfp8_wgrad_with_hp', 'mxfp8' or 'bf16'"),
        ("recipe", None, "is null. Input should be 'mxfp8_wgrad_with_hp', 'mxfp8' or 'bf16'"),
        ("scaling_mode", "ceil", "Input should be 'rceil' or 'floor'"),
        ("combine_bwd_dtype", torch.bfloat16, 'is "torch.bfloat16". Input should be \'mxfp8\' or \'bf16\''),
        ("scale_block_size", "128", 'is "128". Input should be 32 or 128'),
        ("transport", "nccl", "Input should be 'collective', 'nvlink' or 'hierarchical'"),
        ("node_size", 0, "is 0. Input should be greater than or equal to 1"),
        ("wire", "ibgda", "is \"ibgda\". Input should be 'host', 'nvshmem' or 'peer_memory'"),
        ("enabled", "true", 'is "true". Input should be a valid boolean'),
        ("overlap", True, "is no key any more"),
        ("self_check", 1, "is 1. Input should be a valid boolean"),
        ("min_tokens_per_expert", -1, "is -1. Input should be greater than or equal to 0"),
        ("min_tokens_per_expert", True, "is true. Input should be a valid integer"),
        ("nvlink_sms", 0, "is 0. Input should be greater than or equal to 1"),
        ("metrics", 2, 'is 2, expected {"every": N}'),
        ("metrics", {}, 'is {}, expected {"every": N}'),
        ("capacity_factor", 0.5, "is 0.5. Input should be greater than or equal to 1"),
        ("capacity_factor", float("inf"), "is Infinity. Input should be a finite number"),
        ("on_overflow", "wait", "is \"wait\". Input should be 'error' or 'drop'"),
        ("include", ".*moe", 'is ".*moe", expected a list of regular expressions'),
        ("include", [1], "is [1], expected a list of regular expressions"),
        ("exclude", ["h.0", "h[0"], 'has "h[0", which is no valid regular expression'),
    ],
)  # fmt: skip
def test_bad_values(key, value, expected):
    (line,) = problems(**{key: value})
    assert line.startswith(f'"{key}" ') and expected in line


def test_bad_metrics():
    assert problems(metrics={"every": 0}) == ['"every" is 0. Input should be greater than or equal to 1']
    (line,) = problems(metrics={"every": 5, "evry": 5})
    assert line == 'unknown key "evry" (given 5); did you mean "every"? Valid: "every"'


def test_auto_is_no_value_and_every_problem_gets_its_line():
    keys = {*ALL_KEYS, *OF_TWO_HOPS}
    assert set(problems(**dict.fromkeys(keys, "auto"))) == {
        f'"{key}" is "auto", which is no value here: leave the key out to have it chosen' for key in keys}


@pytest.mark.parametrize("key, value, allowed", [
    *((key, "mxfp8", "bf16") for key in ("dispatch_fwd_dtype", "combine_bwd_dtype", "preactivation_dtype")),
    ("frozen_experts", "mxfp8", "keep"), ("frozen_experts", "mxfp4", "keep")])
def test_recipe_bf16_refuses_a_written_quantization(key, value, allowed):
    (line,) = problems(recipe="bf16", **{key: value})
    assert '"recipe" is "bf16"' in line and f'"{key}" is "{value}"' in line
    parse({"mxfp8_moe": {"recipe": "bf16", key: allowed}})


@pytest.mark.parametrize("key, value", [("recipe", "bf16"), ("frozen_experts", "keep")])
def test_merges_need_experts_that_are_held_quantized(key, value):
    (line,) = problems(merge_aware=True, **{key: value})
    assert line == (f'"merge_aware" needs frozen experts in MXFP8 or MXFP4, but "{key}" is "{value}": leave one of '
                    "the two out")


@pytest.mark.parametrize("key, value, needed, transport", [
    ("capacity_factor", 1.5, "nvlink", "collective"), ("nvlink_sms", 8, "nvlink", "hierarchical"),
    ("node_size", 2, "hierarchical", "nvlink"), ("wire", "host", "hierarchical", "collective")])
def test_transports_refuse_the_keys_of_others(key, value, needed, transport):
    (line,) = problems(transport=transport, **{key: value})
    assert f'"{key}" needs the transport {needed}, but "transport" is "{transport}": leave one of the two out' in line
    parse({"mxfp8_moe": {key: value}})


def test_nothing_is_dropped_without_a_capacity():
    (line,) = problems(on_overflow="drop")
    assert line.startswith('"on_overflow" is "drop", but without "capacity_factor" buffers fit the routing')
    assert parse({"mxfp8_moe": {"capacity_factor": 1.5, "on_overflow": "drop"}}).on_overflow == "drop"


@pytest.mark.parametrize("name", ["mxfp8-moe", "mxfp8_MoE", "mxfp8moe", "mxpf8_moe", "moe_mxfp8"])
def test_misspelt_section(name):
    with pytest.raises(ConfigError, match=f'section "{name}": did you mean "mxfp8_moe"'):
        parse({"train_batch_size": 8, name: {"enabled": True}})


def test_section_in_the_wrong_place_or_of_the_wrong_kind():
    with pytest.raises(ConfigError, match='"mxfp8_moe" inside "expert_parallel".*top level'):
        parse({"expert_parallel": {"mxfp8_moe": {"enabled": True}}})
    for value in (True, None, "mxfp8"):
        with pytest.raises(ConfigError, match="expected an object"):
            parse({"mxfp8_moe": value})


def test_no_key_of_deepspeeds_own_or_of_another_format_is_taken_for_a_misspelling():
    """Every string constant of deepspeed.runtime that could be a key, as top-level key and one level down."""
    keys = {"fp8", "moe", "mxfp4", "expert_parallel", "autoep", "custom_section", "fp8_moe", "mxfp4_moe", "nvfp4_moe"}
    for info in pkgutil.walk_packages(deepspeed.runtime.__path__, "deepspeed.runtime."):
        if info.name.endswith(("constants", "runtime.config")):
            keys |= {value for value in vars(importlib.import_module(info.name)).values() if isinstance(value, str)}
    assert len(keys) > 100
    assert parse({key: {key: 1} for key in keys}) == MXFP8MoEConfig()


def test_selects_matches_whole_names_and_exclude_wins():
    config = MXFP8MoEConfig(include=[r"h\.\d+\.moe", "head"], exclude=[r"h\.3\..*"])
    assert config.selects("h.0.moe") and config.selects("head")
    assert not config.selects("h.3.moe") and not config.selects("h.0.moe.gate") and not config.selects("x.h.0.moe")
    assert MXFP8MoEConfig().selects("") and not MXFP8MoEConfig(include=[]).selects("h.0.moe")


def test_config_is_immutable_hashable_and_copyable():
    config = parse({"mxfp8_moe": ALL_KEYS})
    with pytest.raises(ValueError, match="frozen"):
        config.recipe = "bf16"
    for twin in (copy.deepcopy(config), pickle.loads(pickle.dumps(config)), MXFP8MoEConfig(**config.model_dump())):
        assert twin == config and hash(twin) == hash(config)


def test_defaults_resolve_to_the_documented_recipe():
    assert resolve(MXFP8MoEConfig(), *CPU) == Recipe(
        quantize_gemm=True,
        wgrad="hp",
        block_size=32,
        scaling_mode="rceil",
        dispatch_fwd="mxfp8",
        combine_fwd="bf16",
        dispatch_bwd="bf16",
        combine_bwd="mxfp8",
        preactivation="mxfp8",
    )


@pytest.mark.parametrize(
    "device, block_size",
    [(HOPPER, 128), (BLACKWELL, 32), (("cuda", (8, 0)), 32), (("cuda", (9, 4)), 32), (CPU, 32), (("xpu", None), 32)],
)
def test_block_size_is_chosen_for_the_device_unless_written(device, block_size):
    assert resolve(MXFP8MoEConfig(), *device).block_size == block_size
    for written in (32, 128):
        assert resolve(MXFP8MoEConfig(scale_block_size=written), *device).block_size == written


def test_recipes():
    mxfp8 = resolve(parse({"mxfp8_moe": ALL_KEYS}), *HOPPER)
    assert mxfp8 == Recipe(True, "mxfp8", 128, "floor", "bf16", "mxfp8", "mxfp8", "bf16", "bf16")
    bf16 = resolve(MXFP8MoEConfig(recipe="bf16"), *HOPPER)
    assert not bf16.quantize_gemm and bf16.wgrad == "hp"
    assert {bf16.dispatch_fwd, bf16.combine_fwd, bf16.dispatch_bwd, bf16.combine_bwd, bf16.preactivation} == {"bf16"}
