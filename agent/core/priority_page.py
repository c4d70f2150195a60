"""The node's priority page, by which containers of high priority tell those of low priority that they want a device.

Mirror of cuda_shim/limit/priority.h, which has the reasons; a test compiles the header and compares. The agent makes the page and says
which line is which device; it never reads or writes a line.
"""

import struct
from typing import Final

PRIORITY_MAGIC: Final = 0x3149525051414C41
PRIORITY_LINES: Final = 63
PRIORITY_LINE_BYTES: Final = 64
PRIORITY_BYTES: Final = (1 + PRIORITY_LINES) * PRIORITY_LINE_BYTES


def empty_page() -> bytes:
    """A page on which no device is wanted."""
    return struct.pack("<Q", PRIORITY_MAGIC).ljust(PRIORITY_BYTES, b"\0")


def is_page(content: bytes) -> bool:
    """Whether a file is a page that containers can have mapped."""
    return len(content) == PRIORITY_BYTES and content[:8] == empty_page()[:8]


def line_of(minor: int) -> int:
    """Return a device's line, from 1; 0 for a device beyond the page, which then knows no priorities."""
    return minor + 1 if minor < PRIORITY_LINES else 0
