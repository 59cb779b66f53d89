# SPDX-License-Identifier: Apache-2.0
"""The layers of the self-check."""

from ds_mxfp8_moe.compute.formula import ExpertFormula

BIASES = {"gate_bias": "x", "up_bias": "y", "down_bias": "z"}
FORMULAS = {
    "gated": ExpertFormula("gated", "silu", 1024, 512, gate="a", up="b", down="c"),
    "gpt-oss": ExpertFormula("gated", "swiglu_oai", 1024, 512, gate="a", up="b", down="c", **BIASES, alpha=1.702,
                             limit=7.0),
    "nemotron_h": ExpertFormula("mlp", "relu_squared", 1024, 512, up="b", down="c"),
    "mlp": ExpertFormula("mlp", "gelu", 1024, 512, up="b", down="c", up_bias="y"),
    "packed": ExpertFormula("gated", "silu", 1024, 512, up="b", down="c", packed="up_gate"),
}
SPREAD = dict(stacked=True, rank=8)
FROZEN = dict(stacked=True, rank=8, frozen="mxfp8")
IN_4_BITS = dict(stacked=True, rank=8, frozen="mxfp4")
CLASSIC = dict(stacked=False, exchanges=True)

RECIPES = "mxfp8", "mxfp8_wgrad_with_hp", "bf16"
CASES = {f"{name}-{recipe}-classic": (name, recipe, CLASSIC) for name in FORMULAS for recipe in RECIPES} | {
    f"{name}-{recipe}-spread": (name, recipe, SPREAD) for name in ("gated", "gpt-oss") for recipe in RECIPES} | {
    f"{name}-{recipe}-frozen": (name, recipe, FROZEN) for name in ("gated", "gpt-oss") for recipe in RECIPES[:2]} | {
    "gpt-oss-mxfp8_wgrad_with_hp-mxfp4": ("gpt-oss", "mxfp8_wgrad_with_hp", IN_4_BITS)}
