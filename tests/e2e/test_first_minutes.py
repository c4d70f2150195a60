"""docs/first-five-minutes.md, as a new user would try it: every command of the page runs, and prints what the page shows."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.cluster.paths import ROOT
from tests.e2e.conftest import Target
from tests.e2e.product import AGENT_NAMESPACE, SIMULATED_OVERLAY, all_images, install
from tests.e2e.transcript import Terminal, steps_of

PAGE = ROOT / "docs/first-five-minutes.md"


@pytest.fixture
def new_cluster(target: Target) -> Iterator[Target]:
    """A cluster that has the images and nothing else of ours; what was installed before is there again afterwards."""
    installed = target.kubectl.all("namespaces", f"--field-selector=metadata.name={AGENT_NAMESPACE}")
    if installed:
        target.kubectl.run("delete", f"--kustomize={SIMULATED_OVERLAY}", "--ignore-not-found", timeout_seconds=180)
    elif target.local is not None:
        for archive in all_images():
            target.local.import_image(archive)
    yield target
    if installed:
        install(target.kubectl, local=None)  # the node has the images


@pytest.mark.timeout(600)
def test_a_new_user_gets_what_the_page_shows(new_cluster: Target) -> None:
    kubectl = new_cluster.kubectl
    programs = f"{Path(kubectl.program).parent}:{Path(sys.executable).parent}"
    environment = {**os.environ, "KUBECONFIG": str(kubectl.kubeconfig), "PATH": f"{programs}:{os.environ['PATH']}"}
    with Terminal(ROOT, environment) as terminal:
        terminal.play(steps_of(PAGE.read_text()))
    assert not new_cluster.kubectl.all("namespaces", f"--field-selector=metadata.name={AGENT_NAMESPACE}")
