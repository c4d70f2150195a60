"""When a certificate ends, for the metric that warns of it. Read from the file itself."""

from pathlib import Path

from cryptography import x509


def expires_at(path: Path) -> float:
    """Return when the first certificate of a PEM file ends, in seconds since 1970. Raises OSError or ValueError."""
    try:
        first, *_ = x509.load_pem_x509_certificates(path.read_bytes())
    except ValueError as exc:
        raise ValueError(f"{path}: want a PEM certificate: {exc}") from exc
    return first.not_valid_after_utc.timestamp()
