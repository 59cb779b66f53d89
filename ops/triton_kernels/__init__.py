# SPDX-License-Identifier: Apache-2.0
"""Triton kernels; each has its plain PyTorch reference in the package."""
