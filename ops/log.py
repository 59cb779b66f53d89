# SPDX-License-Identifier: Apache-2.0
"""The package's logger: `logging.getLogger("ds_mxfp8_moe")`.

Its lines go to stdout, unless the program gave this logger handlers before the import. A line's first word after
"mxfp8_moe:" is its level, ERROR or WARNING. Others have INFO.
"""

import logging
from typing import Any

import torch.distributed


def _plain_logger(name: str) -> logging.Logger:
    """A logger without the filters of a program's own class: Axolotl's drops INFO from other packages."""
    kind = logging.getLoggerClass()
    logging.setLoggerClass(logging.Logger)
    try:
        return logging.getLogger(name)
    finally:
        logging.setLoggerClass(kind)


logger = _plain_logger("ds_mxfp8_moe")


class _Stdout(logging.Handler):
    """Writes to the sys.stdout of the moment, which programs and tests replace."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), flush=True)


if not logger.handlers:
    logger.addHandler(_Stdout())
    logger.propagate = False
if logger.level == logging.NOTSET:
    logger.setLevel(logging.INFO)


def log(what: Any) -> None:
    """Logs each line of a text."""
    for line in str(what).splitlines():
        level = next((one for one in ("ERROR", "WARNING") if line.startswith(f"mxfp8_moe: {one}: ")), "INFO")
        logger.log(logging.getLevelNamesMapping()[level], line)


def log_on_rank_0(what: Any) -> None:
    """The same on rank 0, or in a process that is alone."""
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        log(what)
