# SPDX-License-Identifier: Apache-2.0
"""What is checked of every client, by what it does; each check bare, behind the front and under the preload.

A test says by ``@pytest.mark.shows(CHECK, …)`` which of them it is. ``test_checks.py`` compares.
"""

import pytest

CHECKS = {
    "limit": "it gets memory up to its limit",
    "view": "it shows the limit as the GPU's memory",
    "refusal": "what is more is refused, in its own words",
    "processes": "two processes: one limit for both, or the own one alone in a list",
    "kill": "what a killed process had is given back, or is listed no more",
}
ROLES = {
    "takes memory": (frozenset(CHECKS), ("cuda-bindings", "cuda-core", "numba-cuda", "pycuda", "torch")),
    "watches": (frozenset({"view", "processes", "kill"}), ("nvitop", "py3nvml", "nvtop", "nvidia-smi", "go-nvml")),
    "sets a node up": (frozenset[str](), ("nvidia-ctk", "gpu-feature-discovery", "mig-parted")),
}
"""What clients do: the checks that each needs, and their names."""


class Collected:
    """A plugin of pytest that keeps what the tests of clients show, as (client, check, way)."""

    def __init__(self) -> None:
        self.cells: set[tuple[str, str, str]] = set()
        self.unknown: set[str] = set()
        """Checks of no row in CHECKS."""

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Read the marks."""
        for item in session.items:
            client = item.get_closest_marker("client")
            if client is None or not isinstance(item, pytest.Function):
                continue
            way = str(item.callspec.params.get("way", "")) if hasattr(item, "callspec") else ""
            for mark in item.iter_markers("shows"):
                self.unknown |= set(mark.args) - CHECKS.keys()
                self.cells |= {(client.args[0], check, way) for check in mark.args}


def missing(cells: set[tuple[str, str, str]], ways: tuple[str, ...]) -> list[tuple[str, str, str]]:
    """Return what a client needs and no test shows."""
    needed = {(name, check, way) for checks, names in ROLES.values() for name in names for check in checks for way in ways}
    return sorted(needed - cells)
