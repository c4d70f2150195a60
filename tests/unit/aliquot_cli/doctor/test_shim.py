# SPDX-License-Identifier: Apache-2.0
"""The shim against images made for the test: C libraries that have what it needs, and some that do not."""

import subprocess
from pathlib import Path

import pytest

from aliquot_cli.doctor import shim
from aliquot_cli.doctor.elf import ElfError, read_library
from aliquot_cli.doctor.findings import Finding, Severity
from aliquot_cli.doctor.host import Host
from aliquot_cli.doctor.options import DoctorOptions

pytestmark = pytest.mark.usefixtures("build_dir")


@pytest.fixture(scope="module")
def needs(build_dir) -> set[str]:
    libraries = [read_library(build_dir / "lib/shim" / name) for name in ("libcuda.so.1", "libnvidia-ml.so.1", "libaliquot-preload.so")]
    return {symbol for library in libraries for symbol in library.needs}


def make_library(path: Path, functions: set[str], version: str = "") -> None:
    """Compile a library that defines these functions, under one version where one is given."""
    path.parent.mkdir(parents=True, exist_ok=True)
    source, script = path.parent / "library.c", path.parent / "library.map"
    source.write_text("".join(f"void {name}(void) {{}}\n" for name in sorted(functions)))
    script.write_text(f"{version} {{ global: *; }};\n" if version else "{ global: *; };\n")
    flags = ["-shared", "-fPIC", "-nostdlib", "-fno-builtin", "-w", f"-Wl,--version-script={script}"]
    subprocess.run(["cc", *flags, "-o", path, source], check=True)


def examined(build_dir: Path, image: Path) -> Finding:
    options = DoctorOptions(shim_dir=str(build_dir / "lib/shim"), images=(str(image),))
    (finding,) = [one for one in shim.check(Host(Path("/")), options) if str(image) in one.found]
    return finding


def test_shim_needs_only_symbols_of_old_glibc(needs):
    versions = [tuple(map(int, symbol.rpartition("GLIBC_")[2].split("."))) for symbol in needs if "GLIBC_" in symbol]
    assert versions
    assert max(versions) <= (2, 17)


def test_shim_symbols_are_found_on_this_system_without_loading(build_dir):
    found = list(shim.check(Host(Path("/")), DoctorOptions(shim_dir=str(build_dir / "lib/shim"))))
    assert found[0].severity is Severity.OK
    assert all(words in found[0].found for words in ("the node's own system", "not loaded"))


def test_glibc_without_needed_versions_is_error_that_names_them(build_dir, tmp_path):
    make_library(tmp_path / "lib64/libc.so.6", {"malloc", "free"}, "GLIBC_2.2.5")
    finding = examined(build_dir, tmp_path)
    assert finding.severity is Severity.ERROR
    assert "@GLIBC_" in finding.found
    assert "malloc@GLIBC_2.2.5" not in finding.found


def test_musl_image_gets_explanation(build_dir, tmp_path, needs):
    names = {symbol.partition("@")[0] for symbol in needs if not symbol.startswith(("cu", "nvml"))}
    make_library(tmp_path / "lib/ld-musl-x86_64.so.1", names)
    finding = examined(build_dir, tmp_path)
    assert finding.severity is Severity.INFO
    assert "musl" in finding.found
    assert "finds all its symbols" in finding.found
    make_library(tmp_path / "lib/ld-musl-x86_64.so.1", names - {"mmap"})
    assert "does not find mmap" in examined(build_dir, tmp_path).found


def test_image_without_c_library_has_static_programs_only(build_dir, tmp_path):
    assert "static programs" in examined(build_dir, tmp_path).found


@pytest.mark.parametrize(
    ("layers", "files"),
    [
        pytest.param("var/lib/containerd/io.containerd.snapshotter.v1.overlayfs/snapshots", "fs", id="containerd"),
        pytest.param("var/lib/containers/storage/overlay", "diff", id="CRI-O"),
    ],
)
def test_images_that_a_runtime_unpacked_are_found(build_dir, tmp_path, layers, files):
    make_library(tmp_path / layers / "7" / files / "lib/ld-musl-x86_64.so.1", {"malloc"})
    make_library(tmp_path / layers / "9" / files / "lib64/libc.so.6", {"malloc"}, "GLIBC_2.2.5")
    found = list(shim.check(Host(tmp_path), DoctorOptions(shim_dir=str(build_dir / "lib/shim"))))
    assert {finding.severity for finding in found if layers in finding.found} == {Severity.INFO, Severity.ERROR}
    assert not any("--image" in finding.fix for finding in found)


def test_missing_image_kind_is_reported(build_dir, tmp_path):
    layer = tmp_path / "var/lib/docker/overlay2/1/diff"
    make_library(layer / "lib64/libc.so.6", {"malloc"}, "GLIBC_2.2.5")
    (finding,) = [one for one in shim.check(Host(tmp_path), DoctorOptions(shim_dir=str(build_dir / "lib/shim"))) if "--image" in one.fix]
    assert "no image with musl" in finding.found


def test_missing_shim_is_error(tmp_path):
    (finding,) = shim.check(Host(Path("/")), DoctorOptions(shim_dir=str(tmp_path)))
    assert finding.check == "shim.files"


@pytest.mark.parametrize("content", [b"", b"#!/bin/sh\n", b"\x7fELF" + b"\1" * 80, b"\x7fELF\x02\x01" + b"\xff" * 80])
def test_file_that_is_no_library_is_reported(tmp_path, content):
    path = tmp_path / "x.so"
    path.write_bytes(content)
    with pytest.raises(ElfError, match=r"x\.so"):
        read_library(path)
