# SPDX-License-Identifier: Apache-2.0
"""What a build of the images takes from outside: Debian's packages and Python's wheels. Each is fetched once; later builds are offline.

- Debian: a proxy for apt and debootstrap keeps every file. They check the signature of the index, and each package's hash against it.
  The bill of materials of an image states each package with its SHA-256.
- Python: the lock files pin every wheel by its SHA-256, and pip checks it when it downloads and again when it installs.
"""

import hashlib
import re
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

from packaging.markers import Marker
from packaging.requirements import Requirement

from release.platforms import Platform

IMAGE_PYTHON = "3.11.2"
"""The Python of the images' Debian."""
_NEWEST_GLIBC = 36
_OLDEST_GLIBC = 5
_DOWNLOAD_SECONDS = 300
_CONTINUED = "\\"


class InputError(Exception):
    """An input is missing and cannot be fetched."""


# --- Python -------------------------------------------------------------------------------------------------------


def locked(lock: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the lines of a lock file that apply to an environment of PEP 508, without their markers, by the name of the package."""
    found = {}
    for block in re.split(r"\n(?=[A-Za-z0-9])", lock.read_text()):
        if "==" in block and not block.startswith("#"):
            requirement = Requirement(block.partition(_CONTINUED)[0].strip())
            if requirement.marker is None or Marker(str(requirement.marker)).evaluate(dict(environment)):
                head, _, hashes = block.partition("\n")
                found[requirement.name] = f"{head.partition(' ;')[0].removesuffix(_CONTINUED).rstrip()} {_CONTINUED}\n{hashes}"
    return found


def environment_of(platform: Platform, python: str) -> dict[str, str]:
    """Return the environment of PEP 508 for CPython of a version on a platform."""
    return {
        "implementation_name": "cpython",
        "os_name": "posix",
        "platform_machine": platform.machine,
        "platform_python_implementation": "CPython",
        "platform_system": "Linux",
        "python_full_version": python,
        "python_version": ".".join(python.split(".")[:2]),
        "sys_platform": "linux",
    }


def fetch_wheels(requirements: Mapping[str, str], folder: Path, platform: Platform, python: str, *, offline: bool) -> Path:
    """Download the wheels of locked requirements for a platform; return their folder, one for each set of requirements.

    Raises: InputError when a wheel cannot be had.
    """
    text = "\n".join(requirements.values()) + "\n"
    wheels = folder / hashlib.sha256(f"{platform.architecture} {python} {text}".encode()).hexdigest()[:16]
    if wheels.exists():
        return wheels
    if offline:
        raise InputError(f"the wheels for {platform.architecture} are not fetched: run make release once with a network")
    unfinished = wheels.with_suffix(".unfinished")
    unfinished.mkdir(parents=True, exist_ok=True)
    listed = unfinished / "requirements.txt"
    listed.write_text(text)
    tags = [f"manylinux_2_{minor}_{platform.machine}" for minor in range(_NEWEST_GLIBC, _OLDEST_GLIBC - 1, -1)]
    tags += [f"manylinux{year}_{platform.machine}" for year in ("2014", "2010", "1")]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes", "--only-binary=:all:"]
    command += ["--implementation=cp", f"--python-version={python.rpartition('.')[0]}", *[f"--platform={tag}" for tag in tags]]
    command += [f"--dest={unfinished}", f"--requirement={listed}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise InputError(f"pip download for {platform.architecture} failed: {done.stderr.strip()[-2000:]}")
    listed.unlink()
    unfinished.rename(wheels)
    return wheels


# --- Debian -------------------------------------------------------------------------------------------------------


@contextmanager
def debian_proxy(folder: Path, *, offline: bool) -> Iterator[str]:
    """Serve a proxy for apt and debootstrap, which keeps what it fetches; yield its URL."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            kept = _kept(folder, self.path)
            if kept is None or (not kept.exists() and (offline or not _download(self.path, kept))):
                self.send_error(404)
                return
            data = kept.read_bytes()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            """Log nothing: a failed build shows what apt reports."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def debian_hashes(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every fetched package by its file name, such as ``python3_3.11.2-1+b1_amd64.deb``."""
    return {unquote(path.name): hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*.deb")}


def _kept(folder: Path, url: str) -> Path | None:
    """Return where the file of a URL is kept; None for a URL that no apt asks for."""
    parts = urlsplit(url)
    path = unquote(parts.path)
    if parts.scheme != "http" or not parts.hostname or ".." in path.split("/"):
        return None
    return folder / parts.hostname / path.lstrip("/")


def _download(url: str, target: Path) -> bool:
    """Fetch a file; return whether the archive has it."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=_DOWNLOAD_SECONDS) as response:
            data = response.read()
    except urllib.error.URLError:
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f"{target.name}.{threading.get_ident()}.unfinished")
    unfinished.write_bytes(data)
    unfinished.rename(target)
    return True
