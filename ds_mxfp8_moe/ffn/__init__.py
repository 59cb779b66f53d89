# SPDX-License-Identifier: Apache-2.0
"""One differentiable function from tokens to tokens: the exchange, and what the experts compute between it."""
