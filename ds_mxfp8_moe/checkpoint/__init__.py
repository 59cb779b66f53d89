# SPDX-License-Identifier: Apache-2.0
"""Models and checkpoints on disk."""
