# SPDX-License-Identifier: Apache-2.0
"""When certificates end, against what openssl says of the same files."""

import shutil
import subprocess
from datetime import UTC, datetime

import pytest

from scheduler_plugin.adapters.certificate import expires_at


def make(directory, *flags: str):
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    path = directory / "tls.crt"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", "/CN=webhook"]
    subprocess.run([*command, "-keyout", str(directory / "tls.key"), "-out", str(path), *flags], check=True, capture_output=True)
    return path


def as_openssl_says(path) -> float:
    done = subprocess.run(["openssl", "x509", "-noout", "-enddate", "-in", str(path)], check=True, capture_output=True, text=True)
    return datetime.strptime(done.stdout.strip().partition("=")[2], "%b %d %H:%M:%S %Y %Z").replace(tzinfo=UTC).timestamp()


@pytest.mark.parametrize("days", [1, 365, 365 * 60])
def test_it_is_what_openssl_says_before_and_after_2050(tmp_path, days):
    path = make(tmp_path, "-days", str(days))
    assert expires_at(path) == as_openssl_says(path)


def test_of_a_chain_the_first_counts(tmp_path):
    path = make(tmp_path, "-days", "3")
    wanted = expires_at(path)
    (tmp_path / "ca").mkdir()
    path.write_text("a comment\n" + path.read_text() + make(tmp_path / "ca", "-days", "900").read_text())
    assert expires_at(path) == wanted


@pytest.mark.parametrize("text", ["", "key", "-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----\n"])
def test_invalid_certificate_is_reported(tmp_path, text):
    path = tmp_path / "tls.crt"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"tls\.crt"):
        expires_at(path)
