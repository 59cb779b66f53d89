# SPDX-License-Identifier: Apache-2.0
"""Builders of the extensions, by the names of their ops. They are subclasses of DeepSpeed's CUDAOpBuilder."""

from .nvlink import NVLinkBuilder
from .nvshmem import NVSHMEMBuilder
from .replay import ReplayBuilder

__all__ = ["NVLinkBuilder", "NVSHMEMBuilder", "ReplayBuilder"]
