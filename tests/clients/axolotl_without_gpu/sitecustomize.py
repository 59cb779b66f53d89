# SPDX-License-Identifier: Apache-2.0
"""On axolotl's PYTHONPATH, for machines without a GPU: its ranks ask CUDA whether they reach each other, and load the
model to the GPU of their number."""

import os

if "LOCAL_RANK" in os.environ:
    import torch

    torch.cuda.can_device_access_peer = lambda device, peer: True
    from axolotl.loaders.model import ModelLoader

    plain = ModelLoader._set_device_map_config

    def _set_device_map_config(self):
        plain(self)
        self.model_kwargs.pop("device_map", None)

    ModelLoader._set_device_map_config = _set_device_map_config
