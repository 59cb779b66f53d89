# SPDX-License-Identifier: Apache-2.0
"""Kernels and what builds them: `triton_kernels`, `op_builder`, and CUDA sources under `csrc`."""
