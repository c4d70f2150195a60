# SPDX-License-Identifier: Apache-2.0
"""The programs that make manifests of deploy/."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rendering import ROOT, Renderer, find_renderer


@pytest.fixture(scope="session")
def renderer() -> Iterator[Renderer]:
    """Helm and kustomize; what needs them is skipped where they are not. CI has them: .ci/run builds them before the tests."""
    (ROOT / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as scratch:
        found = find_renderer(Path(scratch))
        if found is None:
            pytest.skip("helm or kustomize is neither on the PATH nor built (`make helm`, which needs Go): the chart was not looked at")
        yield found
