"""The NVIDIA driver: kernel module, device nodes, and NVML, asked in a process of its own because a sick driver hangs its caller."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from agent.core.backends import cgroup_limits_trouble
from aliquot.doctor.findings import Finding, error, info, ok, warning
from aliquot.doctor.host import Host
from aliquot.doctor.options import DoctorOptions

MODULE_FILE = "/proc/driver/nvidia/version"
NVML_SECONDS = 20
_NODES = "/dev"
_HOOKS = ("/usr/bin/nvidia-cdi-hook", "/usr/local/nvidia/toolkit/nvidia-cdi-hook")
"""Of the toolkit's packages, and of the GPU Operator."""
_DRIVER_CONTAINER = "/run/nvidia/driver"
"""The root of the GPU Operator's driver container, which may have the device nodes and libraries that the node has not."""
_LOADER_NAME = "libnvidia-ml.so.1"
_LIBRARIES = (
    "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1",
    "/usr/lib/aarch64-linux-gnu/libnvidia-ml.so.1",
    "/usr/lib64/libnvidia-ml.so.1",
    "/usr/lib/libnvidia-ml.so.1",
    f"{_DRIVER_CONTAINER}/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1",
    f"{_DRIVER_CONTAINER}/usr/lib/aarch64-linux-gnu/libnvidia-ml.so.1",
    f"{_DRIVER_CONTAINER}/usr/lib64/libnvidia-ml.so.1",
    "/home/kubernetes/bin/nvidia/lib64/libnvidia-ml.so.1",
)
_NO_LIBRARY: dict[str, Any] = {
    "error": f"{_LOADER_NAME} is in none of the usual places",
    "fix": "install the driver's user-space libraries",
    "reached": False,
}
_DEFAULT_COMPUTE_MODE = 0
_COMPUTE_MODES = {1: "exclusive thread", 2: "prohibited", 3: "exclusive process"}


def module_version(host: Host) -> str | None:
    """Return the version of the loaded kernel module, or None."""
    text = host.text(MODULE_FILE)
    match = re.search(r"Kernel Module[^0-9]*([0-9]+(?:\.[0-9]+)+)", text or "")
    return match[1] if match else None


def check(host: Host, options: DoctorOptions) -> Iterator[Finding]:
    """Examine the driver."""
    version = module_version(host)
    if version is None:
        yield _no_module(host)
    else:
        yield ok("driver.module", f"the NVIDIA kernel module {version} is loaded")
        yield from _device_nodes(host)
    yield from _nvml(host, options, version)


def _no_module(host: Host) -> Finding:
    modules = {line.split()[0] for line in (host.text("/proc/modules") or "").splitlines() if line.strip()}
    if "nouveau" in modules:
        return error(
            "driver.module",
            "the nouveau driver holds the GPUs, and the NVIDIA kernel module is not loaded",
            "blacklist nouveau (modprobe.d), rebuild the initramfs, reboot, and install the NVIDIA driver",
        )
    return error(
        "driver.module",
        f"the NVIDIA kernel module is not loaded: there is no {MODULE_FILE}",
        "install the NVIDIA driver on the node, or let the GPU Operator do it; `modprobe nvidia` if it is installed",
    )


def _node_directory(host: Host) -> str:
    """Return where the device nodes are: in /dev, or only in the driver's container."""
    return min((_NODES, f"{_DRIVER_CONTAINER}{_NODES}"), key=lambda directory: len(_missing_nodes(host, directory)))


def _missing_nodes(host: Host, directory: str) -> list[str]:
    names = host.names(directory)
    missing = [name for name in ("nvidiactl", "nvidia-uvm") if name not in names]
    return [f"{directory}/{name}" for name in (missing if _gpu_nodes(names) else [*missing, "nvidia0"])]


def _gpu_nodes(names: Sequence[str]) -> list[str]:
    return [name for name in names if re.fullmatch(r"nvidia[0-9]+", name)]


def _device_nodes(host: Host) -> Iterator[Finding]:
    directory = _node_directory(host)
    own = directory == _NODES
    if missing := _missing_nodes(host, directory):
        yield error(
            "driver.device-nodes",
            f"{', '.join(missing)} missing: containers could not open the GPUs",
            "run `nvidia-modprobe -u -c0` on the node at boot, or start nvidia-persistenced"
            if own
            else "look at the log of the GPU Operator's driver pod on this node, which makes them",
        )
    else:
        where = "there" if own else f"in {directory}, where the driver's container has them"
        yield ok("driver.device-nodes", f"device nodes of {len(_gpu_nodes(host.names(directory)))} GPUs are {where}")


def _nvml(host: Host, options: DoctorOptions, module: str | None) -> Iterator[Finding]:
    libraries = [options.nvml_library] if options.nvml_library else _find_libraries(host)
    answer = probe(*libraries) if libraries else _NO_LIBRARY
    unseen = not answer.get("reached", True) or answer.get("gpus") == []
    if unseen and _node_directory(host) != _NODES:
        yield info(
            "driver.nvml",
            f"NVML cannot open from here what only the driver's container has: {answer.get('error', 'it lists no GPU')}",
            "to ask it, run `nvidia-smi` in the GPU Operator's driver pod of this node",
        )
        return
    if "error" in answer:
        yield error("driver.nvml", f"NVML does not work: {answer['error']}", answer["fix"])
        return
    gpus = answer["gpus"]
    if not gpus:
        yield error("driver.nvml", f"NVML of driver {answer['driver']} lists no GPU", "check `lspci -d 10de:` and the kernel log for XIDs")
        return
    models = ", ".join(f"{number} x {model}" for model, number in sorted(_count(gpus).items()))
    yield ok("driver.nvml", f"NVML of driver {answer['driver']} lists {models}")
    if module is not None and module != answer["driver"]:
        yield error(
            "driver.versions",
            f"the loaded module is {module}, the libraries are {answer['driver']}",
            "reload the module or reboot; containers that start meanwhile fail",
        )
    yield _limits(host, answer)
    for gpu in gpus:
        yield from _gpu(gpu)


def _limits(host: Host, answer: dict[str, Any]) -> Finding:
    """Say whether pods with ``isolation: driver`` are possible here."""
    hook = next((name for name in _HOOKS if host.exists(name)), "")
    lacking = [
        cgroup_limits_trouble(answer["driver"], has_calls=answer.get("cgroup_limits", False)),
        "" if hook else f"there is no {' and no '.join(_HOOKS)}",
        "" if host.exists("/sys/fs/cgroup/cgroup.controllers") else "the control groups are not of version 2",
    ]
    if any(lacking):
        return info(
            "driver.limits",
            f"isolation: driver is not possible here: {'; '.join(filter(None, lacking))}",
            "nothing, unless pods are to ask for it: then driver 615, nvidia-container-toolkit 1.20.1 (or later) and control groups v2",
        )
    return ok("driver.limits", f"isolation: driver is possible where driverLimitsHook is {hook}, if that is of toolkit 1.20.1 or later")


def _gpu(gpu: dict[str, Any]) -> Iterator[Finding]:
    if "error" in gpu:
        yield error(
            "driver.gpu", f"GPU {gpu['index']} does not answer: {gpu['error']}", "look for XIDs in the kernel log; drain the node and reset"
        )
        return
    mode = gpu.get("compute_mode")
    if mode not in (None, _DEFAULT_COMPUTE_MODE):
        yield error(
            "driver.compute-mode",
            f"{gpu['uuid']} is in compute mode {_COMPUTE_MODES.get(mode, mode)}: only one process could use it",
            f"nvidia-smi -i {gpu['uuid']} -c DEFAULT",
        )
    if gpu.get("persistence") is False:
        yield info(
            "driver.persistence",
            f"{gpu['uuid']} is not in persistence mode: the first process on an idle GPU waits for seconds",
            "run nvidia-persistenced, or nvidia-smi -pm 1",
        )
    if gpu.get("remap_pending"):
        yield warning(
            "driver.memory", f"{gpu['uuid']} has memory rows waiting to be remapped after errors", "drain the node and reset the GPU"
        )
    if gpu.get("remap_failed"):
        yield error("driver.memory", f"{gpu['uuid']} could not remap memory rows after errors", "have the board replaced")


def probe(*libraries: str) -> dict[str, Any]:
    """Ask NVML, by the first library that can be opened, in a process of its own.

    Returns: an answer with ``error`` and ``fix`` when that fails; ``reached`` is false there when library or driver could not be opened.
    """
    command = [sys.executable, "-m", "aliquot.doctor.nvml_probe", *libraries]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=NVML_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return {
            "error": f"it has not answered for {NVML_SECONDS} s",
            "fix": "a GPU hangs: look for XIDs in the kernel log, drain the node and reboot it",
        }
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        last = done.stderr.strip().rpartition("\n")[2]
        return {"error": f"the process that asked ended with {done.returncode}: {last}", "fix": "reinstall the driver's libraries"}
    return answer


def _find_libraries(host: Host) -> list[str]:
    """Return what may be the library, the best first: the loader's on the node itself, then those in the usual places."""
    found = [str(host.path(name)) for name in _LIBRARIES if host.exists(name)]
    return [_LOADER_NAME, *found] if host.is_own else found


def _count(gpus: list[dict[str, Any]]) -> dict[str, int]:
    models = [gpu.get("model", "a GPU that does not answer") for gpu in gpus]
    return {model: models.count(model) for model in models}
