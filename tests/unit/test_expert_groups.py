# SPDX-License-Identifier: Apache-2.0
"""The twin of an optimizer, which has experts in groups of their own, follows what changes in the original."""

import functools
from types import SimpleNamespace

import pytest
import torch
from deepspeed.runtime.zero import utils

from ds_mxfp8_moe.compat import expert_groups
from ds_mxfp8_moe.compat.expert_groups import known_to_zero, named_groups, split_experts


def parameters(experts: int, dense: int) -> list[torch.nn.Parameter]:
    made = [torch.nn.Parameter(torch.ones(8)) for _ in range(experts + dense)]
    for p in made[:experts]:
        p.allreduce, p.group_name = False, "ep_size_2"
    return made


def engine(stage=2, moe=True, frozen=False):
    model = torch.nn.ParameterList(parameters(1, 1))
    model[0].requires_grad = not frozen
    return SimpleNamespace(has_moe_layers=moe, zero_optimization_stage=lambda: stage, module=model)


@pytest.fixture
def pair(monkeypatch):
    """An optimizer with a group of experts and dense parameters and a dense one, and its twin."""
    split = expert_groups.split_params_into_different_moe_groups_for_optimizer
    monkeypatch.setattr(expert_groups, "split_params_into_different_moe_groups_for_optimizer",
                        functools.partial(split, max_group_size=16))  # as for experts of a large model
    optimizer = torch.optim.AdamW([{"params": parameters(4, 1), "lr": 0.1}, {"params": parameters(0, 2), "lr": 0.2}])
    return optimizer, split_experts(engine(), optimizer)


def rates(optimizer) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups]


def test_experts_have_groups_and_the_original_keeps_its_own(pair):
    optimizer, twin = pair
    assert [(group.get("moe", False), len(group["params"])) for group in twin.param_groups] == [
        (False, 1), (False, 2), (True, 2), (True, 2)]
    assert rates(twin) == [0.1, 0.2, 0.1, 0.1]
    assert [len(group["params"]) for group in optimizer.param_groups] == [5, 2]
    assert isinstance(twin, torch.optim.AdamW) and type(twin).__name__ == "AdamW" and twin.state is optimizer.state


def test_a_schedule_reaches_every_group_also_one_by_one(pair):
    optimizer, twin = pair
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    schedule.step()
    assert rates(twin) == [0.05, 0.1, 0.05, 0.05]
    schedule.step()
    groups, seen = vars(twin)["param_groups"], []
    for group in groups:  # as ZeRO steps
        twin.param_groups = [group]
        seen += rates(twin)
    assert seen == pytest.approx([0.1 / 3, 0.2 / 3, 0.1 / 3, 0.1 / 3])


def test_what_is_set_or_loaded_in_the_twin_stays_until_the_original_changes(pair):
    optimizer, twin = pair
    state = twin.state_dict()
    for group in state["param_groups"]:
        group["lr"] = 0.7
        del group["number"]  # saved by an optimizer without a twin
    twin.load_state_dict(state)
    assert rates(twin) == [0.7] * 4
    optimizer.param_groups[0]["lr"] = 0.3
    assert rates(twin) == [0.3, 0.7, 0.3, 0.3]


@pytest.mark.parametrize("what", [engine(stage=0), engine(stage=3), engine(moe=False), engine(frozen=True)])
def test_where_it_is_not_needed_the_optimizer_stays(what):
    optimizer = torch.optim.SGD(parameters(1, 1), lr=0.1)
    assert split_experts(what, optimizer) is optimizer
    assert split_experts(engine(), None) is None
    split = torch.optim.SGD([{"params": parameters(1, 0), "moe": True}], lr=0.1)  # by the user
    assert split_experts(engine(), split) is split


def test_what_a_function_makes_is_split():
    made = split_experts(engine(), functools.partial(torch.optim.SGD, lr=0.1))(parameters(1, 1))
    assert [group.get("moe", False) for group in made.param_groups] == [False, True]


@pytest.mark.parametrize("kind, others, taken", [
    (torch.optim.AdamW, [], True), (torch.optim.SGD, [], False), (torch.optim.SGD, [torch.optim.SGD], True)])
def test_zero_takes_the_twin_of_an_optimizer_that_it_takes(kind, others, taken):
    plain, twin = utils.ZERO_SUPPORTED_OPTIMIZERS, type(split_experts(engine(), kind(parameters(1, 1))))
    before = list(plain)
    with known_to_zero(*others):
        assert (twin in utils.ZERO_SUPPORTED_OPTIMIZERS) == (kind in utils.ZERO_SUPPORTED_OPTIMIZERS) == taken
    assert utils.ZERO_SUPPORTED_OPTIMIZERS is plain and plain == before


@pytest.mark.parametrize("given, named", [
    ([{"lr": 1}, {"lr": 2}], ["0", "1"]), ([{"name": "a"}, {"name": "b"}], ["a", "b"]),
    ([{"name": "a"}, {"name": "a"}], ["0", "1"]), ([{"name": "a"}, {}], ["0", "1"])])
def test_groups_for_an_optimizer_in_the_config_get_a_name_each(given, named):
    groups = named_groups(given)
    assert [group["name"] for group in groups] == named
    assert [{**group, "name": None} for group in groups] == [{**group, "name": None} for group in given]


def test_parameters_and_groups_of_experts_are_taken_as_they_are():
    for given in (parameters(1, 1), [{"params": [], "name": "a"}, {"params": [], "name": "a", "moe": True}]):
        assert named_groups(given) is given


def test_in_zero_0_only_fused_adam_gets_groups_of_experts(monkeypatch):
    optimizer = torch.optim.AdamW(parameters(1, 1))
    assert split_experts(engine(stage=0), optimizer) is optimizer
    monkeypatch.setattr(expert_groups, "FusedAdam", torch.optim.AdamW)
    assert [group.get("moe", False) for group in split_experts(engine(stage=0), optimizer).param_groups] == [
        False, True]
