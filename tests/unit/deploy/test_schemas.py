# SPDX-License-Identifier: Apache-2.0
"""Every manifest follows the schemas that Kubernetes publishes; a field that they do not have is an error, not a surprise later.

tests/e2e makes the same checks with a real API server. Kinds that are not Kubernetes' own are checked there only.
"""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.rendering import DAEMONSET, DEPLOY, EXAMPLES, Installation, Object, Renderer, installations

KUBERNETES_VERSION = "1.36"
"""Of the cluster of ``make e2e``."""
OTHER_GROUPS = ("aliquot.dev/", "kueue.x-k8s.io/", "monitoring.coreos.com/")
"""Objects of kinds that come with their own projects."""
FOLDERS = (DAEMONSET / "base", DAEMONSET / "scheduler", EXAMPLES)


def files() -> list[Path]:
    paths = [path for folder in FOLDERS for path in sorted(folder.glob("*.yaml"))]
    return [path for path in paths if list(objects_of(path))]


def objects_of(path: Path) -> Iterator[Object]:
    for document in yaml.safe_load_all(path.read_text()):
        if document and "metadata" in document:  # not kustomizations, and not the programs' own settings
            yield document


def check(item: Object) -> None:
    """Compare one object with its schema. Raises kubernetes_validate.ValidationError or SchemaNotFoundError."""
    if not item["apiVersion"].startswith(OTHER_GROUPS):
        _check(json.dumps(item, sort_keys=True))


@cache
def _check(item: str) -> None:
    """Once for each object: most are the same in every installation, and the schemas are reread each time."""
    kubernetes_validate.validate(json.loads(item), KUBERNETES_VERSION, strict=True)


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(DEPLOY)))
def test_a_manifest_follows_the_schemas(path: Path) -> None:
    for item in objects_of(path):
        check(item)


@pytest.mark.parametrize("installation", installations(), ids=str)
def test_what_is_installed_follows_the_schemas(renderer: Renderer, installation: Installation) -> None:
    for item in [*renderer.kustomized(installation), *renderer.hooks(installation.values)]:
        check(item)


def a_pod(**fields: Any) -> Object:
    container = {"name": "main", "image": "i", "resources": {"limits": {"nvidia.com/vgpu-memory": 4096}}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": {"containers": [{**container, **fields}]}}


@pytest.mark.parametrize("wrong", [{"imagePullPolice": "Never"}, {"command": "sleep"}, {"ports": [{"containerPort": "metrics"}]}], ids=str)
def test_unknown_field_is_found_by_schemas(wrong: Object) -> None:
    check(a_pod())
    with pytest.raises(kubernetes_validate.ValidationError):
        check(a_pod(**wrong))
