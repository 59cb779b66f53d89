# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that plain AutoEP wrote load where experts are spread: weights by a mapping of names, and float32
masters and moments where the order of parameters allows it."""

import pytest
import torch

from ds_mxfp8_moe.checkpoint.earlier_names import EarlierNames
from ds_mxfp8_moe.layers.experts import expert_blocks, spread
from ds_mxfp8_moe.recognition.stacked import SPREAD_NAMES, Layout
from tests.support.autoep_models import model
from tests.support.slow import slow_except
from tests.support.spread_checkpoints_cases import MXFP8, PLAIN, read, to_universal, written

# How earlier names begin below `mlp.`, and the block's own. By this order of names, none is the beginning of another.
RENAMED = {"router.gate.": "gate.", "router.e_score": "gate.e_score"}
SHARED = {"shared_experts_gate.": "shared_expert_gate.", "shared_experts.": "shared_expert."}


def present(found: dict, family: str) -> dict:
    """`found`, of an AutoEP layer, under the names of the block."""
    renamed = {}
    for name, value in found.items():
        for earlier, own in (RENAMED | (SHARED if family == "qwen2_moe" else {})).items():
            name = name.replace(f".mlp.{earlier}", f".mlp.{own}")
        renamed[name] = value
    return renamed


def assert_it_loads(ranks, directory, stage, family, **changes):
    before = ranks.run(written, directory, PLAIN, stage, 2, family)
    if changes:
        to_universal(directory)
        changes |= {"tag": "two_universal"}
    results = ranks.run(read, directory, {**MXFP8, "recipe": "bf16"}, stage, 2, family, **changes)
    for (saved, losses), (found, loaded, after) in zip(before, results, strict=True):
        saved = present(saved, family)
        assert found and saved.keys() == loaded.keys()
        assert not [name for name in saved if not torch.equal(saved[name], loaded[name])]
        assert after[0] == pytest.approx(losses[0], rel=2e-3)
        assert after[1] == pytest.approx(losses[1], rel=2e-3 if stage < 3 or not changes else 1e-2)  # no step count


@pytest.mark.parametrize("stage, family", slow_except(
    [(1, "deepseek_v3"), (3, "deepseek_v3"), (2, "qwen2_moe"), (3, "qwen2_moe")], (3, "deepseek_v3")))
def test_plain_autoeps_checkpoint_loads(ranks2, tmp_path, stage, family):
    assert_it_loads(ranks2, tmp_path, stage, family)


@pytest.mark.parametrize("stage, family", slow_except([(2, "qwen2_moe"), (3, "qwen3_moe")], (2, "qwen2_moe")))
def test_its_universal_checkpoint_loads(ranks2, tmp_path, stage, family):
    assert_it_loads(ranks2, tmp_path, stage, family, checkpoint={"load_universal": True})


# ---- names


def spread_model(family: str) -> torch.nn.Module:
    net = model(family)
    for block in [block for block in net.modules() if "experts" in block._modules]:
        experts = block.experts
        layout = Layout.of(experts)
        parts = layout.split(*(getattr(experts, name).data for name in layout.names))
        spread(block, experts, {name: torch.nn.Parameter(part.clone()) for name, part in
                                zip(SPREAD_NAMES, parts, strict=True)}, 1, 0)
    return net


def earlier_state(net: torch.nn.Module, family: str) -> dict[str, torch.Tensor]:
    """The state dict that AutoEP's layers had, with a bias of AutoEP's own load balancing."""
    found = {}
    own = {"router.weight": "router.gate.weight", "router.bias": "router.gate.bias",
           **{one: earlier for earlier, one in (RENAMED | SHARED).items()}}
    for name, value in net.state_dict().items():
        block, _, rest = name.partition(".mlp.")
        for one, earlier in own.items():
            if rest.startswith(one):
                rest = earlier + rest.removeprefix(one)
        start = f"{block}.mlp."
        found[f"{start}{rest}" if rest else name] = value
        if rest.startswith("router.") and family == "qwen2_moe":  # its block's router has this name
            found[f"{start}gate.{rest.partition('.')[2]}"] = value
        if rest == "router.gate.weight":
            found[f"{start}expert_bias"] = torch.zeros(len(value))
    return found


@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v3", "mixtral"])
def test_earlier_names_and_what_becomes_of_them(family):
    net = spread_model(family)
    wanted, earlier = net.state_dict(), earlier_state(net, family)
    assert earlier.keys() != wanted.keys()
    names = EarlierNames(net, {name: value.numel() for name, value in earlier.items()})
    found = names.values(earlier, {name: value.shape for name, value in wanted.items()})
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], value) for name, value in wanted.items())
    assert names.without_place == [name for name in earlier if name.endswith("expert_bias")] != []
    trained = {name for name, _ in net.named_parameters()}
    groups = [[name for name in earlier if names.renamed(name) in trained and (".experts.w" in name) is of_experts]
              for of_experts in (False, True)]
    assert names.keep_order(groups, net) and not names.keep_order([group[::-1] for group in groups], net)
    present_names = EarlierNames(net, {name: value.numel() for name, value in wanted.items()})
    assert not present_names.sources and not present_names.without_place


def test_the_bias_of_the_load_balancing_has_a_place_where_this_is_on():
    net = spread_model("qwen2_moe")
    earlier = earlier_state(net, "qwen2_moe")
    for _, block in expert_blocks(net):
        block.experts.register_buffer("expert_bias", torch.zeros(block.num_experts))
    for name in earlier:
        if name.endswith(".expert_bias"):
            earlier[name] = torch.rand(len(earlier[name]))
    names = EarlierNames(net, {name: value.numel() for name, value in earlier.items()})
    found = names.values(earlier, {name: value.shape for name, value in net.state_dict().items()})
    assert not names.without_place and found.keys() == net.state_dict().keys()
    for name in net.state_dict():
        if name.endswith("experts.expert_bias"):
            assert torch.equal(found[name], earlier[name.replace("experts.expert_bias", "expert_bias")])
