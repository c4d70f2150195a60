# SPDX-License-Identifier: Apache-2.0
"""The image description carries the whole product, with the packages that the lock files pin."""

import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[3]
DOCKERFILE = (ROOT / "deploy/daemonset/Dockerfile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def pins(lock: str) -> dict[str, str]:
    """Name and version of each package; a package pinned per Python version has them joined."""
    found: dict[str, str] = {}
    for name, version in re.findall(r"^([\w.-]+)==(\S+)", (ROOT / lock).read_text(), re.MULTILINE):
        found[name] = f"{found[name]} {version}" if name in found else version
    return found


def test_images_have_every_package_but_the_laboratory() -> None:
    patterns = PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py") if any(fnmatch(path.parent.name, pattern) for pattern in patterns)}
    copied = set(re.findall(r"^COPY (\w+) \1$", DOCKERFILE, re.MULTILINE)) - {"cuda_shim", "simulated_driver", "simulated_runtime"}
    assert copied == packages - {"aliquot_lab"}


def test_every_installation_from_a_registry_checks_hashes() -> None:
    installs = [line for line in DOCKERFILE.splitlines() if "pip install" in line]
    assert installs
    assert all("--require-hashes" in line or "--no-deps /wheel/" in line for line in installs)


def test_scheduler_lock_extends_agent_lock() -> None:
    agent, scheduler = pins("requirements.lock"), pins("requirements-scheduler.lock")
    assert agent.items() <= scheduler.items()
    wanted = {re.match(r"[\w-]+", requirement)[0].lower() for requirement in PROJECT["project"]["optional-dependencies"]["scheduler"]}
    assert wanted <= scheduler.keys()


def test_the_entry_points_are_programs_of_the_wheel() -> None:
    entry_points = set(re.findall(r'^ENTRYPOINT \["/opt/aliquot/bin/([\w-]+)"\]$', DOCKERFILE, re.MULTILINE))
    for_people = {"aliquot", "kubectl-vgpu", "kubectl_complete-vgpu"}
    by_command = {"aliquot-mps"}  # of the agent's image, by a manifest
    assert entry_points == set(PROJECT["project"]["scripts"]) - for_people - by_command
