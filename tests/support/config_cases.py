# SPDX-License-Identifier: Apache-2.0
"""Sections with every key."""


ALL_KEYS = {
    "enabled": True,
    "recipe": "mxfp8",
    "scale_block_size": 128,
    "scaling_mode": "floor",
    "dispatch_fwd_dtype": "bf16",
    "combine_fwd_dtype": "mxfp8",
    "dispatch_bwd_dtype": "mxfp8",
    "combine_bwd_dtype": "bf16",
    "transport": "nvlink",
    "nvlink_sms": 24,
    "capacity_factor": 1.5,
    "on_overflow": "drop",
    "batch_gradients": False,
    "keep_quantized_weights": True,
    "frozen_experts": "mxfp8",
    "merge_aware": True,
    "expert_turns": 4,
    "preactivation_dtype": "bf16",
    "min_tokens_per_expert": 256,
    "include": [r"h\.\d+\.moe"],
    "exclude": [".*3.*"],
    "expert_placement": "balanced",
    "load_balance_coeff": 0.001,
    "metrics": {"every": 100},
    "graph_attention": True,
    "self_check": False,
    "force_load_balance": True,
}
OF_TWO_HOPS = {"transport": "hierarchical", "node_size": 4, "wire": "host"}
