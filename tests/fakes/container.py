# SPDX-License-Identifier: Apache-2.0
"""A container without a runtime: an unpacked root with the shim and the (simulated) driver where the agent mounts them.

The limits and the region are written with ``agent.core.region_layout``, as the agent writes them. Programs started with ``run`` or
``start`` see what they would see inside: the library directory of this root, its devices, and nothing else of the node.
"""

import fcntl
import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from agent.core import region_layout
from agent.core.region_layout import DeviceLimit, Limits, RegionSnapshot
from aliquot import contract
from tests.fakes import regions

MIB = 2**20
SOURCE_TREE = Path(__file__).resolve().parents[2]
F_OFD_GETLK = 36
PATIENCE_SECONDS = 100
"""A program that takes longer hangs."""

Interposition = Literal["front", "preload", "none"]
LIBRARY_DIR = "usr/lib/x86_64-linux-gnu"
CLIENT = "bin/aliquot-cuda-client"


_USED_BYTES = """
import ctypes, sys
class Process(ctypes.Structure):  # nvmlProcessInfo_t
    _fields_ = [("pid", ctypes.c_uint), ("used", ctypes.c_ulonglong), ("gpu_instance", ctypes.c_uint), ("compute_instance", ctypes.c_uint)]
nvml, device, count, processes = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p(), ctypes.c_uint(1000), (Process * 1000)()
def must(name, *arguments):
    result = getattr(nvml, name)(*arguments)
    assert result == 0, (name, result)
must("nvmlInit_v2")
must("nvmlDeviceGetHandleByUUID", sys.argv[1].encode(), ctypes.byref(device))
must("nvmlDeviceGetComputeRunningProcesses_v3", device, ctypes.byref(count), processes)
print(sum(one.used for one in processes[: count.value]))
"""
"""Starts in a fourth of the time that nvidia-ml-py takes; tests ask after each step."""


@dataclass(frozen=True)
class Answer:
    """Exit code and output of a program."""

    status: int
    events: tuple[dict[str, Any], ...]
    """JSON objects of its output, one from each line."""
    stderr: str
    stdout: str = ""

    @property
    def last(self) -> dict[str, Any]:
        assert self.events, f"no output; status {self.status}; stderr: {self.stderr}"
        return self.events[-1]


class Program:
    """A running program that reads commands from stdin and answers each with one line of JSON."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def listen(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(f"the program ended with {self.process.wait(PATIENCE_SECONDS)} instead of answering")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def tell(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def ask(self, command: str) -> dict[str, Any]:
        self.tell(command)
        return self.listen()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_SECONDS)

    def __enter__(self) -> "Program":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.kill()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


class Container:
    """One container's root directory."""

    def __init__(self, root: Path, build: Path, node: Path, *, interposition: Interposition, uuids: Sequence[str]) -> None:
        self.root = root
        self.build = build
        self.interposition = interposition
        self.settings: dict[str, str] = {}
        """Environment of all its programs, as from a pod's spec."""
        self.measured_context_bytes: int | None = None
        """Memory of one process's context, on this machine's own driver; None on a simulated GPU, where it is known."""
        self._node = node
        self._uuids = uuids

    @property
    def on_machine(self) -> bool:
        """Whether the driver is this machine's own. Then sizes are not those of a simulated GPU."""
        return self.measured_context_bytes is not None

    @property
    def limits_path(self) -> Path:
        return self.root / "run/aliquot/limits"

    @property
    def region_path(self) -> Path:
        return self.root / "run/aliquot/region"

    # --- the agent's side -----------------------------------------------------------------------------------------

    def limits(self) -> Limits:
        return region_layout.decode_limits(self.limits_path.read_bytes())

    def set_limits(self, limits: Limits) -> None:
        """Rewrite the limits in place, in the order of the protocol, while programs run."""
        descriptor = os.open(self.limits_path, os.O_RDWR)
        try:
            for write in region_layout.limits_update(limits, current=os.pread(descriptor, region_layout.LIMITS_BYTES, 0)):
                os.pwrite(descriptor, write.data, write.offset)
        finally:
            os.close(descriptor)

    def set_memory(self, *memory_bytes: int) -> None:
        limits = self.limits()
        devices = (replace(device, memory_bytes=amount) for device, amount in zip(limits.devices, memory_bytes, strict=True))
        self.set_limits(replace(limits, devices=tuple(devices)))

    def snapshot(self) -> RegionSnapshot:
        return regions.decoded(self.region_path.read_bytes())

    def dead_slots(self) -> tuple[int, ...]:
        snapshot = self.snapshot()
        with self.region_path.open("rb") as file:
            locked = {slot.index for slot in snapshot.slots if _is_locked(file.fileno(), snapshot.geometry.slot(slot.index))}
        return region_layout.dead_slots(snapshot, locked)

    def used_bytes(self, device: int = 0) -> int:
        """Return the bytes that running processes hold."""
        return region_layout.live_used_bytes(self.snapshot(), self.dead_slots())[device]

    def line_bytes(self, device: int = 0) -> int:
        """Return the total that the shim compares with the limit."""
        return self.snapshot().line_used_bytes[device]

    # --- the programs' side ---------------------------------------------------------------------------------------

    def environment(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        devices = {f"{contract.ENV_SIM_DEVICE_PREFIX}{index}": uuid for index, uuid in enumerate(self._uuids)}
        env = {
            "PATH": os.environ["PATH"],
            contract.ENV_SIM_DIR: str(self._node),
            "LD_LIBRARY_PATH": str(self.root / LIBRARY_DIR),
            **devices,
        }
        if self.interposition == "preload":
            env["LD_PRELOAD"] = str(self.root / contract.CONTAINER_PRELOAD.lstrip("/"))
        return env | self.settings | dict(extra or {})

    def run(
        self, command: Sequence[str | Path], env: Mapping[str, str] | None = None, stdin: str = "", *, patience: float = PATIENCE_SECONDS
    ) -> Answer:
        done = subprocess.run(
            [str(word) for word in command],
            env=self.environment(env), input=stdin, capture_output=True, text=True, timeout=patience, check=False,
        )  # fmt: skip
        return Answer(done.returncode, tuple(_events(done.stdout)), done.stderr, done.stdout)

    def client(self, *arguments: str, env: Mapping[str, str] | None = None, stdin: str = "") -> Answer:
        return self.run([self.build / CLIENT, *arguments], env, stdin)

    def python(self, script: str, *, env: Mapping[str, str] | None = None, behind: Sequence[str] = ()) -> Answer:
        """Run a Python program with this source tree on its path; it does not use the shim directly.

        Args: behind: a command that runs it, such as ``unshare`` and its options.
        """
        return self.run([*behind, sys.executable, "-c", script], {"PYTHONPATH": str(SOURCE_TREE), **(env or {})})

    def start_python(self, script: str, *, env: Mapping[str, str] | None = None, behind: Sequence[str] = ()) -> Program:
        """Start a Python program that reads commands from stdin and answers on stdout."""
        return self.start([*behind, sys.executable, "-c", script], {"PYTHONPATH": str(SOURCE_TREE), **(env or {})})

    def start(self, command: Sequence[str | Path], env: Mapping[str, str] | None = None) -> Program:
        process = subprocess.Popen(
            [str(word) for word in command], env=self.environment(env), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        return Program(process)

    def repl(self, *arguments: str, env: Mapping[str, str] | None = None) -> Program:
        """Start a client that waits for commands; its first line is already read."""
        program = self.start([self.build / CLIENT, "repl", *arguments], env)
        ready = program.listen()
        assert ready["event"] == "ready", ready
        return program


def make_container(
    root: Path,
    build: Path,
    node: Path,
    limits: Limits | Iterable[DeviceLimit],
    *,
    interposition: Interposition = "front",
    uuids: Sequence[str] | None = None,
    driver: Mapping[str, Path] | None = None,
) -> Container:
    """Create a container's root at ``root``.

    Args:
        build: the build directory.
        node: the simulated node's directory.
        limits: what is granted.
        interposition: how the shim gets in; ``none`` is a container without it, for comparison.
        uuids: devices the runtime makes visible; the granted ones when left out.
        driver: the real driver's files by SONAME; the simulated driver's when left out.
    """
    content = limits if isinstance(limits, Limits) else Limits(tuple(limits))
    libraries, aliquot = root / LIBRARY_DIR, root / "run/aliquot"
    files = driver or {soname: build / "lib/sim" / soname for soname in (contract.CUDA_SONAME, contract.NVML_SONAME)}
    libraries.mkdir(parents=True)
    (aliquot / "driver").mkdir(parents=True)
    (aliquot / "limits").write_bytes(region_layout.encode_limits(content))
    (aliquot / "region").write_bytes(regions.empty_region())
    for soname, private in ((contract.CUDA_SONAME, contract.CUDA_DRIVER_SONAME), (contract.NVML_SONAME, contract.NVML_DRIVER_SONAME)):
        if interposition == "front":
            shutil.copy(build / "lib/shim" / soname, libraries / soname)
            (aliquot / "driver" / private).symlink_to(files[soname])
        else:
            (libraries / soname).symlink_to(files[soname])
    if interposition == "preload":
        shutil.copy(build / "lib/shim/libaliquot-preload.so", root / contract.CONTAINER_PRELOAD.lstrip("/"))
    visible = [device.uuid for device in content.devices] if uuids is None else list(uuids)
    return Container(root, build, node, interposition=interposition, uuids=visible)


class Node:
    """A simulated node and the containers on it."""

    def __init__(self, build: Path, directory: Path, roots: Path) -> None:
        self.build = build
        self.directory = directory
        self.uuids = _device_uuids(build, directory)
        self._roots = roots
        self._made = 0

    def container(
        self, *memory_mib: float, interposition: Interposition = "front", first: int = 0, log_level: int = region_layout.LOG_ERROR
    ) -> Container:
        """Create a container with one device for each amount, from the node's device number ``first``."""
        devices = tuple(
            DeviceLimit(uuid, int(mib * MIB)) for uuid, mib in zip(self.uuids[first : first + len(memory_mib)], memory_mib, strict=True)
        )
        return self.container_with(Limits(devices, log_level=log_level), interposition=interposition)

    def container_with(self, limits: Limits, *, interposition: Interposition = "front", uuids: Sequence[str] | None = None) -> Container:
        self._made += 1
        root = self._roots / f"container{self._made}"
        return make_container(root, self.build, self.directory, limits, interposition=interposition, uuids=uuids)

    def host(self, script: str) -> str:
        """Run a Python program on the host (all devices, no shim); return its output."""
        done = subprocess.run(
            [sys.executable, "-c", script],
            env=self.host_environment(),
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=True,
        )
        return done.stdout

    def host_environment(self) -> dict[str, str]:
        """Return the environment of a program on the host."""
        return _host_environment(self.build, self.directory)

    def physical_used_bytes(self, uuid: str) -> int:
        """Return the device memory that processes hold, by the driver's count."""
        command = [sys.executable, "-S", "-E", "-c", _USED_BYTES, uuid]
        done = subprocess.run(command, env=self.host_environment(), capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=True)
        return int(done.stdout)


def _host_environment(build: Path, directory: Path) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], contract.ENV_SIM_DIR: str(directory), "LD_LIBRARY_PATH": str(build / "lib/sim")}


_known_uuids: dict[str, tuple[str, ...]] = {}


def _device_uuids(build: Path, directory: Path) -> tuple[str, ...]:
    """Return the UUIDs of the node's GPUs in NVML order. They depend on the topology only, so the result is cached."""
    topology = (directory / "topology").read_text()
    if topology not in _known_uuids:
        script = (
            "import pynvml as n; n.nvmlInit()\n"
            "for i in range(n.nvmlDeviceGetCount()): print(n.nvmlDeviceGetUUID(n.nvmlDeviceGetHandleByIndex(i)))"
        )
        done = subprocess.run(
            [sys.executable, "-c", script],
            env=_host_environment(build, directory),
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=True,
        )
        _known_uuids[topology] = tuple(done.stdout.split())
    return _known_uuids[topology]


def _events(output: str) -> Iterable[dict[str, Any]]:
    return (json.loads(line) for line in output.splitlines() if line.startswith("{"))


def _is_locked(descriptor: int, offset: int) -> bool:
    """Whether a process holds the write lock on this byte, without taking it."""
    form = struct.Struct("hhlli4x")
    asked = form.pack(fcntl.F_WRLCK, os.SEEK_SET, offset, 1, 0)
    kind: int = form.unpack(fcntl.fcntl(descriptor, F_OFD_GETLK, asked))[0]
    return kind != fcntl.F_UNLCK
