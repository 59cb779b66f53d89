# SPDX-License-Identifier: Apache-2.0
"""What keeping quantized weights changes in a layer's settings. tests/ranks/test_kept_weights.py has the rest."""

import math
from types import SimpleNamespace

import pytest

from ds_mxfp8_moe import convert
from ds_mxfp8_moe.engine import keeping
from ds_mxfp8_moe.engine.state import EngineState
from ds_mxfp8_moe.layers import settings
from ds_mxfp8_moe.layers.experts import converted_layers
from tests.support.small_model import Model

pytestmark = pytest.mark.usefixtures("one_rank")


class Engine(SimpleNamespace):
    """Takes weak references."""


@pytest.mark.parametrize("of_one_cast, thresholds, said", [
    (1000, [250, 0], "kept within each step, up to 0.00 GiB on this rank; with them, bf16 below 250 tokens per expert"
     "\n"), (math.inf, [math.inf, math.inf], "")])
def test_the_threshold_counts_the_casts_that_are_made(monkeypatch, capsys, of_one_cast, thresholds, said):
    model = Model()
    model.blocks[1].moe.deepspeed_moe.experts.requires_grad_(False)
    convert(model, {})
    layers = converted_layers(model)
    transports = [layer.mxfp8_settings.choose_transport(None) for layer in layers]

    def fewest(formula, recipe, experts, device, casts):
        assert experts == 4
        return of_one_cast if math.isinf(of_one_cast) else of_one_cast * casts

    monkeypatch.setattr(settings, "break_even_tokens", fewest)
    capsys.readouterr()
    engine = Engine(gradient_accumulation_steps=lambda: 4, _mxfp8=EngineState())
    keeping._keep(engine, layers)
    assert [layer.mxfp8_settings.min_tokens_per_expert for layer in layers] == thresholds
    assert [layer.mxfp8_settings.choose_transport(None) for layer in layers] == transports
    assert engine._mxfp8.keeping == (layers if said else [])
    printed = capsys.readouterr().out
    assert printed.endswith(said) and bool(printed) == bool(said)
