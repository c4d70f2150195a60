# SPDX-License-Identifier: Apache-2.0
"""Reads the version of an installed package from the distribution's package database."""

import re
import shutil
import subprocess

from aliquot_cli.doctor.host import Host, UnreadableError

_DPKG_STATUS = "/var/lib/dpkg/status"
_RPM_DATABASES = ("/usr/lib/sysimage/rpm", "/var/lib/rpm")
_RPM_SECONDS = 20


def installed_version(host: Host, package: str) -> str | None:
    """Return a package's version, or None where it is not installed.

    Raises: UnreadableError: the database exists and cannot be read.
    """
    return _dpkg_version(host, package) or _rpm_version(host, package)


def _dpkg_version(host: Host, package: str) -> str | None:
    match = re.search(rf"^Package: {re.escape(package)}\n(?:.+\n)*?Version: (\S+)", host.text(_DPKG_STATUS) or "", re.MULTILINE)
    return match[1] if match else None


def _rpm_version(host: Host, package: str) -> str | None:
    """Run rpm, because its database has had three formats. The program can be this image's; the database is the node's."""
    database = next((path for path in _RPM_DATABASES if host.names(path)), None)
    if database is None:
        return None
    program = shutil.which("rpm")
    if program is None:
        raise UnreadableError(f"{database}: the program rpm, which reads it, is not installed here")
    command = [program, "--dbpath", str(host.path(database)), "-q", "--queryformat", "%{VERSION}-%{RELEASE}\n", package]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_RPM_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise UnreadableError(f"{database}: rpm: {exc}") from exc
    if "is not installed" in done.stdout:
        return None
    if done.returncode != 0 or not done.stdout.strip():
        raise UnreadableError(f"{database}: rpm ended with {done.returncode}: {(done.stderr or done.stdout).strip()}")
    return done.stdout.split()[0]
