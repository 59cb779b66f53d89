# SPDX-License-Identifier: Apache-2.0
"""examples/gpt_moe: its data order, its checkpoints, and its options, trained for a few steps on two ranks."""

import json
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from tests.support.rank_pool import RankFailure
from tests.support.slow import WIDE, slow_except

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples/gpt_moe"))

import data  # noqa: E402
import finetune  # noqa: E402
import plot  # noqa: E402
import train  # noqa: E402

MODEL = "{hidden_size: 32, ffn_size: 64, num_layers: 2, num_heads: 2, seq_len: 32, moe: {num_experts: 4, k: 2}}"
# Embedding and head, norms, attention and router, and four experts, wherever they are.
GPT_PARAMETERS = 2 * 288 * 32 + 32 + 2 * (2 * 32 + 4 * 32 * 32 + 4 * 32 + 4 * 3 * 32 * 64)
QWEN = """{model_type: qwen3_moe, vocab_size: 288, hidden_size: 32, intermediate_size: 64, moe_intermediate_size: 64,
num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 2, head_dim: 16, num_experts: 4,
num_experts_per_tok: 2}"""


def windows(seq_len=16, pieces=40):
    return data.Windows([bytes([i]) * 100 for i in range(pieces)], seq_len)


def test_split_is_fixed_and_complete():
    texts = [bytes([i % 251]) * 10_000 for i in range(30)]
    train_pieces, heldout = data.split(iter(texts))
    assert (train_pieces, heldout) == data.split(iter(texts))
    assert sum(map(len, train_pieces + heldout)) == 300_000
    assert len(heldout) == round(data.HELDOUT_FRACTION * 60)


def test_ranks_share_out_every_window_once_an_epoch():
    w = windows()
    batches = w.count // 8
    seen = np.concatenate([w.training_batch(1, i, 4, rank, 2)[:, :16].numpy()
                           for i in range(batches) for rank in range(2)])
    everything = [w.window(i)[:16].tobytes() for i in range(w.count)]
    drawn = [row.astype(np.int16).tobytes() for row in seen]
    assert len(drawn) == batches * 8
    assert all(drawn.count(row) <= everything.count(row) for row in drawn)


def test_heldout_batches_are_equal_on_all_ranks():
    w = windows(pieces=3)
    shapes = [[tuple(batch.shape) for batch in w.heldout_batches(16, 64, rank, 2)] for rank in range(2)]
    assert shapes[0] == shapes[1] == [(16, 17)]


def run_training(folder: str, config: str, *arguments: str):
    """On every rank: one training in this process; returns its summary and the losses it logged."""
    folder = Path(folder)
    args = train.parse_args(["--deepspeed_config", str(ROOT / "configs/ds" / f"{config}.json"), "--data",
                             str(folder / "text"), "--log_every", "1", *arguments])
    summary = train.run(args)
    rows = [json.loads(line) for line in (args.save_dir / "log.jsonl").read_text().splitlines()]
    return summary, {row["step"]: row["loss"] for row in rows}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt_moe")
    (folder / "gpt.yaml").write_text(MODEL)
    (folder / "qwen.yaml").write_text(QWEN)
    (folder / "text").write_text("".join(f"{i} green bottles hanging on the wall\n" for i in range(800)))
    return folder


@pytest.fixture(scope="module")
def base(folder, ranks2):
    """Four steps with a checkpoint after two: (folder of the run, summary, losses)."""
    out = folder / "base"
    (summary, losses), _ = ranks2.run(run_training, str(folder), "zero2", "--model", str(folder / "gpt.yaml"),
                                      "--steps", "4", "--save_every", "2", "--save_dir", str(out))
    return out, summary, losses


def test_training_writes_log_summary_and_plot(base):
    out, summary, losses = base
    assert list(losses) == [1, 2, 3, 4] and losses[4] < losses[1]
    assert summary["parameters"] == GPT_PARAMETERS
    assert summary["moe_layers"] == 2 and summary["layers_converted"] == 0
    assert summary["heldout"] < summary["heldout_before"]
    assert json.loads((out / "summary.json").read_text()) == summary
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_resume_repeats_the_uninterrupted_run(base, folder, ranks2, tmp_path):
    out, _, losses = base
    (_, resumed), _ = ranks2.run(run_training, str(folder), "zero2", "--model", str(folder / "gpt.yaml"), "--steps",
                                 "4", "--load_dir", str(out), "--load_tag", "step_2", "--save_dir",
                                 str(folder / "resumed"))
    assert resumed == {step: losses[step] for step in (3, 4)}
    with mock.patch.object(plot.plt.Axes, "plot", autospec=True, side_effect=plot.plt.Axes.plot) as drawn:
        plot.plot_losses({"resumed": folder / "resumed"}, tmp_path / "loss.png")
    assert [call.args[1] for call in drawn.call_args_list] == [[3, 4], [2, 4]]  # losses; held-out, before and after
    # The last step done once more, in the folder of the run itself: no step is logged twice.
    again = ("--model", str(folder / "gpt.yaml"), "--load_dir", str(out), "--load_tag", "step_2")
    assert "already made 2" in ranks2.run(refused, str(folder), *again, "--steps", "2")[0]
    ranks2.run(run_training, str(folder), "zero2", *again, "--steps", "4", "--save_dir", str(out))
    rows = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert [(row["step"], row["loss"]) for row in rows] == list(losses.items())


def refused(*arguments: str) -> str:
    """What a training ends with that does not begin."""
    with pytest.raises(SystemExit) as ended:
        run_training(arguments[0], "zero2", *arguments[1:])
    return str(ended.value.code)


@pytest.mark.parametrize("arguments, told", [
    (["--steps", "0"], "argument --steps: 0 is less than 1"),
    (["--warmup_steps", "-1"], "--warmup_steps: -1 is less than 0"),
    (["--model", "none.yaml"], "--model: there is no file none.yaml"),
    (["--load_dir", "none", "--load_tag", "step_3"], "no checkpoint step_3 there"),
    (["--finetune"], "need --load_dir"), (["--save_pretrained", "folder"], "--save_pretrained needs --hf_model"),
    (["--data", "none"], "--data 'none': expected stdlib"),
    (["--save_dir", __file__], "test_gpt_moe.py is no folder")])
def test_odd_arguments_end_in_one_line(capsys, arguments, told):
    with pytest.raises(SystemExit):
        train.parse_args(arguments)
    assert told in capsys.readouterr().err.splitlines()[-1]


def test_a_cpu_without_bf16_trains_in_float32(monkeypatch, tmp_path):
    (tmp_path / "float32.json").write_text("{}")

    def would_emulate(config, *arguments):
        return train.would_emulate_bf16(train.parse_args(["--deepspeed_config", str(config), *arguments]))

    zero2 = ROOT / "configs/ds/zero2.json"
    for has_bf16 in (True, False):
        capability = "AVX512" if has_bf16 else "AVX2"
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda name=capability: name)
        assert would_emulate(zero2) == (not has_bf16)
        assert not would_emulate(zero2, "--float32") and not would_emulate(tmp_path / "float32.json")


@pytest.mark.parametrize("sizes, arguments, told", [
    ("{hidden: 32}", (), "unexpected keyword argument 'hidden'"),
    (MODEL.replace("num_heads: 2", "num_heads: 3"), (), "hidden_size 32 is no multiple of twice the 3 heads"),
    (MODEL, ("--ep_size", "3"), "--ep_size 3: expected a divisor of the 4 experts and of the 2 ranks")])
def test_a_model_that_cannot_be_built_ends_in_one_line(ranks2, tmp_path, sizes, arguments, told):
    (tmp_path / "model.yaml").write_text(sizes)
    (tmp_path / "text").write_text("text")
    found = ranks2.run(refused, str(tmp_path), "--model", str(tmp_path / "model.yaml"), *arguments)
    assert all(told in text and "\n" not in text for text in found)


@pytest.mark.parametrize("text, told", [("text", "at least 8193 are needed"),
                                        ("text" * 2049, "do not fill one window of 9999")])
def test_too_little_text_ends_in_one_line(tmp_path, text, told):
    (tmp_path / "text").write_text(text)
    with pytest.raises(SystemExit, match=f"^--data .*text.*: .*{told}"):
        train.load_data(train.parse_args(["--data", str(tmp_path / "text")]), 9999)


@pytest.mark.parametrize("config, dtype", [
    ("zero2", torch.bfloat16), pytest.param("zero1_mxfp8", torch.bfloat16, marks=WIDE),
    ("zero2_mxfp8", torch.float32)], ids=str)
def test_finetuning_starts_from_the_weights_of_the_base(base, folder, ranks2, tmp_path, config, dtype):
    out, trained, _ = base
    (summary, losses), _ = ranks2.run(run_training, str(folder), config, "--model", str(folder / "gpt.yaml"),
                                      "--steps", "2", "--load_dir", str(out), "--finetune", "--save_dir",
                                      str(tmp_path), "--activation_checkpointing",
                                      *(["--float32"] if dtype == torch.float32 else []))
    saved = torch.load(tmp_path / "step_2/mp_rank_00_model_states.pt", weights_only=False)["module"]
    assert {tensor.dtype for tensor in saved.values()} == {dtype}
    assert summary["layers_converted"] == (2 if "mxfp8" in config else 0)
    assert list(losses) == [1, 2]
    assert summary["heldout_before"] == pytest.approx(trained["heldout"], rel=5e-3 if "mxfp8" in config else 1e-6)
    assert summary["heldout"] < trained["heldout"]


@pytest.mark.parametrize("config, arguments", slow_except(
    [("autoep_zero2", ()), ("autoep_zero3_mxfp8", ()), ("autoep_zero2_mxfp8", ("--float32", ))],
    ("autoep_zero3_mxfp8", ()), ("autoep_zero2_mxfp8", ("--float32", ))))
def test_hf_model_through_autoep(folder, ranks2, config, arguments):
    (summary, losses), _ = ranks2.run(run_training, str(folder), config, "--hf_model", str(folder / "qwen.yaml"),
                                      "--seq_len", "32", "--steps", "2", "--save_dir", str(folder / config),
                                      "--activation_checkpointing", *arguments)
    assert summary["moe_layers"] == 2 and np.isfinite(losses[2])
    whole = train.models.build_hf(str(folder / "qwen.yaml"), 1, False)
    assert summary["parameters"] == sum(p.numel() for p in whole.parameters())


@pytest.mark.parametrize("config, arguments, told", [
    ("zero2", (), '"expert_parallel": {"enabled": true, "autoep_size": N}'),
    ("autoep_zero3", ("--freeze", r".*layers\.0\..*experts.*"),
     "--freeze takes .*experts.*checkpoints of ZeRO-3 hold no frozen experts")])
def test_a_training_that_makes_no_sense_is_refused_at_the_start(folder, ranks2, config, arguments, told):
    with pytest.raises(RankFailure, match=told):
        ranks2.run(run_training, str(folder), config, "--hf_model", str(folder / "qwen.yaml"), "--seq_len", "32",
                   *arguments, "--save_dir", str(folder / "refused"))


def test_hf_model_from_a_folder_with_and_without_weights(folder):
    from_yaml = train.models.build_hf(str(folder / "qwen.yaml"), 1, False)
    from_yaml.config.save_pretrained(folder / "config_only")
    from_yaml.save_pretrained(folder / "weights")
    same_seed = train.models.build_hf(str(folder / "config_only"), 1, False).state_dict()
    loaded = train.models.build_hf(str(folder / "weights"), 2, False).state_dict()
    for name, expected in from_yaml.state_dict().items():
        assert same_seed[name].equal(expected) and loaded[name].equal(expected), name


def test_a_model_given_by_name_reads_text_by_its_own_tokenizer(folder, monkeypatch):
    from transformers import AutoTokenizer
    asked = []

    def tokenizer_of(name):
        asked.append(name)
        return lambda text: {"input_ids": [7] * len(text)}

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", tokenizer_of)
    (folder / "bare").mkdir()
    for model in ("someone/model", str(folder / "bare"), str(folder / "qwen.yaml")):
        args = train.parse_args(["--hf_model", model, "--data", str(folder / "text")])
        stream = train.load_data(args, 16)[0].stream
        assert (stream == 7).all() == (model == "someone/model")
    assert asked == ["someone/model"]


def test_a_run_leaves_no_shared_memory_behind_however_it_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(finetune, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(finetune, "free_port", lambda: 4711)
    other = tmp_path / "deepspeed_allreduce_buffer_0_127.0.0.1_29500_0"
    other.touch()
    with pytest.raises(KeyboardInterrupt), finetune.train_command(Path("x.json"), tmp_path) as (command, _):
        assert command[command.index("--master_port") + 1] == "4711"
        for rank in range(2):
            (tmp_path / f"deepspeed_allreduce_buffer_0_127.0.0.1_4711_{rank}").touch()
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == [other]


def test_ds_configs_differ_in_the_section_alone():
    folder = ROOT / "configs/ds"
    for path in folder.glob("*_mxfp8.json"):
        config = json.loads(path.read_text())
        assert config.pop("mxfp8_moe") == {"enabled": True, "min_tokens_per_expert": 0}
        assert config == json.loads((folder / path.name.replace("_mxfp8", "")).read_text())
