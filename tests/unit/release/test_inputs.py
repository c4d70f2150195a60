# SPDX-License-Identifier: Apache-2.0
"""Inputs of a release: locked wheels by platform, and Debian's packages through a proxy that keeps them."""

import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from release.bom import debian_packages
from release.inputs import InputError, debian_proxy, environment_of, fetch_wheels, locked
from release.platforms import AMD64, ARM64
from tests.rendering import ROOT

LOCK = """\
first==1.0 \\
    --hash=sha256:aa
    # via aliquot
second==2.0 ; python_full_version < '3.12' \\
    --hash=sha256:bb
second==3.0 ; python_full_version >= '3.12' \\
    --hash=sha256:cc
"""


@pytest.mark.parametrize(("python", "version"), [("3.11.2", "2.0"), ("3.13.0", "3.0")])
def test_lock_lines_follow_the_target_python(tmp_path: Path, python: str, version: str) -> None:
    (tmp_path / "lock").write_text(LOCK)
    lines = locked(tmp_path / "lock", environment_of(ARM64, python))
    assert list(lines) == ["first", "second"]
    assert lines["second"].startswith(f"second=={version} \\\n    --hash=sha256:")


def test_build_lock_pins_what_builds_the_wheel() -> None:
    environment = environment_of(AMD64, "3.11.2")
    build, dev = (locked(ROOT / name, environment) for name in ("requirements-build.lock", "requirements-dev.lock"))
    assert list(build) == ["setuptools"]
    assert build["setuptools"].splitlines()[0] == dev["setuptools"].splitlines()[0]


def test_offline_build_without_wheels_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="run make release once with a network"):
        fetch_wheels({"first": "first==1.0"}, tmp_path, ARM64, "3.11.2", offline=True)


@pytest.fixture
def mirror() -> Iterator[tuple[str, list[str]]]:
    """An archive with one file, and the paths that were requested from it."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200 if self.path == "/pool/a_1.deb" else 404)
            self.end_headers()
            self.wfile.write(b"package")

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    server.server_close()


def get(proxy: str, url: str) -> bytes:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({"http": proxy}))
    with opener.open(url, timeout=10) as response:
        content: bytes = response.read()
    return content


def test_proxy_fetches_a_package_once(tmp_path: Path, mirror: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("no_proxy", raising=False)
    base, asked = mirror
    for offline in (False, False, True):
        with debian_proxy(tmp_path, offline=offline) as proxy:
            assert get(proxy, f"{base}/pool/a_1.deb") == b"package"
    assert asked == ["/pool/a_1.deb"]


@pytest.mark.parametrize("path", ["/pool/b_1.deb", "/../outside"])
def test_proxy_refuses_missing_files_and_escapes(
    tmp_path: Path, mirror: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.delenv("no_proxy", raising=False)
    with debian_proxy(tmp_path / "kept", offline=False) as proxy, pytest.raises(urllib.error.HTTPError, match="404"):
        get(proxy, mirror[0] + path)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_bill_of_materials_names_installed_packages_with_hashes() -> None:
    status = """\
Package: libc6
Status: install ok installed
Architecture: arm64
Version: 2.36-9+deb12u14
Description: GNU C Library
 more: text

Package: passwd
Status: install ok installed
Architecture: arm64
Version: 1:4.13+dfsg1-1

Package: gone
Status: deinstall ok config-files
Architecture: arm64
Version: 1
"""
    found = debian_packages(status, {"passwd_4.13+dfsg1-1_arm64.deb": "ab"})
    assert [(one["name"], one["version"]) for one in found] == [("libc6", "2.36-9+deb12u14"), ("passwd", "1:4.13+dfsg1-1")]
    assert found[0]["purl"] == "pkg:deb/debian/libc6@2.36-9%2Bdeb12u14?arch=arm64"
    assert found[1]["hashes"] == [{"alg": "SHA-256", "content": "ab"}]
