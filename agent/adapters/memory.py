"""Keeps the process small: one heap for all threads.

glibc gives threads heaps of their own, up to eight per core, and every one keeps what a scrape once needed. The threads here take turns by
Python's lock anyway, so one heap costs them nothing. Large pieces, such as the text of a scrape, stay out of it: glibc raises the size
from which it keeps them out with the first that is freed, unless it is told not to.
"""

import ctypes

_M_ARENA_MAX = -8
_M_MMAP_THRESHOLD = -3
_M_TRIM_THRESHOLD = -1
"""``mallopt(3)``."""
_LARGE_BYTES = 64 << 10


def use_one_heap() -> bool:
    """Let all threads allocate from one heap; to be called before there is a second. False where the C library has no such options."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    options = ((_M_ARENA_MAX, 1), (_M_MMAP_THRESHOLD, _LARGE_BYTES), (_M_TRIM_THRESHOLD, _LARGE_BYTES))
    return all(mallopt(option, value) == 1 for option, value in options)
