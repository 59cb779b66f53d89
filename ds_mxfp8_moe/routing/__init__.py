# SPDX-License-Identifier: Apache-2.0
"""Which experts a token goes to: recorded, replayed, biased, counted and sampled."""
