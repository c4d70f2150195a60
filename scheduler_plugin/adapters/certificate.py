# SPDX-License-Identifier: Apache-2.0
"""Reads from a certificate file when it expires, for the metric."""

from pathlib import Path

from cryptography import x509


def expires_at(path: Path) -> float:
    """Return when the first certificate of a PEM file expires, in seconds since 1970. Raises OSError or ValueError."""
    try:
        first, *_ = x509.load_pem_x509_certificates(path.read_bytes())
    except ValueError as exc:
        raise ValueError(f"{path}: expected a PEM certificate: {exc}") from exc
    return first.not_valid_after_utc.timestamp()
