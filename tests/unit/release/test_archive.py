# SPDX-License-Identifier: Apache-2.0
"""Image archives: the OCI layout, one name for several platforms, the same bytes every time."""

import gzip
import hashlib
import io
import json
import tarfile
from pathlib import Path
from typing import Any

from release.archive import Image, write_archive, write_release_archive
from release.platforms import AMD64, ARM64, host

NAME = "localhost/thing:1.0"
EPOCH = 1_700_000_000


def layer(content: bytes) -> bytes:
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as tar:
        member = tarfile.TarInfo("file")
        member.size = len(content)
        tar.addfile(member, io.BytesIO(content))
    return written.getvalue()


def blobs(archive: Path) -> dict[str, bytes]:
    """Every file of the archive by its path, with each blob's name checked against its content."""
    with tarfile.open(archive) as tar:
        files = {member.name: handle.read() for member in tar if (handle := tar.extractfile(member))}
    for path, data in files.items():
        if path.startswith("blobs/sha256/"):
            assert path.rpartition("/")[2] == hashlib.sha256(data).hexdigest()
    return files


def document(files: dict[str, bytes], descriptor: dict[str, Any]) -> dict[str, Any]:
    data = files[f"blobs/sha256/{descriptor['digest'][7:]}"]
    assert descriptor["size"] == len(data)
    content: dict[str, Any] = json.loads(data)
    return content


def test_release_archive_has_each_platform_under_one_name(tmp_path: Path) -> None:
    images = [Image(platform, [layer(platform.machine.encode())], {"User": "1"}) for platform in (AMD64, ARM64)]
    write_release_archive(tmp_path / "image.tar", NAME, images, epoch=EPOCH)
    files = blobs(tmp_path / "image.tar")
    [named] = json.loads(files["index.json"])["manifests"]
    assert named["annotations"]["io.containerd.image.name"] == NAME
    manifests = document(files, named)["manifests"]
    assert [each["platform"]["architecture"] for each in manifests] == ["amd64", "arm64"]
    for image, each in zip(images, manifests, strict=True):
        manifest = document(files, each)
        configuration = document(files, manifest["config"])
        assert (configuration["architecture"], configuration["created"]) == (image.platform.architecture, "2023-11-14T22:13:20Z")
        [packed] = manifest["layers"]
        assert gzip.decompress(files[f"blobs/sha256/{packed['digest'][7:]}"]) == image.layers[0]
        assert configuration["rootfs"]["diff_ids"] == [f"sha256:{hashlib.sha256(image.layers[0]).hexdigest()}"]


def test_same_content_gives_the_same_archive(tmp_path: Path) -> None:
    for name in ("one.tar", "two.tar"):
        write_release_archive(tmp_path / name, NAME, [Image(AMD64, [layer(b"x")], {})], epoch=EPOCH)
    assert (tmp_path / "one.tar").read_bytes() == (tmp_path / "two.tar").read_bytes()


def test_local_archive_has_this_machines_platform_and_no_time(tmp_path: Path) -> None:
    write_archive(tmp_path / "image.tar", NAME, [layer(b"x")], {"Cmd": ["/x"]})
    files = blobs(tmp_path / "image.tar")
    [named] = json.loads(files["index.json"])["manifests"]
    assert named["platform"] == host().oci
    configuration = document(files, document(files, named)["config"])
    assert configuration["config"] == {"Cmd": ["/x"]}
    assert "created" not in configuration
