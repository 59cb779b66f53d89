# SPDX-License-Identifier: Apache-2.0
"""Triton and Gluon kernels with the host functions that launch them.

Each kernel has a reference in plain PyTorch, which its file names.
"""
