# SPDX-License-Identifier: Apache-2.0
"""What every other group is built from: settings, paths, the clock and the counters."""

import importlib.metadata
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agent.adapters.clock import SystemClock
from agent.adapters.durable import make_directory
from agent.adapters.node_files import boot_id
from agent.adapters.simulation import driver_library, prepare_node
from agent.services.telemetry import Telemetry
from agent.settings import Placement, Settings
from aliquot import contract
from aliquot.contract.model import Policy
from aliquot.kube.api_server import ApiServer, find_api_server

BUILD_DIR_ENV = "ALIQUOT_BUILD_DIR"
INSTALLED_SHIM_DIR = Path("/usr/local/lib/aliquot")


@dataclass(frozen=True, slots=True)
class Setup:
    """One agent on one node."""

    settings: Settings
    node_name: str
    boot_id: str
    version: str
    nvml_library: str
    """Path of the NVML library; empty for the loader's choice."""
    shim_source: Path
    api_server: ApiServer
    state: Path
    """Directory that survives a reboot."""
    runtime: Path
    """Directory that is empty after a reboot."""
    clock: SystemClock
    telemetry: Telemetry

    @property
    def local_policy(self) -> Policy | None:
        """How this agent chooses devices; None where the scheduler assigns them."""
        return self.settings.placement_policy if self.settings.placement is Placement.LOCAL else None

    @property
    def host_directories(self) -> Sequence[Path]:
        """The directories that the agent shares with other programs of the host, or keeps there from one start to the next."""
        settings = self.settings
        own = (settings.cdi_dir, settings.cdi_static_dir, settings.state_dir, settings.runtime_dir)
        return [settings.device_plugin_dir, settings.pod_resources_socket.parent, *map(Path, own)]


def build_setup(settings: Settings, environ: Mapping[str, str], telemetry: Telemetry) -> Setup:
    """Find the API server and the libraries, and create the agent's own directories. Raises SettingsError, AgentError."""
    node_name = settings.node_name_or_host
    build = _build_directory(environ)
    api_server = find_api_server(settings.kube_api_url, settings.kube_token_file, settings.kube_ca_file, environ)
    state, runtime = make_directory(Path(settings.state_dir), 0o700), make_directory(Path(settings.runtime_dir), 0o755)
    return Setup(
        settings,
        node_name,
        boot_id(),
        _version(),
        _nvml_library(settings, node_name, runtime, build, environ),
        _shim_directory(settings, build),
        api_server,
        state,
        runtime,
        SystemClock(),
        telemetry,
    )


def _build_directory(environ: Mapping[str, str]) -> Path:
    return Path(environ.get(BUILD_DIR_ENV) or Path(__file__).resolve().parents[2] / "build")


def _shim_directory(settings: Settings, build: Path) -> Path:
    if settings.shim_dir:
        return Path(settings.shim_dir)
    in_tree = build / "lib/shim"
    return in_tree if in_tree.is_dir() else INSTALLED_SHIM_DIR


def _nvml_library(settings: Settings, node_name: str, runtime: Path, build: Path, environ: Mapping[str, str]) -> str:
    """Return the NVML library to load. With ``simulate`` set, create the simulated node first."""
    if not settings.simulate:
        return settings.nvml_library
    if contract.ENV_SIM_DIR not in environ:
        directory = runtime / "sim"
        prepare_node(settings.simulate, directory, node_name, build)
        os.environ[contract.ENV_SIM_DIR] = str(directory)  # the simulated driver reads its node from there
    return settings.nvml_library or str(driver_library(build))


def _version() -> str:
    try:
        return importlib.metadata.version(contract.PRODUCT)
    except importlib.metadata.PackageNotFoundError:
        return "unpackaged"
