# SPDX-License-Identifier: Apache-2.0
"""What depends on the insides of other libraries: the table of their private names, and the repair of their faults."""
