# SPDX-License-Identifier: Apache-2.0
"""The UIDs of reservations that are no pod's own: room held for a waiting pod, and what an allocated ResourceClaim has.

Held room counts as taken for other pods, and not as promised in figures. A claim's devices count in both.
"""

from collections.abc import Iterable
from typing import Final

HOLD_PREFIX: Final = "hold/"
"""Before the UID of a pod: the UID under which its room is reserved. Its own UID is for the reservation that it gets when it fits."""
CLAIM_PREFIX: Final = "claim/"
"""Before the UID of a ResourceClaim: the UID under which its devices are reserved. Several pods may use one claim."""


def hold_uid(pod_uid: str) -> str:
    """Return the UID under which the room of a waiting pod is held."""
    return HOLD_PREFIX + pod_uid


def holds_of(uids: Iterable[str]) -> list[str]:
    """Return the UIDs of reservations that hold room for waiting pods."""
    return [uid for uid in uids if uid.startswith(HOLD_PREFIX)]


def claim_uid(uid: str) -> str:
    """Return the UID under which the devices of a ResourceClaim are reserved."""
    return CLAIM_PREFIX + uid


def is_of_claim(uid: str) -> bool:
    """Whether a reservation is that of a claim, and of no pod."""
    return uid.startswith(CLAIM_PREFIX)
