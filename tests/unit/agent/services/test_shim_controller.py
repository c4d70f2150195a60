# SPDX-License-Identifier: Apache-2.0
import asyncio
from collections.abc import Callable, Iterable, Sequence, Set
from pathlib import Path

from agent.adapters.cdi_files import CdiDirectory
from agent.adapters.container_files import GrantFiles
from agent.adapters.shim_store import ShimStore, install_shim
from agent.core.cdi import PRELOAD_ARTEFACT, SHIM_LIBRARIES
from agent.errors import ShimError
from agent.services import shim_controller
from agent.services.shim_controller import ShimController
from tests.unit.agent.fakes import until


class FakeInstaller:
    """Fails as often as the test sets, and remembers its sweeps."""

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures
        self.sweeps = 0

    def installed(self) -> Path:
        if self.failures:
            self.failures -= 1
            raise ShimError("libcuda.so.1 cannot be read")
        return Path("/shim/new")

    def sweep(self, mentioned: Callable[[Iterable[str]], Set[str]]) -> Sequence[str]:
        self.sweeps += 1
        assert mentioned(["/shim/old"]) == set()
        if self.sweeps == 1:
            raise ShimError("removing /shim/old: busy")
        return ["/shim/old"]


async def test_missing_shim_is_reported_until_found_and_sweeps_start_then(tmp_path, monkeypatch):
    monkeypatch.setattr(shim_controller, "RETRY_SECONDS", 0.05)
    monkeypatch.setattr(shim_controller, "SWEEP_SECONDS", 0.05)
    installer = FakeInstaller(failures=2)
    controller = ShimController(installer, CdiDirectory(tmp_path / "cdi", tmp_path / "etc"), GrantFiles(tmp_path / "containers"))
    assert controller.trouble
    running = asyncio.ensure_future(controller.run())
    await until(lambda: "libcuda.so.1" in controller.trouble)
    await until(lambda: not controller.trouble)
    await until(lambda: installer.sweeps >= 2)  # a sweep that failed is no end
    running.cancel()


async def test_versions_that_containers_use_by_spec_or_by_link_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(shim_controller, "SWEEP_SECONDS", 0.01)
    cdi, files = CdiDirectory(tmp_path / "cdi", tmp_path / "etc"), GrantFiles(tmp_path / "containers")
    (tmp_path / "source").mkdir()
    versions = []
    for number in range(4):
        for artefact in SHIM_LIBRARIES:
            (tmp_path / "source" / artefact).write_bytes(b"%d" % number)
        versions.append(install_shim(tmp_path / "source", tmp_path / "store"))
    cdi.write("aaaa", {"hostPath": f"{versions[1]}/libcuda.so.1"})
    (tmp_path / "containers/bbbb").mkdir()
    files.link_shim("bbbb", str(versions[2] / PRELOAD_ARTEFACT))
    (tmp_path / "containers/cccc" / PRELOAD_ARTEFACT).mkdir(parents=True)  # as a runtime makes it of a mount source that is not there
    running = asyncio.ensure_future(ShimController(ShimStore(tmp_path / "source", tmp_path / "store"), cdi, files).run())
    await until(lambda: not versions[0].exists())
    assert all(version.is_dir() for version in versions[1:])
    files.remove("bbbb")
    await until(lambda: not versions[2].exists())
    assert versions[1].is_dir()
    running.cancel()
