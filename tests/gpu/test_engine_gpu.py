# SPDX-License-Identifier: Apache-2.0
"""Trainings of two ranks by DeepSpeed's engine over NCCL: both transports give the same bits."""

import pytest
import torch

from ds_mxfp8_moe.compute.mx import sqnr_db
from tests.support.models import PLAIN, Layout, make_engine, parameters, train_steps

MXFP8 = {"enabled": True, "min_tokens_per_expert": 0}
LAYOUTS = {
    "zero1": Layout(dtype="bf16", zero=1),
    "zero2-accumulation": Layout(dtype="bf16", zero=2, config={"gradient_accumulation_steps": 2}),
    "zero1-fp32-accumulation": Layout(dtype="bf16", zero=1, config={"data_types": {"grad_accum_dtype": "fp32"}}),
    "zero2-dropless": Layout(dtype="bf16", zero=2, moe={"drop_tokens": False}),
}


def trained(layout: Layout, section: dict | None) -> tuple:
    engine = make_engine(layout, section)
    start = parameters(engine)
    records = train_steps(engine, layout)
    moved = {name: (p - start[name]).cpu() for name, p in parameters(engine).items()}
    return [(record["loss"], record["norm"]) for record in records], moved


@pytest.mark.parametrize("recipe", ["mxfp8_wgrad_with_hp", "mxfp8", "bf16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_transports_train_alike(pair, layout, recipe):
    sections = [PLAIN, *({**MXFP8, "recipe": recipe, "transport": name} for name in ("collective", "nvlink"))]
    plain, nccl, nvlink = (pair.run(trained, LAYOUTS[layout], section, seconds=240) for section in sections)
    for (expected, wanted), (records, moved), (again, moved_again) in zip(plain, nccl, nvlink, strict=True):
        assert records == again and all(torch.equal(moved[name], moved_again[name]) for name in moved)
        assert [loss for loss, _ in records] == pytest.approx([loss for loss, _ in expected], rel=0.01)
        whole = sqnr_db(*(torch.cat([x.float().flatten() for x in by_name.values()]) for by_name in (wanted, moved)))
        assert whole > (15 if recipe == "bf16" else 12), f"{whole:.1f} dB over all parameters"
