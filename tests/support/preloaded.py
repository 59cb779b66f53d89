# SPDX-License-Identifier: Apache-2.0
"""What the fork server of rank_pool.py imports and looks up before it forks ranks, each of which would else do so for
itself: three to five seconds of a processor.
"""

import gc
from importlib import import_module

MODULES = ["deepspeed", "deepspeed.runtime.superoffload.superoffload_stage3", "deepspeed.runtime.zero.stage3",
           "deepspeed.runtime.zero.muon.muon_optimizer", "deepspeed.runtime.hybrid_engine", "ds_mxfp8_moe",
           "ds_mxfp8_moe.compat.zero", "peft", "torch._inductor.compile_fx", "torch._inductor.compiler_bisector",
           "torch._dynamo.repro", "transformers.trainer", "transformers.models.qwen3_moe.modeling_qwen3_moe",
           "transformers.models.gpt_oss.modeling_gpt_oss", "transformers.models.deepseek_v3.modeling_deepseek_v3"]

for name in MODULES:
    import_module(name)

from ds_mxfp8_moe.compat.private_names import FEATURES, missing  # noqa: E402

for feature in FEATURES:  # it reads the sources of large classes
    if feature != "recordings":  # of Triton, which CPU ranks do not use
        missing(feature)

gc.collect()
gc.freeze()  # ranks share these objects' memory as long as nobody looks at them
