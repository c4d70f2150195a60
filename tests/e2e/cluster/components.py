# SPDX-License-Identifier: Apache-2.0
"""The components: their configuration files and command lines, as an operator of a small cluster would write them.

RBAC and Node authorisation are on; every component has its own user. What differs from a machine of its own is named
where it differs.
"""

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from tests.e2e.cluster.namespaces import NODE_ADDRESS, NODE_NAME

API_PORT = 443
"""The port of the service ``kubernetes`` itself: its address is the node's, so pods reach the server without a kube-proxy."""
POD_NETWORK = "10.88.0.0/16"
SERVICE_NETWORK = "10.96.0.0/16"
PAUSE_IMAGE = "aliquot.test/pause:e2e"
CONTAINERD_SOCKET = "/run/containerd/containerd.sock"

_CAP_SYS_RESOURCE = 24

USERS = {
    "admin": ("aliquot-e2e-admin", "system:masters"),
    "kube-controller-manager": ("system:kube-controller-manager", ""),
    "kube-scheduler": ("system:kube-scheduler", ""),
    "kubelet": (f"system:node:{NODE_NAME}", "system:nodes"),
}
"""Clients that may call the API server by static token: file of the kubeconfig -> user, group."""


@dataclass(frozen=True, slots=True)
class Component:
    """One process of the cluster."""

    command: list[str]
    environment: Mapping[str, str] = field(default_factory=dict)

    def describe(self) -> str:
        """The form the node's init process reads."""
        return json.dumps({"command": self.command, "environment": dict(self.environment)})


def write_configuration(config: Path) -> None:
    """Write tokens, kubeconfigs and every component's configuration file. Certificates are there already."""
    tokens = {name: secrets.token_hex(16) for name in USERS}
    rows = (f'{tokens[name]},{user},{name},"{group}"' for name, (user, group) in USERS.items())
    _private(config / "tokens.csv", "\n".join(rows) + "\n")
    for name, token in tokens.items():
        write_kubeconfig(config / f"{name}.kubeconfig", f"https://{NODE_ADDRESS}:{API_PORT}", config / "pki/ca.crt", token)
    _private(config / "kubelet.yaml", yaml.safe_dump(_kubelet_configuration(config)))
    _private(config / "containerd.toml", _containerd_configuration())
    _private(config / "cni/10-aliquot-e2e.conflist", json.dumps(_CNI_CONFIGURATION, indent=1))


def write_kubeconfig(path: Path, server: str, authority: Path, token: str) -> None:
    """A kubeconfig for one user."""
    cluster = {"server": server, "certificate-authority": str(authority)}
    _private(
        path,
        yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "aliquot-e2e",
                "clusters": [{"name": "aliquot-e2e", "cluster": cluster}],
                "users": [{"name": "user", "user": {"token": token}}],
                "contexts": [{"name": "aliquot-e2e", "context": {"cluster": "aliquot-e2e", "user": "user"}}],
            }
        ),
    )


def components(config: Path, kubernetes: Path, containerd: Path) -> dict[str, Component]:
    """Every component by name.

    Args:
        config: the folder ``write_configuration`` filled.
        kubernetes: the folder with the Kubernetes programs.
        containerd: the folder with containerd's programs.
    """
    pki = config / "pki"
    return {
        "etcd": Component(
            # 1 MiB of write-ahead log and no waiting for the disk: the data lives as long as the cluster does
            ["/usr/bin/etcd", "--name=e2e", "--data-dir=/var/lib/etcd/data", "--unsafe-no-fsync", "--log-level=warn",
             "--listen-client-urls=http://127.0.0.1:2379", "--advertise-client-urls=http://127.0.0.1:2379",
             "--listen-peer-urls=http://127.0.0.1:2380", "--initial-advertise-peer-urls=http://127.0.0.1:2380",
             "--initial-cluster=e2e=http://127.0.0.1:2380"],
        ),
        "containerd": Component(
            [str(containerd / "containerd"), f"--config={config}/containerd.toml", "--log-level=info"],
            {"PATH": f"{containerd}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},  # finds its shim and runc
        ),
        "kube-apiserver": Component(
            [str(kubernetes / "kube-apiserver"), "--etcd-servers=http://127.0.0.1:2379", f"--secure-port={API_PORT}",
             f"--advertise-address={NODE_ADDRESS}", f"--service-cluster-ip-range={SERVICE_NETWORK}",
             "--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction", "--allow-privileged=true",
             f"--token-auth-file={config}/tokens.csv", f"--client-ca-file={pki}/ca.crt",
             f"--tls-cert-file={pki}/apiserver.crt", f"--tls-private-key-file={pki}/apiserver.key",
             f"--kubelet-certificate-authority={pki}/ca.crt", "--kubelet-preferred-address-types=InternalIP",
             f"--kubelet-client-certificate={pki}/apiserver-kubelet-client.crt", f"--kubelet-client-key={pki}/apiserver-kubelet-client.key",
             "--service-account-issuer=https://kubernetes.default.svc", f"--service-account-key-file={pki}/service-account.pub",
             f"--service-account-signing-key-file={pki}/service-account.key",
             f"--requestheader-client-ca-file={pki}/ca.crt", "--requestheader-allowed-names=front-proxy-client",
             "--requestheader-username-headers=X-Remote-User", "--requestheader-group-headers=X-Remote-Group",
             "--requestheader-extra-headers-prefix=X-Remote-Extra-",
             "--enable-aggregator-routing=true"],  # webhooks are called on their pods: there is no kube-proxy
        ),
        "kube-controller-manager": Component(
            [str(kubernetes / "kube-controller-manager"), f"--kubeconfig={config}/kube-controller-manager.kubeconfig",
             "--leader-elect=false", "--use-service-account-credentials=true", f"--root-ca-file={pki}/ca.crt",
             f"--service-account-private-key-file={pki}/service-account.key"],
        ),
        "kube-scheduler": Component(
            [str(kubernetes / "kube-scheduler"), f"--kubeconfig={config}/kube-scheduler.kubeconfig", "--leader-elect=false"],
        ),
        "kubelet": Component(
            [str(kubernetes / "kubelet"), f"--config={config}/kubelet.yaml", f"--kubeconfig={config}/kubelet.kubeconfig",
             f"--hostname-override={NODE_NAME}", f"--node-ip={NODE_ADDRESS}", "--cert-dir=/var/lib/kubelet/pki"],
        ),
    }  # fmt: skip


def _kubelet_configuration(config: Path) -> dict[str, object]:
    """KubeletConfiguration; what differs from the default says why."""
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": f"{config}/pki/ca.crt"},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": f"{config}/pki/kubelet.crt",
        "tlsPrivateKeyFile": f"{config}/pki/kubelet.key",
        "containerRuntimeEndpoint": f"unix://{CONTAINERD_SOCKET}",
        "clusterDNS": ["10.96.0.10"],  # nobody answers: pods of the suite look up no names, and kubelet warns where it is unset
        "cgroupDriver": "cgroupfs",  # with a cgroup for each pod, the default: by its cgroup the agent tells whose a process is
        "enforceNodeAllocatable": [],
        "failCgroupV1": False,
        "failSwapOn": False,
        "makeIPTablesUtilChains": False,
        "maxPods": 250,
        "crashLoopBackOff": {"maxContainerRestartPeriod": "2s"},  # scenarios kill the same container several times
        "syncFrequency": "3s",  # how soon a pod sees another content of its Secrets; the default, a minute, is only waited for
        "nodeStatusUpdateFrequency": "2s",  # how soon what is offered changes; the default, 10 s, is only waited for
        "nodeStatusReportFrequency": "5m",  # the default, which would follow the other
        "imageGCHighThresholdPercent": 100,  # images are imported, not pulled: one collected would be gone
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "0%", "nodefs.inodesFree": "0%", "imagefs.available": "0%"},
    }


def _containerd_configuration() -> str:
    """containerd's file. Where root may not lower an OOM score (a machine that is itself a container), containers keep the node's."""
    restricted = str(not _has_capability(_CAP_SYS_RESOURCE)).lower()
    return f"""\
version = 3
[plugins."io.containerd.cri.v1.runtime"]
  restrict_oom_score_adj = {restricted}
[plugins."io.containerd.cri.v1.images".pinned_images]
  sandbox = "{PAUSE_IMAGE}"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
  SystemdCgroup = false
[plugins."io.containerd.cri.v1.runtime".cni]
  bin_dirs = ["/usr/lib/cni"]
  conf_dir = "/etc/cni/net.d"
"""


def _has_capability(number: int) -> bool:
    effective = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("CapEff:"))
    return bool(int(effective.split()[1], 16) >> number & 1)


_CNI_CONFIGURATION = {
    "cniVersion": "1.0.0",
    "name": "aliquot-e2e",
    "plugins": [
        {
            "type": "bridge",
            "bridge": "e2e0",
            "isGateway": True,
            "hairpinMode": True,
            "ipam": {"type": "host-local", "ranges": [[{"subnet": POD_NETWORK}]], "routes": [{"dst": "0.0.0.0/0"}]},
        }
    ],
}


def _private(path: Path, text: str) -> None:
    """Tokens and keys are in these files or named by them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600)
    path.write_text(text)
