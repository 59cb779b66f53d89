# SPDX-License-Identifier: Apache-2.0
"""Ranks that share sequences by DeepSpeed's Ulysses train as one rank does with the whole sequences."""

from contextlib import contextmanager
from unittest import mock

import deepspeed.comm as dist
import pytest
import torch
import transformers
from accelerate.utils import DeepSpeedSequenceParallelConfig, ParallelismConfig
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter
from torch.autograd.graph import save_on_cpu
from transformers import modeling_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import ds_mxfp8_moe
from ds_mxfp8_moe.config import ConfigError
from tests.support.autoep_models import converted, ds_config, model, weights
from tests.support.autoep_trainings import BF16, PLAIN, assert_trains_like_transformers, near
from tests.support.guide_code_cases import GUIDES, blocks
from tests.support.rank_pool import reset_hugging_face
from tests.support.slow import slow_except

LENGTH = 32
AUX_LOSS = {"output_router_logits": True, "router_aux_loss_coef": 0.5, "head_dim": 16}
BALANCED = {**BF16, "load_balance_coeff": 0.01}


@contextmanager
def ulysses(net, sp_size):
    """The mpu of a model whose attention exchanges heads between ranks."""
    plain = ALL_ATTENTION_FUNCTIONS["sdpa"]
    try:
        yield UlyssesSPAttentionHF.register_with_transformers(net, "sdpa", sp_size, micro_batch_size=1)
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = plain
        parallel_state_sp._release_sequence_parallel_groups()


def sequence(step: int, index: int) -> dict[str, torch.Tensor]:
    """A batch of one sequence, whose first half has fewer tokens in the loss."""
    ids = torch.randint(3, 128, (1, LENGTH), generator=torch.Generator().manual_seed(100 * step + index))
    labels = ids.clone()
    labels[:, :3 + index] = -100
    return {"input_ids": ids, "labels": labels, "position_ids": torch.arange(LENGTH)[None]}


def part_of_loss(net, shard: dict, mpu) -> torch.Tensor:
    """What a rank's shard adds to the loss of its whole sequence."""
    count = (shard["shift_labels"] != -100).sum()
    total = count.clone()
    dist.all_reduce(total, group=mpu.get_sequence_parallel_group())
    return net(**shard, labels=shard["shift_labels"]).loss * count / total


def trained(net, section, sp_size, mpu=None, **keys) -> tuple:
    """As autoep_trainings.trained. Without an mpu, each rank has whole sequences: those that it shares otherwise."""
    config = ds_config(section, gradient_accumulation_steps=sp_size, gradient_clipping=0.0, **keys)
    if section is PLAIN:
        del config["expert_parallel"]
    engine = ds_mxfp8_moe.initialize(model=net, config=config, mpu=mpu,
                                     model_parameters=list(net.parameters()) if section is PLAIN else None)[0]
    before, losses, steps, rank = weights(engine), [], range(2), dist.get_rank()
    first = rank // sp_size * sp_size
    batches = [sequence(step, index) for step in steps for index in range(first, first + sp_size)]
    if mpu is not None:
        group = mpu.get_sequence_parallel_group()
        batches = UlyssesSPDataLoaderAdapter([sequence(step, rank) for step in steps], dist.get_rank(group=group),
                                             group, sp_size, engine.device)
    for batch in batches:
        loss = engine(**batch).loss if mpu is None else part_of_loss(engine, batch, mpu)
        engine.backward(loss)
        engine.step()
        loss = loss.detach().clone()
        if mpu is not None:
            dist.all_reduce(loss, group=group)
        losses.append(loss.item())
    moved = {name: value - before[name] for name, value in weights(engine).items()}
    moved |= {name: buffer.clone() for name, buffer in engine.module.named_buffers() if name.endswith("expert_bias")}
    result = losses, moved, converted(engine)
    engine.destroy()
    return result


def both(sp_size, ep_size, stage, family="qwen3_moe", changes=None, section=BF16,
         recompute=False, in_chunks=False) -> tuple:
    """`near` of one rank's training with whole sequences, and of ours. `in_chunks`: with the guide's loss."""
    whole, shared = (model(family, **(changes or {})) for _ in range(2))
    reference = PLAIN if section is BF16 else section
    own = trained(whole, reference, sp_size, stage=stage, ep_size=ep_size)
    if recompute:
        shared.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if in_chunks:
        names: dict = {}
        exec(blocks(GUIDES / "fast_training.md", "python")[0], names)
        names["loss_in_chunks"](shared, tokens=5)
    with ulysses(shared, sp_size) as mpu:
        ours = trained(shared, section, sp_size, mpu, stage=stage, ep_size=ep_size)
    return near((*own[:2], 0), ours)


@pytest.mark.parametrize("sp_size, ep_size, stage", slow_except([(2, 2, 1), (2, 2, 2)], (2, 2, 2)))
def test_one_sequence_on_two_ranks(ranks2, sp_size, ep_size, stage):
    assert_trains_like_transformers(ranks2.run(both, sp_size, ep_size, stage))


@pytest.mark.parametrize("sp_size, ep_size, stage", slow_except(
    [(2, 2, 1), (2, 2, 2), (2, 4, 1), (2, 4, 2), (4, 2, 2), (4, 4, 1)], (2, 4, 2)))
def test_experts_within_and_across_groups_of_sequences(ranks4, sp_size, ep_size, stage):
    assert_trains_like_transformers(ranks4.run(both, sp_size, ep_size, stage))


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_the_auxiliary_loss_is_that_of_whole_sequences(ranks2, family):
    assert_trains_like_transformers(ranks2.run(both, 2, 2, 1, family, AUX_LOSS))


@pytest.mark.slow
def test_the_auxiliary_loss_in_two_groups_with_checkpointing(ranks4):
    assert_trains_like_transformers(ranks4.run(both, 2, 4, 2, "qwen3_moe", AUX_LOSS, recompute=True))


def test_biases_follow_the_loads_of_whole_sequences(ranks2):
    results = ranks2.run(both, 2, 2, 2, "qwen3_moe", None, BALANCED)
    assert_trains_like_transformers(results)
    assert any(name.endswith("expert_bias") for name in results[0][2])


def test_the_loss_in_chunks(ranks2):
    assert_trains_like_transformers(ranks2.run(both, 2, 2, 2, in_chunks=True))


def kept_on_the_host() -> list[tuple]:
    """Losses and changes of weights, and how many checkpoints of layers were on the host: with `offload`, without."""
    found = []
    for offload in (True, False):
        net = model()
        net.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False}, offload=offload)
        with ulysses(net, 2) as mpu, mock.patch.object(modeling_utils, "save_on_cpu", wraps=save_on_cpu) as used:
            losses, moved, layers = trained(net, {"enabled": True}, 2, mpu, stage=2, ep_size=2)
            found.append((losses, moved, used.call_count))
        assert layers == 2
    return found


def test_checkpoints_on_the_host_change_no_bit(ranks2):
    for (losses, moved, kept), (expected, expected_moved, none) in ranks2.run(kept_on_the_host):
        assert losses == expected and all(torch.equal(moved[name], value) for name, value in expected_moved.items())
        assert (kept, none) == (2 * len(losses), 0)


def gone_on(directory) -> list[list[float]]:
    """The losses of two steps after a checkpoint, in its engine and in another one."""
    results = []
    for saves in (True, False):
        net = model()
        with ulysses(net, 2) as mpu:
            engine = ds_mxfp8_moe.initialize(model=net, config=ds_config({"enabled": True}, 2), mpu=mpu)[0]
            batches = [sequence(step, dist.get_rank()) for step in range(2)]
            group = mpu.get_sequence_parallel_group()
            parts = list(UlyssesSPDataLoaderAdapter(batches, dist.get_rank(group=group), group, 2, engine.device))
            losses = []
            for step, part in enumerate(parts if saves else parts[2:]):
                if saves and step == 2:
                    engine.save_checkpoint(str(directory))
                if not saves and step == 0:
                    engine.load_checkpoint(str(directory))
                loss = part_of_loss(engine, part, mpu)
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
            results.append(losses[-2:])
            engine.destroy()
    return results


def test_goes_on_from_a_checkpoint(ranks2, tmp_path):
    for there, again in ranks2.run(gone_on, tmp_path):
        assert there == again


def refused(stage: int) -> str:
    net = model()
    with ulysses(net, 2) as mpu, pytest.raises((ConfigError, AssertionError)) as error:
        ds_mxfp8_moe.initialize(model=net, config=ds_config(BF16, stage), mpu=mpu)
    return str(error.value)


@pytest.mark.parametrize("stage, message", [
    (0, "sequence parallelism needs ZeRO 1 or 2"),
    (3, "AutoEP with ZeRO Stage 3 does not support sequence parallelism yet (sequence_parallel_size=2)")])
def test_other_stages_are_refused_on_every_rank(ranks2, stage, message):
    for said in ranks2.run(refused, stage):
        assert message in said
class Sequences(torch.utils.data.Dataset):
    """A few sequences, over and over."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return {name: tensor[0] for name, tensor in sequence(0, index % 4).items()}


def by_trainer(directory, section, resumed=None) -> tuple[list[float], int]:
    """The losses of a Trainer's steps, and how many layers are ours. `resumed`: a folder to go on from."""
    reset_hugging_face()
    ds_mxfp8_moe.enable()
    config = ds_config(section, 2, gradient_accumulation_steps="auto", train_micro_batch_size_per_gpu="auto")
    if section is PLAIN:
        del config["expert_parallel"]
    plain = ALL_ATTENTION_FUNCTIONS["sdpa"]
    try:
        shared = ParallelismConfig(sp_backend="deepspeed", sp_size=2, sp_handler=DeepSpeedSequenceParallelConfig(
            sp_seq_length_is_variable=True, sp_attn_implementation="sdpa"))
        arguments = transformers.TrainingArguments(
            output_dir=str(directory), deepspeed=config, use_cpu=True, parallelism_config=shared, max_steps=4,
            per_device_train_batch_size=1, learning_rate=0.2, lr_scheduler_type="constant", logging_steps=1,
            save_steps=2, ignore_data_skip=True, report_to=[], disable_tqdm=True)
        trainer = transformers.Trainer(model=model(), args=arguments, train_dataset=Sequences())
        trainer.train(resume_from_checkpoint=resumed)
        return ([line["loss"] for line in trainer.state.log_history if "loss" in line],
                converted(trainer.model_wrapped))
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = plain
        parallel_state_sp._release_sequence_parallel_groups()
        ds_mxfp8_moe.disable()


@pytest.mark.slow
def test_the_trainer_shares_sequences_and_goes_on_from_a_checkpoint(ranks2, tmp_path):
    plain, ours, mxfp8 = (ranks2.run(by_trainer, tmp_path / name, section)[0] for name, section in (
        ("plain", PLAIN), ("ours", BF16), ("mxfp8", {"enabled": True})))
    assert plain[1] == 0 and ours[1] == mxfp8[1] == 2
    assert ours[0] == pytest.approx(plain[0], abs=2e-4)
    assert mxfp8[0] == pytest.approx(plain[0], rel=5e-3) and mxfp8[0] != ours[0]
    again, _ = ranks2.run(by_trainer, tmp_path / "ours", BF16, str(tmp_path / "ours" / "checkpoint-2"))[0]
    assert again[:2] == ours[0][:2] and again[2] < ours[0][0] - 0.3  # the first batch again, after two steps
