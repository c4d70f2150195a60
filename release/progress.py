# SPDX-License-Identifier: Apache-2.0
"""Lines that say what a build is doing: it takes minutes, and most of them pass without other output."""

import sys


def begin(part: str) -> None:
    """Say which part is built now."""
    sys.stdout.write(f"building {part}\n")
    sys.stdout.flush()
