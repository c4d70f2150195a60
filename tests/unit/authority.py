# SPDX-License-Identifier: Apache-2.0
"""Certificates for servers of tests."""

import ssl
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID


class Authority:
    """A CA of some name and the certificates that it signs, for 127.0.0.1."""

    def __init__(self, name: str) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.certificate = self._sign(self._name, self._key, x509.BasicConstraints(ca=True, path_length=None))

    def serving_context(self, folder: Path) -> ssl.SSLContext:
        key = ec.generate_private_key(ec.SECP256R1())
        address = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))])
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        file = folder / f"{self._name.rfc4514_string()}.pem"
        file.write_bytes(self._sign(x509.Name([]), key, address) + private)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(file)
        return context

    def _sign(self, name: x509.Name, key: ec.EllipticCurvePrivateKey, extension: x509.ExtensionType) -> bytes:
        now = datetime.now(UTC)
        draft = x509.CertificateBuilder().subject_name(name).issuer_name(self._name).public_key(key.public_key())
        draft = draft.serial_number(x509.random_serial_number()).add_extension(extension, critical=True)
        draft = draft.not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=1))
        return draft.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM)
