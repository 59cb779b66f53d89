# SPDX-License-Identifier: Apache-2.0
"""The package's logger: its levels, and where its lines go."""

import logging
import runpy
from unittest import mock

import torch

from ds_mxfp8_moe.ops import log as log_file
from ds_mxfp8_moe.ops.log import log, log_on_rank_0, logger

LINES = "mxfp8_moe: WARNING: one\nmxfp8_moe: 50% of two"


def test_lines_go_to_stdout_and_have_levels(capsys):
    log(LINES)
    assert capsys.readouterr().out == f"{LINES}\n"
    with mock.patch.object(logger, "level", logging.WARNING), mock.patch.object(logger, "_cache", {}):
        log(LINES)
    assert capsys.readouterr().out == "mxfp8_moe: WARNING: one\n"


def test_other_ranks_say_nothing(capsys):
    with mock.patch.multiple(torch.distributed, is_initialized=lambda: True, get_rank=lambda: 1):
        log_on_rank_0(LINES)
    assert not capsys.readouterr().out


class _Quiet(logging.Logger):
    """As axolotl's loggers, which drop INFO from other packages."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno > logging.INFO


def test_lines_come_where_the_program_has_a_class_of_loggers(capsys):
    loggers = {name: one for name, one in logging.root.manager.loggerDict.items() if name != logger.name}
    before = logging.getLoggerClass()
    logging.setLoggerClass(_Quiet)
    try:
        with mock.patch.object(logging.root.manager, "loggerDict", loggers):
            runpy.run_path(log_file.__file__)["log"](LINES)
        assert logging.getLoggerClass() is _Quiet
    finally:
        logging.setLoggerClass(before)
    assert capsys.readouterr().out == f"{LINES}\n"
