# SPDX-License-Identifier: Apache-2.0
"""How many multiprocessors an exchange takes: the model, and its constants, measured on H200s.

    alone       max(off-rank bytes / LINK, bytes read and written / MOVED_ALONE), with ALONE multiprocessors
    beside      the longest of off-rank bytes / LINK, bytes read and written / (multiprocessors * MOVED_BESIDE), and
                the GEMM's time alone * all multiprocessors / those left to it
"""

LINK = 320e9  # bytes/s that leave or enter a GPU over all its links
MOVED_ALONE = 2.1e12  # bytes/s
MOVED_BESIDE = 28e9  # bytes/s of one multiprocessor while a GEMM uses the same memory; without one it is 37e9
ALONE = 128
SHARES = range(8, 68, 4)


def share(total: int, link_bytes: int, moved_bytes: int, gemm_seconds: float, most: int | None = None) -> int:
    """Multiprocessors of `total`, at most `most`, for an exchange beside a GEMM of so many seconds; 0: one by one is
    faster, or the GEMM's time is 0."""
    if gemm_seconds <= 0:
        return 0

    def together(sms: int) -> float:
        return max(link_bytes / LINK, moved_bytes / (sms * MOVED_BESIDE), gemm_seconds * total / (total - sms))

    best = min((sms for sms in SHARES if sms <= min(most or total, total // 2)), key=together, default=0)
    one_by_one = max(link_bytes / LINK, moved_bytes / MOVED_ALONE) + gemm_seconds
    return best if best and together(best) < one_by_one else 0
