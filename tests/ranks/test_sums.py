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


USUAL = [[None] * WEIGHTS]  # ZeRO-1 begins the sum of a single micro-batch later
TWO = expected(2)
FP32_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}
OVERLAP = {"zero_optimization": {"overlap_comm": True}}
# Stage, ep_size, micro-batches; what else `trained` takes; and the answers.
CASES = {
    **{f"{family}, zero{stage}, {micro} micro-batches":
       ((stage, 2, micro), {"family": family}, USUAL if (stage, micro) == (1, 1) else expected(micro))
       for stage in (1, 2) for micro in (1, 3) for family in ("qwen3_moe", "gpt_oss")},
    **{f"zero{stage}, recomputed, {'' if reentrant else 'not '}reentrant":
       ((stage, 2, 2), {"checkpointing": reentrant}, TWO) for stage in (1, 2) for reentrant in (True, False)},
    "one weight frozen": ((2, 2, 2), {"frozen": r".*0\.mlp\.experts\.gate_up_proj"}, expected(2, 4)),
    "experts frozen": ((2, 2, 2), {"frozen": ".*experts.*"}, expected(2, 0)),
    "zero1, overlapped": ((1, 2, 2), {"config": OVERLAP}, TWO),
    "zero2, overlapped": ((2, 2, 2), {"config": OVERLAP}, TWO),
    # The usual way: of experts that several ranks have, and of sums in another dtype.
    "experts on every rank": ((2, 1, 2), {}, USUAL * 2),
    "float32 sums": ((2, 2, 2), {"config": FP32_SUMS}, USUAL * 2),
}


@pytest.mark.parametrize("name", slow_except(
    CASES, "gpt_oss, zero2, 3 micro-batches", "one weight frozen",
    "zero2, recomputed, not reentrant", "zero1, overlapped", "experts on every rank", "float32 sums"))
def test_gradients_go_to_the_sums(ranks2, name):
    args, keys, answers = CASES[name]
    assert_same_bits_and_answers(ranks2.run(both, *args, **keys), answers)


# Weights with gradients from elsewhere go the usual way, after the first pass or from the start.
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


def several_passes(stage, way, config):
    """Two backward passes before each step."""
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


UNMANAGED = {"managed_gradient_accumulation": False, "gradient_accumulation_steps": 2}
CONFIGS = {"managed": {}, "float32": FP32_SUMS, "unmanaged": UNMANAGED, "unmanaged float32": UNMANAGED | FP32_SUMS}


@pytest.mark.parametrize("stage, way, config", slow_except(
    [(1, each_backward, "managed"), (1, no_sync, "managed"), (2, coalesced, "managed"), (1, coalesced, "managed"),
     (2, each_backward, "float32"), (1, each_backward, "unmanaged"), (2, each_backward, "unmanaged"),
     (2, each_backward, "unmanaged float32")], (1, no_sync, "managed"), (2, coalesced, "managed")))
def test_several_backward_passes_before_a_step(ranks2, stage, way, config):
    assert_same_bits_as_deepspeed(ranks2.run(several_passes, stage, way, CONFIGS[config]))


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
