# SPDX-License-Identifier: Apache-2.0
"""The kubelet's sockets, and other device plugins on the same GPUs."""

import json
from collections.abc import Iterator, Mapping, Sequence

from agent.core.conflict import SOCKET_PREFIX, Evidence, find_conflict, is_our_socket
from aliquot import contract
from aliquot_cli.doctor.findings import Finding, error, info, ok, warning
from aliquot_cli.doctor.host import Host
from aliquot_cli.doctor.options import DoctorOptions

_OTHER_ROOTS = (
    "/var/lib/k0s/kubelet",
    "/var/snap/microk8s/common/var/lib/kubelet",
    "/var/lib/rancher/k3s/agent/kubelet",
)
_KUBELET_SOCKET = contract.KUBELET_SOCKET_NAME
CHECKPOINT = "kubelet_internal_checkpoint"
_HAMI_LIBRARY = "/usr/local/vgpu/libvgpu.so"
_WHOLE_RESOURCES = ("nvidia.com/gpu", "nvidia.com/gpu.shared")
"""Resources of other plugins. The second is that of NVIDIA's plugin with time-slicing and renameByDefault."""


def check(host: Host, options: DoctorOptions) -> Iterator[Finding]:
    """Check kubelet and plugins."""
    plugins = contract.KUBELET_DEVICE_PLUGIN_DIR
    if not host.exists(plugins):
        yield error("kubelet.device-plugins", f"{plugins} does not exist", "run doctor on a node, or name its root with --root")
        return
    yield _socket(host, "kubelet.device-plugins", f"{plugins}/{_KUBELET_SOCKET}", "start the kubelet")
    yield _pod_resources(host, options)
    yield from _plugins(host, plugins)
    yield from _leftovers(host)


def _pod_resources(host: Host, options: DoctorOptions) -> Finding:
    directory = f"{options.kubelet_dir}/{contract.POD_RESOURCES}"
    other = next((root for root in _OTHER_ROOTS if host.exists(f"{root}/{contract.POD_RESOURCES}")), None)
    if other is not None and not host.exists(directory):
        return error(
            "kubelet.pod-resources",
            f"the kubelet's directory on this node is {other}",
            f"set the agent's kubeletDir to {other}, with its mounts, and run doctor with --kubelet-dir {other}",
        )
    return _socket(
        host,
        "kubelet.pod-resources",
        f"{directory}/{_KUBELET_SOCKET}",
        "the kubelet serves it since 1.15 unless the feature gate KubeletPodResources is off: turn it on",
    )


def _socket(host: Host, check_name: str, path: str, fix: str) -> Finding:
    if not host.is_socket(path):
        return error(check_name, f"there is no socket {path}", fix)
    if not host.answers(path):
        return error(check_name, f"no process listens on {path}", "start the kubelet; the socket is left from an earlier run")
    return ok(check_name, f"the kubelet answers on {path}")


def _plugins(host: Host, directory: str) -> Iterator[Finding]:
    sockets = [name for name in host.names(directory) if name != _KUBELET_SOCKET and host.is_socket(f"{directory}/{name}")]
    answering = [name for name in sockets if host.answers(f"{directory}/{name}")]
    registered = _registered(host, directory)
    yield _conflict(answering, registered)
    ours = [name for name in answering if is_our_socket(contract.RESOURCE_VGPU, name)]
    if len(ours) > 1:
        yield error("plugins.twice", f"several Aliquot agents answer: {', '.join(ours)}", "keep one aliquot-agent DaemonSet on the node")
    yield from _whole_gpus(answering, registered)


def _conflict(answering: Sequence[str], registered: Mapping[str, list[str]]) -> Finding:
    """Check that no other plugin serves our resource."""
    evidence = Evidence([name for name in answering if not name.startswith(SOCKET_PREFIX)], registered.get(contract.RESOURCE_VGPU, []))
    conflict = find_conflict(contract.RESOURCE_VGPU, evidence)
    if conflict is not None:
        return error("plugins.conflict", conflict, f"only one plugin can serve {contract.RESOURCE_VGPU}: remove the other DaemonSet")
    return ok("plugins.conflict", f"no other plugin serves {contract.RESOURCE_VGPU}")


def _whole_gpus(answering: Sequence[str], registered: Mapping[str, list[str]]) -> Iterator[Finding]:
    """Check that no other plugin gives the same GPUs to pods as a whole."""
    plugins = [name for name in answering if _gives_gpus(name)]
    resources = [resource for resource in _WHOLE_RESOURCES if registered.get(resource)]
    if plugins and resources:
        yield error(
            "plugins.whole-gpus",
            f"{', '.join(plugins)} gives the same GPUs to pods as {', '.join(resources)}: a pod can get a GPU that other pods share",
            "keep NVIDIA's, GKE's or HAMi's plugin off this node. With the GPU Operator, label the node "
            "nvidia.com/gpu.deploy.device-plugin=false. On GKE, create its node pool with the label "
            "gke-no-default-nvidia-gpu-device-plugin=true. Otherwise exclude the node from the plugin's DaemonSet",
        )


def _gives_gpus(socket: str) -> bool:
    """Whether the socket is named like those of NVIDIA's plugin (nvidia-gpu.sock), HAMi's or GKE's (nvidiaGPU-<time>.sock)."""
    name = socket.lower()
    return name.startswith("nvidia.sock") or (name.startswith("nvidia") and "gpu" in name)


def _registered(host: Host, directory: str) -> dict[str, list[str]]:
    """Return the device IDs by resource in kubelet's checkpoint; empty where its format is unknown."""
    text = host.text(f"{directory}/{CHECKPOINT}")
    try:
        devices = json.loads(text)["Data"]["RegisteredDevices"] if text else {}
        return {str(resource): [str(one) for one in ids or []] for resource, ids in (devices or {}).items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}


def _leftovers(host: Host) -> Iterator[Finding]:
    preload = (host.text("/etc/ld.so.preload") or "").split()
    if preload:
        yield warning(
            "plugins.preload",
            f"the node's /etc/ld.so.preload names {', '.join(preload)}: every program of the node loads it",
            "remove it unless something else needs it; Aliquot does not use the node's /etc/ld.so.preload",
        )
    if host.exists(_HAMI_LIBRARY):
        yield info(
            "plugins.hami",
            f"{_HAMI_LIBRARY} of HAMi is still on the node",
            "remove /usr/local/vgpu after the last container of HAMi has ended",
        )
