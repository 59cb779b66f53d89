# SPDX-License-Identifier: Apache-2.0
"""Where the time of training steps goes: each kernel to the part of the model that launched it, or whose backward did.

Parts are ranges of torch.profiler. A kernel belongs to the innermost range around its launch; one that backward
launches outside of any range, to the range of the forward operation whose gradient it computes (both carry the same
sequence number). So "dispatch" and "combine" are forward's exchange of that name with its backward.
"""

import functools
import inspect
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.moe.sharded_moe import MOELayer
from torch import nn

from ds_mxfp8_moe.expert_math import ExpertMath
from ds_mxfp8_moe.transport.collective import Collective
from ds_mxfp8_moe.transport.nvlink import NVLink
from lib.timing import on_gpu

PARTS = ("attention", "router", "dispatch", "experts", "combine", "optimizer", "rest")
PREFIX = "part: "  # of the ranges' names
STEP = "whole step"
BACKWARD = "autograd::engine::evaluate_function"
LAUNCHES, KERNELS = ("cuda_runtime", "cuda_driver"), ("kernel", "gpu_memcpy", "gpu_memset")


def part(name: str) -> torch.profiler.record_function:
    return torch.profiler.record_function(PREFIX + name)


# ---- ranges -------------------------------------------------------------------------------------------------------


class _Ranges:
    """Ranges that hooks open and close."""

    def __init__(self):
        self.open: list = []

    def enter(self, name: str) -> Callable:
        """A hook."""

        def hook(*_args) -> None:
            self.open.append(part(name))
            self.open[-1].__enter__()

        return hook

    def leave(self, *_args) -> None:
        self.open.pop().__exit__(None, None, None)

    def next(self, name: str) -> Callable:

        def hook(*args) -> None:
            self.leave()
            self.enter(name)(*args)

        return hook


@contextmanager
def marked(model: nn.Module) -> Iterator[None]:
    """While it lasts, the parts of a model's forward, and of our layers' backward, are ranges.

    DeepSpeed's layers: what comes before the experts is dispatch, what comes behind them combine, router apart. Ours
    exchange inside of the experts' function, by methods of a transport.
    """
    ranges = _Ranges()
    with ExitStack() as stack:

        def around(module: nn.Module, before: Callable, after: Callable) -> None:
            stack.callback(module.register_forward_pre_hook(before).remove)
            stack.callback(module.register_forward_hook(after).remove)

        for name, module in model.named_modules():
            if name.endswith("self_attn"):
                around(module, ranges.enter("attention"), ranges.leave)
            elif isinstance(module, (AutoEPMoELayer, MOELayer)):
                router = module.router if isinstance(module, AutoEPMoELayer) else module.gate
                around(router, ranges.enter("router"), ranges.leave)
                ours = hasattr(module, "mxfp8_settings")
                around(module, ranges.enter("experts" if ours else "dispatch"), ranges.leave)
                if not ours:
                    around(module.experts, ranges.next("experts"), ranges.next("combine"))
        for transport in (Collective, NVLink):
            for method in {"plan", "dispatch", "combine", "start_combine"}.intersection(vars(transport)):
                stack.enter_context(mock.patch.object(transport, method, _exchange(getattr(transport, method))))
        # Within a plan, and none of it.
        ahead = ExpertMath.quantize_ahead
        stack.enter_context(mock.patch.object(ExpertMath, "quantize_ahead", part("experts")(ahead)))
        yield


def _exchange(method: Callable) -> Callable:
    """The method in a range: a gradient's exchange is in that of the one that it is the gradient of."""
    parameters = inspect.signature(method)

    @functools.wraps(method)
    def call(*args, **kwargs):
        phase = parameters.bind(*args, **kwargs).arguments.get("phase", method.__name__)
        with part("combine" if ("combine" in method.__name__) != ("gradient" in phase) else "dispatch"):
            return method(*args, **kwargs)

    return call


# ---- traces -------------------------------------------------------------------------------------------------------


def breakdown(step: Callable[[], None], steps: int) -> dict[str, float]:
    """ms a step of each part: of kernels, and of the host's operations where there is no GPU.

    Kernels that run at the same time count each for its part; "idle" is what no kernel fills.
    """
    return {name: round(us / 1e3 / steps, 4) for name, us in parts_us(trace(step, steps)).items()}


def trace(step: Callable[[], None], steps: int) -> list[dict]:
    """The events of torch.profiler's Chrome trace."""
    kinds = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * on_gpu()
    with torch.profiler.profile(activities=kinds) as profile:
        for _ in range(steps):
            with part(STEP):
                step()
                get_accelerator().synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        return json.loads(path.read_text())["traceEvents"]


def parts_us(events: list[dict]) -> dict[str, float]:
    """The parts of a Chrome trace: microseconds of all its kernels; without any, of the operations' own time."""
    spans = [event for event in events if event.get("ph") == "X" and "cat" in event and "dur" in event]
    on_device = [event for event in spans if event["cat"] in KERNELS]
    placed = parts_of_host(spans)
    total = dict.fromkeys(PARTS, 0.0)
    if not on_device:
        for _, name, own_us in placed:
            total[name] += own_us
        return total
    # By the launch itself, else by the operation that launched.
    by_launch = {event["args"].get("correlation"): name for event, name, _ in placed if event["cat"] in LAUNCHES}
    by_operation = {event["args"].get("External id"): name for event, name, _ in placed if event["cat"] == "cpu_op"}
    for event in on_device:
        ids = event.get("args", {})
        name = by_launch.get(ids.get("correlation", -1)) or by_operation.get(ids.get("External id", -1)) or "rest"
        total[name] += event["dur"]
    steps_us = sum(event["dur"] for event in spans if event["cat"] == "user_annotation"
                   and event["name"] == PREFIX + STEP)
    return total | {"idle": max(0.0, steps_us - _union_us(on_device))}


def parts_of_host(spans: list[dict]) -> list[tuple[dict, str, float]]:
    """(event, its part, its time without the operations within it) for each operation and launch of the host."""
    threads: dict = {}
    for event in spans:
        if event["cat"] in ("user_annotation", "cpu_op", *LAUNCHES):
            threads.setdefault((event["pid"], event["tid"]), []).append({"args": {}, **event})
    part_of_sequence: dict = {}
    found = []
    for thread in threads.values():
        around: list[dict] = []  # the events in which the present one lies, the innermost last
        for event in sorted(thread, key=lambda event: (event["ts"], -event["dur"])):
            while around and around[-1]["ts"] + around[-1]["dur"] <= event["ts"]:
                around.pop()
            outer = next((one for one in reversed(around) if "own_us" in one), None)
            around.append(event)
            if event["cat"] == "user_annotation":
                continue
            event["own_us"] = event["dur"]
            if outer is not None:
                outer["own_us"] -= event["dur"]
            name, sequence = _place(around)
            if sequence is None and "Sequence number" in event["args"]:
                # The last operation of a number is the one that made the node of backward.
                part_of_sequence[event["args"]["Sequence number"]] = name
            found.append((event, name, sequence))
    return [(event, name or part_of_sequence.get(sequence) or "rest", event["own_us"])
            for event, name, sequence in found]


def _place(around: list[dict]) -> tuple[str | None, int | None]:
    """The innermost part of nested events, and the sequence number of the node of backward among them."""
    name = sequence = None
    for event in around:
        if event["cat"] == "user_annotation" and event["name"].removeprefix(PREFIX) in PARTS:
            name = event["name"].removeprefix(PREFIX)
        elif event["name"].startswith(BACKWARD):
            sequence = event["args"].get("Sequence number", -1)
    return name, sequence


def _union_us(spans: list[dict]) -> float:
    """Time in which at least one of them runs."""
    total, end = 0.0, float("-inf")
    for event in sorted(spans, key=lambda event: event["ts"]):
        total += max(0.0, event["ts"] + event["dur"] - max(end, event["ts"]))
        end = max(end, event["ts"] + event["dur"])
    return total
