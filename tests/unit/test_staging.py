# SPDX-License-Identifier: Apache-2.0
"""A save that is interrupted leaves the earlier model or the new one, and the next save leaves nothing else behind."""

import os
import shutil

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from ds_mxfp8_moe.checkpoint.staging import PLACING, staged
from tests.support.killed import killed_at
from tests.support.slow import slow_except

OTHERS = {"tokenizer.json": "of the user", "runs/events": "of the Trainer"}


@pytest.fixture(autouse=True)
def no_disk(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda file: None)


def net_of(ffn_size):
    config = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=ffn_size, num_hidden_layers=1,
                         num_attention_heads=1, num_key_value_heads=1, max_position_embeddings=8)
    torch.manual_seed(ffn_size)
    return AutoModelForCausalLM.from_config(config)


def put(files, directory):
    with staged(directory) as folder:
        shutil.copytree(files, folder, dirs_exist_ok=True)


def begins(event, arguments) -> bool:
    """All before is written to the folder of the save."""
    return event == "open" and str(arguments[0]).endswith(f"{PLACING}.part")


def tree(directory) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def folders(tmp_path, earlier, new):
    """Whole folders of two models, and one that has the earlier one and files of others."""
    for files, write in ((tmp_path / "earlier", earlier), (tmp_path / "new", new)):
        files.mkdir()
        write(files)
    for name, text in OTHERS.items():
        (tmp_path / "run" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / name).write_text(text)
    put(tmp_path / "earlier", tmp_path / "run")
    return tmp_path / "earlier", tmp_path / "new", tmp_path / "run"


def kill_everywhere(earlier, new, run, read):
    """What `read` finds after each death, in order. The next save has to leave the new files and those of others."""
    before, found = tree(run), []
    while True:
        shutil.rmtree(run)
        for name, data in before.items():
            (run / name).parent.mkdir(parents=True, exist_ok=True)
            (run / name).write_bytes(data)
        died = killed_at(len(found), put, new, run, begins=begins)
        found.append(read(run))
        put(new, run)
        left = {name.replace("model-1-", "model-"): data.replace(b"model-1-", b"model-")
                for name, data in tree(run).items()}
        assert left == tree(new) | {name: text.encode() for name, text in OTHERS.items()}, len(found)
        if not died:
            return found


def saved(ffn_size, size):
    return lambda folder: net_of(ffn_size).save_pretrained(folder, max_shard_size=size)


ONE, SOME = 10**9, 1000  # bytes of a file


CASES = [((8, ONE), (16, SOME)), ((16, SOME), (8, ONE)), ((8, SOME), (16, SOME))]


@pytest.mark.parametrize("earlier, new", slow_except(CASES, CASES[0]))
def test_a_death_leaves_the_earlier_model_or_the_new_one(tmp_path, earlier, new):
    expected = {ffn_size: net_of(ffn_size).state_dict() for ffn_size, _ in (earlier, new)}

    def read(directory):
        net, info = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
        assert not any(info.values()), info
        state = net.state_dict()
        for name, tensor in expected[net.config.intermediate_size].items():
            assert torch.equal(state[name], tensor), name
        return net.config.intermediate_size

    found = kill_everywhere(*folders(tmp_path, saved(*earlier), saved(*new)), read)
    switch = found.index(new[0])
    assert 1 < switch < len(found) - 3 and found == [earlier[0]] * switch + [new[0]] * (len(found) - switch)


@pytest.mark.parametrize("first, second", slow_except([(2, 2), (2, 4)], (2, 4)))
def test_adapters(tmp_path, first, second):
    """With the same config, a death leaves the earlier ones or the new ones. With another, there is a moment without.
    """
    def write(r, value):
        def written(folder):
            net = peft.get_peft_model(net_of(8), peft.LoraConfig(r=r, target_modules=["q_proj"]))
            with torch.no_grad():
                for name, parameter in net.named_parameters():
                    if "lora_" in name:
                        parameter.fill_(value)
            net.save_pretrained(folder)
        return written

    def read(directory):
        try:
            net = peft.PeftModel.from_pretrained(net_of(8), directory)
        except (ValueError, OSError):  # it looks for a repository of this name
            return 1.5
        value, = {value for name, parameter in net.named_parameters() if "lora_" in name
                  for value in parameter.flatten().tolist()}
        assert net.peft_config["default"].r == (first, second)[int(value) - 1]
        return value

    found = kill_everywhere(*folders(tmp_path, write(first, 1), write(second, 2)), read)
    assert found == sorted(found) and {1, 2} <= set(found) <= ({1, 2} if first == second else {1, 1.5, 2})


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_what_is_not_finished_is_removed(tmp_path, error):
    earlier, _, run = folders(tmp_path, saved(8, SOME), saved(16, ONE))
    before = tree(run)
    with pytest.raises((KeyboardInterrupt, OSError)) as raised, staged(run) as folder:
        (folder / "model.safetensors").write_text("cut")
        raise error
    assert raised.value.__notes__ == [f"The file that was written last is {run / 'model.safetensors'}"]
    assert tree(run) == before and not any(path.name.startswith(".") for path in run.iterdir())


def test_a_file_in_the_place_of_the_directory(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(NotADirectoryError, match="expected a folder, .*file is a file"), staged(tmp_path / "file"):
        pass
