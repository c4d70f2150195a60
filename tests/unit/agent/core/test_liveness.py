# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import pytest

from agent.core.liveness import PodsAtWork, gpus_of, processes_of, still_there
from agent.core.overhead import GpuProcess, HostProcess
from aliquot import contract
from aliquot.contract.units import MIB
from tests.unit.agent.builders import grant, ids, share

GRANT = grant(ids("0:0"), share(0))
INSTANCE = grant(ids("0:0"), share("MIG-0-1"), resource=f"{contract.RESOURCE_DOMAIN}/mig-1g.10gb")
PARENTS = {"MIG-0-1": "GPU-0"}


def process(pid: int = 10, uid: str = "uid-train") -> HostProcess:
    return HostProcess(pid, (pid,), 500, f"0::/kubepods/pod{uid}/{'ab' * 32}\n")


def on(device_uuid: str, pid: int = 10) -> GpuProcess:
    return GpuProcess(device_uuid, pid, 50 * MIB)


@pytest.mark.parametrize(
    ("of", "listed", "who", "found"),
    [
        pytest.param(GRANT, on("GPU-0"), process(), [10], id="its pod on its GPU"),
        pytest.param(GRANT, on("GPU-1"), process(), [], id="another GPU"),
        pytest.param(GRANT, on("GPU-0"), process(uid="uid-other"), [], id="another pod"),
        pytest.param(GRANT, on("GPU-0"), replace(process(), cgroup="0::/system.slice\n"), [], id="the host"),
        pytest.param(INSTANCE, on("GPU-0"), process(), [10], id="the GPU of its instance"),
        pytest.param(INSTANCE, on("GPU-1"), process(), [], id="not the GPU of its instance"),
        pytest.param(replace(INSTANCE, shares=(share("MIG-gone"),)), on("GPU-1"), process(), [10], id="an instance that no GPU shows"),
    ],
)
def test_process_belongs_to_grant_with_same_pod_and_gpu(of, listed, who, found):
    assert [one.pid for one in processes_of(of, [listed], [who], PARENTS)] == found


def test_pid_reused_by_other_process_counts_as_ended():
    then = [process(10), process(11)]
    assert still_there(then, [process(10), replace(process(11), start_ticks=900)]) == {10}


@pytest.mark.parametrize(
    ("of", "gpus"),
    [
        pytest.param(GRANT, {"GPU-0"}, id="a share of a GPU"),
        pytest.param(INSTANCE, {"GPU-0", "MIG-0-1"}, id="an instance"),
        pytest.param(replace(INSTANCE, shares=(share("MIG-gone"),)), None, id="an instance that no GPU shows may be on any"),
    ],
)
def test_gpus_of_grant_include_those_of_its_instances(of, gpus):
    assert gpus_of(of, PARENTS) == gpus


@pytest.mark.parametrize(
    ("uids", "further", "found"),
    [
        pytest.param(["uid-train", "uid-other"], [], True, id="one of it"),
        pytest.param(["uid-other"], ["0::/system.slice\n"], False, id="others only"),
        pytest.param(["uid-agent"], ["0::/\n"], None, id="the agent's own pod only"),
        pytest.param([], ["0::/\n", "0::/../ab\n"], None, id="none of a pod"),
        pytest.param(["uid-other"], [""], True, id="others, and one that ends and may be of any pod"),
    ],
)
@pytest.mark.parametrize("own", ["0::/\n", process(uid="uid-agent").cgroup], ids=["own cgroup namespace", "the host's"])
def test_pod_has_process_when_host_process_has_its_cgroup(uids, further, found, own):
    if own == "0::/\n":  # then the kernel names its own pod's processes by the way from there
        uids = [uid for uid in uids if uid != "uid-agent"]
    assert PodsAtWork.of({*(process(uid=uid).cgroup for uid in uids), *further}, own).has("uid-train") is found
