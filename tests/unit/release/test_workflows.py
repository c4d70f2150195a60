# SPDX-License-Identifier: Apache-2.0
"""The workflow files: valid YAML, pinned actions, make targets that exist, destinations that must be set."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.rendering import ROOT

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yaml"))
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def steps(path: Path) -> list[dict[str, Any]]:
    content = yaml.safe_load(path.read_text())
    assert {"name", "permissions", "jobs"} <= content.keys()
    assert content[True], "triggers: YAML 1.1 reads the key `on` as true"
    return [step for job in content["jobs"].values() for step in job["steps"]]


def scripts(path: Path) -> str:
    return "\n".join(step["run"] for step in steps(path) if "run" in step)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflow_pins_its_actions_by_commit(path: Path) -> None:
    used = [step["uses"] for step in steps(path) if "uses" in step]
    assert used
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action) for action in used)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflow_runs_programs_of_the_tree_that_exist(path: Path) -> None:
    text = scripts(path)
    assert set(re.findall(r"\bmake ([\w-]+)", text)) <= TARGETS
    assert all((ROOT / name).exists() for name in re.findall(r"(?<!\S)(\.ci/\w+)", text))


def test_ci_runs_the_gate() -> None:
    assert ".ci/run" in scripts(ROOT / ".github/workflows/ci.yaml")


def test_release_builds_checks_signs_and_needs_its_destinations() -> None:
    first, *_ = steps(ROOT / ".github/workflows/release.yaml")
    assert set(re.findall(r"\{(\w+):\?", first["run"])) == {"REGISTRY", "INDEX"}
    text = scripts(ROOT / ".github/workflows/release.yaml")
    assert "make release ARGS=--complete" in text
    assert text.index("make release-check") < text.index("cosign sign-blob")
    hosts = re.findall(r"https?://[\w.-]+", text)
    assert hosts == [], "destinations are variables"
