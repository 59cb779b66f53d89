# SPDX-License-Identifier: Apache-2.0
"""A model and texts so small that the study of quality trains on them in a test."""

from unittest import mock

import yaml

from training import convergence


def green_bottles(folder, copies=1):
    """A tiny model, and texts for it."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
             "head_dim": 16, "moe_intermediate_size": 64, "num_experts": 4, "max_position_embeddings": 32}
    model = yaml.safe_load((convergence.ROOT / "configs/models/qwen3_moe_tiny.yaml").read_text())
    (folder / "model.yaml").write_text(yaml.safe_dump(model | sizes))
    (folder / "texts").mkdir()
    for i in range(200 * copies):
        (folder / f"texts/{i}.txt").write_text(f"{i % 200:05} green bottles hanging on the wall\n" * 4)


def tiny(folder):
    """The size of the model in this folder."""
    return mock.patch.dict(convergence.SIZES, {"tiny": convergence.Size(str(folder / "model.yaml"), 1e-2, 8, 32)})
