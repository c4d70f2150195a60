# SPDX-License-Identifier: Apache-2.0
"""HTTP requests with something wrong in them, as a strategy of hypothesis."""

from collections.abc import Sequence

from hypothesis import strategies as st

PIECES = [
    b"\x00",
    b"\xff",
    b"\r",
    b"\n",
    b" ",
    b":",
    b"Host: x\r\n",
    b"Content-Length: -1\r\n",
    b"Content-Length: 9e9\r\n",
    b"\x16\x03\x01",
    b"%zz",
]


@st.composite
def malformed(draw: st.DrawFn, heads: Sequence[bytes], bodies: Sequence[bytes] = (b"",)) -> bytes:
    """Draw the bytes of a request: a valid one with up to three pieces put in, or bytes taken out.

    Args: heads: request line and headers.
    """
    sent = draw(st.sampled_from(heads)) + b"\r\n" + draw(st.sampled_from(bodies))
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(sent)))
        taken = draw(st.integers(0, 8))
        sent = sent[:at] + draw(st.sampled_from([b"", *PIECES])) + sent[at + taken :]
    return sent
