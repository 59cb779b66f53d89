# SPDX-License-Identifier: Apache-2.0
"""How long dispatch and combine take inside one host, by three numbers for each operation:

    fixed + bytes on links / link rate + bytes expanded / local rate

They are fitted to the committed result files of dispatch_combine.py, over NVLink. A hidden size that is not among
these is predicted to within 20 %. Bytes are of one rank, as a mean: all ranks get the same load. Dispatch is in MXFP8,
combine in bf16.
"""

import functools
from typing import NamedTuple

import torch

from lib import results_file

MEASURED = ("dispatch_combine_2ranks.json", "dispatch_combine_4ranks.json")
GPUS_A_HOST, MB = 8, 1e6


class Rates(NamedTuple):
    fixed_ms: float
    ms_per_link_mb: float
    ms_per_local_mb: float

    def ms(self, link_mb: float, local_mb: float) -> float:
        """`local_mb`: one byte for each value that is expanded or added."""
        return self.fixed_ms + self.ms_per_link_mb * link_mb + self.ms_per_local_mb * local_mb


def samples(operation: str) -> list[tuple[dict, float, float, float]]:
    """(case, MB on links, local MB, ms) of each measured call."""
    found, name = [], f"nvlink, {'mxfp8' if operation == 'dispatch' else 'bf16'}"
    for file in MEASURED:
        for group in results_file.groups(results_file.read(results_file.RESULTS / file), operation):
            if row := group.rows.get(name):
                local_mb = group.case["tokens"] * group.case["top_k"] * group.case["hidden"] / MB
                found.append((group.case, row["bytes"] / MB, local_mb, row["median_ms"]))
    return found


def fit(measured: list[tuple[dict, float, float, float]]) -> Rates:
    """Least squares of relative errors."""
    terms = torch.tensor([[1, *mb] for _, *mb, _ in measured], dtype=torch.float64)
    ms = torch.tensor([[ms] for *_, ms in measured], dtype=torch.float64)
    return Rates(*torch.linalg.lstsq(terms / ms, torch.ones_like(ms)).solution.flatten().tolist())


@functools.cache
def rates(operation: str) -> Rates:
    return fit(samples(operation))
