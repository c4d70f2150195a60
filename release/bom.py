# SPDX-License-Identifier: Apache-2.0
"""The bill of materials of an image, in CycloneDX's form: Python's packages by its lock file, Debian's by its package database."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from release.dockerfile import Built
from release.inputs import IMAGE_PYTHON, environment_of, locked
from release.source import Source

DPKG_STATUS = "var/lib/dpkg/status"


def write_bom(source: Source, built: Built, lock: str, debian_hashes: Mapping[str, str], target: Path) -> None:
    """Write the document. Args: debian_hashes: SHA-256 of each fetched package by its file name."""
    requirements = locked(source.root / lock, environment_of(built.image.platform, IMAGE_PYTHON))
    document = _python_packages(source, "\n".join(requirements.values()) + "\n")
    document["components"] += debian_packages(built.read_text(DPKG_STATUS), debian_hashes)
    target.write_text(json.dumps(document, indent=2) + "\n")


def debian_packages(status: str, hashes: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return a component for each installed package of a dpkg database."""
    return [_component(fields, hashes) for fields in _installed(status)]


def _installed(status: str) -> Iterator[dict[str, str]]:
    for paragraph in status.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in paragraph.splitlines() if ": " in line and not line.startswith(" "))
        if fields.get("Status", "").endswith(" installed"):
            yield fields


def _component(fields: Mapping[str, str], hashes: Mapping[str, str]) -> dict[str, Any]:
    name, version, architecture = fields["Package"], fields["Version"], fields["Architecture"]
    purl = f"pkg:deb/debian/{name}@{quote(version)}?arch={architecture}"
    file = f"{name}_{version.partition(':')[2] or version}_{architecture}.deb"  # without the epoch, as in the archive
    known = {"hashes": [{"alg": "SHA-256", "content": hashes[file]}]} if file in hashes else {}
    return {"bom-ref": purl, "type": "library", "name": name, "version": version, "purl": purl, **known}


def _python_packages(source: Source, requirements: str) -> dict[str, Any]:
    program = Path(sys.executable).parent / "cyclonedx-py"
    flags = ["--pyproject", str(source.root / "pyproject.toml"), "--mc-type", "application", "--output-reproducible"]
    with tempfile.TemporaryDirectory() as scratch:
        lock, written = Path(scratch, "requirements.lock"), Path(scratch, "bom.json")
        lock.write_text(requirements)
        subprocess.run([program, "requirements", *flags, "--output-file", written, lock], check=True, capture_output=True)
        document: dict[str, Any] = json.loads(written.read_text())
    return document
