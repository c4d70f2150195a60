# SPDX-License-Identifier: Apache-2.0
"""A pod is idle only if it is known that none of its containers uses a GPU."""

from dataclasses import replace

import pytest

from agent.core.holdings import Holdings
from agent.core.overhead import GpuProcess
from agent.services.idle_watch import LEAST_SECONDS, LIFE_SECONDS, PERIOD_SECONDS, IdleWatch
from agent.services.state import AgentState
from aliquot.contract.gpunode import IdlePod
from aliquot.contract.model import ContainerState, ContainerStatus, Isolation
from tests.unit.agent.builders import grant, ids, pod, share
from tests.unit.agent.fakes import settle
from tests.unit.agent.services.test_monitor import Harness as MonitorHarness
from tests.unit.agent.services.test_monitor import living, write_slot

RUNNING = (ContainerStatus("main", ContainerState.RUNNING),)
TRAIN = pod("train", statuses=RUNNING)


class Harness(MonitorHarness):
    """A node with a GPU that reports its processes, and a pod that runs."""

    def __init__(self, base) -> None:
        super().__init__(base)
        self.holdings = Holdings({"GPU-0", "GPU-1"})
        self.idle = IdleWatch(
            state=AgentState(self.watch, self.pods, self.manager), files=self.disk.files, holdings=lambda: self.holdings, clock=self.clock
        )

    async def after(self, seconds: float) -> list[str]:
        """Look again after a while; return the idle pods."""
        self.clock.seconds += seconds
        await self.idle.step()
        return [one.pod_uid for one in self.idle.pods]

    def lists(self, one, ratio: float | None) -> None:
        """Have the driver list a process of a container."""
        key = (one.grant_id, "GPU-0")
        self.holdings = Holdings({"GPU-0"}, {key: [GpuProcess("GPU-0", 77, 5, ratio)]})


@pytest.fixture
async def node(tmp_path):
    harness = Harness(tmp_path)
    await harness.watch.poll()
    harness.pods.pods_listed([TRAIN])
    await settle()
    return harness


async def test_unused_pod_is_reported_after_a_minute_until_it_works(node):
    region = await node.commit(grant(ids("0:0"), share(0, 300), of=TRAIN))
    assert await node.after(0) == []
    assert await node.after(LEAST_SECONDS - 1) == []
    began = int(node.clock.now()) - int(LEAST_SECONDS) + 1
    assert await node.after(1) == [TRAIN.uid]
    assert node.idle.pods == (IdlePod(TRAIN.uid, began, int(node.clock.now() + LIFE_SECONDS)),)
    assert node.idle.changes.count == 1
    write_slot(region, busy_ns=1000, launches=1)
    assert await node.after(PERIOD_SECONDS) == []
    assert await node.after(LEAST_SECONDS) == [TRAIN.uid], "the process ended, and no other came"


async def test_report_stays_the_same_until_half_of_its_time_is_over(node):
    await node.commit(grant(ids("0:0"), share(0, 300), of=TRAIN))
    await node.after(0)
    await node.after(LEAST_SECONDS)
    [first] = node.idle.pods
    await node.after(LIFE_SECONDS / 2 - 1)
    assert (node.idle.pods, node.idle.changes.count) == ((first,), 1)
    await node.after(2)
    assert node.idle.pods == (replace(first, until=first.until + int(LIFE_SECONDS / 2) + 1),)


@pytest.mark.parametrize(("ratio", "is_idle"), [pytest.param(0.0, True, id="idle"), (0.01, False), pytest.param(None, False, id="unknown")])
async def test_driver_decides_while_a_process_lives(node, ratio, is_idle):
    one = grant(ids("0:0"), share(0, 300), of=TRAIN)
    region = await node.commit(one)
    node.lists(one, ratio)
    write_slot(region, busy_ns=0, launches=0)
    with living(region):
        await node.after(0)
        assert bool(await node.after(LEAST_SECONDS)) == is_idle


@pytest.mark.parametrize("backend", [Isolation.EXCLUSIVE, Isolation.MPS])
@pytest.mark.parametrize(
    ("reporting", "ratio", "is_idle"),
    [(True, None, True), (True, 0.0, True), (True, 0.5, False), (False, None, False)],
    ids=["no process", "idle process", "busy process", "silent driver"],
)
async def test_without_shim_only_the_driver_says(node, backend, reporting, ratio, is_idle):
    one = replace(grant(ids("0:0"), share(0, 300), of=TRAIN), isolation=backend)
    await node.commit(one)
    if ratio is not None:
        node.lists(one, ratio)
    elif not reporting:
        node.holdings = Holdings()
    await node.after(0)
    assert bool(await node.after(LEAST_SECONDS)) == is_idle


async def test_pod_is_in_use_while_one_of_its_containers_is(node):
    first, second = (grant(ids(f"{number}:0"), share(number, 300), of=TRAIN, container=name) for number, name in enumerate(("main", "b")))
    await node.commit(first)
    region = await node.commit(second)
    statuses = (*RUNNING, ContainerStatus("b", ContainerState.RUNNING))
    node.pods.pods_listed([replace(TRAIN, statuses=statuses)])
    await settle()
    await node.after(0)
    write_slot(region, busy_ns=10, launches=1)
    assert await node.after(LEAST_SECONDS) == []
    assert await node.after(LEAST_SECONDS) == [TRAIN.uid]


@pytest.mark.parametrize("statuses", [(), (ContainerStatus("main", ContainerState.WAITING),)], ids=["unknown", "waiting"])
async def test_container_that_does_not_run_yet_is_not_idle(node, statuses):
    node.pods.pods_listed([replace(TRAIN, statuses=statuses)])
    await settle()
    await node.commit(grant(ids("0:0"), share(0, 300), of=TRAIN))
    await node.after(0)
    assert await node.after(10 * LEAST_SECONDS) == []


async def test_next_container_with_the_same_ids_begins_again(node):
    one = grant(ids("0:0"), share(0, 300), of=TRAIN)
    await node.commit(one)
    await node.after(0)
    await node.after(LEAST_SECONDS / 2)
    other = pod("other", statuses=RUNNING)
    node.pods.pods_listed([other])
    await settle()
    await node.commit(grant(ids("0:0"), share(0, 300), of=other))
    assert await node.after(LEAST_SECONDS / 2) == []
    assert await node.after(LEAST_SECONDS) == [other.uid]


async def test_gone_pod_is_reported_no_more(node):
    one = grant(ids("0:0"), share(0, 300), of=TRAIN)
    await node.commit(one)
    await node.after(0)
    assert await node.after(LEAST_SECONDS) == [TRAIN.uid]
    await node.manager.release([one])
    assert await node.after(PERIOD_SECONDS) == []
