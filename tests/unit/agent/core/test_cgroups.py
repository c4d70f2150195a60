# SPDX-License-Identifier: Apache-2.0
import pytest

from agent.core.cgroups import ContainerRef, container_of

UID = "0c3c9f4e-6f0a-4a52-8f5e-5f6c2a1d9b77"
LOW = UID.replace("-", "_")
ID = "6d3f" * 16
STATIC = "2f1d3c4b5a69788796a5b4c3d2e1f001"


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(f"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{LOW}.slice/cri-containerd-{ID}.scope", id="v2"),
        pytest.param(f"0::/kubepods.slice/kubepods-pod{LOW}.slice/cri-containerd-{ID}.scope", id="v2 guaranteed"),
        pytest.param(f"0::/kubepods/besteffort/pod{UID}/{ID}", id="v2 cgroupfs"),
        pytest.param(f"0::/kubepods/pod{UID}/{ID}/inner", id="v2 cgroupfs with a cgroup of its own inside"),
        pytest.param(f"0::/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{LOW}.slice/crio-{ID}.scope", id="CRI-O"),
        pytest.param(f"0::/kubepods.slice/kubepods-pod{LOW}.slice/crio-{ID}.scope/container/init.scope", id="CRI-O with systemd inside"),
        pytest.param(f"12:pids:/system.slice\n11:memory:/kubepods/burstable/pod{UID}/{ID}\n1:name=systemd:/other", id="v1 cgroupfs"),
        pytest.param(f"4:memory:/kubepods.slice/kubepods-pod{LOW}.slice/docker-{ID}.scope\n0::/", id="v1 systemd, docker"),
        pytest.param(f"2:cpu:/system.slice/containerd.service/kubepods-burstable-pod{LOW}.slice:cri-containerd:{ID}", id="v1 unsplit"),
        pytest.param(f"0::/../../kubepods-burstable-pod{LOW}.slice/cri-containerd-{ID}.scope", id="from a cgroup namespace"),
        pytest.param(f"0::/../../../pod{UID}/{ID}", id="from a cgroup namespace, cgroupfs"),
        pytest.param(f"0::/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{LOW}.slice/cri-containerd-{ID}.scope", id="kind"),
    ],
)
def test_process_of_container_is_identified_by_cgroup(path):
    assert container_of(path + "\n") == ContainerRef(UID, ID)


def test_a_static_pods_uid_is_a_bare_hash():
    assert container_of(f"0::/kubepods/burstable/pod{STATIC}/{ID}\n") == ContainerRef(STATIC, ID)


@pytest.mark.parametrize(
    "path",
    [
        "0::/system.slice/sshd.service",
        "0::/",
        "",
        "0::/user.slice/user-1000.slice/session-3.scope",
        f"0::/machine.slice/libpod-{ID}.scope",
        f"0::/system.slice/docker-{ID}.scope",
        f"0::/kubepods.slice/kubepods-pod{LOW}.slice/crio-conmon-{ID}.scope",
        f"0::/kubepods.slice/kubepods-pod{LOW}.slice",
    ],
)
def test_other_processes_belong_to_no_container(path):
    assert container_of(path + "\n") is None
