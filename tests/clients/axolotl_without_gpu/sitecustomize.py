# SPDX-License-Identifier: Apache-2.0
"""On axolotl's PYTHONPATH, for machines without a GPU: its ranks ask CUDA whether they reach each other, load the
model to the GPU of their number, and have no setting for training on CPUs."""

import os

if "LOCAL_RANK" in os.environ:
    import torch

    torch.cuda.can_device_access_peer = lambda device, peer: True
    from accelerate import PartialState
    from axolotl.loaders.model import ModelLoader
    from transformers import TrainingArguments

    init, post_init = PartialState.__init__, TrainingArguments.__post_init__
    set_device_map = ModelLoader._set_device_map_config

    def __init__(self, cpu=False, **given):
        init(self, True, **given)

    def __post_init__(self):
        self.use_cpu = True
        post_init(self)

    def _set_device_map_config(self):
        set_device_map(self)
        self.model_kwargs.pop("device_map", None)

    PartialState.__init__, TrainingArguments.__post_init__ = __init__, __post_init__
    ModelLoader._set_device_map_config = _set_device_map_config
