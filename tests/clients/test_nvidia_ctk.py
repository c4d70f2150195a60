# SPDX-License-Identifier: Apache-2.0
"""``nvidia-ctk cdi generate``, run by the agent's own adapter, and what the agent makes of its output."""

import os
import re
import stat
import subprocess
from pathlib import Path

import pytest

from agent.adapters.nvidia_ctk import NvidiaCtk
from agent.core.cdi import SHIM_LIBRARIES, HostSpec, InjectedDevice, Interposition, ShimFiles, container_spec
from agent.errors import StorageError
from aliquot import contract
from tests.clients import harness
from tests.fakes.container import LIBRARY_DIR, Node
from tests.fakes.machine import MachineNode

pytestmark = [pytest.mark.client("nvidia-ctk"), pytest.mark.timeout(300)]

DEVICES = """
import json, pynvml as n
n.nvmlInit()
found = []
for i in range(n.nvmlDeviceGetCount()):
    gpu = n.nvmlDeviceGetHandleByIndex(i)
    minor = n.nvmlDeviceGetMinorNumber(gpu)
    try:
        in_mig_mode = n.nvmlDeviceGetMigMode(gpu)[0]
    except n.NVMLError_NotSupported:
        in_mig_mode = 0
    if not in_mig_mode:
        found.append([n.nvmlDeviceGetUUID(gpu), minor, None, None])
    try:
        slots = n.nvmlDeviceGetMaxMigDeviceCount(gpu)
    except n.NVMLError_NotSupported:
        slots = 0
    for slot in range(slots):
        try:
            mig = n.nvmlDeviceGetMigDeviceHandleByIndex(gpu, slot)
        except n.NVMLError_NotFound:
            continue
        found.append([n.nvmlDeviceGetUUID(mig), minor, n.nvmlDeviceGetGpuInstanceId(mig), n.nvmlDeviceGetComputeInstanceId(mig)])
print(json.dumps(dict(version=n.nvmlSystemGetDriverVersion(), devices=found)))
"""
AS_HOST = """#!/bin/sh
# The kernel's files about MIG, where nvidia-ctk reads them, for this process alone.
exec unshare -m sh -c 'mount --make-rprivate / && mount --bind {proc} /proc/driver && exec "$0" "$@"' {program} "$@"
"""
NVIDIA_MAJOR, CAPS_MAJOR = 195, 234


class Host:
    """A node as nvidia-ctk expects it: a driver root with versioned libraries, device nodes, MIG capabilities."""

    def __init__(self, node: Node, root: Path, program: Path) -> None:
        reported = harness.host_json(node, DEVICES)
        self.version: str = reported["version"]
        self.devices: list[tuple[str, int, int | None, int | None]] = [tuple(device) for device in reported["devices"]]
        """UUID, minor number, and the ids of GPU instance and compute instance; a GPU in MIG mode is no device."""
        self.root = root
        self._lay_libraries(node)
        self._make_nodes()
        self.program = self._wrap(program)
        self.environment = {
            contract.ENV_SIM_DIR: str(node.directory),
            "LD_LIBRARY_PATH": str(node.build / "lib/sim"),
            "NVIDIA_CTK_DRIVER_ROOT": str(root),
            "NVIDIA_CTK_DEV_ROOT": str(root),
            "NVIDIA_CTK_CDI_GENERATE_MODE": "nvml",
        }

    def _lay_libraries(self, node: Node) -> None:
        libraries = self.root / LIBRARY_DIR
        libraries.mkdir(parents=True)
        for soname in (contract.CUDA_SONAME, contract.NVML_SONAME):
            versioned = libraries / f"{soname.removesuffix('.1')}.{self.version}"
            versioned.write_bytes((node.build / "lib/sim" / soname).read_bytes())
            (libraries / soname).symlink_to(versioned.name)

    def _make_nodes(self) -> None:
        capabilities = [path for _, minor, gi, ci in self.devices if gi is not None for path in _capabilities(minor, gi, ci)]
        minors = {path: number for number, path in enumerate(dict.fromkeys(capabilities), start=1)}
        (self.root / "dev/nvidia-caps").mkdir(parents=True)
        for name, major, minor in (
            ("nvidiactl", NVIDIA_MAJOR, 255),
            *((f"nvidia{minor}", NVIDIA_MAJOR, minor) for minor in {device[1] for device in self.devices}),
            *((f"nvidia-caps/nvidia-cap{minor}", CAPS_MAJOR, minor) for minor in minors.values()),
        ):
            try:
                os.mknod(self.root / "dev" / name, 0o666 | stat.S_IFCHR, os.makedev(major, minor))
            except PermissionError as exc:
                pytest.skip(f"no device nodes can be made here: {exc}")
        (self.root / "proc/nvidia-caps").mkdir(parents=True)
        (self.root / "proc/nvidia-caps/mig-minors").write_text("".join(f"{path} {number}\n" for path, number in minors.items()))

    def _wrap(self, program: Path) -> Path:
        wrapper = self.root / "nvidia-ctk"
        wrapper.write_text(AS_HOST.format(proc=self.root / "proc", program=program))
        wrapper.chmod(0o755)
        tried = subprocess.run([wrapper, "--version"], capture_output=True, text=True, check=False)
        if tried.returncode != 0:
            pytest.skip(f"no files can be mounted here: {tried.stderr.strip()}")
        return wrapper


def _capabilities(minor: int, gpu_instance: int, compute_instance: int) -> tuple[str, str]:
    place = f"gpu{minor}/gi{gpu_instance}"
    return f"{place}/access", f"{place}/ci{compute_instance}/access"


class Machine:
    """This machine, as nvidia-ctk finds it."""

    def __init__(self, node: Node, program: Path) -> None:
        self.devices: list[tuple[str, int, int | None, int | None]] = [
            tuple(device) for device in harness.host_json(node, DEVICES)["devices"]
        ]
        self.program = program
        self.environment: dict[str, str] = {}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "profile" in metafunc.fixturenames:
        metafunc.parametrize("profile", ["this machine"] if metafunc.config.getoption("--gpu") else harness.PROFILES)


@pytest.fixture
def host(request, profile, client, build_dir, sim_node, tmp_path) -> Host | Machine:
    if request.config.getoption("--gpu"):
        return Machine(MachineNode(build_dir, tmp_path), client.program("nvidia-ctk"))
    return Host(Node(build_dir, sim_node(profile), tmp_path), tmp_path / "host", client.program("nvidia-ctk"))


@pytest.fixture
def spec(host: Host | Machine, monkeypatch) -> HostSpec:
    """The spec, generated and parsed as the agent does it."""
    for name, value in host.environment.items():
        monkeypatch.setenv(name, value)
    try:
        return NvidiaCtk(str(host.program), harness.PATIENCE_SECONDS).host_spec()
    except StorageError as exc:
        if isinstance(host, Machine):
            pytest.skip(f"nvidia-ctk makes no spec on this machine: … {str(exc)[-80:]}")
        raise


def mounted_driver(spec: HostSpec) -> tuple[str, str]:
    """Return where the spec takes libcuda from, and where it mounts it."""
    named = re.compile(r"libcuda\.so\.\d+\.[0-9.]+")
    mounts = [mount for mount in spec.edits["mounts"] if named.fullmatch(Path(mount["containerPath"]).name)]
    return mounts[0]["hostPath"], mounts[0]["containerPath"]


def paths(edits, key: str, field: str) -> list[str]:
    return [entry[field] for entry in edits.get(key) or ()]


def test_agent_reads_every_device_of_the_generated_spec(host: Host | Machine, spec: HostSpec):
    """`cdi generate` by the agent, for every profile: GPUs, MIG instances, device nodes, driver files"""
    assert set(spec.devices) == {uuid for uuid, *_ in host.devices} | {"all"}
    assert spec.has_driver
    for uuid, minor, gpu_instance, _ in host.devices:
        nodes = paths(spec.devices[uuid], "deviceNodes", "path")
        assert f"/dev/nvidia{minor}" in nodes
        assert sum("nvidia-caps" in node for node in nodes) == (2 if gpu_instance is not None else 0)
        assert not spec.lacks_capabilities(uuid) or gpu_instance is None


@pytest.mark.parametrize("way", ["front", "preload"])
def test_agent_merges_the_generated_spec(host: Host | Machine, spec: HostSpec, way):
    """the container spec that the agent makes of it: the shim where the driver's libraries were"""
    driver, library = mounted_driver(spec)
    if isinstance(host, Host):
        assert (driver, library) == (f"{host.root}{library}", f"/{LIBRARY_DIR}/libcuda.so.{host.version}")
    shim = ShimFiles({name: f"/opt/shim/{name}" for name in SHIM_LIBRARIES}, "/run/limits", "/run/region", Interposition(way))
    for uuid, minor, _, _ in host.devices:
        edits = container_spec(["grant"], [InjectedDevice(uuid, minor)], spec, shim)["devices"][0]["containerEdits"]
        mounts = {mount["containerPath"]: mount["hostPath"] for mount in edits["mounts"]}
        if way == "front":
            assert mounts[library] == f"/opt/shim/{contract.CUDA_SONAME}"
            assert mounts[f"{contract.CONTAINER_DRIVER_DIR}/{contract.CUDA_DRIVER_SONAME}"] == driver
        else:
            assert mounts[library] == driver
            assert contract.LD_SO_PRELOAD in mounts
        gpus = [path for path in paths(edits, "deviceNodes", "path") if re.fullmatch(r"/dev/nvidia\d+", path)]
        assert gpus == [f"/dev/nvidia{minor}"]
        assert not any("enable-cuda-compat" in hook["args"] for hook in edits["hooks"]) or way == "preload"
