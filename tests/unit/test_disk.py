# SPDX-License-Identifier: Apache-2.0
"""A file that is replaced has its earlier content or its new one, wherever the write ends."""

import os
from unittest.mock import patch

import pytest

from ds_mxfp8_moe.checkpoint.disk import write_whole


@pytest.mark.parametrize("failing, content", [("fsync", "earlier"), ("replace", "earlier"), (None, "new")])
def test_a_file_is_whole_and_no_part_is_left(tmp_path, failing, content):
    path = tmp_path / "latest"
    path.write_text("earlier")
    if failing is None:
        write_whole(path, "new")
    else:
        with patch.object(os, failing, side_effect=OSError(28, "No space left on device")), pytest.raises(OSError):
            write_whole(path, "new")
    assert path.read_text() == content and list(tmp_path.iterdir()) == [path]
