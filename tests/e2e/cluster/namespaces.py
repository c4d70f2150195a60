# SPDX-License-Identifier: Apache-2.0
"""The node as namespaces of this machine: what it starts, mounts and configures can be taken down by ending one process.

The node has its own PID, mount, network, IPC, UTS and cgroup namespaces. ``/etc``, ``/run``, ``/var`` and ``/opt`` are overlays with upper
layers in the run directory. Every program and every manifest finds the paths it would find on any node (``/var/lib/kubelet``,
``/run/containerd``, ``/var/run/cdi``), and the machine keeps no file that is written there. When the init process of the PID namespace
ends, the kernel ends everything in it and drops mounts and interfaces; files of the run directory and the cgroups are all that is left to
remove, and ``remove`` does.

Run as a program this module is that init process::

    python -m tests.e2e.cluster.namespaces RUN_DIRECTORY [--owned]

It keeps the processes running that ``wanted/`` describes, restarts one that ends (as systemd would on a node), and reaps
orphans. With ``--owned`` it ends when its standard input closes, so that a killed test run leaves no cluster behind.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

NODE_NAME = "aliquot-e2e"
NODE_ADDRESS = "172.31.255.1"
SERVICE_ADDRESS = "10.96.0.1"
"""First address of the service range: the API server's in every cluster. It is the node's own, so no kube-proxy is needed."""

OVERLAID = ("/etc", "/run", "/var", "/opt")
_BOUND = ("/var/lib/kubelet", "/var/lib/containerd", "/var/lib/etcd")
"""Plain directories on the run directory's file system: an overlay cannot carry containerd's own overlays."""
_KUBELET_SYSCTLS = {
    "vm/overcommit_memory": 1,
    "vm/panic_on_oom": 0,
    "kernel/panic": 10,
    "kernel/panic_on_oops": 1,
    "kernel/keys/root_maxkeys": 1000000,
    "kernel/keys/root_maxbytes": 25000000,
}
"""Settings of the machine's kernel that kubelet changes where they differ. It is shown what it wants, and the kernel keeps its own."""
_RESTART_SECONDS = 1.0
_STOP_SECONDS = 10.0
_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_NAME = 15
_MS_BIND, _MS_REC, _MS_SHARED = 1 << 12, 1 << 14, 1 << 20


# --- outside: starting and removing -------------------------------------------------------------------------------


def start(run_dir: Path, *, owned: bool) -> subprocess.Popen[bytes]:
    """Start the node's init process.

    Returns: the process that waits for it; with ``owned`` its standard input must be kept open.
    """
    for name in ("wanted", "pids", "log", "tmp"):
        (run_dir / name).mkdir(parents=True, exist_ok=True)
    cgroups = _make_cgroups(cgroup_name(run_dir))
    (run_dir / "cgroups").write_text("\n".join(map(str, cgroups)))
    namespaces = ["--mount", "--net", "--pid", "--ipc", "--uts", "--cgroup", "--fork", "--kill-child", "--propagation", "private"]
    init = [sys.executable, "-m", __name__, str(run_dir), *(["--owned"] if owned else [])]
    enter_cgroups = 'for c in $CGROUPS; do echo $$ > $c/cgroup.procs; done; exec "$@"'
    return subprocess.Popen(
        ["sh", "-c", enter_cgroups, "sh", "unshare", *namespaces, *init],
        stdin=subprocess.PIPE if owned else subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=(run_dir / "log/init.log").open("ab"),
        env={**os.environ, "CGROUPS": " ".join(map(str, cgroups)), "TMPDIR": str(run_dir / "tmp")},
        start_new_session=True,
    )


def init_pid(run_dir: Path) -> int | None:
    """The init process as this machine sees it, while it lives."""
    try:
        pid = int((run_dir / "pids/init").read_text())
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (OSError, ValueError):
        return None
    return pid if os.fsencode(run_dir) in arguments else None


def host_pid(run_dir: Path, name: str) -> int:
    """The PID, as this machine sees it, of a process of the node."""
    inner = (run_dir / "pids" / name).read_text().strip()
    namespace = Path(f"/proc/{init_pid(run_dir)}/ns/pid").readlink()
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):  # processes end while we look
            if f"\t{inner}\n" in _line(status, "NSpid:") and (status.with_name("ns") / "pid").readlink() == namespace:
                return int(status.parent.name)
    raise ProcessLookupError(f"{name}: no process {inner} in the node's PID namespace")


def remove(run_dir: Path) -> None:
    """End the node and remove its cgroups. Files are the caller's."""
    pid = init_pid(run_dir)
    if pid is not None:
        os.kill(pid, signal.SIGKILL)
        _wait_until(lambda: not Path(f"/proc/{pid}").exists(), 30, f"init process {pid} to end")
    recorded = run_dir / "cgroups"
    for top in recorded.read_text().split() if recorded.exists() else []:
        _wait_until(partial(_remove_cgroup, Path(top)), 30, f"cgroup {top} to be empty")


def cgroup_name(run_dir: Path) -> str:
    """The cgroup of the cluster of this run directory; two clusters on one machine have one each."""
    return f"aliquot-e2e-{run_dir.name}"


def _make_cgroups(name: str) -> list[Path]:
    """One cgroup per hierarchy: below the caller's own; for version 2 below the root, which alone may hold processes and hand down."""
    hierarchies = _cgroup_hierarchies()
    made = []
    for mount, controllers, cgroup in hierarchies:
        above = mount if len(hierarchies) == 1 and not controllers else mount / cgroup.lstrip("/")
        if above == mount and len(hierarchies) == 1:
            _hand_down_controllers(above)
        top = above / name
        top.mkdir(exist_ok=True)
        for setting in ("cpuset.cpus", "cpuset.mems"):  # a version 1 cpuset starts without CPUs and takes no process
            if (top / setting).exists():
                (top / setting).write_text((top.parent / setting).read_text())
        made.append(top)
    return made


def _cgroup_hierarchies() -> list[tuple[Path, str, str]]:
    """(mount point, controllers or '' for version 2, path of this process) of each mounted hierarchy."""
    mounts: dict[str, Path] = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, after = line.split(" - ")
        kind, _, options = after.split(" ", 2)
        if kind == "cgroup2":
            mounts[""] = Path(before.split()[4])
        elif kind == "cgroup":
            for option in options.split(","):
                mounts[option] = Path(before.split()[4])
    hierarchies = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, cgroup = line.split(":", 2)
        mount = mounts.get(controllers.split(",")[0])
        if mount is not None:
            hierarchies.append((mount, controllers, cgroup))
    return hierarchies


def _hand_down_controllers(cgroup: Path) -> None:
    for controller in (cgroup / "cgroup.controllers").read_text().split():
        (cgroup / "cgroup.subtree_control").write_text(f"+{controller}")


def _remove_cgroup(top: Path) -> bool:
    for folder, _, _ in os.walk(top, topdown=False):
        with contextlib.suppress(OSError):  # busy until the last process is reaped
            Path(folder).rmdir()
    return not top.exists()


def _wait_until(done: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds:.0f} s for {what}")
        time.sleep(0.05)


def _line(file: Path, key: str) -> str:
    return next((line + "\n" for line in file.read_text().splitlines() if line.startswith(key)), "")


# --- inside: the init process -------------------------------------------------------------------------------------


def _prepare(run_dir: Path) -> None:
    """Make the namespaces look like a node."""
    _mount("none", "/", flags=_MS_SHARED | _MS_REC)  # containers may ask for mounts to be propagated to them
    for path in OVERLAID:
        upper, work = run_dir / "node" / path.lstrip("/"), run_dir / "node/.work" / path.lstrip("/")
        upper.mkdir(parents=True)
        work.mkdir(parents=True)
        _mount("overlay", path, "overlay", f"lowerdir={path},upperdir={upper},workdir={work}")
    for path in _BOUND:
        own = run_dir / "data" / Path(path).name
        own.mkdir(parents=True)
        Path(path).mkdir(parents=True, exist_ok=True)
        _mount(str(own), path, flags=_MS_BIND)
    _mount("proc", "/proc", "proc")
    _mount("sysfs", "/sys", "sysfs")
    _mount_cgroups(Path("/sys/fs/cgroup"))
    for setting, value in _KUBELET_SYSCTLS.items():
        shown = run_dir / "data/sysctl" / setting.replace("/", ".")
        shown.parent.mkdir(exist_ok=True)
        shown.write_text(f"{value}\n")
        _mount(str(shown), f"/proc/sys/{setting}", flags=_MS_BIND)
    socket.sethostname(NODE_NAME)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    for address in (NODE_ADDRESS, SERVICE_ADDRESS):
        subprocess.run(["ip", "address", "add", f"{address}/32", "dev", "lo"], check=True)


def _mount_cgroups(top: Path) -> None:
    """Mount the hierarchies again: seen from this cgroup namespace, the node's cgroup is the root of each."""
    hierarchies = [line.split(":")[1] for line in Path("/proc/self/cgroup").read_text().splitlines()]
    if hierarchies == [""]:
        _mount("cgroup2", str(top), "cgroup2")
        leaf = top / "init"  # version 2 lets a cgroup hold processes or hand controllers down, not both
        leaf.mkdir()
        (leaf / "cgroup.procs").write_text(str(os.getpid()))
        _hand_down_controllers(top)
        return
    _mount("tmpfs", str(top), "tmpfs", "mode=755")
    for controllers in hierarchies:
        folder = top / (controllers.removeprefix("name=") or "unified")
        folder.mkdir()
        if controllers:
            _mount("cgroup", str(folder), "cgroup", f"none,{controllers}" if controllers.startswith("name=") else controllers)
        else:
            _mount("cgroup2", str(folder), "cgroup2")


def _mount(source: str, target: str, kind: str = "", options: str = "", *, flags: int = 0) -> None:
    """mount(2) itself: the command would note each mount below /run of the machine."""
    arguments = (os.fsencode(text) or None for text in (source, target, kind))
    if _LIBC.mount(*arguments, ctypes.c_ulong(flags), os.fsencode(options) or None) != 0:
        raise OSError(ctypes.get_errno(), f"mount {source} ({kind or 'bind'}): {os.strerror(ctypes.get_errno())}", target)


@dataclass(slots=True)
class _Service:
    """One wanted process."""

    name: str
    process: subprocess.Popen[bytes] | None = None
    start_after: float = 0.0
    kill_after: float | None = field(default=None)


def _supervise(run_dir: Path, *, owned: bool) -> None:
    """Keep the wanted processes running until the owner is gone."""
    services: dict[str, _Service] = {}
    while not (owned and _closed(sys.stdin.fileno())):
        wanted = {file.stem for file in (run_dir / "wanted").glob("*.json")}
        for name in wanted:
            services.setdefault(name, _Service(name))
        for service in list(services.values()):
            _tend(run_dir, service, wanted=service.name in wanted)
            if service.process is None and service.name not in wanted:
                del services[service.name]
        _reap_orphans({service.process.pid for service in services.values() if service.process})
        time.sleep(0.05)


def _tend(run_dir: Path, service: _Service, *, wanted: bool) -> None:
    """One step towards what is wanted."""
    now = time.monotonic()
    if service.process is not None and service.process.poll() is not None:
        _log(f"{service.name} ended with {service.process.returncode}")
        (run_dir / "pids" / service.name).unlink(missing_ok=True)
        service.process, service.kill_after, service.start_after = None, None, now + _RESTART_SECONDS
    if wanted and service.process is None and now >= service.start_after:
        _start_service(run_dir, service)
    elif not wanted and service.process is not None and service.kill_after is None:
        service.process.terminate()
        service.kill_after = now + _STOP_SECONDS
    elif service.process is not None and service.kill_after is not None and now >= service.kill_after:
        service.process.kill()


def _start_service(run_dir: Path, service: _Service) -> None:
    described = json.loads((run_dir / "wanted" / f"{service.name}.json").read_text())
    with (run_dir / "log" / f"{service.name}.log").open("ab") as log:
        service.process = subprocess.Popen(
            described["command"],
            env={**os.environ, **described["environment"]},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    (run_dir / "pids" / service.name).write_text(str(service.process.pid))
    _log(f"{service.name} started as {service.process.pid}")


def _reap_orphans(own: set[int]) -> None:
    """An init process inherits whatever loses its parent; our own children are left to Popen."""
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None or ended.si_pid in own:
            return
        os.waitpid(ended.si_pid, 0)


def _closed(descriptor: int) -> bool:
    readable, _, _ = select.select([descriptor], [], [], 0)
    return bool(readable) and os.read(descriptor, 1) == b""


def _log(message: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {message}\n")
    sys.stderr.flush()


def _main() -> None:
    run_dir = Path(sys.argv[1])
    host_view = Path("/proc/self").readlink().name  # /proc is still the machine's: this is the PID it knows us by
    (run_dir / "pids/init").write_text(host_view)
    _LIBC.prctl(_PR_SET_NAME, b"e2e-node", 0, 0, 0)
    _prepare(run_dir)
    (run_dir / "pids/ready").touch()
    _supervise(run_dir, owned="--owned" in sys.argv[2:])


if __name__ == "__main__":
    _main()
