# SPDX-License-Identifier: Apache-2.0
"""Builders of the CUDA extensions, by the names of their ops. They are subclasses of DeepSpeed's CUDAOpBuilder."""

from .nvlink import NVLinkBuilder

ALL_OPS = {NVLinkBuilder.NAME: NVLinkBuilder()}
