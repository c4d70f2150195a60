"""The node's pages that its containers share, a line for each device: who wants a device first, and whose turn on it is.

Mirror of cuda_shim/limit/priority.h and turns.h, which have the reasons; a test compiles the headers and compares. The agent makes the
pages, mends what containers spoil of them, and says which line is which device, the same on both; it never reads a line.
"""

import struct
from dataclasses import dataclass
from typing import Final

LINES: Final = 63
MAGIC_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class NodePage:
    """The form of one page: a line that begins with the magic number, then those of the devices."""

    magic: int
    line_bytes: int

    @property
    def size_bytes(self) -> int:
        """The whole page."""
        return (1 + LINES) * self.line_bytes

    def empty(self) -> bytes:
        """A page on which nobody has written."""
        return struct.pack("<Q", self.magic).ljust(self.size_bytes, b"\0")

    def accepts(self, size_bytes: int, beginning: bytes) -> bool:
        """Whether a file of this size that begins so is such a page; whatever its lines say."""
        return size_bytes == self.size_bytes and beginning == self.empty()[:MAGIC_BYTES]


PRIORITY: Final = NodePage(0x3149525051414C41, 64)
"""By which containers of high priority tell those of low priority that they want a device."""
TURNS: Final = NodePage(0x314E525451414C41, 1024)
"""By which containers that hold more memory than they are guaranteed share a device too small for them together."""


def line_of(minor: int) -> int:
    """Return a device's line, from 1; 0 for a device beyond the pages, which then knows neither priorities nor turns."""
    return minor + 1 if minor < LINES else 0
