# SPDX-License-Identifier: Apache-2.0
"""Pages of the status server."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Page:
    """A reply of the status server."""

    status: int
    content_type: str
    body: bytes
