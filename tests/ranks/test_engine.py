# SPDX-License-Identifier: Apache-2.0
"""`initialize` is deepspeed.initialize, `enable` reaches the engines that others make; both read the section."""

import argparse
import functools
import inspect
import io
import json
from contextlib import redirect_stdout
from unittest import mock

import deepspeed
import deepspeed.comm as dist
import pytest
import torch
from deepspeed import initialize as imported_before
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.sharded_moe import MOELayer
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.engine import DeepSpeedEngine

import ds_mxfp8_moe
from ds_mxfp8_moe.checkpoint.saving import MARK
from ds_mxfp8_moe.engine.moe_engine import MoEEngine
from ds_mxfp8_moe.layers.classic import MXFP8MOELayer
from ds_mxfp8_moe.layers.experts import converted_layers
from ds_mxfp8_moe.transport.deadline import answers_of_all
from ds_mxfp8_moe.transport.peer_memory import PeerMemory
from tests.support.autoep_models import converted, ds_config, gathered, model
from tests.support.autoep_models import train_engine as train
from tests.support.engine_cases import MXFP8, OTHER, Block, enabled, initializer, made_by, our_hooks
from tests.support.slow import WIDE, slow_except


def test_the_signature_is_deepspeeds():
    ours, deepspeeds = (inspect.signature(one.initialize).parameters for one in (ds_mxfp8_moe, deepspeed))
    assert list(ours) == [*deepspeeds, "others"]
    assert all(ours[name].default == parameter.default for name, parameter in deepspeeds.items())


# ---------------------------------------------------------------- the config, as it can be given


class Numbers(torch.utils.data.Dataset):

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.arange(4) + index


def given(how, directory, initialize):
    config = ds_config(MXFP8)
    path = directory / f"{how}_{dist.get_rank()}.json"
    path.write_text(json.dumps(config))
    net = model()
    if how == "positional":
        args = (None, net, None, None, Numbers(), None, 29500, None, None, None, config)
        result = initialize(*args)
    elif how == "arguments":
        args = argparse.Namespace(deepspeed_config=str(path), local_rank=dist.get_rank())
        result = initialize(args, net, training_data=Numbers())
    else:
        key, value = {"dict": ("config", config), "path": ("config", str(path)),
                      "config_params": ("config_params", config)}[how]
        result = initialize(model=net, training_data=Numbers(), **{key: value})
    engine, optimizer, loader, scheduler = result
    return (type(result) is tuple, isinstance(engine, DeepSpeedEngine), optimizer is engine.optimizer,
            loader is engine.training_dataloader and len(loader) == 2, scheduler is None, converted(engine),
            our_hooks(engine))


WAYS = ["positional", "dict", "path", "config_params", "arguments"]


def given_each_way(directory):
    """`initialize`, and after `enable` DeepSpeed's own function, imported after or before, and `initialize` again,
    which converts once."""
    results = [given(how, directory, ds_mxfp8_moe.initialize) for how in WAYS]
    with enabled(times=2):
        results += [given(how, directory, deepspeed.initialize) for how in WAYS]
        results.append(given("dict", directory, imported_before))
        with redirect_stdout(io.StringIO()) as out:
            results.append(given("dict", directory, ds_mxfp8_moe.initialize))
    assert out.getvalue().count("2 of 2 MoE layers converted") == (dist.get_rank() == 0)
    return results


def test_takes_and_returns_what_deepspeed_does(ranks2, tmp_path):
    assert ranks2.run(given_each_way, tmp_path) == [[(True, True, True, True, True, 2, 0)] * (2 * len(WAYS) + 2)] * 2


# ---------------------------------------------------------------- what every front does, and undoes


def settled_before_steps(front):
    settled, engine = [], made_by(front, MXFP8)
    if front == "initialize":
        ds_mxfp8_moe.convert(engine, MXFP8)
    with mock.patch.object(PeerMemory, "wait_and_check_all", lambda: settled.append(engine.global_steps)):
        train(engine, range(2))
    return settled


@pytest.mark.parametrize("front", ["initialize", "enable", "convert"])
def test_exchanges_are_settled_before_the_optimizer_uses_their_results(ranks2, front):
    """With capacity_factor the host does not wait for them: an overflow would else train on what was dropped."""
    assert ranks2.run(settled_before_steps, front) == [[0, 1]] * 2


def waits_and_threads(section, timers) -> tuple[int, set[bool]]:
    """How often DeepSpeed's timer waits for the device in a step after the first two, which it does not time; and
    whether nodes of backward may run in other threads."""
    engine, threads = made_by("initialize", section, timers=timers), set()
    engine.module.lm_head.weight.register_hook(lambda grad: threads.add(torch._C._is_multithreading_enabled()))
    train(engine, range(2))
    with mock.patch.object(type(get_accelerator()), "synchronize") as waits:
        train(engine, [2])
    return waits.call_count, threads


@pytest.mark.parametrize("section, timers, waits, threads", [
    (MXFP8, {}, 0, False), (MXFP8, {"throughput": {"synchronized": True}}, 2, False), (None, {}, 2, True)])
def test_the_host_neither_waits_for_the_device_nor_changes_threads(ranks2, section, timers, waits, threads):
    assert ranks2.run(waits_and_threads, section, timers) == [(waits, {threads})] * 2


def ours_in(engine) -> list[str]:
    """What of ours acts on an engine's optimizer, weights and checkpoints, and whether it saves whole models."""
    kept = [layer for layer in converted_layers(engine.module) if layer.mxfp8_kept is not None]
    found = {"step hook": engine.basic_optimizer._optimizer_step_post_hooks, "kept weights": kept,
             "checkpoints": engine._mxfp8.checkpoints, "whole models": MARK in vars(engine)}
    return [name for name, one in found.items() if one]


def before_and_after_destroy(front, stage) -> tuple[bool, list[str], list[str]]:
    """Whether the engine is of a class that is DeepSpeed's own, too. What of ours is there before and after."""
    engine = made_by(front, {"enabled": True, "keep_quantized_weights": True}, stage=stage)
    before = ours_in(engine)
    for _ in range(2):
        engine.destroy()
    return isinstance(engine, deepspeed.DeepSpeedEngine) and isinstance(engine, MoEEngine), before, ours_in(engine)


@pytest.mark.parametrize("front, stage", [("initialize", 1), ("convert", 1), ("enable", 3)])
def test_an_engine_that_is_destroyed_is_deepspeeds_but_for_saving(ranks2, front, stage):
    kept = [] if stage == 3 else ["step hook", "kept weights"]
    for kind, before, after in ranks2.run(before_and_after_destroy, front, stage):
        assert kind and before == [*kept, "checkpoints", "whole models"] and after == ["whole models"]


# ---------------------------------------------------------------- models that are no plain models


def compiled(front, whole: bool) -> tuple:
    """The loss of a step; converted layers; whether graphs were compiled.
    `whole`: not the language model's head alone."""
    torch._dynamo.reset()
    graphs, net = [], model(num_hidden_layers=1)
    if not whole:  # to trace transformers takes ten seconds
        net.model.forward = torch.compiler.disable(net.model.forward)

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    given = net if front == "plain" else torch.compile(net, backend=backend)
    with initializer(front == "enable") as initialize:
        engine = initialize(model=given, config=ds_config(MXFP8))[0]
    return *train(engine, [0]), converted(engine), len(graphs) > 0


@pytest.mark.parametrize("front, whole", slow_except([("initialize", False), ("enable", True)], ("initialize", False)))
def test_a_model_that_torch_compile_returned_trains_compiled(ranks2, front, whole):
    for plain, ours in zip(ranks2.run(compiled, "plain", whole), ranks2.run(compiled, front, whole), strict=True):
        assert plain[1:] == (1, False) and ours[1:] == (1, True)
        assert ours[0] == pytest.approx(plain[0], rel=1e-5)


# ---------------------------------------------------------------- off, and two at a time


def plain_and_off(stage):
    def run(initialize, section):
        return train(initialize(model=model(), config=ds_config(section, stage))[0], range(2))

    plain = run(deepspeed.initialize, None)
    results = [run(ds_mxfp8_moe.initialize, section) for section in (None, {"enabled": False}, {"recipe": "mxfp8"})]
    with enabled():
        results.append(run(deepspeed.initialize, {"enabled": False}))
    return plain, results


@pytest.mark.parametrize("stage", [0, 2])
def test_switched_off_it_is_deepspeed_to_the_bit(ranks2, stage):
    for plain, results in ranks2.run(plain_and_off, stage):
        assert all(losses == plain for losses in results)


def several_engines():
    kept = {"enabled": True, "keep_quantized_weights": True}
    sections = [kept, {**kept, "recipe": "mxfp8"}, OTHER, {"enabled": False}]

    def build(section):
        return ds_mxfp8_moe.initialize(model=model(), config=ds_config(section, 1, gradient_accumulation_steps=2))[0]

    together = [build(section) for section in sections]
    losses = [[] for _ in sections]
    for step in range(4):
        for engine, own in zip(together, losses, strict=True):
            own += train(engine, [step])
    alone = [train(build(section), range(4)) for section in sections]
    return losses, alone, [converted(engine) for engine in together]


@pytest.mark.slow
def test_engines_with_different_sections_live_side_by_side(ranks2):
    """Two of them keep quantized weights within each of their own steps."""
    for together, alone, counts in ranks2.run(several_engines):
        assert together == alone
        assert counts == [2, 2, 2, 0]
        assert together[0] not in together[1:]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("section, inner", [({"enabled": False}, MOELayer), ({"recipe": "bf16"}, MOELayer),
                                            (None, MXFP8MOELayer), ({"enabled": True}, MXFP8MOELayer)])
def test_a_section_that_is_off_takes_an_earlier_conversion_back(section, inner):
    net = torch.nn.Sequential(Block())
    assert ds_mxfp8_moe.convert(net).converted == 1
    config = ds_config(section, expert_parallel={"enabled": False})
    engine = ds_mxfp8_moe.initialize(model=net, config=config, model_parameters=net.parameters())[0]
    assert type(engine.module[0].moe.deepspeed_moe) is inner
    with mock.patch.object(PeerMemory, "wait_and_check_all") as settled:
        engine.backward(engine(torch.randn(2, 4, 32)).sum())
        engine.step()
    assert settled.call_count == (inner is MXFP8MOELayer)


# ---------------------------------------------------------------- optimizers of the client's own


SGD = {"lr": 0.2, "momentum": 0.9}


def client(how, section, stage, kind="SGD"):
    """The losses; converted layers; the parameters that training left as they were."""
    net, keys = model(), SGD if kind == "SGD" else {"lr": 0.01}
    # In ZeRO-0, DeepSpeed would clip by another norm (test_clipping.py).
    config = ds_config(section, stage, zero_allow_untested_optimizer=kind == "SGD", gradient_clipping=0.0)
    optimizer = functools.partial(getattr(torch.optim, kind), **keys)
    kwargs = {"model_parameters": list(net.parameters()) if how == "list" else net.parameters()}
    if how in ("list", "generator"):
        config["optimizer"] = {"type": kind, "params": keys | ({} if kind == "SGD" else {"torch_adam": True})}
    else:
        del config["optimizer"]
        kwargs["optimizer"] = optimizer if how == "callable" else optimizer(net.parameters())
    engine = ds_mxfp8_moe.initialize(model=net, config=config, **kwargs)[0]
    if isinstance(engine.optimizer, torch.optim.Optimizer):  # a scheduler wraps its step
        torch.optim.lr_scheduler.LambdaLR(engine.optimizer, lambda step: 1.0)
    before = {name: gathered(p) for name, p in engine.module.named_parameters()}
    losses = train(engine, range(3))
    return losses, converted(engine), [
        name for name, p in engine.module.named_parameters() if torch.equal(before[name], gathered(p))]


def client_pair(how, stage, kind="SGD"):
    """DeepSpeed's own layers train with the optimizer of the config: it refuses a client's in ZeRO-1 and 2."""
    return client("list", {"enabled": False}, stage, kind), client(how, OTHER, stage, kind)


@pytest.mark.parametrize("how, stage, kind", slow_except([
    ("optimizer", 0, "SGD"), ("optimizer", 3, "SGD"), ("list", 0, "SGD"), ("list", 2, "SGD"), ("callable", 0, "SGD"),
    ("callable", 3, "SGD"), ("generator", 2, "SGD"), ("optimizer", 1, "AdamW"), ("callable", 2, "AdamW")],
    ("callable", 3, "SGD"), ("list", 2, "SGD"), ("optimizer", 1, "AdamW")))
def test_client_optimizers_train_the_converted_experts(ranks2, how, stage, kind):
    """AdamW is split without zero_allow_untested_optimizer."""
    for plain, ours in ranks2.run(client_pair, how, stage, kind):
        assert (plain[1], ours[1]) == (0, 2) and plain[2] == ours[2] == []
        assert ours[0] == pytest.approx(plain[0], abs=1e-5, rel=1e-3 if kind == "AdamW" else None)


WARMUP = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.2, "warmup_num_steps": 4}}}
DECAYED = {"type": "SGD", "params": {"lr": 0.2, "weight_decay": 0.1}}


def groups_of(net: torch.nn.Module) -> list[dict]:
    """Experts of one layer and norms, and the rest, with other rates and decays."""
    one = [p for name, p in net.named_parameters() if "norm" in name or "layers.0.mlp.experts" in name]
    known = set(map(id, one))
    return [{"params": one, "lr": 0.02, "weight_decay": 0.0},
            {"params": [p for p in net.parameters() if id(p) not in known], "lr": 0.1}]


def trained_in_groups(stage: int, by_config: bool, changes: dict) -> list[float]:
    net = model()
    config = ds_config(OTHER, stage, **{**changes, "optimizer": DECAYED} if by_config else changes)
    if by_config:
        given = {"model_parameters": groups_of(net)}
    else:
        config.pop("optimizer")
        given = {"optimizer": torch.optim.SGD(groups_of(net), **DECAYED["params"])}
    return train(ds_mxfp8_moe.initialize(model=net, config=config, **given)[0], range(4))


@pytest.mark.parametrize("stage, changes", [pytest.param(0, {}, marks=WIDE), (2, WARMUP), (3, {})], ids=str)
def test_groups_beside_an_optimizer_in_the_config_keep_their_settings(ranks2, stage, changes):
    assert ranks2.run(trained_in_groups, stage, True, changes) == ranks2.run(trained_in_groups, stage, False, changes)


# ---------------------------------------------------------------- other sections, other engines of DeepSpeed


def logged():
    config = ds_config(MXFP8, comms_logger={"enabled": True})
    try:
        engine = ds_mxfp8_moe.initialize(model=model(), config=config)[0]
        answers_of_all(dist.get_world_group(), dist.get_rank(), "a question")
        losses = train(engine, [0])
    finally:
        dist.configure(enabled=False)
    return converted(engine), len(losses), "all_to_all_single" in dist.comms_logger.comms_dict


def test_deepspeeds_comms_logger_leaves_the_process_alive(ranks2):
    """It calls exit(0) at an operation that it does not know, such as all_gather_object."""
    assert ranks2.run(logged) == [(2, 1, True)] * 2


def pipeline():
    # DeepSpeed's pipelines want experts in every stage: ZeRO-1 sums a norm per group of parameters over the stages.
    layers, out = [LayerSpec(Block), LayerSpec(Block)], io.StringIO()
    with enabled(), redirect_stdout(out):
        net = PipelineModule(layers, num_stages=2, loss_fn=torch.nn.functional.mse_loss)
        config = ds_config(MXFP8, 1, expert_parallel={"enabled": False}, gradient_accumulation_steps=2)
        engine = deepspeed.initialize(model=net, config=config,
                                      model_parameters=[p for p in net.parameters() if p.requires_grad])[0]
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 2, 4, 32, generator=generator)
    losses = [engine.train_batch(iter([(x, y)] * 2)).item() for _ in range(4)]
    said = [line for line in out.getvalue().splitlines() if line.startswith("mxfp8_moe")]
    layers = [type(m).__name__ for m in net.modules() if isinstance(m, MXFP8MOELayer)]
    return type(engine).__name__, layers, losses, said


def test_enable_reaches_the_pipeline_engine(ranks2):
    results = ranks2.run(pipeline)
    of_first, of_second = (said for *_, said in results)
    assert len(of_first) == 2 and of_first[-1] == "mxfp8_moe: 2 of 2 MoE layers converted" and not of_second
    for name, layers, losses, _ in results:
        assert name == "PipelineEngine"
        assert len(layers) == 1
        assert losses[-1] < losses[0]
