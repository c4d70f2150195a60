# SPDX-License-Identifier: Apache-2.0
"""A container runtime without root: a container is a process group, with its mounts as files in its root directory.

The processes see the host's file system, so there is no isolation. The parts that the GPU stack depends on are real:

- CDI names are resolved when the container is created.
- The file of a mount is at its container path below the root. It is the same inode where the file system allows it, so that mappings are
  shared.
- The loader finds libraries there through ``LD_LIBRARY_PATH``, and ``ld.so.preload`` of the root becomes ``LD_PRELOAD``.
- CDI's environment wins over the pod's, and the pod's over the plugin's.

Mount options have no effect: a read-only mount is as writable as the file's mode. So a container of low priority could write the node's
priority page here; the shim never does. CDI hooks do not run; only the links of ``update-ldcache`` are created.
"""

import asyncio
import itertools
import logging
import os
import shlex
import shutil
import signal
import subprocess
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from aliquot import contract
from aliquot_lab.standin.cdi import CdiError, ContainerEdits, DeviceNode, Mount, load_registry, resolve
from aliquot_lab.standin.processes import ProcessTable

log = logging.getLogger(__name__)

BASE_ENV = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/", "LANG": "C.UTF-8"}
FOLLOW_SECONDS = 0.1
"""Time until a new process of a container is in the process table."""
ELF_MAGIC = b"\x7fELF"
LDCONFIG_PLACES = ("/sbin/ldconfig", "/usr/sbin/ldconfig")


class RuntimeRefusalError(Exception):
    """The container cannot be created or started; ``reason`` is the waiting reason in the pod's status."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class ContainerConfig:
    """The kubelet's request for one run of one container."""

    namespace: str
    pod: str
    pod_uid: str
    container: str
    attempt: int
    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()
    """Environment in rising order of precedence: image, plugin, pod."""
    mounts: tuple[tuple[str, str], ...] = ()
    device_paths: tuple[str, ...] = ()
    cdi_devices: tuple[str, ...] = ()


Visibility = Callable[[Sequence[DeviceNode]], Mapping[str, str]]
"""Turns a container's device nodes into environment that limits a process to these devices; see ``hardware``."""


class RunningContainer:
    """One run of one container."""

    def __init__(self, container_id: str, config: ContainerConfig, root: Path, env: Mapping[str, str]) -> None:
        self.id = container_id
        self.config = config
        self.root = root
        self.env = env
        self.exit_code: int | None = None
        """None while it runs; a signal n is 128 + n."""
        self._process: asyncio.subprocess.Process | None = None
        self._ended = asyncio.Event()
        self._lines: list[str] = []
        self._read_bytes = 0

    @property
    def log_path(self) -> Path:
        """Return the file with its standard output and error."""
        return self.root.parent / "log"

    @property
    def enter_path(self) -> Path:
        """Return a script that runs its arguments as a command in the container's environment."""
        return self.root.parent / "enter"

    @property
    def pid(self) -> int:
        """Return the pid of its first process, the leader of the process group."""
        if self._process is None:
            raise RuntimeError(f"container {self.config.container} was not started")
        return self._process.pid

    def lines(self) -> Sequence[str]:
        """Return the complete lines of its output."""
        with self.log_path.open("rb") as log_file:
            log_file.seek(self._read_bytes)
            fresh = log_file.read()
        complete = fresh[: fresh.rfind(b"\n") + 1]
        self._read_bytes += len(complete)
        self._lines.extend(complete.decode(errors="replace").splitlines())
        return self._lines

    async def wait(self) -> int:
        """Wait for the end of the container and return its exit code."""
        await self._ended.wait()
        if self.exit_code is None:
            raise RuntimeError(f"container {self.config.container} ended without an exit code")
        return self.exit_code

    def signal_group(self, signal_number: int) -> None:
        """Send a signal to every process of the container."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal_number)

    async def launch(self) -> None:
        """Start the process. Raises OSError."""
        assignments = " ".join(shlex.quote(f"{name}={value}") for name, value in self.env.items())
        self.enter_path.write_text(f'#!/bin/sh\ncd {shlex.quote(str(self.root))} && exec env -i {assignments} "$@"\n')
        self.enter_path.chmod(0o755)
        with self.log_path.open("ab") as log_file:
            self._process = await asyncio.create_subprocess_exec(
                *self.config.argv,
                cwd=self.root,
                env=dict(self.env),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log_file,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )

    async def reap(self) -> None:
        """Wait for the first process and then kill the others, as the end of PID 1 ends a container."""
        if self._process is None:
            raise RuntimeError(f"container {self.config.container} was not started")
        code = await self._process.wait()
        self.signal_group(signal.SIGKILL)
        self.exit_code = code if code >= 0 else 128 - code
        self._ended.set()


class Runtime:
    """Creates, starts and stops containers below one directory."""

    def __init__(
        self,
        directory: Path,
        cdi_directories: Sequence[Path],
        *,
        visibility: Visibility = lambda _: {},
        processes: ProcessTable | None = None,
    ) -> None:
        """Args: cdi_directories: static first, dynamic last, as in runtimes."""
        self.directory = directory
        self.containers: list[RunningContainer] = []
        """Containers with a running process."""
        self.history: list[RunningContainer] = []
        """All containers ever started, oldest first."""
        self._cdi_directories = tuple(cdi_directories)
        self._visibility = visibility
        self._processes = processes
        self._following = False
        self._numbers = itertools.count()
        self._reapers: set[asyncio.Task[None]] = set()

    async def start(self, config: ContainerConfig) -> RunningContainer:
        """Create a container and start its process. Raises RuntimeRefusalError."""
        if not config.argv:
            raise RuntimeRefusalError("CreateContainerError", "no command specified")
        try:
            edits = resolve(load_registry(self._cdi_directories), config.cdi_devices)
        except CdiError as exc:
            message = f"failed to generate container spec: CDI device injection failed: {exc}"
            raise RuntimeRefusalError("CreateContainerError", message) from exc
        container_id = uuid.uuid4().hex
        root = self.directory / f"{next(self._numbers):03d}-{config.pod}-{config.container}" / "rootfs"
        mounts = [*(Mount(host_path=host, container_path=path) for host, path in config.mounts), *edits.mounts]
        try:
            library_dirs = _build_root(root, mounts)
        except OSError as exc:
            raise RuntimeRefusalError("CreateContainerError", f"failed to mount: {exc}") from exc
        env = self._environment(config, edits, root, library_dirs)
        container = RunningContainer(container_id, config, root, env)
        try:
            await container.launch()
        except OSError as exc:
            raise RuntimeRefusalError("RunContainerError", f"failed to start {config.argv[0]!r}: {exc.strerror}") from exc
        self.containers.append(container)
        self.history.append(container)
        if self._processes is not None:
            self._processes.add(container.pid, config.pod_uid, container_id)
            self._follow(self._processes)
        reaper = asyncio.create_task(self._reap(container))
        self._reapers.add(reaper)
        reaper.add_done_callback(self._reapers.discard)
        return container

    async def execute(self, container: RunningContainer, argv: Sequence[str], *, timeout_seconds: float = 15.0) -> tuple[int, str]:
        """Run another program in a container, as kubectl exec does; return its exit code and its output with standard error.

        Raises: TimeoutError; the program is killed then.
        """
        process = await asyncio.create_subprocess_exec(
            container.enter_path,
            *argv,
            cwd=container.root,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            output, _ = await asyncio.wait_for(process.communicate(), timeout_seconds)
        except TimeoutError:
            raise TimeoutError(
                f"{shlex.join(argv)} in container {container.config.container} did not end in {timeout_seconds:g} s"
            ) from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        return process.returncode or 0, output.decode(errors="replace")

    def find(self, pod: str, container: str | None = None) -> RunningContainer | None:
        """Return the latest run of a pod's container, ended or not."""
        for item in reversed(self.history):
            if item.config.pod == pod and container in (None, item.config.container):
                return item
        return None

    async def stop_pod(self, pod_uid: str, grace_seconds: float) -> None:
        """Stop all containers of a pod: SIGTERM, and SIGKILL after the grace time."""
        await self._stop([item for item in self.containers if item.config.pod_uid == pod_uid], grace_seconds)

    async def kill_all(self) -> None:
        """Kill every container."""
        await self._stop(list(self.containers), 0.0)

    async def _stop(self, containers: Sequence[RunningContainer], grace_seconds: float) -> None:
        ends = [asyncio.ensure_future(item.wait()) for item in containers]
        if not ends:
            return
        if grace_seconds > 0:
            for item in containers:
                item.signal_group(signal.SIGTERM)
            await asyncio.wait(ends, timeout=grace_seconds)
        for item in containers:
            item.signal_group(signal.SIGKILL)
        await asyncio.gather(*ends)

    async def _reap(self, container: RunningContainer) -> None:
        await container.reap()
        self.containers.remove(container)
        if self._processes is not None:
            self._processes.remove(container.pid)

    def _follow(self, processes: ProcessTable) -> None:
        """Update the process table while containers run."""
        if self._following:
            return
        self._following = True

        def look() -> None:
            self._following = bool(self.containers)
            if self._following:
                processes.refresh()
                loop.call_later(FOLLOW_SECONDS, look)

        loop = asyncio.get_running_loop()
        loop.call_later(FOLLOW_SECONDS, look)

    def _environment(self, config: ContainerConfig, edits: ContainerEdits, root: Path, library_dirs: Sequence[Path]) -> dict[str, str]:
        env = {**BASE_ENV, "HOSTNAME": config.pod, **dict(config.env)}
        for entry in edits.env:
            name, _, value = entry.partition("=")
            env[name] = value
        nodes = (*(DeviceNode(path=path) for path in config.device_paths), *edits.device_nodes)
        env.update(self._visibility(nodes))
        inherited = [env["LD_LIBRARY_PATH"]] if env.get("LD_LIBRARY_PATH") else []
        if library_dirs:
            env["LD_LIBRARY_PATH"] = ":".join([*map(str, library_dirs), *inherited])
        preload = root / contract.LD_SO_PRELOAD.lstrip("/")
        if preload.is_file():
            env["LD_PRELOAD"] = ":".join(str(root / path.lstrip("/")) for path in preload.read_text().split())
        return env


def _build_root(root: Path, mounts: Sequence[Mount]) -> list[Path]:
    """Create every mount below the root; return the directories for the loader's library path."""
    root.mkdir(parents=True)
    library_dirs: dict[Path, None] = {}
    for mount in mounts:
        source, target = Path(mount.host_path), root / mount.container_path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        _place(source, target)
        if ".so" in target.name and not mount.container_path.startswith(contract.CONTAINER_DIR + "/"):
            library_dirs[target.parent] = None
    for directory in library_dirs:
        _link_sonames(directory)
    return list(library_dirs)


def _place(source: Path, target: Path) -> None:
    """Create ``target`` as the same inode as ``source`` if possible.

    A library must not become a symbolic link: its ``$ORIGIN`` would be the host's directory.
    """
    if source.is_dir():
        target.symlink_to(source)
        return
    try:
        target.hardlink_to(source.resolve(strict=True))
    except OSError:
        if _is_library(source):
            shutil.copy2(source, target)
        else:
            target.symlink_to(source.resolve(strict=True))


def _is_library(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(ELF_MAGIC)) == ELF_MAGIC


def find_ldconfig() -> str:
    """Return the path of ldconfig, which is often not in a user's PATH. Raises FileNotFoundError."""
    program = next((path for path in LDCONFIG_PLACES if Path(path).exists()), shutil.which("ldconfig"))
    if program is None:
        raise FileNotFoundError(f"ldconfig: not found as {' or '.join(LDCONFIG_PLACES)} or in PATH; it comes with the C library")
    return program


def _link_sonames(directory: Path) -> None:
    """Create links such as ``libcuda.so.1`` to ``libcuda.so.580.159.03``, as the update-ldcache hook does in a real container."""
    program = find_ldconfig()
    result = subprocess.run([program, "-n", str(directory)], capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise OSError(f"{program} -n {directory}: {result.stderr.strip()}")
