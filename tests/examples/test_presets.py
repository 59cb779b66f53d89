# SPDX-License-Identifier: Apache-2.0
"""examples/gpt_moe/presets.py and train.py's --freeze: every family of AutoEP, finetuned by train.py on two ranks.

That a checkpoint written by either path goes on in the other, bit for bit and in every ZeRO stage, is in
test_autoep_checkpoints.py; that transformers finds the same loss in float32, to 1e-5, in test_pretrained.py.
"""

import json
import math
import re
import sys
from pathlib import Path

import pytest
import torch
from deepspeed.module_inject.auto_ep import AutoEP
from deepspeed.module_inject.auto_ep_config import PRESET_MODELS, AutoEPConfig
from rank_pool import RankFailure
from slow import slow_except
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples/gpt_moe"))

import presets  # noqa: E402
import train  # noqa: E402

STEPS = 4
GOOD = {"layers": 2, "converted": 2, "before": 6.0, "bf16": 5.0, "mxfp8": 5.01, "resumed": 5.008,
        "transformers": 5.007, "bf16_tokens_per_s": 10.0, "mxfp8_tokens_per_s": 10.0}


class NoBar:
    """A progress bar that shows nothing."""

    n = 0


def options(folder: Path, *arguments: str):
    return presets.parse_args(["--out", str(folder / "out"), "--data", str(folder / "text"), "--steps", str(STEPS),
                               "--hidden_size", "64", "--seq_len", "32", "--deepspeed_config", str(folder / "ds.json"),
                               *arguments])


def run_training(arguments: list[str]) -> dict:
    return train.run(train.parse_args(arguments))


def launcher(pool):
    """presets.launch without processes of its own."""

    def launch(config, save_dir, bar, *arguments):
        summary, _ = pool.run(run_training, ["--deepspeed_config", str(config), "--save_dir", str(save_dir),
                                             *arguments])
        return summary | {"tokens_per_s": 1.0}

    return launch


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("presets")
    (folder / "text").write_text("".join(f"{i} green bottles hanging on the wall\n" for i in range(800)))
    config = json.loads((ROOT / "configs/ds/autoep_zero2.json").read_text())
    del config["train_micro_batch_size_per_gpu"]  # DeepSpeed works it out: 2
    (folder / "ds.json").write_text(json.dumps(config | {"train_batch_size": 4}))
    return folder


def test_the_families_are_those_of_the_installed_autoep():
    assert set(presets.families().values()) == set(PRESET_MODELS)
    usable = {kind for kind in presets.families() if not presets.why_not(kind)}
    assert usable >= {"mixtral", "qwen2_moe", "qwen3_moe", "qwen3_5_moe_text", "deepseek_v2", "deepseek_v3"}
    assert presets.why_not("qwen9_moe") == "the installed transformers has no language model of this type"


@pytest.mark.parametrize("kind", presets.families())
def test_autoep_finds_its_layers_in_a_small_model_of_every_family(kind):
    if reason := presets.why_not(kind):
        pytest.skip(reason)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(presets.small_config(kind, hidden_size=64, layers=3, experts=8))
    assert sum(p.numel() for p in model.parameters()) < 2e6
    specs = AutoEP(model, AutoEPConfig(enabled=True, autoep_size=2)).ep_parser()
    assert len(specs) == (2 if kind.startswith("deepseek") else 3)
    assert {(s.model_family, s.num_experts, s.top_k, s.hidden_size, s.ffn_hidden_size) for s in specs} == {
        (presets.families()[kind], 8, 2, 64, 64)}


# An auxiliary loss and plain softmax routing; sigmoid scores, a correction bias, shared experts, a dense layer, and no
# auxiliary loss; linear attention beside full; the formula swiglu_oai.
@pytest.mark.slow
@pytest.mark.parametrize("kind", slow_except(["mixtral", "deepseek_v3", "minimax_m3_vl_text"], "deepseek_v3"))
def test_finetuned_in_bf16_and_mxfp8_and_read_back(folder, ranks2, kind):
    if kind not in presets.families() or presets.why_not(kind):
        pytest.skip("unknown to the installed versions")
    args = options(folder)
    configs = presets.ds_configs(args)
    row = presets.finetune(kind, configs, NoBar(), args, launch=launcher(ranks2))
    assert row["converted"] == {"mixtral": 2, "deepseek_v3": 1, "minimax_m3_vl_text": 2}[kind]
    assert presets.verdict(row).startswith("ok"), row
    assert row["mxfp8"] != row["bf16"]


# The experts of one layer; all that is no expert; all but the head, so that no layer has a backward.
# Without a trained expert, DeepSpeed refuses to train in ZeRO-1 and 2, and to write checkpoints in ZeRO-3.
@pytest.mark.slow
@pytest.mark.parametrize("stage, pattern, frozen", slow_except(
    [(1, r".*layers\.0\..*experts.*", 2), (2, r"(?!.*experts).*", 21), (0, r"(?!lm_head).*", 24)],
    (1, r".*layers\.0\..*experts.*", 2)))
def test_training_goes_around_what_is_frozen(folder, ranks2, stage, pattern, frozen):
    args = options(folder, "--zero_stage", str(stage), "--freeze", pattern, "--out", str(folder / "frozen"))
    row = presets.finetune("qwen3_moe", presets.ds_configs(args), NoBar(), args, launch=launcher(ranks2))
    assert row["converted"] == 2 and presets.verdict(row) == "ok", row
    before, after = (dict(AutoModelForCausalLM.from_pretrained(args.out / "qwen3_moe" / name).named_parameters())
                     for name in ("base", "finetuned"))
    still = {key for key in before if torch.equal(before[key], after[key])}
    assert still == {key for key in before if re.fullmatch(pattern, key)} and len(still) == frozen


def test_frozen_experts_are_refused_where_deepspeed_would_save_them_wrong(folder, ranks2):
    args = options(folder, "--freeze", r".*layers\.0\..*experts.*", "--out", str(folder / "refused"))
    with pytest.raises(RankFailure, match=r"--freeze takes model\.layers\.0\.mlp\.experts\.w1, of which each"):
        presets.finetune("qwen3_moe", presets.ds_configs(args), NoBar(), args, launch=launcher(ranks2))


@pytest.mark.parametrize("changes, said", [
    ({}, "ok"), ({"converted": 0, "mxfp8": 5.0, "resumed": 5.0, "transformers": 5.0}, "ok, on DeepSpeed's own path"),
    ({"converted": 0}, "learns otherwise than bf16"), ({"mxfp8": 5.1}, "learns otherwise than bf16"),
    ({"mxfp8": math.nan}, "does not learn"), ({"bf16": 6.1}, "does not learn"),
    ({"resumed": 5.1}, "plain DeepSpeed resumes elsewhere"),
    ({"transformers": math.nan}, "another model in transformers"),
    ({"transformers": 5.02}, "another model in transformers")])
def test_verdicts(changes, said):
    row = GOOD | changes
    assert presets.verdict(row) == said
    line = presets.table({"mixtral": row, "qwen2_moe": "left out: why"}).splitlines()
    assert line[-2].endswith(said) and line[-1].startswith("qwen3_moe  qwen2_moe") and line[-1].endswith("why")


def test_unknown_presets_are_named(capsys):
    with pytest.raises(SystemExit):
        presets.parse_args(["--presets", "mixtral", "gpt9"])
    assert "--presets gpt9: this DeepSpeed has mixtral, qwen3_moe" in capsys.readouterr().err
