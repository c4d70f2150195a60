# SPDX-License-Identifier: Apache-2.0
import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agent.core.identity import cdi_name
from agent.core.overhead import HostProcess
from agent.core.owners import users_in
from agent.core.refusal import Reason, Refusal
from agent.core.region_layout import decode_limits
from agent.services import changes
from agent.services import claims as module
from agent.services.claim_requests import ClaimRequests
from agent.services.claim_sweep import ClaimSweep
from agent.services.claims import ClaimManager, ClaimOptions
from agent.services.dra_plugin import DraPlugin, devices_of
from agent.services.reporting import Reporting
from aliquot import contract
from aliquot.contract.units import MIB
from aliquot.kubelet_api import dra_pb2 as pb
from aliquot.placement.fit import Reject
from aliquot_lab.standin.cdi import load_registry, resolve
from tests.unit.agent.adapters.test_files import SlotHolder
from tests.unit.agent.builders import BOOT, SECRET, grant, ids, share
from tests.unit.agent.claim_builders import NODE, FakeResourceApi, claim_object, ref, result, user, using
from tests.unit.agent.fakes import posted_on_pods, settle, until
from tests.unit.agent.partitions import make_backends
from tests.unit.agent.services.test_allocator import Harness


class ClaimHarness(Harness):
    """A claim manager over fakes of everything but the files."""

    def __init__(self, base: Path, **options) -> None:
        super().__init__(base, **options)
        self.resources = FakeResourceApi()
        self.requests = ClaimRequests(self.resources)
        self.claims = ClaimManager(
            ClaimOptions(SECRET, BOOT, NODE, 16, admin_access=True), state=self.state, requests=self.requests, contents=self.contents,
            backends=make_backends(self.manager), reporting=Reporting(self.events, self.telemetry), clock=self.clock,
        )  # fmt: skip
        self.sweep = ClaimSweep(self.claims, self.manager, self.liveness, self.requests, NODE)

    def memory_mib(self, granted) -> int:
        path = self.disk.files.paths(granted.grant_id)[0]
        return sum(device.memory_bytes for device in decode_limits(Path(path).read_bytes()).devices) // MIB

    def inodes(self, granted) -> list[int]:
        return [Path(path).stat().st_ino for path in self.disk.files.paths(granted.grant_id)]

    def specs(self) -> list[str]:
        return sorted(path.name for path in (self.disk.base / "cdi").glob(f"{contract.CDI_FILE_PREFIX}*"))


@pytest.fixture
async def node(tmp_path):
    return await ClaimHarness(tmp_path).ready()


@pytest.fixture(autouse=True)
def hurried(monkeypatch):
    """Waits are short; the clock of the harness stands still, so a test moves it."""
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(module, "POD_SECONDS", 0.01)


async def test_claim_gets_one_grant_with_files_for_each_request(node):
    node.resources.put(claim_object("train", result(0, mib=300, request="a"), result(1, mib=200, request="b")))
    first, second = await node.claims.prepare(ref("train"))
    assert [node.memory_mib(one) for one in (first, second)] == [300, 200]
    assert len(node.specs()) == 2
    devices = devices_of([first, second])
    assert [(list(one.request_names), one.device_name, one.share_id) for one in devices] == [
        (["a"], "gpu-0", "share-0"),
        (["b"], "gpu-1", "share-1"),
    ]
    assert [list(one.cdi_device_ids) for one in devices] == [[cdi_name(one.grant_id)] for one in (first, second)]


class TestJointRequests:
    """Requests that one container uses together."""

    @staticmethod
    def passed_on(reply: Sequence[pb.Device], *named: str) -> list[str]:
        """What kubelet passes to the runtime for a container that names these requests, or all by an empty name."""
        return [name for request in named for one in reply if request in ("", *one.request_names) for name in one.cdi_device_ids]

    @pytest.mark.parametrize("number", [1, 2, 3, 4])
    @pytest.mark.parametrize("devices", [(0, 0, 0, 0), (0, 1, 0, 1)], ids=["one GPU", "two GPUs"])
    @pytest.mark.parametrize("by_name", [False, True], ids=["unnamed", "by name"])
    @pytest.mark.parametrize("containers", [1, 2])
    async def test_containers_get_whole_grant_once_however_they_name_it(self, node, number, devices, by_name, containers):
        names = tuple("abcd"[:number])
        pod = using("first", "train", **{f"c{one}": names if by_name else [""] for one in range(containers)})
        node.pods.pods_listed([pod])
        results = [result(device, mib=100, request=name) for name, device in zip(names, devices, strict=False)]
        node.resources.put(claim_object("train", *results, pods=[pod]))
        (granted,) = await node.claims.prepare(ref("train"))
        assert node.memory_mib(granted) == 100 * number
        assert sum(state.used_shares for state in node.manager.ledger.states(node.watch.inventory, 16)) == number
        reply = devices_of([granted])
        assert [(list(one.request_names), one.device_name) for one in reply] == [
            ([name], f"gpu-{device}") for name, device in zip(names, devices, strict=False)
        ]
        registry = load_registry([node.disk.base / "cdi"])
        whole = resolve(registry, self.passed_on(reply, ""))
        for named in (names, *((name,) for name in names)):
            passed_on = self.passed_on(reply, *named)
            assert len(passed_on) == len(set(passed_on)) == len(named)
            edits = resolve(registry, passed_on)
            assert (edits.mounts, edits.device_nodes, edits.hooks) == (whole.mounts, whole.device_nodes, whole.hooks)
        mounted = [mount.container_path for mount in whole.mounts]
        assert mounted.count(contract.CONTAINER_LIMITS) == mounted.count(contract.CONTAINER_REGION) == 1
        await node.claims.unprepare(ref("train"))
        assert (node.manager.ledger.grants, node.specs()) == ({}, [])

    async def test_next_agent_knows_joint_claim_and_reads_no_api(self, node, tmp_path):
        granted = await self.prepared(node, using("first", "train", main=[""]))
        later = await ClaimHarness(tmp_path).ready()
        later.manager.load(BOOT)
        later.resources.outage = True
        assert await later.claims.prepare(ref("train")) == granted
        assert sum(state.used_shares for state in later.manager.ledger.states(later.watch.inventory, 16)) == 2

    async def test_later_pod_with_other_use_gets_what_was_prepared(self, node):
        first = using("first", "train", main=[""])
        granted = await self.prepared(node, first)
        node.pods.pod_changed(later := using("second", "train", main="b"))
        node.disk.cdi.remove(granted[0].grant_id)
        node.resources.put(claim_object("train", result(0, request="a"), result(1, request="b"), pods=[first, later]))
        assert await node.claims.prepare(ref("train")) == granted
        assert users_in(granted[0], later) == ("main",)

    async def test_mixed_use_is_refused_at_once_and_grants_nothing(self, node):
        refusal = await self.prepared(node, using("first", "train", one=[""], two="b"))
        assert isinstance(refusal, Refusal)
        assert (refusal.reason, "let both containers use the same requests" in refusal.message) == (Reason.REQUEST_INVALID, True)
        assert (node.manager.ledger.grants, node.specs()) == ({}, [])

    async def test_joint_grant_is_announced_with_all_its_requests(self, node):
        await self.prepared(node, using("first", "train", main=[""]))
        (event,) = await posted_on_pods(node.events, node.api)
        assert event.message == "requests a and b of claim train were granted GPU-0: 100 MiB; GPU-1: 100 MiB"

    async def test_grants_of_earlier_boot_are_replaced_by_joint_one(self, node):
        node.resources.put(claim_object("train", result(0, request="a"), result(1, request="b")))
        separate = await node.claims.prepare(ref("train"))
        assert len(separate) == 2
        node.manager.ledger = node.manager.ledger.adopting([replace(one, boot_id="boot-0") for one in separate])
        (joint,) = await self.prepared(node, using("first", "train", main=[""]))
        assert (list(node.manager.ledger.grants), len(node.specs())) == ([joint.grant_id], 1)

    @pytest.mark.parametrize("left", [0, 1])
    async def test_try_that_ended_half_way_is_replaced_by_joint_grant(self, node, left):
        """The pod was not known then, so each request had a grant."""
        node.resources.put(claim_object("train", result(0, request="a"), result(1, request="b")))
        separate = await node.claims.prepare(ref("train"))
        await node.manager.release([separate[1 - left]])
        (joint,) = await self.prepared(node, using("first", "train", main=[""]))
        assert (list(node.manager.ledger.grants), len(node.specs()), node.memory_mib(joint)) == ([joint.grant_id], 1, 200)

    @staticmethod
    async def prepared(node, pod):
        """What comes of a claim with one request on each GPU, for this pod."""
        node.pods.pods_listed([pod])
        await settle()
        node.resources.put(claim_object("train", result(0, request="a"), result(1, request="b"), pods=[pod]))
        return await node.claims.prepare(ref("train"))


async def test_second_prepare_returns_same_grants_without_api(node):
    node.resources.put(claim_object("train", result(0)))
    first = await node.claims.prepare(ref("train"))
    node.resources.outage = True
    assert await node.claims.prepare(ref("train")) == first
    assert node.resources.reads == 1


async def test_admin_access_has_files_without_shim_beside_full_gpu(node):
    node.resources.put(claim_object("full", result(0, mib=None)))
    node.resources.put(claim_object("watch", result(0, mib=None, adminAccess=True)))
    assert not isinstance(await node.claims.prepare(ref("full")), Refusal)
    (watching,) = await node.claims.prepare(ref("watch"))
    assert len(node.specs()) == 2
    assert await node.claims.prepare(ref("watch")) == [watching]
    await node.claims.unprepare(ref("watch"))
    assert len(node.specs()) == 1


async def test_lost_file_is_written_again_by_prepare(node):
    node.resources.put(claim_object("train", result(0)))
    (granted,) = await node.claims.prepare(ref("train"))
    node.disk.cdi.remove(granted.grant_id)
    assert await node.claims.prepare(ref("train")) == [granted]
    assert len(node.specs()) == 1


async def test_lost_spec_leaves_files_that_running_containers_have_mounted(node):
    node.resources.put(claim_object("train", result(0)))
    (granted,) = await node.claims.prepare(ref("train"))
    mounted = node.inodes(granted)
    node.disk.cdi.remove(granted.grant_id)
    await node.claims.prepare(ref("train"))
    assert node.inodes(granted) == mounted


async def test_refused_repetition_keeps_grants_that_containers_may_use(node):
    node.resources.put(claim_object("train", result(0, request="a"), result(1, request="b")))
    first, second = await node.claims.prepare(ref("train"))
    node.disk.cdi.remove(second.grant_id)
    gpu_0, gpu_1 = node.watch.inventory.devices
    node.watch.inventory = replace(node.watch.inventory, devices=(gpu_0, replace(gpu_1, trouble="XID 79")))
    assert (await node.claims.prepare(ref("train"))).reason is Reject.UNHEALTHY
    assert node.manager.ledger.grants.keys() == {first.grant_id, second.grant_id}


async def test_next_agent_knows_claim_of_earlier_one(node, tmp_path):
    node.resources.put(claim_object("train", result(0)))
    (granted,) = await node.claims.prepare(ref("train"))
    later = await ClaimHarness(tmp_path).ready()
    later.manager.load(BOOT)
    assert await later.claims.prepare(ref("train")) == [granted]
    assert await later.claims.unprepare(ref("train")) == ""
    assert (later.specs(), later.manager.ledger.grants) == ([], {})


async def test_claim_of_earlier_boot_gets_new_grant(node):
    node.resources.put(claim_object("train", result(1)))
    (granted,) = await node.claims.prepare(ref("train"))
    node.manager.ledger = node.manager.ledger.adopting([replace(granted, boot_id="boot-0")])
    (again,) = await node.claims.prepare(ref("train"))
    assert again.boot_id == BOOT


async def test_unprepare_of_unknown_claim_succeeds(node):
    assert await node.claims.unprepare(ref("never")) == ""


async def test_claim_with_request_that_does_not_fit_gets_no_grant(node):
    node.resources.put(claim_object("train", result(0, mib=100, request="a"), result(1, mib=5000, request="b")))
    changes = node.manager.changes.count
    asking = asyncio.ensure_future(node.claims.prepare(ref("train")))
    await asyncio.sleep(0.05)
    assert node.manager.changes.count == changes  # nothing is written for the request that fits
    node.clock.seconds += module.ROOM_SECONDS
    refusal = await asking
    assert refusal.reason is Reason.OVERCOMMITTED
    assert (node.manager.ledger.grants, node.specs()) == ({}, [])


async def test_waits_for_room_that_another_claim_leaves(node):
    node.resources.put(claim_object("old", result(0, mib=900)))
    node.resources.put(claim_object("new", result(0, mib=900)))
    await node.claims.prepare(ref("old"))
    waiting = asyncio.ensure_future(node.claims.prepare(ref("new")))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await node.claims.unprepare(ref("old"))
    (granted,) = await waiting
    assert granted.claim.name == "new"


async def test_waiting_claim_is_not_read_again_at_each_change_of_others(node, monkeypatch):
    """Many containers start and end together, and each is several changes."""
    monkeypatch.setattr(changes, "PACE_SECONDS", 3600.0)
    monkeypatch.setattr(module, "LOOK_SECONDS", 3600.0)
    for name in ("first", "second"):
        node.resources.put(claim_object(name, result(0, mib=900)))
    await node.claims.prepare(ref("first"))
    waiting = asyncio.ensure_future(node.claims.prepare(ref("second")))
    await until(lambda: node.resources.reads == 2)
    for number in range(5):
        node.resources.put(claim_object(f"other-{number}", result(1, mib=1)))
        await node.claims.prepare(ref(f"other-{number}"))
    assert node.resources.reads == 2 + 5
    waiting.cancel()


async def test_waits_for_api_but_not_for_ever(node):
    node.resources.put(claim_object("train", result(0)))
    node.resources.outage = True
    waiting = asyncio.ensure_future(node.claims.prepare(ref("train")))
    await asyncio.sleep(0.05)
    node.clock.seconds += module.WAIT_SECONDS
    refusal = await waiting
    assert (refusal.reason, "does not reply" in refusal.message) == (Reason.NODE_FAILURE, True)
    node.resources.outage = False
    assert not isinstance(await node.claims.prepare(ref("train")), Refusal)


async def test_waits_until_driver_lists_gpus_but_not_for_ever(tmp_path):
    """T12, with a driver that is not there when the agent starts."""
    node = ClaimHarness(tmp_path)
    node.resources.put(claim_object("train", result(0)))
    waiting = asyncio.ensure_future(node.claims.prepare(ref("train")))
    await asyncio.sleep(0.05)
    node.clock.seconds += module.WAIT_SECONDS / 2
    await asyncio.sleep(0.05)
    assert not waiting.done()
    node.clock.seconds += module.WAIT_SECONDS / 2
    refusal = await waiting
    assert isinstance(refusal, Refusal)
    assert (refusal.reason, "no GPU is known on this node yet" in refusal.message) == (Reason.NOT_READY, True)
    waiting = asyncio.ensure_future(node.claims.prepare(ref("train")))
    await asyncio.sleep(0.05)
    await node.ready()
    assert not isinstance(await waiting, Refusal)


async def test_hanging_request_is_answered_before_kubelet_gives_up(node, monkeypatch):
    answered = threading.Event()
    monkeypatch.setattr(module, "LAST_TRY_SECONDS", 0.05)
    monkeypatch.setattr(node.resources, "read_claim", lambda namespace, name: answered.wait())
    refusal = await node.claims.prepare(ref("train"), wait_seconds=0.95)
    answered.set()
    assert (refusal.reason, "was not prepared in 1 s" in refusal.message) == (Reason.NODE_FAILURE, True)
    assert not node.manager.ledger.grants


async def test_next_call_succeeds_after_kubelet_left_the_first(node):
    """A restarted kubelet calls again while the call of its predecessor still waits."""
    node.resources.put(claim_object("train", result(0)))
    node.resources.outage = True
    left, again = (asyncio.ensure_future(node.claims.prepare(ref("train"))) for _ in range(2))
    await asyncio.sleep(0.05)
    left.cancel()
    node.resources.outage = False
    (granted,) = await again
    assert left.cancelled()
    assert [one.grant_id for one in node.manager.ledger.grants.values()] == [granted.grant_id]


async def test_unprepare_that_kubelet_left_is_finished_by_next_call(node, monkeypatch):
    """A restarted kubelet calls again while the disk is still slow."""
    node.resources.put(claim_object("train", result(0)))
    await node.claims.prepare(ref("train"))
    fast_again = threading.Event()
    remove = node.disk.cdi.remove
    monkeypatch.setattr(node.disk.cdi, "remove", lambda grant_id: (fast_again.wait(), remove(grant_id)))
    left = asyncio.ensure_future(node.claims.unprepare(ref("train")))
    await asyncio.sleep(0.05)
    left.cancel()
    again = asyncio.ensure_future(node.claims.unprepare(ref("train")))
    await asyncio.sleep(0.05)
    assert (left.cancelled(), again.done()) == (True, False)
    fast_again.set()
    assert await again == ""
    assert (node.manager.ledger.grants, node.specs()) == ({}, [])


async def test_waiting_claim_holds_up_no_other(node):
    node.resources.put(claim_object("big", result(0, mib=5000)))
    node.resources.put(claim_object("small", result(0, mib=10)))
    waiting = asyncio.ensure_future(node.claims.prepare(ref("big")))
    await asyncio.sleep(0.02)
    assert not isinstance(await node.claims.prepare(ref("small")), Refusal)
    assert not waiting.done()
    waiting.cancel()


@pytest.mark.parametrize(
    ("claim", "sentence"),
    [
        pytest.param(claim_object("other", result(0)), "does not exist", id="gone"),
        pytest.param(claim_object("train", result(0), uid="uid-new"), "has UID uid-new now", id="recreated"),
        pytest.param(claim_object("train", allocated=False), "is not allocated", id="not allocated"),
    ],
)
async def test_wrong_claim_is_refused_at_once(node, claim, sentence):
    node.resources.put(claim)
    refusal = await node.claims.prepare(ref("train"))
    assert (refusal.reason, sentence in refusal.message) == (Reason.CLAIM_UNALLOCATED, True)


async def test_concurrent_calls_about_one_claim_make_one_grant(node):
    node.resources.put(claim_object("train", result(0)))
    outcomes = await asyncio.gather(*(node.claims.prepare(ref("train")) for _ in range(5)))
    assert all(one == outcomes[0] for one in outcomes)
    assert (len(node.manager.ledger.grants), node.resources.reads) == (1, 1)


async def test_grant_is_announced_on_first_pod_and_in_claims_status(node):
    pod = user("first", "train")
    node.pods.pods_listed([pod])
    await settle()
    node.resources.put(claim_object("train", result(0, mib=300), pods=[pod]))
    await node.claims.prepare(ref("train"))
    (event,) = await posted_on_pods(node.events, node.api)
    assert (event.pod, event.container, event.message) == ("first", "main", "request gpu of claim train was granted GPU-0: 300 MiB")
    await asyncio.gather(*node.claims._reports)
    ((name, devices),) = node.resources.reported
    assert (name, devices[0]["data"]["memoryBytes"]) == ("train", 300 * MIB)


class TestSweep:
    async def test_unused_claim_is_released_after_second_look(self, node):
        await node.census.take()  # else a process might run that no one has listed
        node.resources.put(claim_object("train", result(0)))  # reserved for no pod
        await node.claims.prepare(ref("train"))
        await node.sweep.step()
        assert node.manager.ledger.grants
        await node.sweep.step()
        assert not node.manager.ledger.grants

    async def test_reserved_claim_and_silent_api_keep_grant(self, node):
        node.resources.put(claim_object("train", result(0), pods=[user("first", "train")]))
        await node.claims.prepare(ref("train"))
        for outage in (False, True, True):
            node.resources.outage = outage
            await node.sweep.step()
        assert node.manager.ledger.grants

    async def test_claim_that_pod_uses_since_last_look_keeps_grant(self, node, monkeypatch):
        await node.census.take()
        node.resources.put(claim_object("train", result(0)))
        await node.claims.prepare(ref("train"))
        await node.sweep.step()
        signs = node.liveness.signs

        async def used_meanwhile(grants):
            node.resources.put(claim_object("train", result(0), pods=[user("next", "train")]))
            return await signs(grants)

        monkeypatch.setattr(node.liveness, "signs", used_meanwhile)
        await node.sweep.step()
        assert node.manager.ledger.grants

    async def test_lock_of_later_pod_keeps_grant(self, node):
        await node.census.take()
        node.processes.there = {1: HostProcess(1, (1,), 5, f"0::/kubepods/podlater/{'c' * 64}\n")}
        node.resources.put(claim_object("train", result(0)))
        (granted,) = await node.claims.prepare(ref("train"))
        holder = SlotHolder(Path(node.disk.files.paths(granted.grant_id)[1]))
        try:
            for _ in range(3):
                await node.sweep.step()
            assert node.manager.ledger.grants
        finally:
            holder.kill()
        await node.sweep.step()
        assert not node.manager.ledger.grants

    async def test_claim_that_moved_to_another_node_is_released(self, node):
        await node.census.take()
        node.resources.put(claim_object("train", result(0)))
        await node.claims.prepare(ref("train"))
        node.resources.put(claim_object("train", result(0, pool="node-2"), pods=[user("elsewhere", "train")]))
        await node.sweep.step()
        await node.sweep.step()
        assert not node.manager.ledger.grants

    async def test_claim_reserved_for_group_of_pods_keeps_grant(self, node):
        await node.census.take()
        claim = claim_object("train", result(0))
        node.resources.put({**claim, "status": {**claim["status"], "reservedFor": [{"resource": "podgroups", "name": "g", "uid": "u"}]}})
        await node.claims.prepare(ref("train"))
        await node.sweep.step()
        await node.sweep.step()
        assert node.manager.ledger.grants


async def test_grant_of_device_plugin_is_not_a_claims(node):
    node.manager.ledger = node.manager.ledger.adopting([grant(ids("0:0"), share(0, 10))])
    assert await node.claims.unprepare(ref("train")) == ""
    assert node.manager.ledger.with_ids


def kubelets_call(left_seconds: float | None) -> Any:
    return SimpleNamespace(time_remaining=lambda: left_seconds)


@pytest.mark.parametrize(
    ("left_seconds", "waits_seconds"),
    [
        pytest.param(None, 40, id="no limit"),
        pytest.param(45, 40, id="the real kubelet's limit"),
        pytest.param(25, 20, id="after 20 s in the queue of an update"),
        pytest.param(3, 0, id="nearly over"),
    ],
)
async def test_call_waits_as_long_as_kubelet_does(node, left_seconds, waits_seconds):
    node.resources.put(claim_object("train", result(0)))
    node.resources.outage = True
    request = pb.NodePrepareResourcesRequest(claims=[pb.Claim(namespace="default", name="train", uid="uid-train")])
    waiting = asyncio.ensure_future(DraPlugin(node.claims).NodePrepareResources(request, kubelets_call(left_seconds)))
    await asyncio.sleep(0.05)
    if waits_seconds:
        node.clock.seconds += waits_seconds - 0.1
        await asyncio.sleep(0.05)
        assert not waiting.done()
        node.clock.seconds += 0.1
    assert "does not reply" in (await waiting).claims["uid-train"].error


async def test_reply_has_entry_for_every_claim(node):
    node.resources.put(claim_object("good", result(0)))
    plugin = DraPlugin(node.claims)
    claims = [pb.Claim(namespace="default", name=name, uid=f"uid-{name}") for name in ("good", "gone")]
    reply = await plugin.NodePrepareResources(pb.NodePrepareResourcesRequest(claims=claims), kubelets_call(None))
    assert (len(reply.claims["uid-good"].devices), reply.claims["uid-good"].error) == (1, "")
    assert "claim default/gone does not exist" in reply.claims["uid-gone"].error
    back = await plugin.NodeUnprepareResources(pb.NodeUnprepareResourcesRequest(claims=claims), None)
    assert {uid: one.error for uid, one in back.claims.items()} == {"uid-good": "", "uid-gone": ""}


async def test_rewrite_restores_limits_of_claim(node):
    node.resources.put(claim_object("train", result(0, mib=300)))
    (granted,) = await node.claims.prepare(ref("train"))
    node.disk.files.remove(granted.grant_id)
    await node.claims.rewrite(granted)
    assert node.memory_mib(granted) == 300
