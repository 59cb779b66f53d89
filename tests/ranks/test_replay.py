# SPDX-License-Identifier: Apache-2.0
"""Recording and replaying routes: the same bits at once, the model's own rule elsewhere, errors before the forward."""

from contextlib import nullcontext
from functools import partial
from unittest import mock

import deepspeed.comm as dist
import pytest
import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import ds_mxfp8_moe
from ds_mxfp8_moe import record_routes, replay_routes
from ds_mxfp8_moe.routing.routes import routes_of
from ds_mxfp8_moe.transport.deadline import absence
from small_models import small_model
from tests.support.autoep_models import (
    autoep_layers,
    batch,
    ds_config,
    gate_weight,
    gathered,
    router_of,
    watch_choices,
)
from tests.support.replay_cases import BF16, MXFP8, different, other_routes, outcome, set_way
from tests.support.replay_recompute_cases import recomputed
from tests.support.slow import slow_except


class Forced:
    """Inside the context, the routers of a Hugging Face model choose given experts."""

    def __init__(self, routes_TLK: torch.Tensor, num_experts: int):
        self._num_experts, self._left = num_experts, list(routes_TLK.unbind(1))
        self._topk = torch.topk
        self._patches = [mock.patch.object(torch, "topk", self.topk),
                         mock.patch.object(torch.Tensor, "topk", lambda *args, **keys: self.topk(*args, **keys))]

    def topk(self, scores, k, dim=-1, **keys):
        if scores.dim() != 2 or scores.shape[1] != self._num_experts or not self._left:
            return self._topk(scores, k, dim=dim, **keys)
        expert_TK = self._left.pop(0)
        return scores.gather(1, expert_TK), expert_TK

    def __enter__(self):
        for patch in self._patches:
            patch.start()

    def __exit__(self, *_):
        for patch in self._patches:
            patch.stop()
        assert not self._left


# DeepSeek-V2 itself gives experts outside the best groups the weight 0.
CHANGES = {"deepseek_v2": {"topk_method": "greedy"}}


def of_type(model_type: str) -> tuple:
    """What differs if a recording is replayed at once, and by how much from transformers with other experts."""
    changes = CHANGES.get(model_type, {})
    engine = ds_mxfp8_moe.initialize(model=small_model(model_type, torch.float32, **changes),
                                     config=ds_config(BF16, 0, 2))[0]
    model, ids = engine.module, batch(0)
    layers = autoep_layers(model)
    plain = outcome(model, ids)
    with record_routes(engine) as routes:
        recorded = outcome(model, ids)
    with replay_routes(engine, routes):
        replayed = outcome(model, ids)
    drifted_TLK = other_routes(layers)
    assert routes[0].shape == (*ids.shape, *drifted_TLK.shape[1:])
    assert (drifted_TLK.sort()[0] != routes[0].view_as(drifted_TLK).sort()[0]).any()
    model.eval()
    with replay_routes(engine, drifted_TLK):
        ours = outcome(model, ids)
    plain_model = small_model(model_type, torch.float32, **changes).eval()
    with Forced(drifted_TLK, layers[0].num_experts):
        own = outcome(plain_model, ids)
    errors = [float((ours["logits"] - own["logits"]).abs().max())]
    for layer in layers:
        gate = gate_weight(layer)
        name = next(name for name, p in plain_model.named_parameters() if torch.equal(p, gate))
        errors.append(float((gate.grad - own[name]).norm() / own[name].norm()))
    engine.destroy()
    return different(plain, recorded), different(plain, replayed), errors


# A softmax; a softmax of the chosen logits; groups of experts; a bias of the block; groups that mask the weights; a
# router in the decoder layer that scales the weights by expert; logits with a soft cap.
@pytest.mark.parametrize("model_type", slow_except(
    ["qwen3_moe", "gpt_oss", "deepseek_v3", "lfm2_moe", "deepseek_v2", "gemma4", "laguna"],
    "gpt_oss", "deepseek_v3", "gemma4"))
def test_a_given_choice_has_the_routers_own_weights(ranks2, model_type):
    for recorded, replayed, errors in ranks2.run(of_type, model_type):
        assert recorded == replayed == []
        assert max(errors) < 1e-4, errors


# ---- training, evaluation, generation ------------------------------------------------------------------------------


def trained(stage: int, ep_size: int) -> tuple:
    """Two steps of two micro-batches each, with an evaluation: plain, recorded, replayed."""
    results, recorded = [], None
    for how in ("plain", "record", "replay"):
        engine = ds_mxfp8_moe.initialize(
            model=small_model("qwen3_moe", torch.float32),
            config=ds_config(MXFP8, stage, ep_size, gradient_accumulation_steps=2))[0]
        set_way(engine.module, "reentrant" if stage == 3 else "stored")
        context = record_routes(engine) if how == "record" else nullcontext() if how == "plain" else (
            replay_routes(engine, recorded))
        with context as routes:
            losses = []
            for n in range(4):
                loss = engine(input_ids=batch(n), labels=batch(n)).loss
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
                if n == 1:
                    engine.eval()
                    losses.append(engine(input_ids=batch(9), labels=batch(9)).loss.item())
                    engine.train()
        recorded = routes if how == "record" else recorded
        results.append((losses, [gathered(p) for p in engine.module.parameters()]))
        engine.destroy()
    assert len(recorded) == 5 and recorded[1:3][0].equal(recorded[-4])
    plain, *others = results
    return [losses == plain[0] and all(map(torch.equal, weights, plain[1])) for losses, weights in others]


@pytest.mark.slow
@pytest.mark.parametrize("stage, ep_size", slow_except([(1, 1), (1, 2), (2, 2), (3, 1), (3, 2)], (3, 1)))
def test_engines_train_the_same(ranks2, stage, ep_size):
    assert ranks2.run(trained, stage, ep_size) == [[True, True]] * 2


def mixed() -> tuple:
    """Rows of -1 choose by themselves. A generation is recorded, token by token, and its routes fit the trainer's."""
    engine = ds_mxfp8_moe.initialize(model=small_model("qwen3_moe", torch.float32), config=ds_config(BF16, 0, 2))[0]
    model, ids = engine.module, batch(0)
    plain = outcome(model, ids)
    with record_routes(engine) as routes:
        outcome(model, ids)
    part = routes[0].long()
    part[torch.rand(part.shape[:-1], generator=torch.Generator().manual_seed(1)) < 0.5] = -1
    with replay_routes(engine, part.numpy()):
        found = different(plain, outcome(model, ids))
    model.eval()
    with torch.no_grad(), record_routes(engine) as steps:
        text = model.generate(ids, max_new_tokens=5, min_new_tokens=5, do_sample=False)
    rollout = torch.cat(list(steps), dim=1)  # of all tokens but the last
    given = ds_mxfp8_moe.pad_routes(rollout, torch.ones_like(text))
    with torch.no_grad(), record_routes(engine) as again, replay_routes(engine, given):
        model(text)
    return found, [step.shape[1] for step in steps], torch.equal(again[0][:, :-1], rollout), int(again[0].min())


def test_tokens_without_routes_and_generations(ranks2):
    for found, lengths, same, least in ranks2.run(mixed):
        assert found == [] and lengths == [16, 1, 1, 1, 1] and same and least == 0


def test_pad_routes():
    routes = [torch.arange(6).view(3, 1, 2).numpy(), torch.full((1, 1, 2), 7, dtype=torch.int16)]
    padded = ds_mxfp8_moe.pad_routes(routes, torch.tensor([[0, 1, 1, 1, 1], [1, 1, 0, 0, 0]]))
    assert padded[..., 0, 0].tolist() == [[-1, 0, 2, 4, -1], [7, -1, -1, -1, -1]]
    with pytest.raises(ValueError, match="sequence 0 has 3 routes and 2 tokens"):
        ds_mxfp8_moe.pad_routes(routes, torch.tensor([[1, 1], [1, 1]]))
    with pytest.raises(ValueError, match="routes of 2 sequences, and the batch has 1"):
        ds_mxfp8_moe.pad_routes(routes, torch.ones(1, 5))


# ---- recomputation -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_recomputations_choose_what_their_forward_chose(ranks2):
    assert ranks2.run(recomputed, "qwen3_moe") == [[], []]


def recomputed_selectively() -> list[str]:
    """What differs where a forward is recorded and replayed, in a model whose shared experts come after the others."""
    net = small_model("deepseek_v3", torch.float32, attn_implementation="eager")
    engine = ds_mxfp8_moe.initialize(model=net, config=ds_config(MXFP8, 0, 2))[0]
    kept = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    net.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False, "context_fn": kept})
    plain = outcome(net, batch(0))
    with record_routes(engine) as recorded:
        live = outcome(net, batch(0))
    with replay_routes(engine, recorded):
        again = outcome(net, batch(0))
    return different(plain, live) + different(live, again)


def test_selective_checkpointing_recomputes_with_the_same_operators(ranks2):
    assert ranks2.run(recomputed_selectively) == [[], []]


def recomputed_and_compiled() -> list[str]:
    """What differs between gradients of a compiled model and of the same one before, with other routes and at once."""
    net = small_model("qwen3_moe", torch.float32, attn_implementation="eager")
    engine = ds_mxfp8_moe.initialize(model=net, config=ds_config(MXFP8, 0, 2))[0]
    routes = other_routes(autoep_layers(net))
    with replay_routes(engine, routes):
        plain = outcome(net, batch(0))
    set_way(net, "non-reentrant")
    net.compile(backend="aot_eager")
    with replay_routes(engine, routes):
        replayed = outcome(net, batch(0))
    with record_routes(engine) as recorded:
        live = outcome(net, batch(0))
    with replay_routes(engine, recorded):
        again = outcome(net, batch(0))
    return [*different(live, again),
            *(name for name in plain if not torch.allclose(plain[name], replayed[name], atol=1e-6))]


@pytest.mark.slow
def test_compiled_models(ranks2):
    assert ranks2.run(recomputed_and_compiled, seconds=240) == [[], []]


def changed_between() -> list[bool]:
    """Whether layers choose the same again, although their routers have changed since the forward."""
    engine = ds_mxfp8_moe.initialize(model=small_model("qwen3_moe", torch.float32), config=ds_config(MXFP8, 0, 2))[0]
    set_way(engine.module, "reentrant")
    layers, chosen = autoep_layers(engine.module), []
    for layer in layers:
        watch_choices(layer, chosen.append)
    with record_routes(engine):
        loss = engine.module(input_ids=batch(0), labels=batch(0)).loss
    for layer in layers:
        gate_weight(layer).data.neg_()
    loss.backward()
    return [torch.equal(chosen[0], chosen[3]), torch.equal(chosen[1], chosen[2])]


def test_a_recomputation_does_not_choose_anew(ranks2):
    assert ranks2.run(changed_between) == [[True, True]] * 2


def never_hooked() -> int:
    """How many forwards are remembered where nothing tells when a step ends. Recomputations that are late fail."""
    engine = ds_mxfp8_moe.initialize(model=small_model("qwen3_moe", torch.float32), config=ds_config(MXFP8, 0, 2))[0]
    set_way(engine.module, "reentrant")
    part = engine.module.model

    def loss() -> torch.Tensor:
        return engine.module(input_ids=batch(0), labels=batch(0)).loss

    losses = [loss()]
    for _ in range(4):
        with record_routes(part):
            losses.append(loss())
    losses.append(loss())
    for n in (0, 4, 5):
        losses[n].backward()
    for n in (1, 3):
        with pytest.raises(RuntimeError, match="is recomputed after the routes of its forward were forgotten"):
            losses[n].backward()
    return len(routes_of(part)._remembered)


def test_a_part_of_a_model_which_nothing_tells_of_steps(ranks2):
    assert ranks2.run(never_hooked) == [5, 5]  # forgotten, live, live, the last forward, live


# ---- errors --------------------------------------------------------------------------------------------------------

GOOD = torch.tensor([0, 3]).expand(32, 2, 2)


def with_row(*row: int) -> torch.Tensor:
    routes = GOOD.clone()
    routes[5, 1] = torch.tensor(row)
    return routes


WRONG = {
    r"the routes are torch.int64 of shape \(32, 1, 2\); expected integers of shape \[..., 2, 2\]: 2 MoE layers, dense "
    "layers not counted, and 2 choices": GOOD[:, :1],
    r"of shape \(32, 2, 1\)": GOOD[..., :1],
    r"of shape \(2, 2\)": GOOD[0],
    "the routes are torch.float32": GOOD.float(),
    r"token 5 has experts \[0, 8\] in model.layers.1.mlp; expected 2 different ones of 0 to 7, or -1 in all 2":
    with_row(0, 8),
    r"has experts \[-2, 0\]": with_row(-2, 0),
    r"has experts \[-1, 0\]": with_row(-1, 0),
    r"has experts \[4, 4\]": with_row(4, 4),
}


UNREADABLE = {
    "rank 1: forward 0: Could not infer dtype of NoneType": None,
    "rank 1: forward 0: Could not infer dtype of generator": (one for one in [GOOD]),
    "rank 1: forward 1: expected sequence of length 1": [GOOD, [[0], [0, 1]]],
    r"the ranks, in their order, give routes of \[1, 3\] forwards; expected as many": [GOOD] * 3,
}


def wrong_on_rank_1() -> None:
    engine = ds_mxfp8_moe.initialize(model=small_model("qwen3_moe", torch.float32), config=ds_config(BF16, 0, 2))[0]
    model, ids = engine.module, batch(0)
    for told, routes in WRONG.items():
        with pytest.raises(ValueError, match="replay_routes: rank 1: forward 1: .*" + told), \
                replay_routes(engine, [GOOD, routes if dist.get_rank() else GOOD]):
            raise AssertionError("the forward began")
    for told, routes in UNREADABLE.items():
        with pytest.raises(ValueError, match="replay_routes: " + told), \
                replay_routes(engine, routes if dist.get_rank() else GOOD):
            raise AssertionError("the forward began")
    with replay_routes(engine, GOOD), pytest.raises(ValueError, match=r"mlp: the routes to replay are for 32 tokens; "
                                                                      r"expected 16, of hidden states \[1, 16, H\]"):
        model(ids[:1])
    with replay_routes(engine, GOOD), pytest.raises(RuntimeError, match="there are more forwards than routes"):
        model(ids)
        model(ids)
    with pytest.raises(RuntimeError, match="2 of the routes of 3 forwards were not used"), \
            replay_routes(engine, [GOOD] * 3):
        model(ids)
    assert "2 of the routes of 3 forwards" in absence(dist.get_rank())  # what peers would read
    layer = autoep_layers(model)[0]
    with record_routes(engine), pytest.raises(RuntimeError, match="mlp was called outside its model's forward"):
        layer(torch.zeros(1, 1, 64))
    with record_routes(engine), pytest.raises(RuntimeError, match="inside another `with` of it"), record_routes(model):
        pass
    with record_routes(engine) as routes:
        with pytest.raises(ZeroDivisionError), mock.patch.object(model.model.layers[1], "forward",
                                                                 lambda *args, **keys: 1 / 0):
            model(ids)
        hook = router_of(autoep_layers(model)[1]).register_forward_pre_hook(lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(ids)
        hook.remove()
        model(ids)
        for n in range(2):
            with pytest.raises(RuntimeError, match=f"forward {n} are incomplete: it did not reach model.layers.1.mlp"):
                routes[n]
    assert routes[2].shape == (2, 16, 2, 2)
    block = autoep_layers(model)[1]
    hooks = [block.register_forward_pre_hook(lambda block, inputs: (inputs[0][:, :8].contiguous(), )),
             block.register_forward_hook(lambda block, inputs, y: torch.cat([y, y], dim=1))]
    with record_routes(engine) as of_other_tokens:
        model(ids)
    for hook in hooks:
        hook.remove()
    with pytest.raises(RuntimeError, match="layers.0.mlp got 32, and model.layers.1.mlp got 16. Record a block"):
        of_other_tokens[0]
    with pytest.raises(ValueError, match="replay_routes: rank 1: forward 0: the routes of forward 0 are incomplete"), \
            replay_routes(engine, routes if dist.get_rank() else [GOOD] * 3):
        raise AssertionError("the forward began")
    mine = model if dist.get_rank() else torch.nn.Linear(1, 1)
    with pytest.raises(RuntimeError, match="replay_routes: rank 0: the model has no layers"), \
            replay_routes(mine, GOOD):
        raise AssertionError("the forward began")


def test_errors_are_raised_before_the_forward_on_every_rank(ranks2):
    ranks2.run(wrong_on_rank_1)
