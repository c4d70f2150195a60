# SPDX-License-Identifier: Apache-2.0
"""Messages without the seconds that a driver call has been hanging.

A message about a hang contains its duration. A reader wants that number. Code that compares a message with the previous one does not: each
comparison would report a change.
"""

import re

_SECONDS = re.compile(r"( has not returned) for [0-9]+(?:\.[0-9]+)? s\b")


def without_duration(message: str) -> str:
    """Return the message without the seconds that a call has been hanging."""
    return _SECONDS.sub(r"\1", message)
