# SPDX-License-Identifier: Apache-2.0
"""Trainings whose experts put gradients into ZeRO's sums, against DeepSpeed's own way, bit for bit."""

from contextlib import contextmanager
from unittest import mock

import pytest
import torch

from ds_mxfp8_moe import convert
from ds_mxfp8_moe.compute.routing import Routes
from ds_mxfp8_moe.compute.sums import Sum
from ds_mxfp8_moe.engine import sums
from ds_mxfp8_moe.ffn.expert_ffn import ExpertFFN
from ds_mxfp8_moe.transport.local import Local
from tests.ranks.test_checkpoints import ADAM
from tests.ranks.test_expert_ffn import RECIPES, formula
from tests.ranks.test_steps import alone, equal, launches_are, programs
from tests.ranks.test_zero import check_equal, coalesced, each_backward, no_sync
from tests.support.autoep_models import autoep_layers, batch
from tests.support.autoep_models import engine as autoep_engine
from tests.support.models import state
from tests.support.rank_pool import reset_deepspeed_groups
from tests.support.slow import slow_except

BF16 = {"bf16": {"enabled": True}, **ADAM, "gradient_clipping": 0.1}
STEPS = 2


def forward(engine, number):
    ids = batch(number).to(engine.device)
    return engine(input_ids=ids, labels=ids).loss


def decayed(engine, number):
    """A loss that reads experts' weights, too."""
    experts = [p for layer in autoep_layers(engine.module) for p in layer.experts.parameters()]
    return forward(engine, number) + 1e-3 * sum(p.float().square().sum() for p in experts)


def twice(engine, number):
    """Two forwards before one backward."""
    return forward(engine, number) + forward(engine, number + 50)


def decayed_late(engine, number):
    """Only in the second micro-batch of the second step."""
    return (decayed if number == 3 else forward)(engine, number)


def with_gradients_of_inputs(engine, number):
    """torch.autograd.grad runs the experts' backward, and keeps its gradients from the parameters."""
    x = engine.module.get_input_embeddings()(batch(number)).detach().requires_grad_()
    loss = engine.module(inputs_embeds=x).logits.float().square().mean()
    torch.autograd.grad(loss, [x, *autoep_layers(engine.module)[0].experts.parameters()])
    return forward(engine, number)


LOSSES = {function.__name__: function for function in (forward, decayed, twice, decayed_late,
                                                      with_gradients_of_inputs)}


@contextmanager
def answers():
    """Notes for each gradient of an expert weight whether it went to a sum, and whether it began it."""
    noted, plain = [], sums.Sums.sum_of

    def sum_of(self, optimizer, *args):
        answer = plain(self, optimizer, *args)
        noted.append(answer and answer.begun)
        return answer

    with mock.patch.object(sums.Sums, "sum_of", sum_of):
        yield noted


def trained(batched, stage, ep_size, micro, loss="forward", hook=False, checkpointing=None, config=(), section=(),
            **changes):
    """Losses, weights, the optimizer's state; and what `answers` noted in each micro-batch."""
    reset_deepspeed_groups()
    section = {"enabled": True, "batch_gradients": batched, **dict(section)}
    model = {"dtype": torch.bfloat16, **changes.pop("model", {})}
    engine = autoep_engine(section, stage, ep_size, model_changes=model, gradient_accumulation_steps=micro,
                           **{**BF16, **dict(config)}, **changes)
    if checkpointing is not None:
        engine.module.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    records, seen, noted = [], [], []
    if hook:
        w1, w2, w3 = autoep_layers(engine.module)[0].experts.parameters()
        w1.register_hook(lambda grad: seen.append(grad.clone()))
        w2.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    for number in range(STEPS * micro):
        with answers() as found:
            value = LOSSES[loss](engine, number)
            engine.backward(value)
        noted.append(found)
        engine.step()
        records.append((value.item(), engine.get_global_grad_norm()))
    end = {name: p.detach().cpu().clone() for name, p in engine.module.named_parameters()}
    found = {name: x.cpu() for name, x in state(engine).items()} | {f"seen {i}": x for i, x in enumerate(seen)}
    mixed = len(engine.optimizer.mxfp8_batching.sums.mixed) if batched else 0
    engine.destroy()
    return (records, end, found), noted, mixed


def both(*args, **kwargs):
    (plain, *_), (own, noted, mixed) = (trained(batched, *args, **kwargs) for batched in (False, True))
    return (plain, own), noted, mixed


def check(results, answers_of_micro_batches, mixed=0):
    """Equal bits; and what `answers` must note in the micro-batches of each step."""
    check_equal([pair for pair, *_ in results])
    for _, noted, found in results:
        assert noted == answers_of_micro_batches * STEPS
        assert found == mixed


WEIGHTS = 6  # of two layers


def expected(micro, weights=WEIGHTS, others=()):
    return [[*others, *[False] * weights]] + [[*others, *[True] * weights]] * (micro - 1)


@pytest.mark.parametrize("stage, micro, family", slow_except(
    [(stage, micro, family) for stage in (1, 2) for micro in (1, 3) for family in ("qwen3_moe", "gpt_oss")],
    (1, 3, "qwen3_moe"), (2, 3, "gpt_oss")))
def test_gradients_go_to_the_sums(ranks2, stage, micro, family):
    usual = [[None] * WEIGHTS]  # ZeRO-1 begins the sum of a single micro-batch later
    check(ranks2.run(both, stage, 2, micro, family=family), usual if (stage, micro) == (1, 1) else expected(micro))


# Two micro-batches. Weights with gradients from elsewhere go the usual way, after the first pass or from the start.
TWO = expected(2)


@pytest.mark.parametrize("stage, loss", slow_except(
    [(stage, loss) for stage in (1, 2) for loss in ("decayed", "twice", "with_gradients_of_inputs")],
    (2, "decayed"), (1, "twice"), (2, "with_gradients_of_inputs")))
def test_gradients_from_elsewhere(ranks2, stage, loss):
    results = ranks2.run(both, stage, 2, 2, loss)
    check_equal([pair for pair, *_ in results])
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
    check_equal([pair for pair, *_ in results])
    for ((_, _, found), _), noted, _ in results:
        assert sum(name.startswith("seen") for name in found) == 2 * 2 * STEPS
        assert [sorted(map(str, micro)) for micro in noted] == [["False"] * 4 + ["None"] * 2,
                                                                ["None"] * 2 + ["True"] * 4] * STEPS


@pytest.mark.parametrize("stage, reentrant", slow_except([(stage, way) for stage in (1, 2) for way in (True, False)],
                                                         (2, False)))
def test_activation_checkpointing(ranks2, stage, reentrant):
    check(ranks2.run(both, stage, 2, 2, checkpointing=reentrant), TWO)


@pytest.mark.parametrize("frozen, weights", [(r".*0\.mlp\.experts\.gate_up_proj", 4), (".*experts.*", 0)])
def test_frozen_weights(ranks2, frozen, weights):
    check(ranks2.run(both, 2, 2, 2, frozen=frozen), expected(2, weights))


OVERLAP = {"zero_optimization": {"overlap_comm": True}}


@pytest.mark.parametrize("stage", slow_except([1, 2], 1))
def test_overlapped_communication(ranks2, stage):
    check(ranks2.run(both, stage, 2, 2, config=OVERLAP), TWO)


@pytest.mark.parametrize("ep_size, config", [(1, {}), (2, {"data_types": {"grad_accum_dtype": "fp32"}})],
                         ids=["shared-experts", "float32-sums"])
def test_the_usual_way(ranks2, ep_size, config):
    """Of experts that several ranks have, and of sums in another dtype."""
    check(ranks2.run(both, 2, ep_size, 2, config=config), [[None] * WEIGHTS] * 2)


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
    check_equal(ranks2.run(several_passes, stage, way, config))


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
    check_equal(ranks2.run(interrupted, what))


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
    check_equal(ranks2.run(both_failing, stage))


def both_failing(stage):
    return [failing(batched, stage) for batched in (False, True)]


def step_by_step(recipe, name, device="cpu"):
    """Outputs, sums and gradients of calls whose sums lie elsewhere each time. The sum of `gate` has no begun one
    beside it in the last call, which therefore adds both by themselves."""
    (x, g, routes, weights), found = alone(name), []
    weights = {role: torch.nn.Parameter(torch.stack(values).detach().bfloat16().to(device))
               for role, values in weights.items()}
    routes = Routes(expert_TK=routes.expert_TK.to(device), weight_TK=routes.weight_TK.detach().to(device),
                    num_experts=routes.num_experts)
    for call in range(6):
        size = sum(w.numel() for w in weights.values()) + 8 * call
        flat = torch.full((size, ), float(call), dtype=torch.bfloat16, device=device)
        parts, start = {}, 0
        for weight in weights.values():
            parts[weight] = flat[start:start + weight.numel()].view(weight.shape)
            start += weight.numel()

        def sum_of(weight, node, call=call, parts=parts):
            odd = call == 5 and weight is weights.get("gate")
            return None if odd else Sum(parts[weight].detach(), call > 1, 0.5)

        ffn = ExpertFFN(formula(name), RECIPES[recipe], Local(), len(weights["up"]), sum_of=sum_of)
        for weight in weights.values():
            weight.grad = None
        given = x.to(device, copy=True).requires_grad_()
        y = ffn(given, routes, weights)
        y.backward(g.to(device))
        given_to_autograd = {role for role, w in weights.items() if w.grad is not None}
        assert given_to_autograd == (weights.keys() if call < 2 else {"gate"} & weights.keys() if call == 5 else set())
        assert call >= 2 or all(w.grad.data_ptr() == parts[w].data_ptr() for w in weights.values())
        found += [y.detach(), given.grad, flat, *(weights[role].grad for role in given_to_autograd)]
    return found


@pytest.mark.parametrize("recipe, name", [("hp-128", "swiglu"), ("mxfp8-32", "gelu"), ("bf16", "gelu")])
def test_replays_take_the_sums_of_their_own_call(one_rank, recipe, name):
    with launches_are(replayed=False):
        wanted = step_by_step(recipe, name)
    with launches_are(replayed=True):
        assert equal(step_by_step(recipe, name), wanted)
        assert len(programs()) == (4 if name == "swiglu" else 3) and None not in programs()
