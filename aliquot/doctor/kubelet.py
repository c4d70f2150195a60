"""The kubelet's sockets, and the device plugins that share the GPUs with us or want to."""

import json
from collections.abc import Iterator

from agent.core.conflict import SOCKET_PREFIX, Evidence, find_conflict, is_our_socket
from aliquot.doctor.findings import Finding, error, info, ok, warning
from aliquot.doctor.host import Host
from aliquot.doctor.options import DoctorOptions
from proto import contract

_OTHER_ROOTS = (
    "/var/lib/k0s/kubelet",
    "/var/snap/microk8s/common/var/lib/kubelet",
    "/var/lib/rancher/k3s/agent/kubelet",
)
_KUBELET_SOCKET = contract.KUBELET_SOCKET_NAME
CHECKPOINT = "kubelet_internal_checkpoint"
_HAMI_LIBRARY = "/usr/local/vgpu/libvgpu.so"
_WHOLE_RESOURCES = ("nvidia.com/gpu", "nvidia.com/gpu.shared")
"""What other plugins give GPUs out as; the second is NVIDIA's, of a plugin that slices time and was told to rename."""


def check(host: Host, options: DoctorOptions) -> Iterator[Finding]:
    """Examine kubelet and plugins."""
    plugins = f"{options.kubelet_dir}/device-plugins"
    if not host.exists(plugins):
        yield _no_directory(host, options)
        return
    yield _socket(host, "kubelet.device-plugins", f"{plugins}/{_KUBELET_SOCKET}", "start the kubelet")
    yield _socket(
        host,
        "kubelet.pod-resources",
        f"{options.kubelet_dir}/pod-resources/{_KUBELET_SOCKET}",
        "the kubelet serves it since 1.15 unless the feature gate KubeletPodResources is off: turn it on",
    )
    yield from _plugins(host, plugins)
    yield from _leftovers(host)


def _no_directory(host: Host, options: DoctorOptions) -> Finding:
    other = next((root for root in _OTHER_ROOTS if host.exists(f"{root}/device-plugins")), None)
    if other is None:
        return error(
            "kubelet.device-plugins", f"there is no {options.kubelet_dir}/device-plugins", "run this on a node, with its root at --root"
        )
    return error(
        "kubelet.device-plugins",
        f"the kubelet of this node lives in {other}",
        f"set kubeletDevicePluginDir to {other}/device-plugins and podResourcesSocket to {other}/pod-resources/{_KUBELET_SOCKET}, "
        f"and give doctor --kubelet-dir {other}",
    )


def _socket(host: Host, check_name: str, path: str, fix: str) -> Finding:
    if not host.is_socket(path):
        return error(check_name, f"there is no socket {path}", fix)
    if not host.answers(path):
        return error(check_name, f"nobody answers on {path}", "the kubelet left it behind: start the kubelet")
    return ok(check_name, f"the kubelet answers on {path}")


def _plugins(host: Host, directory: str) -> Iterator[Finding]:
    sockets = [name for name in host.names(directory) if name != _KUBELET_SOCKET and host.is_socket(f"{directory}/{name}")]
    answering = [name for name in sockets if host.answers(f"{directory}/{name}")]
    registered = _registered(host, directory)
    ours = [name for name in answering if is_our_socket(contract.RESOURCE_VGPU, name)]
    evidence = Evidence([name for name in answering if not name.startswith(SOCKET_PREFIX)], registered.get(contract.RESOURCE_VGPU, []))
    if (conflict := find_conflict(contract.RESOURCE_VGPU, evidence)) is not None:
        yield error("plugins.conflict", conflict, f"only one plugin may serve {contract.RESOURCE_VGPU}: remove the other DaemonSet")
    else:
        yield ok("plugins.conflict", f"no other plugin serves {contract.RESOURCE_VGPU}")
    if len(ours) > 1:
        yield error("plugins.twice", f"several agents of ours answer: {', '.join(ours)}", "keep one aliquot-agent DaemonSet on the node")
    whole = [name for name in answering if _gives_gpus(name)]
    given = [resource for resource in _WHOLE_RESOURCES if registered.get(resource)]
    if whole and given:
        yield error(
            "plugins.whole-gpus",
            f"{', '.join(whole)} gives out the same GPUs, as {', '.join(given)}: a pod could get a GPU that others share",
            "keep NVIDIA's, GKE's or HAMi's plugin off this node. With the GPU Operator label the node "
            "nvidia.com/gpu.deploy.device-plugin=false; on GKE make its node pool with the label "
            "gke-no-default-nvidia-gpu-device-plugin=true; else keep the plugin's DaemonSet from the node",
        )


def _gives_gpus(socket: str) -> bool:
    """Whether a socket is named as NVIDIA's plugin (nvidia-gpu.sock), HAMi's, or GKE's (nvidiaGPU-<time>.sock) name theirs."""
    name = socket.lower()
    return name.startswith("nvidia.sock") or (name.startswith("nvidia") and "gpu" in name)


def _registered(host: Host, directory: str) -> dict[str, list[str]]:
    """Return the resources and IDs that kubelet's checkpoint knows; a checkpoint of a form we do not know counts as none."""
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
            f"the node's own /etc/ld.so.preload names {', '.join(preload)}: it enters every program of the node",
            "remove it unless you know why it is there; sharing GPUs needs nothing in the node's own",
        )
    if host.exists(_HAMI_LIBRARY):
        yield info("plugins.hami", f"HAMi left {_HAMI_LIBRARY} behind", "remove /usr/local/vgpu when no container of HAMi runs any more")
