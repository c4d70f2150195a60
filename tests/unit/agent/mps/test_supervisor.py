# SPDX-License-Identifier: Apache-2.0
import asyncio

import pytest

from agent.core.mps import FAULT
from agent.core.mps_records import DaemonState, SupervisorState
from agent.errors import MpsError, ProcessError, StorageError
from agent.mps.supervisor import FIRST_WAIT_SECONDS, LAST_WAIT_SECONDS, LOOK_SECONDS, MpsSupervisor
from agent.ports.mps import WantedDaemons
from tests.unit.agent.fakes import FakeClock, until
from tests.unit.agent.partitions import FakeMps

GPU, OTHER = "GPU-0", "GPU-1"


class FakeRequests:
    """Requests that a test makes, and what was reported about them."""

    def __init__(self) -> None:
        self.wishes: set[str] = set()
        self.unclear: dict[str, str] = {}
        self.states: dict[str, DaemonState] = {}
        self.unreadable: StorageError | None = None
        self.unwritable: StorageError | None = None
        self.others = 0
        """How often another supervisor is found alive."""
        self.opened: SupervisorState | None = None
        self.closed = False

    def take(self) -> bool:
        self.others -= 1
        return self.others < 0

    def open(self, state: SupervisorState) -> None:
        self.opened = state

    def close(self) -> None:
        self.closed = True

    def wanted(self) -> WantedDaemons:
        if self.unreadable is not None:
            raise self.unreadable
        return WantedDaemons(frozenset(self.wishes), dict(self.unclear))

    def report(self, state: DaemonState) -> None:
        if self.unwritable is not None:
            raise self.unwritable
        self.states[state.device_uuid] = state

    def forget(self, device_uuid: str) -> None:
        self.states.pop(device_uuid, None)


class FakeEnds:
    """Processes that end when the test ends them."""

    def __init__(self) -> None:
        self.watched: dict[int, object] = {}

    def watch(self, pid, tell):
        self.watched[pid] = tell
        return lambda: self.watched.pop(pid, None)


class Harness:
    def __init__(self, trouble: str = "") -> None:
        self.mps, self.requests, self.ends, self.clock = FakeMps(), FakeRequests(), FakeEnds(), FakeClock()
        about = SupervisorState(50, "/host/shm", trouble)
        self.supervisor = MpsSupervisor(about, control=self.mps, requests=self.requests, ends=self.ends, clock=self.clock)

    async def look(self, after: float = 0.0, *wishes: str):
        if wishes:
            self.requests.wishes = set(wishes)
        self.clock.seconds += after
        return await self.supervisor.look()

    def generation(self, device_uuid: str = GPU) -> str:
        return self.requests.states[device_uuid].generation


@pytest.fixture
async def node():
    return Harness()


async def test_requested_daemon_is_started_and_reported(node):
    assert await node.look(0, GPU) == LOOK_SECONDS
    assert node.mps.running == {GPU}
    assert node.requests.states[GPU] == DaemonState(GPU, node.generation(), 101, node.clock.now())
    assert node.generation()
    await node.look(5)
    assert node.mps.calls == [f"start {GPU}"]


async def test_without_requests_no_check_is_needed(node):
    assert await node.look() is None


async def test_daemon_without_request_is_ended(node):
    await node.look(0, GPU, OTHER)
    node.requests.wishes = {OTHER}
    await node.look()
    assert node.mps.running == {OTHER}
    assert list(node.ends.watched) == [node.requests.states[OTHER].pid]
    assert node.requests.states.keys() == {OTHER}


async def test_one_that_died_comes_back_after_a_wait_as_another_generation(node):
    await node.look(0, GPU)
    first = node.generation()
    node.mps.running.clear()
    assert await node.look(60) == FIRST_WAIT_SECONDS
    assert node.requests.states[GPU] == DaemonState(GPU, since=node.clock.now())
    assert node.mps.running == set()
    await node.look(FIRST_WAIT_SECONDS)
    assert node.generation() not in ("", first)
    assert node.requests.states[GPU].pid == 102
    assert list(node.ends.watched) == [102]


async def test_restart_wait_grows_up_to_a_limit(node):
    await node.look(0, GPU)
    waits = []
    for _ in range(10):
        node.mps.running.clear()
        waits.append(await node.look())
        await node.look(LAST_WAIT_SECONDS)
    assert waits[:4] == [0.5, 1.0, 2.0, 4.0]
    assert waits[-1] == LOOK_SECONDS, "the wait is longer than that; it is looked at the others meanwhile"
    node.mps.running.clear()
    assert await node.look(600) == FIRST_WAIT_SECONDS, "it had run for long"


async def test_daemon_that_cannot_start_is_reported_with_reason_and_retried(node):
    node.mps.failure = MpsError("no such driver")
    await node.look(0, GPU)
    assert node.requests.states[GPU].trouble == "no such driver"
    since = node.requests.states[GPU].since
    await node.look(0.1)
    assert node.mps.calls == [f"start {GPU}"]
    await node.look(1)
    assert node.mps.calls == [f"start {GPU}"] * 2
    assert node.requests.states[GPU].since == since
    node.mps.failure = None
    await node.look(10)
    assert (node.requests.states[GPU].trouble, bool(node.generation())) == ("", True)


async def test_rewritten_request_is_served_at_once(node):
    node.mps.failure = MpsError("no such driver")
    for _ in range(8):
        await node.look(LAST_WAIT_SECONDS, GPU)
    node.mps.failure = None
    node.requests.wishes = set()
    await node.look()
    assert node.requests.states == {}
    await node.look(0, GPU)
    assert node.mps.running == {GPU}


async def test_the_end_of_a_daemon_is_a_reason_to_look(node):
    await node.look(0, GPU)
    seen = node.supervisor.changes.count
    node.ends.watched[101]()
    assert node.supervisor.changes.count == seen + 1


async def test_daemon_with_unwatchable_end_is_started_and_reported(node, monkeypatch):
    def refuse(pid, tell):
        raise ProcessError("watching process 101: Function not implemented")

    monkeypatch.setattr(node.ends, "watch", refuse)
    await node.look(0, GPU)
    assert node.generation()


async def test_one_daemon_in_trouble_does_not_keep_the_others_waiting(node):
    node.mps.trim_logs = lambda uuid: (_ for _ in ()).throw(StorageError("no")) if uuid == GPU else node.mps.trimmed.append(uuid)
    for _ in range(2):
        await node.look(0, GPU, OTHER)
    assert node.mps.trimmed == [OTHER]
    assert node.mps.running == {GPU, OTHER}


async def test_a_daemon_that_cannot_be_ended_is_tried_again(node):
    await node.look(0, GPU)
    node.mps.failure = StorageError("reading /proc: Too many open files")
    node.requests.wishes = set()
    assert await node.look() == LOOK_SECONDS
    node.mps.failure = None
    assert await node.look() is None
    assert node.mps.running == set()


async def test_daemon_that_could_not_be_ended_is_reported_again_when_wanted(node):
    await node.look(0, GPU)
    state = node.requests.states[GPU]
    node.mps.failure = StorageError("reading /proc: Too many open files")
    node.requests.wishes = set()
    await node.look()
    node.mps.failure = None
    await node.look(0, GPU)
    assert node.requests.states[GPU] == state


async def test_failed_report_is_repeated_later(node):
    node.requests.unwritable = StorageError("writing: No space left on device")
    await node.look(0, GPU)
    assert node.requests.states == {}
    node.requests.unwritable = None
    await node.look()
    assert node.generation()
    assert node.mps.calls == [f"start {GPU}"]


async def test_unreadable_request_starts_and_ends_no_daemon(node):
    await node.look(0, GPU)
    node.requests.wishes, node.requests.unclear = set(), {GPU: "GPU-0.json: torn", OTHER: "GPU-1.json: torn"}
    await node.look()
    assert node.mps.calls == [f"start {GPU}"]
    assert node.generation()
    assert node.requests.states[OTHER].trouble == "GPU-1.json: torn"
    node.requests.unclear = {}
    await node.look()
    assert node.mps.running == set()
    assert node.requests.states == {}


async def test_daemons_continue_while_requests_cannot_be_listed(node):
    await node.look(0, GPU)
    node.requests.unreadable = StorageError("reading wanted: Input/output error")
    await node.look()
    assert node.mps.calls == [f"start {GPU}"]
    assert node.generation()


async def test_without_the_program_nothing_is_started():
    node = Harness("there is no such program")
    assert await node.look(0, GPU) == LOOK_SECONDS
    assert node.mps.calls == []


async def test_shared_memory_is_cleared_once_after_last_daemon(node):
    await node.look(0, GPU, OTHER)
    node.requests.wishes = {OTHER}
    await node.look()
    assert node.mps.cleared == 0
    node.requests.wishes = set()
    for _ in range(2):
        assert await node.look() is None
    assert node.mps.cleared == 1
    await node.look(0, GPU)
    node.requests.wishes = set()
    await node.look()
    assert node.mps.cleared == 2


async def test_shared_memory_that_cannot_be_emptied_is_tried_again(node):
    node.mps.uncleared = StorageError("removing: Permission denied")
    assert await node.look() == LOOK_SECONDS
    node.mps.uncleared = None
    assert await node.look() is None
    assert node.mps.cleared == 1


async def test_logs_are_trimmed_at_each_look(node):
    for _ in range(3):
        await node.look(0, GPU, OTHER)
    assert sorted(node.mps.trimmed) == [GPU, GPU, OTHER, OTHER]


async def test_a_server_is_ended_that_stays_in_fault(node):
    await node.look(0, GPU)
    node.mps.states = {41: "ACTIVE", 42: FAULT}
    await node.look()
    assert 42 in node.mps.states
    await node.look()
    assert node.mps.states == {41: "ACTIVE"}


async def test_recovered_server_is_not_ended(node):
    await node.look(0, GPU)
    for state in (FAULT, "ACTIVE", FAULT):
        node.mps.states = {42: state}
        await node.look()
    assert node.mps.states == {42: FAULT}


async def test_what_an_earlier_supervisor_left_is_ended_before_the_first_word(node):
    node.mps.running.add(OTHER)
    node.requests.others = 1
    stop = asyncio.Event()
    node.requests.wishes = {GPU}
    running = asyncio.ensure_future(node.supervisor.run(stop))
    await until(lambda: node.mps.running == {GPU})
    assert node.mps.calls[:2] == [f"stop {OTHER}", f"start {GPU}"]
    assert node.requests.opened == SupervisorState(50, "/host/shm", "")
    stop.set()
    node.supervisor.changes.notify()
    await running
    assert node.mps.running == set()
    assert node.requests.states == {}
    assert node.requests.closed


async def test_leftovers_that_cannot_be_ended_are_the_end_of_the_supervisor(node):
    node.mps.running.add(OTHER)
    node.mps.failure = MpsError("Operation not permitted")
    with pytest.raises(MpsError):
        await node.supervisor.run(asyncio.Event())
    assert node.requests.opened is None
