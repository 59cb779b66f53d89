# SPDX-License-Identifier: Apache-2.0
"""`initialize` is deepspeed.initialize, `enable` reaches the engines that others make; both read the section."""

import argparse
import functools
import importlib.metadata
import inspect
import io
import json
import re
import subprocess
import sys
import textwrap
import traceback
from contextlib import contextmanager, nullcontext, redirect_stdout
from unittest import mock

import deepspeed
import deepspeed.comm as dist
import pytest
import torch
from autoep_models import converted, ds_config, gathered, model
from autoep_models import train_engine as train
from deepspeed import initialize as imported_before
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.layer import MoE
from deepspeed.moe.sharded_moe import MOELayer
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.engine import DeepSpeedEngine
from models import SwiGLU
from slow import slow_except
from transformers.utils import output_capturing

import ds_mxfp8_moe
from ds_mxfp8_moe import ConfigError
from ds_mxfp8_moe.config import parse
from ds_mxfp8_moe.engine.attach import hint_at_speed
from ds_mxfp8_moe.engine.self_check import Verdict
from ds_mxfp8_moe.engine.start import NO_ENGINE, UNREAD
from ds_mxfp8_moe.layers.classic import MXFP8MOELayer
from ds_mxfp8_moe.transport.deadline import answers_of_all
from ds_mxfp8_moe.transport.peer_memory import PeerMemory
from ds_mxfp8_moe.transport.releases import own_code

MXFP8 = {"enabled": True}


@contextmanager
def enabled(times: int = 1):
    """`enable()` for one case: it lasts as long as the process."""
    plain = DeepSpeedEngine.__init__
    for _ in range(times):
        ds_mxfp8_moe.enable()
    try:
        yield
    finally:
        DeepSpeedEngine.__init__ = plain


@contextmanager
def initializer(by_enable: bool):
    """`initialize`, or DeepSpeed's own function after `enable`."""
    with enabled() if by_enable else nullcontext():
        yield (deepspeed if by_enable else ds_mxfp8_moe).initialize


def test_the_signature_is_deepspeeds():
    assert inspect.signature(ds_mxfp8_moe.initialize) == inspect.signature(deepspeed.initialize)


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
    return (type(result) is tuple, type(engine) is DeepSpeedEngine, optimizer is engine.optimizer,
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


# ---------------------------------------------------------------- wrong and differing sections


def test_a_wrong_section_raises_before_any_collective():
    config = ds_config({"enabled": True, "recipie": "bf16"})
    with pytest.raises(ConfigError, match='did you mean "recipe"'):
        ds_mxfp8_moe.initialize(model=torch.nn.Linear(2, 2), config=config)
    with enabled(), pytest.raises(ConfigError, match='did you mean "recipe"'):
        DeepSpeedEngine(args=None, model=torch.nn.Linear(2, 2), config=config)
    assert not dist.is_initialized()


def said_at_start(section):
    out, net = io.StringIO(), torch.nn.Linear(32, 32)
    config = ds_config(section, expert_parallel={"enabled": False})
    with redirect_stdout(out):
        ds_mxfp8_moe.initialize(model=net, config=config, model_parameters=net.parameters())
    return [line for line in out.getvalue().splitlines() if line.startswith("mxfp8_moe")]


@pytest.mark.parametrize("section, message", [
    ({"recipe": "mxfp8"}, 'lacks "enabled": true'), ({"enabled": True}, "no MoE layers found.*expert_parallel")])
def test_a_section_that_does_nothing_says_so(ranks2, section, message):
    first, second = ranks2.run(said_at_start, section)
    assert len(first) == 1 and re.search(message, first[0]) and not second


class Registry(dict):
    """As no release of transformers has it yet."""

    def update(self, model, outputs):
        super().update({str(model.__class__): outputs})


def with_a_new_transformers():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.metadata, "version", lambda name: "5.25.0")
        patch.setattr(output_capturing, "_CAN_RECORD_REGISTRY", Registry(output_capturing._CAN_RECORD_REGISTRY))
        told = r"transformers 5.25.0 \(TypeError: .*pip install 'transformers<5.25"
        for patched in (False, True):
            with pytest.raises(ConfigError, match=told), initializer(patched) as initialize:
                initialize(model=model(), config=ds_config(MXFP8))


def test_a_transformers_that_autoep_cannot_use_is_refused_with_those_that_work(ranks2):
    ranks2.run(with_a_new_transformers)


def advised(autoep):
    out, config = io.StringIO(), ds_config({"enabled": True, "capacity_factor": 2.0})
    config["expert_parallel"] = {"enabled": True, **autoep}
    with redirect_stdout(out):
        ds_mxfp8_moe.initialize(model=model(), config=config)
    return out.getvalue()


def test_a_size_left_out_and_where_the_experts_lie_are_said(ranks2):
    said, _ = ranks2.run(advised, {})
    assert said.count("converted: 8 experts on every rank, recipe") == 2
    assert 'WARNING: "expert_parallel" has no "autoep_size"' in said
    assert 'WARNING: "capacity_factor" has no effect: every rank holds all experts' in said
    said, _ = ranks2.run(advised, {"autoep_size": 2})
    assert said.count("converted: 8 experts, 4 on each of 2 ranks, recipe") == 2 and said.count("WARNING") == 1


def hinted():
    """Lines at the start on a GPU, and those of an engine with nothing to say."""
    unfused = {"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}
    config, out = ds_config(MXFP8, **unfused), io.StringIO()
    engine = ds_mxfp8_moe.initialize(model=model(use_cache=False), config=config)[0]
    config["optimizer"]["params"]["fused"] = True
    other = ds_mxfp8_moe.initialize(model=model(use_cache=False), config=config)[0]
    with redirect_stdout(out):
        for one in (engine, other):
            hint_at_speed(one, parse(config))
    return out.getvalue()


def test_what_would_be_faster_is_said(ranks2):
    said, other = ranks2.run(hinted)
    assert said.startswith("mxfp8_moe: faster: AdamW is not fused") and said.count("\n") == 1 and not other


def our_hooks(engine) -> int:
    return sum(hook.__module__.startswith("ds_mxfp8_moe") for hook in engine.module._forward_pre_hooks.values())


def unread(section, convert):
    """What two steps of plain DeepSpeed say of the section, and our hooks on the model before and after."""
    engine, out = deepspeed.initialize(model=model(), config=ds_config(section))[0], io.StringIO()
    hooks = [our_hooks(engine)]
    if convert:
        with redirect_stdout(io.StringIO()):
            ds_mxfp8_moe.convert(engine)
    with redirect_stdout(out):
        train(engine, range(2))
    said = [line for line in out.getvalue().splitlines() if line.startswith("mxfp8_moe: WARNING")]
    return said, hooks + [our_hooks(engine)], converted(engine)


def unread_at_an_error(start) -> str:
    """How the error ends by which DeepSpeed refuses an optimizer whose parameter groups nobody has split."""
    net = model()
    config = ds_config(MXFP8, 2)
    del config["optimizer"]
    with pytest.raises(AssertionError, match="None of the param groups are marked as MoE") as error:
        with mock.patch("ds_mxfp8_moe.engine.start.any_groups_allowed", nullcontext):
            start(model=net, config=config, optimizer=torch.optim.AdamW(net.parameters()))
    return traceback.format_exception(error.value)[-1]


def test_deepspeeds_error_ends_with_the_section_that_nothing_reads(ranks2):
    for last in ranks2.run(unread_at_an_error, deepspeed.initialize):
        assert last.endswith(f"{UNREAD}\n")
    assert "nothing read it" not in "".join(ranks2.run(unread_at_an_error, ds_mxfp8_moe.initialize))


@pytest.mark.slow
def test_a_process_that_makes_no_engine_says_so_at_its_exit():
    """Of two processes, the one that ends without an error."""
    program = """
        import os
        import accelerate, torch
        import ds_mxfp8_moe
        ds_mxfp8_moe.enable()
        accelerator = accelerate.Accelerator(cpu=True)
        accelerator.prepare(torch.nn.Linear(2, 2))
        print("trained", flush=True)
        child = os.fork()
        if child == 0:
            raise ValueError("an error")
        print("exit", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True)
    assert run.returncode == 0 and run.stdout.endswith(f"trained\nexit 1\n{NO_ENGINE}\n"), run.stderr
    assert "ValueError: an error" in run.stderr


def test_a_section_that_nothing_reads_is_said_once(ranks2):
    (said, hooks, _), (said_by_1, *_) = ranks2.run(unread, MXFP8, False)
    assert hooks == [1, 0] and not said_by_1
    assert len(said) == 1
    assert re.search(r'has the section "mxfp8_moe", but nothing read it.*mxfp8_moe.enable\(\) before', said[0])


@pytest.mark.parametrize("section, convert, hooks, layers", [
    ({"enabled": False}, False, [0, 0], 0), (None, False, [0, 0], 0), (MXFP8, True, [1, 0], 2)])
def test_no_warning_where_nothing_is_missed(ranks2, section, convert, hooks, layers):
    assert ranks2.run(unread, section, convert) == [([], hooks, layers)] * 2


def failing_on_rank_1() -> str:
    """What each rank hears of a conversion that fails on rank 1."""
    failing = mock.patch("ds_mxfp8_moe.engine.attach.convert_layers", side_effect=ValueError("an adapter of its own"))
    with failing if dist.get_rank() else nullcontext(), pytest.raises(Exception) as error:
        ds_mxfp8_moe.initialize(model=model(), config=ds_config(MXFP8))
    return f"{type(error.value).__name__}: {error.value}"


def test_a_rank_that_fails_to_convert_is_named(ranks2):
    assert ranks2.run(failing_on_rank_1) == [
        "RuntimeError: the layers could not be converted on rank 1: ValueError: an adapter of its own",
        "ValueError: an adapter of its own"]


# ---------------------------------------------------------------- what every front does, and undoes


def made_by(front, section, **changes) -> DeepSpeedEngine:
    config = ds_config(section, **changes)
    if front == "convert":
        engine = deepspeed.initialize(model=model(), config=config)[0]
        ds_mxfp8_moe.convert(engine, section)
        return engine
    with initializer(front == "enable") as initialize:
        return initialize(model=model(), config=config)[0]


def differing(front, sections) -> str:
    on_a_gpu = mock.patch.multiple("ds_mxfp8_moe.engine.attach", has_kernels=lambda device: True,
                                   check=lambda kind, device: Verdict())
    with on_a_gpu, pytest.raises(ConfigError) as error:
        made_by(front, sections[dist.get_rank()])
    return str(error.value)


OTHER = {"enabled": True, "recipe": "bf16"}


@pytest.mark.parametrize("front, other", [
    ("convert", OTHER), ("initialize", OTHER), ("initialize", {"enabled": False}), ("initialize", None),
    ("initialize", {"enabled": True, "self_check": False}),
    ("enable", {"enabled": False}), ("enable", None)])
def test_sections_that_differ_between_ranks_raise_on_every_rank(ranks2, front, other):
    for message in ranks2.run(differing, front, [MXFP8, other]):
        assert message.startswith('the section "mxfp8_moe" on ranks [1] differs from rank 0\'s')


def other_sources() -> str:
    code = own_code()._replace(digest="0" * 64) if dist.get_rank() == 1 else own_code()
    with mock.patch("ds_mxfp8_moe.engine.attach.own_code", lambda: code), pytest.raises(RuntimeError) as error:
        made_by("initialize", MXFP8)
    return str(error.value)


def test_ranks_with_different_code_raise_at_the_start(ranks2):
    first, second = ranks2.run(other_sources)
    assert first == second and "rank 1: ds_mxfp8_moe" in first and "(sources 00000000 in" in first


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


def left_after_destroy(front, stage) -> tuple[list[str], list[str]]:
    """The functions of ours on an engine and its parts, before and after `destroy`."""
    section = {"enabled": True, "keep_quantized_weights": True}
    engine = made_by(front, section, stage=stage)
    parts = {"engine": engine, "optimizer": engine.optimizer, "checkpoints": engine.checkpoint_engine}

    def ours() -> list[str]:
        return sorted(f"{part}.{name}" for part, owner in parts.items() for name, value in vars(owner).items()
                      if hasattr(value, "mxfp8_moe"))

    before = ours()
    engine.destroy()
    return before, ours()


@pytest.mark.parametrize("stage, some", [
    (1, {"engine._take_model_step", "optimizer.step", "checkpoints.load", "engine.load_module_state_dict"}),
    (3, {"engine._take_model_step", "engine.save_checkpoint", "engine.load_checkpoint"})])
def test_an_engine_that_is_destroyed_is_deepspeeds_but_for_saving(ranks2, stage, some):
    for before, after in ranks2.run(left_after_destroy, "convert", stage):
        assert some <= set(before)
        assert after == ["engine._raise_if_autoep_zero3_consolidated_export",
                         "engine._zero3_consolidated_16bit_state_dict", "engine.save_16bit_model",
                         "engine.zero_gather_16bit_weights_on_model_save"]


# ---------------------------------------------------------------- models that are no plain models


def compiled(front, whole: bool) -> tuple:
    """The loss of a step; whether the engine holds the plain model; converted layers; whether graphs were compiled.
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
    return *train(engine, [0]), engine.module is net, converted(engine), len(graphs) > 0


@pytest.mark.parametrize("front, whole", slow_except([("initialize", False), ("enable", True)], ("initialize", False)))
def test_a_model_that_torch_compile_returned_trains_compiled(ranks2, front, whole):
    for plain, ours in zip(ranks2.run(compiled, "plain", whole), ranks2.run(compiled, front, whole), strict=True):
        assert plain[1:] == (True, 1, False) and ours[1:] == (True, 1, True)
        assert ours[0] == pytest.approx(plain[0], rel=1e-5)


def refused(kind, patched) -> None:
    if kind == "meta":
        with torch.device("meta"):
            net, message = model(), r"parameters are on the device meta, .*lm_head.*|.*embed_tokens.*HfDeepSpeedConf"
    else:
        net, message = model(), "is in an engine already: .*Make a new model"
        ds_mxfp8_moe.initialize(model=net, config=ds_config(MXFP8, 2))
    with initializer(patched) as initialize, pytest.raises(ConfigError, match=message):
        initialize(model=net, config=ds_config(MXFP8, 2))


@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("kind", ["meta", "second engine"])
def test_models_of_which_no_engine_can_be_made_are_refused_by_name(ranks2, kind, patched):
    ranks2.run(refused, kind, patched)


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


def test_engines_with_different_sections_live_side_by_side(ranks2):
    """Two of them keep quantised weights within each of their own steps."""
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


@pytest.mark.parametrize("how, stage, kind", [
    ("optimizer", 0, "SGD"), ("optimizer", 3, "SGD"), ("list", 0, "SGD"), ("list", 2, "SGD"), ("callable", 0, "SGD"),
    ("callable", 3, "SGD"), ("generator", 2, "SGD"), ("optimizer", 1, "AdamW"), ("callable", 2, "AdamW")])
def test_client_optimizers_train_the_converted_experts(ranks2, how, stage, kind):
    """AdamW is split without zero_allow_untested_optimizer."""
    for plain, ours in ranks2.run(client_pair, how, stage, kind):
        assert (plain[1], ours[1]) == (0, 2) and plain[2] == ours[2] == []
        assert ours[0] == pytest.approx(plain[0], abs=1e-5, rel=1e-3 if kind == "AdamW" else None)


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


class Block(torch.nn.Module):

    def __init__(self, experts=2):
        super().__init__()
        expert = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32))
        self.moe = MoE(32, expert, num_experts=experts, ep_size=1, k=1, min_capacity=0)

    def forward(self, x):
        return x + self.moe(x)[0]


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
    assert len(of_first) == 3 and of_first[-1] == "mxfp8_moe: 2 of 2 MoE layers converted" and not of_second
    for name, layers, losses, _ in results:
        assert name == "PipelineEngine"
        assert len(layers) == 1
        assert losses[-1] < losses[0]


def of_other_sizes() -> str:
    net = MoE(32, SwiGLU(32, 48 if dist.get_rank() else 64), 2, ep_size=2)
    with pytest.raises(ConfigError) as error:
        ds_mxfp8_moe.initialize(model=torch.nn.Sequential(net), config={"train_micro_batch_size_per_gpu": 1,
                                                                         "mxfp8_moe": MXFP8})
    return str(error.value)


def test_a_layer_that_one_rank_alone_converts_is_an_error_with_the_reason(ranks2):
    for message in ranks2.run(of_other_sizes):
        assert message.startswith("0 is treated differently on different ranks, which would hang: rank 0: 2 experts")
        assert "; rank 1: not converted: FFN size 48 is no multiple of 32" in message
