# SPDX-License-Identifier: Apache-2.0
"""Reads and creates X.509 certificates: the webhook's certificate authority and its serving certificate.

``core.certificate`` decides what to create. Values in, values out, except the random keys and serial numbers.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from scheduler_plugin.core.certificate import AUTHORITIES, AUTHORITY_KEY, CERTIFICATE, KEY, Holdings, Span, Step

AUTHORITY_LIFE: Final = timedelta(days=3650)
CERTIFICATE_LIFE: Final = timedelta(days=90)
CLOCK_SKEW: Final = timedelta(minutes=5)
"""How long before its creation a certificate becomes valid, for API servers with a clock behind ours."""
_UNREADABLE: Final = (KeyError, ValueError, TypeError, UnsupportedAlgorithm, x509.ExtensionNotFound)


class WebhookAuthority:
    """Implements ``ports.Authority`` with keys on the curve P-256."""

    def inspect(self, data: Mapping[str, bytes]) -> Holdings:
        """See ``ports.Authority``."""
        if not data:
            return Holdings()
        flaws: list[str] = []
        authorities = _authorities(data, flaws)
        signing = _signing(data, authorities, flaws)
        serving = _serving(data, authorities, flaws)
        return Holdings(
            authority=None if signing is None else _span(signing),
            certificate=None if serving is None else _span(serving),
            names=frozenset() if serving is None else frozenset(_names(serving)),
            flaws=tuple(flaws),
        )

    def carry_out(self, step: Step, data: Mapping[str, bytes], names: Sequence[str], now: float) -> dict[str, bytes]:
        """See ``ports.Authority``."""
        when = datetime.fromtimestamp(now, UTC)
        trusted = _authorities(data, [])
        made = dict(data)
        if step in (Step.START_AFRESH, Step.RENEW_AUTHORITY):
            trusted = [authority for authority in trusted if when < authority.not_valid_after_utc]
            key = ec.generate_private_key(ec.SECP256R1())
            trusted.insert(0, _new_authority(key, when))
            made[AUTHORITIES] = b"".join(_pem(authority) for authority in trusted)
            made[AUTHORITY_KEY] = _key_pem(key)
        if step in (Step.START_AFRESH, Step.RENEW_CERTIFICATE):
            key = ec.generate_private_key(ec.SECP256R1())
            made[CERTIFICATE] = _pem(_new_certificate(key, trusted[0], _read_key(made[AUTHORITY_KEY]), names, when))
            made[KEY] = _key_pem(key)
        return made

    def ends_at(self, data: Mapping[str, bytes]) -> float:
        """See ``ports.Authority``."""
        return _span(x509.load_pem_x509_certificate(data[CERTIFICATE])).ends_at


# --- reading --------------------------------------------------------------------------------------------------------


def _authorities(data: Mapping[str, bytes], flaws: list[str]) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(data[AUTHORITIES])
    except _UNREADABLE as exc:
        flaws.append(f"{AUTHORITIES}: {exc}")
        return []


def _signing(data: Mapping[str, bytes], authorities: list[x509.Certificate], flaws: list[str]) -> x509.Certificate | None:
    try:
        if authorities and _read_key(data[AUTHORITY_KEY]).public_key() == authorities[0].public_key():
            return authorities[0]
        flaws.append(f"{AUTHORITY_KEY} is not the key of the first certificate in {AUTHORITIES}")
    except _UNREADABLE as exc:
        flaws.append(f"{AUTHORITY_KEY}: {exc}")
    return None


def _serving(data: Mapping[str, bytes], authorities: list[x509.Certificate], flaws: list[str]) -> x509.Certificate | None:
    try:
        certificate = x509.load_pem_x509_certificate(data[CERTIFICATE])
        if _read_key(data[KEY]).public_key() != certificate.public_key():
            flaws.append(f"{KEY} is not the key of {CERTIFICATE}")
            return None
        if not any(_signed(certificate, authority) for authority in authorities):
            flaws.append(f"{CERTIFICATE} was not signed by any certificate in {AUTHORITIES}")
            return None
    except _UNREADABLE as exc:
        flaws.append(f"{CERTIFICATE} and {KEY}: {exc}")
        return None
    return certificate


def _signed(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (InvalidSignature, ValueError, TypeError):
        return False
    return True


def _read_key(pem: bytes) -> ec.EllipticCurvePrivateKey:
    key = serialization.load_pem_private_key(pem, password=None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError("expected a key on an elliptic curve")  # noqa: TRY004 - the content is wrong, not the caller's type
    return key


def _names(certificate: x509.Certificate) -> list[str]:
    try:
        return certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value.get_values_for_type(x509.DNSName)
    except x509.ExtensionNotFound:
        return []


def _span(certificate: x509.Certificate) -> Span:
    return Span(certificate.not_valid_before_utc.timestamp(), certificate.not_valid_after_utc.timestamp())


# --- making ---------------------------------------------------------------------------------------------------------


def _new_authority(key: ec.EllipticCurvePrivateKey, now: datetime) -> x509.Certificate:
    serial = x509.random_serial_number()
    # A name of its own, so that no verifier takes it for the authority it follows.
    name = _common_name(f"aliquot webhook authority {serial:x}"[:64])
    builder = _builder(name, name, key, serial, now - CLOCK_SKEW, now + AUTHORITY_LIFE)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(signs_certificates=True), critical=True)
    return builder.sign(key, hashes.SHA256())


def _new_certificate(
    key: ec.EllipticCurvePrivateKey,
    authority: x509.Certificate,
    authority_key: ec.EllipticCurvePrivateKey,
    names: Sequence[str],
    now: datetime,
) -> x509.Certificate:
    ends = min(now + CERTIFICATE_LIFE, authority.not_valid_after_utc)
    # The names proper are alternative names; a common name has at most 64 characters, a Service's name can have more.
    builder = _builder(_common_name("aliquot webhook"), authority.subject, key, x509.random_serial_number(), now - CLOCK_SKEW, ends)
    builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(name) for name in names]), critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_usage(signs_certificates=False), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    return builder.add_extension(identifier, critical=False).sign(authority_key, hashes.SHA256())


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, serial: int, begins: datetime, ends: datetime
) -> x509.CertificateBuilder:
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key()).serial_number(serial)
    builder = builder.not_valid_before(begins).not_valid_after(ends)
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)


def _common_name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
