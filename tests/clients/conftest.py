# SPDX-License-Identifier: Apache-2.0
"""Runs programs that others wrote in three ways: ``bare`` (the driver alone), ``front`` and ``preload`` (the shim, as the agent mounts it).

A test names its client by ``@pytest.mark.client("NAME")``, and takes the fixtures ``client`` (installed) and ``container`` (one for each
way). The first line of its docstring is its row in ``docs/measurements/clients.md``; ``--clients-page`` writes that page. A fact that it
records with ``record_property("found", …)`` is the text of the cell.

With ``--gpu`` the node is this machine, with its own driver (``python -m tests.bench.real_gpu`` runs it so).
"""

from collections.abc import Generator
from pathlib import Path

import pytest

from tests.clients import page
from tests.clients.harness import LIMIT_MIB
from tests.clients.installing import Client, NotInstallableError, install_client, machine_client, read_pins
from tests.fakes.container import Container, Interposition, Node
from tests.fakes.machine import MachineNode

INTERPOSITION: dict[str, Interposition] = {"bare": "none", "front": "front", "preload": "preload"}

_results = pytest.StashKey[page.Results]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--clients-page", metavar="FILE", help="write the rows of the clients that ran into this page")
    parser.addoption("--light", action="store_true", help="only the clients that are small to install")
    parser.addoption("--client", metavar="NAME", help="only this client")
    parser.addoption("--gpu", action="store_true", help="on this machine's first GPU, with its own driver and the clients that it has")
    parser.addoption("--gpu-python", metavar="PATH", help="with --gpu: a Python with the clients installed as packages")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_results] = page.Results()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    pins = read_pins()
    light, gpu, only = config.getoption("--light"), config.getoption("--gpu"), config.getoption("--client")

    def is_left_out(item: pytest.Item) -> bool:
        name = client_of(item)
        if name is None:  # a test of this folder's own code, one of them runs the tests of clients itself
            return bool(gpu or only)
        needs_simulator = item.get_closest_marker("simulated") is not None
        return (light and pins[name].heavy) or (only is not None and only != name) or (gpu and needs_simulator)

    if left_out := [item for item in items if is_left_out(item)]:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def client_of(item: pytest.Item) -> str | None:
    """Return the name of the client that a test is about."""
    mark = item.get_closest_marker("client")
    return mark.args[0] if mark is not None else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Keep the outcome for the page. Returns: the report, as the hook demands."""
    del call
    report = yield
    name = client_of(item)
    if isinstance(item, pytest.Function) and name is not None and (report.when == "call" or report.outcome != "passed"):
        way = str(item.callspec.params.get("way", "bare")) if hasattr(item, "callspec") else "bare"
        check = (item.function.__doc__ or item.originalname).strip().splitlines()[0].removesuffix(".")
        item.config.stash[_results].add(name, check, way, page.cell(report))
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    file = session.config.getoption("--clients-page")
    if file:
        page.update(Path(file), session.config.stash[_results], read_pins())


@pytest.fixture
def client(request: pytest.FixtureRequest, build_dir: Path) -> Client:
    """The installed client of the test; skips where it cannot be installed."""
    name, config = client_of(request.node), request.config
    on_machine, python = config.getoption("--gpu"), config.getoption("--gpu-python")
    try:
        found = machine_client(name, build_dir, python) if on_machine else install_client(name, build_dir)
    except NotInstallableError as exc:
        pytest.skip(str(exc))
    config.stash[_results].versions[name] = found.pin.version
    return found


@pytest.fixture(params=INTERPOSITION)
def way(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def node(request: pytest.FixtureRequest, build_dir: Path, sim_node, tmp_path: Path) -> Node:
    if request.config.getoption("--gpu"):
        return MachineNode(build_dir, tmp_path)
    return Node(build_dir, sim_node("h200x8"), tmp_path)


@pytest.fixture
def container(node: Node, way: str) -> Container:
    """A container with 8,192 MiB of the node's first GPU; without the shim it has the whole GPU."""
    return node.container(LIMIT_MIB, interposition=INTERPOSITION[way])
