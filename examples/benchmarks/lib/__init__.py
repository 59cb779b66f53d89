# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks share: cases, running, storing and showing."""
