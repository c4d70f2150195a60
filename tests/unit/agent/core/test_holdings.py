# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import pytest

from agent.core.holdings import Holdings, holdings_of
from agent.core.overhead import GpuProcess, HostProcess
from aliquot.contract.model import ContainerState, ContainerStatus, Isolation
from tests.unit.agent.builders import grant, ids, pod, share

UID = "0c3c9f4e-6f0a-4a52-8f5e-5f6c2a1d9b77"
MAIN, WEB = "a" * 64, "b" * 64
OWNER = pod(
    "train",
    uid=UID,
    statuses=(ContainerStatus("main", ContainerState.RUNNING, MAIN), ContainerStatus("web", ContainerState.RUNNING, WEB)),
)
ONE = grant(ids("0:0", "1:0"), share(0), share(1), of=OWNER)
SECOND = grant(ids("0:1"), share(0), of=OWNER, container="web")
HOST = "0::/system.slice/x.service\n"


def cgroup(container_id: str = MAIN) -> str:
    return f"0::/kubepods.slice/kubepods-pod{UID.replace('-', '_')}.slice/cri-containerd-{container_id}.scope\n"


def process(pid: int, of: str | None = None) -> HostProcess:
    return HostProcess(pid, (pid,), 500 + pid, cgroup() if of is None else of)


def look(*listed: GpuProcess, processes=None, grants=(ONE,), reported=("GPU-0", "GPU-1"), owner=OWNER, counted=(), silent=()) -> Holdings:
    known = [process(entry.pid) for entry in listed] if processes is None else processes
    counted_pids = {ONE.grant_id: set(counted)}
    return holdings_of(listed, known, set(reported), grants=grants, pods_by_uid={UID: owner}, counted_pids=counted_pids, silent=set(silent))


@pytest.mark.parametrize("isolation", [Isolation.SHIM, Isolation.MPS, Isolation.EXCLUSIVE, Isolation.DRIVER])
def test_process_belongs_to_its_container_under_any_backend(isolation):
    one = replace(ONE, isolation=isolation)
    found = look(GpuProcess("GPU-0", 10, 100, 0.25), GpuProcess("GPU-0", 11, 20, 0.5), grants=(one,))
    assert [found.used_bytes(one.grant_id, uuid) for uuid in ("GPU-0", "GPU-1")] == [120, 0]
    assert [found.utilization_ratio(one.grant_id, uuid) for uuid in ("GPU-0", "GPU-1")] == [0.75, 0.0]
    assert found.processes(one) == 2


def test_silent_gpu_leaves_holdings_unknown():
    found = look(reported=("GPU-1",))
    assert (found.used_bytes(ONE.grant_id, "GPU-0"), found.utilization_ratio(ONE.grant_id, "GPU-0"), found.processes(ONE)) == (None,) * 3
    assert found.used_bytes(ONE.grant_id, "GPU-1") == 0
    assert Holdings().used_bytes(ONE.grant_id, "GPU-0") is None


def test_containers_of_pod_are_distinguished_by_status():
    processes = [process(10), process(11, cgroup(WEB))]
    found = look(GpuProcess("GPU-0", 10, 1), GpuProcess("GPU-0", 11, 2), processes=processes, grants=(ONE, SECOND))
    assert [found.used_bytes(one.grant_id, "GPU-0") for one in (ONE, SECOND)] == [1, 2]


def test_before_status_container_is_known_only_when_one_grant_matches():
    unnamed = replace(OWNER, statuses=())
    found = look(GpuProcess("GPU-0", 10, 1), GpuProcess("GPU-1", 10, 2), grants=(ONE, SECOND), owner=unnamed)
    assert [found.used_bytes(*key) for key in ((ONE.grant_id, "GPU-0"), (SECOND.grant_id, "GPU-0"), (ONE.grant_id, "GPU-1"))] == [
        None,
        None,
        2,
    ]
    counted = look(GpuProcess("GPU-0", 10, 1), grants=(ONE, SECOND), owner=unnamed, counted=(10,))
    assert [counted.used_bytes(one.grant_id, "GPU-0") for one in (ONE, SECOND)] == [1, 0]


def test_memory_outside_shim_adds_to_shim_count_without_double_counting():
    found = look(GpuProcess("GPU-0", 10, 1), GpuProcess("GPU-1", 10, 1), GpuProcess("GPU-1", 11, 1), counted=(10,))
    assert found.processes(ONE) == 1
    assert found.used_bytes(ONE.grant_id, "GPU-1") == 2


def test_process_outside_containers_belongs_to_counting_grant_or_host():
    entry, processes = GpuProcess("GPU-0", 10, 1), [process(10, HOST)]
    assert look(entry, processes=processes, counted=(10,)).used_bytes(ONE.grant_id, "GPU-0") == 1
    assert look(entry, processes=processes).used_bytes(ONE.grant_id, "GPU-0") == 0


def test_ended_process_and_one_on_another_gpu_do_not_count():
    assert look(GpuProcess("GPU-0", 10, 1), processes=[]).used_bytes(ONE.grant_id, "GPU-0") == 0
    assert look(GpuProcess("GPU-2", 10, 1), reported=("GPU-0", "GPU-2")).listed == {}


def test_instance_is_reported_as_whole_without_processes():
    sliced = grant(ids("0:0"), share("MIG-0-1", 100), of=OWNER, resource="nvidia.com/mig-1g.10gb")
    found = look(GpuProcess("GPU-0", 10, 1), grants=(sliced,))
    assert (found.used_bytes(sliced.grant_id, "MIG-0-1"), found.processes(sliced)) == (None, None)


@pytest.mark.parametrize(
    "found",
    [
        look(GpuProcess("GPU-0", 10, 1, 0.5), GpuProcess("GPU-0", 11, 1)),
        look(GpuProcess("GPU-0", 10, 1, 0.5), silent={(ONE.grant_id, "GPU-0")}),
        replace(look(GpuProcess("GPU-0", 10, 1, 0.5)), recent=False),
    ],
    ids=["one process is not reported", "one that holds memory is not listed", "a while ago"],
)
def test_container_utilization_needs_all_its_processes(found):
    assert found.utilization_ratio(ONE.grant_id, "GPU-0") is None
    assert found.used_bytes(ONE.grant_id, "GPU-0") is not None


def test_processes_keep_a_device_no_busier_than_always():
    found = look(GpuProcess("GPU-0", 10, 1, 0.75), GpuProcess("GPU-0", 11, 1, 0.5))
    assert found.utilization_ratio(ONE.grant_id, "GPU-0") == 1.0
