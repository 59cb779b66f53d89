# SPDX-License-Identifier: Apache-2.0
"""A release of another library that lacks a name."""

from contextlib import contextmanager
from unittest import mock

from ds_mxfp8_moe.compat import private_names
from ds_mxfp8_moe.compat.private_names import Row


@contextmanager
def without(feature):
    """A release of DeepSpeed that lacks a name of the feature."""
    names = (*private_names.NAMES, Row(feature, "deepspeed.runtime.engine:DeepSpeedEngine", "gone"))
    private_names._absent.cache_clear()
    try:
        with mock.patch.object(private_names, "NAMES", names):
            yield
    finally:
        private_names._absent.cache_clear()
