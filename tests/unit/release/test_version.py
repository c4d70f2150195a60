# SPDX-License-Identifier: Apache-2.0
"""pyproject.toml states the version; everything else agrees with it."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from release.images import image_name
from tests.rendering import ROOT

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
IMAGE = re.compile(r"localhost/aliquot-(?:agent|scheduler)\b:?([\w.-]*)")


def texts() -> list[Path]:
    """Every manifest and page that may name an image."""
    found = [path for folder in ("deploy", "docs") for path in (ROOT / folder).rglob("*") if path.is_file() and "helm" not in path.parts]
    return [path for path in found if path.suffix in (".yaml", ".md", "") and IMAGE.search(path.read_text())]


def test_chart_has_the_projects_version() -> None:
    chart = yaml.safe_load((ROOT / "deploy/helm/aliquot/Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (VERSION, VERSION)


@pytest.mark.parametrize("path", texts(), ids=lambda path: str(path.relative_to(ROOT)))
def test_image_tags_have_the_projects_version(path: Path) -> None:
    assert {tag for tag in IMAGE.findall(path.read_text()) if tag} <= {VERSION}


def test_manifests_name_the_images_that_a_release_makes() -> None:
    manifests = "\n".join(path.read_text() for path in (ROOT / "deploy/daemonset").rglob("*.yaml"))
    named = set(re.findall(r"image: (\S+)", manifests))
    ours = {image_name(target, VERSION) for target in ("agent", "scheduler")}
    assert named - ours == {name for name in named if name.startswith("registry.k8s.io/kube-scheduler:")}
    assert ours <= named


def test_changelog_has_a_file_for_the_minor_version() -> None:
    minor = VERSION.rpartition(".")[0]
    assert f"{VERSION}" in (ROOT / f"CHANGELOG/CHANGELOG-{minor}.md").read_text()
