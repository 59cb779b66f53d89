# SPDX-License-Identifier: Apache-2.0
"""Types of command-line arguments, also for the other examples."""

import argparse


def none_or_more(text: str) -> int:
    """The type of an argument that is an integer from 0 on."""
    if int(text) < 0:
        raise argparse.ArgumentTypeError(f"{text} is less than 0")
    return int(text)


def one_or_more(text: str) -> int:
    """The type of an argument that is an integer from 1 on."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return int(text)
