# SPDX-License-Identifier: Apache-2.0
"""How many multiprocessors an exchange takes: the model, and its constants, measured on H200s
(examples/benchmarks/overlap.py).

    alone       max(off-rank bytes / LINK, bytes read and written / MOVED_ALONE), with ALONE multiprocessors
    beside      the longest of
                off-rank bytes / LINK
                bytes read and written * sums / (multiprocessors * MOVED_BESIDE), or / MOVED_ALONE
                the GEMM's time alone * its rounds on the multiprocessors left to it / its rounds on all
    ahead       a dispatch: the longer of off-rank bytes / LINK and bytes read and written / (multiprocessors *
                AHEAD_BESIDE), rows counted as so much wider as they cost; the GEMM of its rows computes meanwhile what
                the multiprocessors left to it can, then the rest on all; and HANDOVER
    fed         as beside; and of the shorter of both what one of the steps takes that one hands to the other in

sums: 1 where each row that travels is one row of y, which is copied, growing to SUMS where it is the sum of many. A
round is what a persistent GEMM computes at a time, a tile on each multiprocessor: a share that leaves it no more of
them costs it nothing.
"""

import math
from collections.abc import Iterable

LINK = 320e9  # bytes/s that leave or enter a GPU over all its links
MOVED_ALONE = 2.1e12  # bytes/s
MOVED_BESIDE = 72e9  # bytes/s of one multiprocessor while a GEMM uses the same memory
QUANTISED_BESIDE = 38e9  # the same where it quantises what it sends
SUMS = 3.3
ALONE = 128
AHEAD_BESIDE = 40e9  # bytes/s of one multiprocessor that a dispatch quantises and moves beside the GEMM of its rows
DISPATCHED_ALONE = 2.4e12  # bytes/s of a dispatch
AHEAD_VALUES = 1024  # it takes so many of a row at a time, and about as long for what a row costs by itself
HANDOVER = 60e-6  # seconds: the order of the rows, the GEMM's second launch, and what is uneven before it
GAIN, GAIN_AHEAD = 1.05, 1.075  # at least, for running beside: the model knows no better
SHARES = range(8, 68, 2)
SHARES_AHEAD = range(32, 50, 2)  # with fewer, the GEMM waits more than the model knows


def share(total: int, link_bytes: int, moved_bytes: int, quantises: bool, unsummed: float, gemm_seconds: float,
          gemm_tiles: int, most: int | None = None, steps: int | None = None) -> int:
    """Multiprocessors for an exchange beside a GEMM of so many seconds and tiles.

    Args:
        total, most: multiprocessors that there are, that the exchange may have at most.
        quantises: the exchange quantises what it sends.
        unsummed: rows that travel, of the rows that they are sums of: 1 where none is a sum.
        steps: the GEMM computes what the exchange sends, in so many steps. None: something else.

    Returns:
        0 where one by one is about as fast, or the GEMM's time is 0.
    """
    if gemm_seconds <= 0:
        return 0
    copied = min(unsummed, 1)
    rate = (QUANTISED_BESIDE if quantises else MOVED_BESIDE) / (copied + (1 - copied) * SUMS)
    rounds = -(-gemm_tiles // total)

    # Of equals, the least: more of them are more in the way of the GEMM's memory accesses.
    best, least, limit = 0, math.inf, min(most or total, total // 2)
    for sms in SHARES:
        if sms > limit:
            break
        exchange = max(link_bytes / LINK, moved_bytes / min(sms * rate, MOVED_ALONE))
        gemm = gemm_seconds * -(-gemm_tiles // (total - sms)) / rounds
        together = max(exchange, gemm) + (min(exchange, gemm) / steps if steps else 0)
        if together < least:
            best, least = sms, together
    one_by_one = max(link_bytes / LINK, moved_bytes / MOVED_ALONE) + gemm_seconds
    return best if best and GAIN * least < one_by_one else 0


def share_ahead(total: int, link_bytes: int, hidden_size: int, bytes_of_value: float, gemm_seconds: float,
                most: int | None = None, shares: Iterable[int] = SHARES_AHEAD,
                gain: float = GAIN_AHEAD) -> tuple[int, float]:
    """Multiprocessors for a dispatch beside the GEMM of its rows, and how much of the GEMM is computed meanwhile.

    Args:
        total, most: multiprocessors that there are, that the dispatch may have at most.
        bytes_of_value: of all rows together, read and written for each of the hidden_size values of a row.
        shares, gain: multiprocessors to choose from; by which factor one by one must be slower.

    Returns:
        0, 0 where one by one is about as fast, or the GEMM's time is 0.
    """
    if gemm_seconds <= 0:
        return 0, 0.0
    wide = (math.ceil(hidden_size / AHEAD_VALUES) + 1) * AHEAD_VALUES
    best, least = (0, 0.0), math.inf
    for sms in shares:
        if sms > min(most or total, total // 2):
            break
        exchange = max(link_bytes / LINK, wide * bytes_of_value / (sms * AHEAD_BESIDE))
        meanwhile = min(exchange * (total - sms) / total / gemm_seconds, 1.0)
        together = exchange + (1 - meanwhile) * gemm_seconds + HANDOVER
        if together < least:
            best, least = (sms, meanwhile), together
    one_by_one = max(link_bytes / LINK, hidden_size * bytes_of_value / DISPATCHED_ALONE) + gemm_seconds
    return best if gain * least < one_by_one else (0, 0.0)
