# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import pytest

from agent.core.injection import (
    Answer,
    DeviceInjection,
    admission_trouble,
    has_version,
    injects_by_cdi,
    legacy_answer,
    legacy_trouble,
    named_answer,
    resolves_no_name,
)
from agent.core.refusal import Reason
from aliquot.contract.model import Isolation, Preferences, Priority
from tests.unit.agent.builders import VGPU, grant, ids, share

AUTO = DeviceInjection.AUTO
NOW = "v1.34.1"


@pytest.mark.parametrize(
    ("runtime", "kubelet", "host_has_spec", "by_cdi"),
    [
        pytest.param("containerd://2.1.4", NOW, False, True, id="containerd 2 resolves CDI unless configured not to"),
        pytest.param("containerd://2.0.5-k3s1", "v1.32.1+k3s1", False, True, id="k3s"),
        pytest.param("containerd://1.7.12-0ubuntu4", NOW, False, False, id="containerd 1.7 where nobody has set CDI up"),
        pytest.param("containerd://1.7.12-0ubuntu4", NOW, True, True, id="containerd 1.7 where somebody has"),
        pytest.param("containerd://1.6.33", NOW, True, False, id="containerd 1.6"),
        pytest.param("cri-o://1.28.3", NOW, False, True, id="CRI-O"),
        pytest.param("cri-o://1.27.0", NOW, True, False, id="old CRI-O"),
        pytest.param("docker://27.0.1", NOW, True, False, id="Docker"),
        pytest.param("containerd://2.1.4", "v1.28.9", True, False, id="a kubelet that drops CDI names"),
        pytest.param("", "", False, True, id="a node that is not known yet"),
    ],
)
def test_the_nodes_versions_decide(runtime, kubelet, host_has_spec, by_cdi):
    assert injects_by_cdi(AUTO, runtime, kubelet, host_has_spec=host_has_spec) is by_cdi


def test_runtime_unknown_to_kubelet_gives_no_information():
    reported = {runtime: has_version(runtime) for runtime in ("containerd://2.1.4", "cri-o://1.28.3", "containerd://Unknown", "")}
    assert reported == {"containerd://2.1.4": True, "cri-o://1.28.3": True, "containerd://Unknown": False, "": False}


@pytest.mark.parametrize(("configured", "by_cdi"), [(DeviceInjection.CDI, True), (DeviceInjection.LEGACY, False)])
def test_configured_mode_takes_precedence(configured, by_cdi):
    for runtime in ("containerd://1.6.33", "containerd://2.1.4"):
        assert injects_by_cdi(configured, runtime, NOW, host_has_spec=True) is by_cdi


@pytest.mark.parametrize(
    ("configured", "runtime", "kubelet", "certain"),
    [
        pytest.param(AUTO, "containerd://1.6.33", NOW, True, id="containerd 1.6 knows no CDI"),
        pytest.param(AUTO, "containerd://2.1.4", "v1.28.9", True, id="a kubelet that drops CDI names"),
        pytest.param(AUTO, "containerd://1.7.27", NOW, False, id="containerd 1.7 may be configured to"),
        pytest.param(DeviceInjection.LEGACY, "containerd://1.7.27", NOW, True, id="unless somebody says that it was not"),
        pytest.param(DeviceInjection.LEGACY, "containerd://2.1.4", NOW, False, id="containerd 2 does, whatever is configured"),
        pytest.param(DeviceInjection.CDI, "containerd://1.6.33", NOW, False, id="somebody says that it does"),
        pytest.param(AUTO, "", "", False, id="a node that is not known yet"),
    ],
)
def test_earlier_cdi_name_is_rejected_only_when_certainly_ignored(configured, runtime, kubelet, certain):
    assert resolves_no_name(configured, runtime, kubelet) is certain


LEGACY = legacy_answer(VGPU, ids("1:3"), {"GPU-1": 1}, [], "/run/containers/g")
NAMED = named_answer("aliquot.dev/vgpu=g")


@pytest.mark.parametrize(
    ("answer", "resource", "nowhere", "says"),
    [
        pytest.param(NAMED, VGPU, False, "", id="the name of its grant"),
        pytest.param(NAMED, VGPU, True, "now ignores CDI names", id="on a node that resolves none"),
        pytest.param(named_answer("aliquot.dev/vgpu=old"), VGPU, False, "aliquot.dev/vgpu=old", id="the name of another"),
        pytest.param(LEGACY, VGPU, True, "", id="the files of its grant"),
        pytest.param(legacy_answer(VGPU, ids("1:3"), {}, [], "/run/containers/old"), VGPU, False, "/run/containers/old", id="of another"),
        pytest.param(Answer(env=LEGACY.env), VGPU, False, "from nowhere", id="a GPU without any files"),
        pytest.param(
            legacy_answer("nvidia.com/mig-1g.10gb", ["MIG-1"], {}, [], ""), "nvidia.com/mig-1g.10gb", False, "", id="MIG has none"
        ),
    ],
)
def test_invalid_reply_is_reported_with_cure(answer, resource, nowhere, says):
    trouble = admission_trouble(answer, "main", resource, "aliquot.dev/vgpu=g", "/run/containers/g", name_leads_nowhere=nowhere)
    assert bool(trouble) is bool(says)
    assert says in trouble
    assert not trouble or trouble.endswith("Delete the pod so that it is admitted again")


def test_runtime_ignoring_name_gives_container_no_gpu_for_image_request():
    """containerd up to 2.2 with ``enable_cdi = false`` starts the container without an error."""
    assert named_answer("aliquot.dev/vgpu=x") == Answer(cdi_name="aliquot.dev/vgpu=x", env={"NVIDIA_VISIBLE_DEVICES": "void"})


def test_response_without_cdi_follows_from_the_ids():
    answer = legacy_answer(
        VGPU, ids("1:3", "0:5"), {"GPU-0": 0, "GPU-1": 7}, ["/dev/nvidiactl", "/dev/nvidia0", "/dev/nvidia-uvm"], "/run/x"
    )
    assert answer.cdi_name == ""
    assert answer.env["NVIDIA_VISIBLE_DEVICES"] == "GPU-0,GPU-1"
    assert answer.nodes == ("/dev/nvidia0", "/dev/nvidia7", "/dev/nvidiactl", "/dev/nvidia-uvm")
    assert answer.mounts == (
        ("/dev/null", "/var/run/nvidia-container-devices/GPU-0", True),
        ("/dev/null", "/var/run/nvidia-container-devices/GPU-1", True),
        ("/run/x/limits", "/run/aliquot/limits", True),
        ("/run/x/region", "/run/aliquot/region", False),
        ("/run/x/libaliquot-preload.so", "/run/aliquot/libaliquot-preload.so", True),
        ("/run/x/ld.so.preload", "/etc/ld.so.preload", True),
    )


def test_a_mig_instance_needs_no_shim():
    answer = legacy_answer("nvidia.com/mig-1g.10gb", ["MIG-1"], {}, [], "/run/x")
    asking = (("/dev/null", "/var/run/nvidia-container-devices/MIG-1", True),)
    assert (answer.env["NVIDIA_VISIBLE_DEVICES"], answer.mounts, answer.nodes) == ("MIG-1", asking, ())


def test_grant_on_gpus_in_the_ids_is_accepted():
    assert legacy_trouble(grant(ids("1:0", "0:3"), share(0), share(1)), Preferences()) is None


@pytest.mark.parametrize(
    ("changed", "preferences", "reason"),
    [
        pytest.param({"shares": (share(1),)}, Preferences(), Reason.ASSIGNMENT_INVALID, id="another GPU"),
        pytest.param({"isolation": Isolation.MPS}, Preferences(), Reason.ISOLATION_UNAVAILABLE, id="another backend"),
        pytest.param({}, Preferences(priority=Priority.HIGH), Reason.ISOLATION_UNAVAILABLE, id="priority"),
        pytest.param({}, Preferences(memory_burst=1.5), Reason.ISOLATION_UNAVAILABLE, id="burst"),
    ],
)
def test_anything_else_is_refused(changed, preferences, reason):
    trouble = legacy_trouble(replace(grant(ids("0:0"), share(0)), **changed), preferences)
    assert trouble is not None
    assert trouble.reason is reason
