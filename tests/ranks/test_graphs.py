# SPDX-License-Identifier: Apache-2.0
"""`graph_attention`: attention in CUDA graphs trains as attention without. Here recorded operators stand in for graphs
(recorded_graphs.py). tests/gpu/test_graphs_gpu.py has real ones."""

import gc
from copy import deepcopy
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeAttention

import ds_mxfp8_moe
from ds_mxfp8_moe.compat import patches
from ds_mxfp8_moe.engine import graphed, graphs
from tests.support.autoep_models import FAMILIES, ds_config, engine, model
from tests.support.engine_cases import enabled
from tests.support.graph_cases import (
    BF16,
    SLIDING,
    attention_kept,
    both,
    checkpointed,
    checkpointed_on_the_host,
    early,
    evaluation,
    half_checkpointed,
    inference_tensors,
    kept_losses,
    kept_outputs,
    lengths,
    loss_of,
    no_longer_checkpointed,
    padded,
    pairs,
    plainly,
    reentrant,
    same_mask,
    segments,
    step,
    thrown_away,
    twice,
    uneven,
)
from tests.support.rank_pool import reset_deepspeed_groups
from tests.support.recorded_graphs import Recorded, emulated
from tests.support.slow import slow_except
from tests.support.trainers import trainer_of

CASES = [("qwen3_moe", 0, 1, {}, plainly), ("qwen3_moe", 1, 3, BF16, plainly), ("qwen3_moe", 2, 2, BF16, plainly),
         ("qwen3_moe", 1, 2, BF16, lengths), ("qwen3_moe", 1, 1, BF16, evaluation), ("qwen3_moe", 2, 1, BF16, pairs),
         ("qwen3_moe", 1, 2, BF16, thrown_away), ("qwen3_moe", 1, 2, BF16, kept_losses),
         ("qwen3_moe", 2, 1, BF16, uneven), ("deepseek_v3", 2, 1, BF16, uneven), ("qwen3_moe", 1, 1, BF16, padded),
         ("qwen3_moe", 1, 1, BF16, same_mask), ("qwen3_moe", 1, 1, BF16, inference_tensors),
         ("qwen3_moe", 1, 1, BF16, kept_outputs), ("qwen3_moe", 1, 1, BF16, early),
         ("qwen3_moe", 1, 2, BF16, checkpointed), ("qwen3_moe", 2, 2, BF16, reentrant),
         ("qwen3_moe", 1, 2, BF16, half_checkpointed),
         ("qwen3_moe", 2, 2, BF16, checkpointed_on_the_host), ("qwen3_moe", 1, 1, BF16, no_longer_checkpointed)]
# Eager attention, which gpt_oss has by default, returns its weights beside its output: no graph does.
CASES += [(family, 1, 2, BF16, plainly) for family in FAMILIES if family not in ("qwen3_moe", "gpt_oss")]
CASES = {f"{family}-zero{stage}-{steps_of}-{train.__name__}": ((train, family, stage, steps_of, dtype), {})
         for family, stage, steps_of, dtype, train in CASES}
CASES["layers-whose-masks-differ"] = (plainly, "qwen2_moe", 1, 2, BF16), SLIDING
QUICK = ("qwen3_moe-zero1-1-padded", "qwen3_moe-zero1-2-checkpointed", "qwen3_moe-zero1-2-half_checkpointed",
         "deepseek_v3-zero2-1-uneven", "layers-whose-masks-differ")


@pytest.mark.parametrize("case", slow_except(CASES, *QUICK))
def test_graphs_train_alike(ranks2, case):
    args, changes = CASES[case]
    for losses, weights, lines, replays in ranks2.run(both, *args, **changes):
        assert losses and weights
        assert replays > 0, lines
        assert all("runs in CUDA graphs" in line for line in lines)


@pytest.mark.parametrize("train", slow_except([twice, segments, attention_kept], attention_kept))
def test_two_backwards_and_checkpoints_that_need_attention_run_as_before(ranks2, train):
    for losses, weights, _, replays in ranks2.run(both, train, "qwen3_moe", 1, 1, BF16):
        assert losses and weights and not replays


def test_layers_without_gradients_stay_as_they_are(ranks2):
    first = r"model\.embed_tokens.*|model\.layers\.0\.(self_attn|input_layernorm).*"
    for losses, weights, lines, replays in ranks2.run(both, plainly, "qwen3_moe", 1, 2, BF16, frozen=first):
        assert losses and weights and replays > 0
        assert all("attention of 1 layers runs in CUDA graphs" in line for line in lines)


class ScaledAttention(Qwen3MoeAttention):
    """Computes with the forward of its base."""

    def forward(self, *args, scale: float = 0.5, **kwargs):
        output, weights = super().forward(*args, **kwargs)
        return output * scale, weights


def started_with(attention: type, on: bool):
    """An engine whose second layer has attention of this class."""
    net = model(use_cache=False)
    net.model.layers[1].self_attn.__class__ = attention
    section = {"enabled": True, "graph_attention": on}
    return ds_mxfp8_moe.initialize(model=net, config=ds_config(section, 1, 1, **BF16))[0]


def test_the_forward_of_a_base_does_not_replay(one):
    """Not even where its arguments are those of the graph, and the module's own are not."""
    losses = []
    for on in (False, True):
        with emulated():
            net = started_with(ScaledAttention, on)
            for i in range(3):
                step(net, i)
            losses.append(loss_of(net, 3, scale=0.25))
        assert Recorded.replays == on * OF_A_STEP
    assert losses[0] == losses[1]


def test_one_tensor_in_two_places_of_a_call():
    x, form = torch.zeros(2), graphed.TensorForm(torch.Size([2]), torch.float32, False)
    call, statics = graphed.Call(None, ((None, form), (None, form)), [x, x]), {}
    first, second = graphed._inputs(call, statics, False)
    assert first is not second
    assert graphed._inputs(call, statics, False) == [first, second]


def in_the_trainer(directory) -> int:
    """It passes more to a model than a loop of one's own, and switches caches off."""
    with enabled(), emulated():
        trainer_of(directory, 1, None).train()
    return Recorded.replays


def test_the_trainer_gets_graphs(ranks2, tmp_path):
    assert all(replays == 2 * OF_A_STEP for replays in ranks2.run(in_the_trainer, tmp_path))


@pytest.fixture
def one(one_rank):
    reset_deepspeed_groups()
    yield
    reset_deepspeed_groups()


def started(asked: bool | None = None, family: str = "qwen3_moe", stage: int = 1, **changes):
    section = {"enabled": True} | ({} if asked is None else {"graph_attention": asked})
    return engine(section, stage, 1, family=family, model_changes={"use_cache": False, **changes}, **BF16)


def replays_of(net, steps: int = 3) -> int:
    Recorded.replays = 0
    for i in range(steps):
        step(net, i)
    return Recorded.replays


OF_A_STEP = 2 * 2  # two layers, forward and backward


def test_without_the_key_transformers_attention_gets_graphs(one):
    with emulated():
        assert replays_of(started(None)) == OF_A_STEP  # two steps come before them
        assert replays_of(started(False)) == 0


@pytest.mark.parametrize("recomputed", [False, True])
def test_no_tensor_of_a_step_waits_for_the_garbage_collector(one, recomputed):
    """It may come many steps later, and until then they are in memory."""
    with emulated():
        net = started()
        if recomputed:
            net.module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        assert replays_of(net) > 0
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            step(net, 3)
            gc.collect()
            left = [tuple(each.shape) for each in gc.garbage if isinstance(each, torch.Tensor)]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
    assert left == []


def test_a_copy_and_changed_modules_have_no_graphs(one):
    with emulated():
        net = started()
        assert replays_of(net) > 0
        attention = net.module.model.layers[0].self_attn
        assert replays_of(net, 1) == OF_A_STEP
        with mock.patch.object(net.module.model.layers[0], "self_attn", deepcopy(attention)):
            assert replays_of(net, 1) == OF_A_STEP // 2
        hook = attention.q_proj.register_forward_hook(lambda *_: None)
        assert replays_of(net, 1) == OF_A_STEP // 2
        hook.remove()
        assert replays_of(net, 1) == OF_A_STEP
        attention.q_proj.weight.data = attention.q_proj.weight.data.clone()
        assert replays_of(net, 1) == OF_A_STEP // 2


def test_after_the_last_engine_the_class_is_as_before(one):
    with emulated():
        first, second = (started(family="qwen2_moe") for _ in range(2))  # other tests' engines have other attention
        attention = type(second.module.model.layers[0].self_attn)
        first.destroy()
        assert replays_of(second) > 0 and hasattr(attention.forward, patches._WRAPPED_BY)
        second.destroy()
        assert not hasattr(attention.forward, patches._WRAPPED_BY)


class Scaled(torch.nn.Linear):
    """Its scale is in a dict, as that of LoRA's adapters."""

    def forward(self, x):
        return super().forward(x) * self.scaling["default"]


def with_a_new_scale(attention) -> None:
    attention.o_proj.scaling["default"] = 0.5


def with_an_attribute_changed(attention) -> None:
    attention.scaling *= 0.5


def with_a_weight_replaced(attention) -> None:
    attention.q_proj.weight = torch.nn.Parameter(attention.q_proj.weight.detach() * 0.5)


def with_a_part_replaced(attention) -> None:
    attention.q_proj = torch.nn.Sequential(attention.q_proj, torch.nn.Tanh())


@pytest.mark.parametrize("change", slow_except(
    [with_a_new_scale, with_an_attribute_changed, with_a_weight_replaced, with_a_part_replaced],
    with_a_weight_replaced, with_a_part_replaced))
def test_a_changed_module_trains_alike(one, change):
    def train(net) -> list[torch.Tensor]:
        attention = net.module.model.layers[0].self_attn
        attention.o_proj.__class__, attention.o_proj.scaling = Scaled, {"default": 1.0}
        losses = [step(net, i) for i in range(3)]
        change(attention)
        return losses + [step(net, i) for i in range(2)]

    losses, weights, _, replays = both(train, "qwen3_moe", 1, 1, BF16)
    assert losses and weights
    assert replays == OF_A_STEP + 2 * OF_A_STEP // 2  # the other layer's go on


def test_graphs_come_once_hooks_are_gone(one):
    """Such as those of a step after one that was skipped."""
    with emulated():
        net = started()
        hook = net.module.model.layers[1].self_attn.k_proj.register_forward_hook(lambda *_: None)
        assert replays_of(net) == 0
        hook.remove()
        assert replays_of(net, 2) == OF_A_STEP


class Added(torch.nn.Linear):
    """The gradient of what is added is that of the output."""

    def forward(self, x, added):
        return super().forward(x) + added


def test_what_two_layers_read_gets_both_gradients(one):
    layers = [Added(8, 8), Added(8, 8)]
    leaves = [torch.randn(4, 8, requires_grad=True) for _ in range(2)]
    found = []
    with emulated():
        x, added = (leaf * 2 for leaf in leaves)
        form, _ = graphed.form_of((x, added), {})
        calls = {layer: graphed.Call(Added.forward, form, [None, None]) for layer in layers}
        replayed = graphed.captured(calls, set())
        for call in (lambda layer, *args: replayed[layer](list(args)), lambda layer, *args: layer(*args)):
            x, added = (leaf * 2 for leaf in leaves)
            for layer in layers:
                x = call(layer, x, added)
            found.append(torch.autograd.grad(x.sum(), [*leaves, *layers[0].parameters()]))
    assert all(map(torch.equal, *found))


def test_leaves_that_get_gradients_have_no_graphs():
    """They may keep a gradient as it comes, and the next one would be in the same memory."""
    leaf = torch.zeros(2, requires_grad=True)
    assert graphed.form_of((leaf, ), {}) == (None, [])
    assert graphed.form_of((leaf * 1, ), {})[0] is not None


def test_a_second_backward_is_refused(one):
    with emulated():
        net = started()
        replays_of(net)
        loss = loss_of(net, 0)
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match='"graph_attention": false'):
            loss.backward()


def with_hooks(net) -> None:
    net.module.model.layers[1].self_attn.k_proj.register_forward_hook(lambda *_: None)


def with_backward_hooks(net) -> None:
    net.module.model.layers[1].self_attn.k_proj.register_full_backward_hook(lambda *_: None)


def with_hooked_gradients(net) -> None:
    net.module.model.layers[1].self_attn.k_proj.weight.register_hook(lambda grad: grad)


def with_weights_returned(net) -> None:
    net.module.set_attn_implementation("eager")


def with_cache(net) -> None:
    net.module.config.use_cache = True


@pytest.mark.parametrize("change, reason", slow_except([
    (with_cache, "arguments of the same form"),
    (with_weights_returned, "Qwen3MoeAttention returns 2 tensors"), (with_hooks, "Qwen3MoeAttention has hooks"),
    (with_backward_hooks, "Qwen3MoeAttention has hooks"),
    (with_hooked_gradients, "Qwen3MoeAttention has hooks")],
    (with_cache, "arguments of the same form"), (with_hooks, "Qwen3MoeAttention has hooks")))
def test_what_a_graph_cannot_do_runs_as_before(one, change, reason):
    for asked in (True, None):
        lines = []
        with emulated(), mock.patch.multiple(graphs, log_on_rank_0=lines.append, PATIENCE=5):
            net = started(asked)
            change(net)
            assert replays_of(net, graphs.PATIENCE) == 0
        assert len(lines) == bool(asked) and all(reason in line for line in lines)


class Named(NamedTuple):
    output: torch.Tensor
    weights: None = None


@pytest.mark.parametrize("results, reason", [
    (Named, "returns 0 tensors"), (lambda output: (output, {}), "returns a dict beside its output")],
                         ids=["named tuple", "dict"])
def test_results_of_other_kinds_have_no_graphs(one, results, reason):
    class Attention(Qwen3MoeAttention):
        def forward(self, *args, **kwargs):
            return results(super().forward(*args, **kwargs)[0])

    lines = []
    with emulated(), mock.patch.object(graphs, "log_on_rank_0", lines.append):
        assert replays_of(started_with(Attention, True)) == 0
    assert len(lines) == 1 and f"Attention {reason}" in lines[0]


def test_an_error_of_a_capture_is_said(one):
    lines = []
    with emulated(), mock.patch.object(graphs, "log_on_rank_0", lines.append), (
            mock.patch.object(Recorded, "__call__", side_effect=RuntimeError("not while capturing"))):
        assert replays_of(started()) == 0
    assert len(lines) == 1 and "RuntimeError('not while capturing')" in lines[0]


def test_memory_decides_without_the_key(one):
    for asked in (True, None):
        lines = []
        with emulated(), mock.patch.object(graphs, "log_on_rank_0", lines.append), (
                mock.patch.object(graphs, "free_bytes", lambda: -1)):
            assert (replays_of(started(asked)) > 0) == bool(asked)
        assert ["makes them anyway" in line for line in lines] == [not asked]


@pytest.mark.parametrize("stage, on_gpu, reason", [(1, False, "need a GPU"), (3, True, "ZeRO-3 frees")])
def test_obstacles_are_said_if_asked(one, stage, on_gpu, reason):
    for asked in (True, None):
        lines = []
        with mock.patch.object(graphs, "has_graphs", lambda: on_gpu), (
                mock.patch.object(graphs, "log_on_rank_0", lines.append)):
            started(asked, stage=stage)
        assert len(lines) == bool(asked) and all(reason in line for line in lines)


@pytest.mark.slow
@pytest.mark.wide
def test_compiled_engines_compile_attention(one):
    with emulated():
        net = started(num_hidden_layers=1)  # tracing takes seconds
        net.compile(backend="eager")
        assert replays_of(net, 3) == 0
