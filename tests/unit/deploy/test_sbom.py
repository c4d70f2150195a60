# SPDX-License-Identifier: Apache-2.0
"""``make sbom`` says what the images hold: each package of the lock files, in its version, with the hashes it is installed by."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.rendering import ROOT

LOCKS = {"aliquot-agent": "requirements.lock", "aliquot-scheduler": "requirements-scheduler.lock"}
PIN = re.compile(r"^([\w.-]+)==(\S+)", re.MULTILINE)
HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``make sbom`` writes; the environment is taken as it is."""
    written = tmp_path_factory.mktemp("sbom")
    subprocess.run(["make", "--silent", "--assume-old=.venv/.dev", "sbom", f"SBOM={written}"], cwd=ROOT, check=True)
    return written


def document(folder: Path, image: str) -> dict[str, Any]:
    return json.loads((folder / f"{image}.cdx.json").read_text())


@pytest.mark.parametrize(("image", "lock"), LOCKS.items())
def test_every_package_that_an_image_installs_is_named_with_its_hashes(folder: Path, image: str, lock: str) -> None:
    locked = (ROOT / lock).read_text()
    components = document(folder, image)["components"]
    assert {(one["name"], one["version"]) for one in components} == {(name, version) for name, version in PIN.findall(locked)}
    assert all(one["purl"].startswith(f"pkg:pypi/{one['name'].lower()}@{one['version']}") for one in components)
    stated = {each["content"] for one in components for reference in one["externalReferences"] for each in reference.get("hashes", [])}
    assert stated == set(HASH.findall(locked))


@pytest.mark.parametrize("image", LOCKS)
def test_document_names_product_and_is_reproducible(folder: Path, image: str) -> None:
    content = document(folder, image)
    assert content["bomFormat"] == "CycloneDX"
    assert (content["metadata"]["component"]["name"], content["metadata"]["component"]["type"]) == ("aliquot", "application")
    assert "timestamp" not in content["metadata"]
    assert "serialNumber" not in content
