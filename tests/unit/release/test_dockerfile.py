# SPDX-License-Identifier: Apache-2.0
"""The Dockerfile builder, as far as it needs no root: what a layer's archive holds, and which instructions are refused."""

import io
import os
import tarfile
from pathlib import Path

import pytest

from release import dockerfile
from release.dockerfile import DockerfileError, Options, build

EPOCH = 1_700_000_000
OF_THE_IMAGE = ("etc/passwd", "usr/bin/python3", "var/log/apt", "var/lib/dpkg/status", "opt/aliquot/lib/log.py", "tmp", "var/cache/apt")
OF_THE_RUN = (
    "etc/resolv.conf", "etc/hostname", "etc/machine-id", "etc/shadow-", "var/log/dpkg.log", "var/log/apt/term.log",
    "var/cache/apt/pkgcache.bin", "var/cache/ldconfig/aux-cache", "var/lib/apt/lists/partial", "var/lib/dpkg/status-old", "tmp/scratch",
    "root/.cache", "root/.cache/pip/x", "dev/null", "run/lock",
)  # fmt: skip


@pytest.mark.parametrize("path", OF_THE_IMAGE)
def test_files_of_packages_stay_in_the_image(path: str) -> None:
    assert not dockerfile._RESIDUE.fullmatch(path)


@pytest.mark.parametrize("path", OF_THE_RUN)
def test_files_that_vary_from_run_to_run_are_left_out(path: str) -> None:
    assert dockerfile._RESIDUE.fullmatch(path)


def members(layer: Path, epoch: int | None) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(dockerfile._layer_tar(layer, epoch))) as tar:
        return {member.name: member for member in tar}


def test_layer_archive_has_no_later_time_and_no_user_name(tmp_path: Path) -> None:
    files = tmp_path / "files"
    (files / "etc").mkdir(parents=True)
    for name, time in (("old", EPOCH - 5), ("new", EPOCH + 5), ("hostname", EPOCH)):
        (files / "etc" / name).write_text(name)
        os.utime(files / "etc" / name, (time, time))
    found = members(tmp_path, EPOCH)
    assert {name: member.mtime for name, member in found.items()} == {"etc": EPOCH, "etc/old": EPOCH - 5, "etc/new": EPOCH}
    assert {(member.uname, member.gname) for member in found.values()} == {("", "")}


def test_unknown_instruction_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("VOLUME /x\n")
    with pytest.raises(DockerfileError, match="VOLUME is not one of FROM, RUN, COPY"):
        build(tmp_path / "Dockerfile", tmp_path, [], Options(folder=tmp_path / "layers"))
