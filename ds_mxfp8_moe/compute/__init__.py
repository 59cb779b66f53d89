# SPDX-License-Identifier: Apache-2.0
"""The number format, casts, grouped GEMMs and activations: kernels, or plain torch where there are none."""
