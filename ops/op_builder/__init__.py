# SPDX-License-Identifier: Apache-2.0
"""Builders of the CUDA extensions: subclasses of DeepSpeed's CUDAOpBuilder, by the names of their ops."""

from .nvlink import NVLinkBuilder

ALL_OPS = {NVLinkBuilder.NAME: NVLinkBuilder()}
