# SPDX-License-Identifier: Apache-2.0
"""Simulated roundings: all of them together are the layer's own arithmetic, each can be measured and left out."""

from dataclasses import replace
from unittest import mock

import pytest
import rounding_cases
import torch
from rounding_cases import ALL_WIRES, DEFAULT, NO_WIRES, OF_WGRAD, step

from ds_mxfp8_moe.experts import ExpertFormula
from ds_mxfp8_moe.mx import quantize, sqnr_db
from ds_mxfp8_moe.transport import Pending
from ds_mxfp8_moe.transport.local import Local
from training import roundings
from training.roundings import NAMES, WIRES, Measured, simulated, simulates


def equal(a: dict, b: dict) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("keys", [{}, {"recipe": "mxfp8"}, {"recipe": "mxfp8", "scale_block_size": 128, **ALL_WIRES},
                                  {"recipe": "bf16"}, {"scaling_mode": "floor", **NO_WIRES},
                                  {"preactivation_dtype": "bf16"}], ids=str)
def test_all_roundings_together_are_the_layers_own(keys, dtype):
    """Bit for bit on a CPU, where the layer too multiplies dequantised values."""
    own = step(dtype, **keys)
    with simulated():
        assert equal(step(dtype, **keys), own)
    assert equal(step(dtype, **keys), own)  # and the layer is itself again


@pytest.mark.parametrize("keys, expected", [
    ({"recipe": "bf16"}, set()), ({}, DEFAULT), ({"recipe": "mxfp8"}, DEFAULT | OF_WGRAD),
    (ALL_WIRES, DEFAULT | {"combine_fwd", "dispatch_bwd"}), ({"preactivation_dtype": "bf16"}, DEFAULT - {"pre"}),
    (NO_WIRES, DEFAULT - {"dispatch_fwd", "combine_bwd"} | {"x", "g"})], ids=lambda x: str(sorted(x)))
def test_what_is_rounded_is_measured(keys, expected):
    own, measured = step(**keys), Measured()
    with simulated(measured=measured):
        assert equal(step(**keys), own)
    found = measured.read()
    assert set(found["sqnr_db"]) == set(found["shrinkage"]) == expected
    for name, db in found["sqnr_db"].items():
        # Of what is rounded already, re-scaling changes almost nothing.
        least = 80 if name in ("x_wgrad", "h_wgrad") else 28
        assert least < db and (db < 40 or name.endswith("_wgrad")), name
        assert -3e-3 < found["shrinkage"][name] < 1e-3


def test_each_rounding_can_be_left_out():
    every = {"recipe": "mxfp8", **NO_WIRES, "preactivation_dtype": "bf16"}
    rounded, exact = step(**every), step(recipe="bf16")
    with simulated(off=NAMES):
        nothing_is_rounded = step(**every)
    assert all(sqnr_db(exact[name], nothing_is_rounded[name]) > 100 for name in exact)
    for name in NAMES:
        measured = Measured()
        with simulated(off={name}, measured=measured):
            changed = step(**every)
        assert not equal(changed, rounded) or name in ("x_wgrad", "h_wgrad")  # whose re-scaling is nearly exact
        assert set(measured.read()["sqnr_db"]) == set(NAMES) - {name}
        worse = [part for part in exact if sqnr_db(exact[part], changed[part]) < sqnr_db(exact[part], rounded[part])
                 - 0.2]
        assert not worse, name


def _by_kernels(keys):
    from ds_mxfp8_moe.ops import device
    with mock.patch.object(device, "has_kernels", lambda _: True):
        own, measured = step(torch.bfloat16, T=60, **keys), Measured()
        with simulated(measured=measured):
            found = step(torch.bfloat16, T=60, **keys)
    return {name: sqnr_db(own[name], found[name]) for name in own}, measured.read()["sqnr_db"]


@pytest.mark.slow
@pytest.mark.parametrize("keys", [{"scale_block_size": 128}, {"recipe": "mxfp8", **NO_WIRES}], ids=str)
def test_kernels_of_casts_and_activations(interpreter, keys):
    """Triton's kernels compute the exponential otherwise than torch does."""
    close, found = interpreter(_by_kernels, keys)
    assert min(close.values()) > 30, close
    expected = DEFAULT if "recipe" not in keys else (DEFAULT | OF_WGRAD | {"x", "g"}) - {"dispatch_fwd", "combine_bwd"}
    assert set(found) == expected and min(found.values()) > 28


class Late(Local):
    """A transport whose combine is its own start_combine, as over NVLink."""

    def combine(self, *args):
        return self.start_combine(*args).result()

    def start_combine(self, plan, y_PH, wire, dtype, weight_P=None, phase="combine", sms=0):
        return Pending(Local.combine(self, plan, y_PH, wire, dtype, weight_P, phase))


def test_wires_of_a_transport_with_an_exchange_that_starts_early(monkeypatch):
    found = []
    for transport in (Local, Late):
        monkeypatch.setattr(rounding_cases, "Local", transport)
        monkeypatch.setattr(roundings, "NVLink", Late)
        own, measured = step(**ALL_WIRES), Measured()
        with simulated(measured=measured):
            assert equal(step(**ALL_WIRES), own)
        found.append(measured.read())
    assert found[0] == found[1] and set(WIRES) <= found[0]["sqnr_db"].keys()


def test_other_formulas_are_refused():
    gated = ExpertFormula("gated", "silu", 32, 32, gate="gate", up="up", down="down")
    assert simulates(gated) and not simulates(replace(gated, up_bias="bias"))
    assert not simulates(ExpertFormula("mlp", "gelu", 32, 32, up="up", down="down"))
    with mock.patch.object(roundings, "simulates", lambda _: False), simulated():
        with pytest.raises(ValueError, match="for gated experts without biases only"):
            step()


def test_measures():
    measured = Measured()
    x = torch.randn(64, 128)
    measured.add("half", x, x / 2)
    measured.add("half", torch.zeros(4), torch.zeros(4))
    measured.add("exact", x, x)
    measured.add("cast", x, quantize(x).dequantize())
    measured.add("nothing", torch.zeros(4), torch.zeros(4))
    found = measured.read()
    assert found["sqnr_db"] == pytest.approx({"half": 6.0206, "exact": 200, "cast": sqnr_db(x, quantize(
        x).dequantize())}, abs=1e-3)
    assert found["shrinkage"]["half"] == pytest.approx(-0.5) and found["shrinkage"]["exact"] == 0


def test_unknown_roundings_are_refused():
    with pytest.raises(ValueError, match=r"\['pre'\] cannot be left out here; expected some of .* The config"):
        with simulated(off={"pre"}):
            pass
