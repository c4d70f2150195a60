# SPDX-License-Identifier: Apache-2.0
"""Bringing the cluster up and down, and what scenarios may do to it in between."""

import fcntl
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import yaml

from tests.e2e.cluster import forward, host, images, namespaces
from tests.e2e.cluster.certificates import make_certificates
from tests.e2e.cluster.components import (
    API_PORT,
    CONTAINERD_SOCKET,
    PAUSE_IMAGE,
    Component,
    components,
    write_configuration,
    write_kubeconfig,
)
from tests.e2e.cluster.namespaces import NODE_ADDRESS, NODE_NAME, SERVICE_ADDRESS
from tests.e2e.cluster.paths import BUILD, RUN
from tests.e2e.kubectl import Kubectl, KubectlError, eventually

BUSYBOX_IMAGE = "aliquot.test/busybox:e2e"
_COMMAND_SECONDS = 300
"""A busy machine needs minutes to import an image."""
_LOG_LINES = 5
_LINE_CHARACTERS = 300
_INFORMATION = re.compile(r"I\d{4} |time=\S+ level=info|\{.*\"level\": ?\"info\"")
_BROKEN_WORDS = ("error", "fail", "fatal", "panic", "refused", "unable", "cannot")

_KUBELET_CLIENT_BINDING = {
    "apiVersion": "rbac.authorization.k8s.io/v1",
    "kind": "ClusterRoleBinding",
    "metadata": {"name": "aliquot-e2e-kubelet-client"},
    "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "system:kubelet-api-admin"},
    "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "kube-apiserver-kubelet-client"}],
}
"""What the API server needs for logs and exec: kubelet asks it whether its own client may."""


class Cluster:
    """One running cluster. Files of a run are below ``run_dir``."""

    def __init__(self, run_dir: Path = RUN) -> None:
        self.run_dir = run_dir
        self.config = run_dir / "config"
        self.kubeconfig = run_dir / "kubeconfig"

    # --- up and down ----------------------------------------------------------------------------------------------

    def up(self, *, owned: bool) -> None:
        """Bring the cluster up: the node is Ready and takes pods when this returns.

        Args:
            owned: the cluster ends with this process, whatever becomes of it.
        Raises:
            UnavailableError: this machine cannot; the message says what is missing.
        """
        _require_machine(self.run_dir)
        if namespaces.init_pid(self.run_dir) is not None:
            raise RuntimeError(f"a cluster is already running from {self.run_dir}: python -m tests.e2e.cluster down")
        self.down()  # files of a run that was killed
        self._programs()
        archives = base_images()
        make_certificates(self.config / "pki", node_name=NODE_NAME, server_addresses=("127.0.0.1", NODE_ADDRESS, SERVICE_ADDRESS))
        write_configuration(self.config)
        self._node = namespaces.start(self.run_dir, owned=owned)
        try:
            self._bring_up(archives)
        except BaseException as broken:
            broken.add_note(self.short_logs(since={}))
            self.down()
            raise

    def down(self) -> None:
        """Take everything down; no part of the cluster is left, in any state it was in."""
        namespaces.remove(self.run_dir)
        shutil.rmtree(self.run_dir, ignore_errors=True)
        if self.run_dir.exists():
            shutil.rmtree(self.run_dir)  # the second time says what is in the way

    def _bring_up(self, archives: list[Path]) -> None:
        ready = self.run_dir / "pids/ready"
        eventually(lambda: ready.exists() or self._node.poll() is not None, "the node's namespaces")
        if not ready.exists():
            raise RuntimeError("the node's init process ended while it prepared the namespaces")
        (self.run_dir / "node/etc/cni/net.d").mkdir(parents=True, exist_ok=True)
        shutil.copy(self.config / "cni/10-aliquot-e2e.conflist", self.run_dir / "node/etc/cni/net.d")
        for name in ("etcd", "containerd", "kube-apiserver"):
            self.start(name)
        port, self._forward = forward.start(self._init_pid(), NODE_ADDRESS, API_PORT, self.run_dir / "log/forward.log")
        admin = yaml.safe_load((self.config / "admin.kubeconfig").read_text())["users"][0]["user"]["token"]
        write_kubeconfig(self.kubeconfig, f"https://127.0.0.1:{port}", self.config / "pki/ca.crt", admin)
        kubectl = self.kubectl()
        eventually(lambda: _answers(kubectl, "get", "--raw=/readyz"), "the API server to be ready", seconds=90)
        for name in ("kube-controller-manager", "kube-scheduler"):
            self.start(name)
        kubectl.apply(_KUBELET_CLIENT_BINDING)
        for archive in archives:
            self.import_image(archive)
        self.start("kubelet")
        eventually(lambda: _is_ready(kubectl), f"node {NODE_NAME} to be Ready", seconds=90)
        eventually(lambda: _answers(kubectl, "get", "serviceaccount", "default"), "the default service account")

    # --- what scenarios may do ------------------------------------------------------------------------------------

    def kubectl(self) -> Kubectl:
        """kubectl as the cluster's administrator."""
        return Kubectl(str(host.built_programs(host.KUBERNETES) / "kubectl"), self.kubeconfig)

    def component(self, name: str) -> Component:
        """One of the cluster's own components as ``start`` runs it, for a scenario that runs it differently."""
        return self._programs()[name]

    def start(self, name: str, component: Component | None = None) -> None:
        """Have a component running; one of the cluster's own unless another is given."""
        described = (component or self._programs()[name]).describe()
        unfinished = self.run_dir / "wanted" / f"{name}.unfinished"
        unfinished.write_text(described)
        unfinished.rename(unfinished.with_suffix(".json"))

    def stop(self, name: str) -> None:
        """Have a component not running; returns when it has ended."""
        (self.run_dir / "wanted" / f"{name}.json").unlink()
        pid_file = self.run_dir / "pids" / name
        eventually(lambda: not pid_file.exists(), f"{name} to end")

    def restart(self, name: str) -> None:
        """Stop and start a component, as its unit's restart would."""
        self.stop(name)
        self.start(name)

    def kill(self, name: str) -> None:
        """End a component without a word; it is started again a second later. One that was just killed is waited for."""
        eventually((self.run_dir / "pids" / name).exists, f"{name} to run")
        os.kill(namespaces.host_pid(self.run_dir, name), signal.SIGKILL)

    def kill_container(self, container_id: str) -> None:
        """End a container's first process without a word.

        Args:
            container_id: as the pod's status has it: ``containerd://...``.
        """
        self._ctr("tasks", "kill", "--signal=SIGKILL", container_id.removeprefix("containerd://"))

    def import_image(self, archive: Path) -> None:
        """Give the node an image."""
        eventually(lambda: self.in_node("test", "-S", CONTAINERD_SOCKET).returncode == 0, "containerd's socket")
        self._ctr("images", "import", "--local", str(archive.resolve()))

    @contextmanager
    def api_of(self, other: "Cluster") -> Iterator[str]:
        """Let the pods of this cluster reach the API server of another one inside the block. Yields: its URL for them."""
        log = self.run_dir / "log/other-api.log"
        port, forwarding = forward.start(other._init_pid(), NODE_ADDRESS, API_PORT, log, on_node=self._init_pid())
        try:
            yield f"https://{NODE_ADDRESS}:{port}"
        finally:
            forwarding.terminate()
            forwarding.wait()

    def in_node(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command as root on the node."""
        enter = ["nsenter", f"--target={self._init_pid()}", "--mount", "--net", "--pid", "--ipc", "--uts", "--cgroup", "--"]
        return subprocess.run([*enter, *command], capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=False)

    def log_sizes(self) -> dict[str, int]:
        """How much each component has written so far."""
        return {name: log.stat().st_size for name, log in self._logs()}

    def short_logs(self, since: Mapping[str, int]) -> str:
        """The last lines of each component that tell of trouble, of what it wrote after ``since`` (an earlier ``log_sizes``)."""
        shown = []
        for name, log in self._logs():
            lines = _telling_lines(log, since.get(name, 0))
            shown += [f"--- {name}", *lines] if lines else []
        return "\n".join(shown) or "no component complained"

    def is_up(self) -> bool:
        """Whether the node lives and the API answers."""
        return namespaces.init_pid(self.run_dir) is not None and _answers(self.kubectl(), "get", "--raw=/readyz")

    def _logs(self) -> list[tuple[str, Path]]:
        """Name and file of every component's log: processes of the node, and containers of the product's pods."""
        processes = [(log.stem, log) for log in sorted((self.run_dir / "log").glob("*.log"))]
        containers = sorted((self.run_dir / "node/var/log/pods").glob("aliquot-system_*/*/*.log"))
        return processes + [("/".join(log.parts[-3:]), log) for log in containers]

    def _ctr(self, *arguments: str) -> None:
        """Run containerd's own client in the namespace where the kubelet's images and containers are."""
        program = str(host.built_programs(host.CONTAINERD) / "ctr")
        done = self.in_node(program, f"--address={CONTAINERD_SOCKET}", "--namespace=k8s.io", *arguments)
        if done.returncode != 0:
            raise RuntimeError(f"ctr {' '.join(arguments)}: {done.stderr}")

    def _programs(self) -> dict[str, Component]:
        return components(self.config, host.built_programs(host.KUBERNETES), host.built_programs(host.CONTAINERD))

    def _init_pid(self) -> int:
        pid = namespaces.init_pid(self.run_dir)
        if pid is None:
            raise RuntimeError(f"no cluster is running from {self.run_dir}")
        return pid


@contextmanager
def running_cluster(run_dir: Path = RUN) -> Iterator[Cluster]:
    """A cluster for the time of a block: one of its own, or the one that ``up`` left running. Two runs on one machine take turns."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with run_dir.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        cluster = Cluster(run_dir)
        if cluster.is_up():
            yield cluster
            return
        cluster.up(owned=True)
        try:
            yield cluster
        finally:
            cluster.down()


def base_images() -> list[Path]:
    """The images every cluster has: the pause container and busybox."""
    pause, busybox = BUILD / "images/pause.tar", BUILD / "images/busybox.tar"
    with images.one_process():
        images.busybox_image(pause, PAUSE_IMAGE, ["/bin/busybox", "sleep", "infinity"])
        images.busybox_image(busybox, BUSYBOX_IMAGE, ["/bin/sh"])
    return [pause, busybox]


def _require_machine(run_dir: Path) -> None:
    host.require_machine()
    overlaid = [path for path in namespaces.OVERLAID if run_dir.is_relative_to(path)]
    if overlaid:
        raise host.UnavailableError(
            f"the source tree lies below {overlaid[0]}, which the node replaces with an overlay: move the tree elsewhere"
        )


def _answers(kubectl: Kubectl, *arguments: str) -> bool:
    try:
        kubectl.run(*arguments, timeout_seconds=20)
    except (KubectlError, subprocess.TimeoutExpired):
        return False
    return True


def _is_ready(kubectl: Kubectl) -> bool:
    conditions = [condition for node in kubectl.all("nodes") for condition in node["status"].get("conditions", [])]
    return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)


def _telling_lines(log: Path, start: int) -> list[str]:
    with log.open("rb") as opened:
        opened.seek(start)
        lines = opened.read().decode(errors="replace").splitlines()
    telling = [line for line in lines if any(word in line.lower() for word in _BROKEN_WORDS) and not _INFORMATION.match(line)]
    return [line[:_LINE_CHARACTERS] for line in telling[-_LOG_LINES:]]


def elapsed(started: float) -> str:
    """Seconds since a monotonic time, for people."""
    return f"{time.monotonic() - started:.1f} s"
