# SPDX-License-Identifier: Apache-2.0
"""A model for launchers."""


MODEL = """
{hidden_size: 32, ffn_size: 64, num_layers: 2, num_heads: 2, seq_len: 32, moe: {num_experts: 4, k: 2}}
"""
