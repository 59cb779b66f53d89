# SPDX-License-Identifier: Apache-2.0
"""examples/guides/architectures.py and the page that it wrote."""

import re
from pathlib import Path

import architectures

PAGE = Path(architectures.__file__).with_suffix(".md")


def test_a_row(ranks2):
    (one, other) = ranks2.run(architectures.row, "gpt_oss")
    assert one == other and one["layers"] == one["converted"] == 2
    assert 0 < one["bf16"] < 0.01 and 0 < one["mxfp8"] < 0.01 and one["last"] < one["first"]
    assert architectures.missed([one]) == []
    assert "| gpt_oss | added, like minimax_m3 | 2 of 2 |" in architectures.page([one])


def test_the_page_has_every_architecture_within_its_bar():
    row = r"^\| (\w+) \| [\w', ]+ \| (\d+) of (\d+) \| [\d.]+ to [\d.]+ \| ([\d.]+)% \| ([\d.]+)% \|"
    rows = re.findall(row, PAGE.read_text(), re.MULTILINE)
    assert [row[0] for row in rows] == sorted(architectures.ARCHITECTURES) and len(rows) >= 17
    for _, converted, layers, bf16, mxfp8 in rows:
        assert converted == layers and max(float(bf16), float(mxfp8)) <= 100 * architectures.BAR
