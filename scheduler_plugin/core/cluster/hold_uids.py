# SPDX-License-Identifier: Apache-2.0
"""The UIDs of reservations that hold room for waiting pods. They count as taken for other pods, and not as promised in figures."""

from collections.abc import Iterable
from typing import Final

HOLD_PREFIX: Final = "hold/"
"""Before the UID of a pod: the UID under which its room is reserved. Its own UID is for the reservation that it gets when it fits."""


def hold_uid(pod_uid: str) -> str:
    """Return the UID under which the room of a waiting pod is held."""
    return HOLD_PREFIX + pod_uid


def holds_of(uids: Iterable[str]) -> list[str]:
    """Return the UIDs of reservations that hold room for waiting pods."""
    return [uid for uid in uids if uid.startswith(HOLD_PREFIX)]
