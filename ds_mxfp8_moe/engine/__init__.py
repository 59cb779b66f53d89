# SPDX-License-Identifier: Apache-2.0
"""What happens with a DeepSpeed engine: its start, who is converted, and what is done around its steps."""
