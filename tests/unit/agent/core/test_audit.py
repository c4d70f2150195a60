# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace
from typing import Any

import pytest

from agent.core.audit import AuditView, FindingKind, audit
from agent.core.cgroups import ContainerRef
from agent.core.over_cores import Busy
from agent.core.overhead import GpuProcess, HostProcess
from aliquot.contract.model import ContainerState, ContainerStatus, Isolation
from aliquot.contract.units import MIB
from tests.unit.agent.builders import grant, ids, pod, share

UID = "0c3c9f4e-6f0a-4a52-8f5e-5f6c2a1d9b77"
MAIN, OTHER = "a" * 64, "b" * 64
STATUSES = (
    ContainerStatus("main", ContainerState.RUNNING, MAIN),
    ContainerStatus("web", ContainerState.RUNNING, OTHER),
)
OWNER = pod("train", uid=UID, phase="Running", statuses=STATUSES)
GRANT = grant(ids("0:0"), share(0, 1000), of=OWNER)


def cgroup(container_id: str = MAIN, uid: str = UID) -> str:
    return f"0::/kubepods.slice/kubepods-pod{uid.replace('-', '_')}.slice/cri-containerd-{container_id}.scope\n"


def process(pid: int = 10, of: str | None = None) -> HostProcess:
    return HostProcess(pid, (pid,), 500 + pid, cgroup() if of is None else of)


def view(*used: tuple[int, int], device: str = "GPU-0", processes=None, **changed) -> AuditView:
    """The first container's processes use so many MiB each: ``(pid, mib)``; the shim counts them all."""
    known = [process(pid) for pid, _ in used] if processes is None else processes
    whole = AuditView(
        listed=[GpuProcess(device, pid, mib * MIB) for pid, mib in used],
        processes={one.pid: one for one in known},
        pods_by_uid={UID: OWNER},
        pods_current=True,
        grants=(GRANT,),
        shimmed_pids={GRANT.grant_id: {pid for pid, _ in used}},
    )
    return replace(whole, **changed)


def kinds(a_view: AuditView) -> list[FindingKind]:
    return [finding.kind for finding in audit(a_view)]


def test_a_container_within_its_limit_is_fine():
    assert kinds(view((10, 600), (11, 400))) == []


def test_its_processes_count_together():
    (finding,) = audit(view((10, 600), (11, 600)))
    assert finding.kind is FindingKind.OVER_LIMIT
    assert {one.pid for one in finding.processes} == {10, 11}
    assert "1200 MiB" in finding.sentence
    assert "1000 MiB" in finding.sentence


def test_driver_overhead_at_limit_is_no_finding():
    assert kinds(view((10, 1000 + 32))) == []
    assert kinds(view((10, 1000 + 33))) == [FindingKind.OVER_LIMIT]


def test_a_container_that_may_burst_is_measured_by_its_burst():
    assert kinds(view((10, 1400), burst_bytes={(GRANT.grant_id, "GPU-0"): 1500 * MIB})) == []


def test_a_process_that_the_shim_does_not_count_runs_without_it():
    (finding,) = audit(view((10, 5), shimmed_pids={}))
    assert (finding.kind, finding.grant_id, str(finding.holder)) == (FindingKind.SHIM_MISSING, GRANT.grant_id, "default/train/main")


def test_other_backends_need_no_shim_but_keep_their_limit():
    alone = replace(GRANT, isolation=Isolation.EXCLUSIVE)
    assert kinds(view((10, 5), grants=(alone,), shimmed_pids={})) == []
    assert kinds(view((10, 2000), grants=(alone,), shimmed_pids={})) == [FindingKind.OVER_LIMIT]


def test_a_container_without_a_grant_is_found():
    (finding,) = audit(view((10, 5), processes=[process(10, cgroup(OTHER))]))
    assert (finding.kind, str(finding.holder)) == (FindingKind.NO_GRANT, "default/train/web")


def test_pod_of_exempt_namespace_may_use_any_gpu():
    assert kinds(view((10, 5), processes=[process(10, cgroup(OTHER))], exempt_namespaces={"default"})) == []


def test_another_device_than_the_granted_one_is_found():
    (finding,) = audit(view((10, 5), device="GPU-1"))
    assert finding.kind is FindingKind.WRONG_DEVICE
    assert "GPU-0" in finding.sentence


def test_a_mig_instance_is_on_its_gpu():
    sliced = grant(ids("0:0"), share("MIG-0-1", 100), of=OWNER, resource="nvidia.com/mig-1g.10gb")
    assert kinds(view((10, 9000), grants=(sliced,), parents={"MIG-0-1": "GPU-0"})) == []
    assert kinds(view((10, 5), device="GPU-1", grants=(sliced,), parents={"MIG-0-1": "GPU-0"})) == [FindingKind.WRONG_DEVICE]


def test_a_place_for_a_mig_instance_names_its_gpu():
    made = grant(ids("0:0"), share("GPU-0/1g.10gb@3", 100), of=OWNER, resource="nvidia.com/mig-1g.10gb")
    assert kinds(view((10, 9000), grants=(made,))) == []
    assert kinds(view((10, 5), device="GPU-1", grants=(made,))) == [FindingKind.WRONG_DEVICE]


def test_processes_are_not_misplaced_when_gpu_of_instance_is_unknown():
    sliced = grant(ids("0:0"), share("MIG-0-1", 100), of=OWNER, resource="nvidia.com/mig-1g.10gb")
    assert kinds(view((10, 5), grants=(sliced,))) == []
    assert kinds(view((10, 5), processes=[process(10, cgroup(OTHER))], grants=(sliced,))) == [FindingKind.NO_GRANT]


def test_host_process_is_reported_and_not_ended():
    (finding,) = audit(view((10, 5), processes=[process(10, "0::/system.slice/x.service\n")]))
    assert (finding.kind, finding.of_container, finding.holder) == (FindingKind.HOST_PROCESS, False, None)


def test_agents_own_processes_are_no_finding():
    served = [process(10, "0::/\n")]
    assert kinds(view((10, 5), processes=served, own_cgroups={"0::/\n"})) == []
    assert kinds(view((10, 5), processes=served)) == [FindingKind.HOST_PROCESS]


def test_ended_process_is_ignored():
    assert kinds(view((10, 5000), processes=[])) == []


def test_container_of_deleted_pod_is_found_by_uid():
    gone = "11111111-6f0a-4a52-8f5e-5f6c2a1d9b77"
    (finding,) = audit(view((10, 5), processes=[process(10, cgroup(MAIN, gone))]))
    assert (finding.kind, finding.pod_uid, finding.holder) == (FindingKind.NO_GRANT, gone, None)


def test_with_stale_pods_only_possibly_new_ones_are_not_checked():
    new = "11111111-6f0a-4a52-8f5e-5f6c2a1d9b77"
    assert kinds(view((10, 5), processes=[process(10, cgroup(MAIN, new))], pods_current=False)) == []
    assert kinds(view((10, 5), grants=(), shimmed_pids={}, pods_current=False)) == [FindingKind.NO_GRANT]
    assert kinds(view((10, 5), pods_by_uid={}, shimmed_pids={}, pods_current=False)) == [FindingKind.SHIM_MISSING]


@pytest.mark.parametrize("counted", [True, False])
def test_container_missing_in_status_has_all_grants_of_its_pod(counted):
    unnamed = replace(OWNER, statuses=())
    uncounted: dict[str, Any] = {} if counted else {"shimmed_pids": {}}
    a_view = view((10, 5), pods_by_uid={UID: unnamed}, **uncounted)
    assert kinds(a_view) == ([] if counted else [FindingKind.SHIM_MISSING])


def test_process_without_grant_proves_nothing_where_a_ledger_row_is_damaged():
    without = view((10, 600), grants=(), shimmed_pids={})
    assert kinds(without) == [FindingKind.NO_GRANT]
    assert kinds(replace(without, closed_uuids={"GPU-0"})) == []
    assert kinds(replace(without, closed_uuids={"GPU-1"})) == [FindingKind.NO_GRANT]
    assert kinds(view((10, 1200), closed_uuids={"GPU-0"})) == [FindingKind.OVER_LIMIT], "a grant that can be read is still checked"


class TestCores:
    """The driver's samples against the container's cores."""

    REF = ContainerRef(UID, MAIN)
    GRANTED = {(GRANT.grant_id, "GPU-0"): 10}  # noqa: RUF012 - never changed

    def sampled(self, percent: float, ref: ContainerRef = REF, device: str = "GPU-0", **changed) -> AuditView:
        busy = {(ref, device): Busy(percent, percent - 2)}
        return view((10, 600), **{"busy": busy, "cores_percent": self.GRANTED, **changed})

    def test_container_above_its_cores_is_found(self):
        (finding,) = audit(self.sampled(99))
        assert (finding.kind, finding.subject, finding.of_container) == (FindingKind.OVER_CORES, GRANT.grant_id, True)
        assert [one.pid for one in finding.processes] == [10]
        assert "ran for 99 % of the time on GPU-0" in finding.sentence
        assert "granted 10 % of the cores" in finding.sentence

    def test_slack_and_uncertainty_are_in_favour_of_the_container(self):
        assert kinds(self.sampled(10 + 5 + 2)) == []
        assert kinds(self.sampled(10 + 5 + 2.1)) == [FindingKind.OVER_CORES]

    def test_container_without_a_fixed_limit_is_never_above_it(self):
        assert kinds(self.sampled(99, cores_percent={})) == []

    def test_another_container_and_another_gpu_do_not_count(self):
        assert kinds(self.sampled(99, ref=ContainerRef(UID, OTHER))) == []
        assert kinds(self.sampled(99, device="GPU-1")) == []

    def test_container_between_two_processes_is_found_too(self):
        (finding,) = audit(replace(self.sampled(99), listed=[], processes={}))
        assert (finding.kind, finding.processes) == (FindingKind.OVER_CORES, ())

    def test_exempt_namespace_may_use_what_it_finds(self):
        assert kinds(self.sampled(99, exempt_namespaces={"default"})) == []
