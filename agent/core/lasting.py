"""What of a sentence stays the same while the trouble it tells of does.

A hang is told with the seconds it has lasted, which is right for whoever reads it now, and wrong for whatever compares the sentence with
the last one: each would be news.
"""

import re

_SECONDS = re.compile(r"( has not returned) for [0-9]+(?:\.[0-9]+)? s\b")


def lasting(sentence: str) -> str:
    """Return the sentence without the seconds that a call has hung."""
    return _SECONDS.sub(r"\1", sentence)
