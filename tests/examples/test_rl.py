# SPDX-License-Identifier: Apache-2.0
"""examples/rl/grpo.py: replay brings the trainer closer to its rollouts."""

import pytest

import grpo


def trained(weights: str) -> list[list[dict[str, float]]]:
    return [grpo.train(1, 2, weights, replay) for replay in (False, True)]


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["fp8", pytest.param("model", marks=pytest.mark.wide)])
def test_replay_brings_the_trainer_closer_to_its_rollouts(ranks1, weights):
    (live, replayed), = ranks1.run(trained, weights)
    assert live[0]["reward"] == replayed[0]["reward"]  # the same rollouts
    for first, second in zip(live, replayed, strict=True):
        assert 0 < second["kl"] < first["kl"] / 3


def test_the_plot(tmp_path):
    runs = {(*arm, seed): [{"kl": 0.1, "reward": 0.5}] * 2 for arm in grpo.ARMS for seed in grpo.SEEDS}
    grpo.draw(runs, tmp_path / "kl.png")
    assert (tmp_path / "kl.png").stat().st_size > 1000
