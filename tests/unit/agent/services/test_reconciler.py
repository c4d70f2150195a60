import asyncio

import pytest

from agent.core.limits import FailPolicy, limits_of
from agent.core.planning import Planned
from agent.services.pod_cache import PodCache
from agent.services.reconciler import Reconciler
from proto.model import Preferences
from tests.unit.agent.builders import board, grant, held, ids, pod
from tests.unit.agent.fakes import Disk, FakeClock, FakePodResources, settle

GRANT = grant(ids("0:0"), of=pod("a"))


class Harness:
    def __init__(self, base) -> None:
        self.disk = Disk(base)
        self.book = self.disk.book()
        self.pods = PodCache()
        self.pod_resources = FakePodResources(held(pod("a"), ids("0:0")))
        self.clock = FakeClock()
        self.reconciler = Reconciler(
            0.05, book=self.book, pods=self.pods, pod_resources=self.pod_resources, files=self.disk.files, clock=self.clock
        )

    async def knows(self, *pods) -> None:
        self.pods.pods_listed(pods)
        await settle()

    @property
    def grants(self) -> set[str]:
        return set(self.book.ledger.grants)


@pytest.fixture
async def node(tmp_path):
    harness = Harness(tmp_path)
    await harness.book.commit(Planned(GRANT, (), Preferences()), limits_of(GRANT, FailPolicy.CLOSED), dict, board(), 16)
    return harness


async def test_before_the_pods_are_known_nothing_is_released(node):
    node.pod_resources.listing = []
    await node.reconciler.reconcile()
    assert node.grants == {GRANT.grant_id}


async def test_a_running_pods_grant_stays(node):
    await node.knows(pod("a", phase="Running"))
    await node.reconciler.reconcile()
    assert node.grants == {GRANT.grant_id}


async def test_a_gone_pods_grant_and_files_go_in_one_pass(node):
    await node.knows()
    node.pod_resources.listing = []
    await node.reconciler.reconcile()
    assert node.grants == set()
    assert not node.disk.files.ids()
    assert not node.disk.cdi.ids()
    assert not node.disk.store.ids()


async def test_a_deleted_pod_kubelet_still_lists_is_released_after_a_while(node):
    await node.knows()
    await node.reconciler.reconcile()
    assert node.grants == {GRANT.grant_id}
    node.clock.seconds += 61
    await node.reconciler.reconcile()
    assert node.grants == set()


async def test_a_pod_that_came_back_starts_its_time_anew(node):
    await node.knows()
    await node.reconciler.reconcile()
    node.clock.seconds += 61
    await node.knows(pod("a"))
    await node.reconciler.reconcile()
    await node.knows()
    await node.reconciler.reconcile()
    assert node.grants == {GRANT.grant_id}


async def test_a_silent_kubelet_delays_the_release(node):
    await node.knows()
    node.pod_resources.listing = None
    await node.reconciler.reconcile()
    assert node.grants == {GRANT.grant_id}


async def test_strays_are_swept_even_before_the_pods_are_known(node):
    node.disk.cdi.write("stray", {})
    await node.reconciler.reconcile()
    assert node.disk.cdi.ids() == [GRANT.grant_id]


async def test_the_end_of_a_pod_is_noticed_long_before_the_period(tmp_path, node):
    patient = Reconciler(3600, book=node.book, pods=node.pods, pod_resources=node.pod_resources, files=node.disk.files, clock=node.clock)
    await node.knows(pod("a", phase="Running"))
    running = asyncio.ensure_future(patient.run())
    await asyncio.sleep(0.05)
    node.pod_resources.listing = []
    node.pods.pod_deleted(pod("a"))
    async with asyncio.timeout(5):
        while True:
            if not node.grants:
                break
            await asyncio.sleep(0.01)
    running.cancel()
