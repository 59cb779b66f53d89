# SPDX-License-Identifier: Apache-2.0
"""Ranks with different code are told apart: by releases, and by the package's sources."""

import pytest

from ds_mxfp8_moe.transport import releases
from ds_mxfp8_moe.transport.releases import check_same_code, own_code

SAME = own_code()


def test_ranks_with_the_same_code_pass():
    check_same_code([2, 5], [SAME, SAME._replace(folder="/elsewhere")])


@pytest.mark.parametrize("other", [SAME._replace(digest="0" * 64),
                                   SAME._replace(releases=SAME.releases.replace("torch 2", "torch 1"))])
def test_others_are_named_with_both_releases(other):
    with pytest.raises(RuntimeError) as error:
        check_same_code([2, 5, 7], [SAME, other._replace(folder="/elsewhere"), SAME])
    of_5 = f"{other.releases} (sources {other.digest[:8]} in /elsewhere)"
    assert f"ranks 2, 7: {SAME}; rank 5: {of_5}" in str(error.value)


def test_the_digest_is_of_all_sources(monkeypatch, tmp_path):
    monkeypatch.setattr(releases, "PACKAGE", tmp_path)
    found = set()
    for name in "ep.py", "transport/rows.py", "ops/triton_kernels/permute.py", "ops/csrc/nvlink/kernels.h":
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x = 1\n")
        found.add(releases.digest_of_sources.__wrapped__())
    assert len(found) == 4
