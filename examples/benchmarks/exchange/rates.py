# SPDX-License-Identifier: Apache-2.0
"""How long dispatch and combine take inside one host, by three numbers for each operation:

    fixed + bytes on links / link rate + bytes expanded / local rate

They are fitted to the committed result files of dispatch_combine.py, over NVLink. A hidden size that is not among
these is predicted to within 20 %. Bytes are of one rank, as a mean: all ranks get the same load. Dispatch is in MXFP8,
combine in bf16.
"""

import functools
from collections.abc import Callable

import torch

from lib import results_file

MEASURED = ("dispatch_combine_2ranks.json", "dispatch_combine_4ranks.json")
GPUS_A_HOST, MB = 8, 1e6


@functools.cache
def ms_of(operation: str) -> Callable[[float, float], float]:
    """The ms of MB on links and local MB, which have one byte for each value that is expanded or added. By least
    squares of relative errors."""
    terms, times, name = [], [], f"nvlink, {'mxfp8' if operation == 'dispatch' else 'bf16'}"
    for file in MEASURED:
        for group in results_file.groups(results_file.read(results_file.RESULTS / file), operation):
            if row := group.rows.get(name):
                local_mb = group.case["tokens"] * group.case["top_k"] * group.case["hidden"] / MB
                terms.append([1, row["bytes"] / MB, local_mb])
                times.append([row["median_ms"]])
    ms = torch.tensor(times, dtype=torch.float64)
    fitted = torch.linalg.lstsq(torch.tensor(terms, dtype=torch.float64) / ms, torch.ones_like(ms)).solution
    fixed_ms, ms_per_link_mb, ms_per_local_mb = fitted.flatten().tolist()
    return lambda link_mb, local_mb: fixed_ms + ms_per_link_mb * link_mb + ms_per_local_mb * local_mb
