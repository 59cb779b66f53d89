# SPDX-License-Identifier: Apache-2.0
"""How many multiprocessors an exchange takes from a GEMM that runs beside it: the model, and its measured constants.

    exchange    max(off-rank bytes / LINK, bytes read and written / (its multiprocessors * MOVED))
    GEMM        its time alone * all multiprocessors / those left to it
    together    the longer of the two, against one after the other
"""

from functools import lru_cache

LINK = 320e9  # bytes/s that leave or enter a GPU over all its links: H200, dispatch and combine of unquantised rows
MOVED = {False: 44e9, True: 33e9}  # bytes/s that one multiprocessor reads and writes; True: quantising on the way
ALONE = 96  # multiprocessors of an exchange that has the GPU to itself: more gain nothing
SHARES = range(8, 68, 4)


def exchange_seconds(sms: int, link_bytes: int, moved_bytes: int, mxfp8: bool) -> float:
    return max(link_bytes / LINK, moved_bytes / (sms * MOVED[mxfp8]))


@lru_cache(maxsize=4096)
def share(total: int, link_bytes: int, moved_bytes: int, mxfp8: bool, gemm_seconds: float) -> int:
    """Multiprocessors of `total` for an exchange beside a GEMM of so many seconds; 0: one after the other is faster."""
    if gemm_seconds <= 0:
        return 0

    def together(sms: int) -> float:
        return max(exchange_seconds(sms, link_bytes, moved_bytes, mxfp8), gemm_seconds * total / (total - sms))

    best = min((sms for sms in SHARES if sms < total), key=together, default=0)
    one_by_one = exchange_seconds(ALONE, link_bytes, moved_bytes, mxfp8) + gemm_seconds
    return best if best and together(best) < one_by_one else 0
