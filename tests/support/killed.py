# SPDX-License-Identifier: Apache-2.0
"""Processes that die in the middle of their changes to files."""

import os
import sys
from collections.abc import Callable

CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree"}


def killed_at(operation: int, function: Callable, *args, begins: Callable = lambda event, arguments: True) -> bool:
    """Whether a process that calls the function changes files so often. It dies before this change.

    Args:
        begins: takes an audit event of Python. Changes count from the first for which it is true.
    """
    if pid := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    counts, count = False, 0

    def audit(event, arguments):
        nonlocal counts, count
        counts = counts or begins(event, arguments)
        if counts:
            count += event in CHANGES or (event == "open" and bool(arguments[2] & os.O_ACCMODE))
            if count > operation:
                os._exit(9)

    try:
        sys.addaudithook(audit)
        function(*args)
    finally:
        os._exit(0)
