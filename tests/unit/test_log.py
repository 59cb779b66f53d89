# SPDX-License-Identifier: Apache-2.0
"""The package's logger: its levels, and where its lines go."""

import logging
from unittest import mock

import torch

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
