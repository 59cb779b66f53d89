# SPDX-License-Identifier: Apache-2.0
"""Where an optimizer keeps what belongs to a range of a parameter. tests/ranks/test_placement.py has DeepSpeed's."""

from types import SimpleNamespace

import pytest
import torch

from ds_mxfp8_moe.compat.optimizer_parts import obstacle, parts_of


def flash(numel: int) -> tuple[torch.optim.Optimizer, torch.nn.Parameter]:
    """An optimizer with states as FlashAdamW has them on a GPU: values in 8 bits, and a scale for each 32 of them."""
    parameter = torch.nn.Parameter(torch.arange(float(numel)))
    moment = SimpleNamespace(is_quantized=lambda: True, quantized=torch.arange(numel).to(torch.int8),
                             scales=torch.arange(-(-numel // 32)).half())
    optimizer = torch.optim.AdamW([parameter])
    optimizer.state[parameter] = {"step": torch.tensor(3.0), "exp_avg": moment,
                                  "error_bits": torch.arange(numel).to(torch.int16)}
    return optimizer, parameter


def test_states_in_8_bits_have_their_scales():
    optimizer, parameter = flash(128)
    found = [part.of(32, 96).tolist() for part in parts_of(optimizer, parameter)]
    assert found == [[*range(32, 96)], [*range(32, 96)], [1, 2], [*range(32, 96)]]


def test_a_range_that_cuts_a_group_is_an_error():
    optimizer, parameter = flash(128)
    with pytest.raises(RuntimeError, match='elements 16 to 96 .* within 32 .* leave "expert_placement" out'):
        [part.of(16, 96) for part in parts_of(optimizer, parameter)]


@pytest.mark.parametrize("state, form", [(torch.zeros(7), r"\(7,\) for 128 values"), ([torch.zeros(128)], "list")])
def test_states_of_other_forms_are_an_error(state, form):
    optimizer, parameter = flash(128)
    optimizer.state[parameter]["rows"] = state
    with pytest.raises(RuntimeError, match=f'AdamW keeps rows, {form}, in a form .*: leave "expert_placement" out'):
        [*parts_of(optimizer, parameter)]


def test_unknown_optimizers_are_an_obstacle():
    assert obstacle(flash(32)[0]) is None
    assert obstacle(SimpleNamespace(swap_optimizer=True)) == "the optimizer's states are on NVMe"
    assert obstacle(SimpleNamespace()) == "the masters of SimpleNamespace are not moved: use ZeRO"
