# SPDX-License-Identifier: Apache-2.0
"""`load_balance_coeff`: the biases of experts follow their load, and checkpoints hold them."""

import contextlib
import io
import re
from functools import partial
from pathlib import Path

import deepspeed.comm as dist
import pytest
import torch

import ds_mxfp8_moe
from ds_mxfp8_moe.checkpoint.engine_checkpoints import CheckpointError
from ds_mxfp8_moe.engine import balance
from ds_mxfp8_moe.routing.padding import PaddingMask
from tests.support.adapted_models import adapted
from tests.support.autoep_models import autoep_layers, batch, engine, engine_of, model, train_engine, watch_choices
from tests.support.slow import WIDE, slow_except
from tests.support.spread_checkpoints_cases import to_universal

COEFF = 0.01
SECTION = {"enabled": True, "load_balance_coeff": COEFF}


def biases(module: torch.nn.Module) -> list[torch.Tensor]:
    return [balance.bias_of(layer).clone() for layer in autoep_layers(module)]


def add_load(load_E, tokens, expert_TK) -> None:
    load_E += expert_TK[tokens].flatten().bincount(minlength=8)


def moves(net) -> list[float]:
    """Trains a step. By how much a bias lies off the rule, in each layer."""
    before, layers = biases(net.module), autoep_layers(net.module)
    loads = [torch.zeros(8) for _ in layers]
    hooks = [watch_choices(layer, partial(add_load, load_E, slice(None)))
             for layer, load_E in zip(layers, loads, strict=True)]
    train_engine(net, range(net.gradient_accumulation_steps()))
    for hook, load_E in zip(hooks, loads, strict=True):
        hook.remove()
        dist.all_reduce(load_E)
    return [float((now - old - COEFF * torch.sign(load_E.mean() - load_E)).abs().max())
            for now, old, load_E in zip(biases(net.module), before, loads, strict=True)]


def moves_of_a_new_engine(family: str, stage: int, **changes) -> tuple:
    """`moves`; which biases are the model's own; and the layers on which the key has no effect."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        net = engine(SECTION, stage, family=family, **changes)
        errors = moves(net)
    ignored = re.findall(r"has no effect on (.*), whose router does not choose", said.getvalue())
    return errors, [balance.corrects(layer) for layer in autoep_layers(net.module)], ignored


BF16 = {"bf16": {"enabled": True}}
ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}}


@pytest.mark.parametrize("family, stage, changes, own, ignored", [
    ("qwen3_moe", 0, {}, [False, False], []), ("deepseek_v3", 2, {"gradient_accumulation_steps": 3}, [True], []),
    ("qwen3_moe", 3, BF16, [False, False], []), ("deepseek_v3", 3, {}, [True], []),
    ("lfm2_moe", 1, BF16, [True, True], []), ("laguna", 1, BF16, [False, False], []),
    ("gemma4", 1, BF16, [False, False], []), ("deepseek_v4", 1, BF16, [False, True], ["model.layers.0.mlp"]),
    ("phimoe", 1, BF16, [False, False], ["model.layers.0-1.mlp"])], ids=str)
def test_a_bias_moves_by_the_sign_of_its_load_s_error(ranks2, family, stage, changes, own, ignored):
    for rank, (found, corrects, said) in enumerate(ranks2.run(moves_of_a_new_engine, family, stage, **changes)):
        assert found and max(found) < 1e-6, found
        assert corrects == own and said == ([] if rank else ignored)


ONLY_LAYER_1 = {"load_balance_coeff": COEFF, "exclude": [r"model\.layers\.0\..*"]}


def converted_later(first: dict | None) -> tuple[list[list[float]], list[bool]]:
    """`moves` after each conversion of an engine that began with the section `first`. Which biases a step leaves alone
    where the section is off again."""
    net = engine(first, 1)
    train_engine(net, range(1))
    found = []
    for model_or_engine, section in ((net, SECTION), (net.module, ONLY_LAYER_1), (net.module, SECTION)):
        ds_mxfp8_moe.convert(model_or_engine, section)
        found.append(moves(net))
    ds_mxfp8_moe.convert(net.module, {"enabled": False})
    before = biases(net.module)
    train_engine(net, range(1))
    return found, [torch.equal(*pair) for pair in zip(before, biases(net.module), strict=True)]


@pytest.mark.parametrize("first", [pytest.param({"enabled": True}, marks=WIDE), {"enabled": True, **ONLY_LAYER_1}])
def test_biases_of_layers_that_are_converted_later_move(ranks2, first):
    for (all_layers, (layer_0, layer_1), again), resting in ranks2.run(converted_later, first):
        assert max(*all_layers, layer_1, *again) < 1e-6 and layer_0 > COEFF / 2
        assert resting == [True, True]


def resumed(family: str, stage: int, folder: Path, universal: bool) -> tuple:
    """Biases at the checkpoint, those of an engine that has loaded it, and the losses that follow in both."""
    first = engine(SECTION, stage, family=family, **ADAM)
    train_engine(first, range(3))
    first.save_checkpoint(str(folder), tag="two")
    kept = biases(first.module)
    if universal and dist.get_rank() == 0:
        to_universal(folder)
    dist.barrier()
    second = engine(SECTION, stage, family=family, model_changes={"seed": 1}, **ADAM,
                    checkpoint={"load_universal": universal})
    second.load_checkpoint(str(folder), tag="two_universal" if universal else "two")
    loaded = biases(second.module)
    return kept, loaded, train_engine(first, range(3, 6)), train_engine(second, range(3, 6))


# Without and with a correction bias.
@pytest.mark.parametrize("family, stage, universal", [
    ("qwen3_moe", 2, False), pytest.param("qwen3_moe", 2, True, marks=WIDE),
    pytest.param("deepseek_v3", 2, False, marks=WIDE), ("deepseek_v3", 2, True), ("deepseek_v3", 3, True)])
def test_checkpoints_hold_the_biases(ranks2, family, stage, tmp_path, universal):
    for kept, loaded, losses, again in ranks2.run(resumed, family, stage, tmp_path, universal):
        assert all(map(torch.equal, kept, loaded)) and all(map(torch.any, kept))
        # From ZeRO-3, universal checkpoints have no step count of Adam.
        assert again == (losses if stage < 3 else pytest.approx(losses, rel=1e-4))


def switched_on_and_off(folder: Path, stage: int) -> tuple[bool, list[float], str, str]:
    """Whether biases begin with zeros after a checkpoint of a run without them, by how much they then lie off the
    rule, and what a run without them says and raises when it loads a checkpoint with them."""
    without, balanced, other = (engine(section, stage, **ADAM) for section in ({"enabled": True}, SECTION, SECTION))
    train_engine(without, range(1))
    without.save_checkpoint(str(folder), tag="without")
    for net in (balanced, other):
        train_engine(net, range(1))
    other.save_checkpoint(str(folder), tag="balanced")
    balanced.load_checkpoint(str(folder), tag="without")
    begins_anew = not any(map(torch.any, biases(balanced.module)))
    found = moves(balanced)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert without.load_checkpoint(str(folder), tag="balanced", load_module_strict=False)[0]
    with pytest.raises(CheckpointError) as error:
        without.load_checkpoint(str(folder), tag="balanced")
    return begins_anew, found, said.getvalue(), str(error.value)


@pytest.mark.parametrize("stage", slow_except([1, 3], 1))
def test_a_run_that_resumes_may_begin_to_balance_and_must_not_end_it_unseen(ranks2, tmp_path, stage):
    for rank, (begins_anew, found, said, error) in enumerate(ranks2.run(switched_on_and_off, tmp_path, stage)):
        assert begins_anew and max(found) < 1e-6
        assert ("experts are chosen without them" in said) == (rank == 0)
        assert 'has the biases of "load_balance_coeff"' in error and "Nothing was copied" in error


def universal_without_the_key(folder: Path) -> str:
    balanced = engine(SECTION, 1, **ADAM)
    train_engine(balanced, range(1))
    balanced.save_checkpoint(str(folder), tag="two")
    if dist.get_rank() == 0:
        to_universal(folder)
    dist.barrier()
    other = engine({"enabled": True}, 1, **ADAM, checkpoint={"load_universal": True})
    with contextlib.redirect_stdout(io.StringIO()) as said:
        other.load_checkpoint(str(folder), tag="two_universal")
    return said.getvalue()


def test_a_universal_checkpoint_without_its_biases_is_a_warning(ranks2, tmp_path):
    said, _ = ranks2.run(universal_without_the_key, tmp_path)
    assert "experts are chosen without them" in said


def exported(adapters: bool) -> list[str]:
    net = engine_of(adapted() if adapters else model(), SECTION, 1)
    train_engine(net, range(1))
    assert all(map(torch.any, biases(net.module)))
    return sorted(name for name, _ in ds_mxfp8_moe.export_weights(net))


def test_exports_leave_biases_out_where_the_model_has_no_place_for_them(ranks2):
    plain, merged = (ranks2.run(exported, adapters)[0] for adapters in (False, True))
    assert plain == merged and not any(name.endswith("expert_bias") for name in plain)


def evaluated() -> bool:
    net = engine(SECTION, 0)
    net.eval()
    net(input_ids=batch(0))
    return any(bool(buffer.any()) for name, buffer in net.module.named_buffers() if name.endswith("tokens_per_expert"))


def test_an_evaluation_counts_nothing(ranks2):
    assert ranks2.run(evaluated) == [False, False]


def signs_with_padding(side: str, checkpointing: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """How biases moved, and should have, by layer, in a step of two forwards with other padding each."""
    net = engine(SECTION, 1)
    if checkpointing:
        net.module.gradient_checkpointing_enable()
    before, layers = biases(net.module), autoep_layers(net.module)
    loads, loss = [torch.zeros(8) for _ in layers], 0.0
    for i in range(2):
        ids, kept = batch(i, size=4 + i), 2 + i + 3 * dist.get_rank()
        mask = torch.zeros_like(ids)
        mask[:, slice(kept) if side == "right" else slice(-kept, None)] = 1
        hooks = [watch_choices(layer, partial(add_load, load_E, mask.flatten() == 1))
                 for layer, load_E in zip(layers, loads, strict=True)]
        loss = loss + net(ids, mask, labels=ids.where(mask == 1, -100)).loss
        for hook in hooks:
            hook.remove()
    net.backward(loss)
    net.step()
    for load_E in loads:
        dist.all_reduce(load_E)
    return [(torch.sign(now - old), torch.sign(load_E.mean() - load_E))
            for now, old, load_E in zip(biases(net.module), before, loads, strict=True)]


@pytest.mark.parametrize("side, checkpointing", [("right", False), ("left", True)])
def test_padding_does_not_count(ranks2, side, checkpointing):
    for signs in ranks2.run(signs_with_padding, side, checkpointing):
        for found, wanted in signs:
            assert torch.equal(found, wanted) and wanted.any()


def counted_with_a_mask_of_another_form() -> tuple:
    """A mask of who attends to whom, and one that does not fit. What is counted of 32 tokens with 2 choices."""
    net = engine(SECTION, 1)
    mask = PaddingMask(net.module, autoep_layers(net.module))
    expert_TK, counts_E = torch.zeros(32, 2, dtype=torch.int64), torch.full((8, ), 8)
    found = []
    for given in (torch.zeros(2, 1, 16, 16), None, torch.zeros(2, 8), torch.zeros(2, 16)):
        mask._take(0, net.module, (given, ), {})
        found.append(mask.counts(expert_TK, counts_E).sum().item())
    return found


def test_masks_of_other_forms_leave_every_token(ranks2):
    assert ranks2.run(counted_with_a_mask_of_another_form) == [[64, 64, 64, 0]] * 2
