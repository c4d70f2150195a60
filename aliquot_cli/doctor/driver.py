# SPDX-License-Identifier: Apache-2.0
"""The NVIDIA driver: kernel module, device nodes and NVML. NVML runs in a child process, because a faulty driver can block its caller."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from agent.core.backends import cgroup_limits_trouble
from aliquot_cli.doctor.findings import Finding, error, info, ok, warning
from aliquot_cli.doctor.host import Host
from aliquot_cli.doctor.options import DoctorOptions

MODULE_FILE = "/proc/driver/nvidia/version"
NVML_SECONDS = 20
_NODES = "/dev"
_HOOKS = ("/usr/bin/nvidia-cdi-hook", "/usr/local/nvidia/toolkit/nvidia-cdi-hook")
"""Installed by the toolkit's packages, and by the GPU Operator."""
_DRIVER_CONTAINER = "/run/nvidia/driver"
"""Root of the GPU Operator's driver container. Device nodes and libraries can be there and not on the node."""
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
    "error": f"{_LOADER_NAME} is not in any of the usual directories",
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
    """Check the driver."""
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
            "the nouveau driver uses the GPUs, and the NVIDIA kernel module is not loaded",
            "blacklist nouveau (modprobe.d), rebuild the initramfs, reboot, and install the NVIDIA driver",
        )
    return error(
        "driver.module",
        f"the NVIDIA kernel module is not loaded: {MODULE_FILE} does not exist",
        "install the NVIDIA driver on the node, or let the GPU Operator do it; if it is installed, run `modprobe nvidia`",
    )


def _node_directory(host: Host) -> str:
    """Return the directory with the device nodes: /dev, or /dev of the driver's container."""
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
            f"{', '.join(missing)} missing: containers cannot open the GPUs",
            "run `nvidia-modprobe -u -c0` on the node at boot, or start nvidia-persistenced"
            if own
            else "check the log of the GPU Operator's driver pod on this node, which creates them",
        )
    else:
        where = directory if own else f"{directory} of the driver's container"
        yield ok("driver.device-nodes", f"device nodes of {len(_gpu_nodes(host.names(directory)))} GPUs are in {where}")


def _nvml(host: Host, options: DoctorOptions, module: str | None) -> Iterator[Finding]:
    libraries = [options.nvml_library] if options.nvml_library else _find_libraries(host)
    answer = probe(*libraries) if libraries else _NO_LIBRARY
    failure = _nvml_failure(host, answer)
    if failure is not None:
        yield failure
        return
    models = ", ".join(f"{number} x {model}" for model, number in sorted(_count(answer["gpus"]).items()))
    yield ok("driver.nvml", f"NVML of driver {answer['driver']} lists {models}")
    if module is not None and module != answer["driver"]:
        yield error(
            "driver.versions",
            f"the loaded kernel module is {module}, the libraries are {answer['driver']}",
            "reload the module or reboot; containers that start before that fail",
        )
    yield _limits(host, answer)
    for gpu in answer["gpus"]:
        yield from _gpu(gpu)


def _nvml_failure(host: Host, answer: dict[str, Any]) -> Finding | None:
    """Return why NVML lists no GPU; None where it lists some."""
    unseen = not answer.get("reached", True) or answer.get("gpus") == []
    if unseen and _node_directory(host) != _NODES:
        return info(
            "driver.nvml",
            f"NVML cannot use the GPU Operator's driver container from here: {answer.get('error', 'it lists no GPU')}",
            "to check NVML, run `nvidia-smi` in the GPU Operator's driver pod of this node",
        )
    if "error" in answer:
        return error("driver.nvml", f"NVML does not work: {answer['error']}", answer["fix"])
    if not answer["gpus"]:
        return error("driver.nvml", f"NVML of driver {answer['driver']} lists no GPU", "check `lspci -d 10de:` and the kernel log for XIDs")
    return None


def _limits(host: Host, answer: dict[str, Any]) -> Finding:
    """Check whether ``isolation: driver`` is possible on this node."""
    hook = next((name for name in _HOOKS if host.exists(name)), "")
    lacking = [
        cgroup_limits_trouble(answer["driver"], has_calls=answer.get("cgroup_limits", False)),
        "" if hook else f"there is no {' and no '.join(_HOOKS)}",
        "" if host.exists("/sys/fs/cgroup/cgroup.controllers") else "control groups v2 are not mounted",
    ]
    if any(lacking):
        return info(
            "driver.limits",
            f"isolation: driver is not possible here: {'; '.join(filter(None, lacking))}",
            "needed only for pods that request it: driver 615, nvidia-container-toolkit 1.20.1 (or later) and control groups v2",
        )
    return ok("driver.limits", f"isolation: driver is possible with driverLimitsHook: {hook}, if it is from toolkit 1.20.1 or later")


def _gpu(gpu: dict[str, Any]) -> Iterator[Finding]:
    if "error" in gpu:
        yield error(
            "driver.gpu",
            f"GPU {gpu['index']} does not answer: {gpu['error']}",
            "check the kernel log for XIDs; drain the node and reset the GPU",
        )
        return
    mode = gpu.get("compute_mode")
    if mode not in (None, _DEFAULT_COMPUTE_MODE):
        yield error(
            "driver.compute-mode",
            f"{gpu['uuid']} is in compute mode {_COMPUTE_MODES.get(mode, mode)}: at most one process can use it",
            f"nvidia-smi -i {gpu['uuid']} -c DEFAULT",
        )
    if gpu.get("persistence") is False:
        yield info(
            "driver.persistence",
            f"{gpu['uuid']} is not in persistence mode: the first process on an idle GPU waits several seconds",
            "run nvidia-persistenced, or nvidia-smi -pm 1",
        )
    if gpu.get("remap_pending"):
        yield warning(
            "driver.memory", f"{gpu['uuid']} has memory rows that wait for a remap after errors", "drain the node and reset the GPU"
        )
    if gpu.get("remap_failed"):
        yield error("driver.memory", f"{gpu['uuid']} could not remap memory rows after errors", "replace the GPU")


def probe(*libraries: str) -> dict[str, Any]:
    """Run ``nvml_probe`` in a child process, with the first of these libraries that can be opened.

    Returns: its document; on failure ``error`` and ``fix``, with ``reached`` false where library or driver cannot be opened.
    """
    command = [sys.executable, "-m", "aliquot_cli.doctor.nvml_probe", *libraries]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=NVML_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return {
            "error": f"NVML has not answered within {NVML_SECONDS} s",
            "fix": "a GPU hangs: check the kernel log for XIDs, drain the node and reboot it",
        }
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        last = done.stderr.strip().rpartition("\n")[2]
        return {"error": f"the process that called NVML ended with {done.returncode}: {last}", "fix": "reinstall the driver's libraries"}
    return answer


def _find_libraries(host: Host) -> list[str]:
    """Return the library names to try: on the node itself first the name that the loader resolves, then files in the usual directories."""
    found = [str(host.path(name)) for name in _LIBRARIES if host.exists(name)]
    return [_LOADER_NAME, *found] if host.is_own else found


def _count(gpus: list[dict[str, Any]]) -> dict[str, int]:
    models = [gpu.get("model", "a GPU that does not answer") for gpu in gpus]
    return {model: models.count(model) for model in models}
