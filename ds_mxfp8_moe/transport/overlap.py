# SPDX-License-Identifier: Apache-2.0
"""Estimates how long a combine and a GEMM take, and chooses how many multiprocessors the combine gets beside the GEMM.

The constants were measured on H200s (examples/guides/measurements.md).

    combine alone       max(off-rank bytes / LINK, bytes read and written / MOVED_ALONE)
    combine beside      the longer of off-rank bytes / LINK and
                        bytes read and written * slower / (its multiprocessors * rate), but / MOVED_ALONE at best
    GEMM beside         its time alone * its rounds on the multiprocessors left to it / its rounds on all

`rate` is MOVED_BESIDE, or QUANTISED_BESIDE where the combine quantises. `slower` is 1 where each row that travels is a
copy of one row of y. It grows to SUMS where each is the sum of many rows.

A round is what a persistent GEMM computes at a time: one tile on each multiprocessor. Multiprocessors that do not
reduce the number of rounds are free for the combine.
"""

import math

LINK = 320e9  # bytes/s that leave or enter a GPU over all its links
MOVED_ALONE = 2.1e12  # bytes/s
MOVED_BESIDE = 72e9  # bytes/s of one multiprocessor while a GEMM uses the same memory
QUANTISED_BESIDE = 38e9  # the same where the combine quantises what it sends
SUMS = 3.3
ALONE = 128  # multiprocessors for an exchange that runs beside nothing
GAIN = 1.05  # the least estimated speed-up for which both run at once; below it, the estimate is too uncertain
SHARES = range(8, 68, 2)  # of multiprocessors, to choose from


def sms_beside(total: int, link_bytes: int, moved_bytes: int, quantises: bool, unsummed: float, gemm_seconds: float,
               gemm_tiles: int, most: int | None = None) -> int:
    """Multiprocessors that a combine should take beside a GEMM.

    Args:
        total: multiprocessors of the GPU.
        link_bytes: bytes that leave this rank.
        moved_bytes: bytes that the combine reads and writes.
        quantises: whether the combine quantises what it sends.
        unsummed: rows that travel, divided by the rows of y that they are sums of. 1: each is a copy of one row.
        gemm_seconds: the GEMM's duration alone. 0 disables the overlap.
        gemm_tiles: output tiles of the GEMM.
        most: the most multiprocessors that the combine may take. It never takes more than half of all.

    Returns:
        0 where running one after the other is about as fast.
    """
    if gemm_seconds <= 0:
        return 0
    copied = min(unsummed, 1)
    rate = (QUANTISED_BESIDE if quantises else MOVED_BESIDE) / (copied + (1 - copied) * SUMS)
    rounds = -(-gemm_tiles // total)

    # Of equally good shares, the smallest: more multiprocessors slow down the GEMM's memory accesses.
    best, least, limit = 0, math.inf, min(most or total, total // 2)
    for sms in SHARES:
        if sms > limit:
            break
        combine = max(link_bytes / LINK, moved_bytes / min(sms * rate, MOVED_ALONE))
        gemm = gemm_seconds * -(-gemm_tiles // (total - sms)) / rounds
        if max(combine, gemm) < least:
            best, least = sms, max(combine, gemm)
    one_by_one = max(link_bytes / LINK, moved_bytes / MOVED_ALONE) + gemm_seconds
    return best if best and GAIN * least < one_by_one else 0
