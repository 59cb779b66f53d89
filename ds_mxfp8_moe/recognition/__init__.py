# SPDX-License-Identifier: Apache-2.0
"""Which formula a module's experts compute, and how its weights lie."""
