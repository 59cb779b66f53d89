# SPDX-License-Identifier: Apache-2.0
"""save_pretrained writes what transformers would have written had it trained the model itself: beside
test_model_types.py, the files as such, other models, and errors."""

import weakref

import deepspeed
import deepspeed.comm as dist
import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen2MoeForSequenceClassification

import ds_mxfp8_moe
from ds_mxfp8_moe import save_pretrained
from ds_mxfp8_moe.checkpoint import gathering
from tests.support.autoep_models import FAMILIES, batch, ds_config, model
from tests.support.pretrained_models import HELD_OUT, build


def untrained(directory, stage):
    """Saved before the first step, beside what transformers itself saves of the same model."""
    if dist.get_rank() == 0:
        theirs = model("deepseek_v3", dtype=torch.bfloat16)
        theirs.load_state_dict(model("deepseek_v3").state_dict())  # in bf16, other numbers are drawn
        theirs.save_pretrained(directory / "theirs")
    dist.barrier()
    save_pretrained(build("deepseek_v3", {"enabled": True}, stage, 2, "bf16"), directory / "ours",
                    max_shard_size="100KB")


@pytest.mark.parametrize("stage", [1, 3])
def test_the_files_hold_what_transformers_writes(ranks2, tmp_path, stage):
    ranks2.run(untrained, tmp_path, stage)
    theirs, ours = ({key: tensor for path in sorted((tmp_path / name).glob("*.safetensors"))
                     for key, tensor in load_file(path).items()} for name in ("theirs", "ours"))
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 1
    assert theirs.keys() == ours.keys()
    correction = [key for key in theirs if key.endswith("e_score_correction_bias")]
    assert len(correction) == 1
    for key, tensor in theirs.items():
        if key not in correction:
            # From 5.24 on, transformers keeps this router in float32. DeepSpeed's engine trains all weights in bf16.
            assert key.endswith("mlp.gate.weight") or tensor.dtype == torch.bfloat16, key
            assert ours[key].dtype == torch.bfloat16 and torch.equal(tensor.bfloat16(), ours[key]), key
    for name in ("config.json", "generation_config.json"):
        assert (tmp_path / "ours" / name).read_text() == (tmp_path / "theirs" / name).read_text()


def whole_at_once(directory):
    """How many whole tensors this rank holds at most."""
    engine, held, most = build("qwen3_moe", {"enabled": True}, 3, 2), weakref.WeakSet(), 0
    gather = gathering.unpartitioned

    def whole(value):
        nonlocal most
        tensor = gather(value)
        held.add(tensor)
        most = max(most, len(held))
        return tensor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gathering, "unpartitioned", whole)
        save_pretrained(engine, directory)
    return most


def test_under_zero3_only_rank_0_holds_the_model(ranks2, tmp_path):
    _, other = ranks2.run(whole_at_once, tmp_path)
    assert other <= 2  # with the one before, until it is replaced


def classifier(directory):
    config = FAMILIES["qwen2_moe"]()
    config.num_labels = 3
    torch.manual_seed(0)
    net = Qwen2MoeForSequenceClassification(config).train()
    engine = ds_mxfp8_moe.initialize(model=net, config=ds_config({"enabled": True}, 2))[0]
    ids = batch(0)
    engine.backward(engine(input_ids=ids, labels=torch.tensor([1, 2])).loss)
    engine.step()
    save_pretrained(engine, directory)
    ds_mxfp8_moe.convert(engine, {"enabled": False})
    engine.eval()
    with torch.no_grad():
        return engine(input_ids=batch(HELD_OUT, rank=0)).logits


def test_a_classifier_which_generates_nothing(ranks2, tmp_path):
    logits, _ = ranks2.run(classifier, tmp_path)
    net, info = Qwen2MoeForSequenceClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    with torch.no_grad():
        assert torch.allclose(net.eval()(input_ids=batch(HELD_OUT, rank=0)).logits, logits, atol=1e-5)


def with_adapters(directory):
    net = peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["q_proj"]), model("qwen3_moe"))
    engine = ds_mxfp8_moe.initialize(model=net, config=ds_config({"enabled": True}))[0]
    with pytest.raises(RuntimeError, match=r"q_proj.*None.*None: missing\)\. engine.save_16bit_model writes"):
        save_pretrained(engine, directory)
    engine.save_16bit_model(directory)


def test_adapters_are_named_where_they_hinder(ranks2, tmp_path):
    ranks2.run(with_adapters, tmp_path)


def no_room(directory):
    sizes = {"hidden_size": 128, "moe_intermediate_size": 128, "intermediate_size": 128}
    engine = build("qwen3_moe", {"enabled": True}, 1, 2, **sizes)
    for weights in ("model", "fp8"):
        with pytest.raises(RuntimeError, match="could not be saved to .*: "):
            save_pretrained(engine, directory / "file" / "below", weights)
        with pytest.raises(RuntimeError, match="NotADirectoryError"):  # transformers would log a line and go on
            save_pretrained(engine, directory / "file", weights)
    with pytest.raises(ValueError, match="max_shard_size is 'large'"):
        save_pretrained(engine, directory, "fp8", max_shard_size="large")
    with pytest.raises(TypeError, match="expected the Trainer or the DeepSpeed engine.*this is a Qwen3MoeForCausalLM"):
        save_pretrained(engine.module, directory)
    plain = deepspeed.initialize(model=torch.nn.Linear(4, 4), config={"train_micro_batch_size_per_gpu": 1})[0]
    with pytest.raises(TypeError, match="expected a transformers model.*a Linear, which holds 0 of them"):
        save_pretrained(plain, directory)
    return True


def test_every_rank_hears_of_a_failure(ranks2, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    assert ranks2.run(no_room, tmp_path) == [True, True] and [path.name for path in tmp_path.iterdir()] == ["file"]
