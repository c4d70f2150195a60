# SPDX-License-Identifier: Apache-2.0
"""Reduces the process's memory: one heap for all threads.

glibc gives threads their own heaps, up to eight per core, and each keeps the memory that a scrape once needed. Python's lock runs one
thread at a time anyway, so one heap costs no time. Large blocks, such as the text of a scrape, must stay out of the heap: by default glibc
raises the size limit for that when the first such block is freed, so the limit is set explicitly.
"""

import ctypes

_M_ARENA_MAX = -8
_M_MMAP_THRESHOLD = -3
_M_TRIM_THRESHOLD = -1
"""``mallopt(3)``."""
_LARGE_BYTES = 64 << 10


def use_one_heap() -> bool:
    """Let all threads allocate from one heap. Call it before the second thread starts. False if the C library lacks these options."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    options = ((_M_ARENA_MAX, 1), (_M_MMAP_THRESHOLD, _LARGE_BYTES), (_M_TRIM_THRESHOLD, _LARGE_BYTES))
    return all(mallopt(option, value) == 1 for option, value in options)
