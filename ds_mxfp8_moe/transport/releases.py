# SPDX-License-Identifier: Apache-2.0
"""Whether all ranks run the same code. Ranks with different code would read each other's messages wrongly."""

import hashlib
import importlib.metadata
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import deepspeed
import torch

PACKAGE = Path(__file__).parents[1]


class Code(NamedTuple):
    """The code that a rank runs.

    Attributes:
        releases: of the package and of the libraries that choose what ranks exchange. Without local version labels,
            such as the one for CUDA's release.
        digest: of the package's sources.
        folder: where the package is, for errors.
    """

    releases: str
    digest: str
    folder: str

    def __str__(self) -> str:
        return f"{self.releases} (sources {self.digest[:8]} in {self.folder})"


@cache
def digest_of_sources() -> str:
    """The SHA-256 of the package's sources, CUDA's included. The first call takes about 10 ms."""
    code = hashlib.sha256()
    # In a checkout, ops is a link.
    for path in sorted({*PACKAGE.rglob("*.py"), *PACKAGE.glob("ops/**/*.py"), *PACKAGE.glob("ops/csrc/**/*.[ch]*")}):
        code.update(path.read_bytes())
    return code.hexdigest()


@cache
def own_code() -> Code:
    """The code of this rank."""
    try:
        own = importlib.metadata.version("ds_mxfp8_moe")
    except importlib.metadata.PackageNotFoundError:
        own = "not installed"
    releases = {"ds_mxfp8_moe": own, "torch": torch.__version__, "deepspeed": deepspeed.__version__}
    named = ", ".join(f"{name} {release.partition('+')[0]}" for name, release in releases.items())
    return Code(named, digest_of_sources(), str(PACKAGE))


def check_same_code(ranks: Sequence[int], codes: Sequence[Code]) -> None:
    """Raises a RuntimeError that names ranks and releases, unless all of these ranks run the same code.

    Args:
        ranks: global ranks, in the order of `codes`. All ranks must know all codes.
    """
    of_code: dict = {}
    for rank, code in zip(ranks, codes, strict=True):
        of_code.setdefault(code[:2], []).append(rank)
    if len(of_code) > 1:
        each = "; ".join(f"{'rank' if len(same) == 1 else 'ranks'} {', '.join(map(str, same))}: "
                         f"{codes[list(ranks).index(same[0])]}" for same in of_code.values())
        raise RuntimeError(f"ranks run different code, and would read each other's messages wrongly. {each}. Install "
                           "the same releases for every rank")
