# SPDX-License-Identifier: Apache-2.0
"""Trainings whose experts put gradients into ZeRO's sums, against DeepSpeed's own way, bit for bit."""


import pytest
import torch

from ds_mxfp8_moe import convert
from tests.support.autoep_models import autoep_layers, batch
from tests.support.autoep_models import engine as autoep_engine
from tests.support.models import state
from tests.support.rank_pool import reset_deepspeed_groups
from tests.support.slow import slow_except
from tests.support.steps_cases import equal, launches_are, programs
from tests.support.sums_cases import BF16, STEPS, WEIGHTS, expected, forward, step_by_step, trained
from tests.support.zero_cases import assert_same_bits_as_deepspeed, coalesced, each_backward, no_sync


def both(*args, **kwargs):
    (plain, *_), (own, noted, mixed) = (trained(batched, *args, **kwargs) for batched in (False, True))
    return (plain, own), noted, mixed


def assert_same_bits_and_answers(results, answers_of_micro_batches, mixed=0):
    """Equal bits; and what `answers` must note in the micro-batches of each step."""
    assert_same_bits_as_deepspeed([pair for pair, *_ in results])
    for _, noted, found in results:
        assert noted == answers_of_micro_batches * STEPS
        assert found == mixed


@pytest.mark.parametrize("stage, micro, family", slow_except(
    [(stage, micro, family) for stage in (1, 2) for micro in (1, 3) for family in ("qwen3_moe", "gpt_oss")],
    (1, 3, "qwen3_moe"), (2, 3, "gpt_oss")))
def test_gradients_go_to_the_sums(ranks2, stage, micro, family):
    usual = [[None] * WEIGHTS]  # ZeRO-1 begins the sum of a single micro-batch later
    wanted = usual if (stage, micro) == (1, 1) else expected(micro)
    assert_same_bits_and_answers(ranks2.run(both, stage, 2, micro, family=family), wanted)


# Two micro-batches. Weights with gradients from elsewhere go the usual way, after the first pass or from the start.
TWO = expected(2)


@pytest.mark.parametrize("stage, loss", slow_except(
    [(stage, loss) for stage in (1, 2) for loss in ("decayed", "twice", "with_gradients_of_inputs")],
    (1, "twice"), (2, "with_gradients_of_inputs")))
def test_gradients_from_elsewhere(ranks2, stage, loss):
    results = ranks2.run(both, stage, 2, 2, loss)
    assert_same_bits_as_deepspeed([pair for pair, *_ in results])
    for _, noted, mixed in results:
        first, *later = noted
        if loss == "with_gradients_of_inputs":
            others = [None] * WEIGHTS
            assert noted == [others + micro for micro in TWO] * STEPS and mixed == 0
        else:
            assert first.count(False) == WEIGHTS == mixed
            assert not any(True in micro for micro in later)


@pytest.mark.parametrize("stage", slow_except([1, 2], 2))
def test_gradients_that_begin_to_come_from_elsewhere(ranks2, stage):
    """One rounding more, in one micro-batch."""
    for ((records, end, _), (own_records, own_end, _)), _, mixed in ranks2.run(both, stage, 2, 2, "decayed_late"):
        assert [loss for loss, _ in own_records] == pytest.approx([loss for loss, _ in records], rel=1e-2)
        assert records[:2] == own_records[:2]
        for name, weight in end.items():
            torch.testing.assert_close(own_end[name], weight, rtol=2e-2, atol=2e-3)
        assert mixed == (WEIGHTS if stage == 2 else 0)


@pytest.mark.parametrize("stage", slow_except([1, 2], 2))
def test_hooks_of_users_see_the_gradient_of_one_pass(ranks2, stage):
    """Weights with hooks, here w1 and w2 of the first layer, go the usual way."""
    results = ranks2.run(both, stage, 2, 2, hook=True)
    assert_same_bits_as_deepspeed([pair for pair, *_ in results])
    for ((_, _, found), _), noted, _ in results:
        assert sum(name.startswith("seen") for name in found) == 2 * 2 * STEPS
        assert [sorted(map(str, micro)) for micro in noted] == [["False"] * 4 + ["None"] * 2,
                                                                ["None"] * 2 + ["True"] * 4] * STEPS


@pytest.mark.parametrize("stage, reentrant", slow_except([(stage, way) for stage in (1, 2) for way in (True, False)],
                                                         (2, False)))
def test_activation_checkpointing(ranks2, stage, reentrant):
    assert_same_bits_and_answers(ranks2.run(both, stage, 2, 2, checkpointing=reentrant), TWO)


@pytest.mark.parametrize("frozen, weights", slow_except(
    [(r".*0\.mlp\.experts\.gate_up_proj", 4), (".*experts.*", 0)], (r".*0\.mlp\.experts\.gate_up_proj", 4)))
def test_frozen_weights(ranks2, frozen, weights):
    assert_same_bits_and_answers(ranks2.run(both, 2, 2, 2, frozen=frozen), expected(2, weights))


OVERLAP = {"zero_optimization": {"overlap_comm": True}}


@pytest.mark.parametrize("stage", slow_except([1, 2], 1))
def test_overlapped_communication(ranks2, stage):
    assert_same_bits_and_answers(ranks2.run(both, stage, 2, 2, config=OVERLAP), TWO)


@pytest.mark.parametrize("ep_size, config", [(1, {}), (2, {"data_types": {"grad_accum_dtype": "fp32"}})],
                         ids=["shared-experts", "float32-sums"])
def test_the_usual_way(ranks2, ep_size, config):
    """Of experts that several ranks have, and of sums in another dtype."""
    assert_same_bits_and_answers(ranks2.run(both, 2, ep_size, 2, config=config), [[None] * WEIGHTS] * 2)


def several_passes(stage, way, config):
    """Two backward passes before each step, in the ways of test_zero.py."""
    results = []
    for batched in (False, True):
        reset_deepspeed_groups()
        engine = autoep_engine({"enabled": True, "batch_gradients": batched}, stage, 2,
                               model_changes={"dtype": torch.bfloat16}, **{**BF16, **config})
        for number in range(0, 2 * STEPS, 2):
            with way(engine):
                engine.backward(forward(engine, number))
                if way is coalesced:
                    engine.backward(forward(engine, number + 1))
            if way is not coalesced:
                engine.backward(forward(engine, number + 1))
            engine.step()
        results.append(([], {name: p.detach().clone() for name, p in engine.module.named_parameters()}, state(engine)))
        engine.destroy()
    return results


@pytest.mark.parametrize("stage, way, name", slow_except(
    [(1, each_backward, "managed"), (1, no_sync, "managed"), (2, coalesced, "managed"), (1, coalesced, "managed"),
     (1, each_backward, "unmanaged"), (2, each_backward, "unmanaged")], (1, no_sync, "managed")))
def test_several_backward_passes_before_a_step(ranks2, stage, way, name):
    config = {} if name == "managed" else {"managed_gradient_accumulation": False, "gradient_accumulation_steps": 2}
    assert_same_bits_as_deepspeed(ranks2.run(several_passes, stage, way, config))


def interrupted(what, stage=1):
    """Something happens between two micro-batches, the second of which does without the experts if they dropped
    theirs."""
    results = []
    for batched in (False, True):
        reset_deepspeed_groups()
        section = {"enabled": True, "batch_gradients": batched}
        engine = autoep_engine(section, stage, 2, model_changes={"dtype": torch.bfloat16},
                               gradient_accumulation_steps=2, **BF16)
        layers = autoep_layers(engine.module)
        for number in range(0, 2 * STEPS, 2):
            engine.backward(forward(engine, number))
            engine.step()
            if what == "dropped":
                for p in layers[0].experts.parameters():
                    p.grad = None
                net = engine.module
                engine.backward(net.lm_head(net.get_input_embeddings()(batch(number))).float().square().mean())
            else:
                convert(engine, {"mxfp8_moe": {**section, **what}})
                engine.backward(forward(engine, number + 1))
            engine.step()
        end = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
        results.append(([], end, state(engine)))
        engine.destroy()
    return results


@pytest.mark.parametrize("what", ["dropped", {"metrics": {"every": 100}}, {"batch_gradients": False}],
                         ids=["gradients-dropped", "converted-again", "switched-off"])
def test_between_two_micro_batches(ranks2, what):
    assert_same_bits_as_deepspeed(ranks2.run(interrupted, what))


def failing(batched, stage):
    """What follows an error in the middle of the second of two backward passes."""
    reset_deepspeed_groups()
    engine = autoep_engine({"enabled": True, "batch_gradients": batched}, stage, 2,
                           model_changes={"dtype": torch.bfloat16}, gradient_accumulation_steps=3, **BF16)
    engine.backward(forward(engine, 0))
    engine.step()

    def fail(grad):
        raise ValueError("an error of the user")

    def watch(module, args, output):
        output.register_hook(fail)

    embedded = engine.module.get_input_embeddings().register_forward_hook(watch)
    with pytest.raises(ValueError, match="of the user"):
        engine.backward(forward(engine, 1))
    embedded.remove()
    records = []
    try:
        for number in (2, 3, 4, 5):
            loss = forward(engine, number)
            engine.backward(loss)
            engine.step()
            records.append(loss.item())
        end = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
        return records, end, state(engine)
    except AssertionError as error:
        return str(error).partition("computed twice")[1:2], {}, {}
    finally:
        engine.destroy()


@pytest.mark.parametrize("stage", slow_except([1, 2], 2))
def test_an_error_in_the_middle_has_the_same_consequences(ranks2, stage):
    """ZeRO-2 refuses to go on. ZeRO-1 keeps what the failed pass has added."""
    assert_same_bits_as_deepspeed(ranks2.run(both_failing, stage))


def both_failing(stage):
    return [failing(batched, stage) for batched in (False, True)]


@pytest.mark.parametrize("recipe, name", [("hp-128", "swiglu"), ("mxfp8-32", "gelu"), ("bf16", "gelu")])
def test_replays_take_the_sums_of_their_own_call(one_rank, recipe, name):
    with launches_are(replayed=False):
        wanted = step_by_step(recipe, name)
    with launches_are(replayed=True):
        assert equal(step_by_step(recipe, name), wanted)
        assert len(programs()) == (4 if name == "swiglu" else 3) and None not in programs()
