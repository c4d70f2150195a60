# SPDX-License-Identifier: Apache-2.0
"""OCI archives: one file that ``skopeo`` reads, for images also ``ctr images import`` and ``docker load``. Same content, same bytes."""

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from release.platforms import Platform, host

_INDEX = "application/vnd.oci.image.index.v1+json"
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_CONFIG = "application/vnd.oci.image.config.v1+json"
_LAYER = "application/vnd.oci.image.layer.v1.tar"

Json = dict[str, object]


@dataclass(frozen=True, slots=True)
class Image:
    """The image of one platform."""

    platform: Platform
    layers: Sequence[bytes]
    """Tars of its files, lowest first, not compressed."""
    configuration: Mapping[str, object]
    """The OCI image's ``config``: Cmd, Entrypoint, Env, StopSignal, User."""


@dataclass(slots=True)
class _Blobs:
    """The content of an archive by its digest."""

    by_digest: dict[str, bytes] = field(default_factory=dict)

    def add(self, media_type: str, blob: bytes) -> Json:
        """Add a blob; return its descriptor."""
        digest = _digest(blob)
        self.by_digest[digest] = blob
        return {"mediaType": media_type, "digest": digest, "size": len(blob)}

    def add_json(self, media_type: str, document: Json) -> Json:
        """Add a document; return its descriptor."""
        return self.add(media_type, json.dumps(document).encode())


def write_archive(archive: Path, name: str, layers: Sequence[bytes], configuration: Mapping[str, object]) -> None:
    """Write an archive with this machine's image only. Layers stay uncompressed: they are read once, on this machine."""
    blobs = _Blobs()
    index = _manifest(blobs, Image(host(), layers, configuration), epoch=None)
    _write(archive, _named(index, name), blobs)


def write_release_archive(archive: Path, name: str, images: Sequence[Image], *, epoch: int) -> None:
    """Write an archive with the images of several platforms under one name.

    Args:
        epoch: the time that the images state as their creation, in seconds since 1970.
    """
    blobs = _Blobs()
    manifests = [_manifest(blobs, image, epoch=epoch) for image in images]
    index = blobs.add_json(_INDEX, {"schemaVersion": 2, "mediaType": _INDEX, "manifests": manifests})
    _write(archive, _named(index, name), blobs)


def write_artifact(archive: Path, name: str, config: tuple[str, bytes], content: tuple[str, bytes]) -> None:
    """Write an archive with an artifact that is no image, such as a chart.

    Args:
        config: media type and bytes of the artifact's configuration.
        content: media type and bytes of its only layer.
    """
    blobs = _Blobs()
    manifest: Json = {"schemaVersion": 2, "mediaType": _MANIFEST, "config": blobs.add(*config), "layers": [blobs.add(*content)]}
    _write(archive, _named(blobs.add_json(_MANIFEST, manifest), name), blobs)


def _manifest(blobs: _Blobs, image: Image, *, epoch: int | None) -> Json:
    """Add an image; return the descriptor of its manifest. With an epoch the layers are compressed."""
    created = {} if epoch is None else {"created": datetime.fromtimestamp(epoch, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")}
    document: Json = {
        **image.platform.oci,
        **created,
        "config": dict(image.configuration),
        "rootfs": {"type": "layers", "diff_ids": [_digest(layer) for layer in image.layers]},
    }
    if epoch is None:
        layers = [blobs.add(_LAYER, layer) for layer in image.layers]
    else:
        layers = [blobs.add(f"{_LAYER}+gzip", gzip.compress(layer, compresslevel=6, mtime=0)) for layer in image.layers]
    manifest: Json = {"schemaVersion": 2, "mediaType": _MANIFEST, "config": blobs.add_json(_CONFIG, document), "layers": layers}
    return {**blobs.add_json(_MANIFEST, manifest), "platform": image.platform.oci}


def _named(descriptor: Json, name: str) -> Json:
    annotations = {"io.containerd.image.name": name, "org.opencontainers.image.ref.name": name.rpartition(":")[2]}
    return {"schemaVersion": 2, "mediaType": _INDEX, "manifests": [{**descriptor, "annotations": annotations}]}


def _write(archive: Path, index: Json, blobs: _Blobs) -> None:
    archive.parent.mkdir(parents=True, exist_ok=True)
    unfinished = archive.with_suffix(".unfinished")
    files = {
        "oci-layout": b'{"imageLayoutVersion":"1.0.0"}',
        "index.json": json.dumps(index).encode(),
        **{f"blobs/sha256/{digest[7:]}": blob for digest, blob in blobs.by_digest.items()},
    }
    with tarfile.open(unfinished, "w", format=tarfile.GNU_FORMAT) as tar:
        for path, data in files.items():
            member = tarfile.TarInfo(path)
            member.mode, member.size = 0o755, len(data)
            tar.addfile(member, io.BytesIO(data))
    unfinished.rename(archive)


def _digest(blob: bytes) -> str:
    return f"sha256:{hashlib.sha256(blob).hexdigest()}"
