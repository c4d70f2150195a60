# SPDX-License-Identifier: Apache-2.0
"""File systems of nodes as ``aliquot doctor`` sees them: a healthy one to start from, and what a test changes about it."""

import shutil
import socket
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc

from aliquot_cli.doctor.findings import Finding, Severity
from aliquot_cli.doctor.host import Host
from aliquot_cli.doctor.options import DoctorOptions

DRIVER = "580.159.03"
PLUGINS = "/var/lib/kubelet/device-plugins"
CONTAINERD_2 = "version = 3\n"
CONTAINERD_17 = 'version = 2\n[plugins."io.containerd.grpc.v1.cri"]\nenable_cdi = true\n'
TOOLKIT = """
accept-nvidia-visible-devices-envvar-when-unprivileged = false
accept-nvidia-visible-devices-as-volume-mounts = true
"""
NVIDIA_CDI = """
cdiVersion: 0.5.0
kind: nvidia.com/gpu
devices:
  - name: "0"
    containerEdits: {deviceNodes: [{path: /dev/nvidia0}]}
containerEdits:
  mounts: [{hostPath: /usr/lib/x86_64-linux-gnu/libcuda.so.580.159.03, containerPath: /usr/lib/x86_64-linux-gnu/libcuda.so.580.159.03}]
"""


class Root:
    """A node's root directory, with sockets that answer as long as it is open."""

    def __init__(self) -> None:
        self.base = Path(tempfile.mkdtemp(prefix="aq-"))  # a socket's path is short
        self._open: list[socket.socket] = []
        self._servers: list[grpc.Server] = []

    def close(self) -> None:
        for one in self._open:
            one.close()
        for server in self._servers:
            server.stop(None).wait()
        shutil.rmtree(self.base)

    def __enter__(self) -> "Root":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def at(self, name: str) -> Path:
        return self.base / name.lstrip("/")

    def write(self, name: str, text: str = "", mode: int = 0o644) -> "Root":
        path = self.at(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(mode)
        return self

    def remove(self, name: str) -> "Root":
        path = self.at(name)
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
        return self

    def listen(self, name: str, *, alive: bool = True) -> "Root":
        """Make a socket; a dead one is left behind by a listener that has ended."""
        path = self.at(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(path))
        if alive:
            listener.listen()
            self._open.append(listener)
        else:
            listener.close()
        return self

    def containerd(self, version: str = "v2.1.4", socket_name: str = "/run/containerd/containerd.sock") -> "Root":
        """Serve the CRI's Version call."""

        def text(number: int, value: str) -> bytes:
            return bytes([number << 3 | 2, len(value)]) + value.encode()

        answer = text(1, "0.1.0") + text(2, "containerd") + text(3, version) + text(4, "v1")
        handler = grpc.method_handlers_generic_handler(
            "runtime.v1.RuntimeService", {"Version": grpc.unary_unary_rpc_method_handler(lambda _request, _context: answer)}
        )
        server = grpc.server(ThreadPoolExecutor(1))
        server.add_generic_rpc_handlers((handler,))
        self.at(socket_name).parent.mkdir(parents=True, exist_ok=True)
        server.add_insecure_port(f"unix:{self.at(socket_name)}")
        server.start()
        self._servers.append(server)
        return self


def healthy() -> Root:
    """A node with driver, kubelet, containerd 2, toolkit and CDI, all as they should be."""
    root = Root()
    root.write("/proc/driver/nvidia/version", f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {DRIVER}  Release Build\n")
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        root.write(f"/dev/{name}")
    root.write("/proc/sys/fs/inotify/max_user_instances", "8192\n")
    root.write("/sys/fs/cgroup/cgroup.controllers", "cpu memory\n")
    root.listen(f"{PLUGINS}/kubelet.sock").listen("/var/lib/kubelet/pod-resources/kubelet.sock")
    root.containerd().write("/etc/containerd/config.toml", CONTAINERD_2)
    root.write("/etc/nvidia-container-runtime/config.toml", TOOLKIT)
    root.write("/usr/lib/x86_64-linux-gnu/libcuda.so.580.159.03").write("/var/run/cdi/nvidia.yaml", NVIDIA_CDI)
    root.write("/var/lib/dpkg/status", "Package: nvidia-container-toolkit\nStatus: install ok installed\nVersion: 1.18.0-1\n\n")
    return root


def findings(root: Root, check: object, **options: object) -> list[Finding]:
    return list(check(Host(root.base), DoctorOptions(**options)))  # type: ignore[arg-type, operator]


def of(found: list[Finding], name: str) -> Finding:
    """The one finding of a check."""
    (finding,) = [finding for finding in found if finding.check == name]
    return finding


def bad(found: list[Finding]) -> list[str]:
    return [finding.check for finding in found if finding.severity.weight >= Severity.WARNING.weight]
