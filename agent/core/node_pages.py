# SPDX-License-Identifier: Apache-2.0
"""The node's pages that its containers share, with a line for each device: one page for priorities, one for time slots.

Mirror of cuda_shim/limit/priority.h and turns.h, which explain the reasons; a test compiles the headers and compares. The agent creates the
pages, repairs them if containers damage them, and assigns the lines to devices, the same on both pages. It never reads a line.
"""

import struct
from dataclasses import dataclass
from typing import Final

LINES: Final = 63
MAGIC_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class NodePage:
    """The form of a page: a first line that begins with the magic number, then the devices' lines."""

    magic: int
    line_bytes: int

    @property
    def size_bytes(self) -> int:
        """The whole page."""
        return (1 + LINES) * self.line_bytes

    def empty(self) -> bytes:
        """The content of an unused page."""
        return struct.pack("<Q", self.magic).ljust(self.size_bytes, b"\0")

    def accepts(self, size_bytes: int, beginning: bytes) -> bool:
        """Whether a file with this size and beginning is such a page. The content of its lines does not matter."""
        return size_bytes == self.size_bytes and beginning == self.empty()[:MAGIC_BYTES]


PRIORITY: Final = NodePage(0x3149525051414C41, 64)
"""Containers of high priority use it to request a device from those of low priority."""
TURNS: Final = NodePage(0x314E525451414C41, 1024)
"""Containers with memory burst use it to take time slots on a device that is too small for all of them together."""


def line_of(minor: int) -> int:
    """Return a device's line, from 1; 0 for a device without a line, which then has no priorities and no time slots."""
    return minor + 1 if minor < LINES else 0
