# SPDX-License-Identifier: Apache-2.0
"""docs/use/first-five-minutes.md, as a new user would try it: every command of the page runs, and prints what the page shows."""

import os
import sys
from pathlib import Path

import pytest

from tests.e2e.cluster.paths import ROOT
from tests.e2e.conftest import Target
from tests.e2e.product import AGENT_NAMESPACE
from tests.e2e.transcript import Terminal, steps_of

PAGE = ROOT / "docs/use/first-five-minutes.md"


@pytest.mark.timeout(600)
def test_a_new_user_gets_what_the_page_shows(bare: Target) -> None:
    kubectl = bare.kubectl
    programs = f"{Path(kubectl.program).parent}:{Path(sys.executable).parent}"
    environment = {**os.environ, "KUBECONFIG": str(kubectl.kubeconfig), "PATH": f"{programs}:{os.environ['PATH']}"}
    with Terminal(ROOT, environment) as terminal:
        terminal.play(steps_of(PAGE.read_text()))
    assert not bare.kubectl.all("namespaces", f"--field-selector=metadata.name={AGENT_NAMESPACE}")
