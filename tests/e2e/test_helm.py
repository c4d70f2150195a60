# SPDX-License-Identifier: Apache-2.0
"""The objects of the chart are taken by a real API server. test_helm_release.py installs it."""

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tests.e2e.cluster.host import HELM, built_programs
from tests.e2e.kubectl import Object
from tests.rendering import Installation, Renderer, find_renderer, installations


@pytest.fixture(scope="module")
def renderer(scratch_in_tree: Path) -> Renderer:
    """Helm and kustomize, built at the pinned releases."""
    built_programs(HELM)
    found = find_renderer(scratch_in_tree)
    assert found is not None
    return found


@pytest.mark.usefixtures("operator_kinds")
@pytest.mark.parametrize("wanted", installations(), ids=str)
def test_the_api_server_takes_every_object_and_knows_every_field(
    looked_at: Callable[[Iterable[Object]], None], renderer: Renderer, wanted: Installation
) -> None:
    looked_at([*renderer.charted(wanted.values), *renderer.hooks(wanted.values)])
