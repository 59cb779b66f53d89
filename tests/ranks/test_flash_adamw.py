# SPDX-License-Identifier: Apache-2.0
"""FlashAdamW of flashoptim by the config and as the user's own optimizer trains as torch's AdamW does. Without a GPU,
it keeps its moments in float32."""

from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import ds_mxfp8_moe
from ds_mxfp8_moe.compat import zero, zero_checks
from ds_mxfp8_moe.config import ConfigError
from ds_mxfp8_moe.engine.flash_adamw import about_masters
from tests.support.autoep_models import ds_config, engine_of, model, train_engine, weights
from tests.support.engine_cases import enabled
from tests.support.slow import WIDE, slow_except
from tests.support.spread_checkpoints_cases import to_universal
from tests.support.trainers import trainer_of

SECTION = {"enabled": True, "recipe": "bf16"}
FLASH, ADAMW_OF_TORCH, ADAMW_OF_DEEPSPEED = "by the config", "torch's", "DeepSpeed's"
ADAMW = {"lr": 1e-3, "betas": [0.8, 0.95], "eps": 1e-4, "weight_decay": 0.1}
ON_CPU = {"quantize": False, "fused": False}
ASKED = {"gradient_clipping": 0.5, "gradient_accumulation_steps": 2, "scheduler": {
    "type": "WarmupLR", "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 3}}}


def without_decay(net: torch.nn.Module) -> list[dict]:
    """As the Trainer groups parameters: norms have no weight decay."""
    norms = {name for name, _ in net.named_parameters() if "norm" in name}
    return [{"params": [p for name, p in net.named_parameters() if name not in norms]},
            {"params": [p for name, p in net.named_parameters() if name in norms], "weight_decay": 0.0}]


def started(stage: int, how: str, ep_size: int = 2, seed: int = 0, **changes):
    net = model(seed=seed)
    config = ds_config(SECTION, stage, ep_size, **{**ASKED, **changes})
    del config["zero_allow_untested_optimizer"]
    given = {"model_parameters": without_decay(net)}
    if how == "by the config":
        # Without a GPU, nothing corrects masters in bf16.
        bits = {"master_weight_bits": None} if "bf16" in changes else {}
        config["optimizer"] = {"type": "FlashAdamW", "params": {**ADAMW, **ON_CPU, **bits}}
    elif how in (ADAMW_OF_TORCH, ADAMW_OF_DEEPSPEED):
        config["optimizer"] = {"type": "AdamW", "params": {**ADAMW, "torch_adam": how == ADAMW_OF_TORCH}}
    else:
        from flashoptim import FlashAdamW

        del config["optimizer"]
        make = partial(FlashAdamW, **ADAMW, **ON_CPU, master_weight_bits=None)
        given = {"optimizer": make(without_decay(net))}
    return ds_mxfp8_moe.initialize(model=net, config=config, **given)[0]


def trained(stage: int, how: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    engine = started(stage, how)
    assert type(engine.basic_optimizer).__name__ == ("AdamW" if how == "torch's" else "FlashAdamW")
    return train_engine(engine, range(8)), weights(engine)


def assert_trains_alike(results: list, expected: list) -> None:
    for (losses, found), (wanted_losses, wanted) in zip(results, expected, strict=True):
        assert losses == pytest.approx(wanted_losses, rel=1e-5)
        assert all(torch.allclose(found[name], wanted[name], rtol=1e-4, atol=1e-6) for name in wanted)


@pytest.mark.parametrize("stage", slow_except([0, 1, 2, 3], 3))
def test_trains_as_torchs_adamw(ranks2, stage):
    """With groups, clipping, accumulation and a schedule, and without "zero_allow_untested_optimizer"."""
    expected = ranks2.run(trained, stage, "torch's")
    assert_trains_alike(ranks2.run(trained, stage, "by the config"), expected)
    assert_trains_alike(ranks2.run(trained, stage, "by the user"), expected)


def resumed(directory, stage: int, changes: dict, hows: tuple[str, str] = (FLASH, FLASH)) -> tuple:
    """The losses of eight micro-batches in a run, and of the last four in a run that resumes there."""
    losses = saved(directory, stage, changes, hows[0])
    return losses, loaded(directory, stage, changes, hows[1])


def saved(directory, stage: int, changes: dict, how: str) -> list[float]:
    engine = started(stage, how, **changes)
    losses = train_engine(engine, range(4))
    engine.save_checkpoint(directory, tag="two")
    return losses + train_engine(engine, range(4, 8))


def loaded(directory, stage: int, changes: dict, how: str, tag: str = "two", ep_size: int = 2) -> list[float]:
    again = started(stage, how, ep_size, seed=1, **changes)
    again.load_checkpoint(directory, tag=tag)
    return train_engine(again, range(4, 8))


BF16_MASTERS = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}


@pytest.mark.parametrize("stage, changes", [
    *(pytest.param(stage, {}, marks=WIDE) for stage in (1, 2)), (3, {}), (1, BF16_MASTERS),
    pytest.param(3, BF16_MASTERS, marks=WIDE)], ids=str)
def test_a_checkpoint_goes_on_with_the_same_bits(ranks2, tmp_path, stage, changes):
    for losses, last in ranks2.run(resumed, tmp_path, stage, changes):
        assert losses[4:] == last


@pytest.mark.parametrize("stage, hows", slow_except(
    [(stage, hows) for one in (ADAMW_OF_TORCH, ADAMW_OF_DEEPSPEED) for hows in ((one, FLASH), (FLASH, one))
     for stage in (1, 2, 3)], (1, (ADAMW_OF_TORCH, FLASH)), (3, (FLASH, ADAMW_OF_TORCH))), ids=str)
def test_adamw_and_flash_adamw_go_on_with_each_others_checkpoints(ranks2, tmp_path, stage, hows):
    for losses, last in ranks2.run(resumed, tmp_path, stage, {}, hows):
        assert last == pytest.approx(losses[4:], rel=1e-5)


@pytest.mark.parametrize("stage, changes, hows", [
    (2, {}, (FLASH, FLASH)), (1, BF16_MASTERS, (FLASH, FLASH)), (3, {}, (FLASH, FLASH)),
    pytest.param(3, BF16_MASTERS, (FLASH, FLASH), marks=WIDE),
    pytest.param(1, {}, (FLASH, ADAMW_OF_TORCH), marks=WIDE),
    pytest.param(3, {}, (ADAMW_OF_TORCH, FLASH), marks=WIDE)], ids=str)
def test_a_universal_checkpoint_goes_on(ranks2, tmp_path, stage, changes, hows):
    """In ZeRO-1 and 2 with experts spread over other ranks, too."""
    expected = ranks2.run(saved, tmp_path, stage, changes, hows[0])
    to_universal(tmp_path)
    found = ranks2.run(loaded, tmp_path, stage, {**changes, "checkpoint": {"load_universal": True}}, hows[1],
                       "two_universal", 2 if stage == 3 else 1)
    for losses, last in zip(expected, found, strict=True):
        assert last == pytest.approx(losses[4:], rel=3e-3 if changes else 1e-5)


def with_bf16_masters(directory, stage: int, shared: bool) -> tuple:
    """Losses of eight micro-batches with a checkpoint after four of them, weights, whether all masters lie in the
    weights' memory, and how many bytes the checkpoint's optimizer has."""
    with ExitStack() as stack:
        for module in () if shared else (zero, zero_checks):
            stack.enter_context(mock.patch.object(module, "share_masters"))
        engine = started(stage, "by the config", **BF16_MASTERS)
        losses = train_engine(engine, range(4))
        engine.save_checkpoint(directory)
        losses += train_engine(engine, range(4, 8))
        zero1 = engine.optimizer
        alike = all(master.data_ptr() == partitions[dist.get_rank(group=group)].data_ptr()
                    for master, partitions, group in zip(
                        zero1.single_partition_of_fp32_groups, zero1.parallel_partitioned_bit16_groups,
                        zero1.real_dp_process_group, strict=True))
        engine.offload_states()
        engine.reload_states()
        losses += train_engine(engine, range(8, 10))
    files = sum(path.stat().st_size for path in directory.glob("*/*optim_states.pt"))
    return losses, weights(engine), alike, files


@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=WIDE)])
def test_bf16_masters_are_the_weights(ranks2, tmp_path, stage):
    for one, other in zip(ranks2.run(with_bf16_masters, tmp_path / "shared", stage, True),
                          ranks2.run(with_bf16_masters, tmp_path / "apart", stage, False), strict=True):
        (losses, found, alike, size), (wanted_losses, wanted, apart, wanted_size) = one, other
        assert alike and not apart
        assert losses == wanted_losses
        assert all(map(torch.equal, found.values(), wanted.values()))
        assert size == pytest.approx(wanted_size, rel=0.01)


MUON = {"optimizer": {"type": "Muon", "params": {"lr": 1e-3}}}
ON_THE_HOST = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
               "zero_optimization": {"offload_optimizer": {"device": "cpu"}}}


def four_steps(section: dict | None, stage: int, changes: dict) -> list[float]:
    return train_engine(engine_of(model(), section, stage, **changes), range(4))


# DeepSpeed compiles its Adam for the host, and Muon's kernels: a minute each.
@pytest.mark.parametrize("stage, changes", [
    pytest.param(*case, marks=WIDE) for case in ((2, MUON), (1, ON_THE_HOST), (3, ON_THE_HOST))], ids=str)
def test_other_optimizers_train_as_without_expert_parallelism(ranks2, stage, changes):
    for losses, plain in zip(ranks2.run(four_steps, SECTION, stage, changes),
                             ranks2.run(four_steps, None, stage, changes), strict=True):
        assert losses == pytest.approx(plain, rel=1e-3)


@enabled()
def by_the_trainer(directory, optimizer: dict) -> list[float]:
    trainer = trainer_of(directory, 1, None, optimizer=optimizer)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_the_trainer_fills_in_its_arguments(ranks2, tmp_path):
    auto = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
    expected = ranks2.run(by_the_trainer, tmp_path, {"type": "AdamW", "params": {**auto, "torch_adam": True}})
    found = ranks2.run(by_the_trainer, tmp_path, {"type": "FlashAdamW", "params": {**auto, **ON_CPU}})
    # With an epsilon of 1e-8, Adam turns the noise of vanishing gradients into whole steps.
    assert found == [pytest.approx(losses, rel=1e-2) for losses in expected]


def refused(params: dict, without: tuple[int, ...] = ()) -> str:
    """`without`: the ranks that lack flashoptim."""
    config = ds_config(SECTION, 1, optimizer={"type": "FlashAdamW", "params": params})
    found = None if dist.get_rank() in without else True
    missing = mock.patch("ds_mxfp8_moe.engine.flash_adamw.find_spec", lambda name: found)
    with missing, pytest.raises(ConfigError) as error:
        ds_mxfp8_moe.initialize(model=model(), config=config)
    return str(error.value)


def test_errors_say_what_to_do(ranks2):
    for without in (0, 1), (1, ):
        assert ranks2.run(refused, {"lr": 1e-3}, without) == [
            f'rank {without[0]}: the optimizer "FlashAdamW" is one of flashoptim, which is not installed: pip install '
            "flashoptim"] * 2
    for said in ranks2.run(refused, {"lr": 1e-3, "torch_adam": True}):
        assert said.startswith('rank 0: "params" of the optimizer "FlashAdamW" has "torch_adam"; valid are lr, betas')


@pytest.mark.parametrize("bits, masters, said", [(None, True, True), (3, True, False), (4, True, False),
                                                 (None, False, False)])
def test_masters_in_bf16_need_a_correction(bits, masters, said):
    basic = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])
    if bits:
        basic.param_groups[0]["master_bytewidth"] = bits
    lines = about_masters(SimpleNamespace(bf16_master_weights_and_gradients=masters, optimizer=basic))
    assert [line.startswith('ERROR: "bf16_master_weights_and_grads" with AdamW loses most updates')
            for line in lines] == [True] * said
