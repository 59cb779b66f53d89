# SPDX-License-Identifier: Apache-2.0
"""Builders of the CUDA extensions: subclasses of DeepSpeed's CUDAOpBuilder."""
