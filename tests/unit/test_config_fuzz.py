# SPDX-License-Identifier: Apache-2.0
"""300 DeepSpeed configs with hostile keys and values: each is read as it is written, or refused with the key's name.
`ds_mxfp8_report` reports on all of them."""

import json
import random

import pytest

from ds_mxfp8_moe import ConfigError, report
from ds_mxfp8_moe.config import SECTION, MXFP8MoEConfig, parse, shown

# As JSON text. Python's json writes some of them, and hjson reads all but the deepest.
HOSTILE = ["null", "true", "false", "0", "1", "-1", "2", "2.5", "1e308", "-0.0", "1e999", "NaN", "-Infinity",
           "9" * 400, "9" * 5000, '""', '"auto"', '"\\u0000"', '"\\ud800"', json.dumps("a" * 10000), "[]", "{}",
           "[null]", '[""]', '["("]', '["\\ud800"]', '["a{1,99999999999}"]', '["(?L)a"]',
           json.dumps(["(" * 3000 + ")" * 3000]), "[" * 90 + "]" * 90, "[" * 900 + "]" * 900, '{"every": 0}',
           '{"every": 1, "self": 1}', '{"\\ud800": 1}', '{"every": "auto"}', json.dumps({"every": 10**400})]
VALID = {"enabled": "true", "recipe": '"mxfp8"', "scale_block_size": "128", "transport": '"collective"',
         "include": '[".*moe"]', "metrics": '{"every": 5}', "min_tokens_per_expert": "0", "self_check": "false"}
KEYS = [*MXFP8MoEConfig.model_fields, "self", "strict", "data", "model_config", "", "recipie", "\\ud800", "\\u0000",
        "a" * 5000, "autoep_size", "{}", "%s"]
AROUND = ["optimizer", "expert_parallel", "gradient_accumulation_steps", "wall_clock_breakdown", "zero_optimization",
          "expert_paralel", "fp8_moe", "\\ud800"]
INSIDE = {"optimizer": ["type", "params"], "expert_parallel": ["enabled", "autoep_size", "autoep_sise", "\\ud800"]}


def written(values: dict[str, str]) -> str:
    return "{" + ", ".join(f'"{key}": {value}' for key, value in values.items()) + "}"


def configs(count=300):
    """Keys of a section, and a config with it as JSON text. A third has one hostile key. A third has hostile sections
    beside a valid one."""
    rng = random.Random(61)
    for i in range(count):
        section = {key: VALID[key] for key in rng.sample(list(VALID), rng.randint(0, 4))} if i % 3 else {}
        section |= {rng.choice(KEYS): rng.choice(HOSTILE) for _ in range((1, 0, 2)[i % 3])}
        config = {}
        for key in rng.sample(AROUND, rng.randint(0, 3)):
            inside = INSIDE.get(key)
            config[key] = rng.choice(HOSTILE) if inside is None or rng.random() < 0.3 else written(
                {one: rng.choice([*HOSTILE, '{"torch_adam": true}']) for one in rng.sample(inside, 2)})
        yield list(section), written({**config, SECTION: written(section)})


@pytest.mark.slow
def test_configs_are_read_or_refused_with_the_name_of_the_key(tmp_path, capsys):
    path, statuses, read = tmp_path / "ds_config.json", report.transports(), 0
    for keys, text in configs():
        path.write_text(text)
        try:
            found = parse(path)
        except ConfigError as error:
            names = [path.name, "every", *(shown(json.loads(f'"{key}"'))[1:-3] for key in keys)]
            for line in str(error).splitlines():
                line = line.removeprefix(f'"{SECTION}": ')
                assert len(line.encode()) < 1500 and any(name in line for name in names), (text, line)
        else:
            read += 1
            section = json.loads(text)[SECTION]
            assert found.model_fields_set == set(section)
            assert json.loads(json.dumps(found.model_dump(include=set(section)))) == section
        problem = report.print_section(str(path), None, statuses)
        assert problem is None or problem.encode()
        capsys.readouterr().out.encode()
    assert 60 < read < 200
