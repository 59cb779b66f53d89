# SPDX-License-Identifier: Apache-2.0
"""`metrics` on GPUs: steps without a sample launch what they launch without the key, and times are the device's."""

import time

import torch
from torch.profiler import ProfilerActivity, profile

from tests.support.autoep_models import autoep_layers, engine
from tests.support.metrics_cases import monitor, written

EVERY, STEPS = 6, 8
CONFIG = {"bf16": {"enabled": True}, "optimizer": {"type": "SGD", "params": {"lr": 0.2}}}


def launches(folder: str, every: int | None) -> list[int]:
    """How many kernels, copies and fills of the device each step has."""
    section = {"enabled": True, "min_tokens_per_expert": 0, **({"metrics": {"every": every}} if every else {})}
    net = engine(section, 1, torch.distributed.get_world_size(), **CONFIG, **monitor(folder))
    counts = []
    for step in range(STEPS):
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            batch = torch.randint(3, 128, (2, 16), generator=torch.Generator().manual_seed(step)).cuda()
            net.backward(net(input_ids=batch, labels=batch).loss)
            net.step()
            torch.cuda.synchronize()
        counts.append(sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profiled.events()))
    return counts


def test_steps_between_launch_nothing_more(gpu_ranks, tmp_path):
    off, on = (gpu_ranks.run(launches, str(tmp_path / str(every)), every) for every in (None, EVERY))
    for without, with_metrics in zip(off, on, strict=True):
        sampled = EVERY - 1
        assert with_metrics[sampled] > without[sampled]
        between = [step for step in range(2, STEPS) if step != sampled]
        assert [with_metrics[step] for step in between] == [without[step] for step in between]


def late(folder: str) -> None:
    """Rank 1 launches each forward's first layer half a second later than rank 0."""
    section = {"enabled": True, "min_tokens_per_expert": 0, "metrics": {"every": 3}}
    net = engine(section, 1, torch.distributed.get_world_size(), **CONFIG, **monitor(folder))
    if torch.distributed.get_rank() == 1:
        autoep_layers(net.module)[0].register_forward_pre_hook(lambda *_: time.sleep(0.5))
    train_engine_on_gpu(net)


def train_engine_on_gpu(net) -> None:
    with torch.device("cuda"):
        for step in range(3):
            torch.distributed.barrier()  # or what one rank was late by before would be in its figures
            ids = torch.full((2, 16), 5 + step)
            net.backward(net(input_ids=ids, labels=ids).loss)
            net.step()


def test_the_time_for_which_ranks_wait(pair, tmp_path):
    pair.run(late, str(tmp_path))
    figures = {name.removeprefix("model.layers."): rows[-1][1] for name, rows in written(tmp_path).items()}
    assert 375 < figures["0.mlp_wait_ms_most"] < 2000
    assert 0 < figures["1.mlp_wait_ms_most"] < 100 and 0 < figures["1.mlp_exchange_ms"] < 100
