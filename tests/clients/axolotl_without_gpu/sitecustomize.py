# SPDX-License-Identifier: Apache-2.0
"""On axolotl's PYTHONPATH, for machines without a GPU: its ranks ask CUDA whether they reach each other, load the
model to the GPU of their number, and have no setting for training on CPUs."""

import os

if "LOCAL_RANK" in os.environ:
    import torch

    torch.cuda.can_device_access_peer = lambda device, peer: True
    from axolotl.loaders.model import ModelLoader
    from transformers import TrainingArguments

    set_device_map, post_init = ModelLoader._set_device_map_config, TrainingArguments.__post_init__

    def _set_device_map_config(self):
        set_device_map(self)
        self.model_kwargs.pop("device_map", None)

    def __post_init__(self):
        self.use_cpu = True
        post_init(self)

    ModelLoader._set_device_map_config, TrainingArguments.__post_init__ = _set_device_map_config, __post_init__
