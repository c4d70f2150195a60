# SPDX-License-Identifier: Apache-2.0
"""Two helpers of the caches: a bounded dictionary, and how much they keep."""

from collections import OrderedDict
from typing import Final, TypeVar

CALLS_KEPT: Final = 8
"""How many recent pods and node lists are kept. kube-scheduler sends each of them two or three times in a row."""
MAX_PODS: Final = 10_000
"""How many pods are kept for the preemptor: without one they are never taken out."""
_K = TypeVar("_K")
_V = TypeVar("_V")


def keep(kept: OrderedDict[_K, _V], key: _K, value: _V, most: int = CALLS_KEPT) -> None:
    """Store a value as the most recent one, and drop the oldest beyond ``most``."""
    kept[key] = value
    kept.move_to_end(key)
    if len(kept) > most:
        kept.popitem(last=False)
