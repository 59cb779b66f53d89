# SPDX-License-Identifier: Apache-2.0
"""The layers that users hold, classic and AutoEP's: how they route, which formula their experts compute, LoRA."""
