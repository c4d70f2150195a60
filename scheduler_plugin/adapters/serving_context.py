# SPDX-License-Identifier: Apache-2.0
"""A TLS context with a certificate from memory, which can be replaced while the context is in use.

Python's OpenSSL interface loads certificates from files only. So they are written to an unnamed file in memory for that moment: the key is
never on a disk, and the file system may be read-only.
"""

import os
import ssl

from scheduler_plugin.errors import CertificateError


class ServingContext:
    """Implements ``ports.Serving``. Without a certificate, handshakes fail."""

    def __init__(self) -> None:
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2

    def serve(self, certificate: bytes, key: bytes) -> None:
        """See ``ports.Serving``."""
        descriptor = os.memfd_create("webhook-certificate", os.MFD_CLOEXEC)
        try:
            with open(descriptor, "wb", closefd=False) as file:
                file.write(certificate + key)
            self.context.load_cert_chain(f"/proc/self/fd/{descriptor}")
        except (OSError, ssl.SSLError) as exc:
            raise CertificateError(f"cannot serve the certificate: {exc}") from exc
        finally:
            os.close(descriptor)
