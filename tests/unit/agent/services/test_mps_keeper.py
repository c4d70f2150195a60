import asyncio
from dataclasses import replace

import pytest

from agent.core.mps import FAULT
from agent.errors import MpsError, StorageError
from agent.services.events import EventRecorder
from agent.services.mps_keeper import MpsKeeper
from proto import contract
from proto.model import Isolation
from tests.unit.agent.builders import grant, ids, pod, share
from tests.unit.agent.fakes import Disk, FakeClock, FakeKubeApi, posted
from tests.unit.agent.partitions import FakeMps


def client(device: int = 0, name: str = "train"):
    return replace(grant(ids(f"{device}:0"), share(device, 1024, 30), of=pod(name)), isolation=Isolation.MPS)


class Harness:
    def __init__(self, base) -> None:
        self.book = Disk(base).book()
        self.mps = FakeMps()
        self.api = FakeKubeApi()
        self.events = EventRecorder(self.api, FakeClock())
        self.keeper = MpsKeeper(self.mps, "/host/shm", book=self.book, events=self.events)

    def promise(self, *grants) -> None:
        self.book.ledger = self.book.ledger.adopting(grants)

    def release(self, *grants) -> None:
        self.book.ledger = self.book.ledger.releasing([one.grant_id for one in grants])

    async def posted(self):
        return [(event.pod, event.reason) for event in await posted(self.events, self.api)]


@pytest.fixture
async def node(tmp_path):
    return Harness(tmp_path)


async def test_the_first_client_of_a_gpu_starts_its_daemon_and_the_next_finds_it(node):
    edits = await node.keeper.ensure(client())
    await node.keeper.ensure(client(name="next"))
    assert node.mps.calls == ["start GPU-0"]
    assert "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=1024M" in edits["env"]
    assert edits["mounts"][0]["hostPath"] == "/run/aliquot/mps/GPU-0/pipe"


async def test_each_gpu_has_its_own_daemon(node):
    await asyncio.gather(node.keeper.ensure(client(0)), node.keeper.ensure(client(1, "next")))
    assert node.mps.running == {"GPU-0", "GPU-1"}


async def test_clients_that_start_together_start_one_daemon(node):
    await asyncio.gather(*(node.keeper.ensure(client(0, f"p{number}")) for number in range(5)))
    assert node.mps.calls == ["start GPU-0"]


async def test_grants_of_other_backends_need_nothing(node):
    assert await node.keeper.ensure(grant(ids("0:0"))) == {}
    assert node.mps.calls == []


async def test_a_daemon_that_does_not_start_is_the_reason_to_refuse(node):
    node.mps.failure = MpsError("no such program")
    with pytest.raises(MpsError):
        await node.keeper.ensure(client())


async def test_a_daemon_that_died_is_started_again_and_its_clients_are_told(node):
    node.promise(client())
    await node.keeper.ensure(client())
    node.mps.running.clear()
    assert await node.keeper.look() is True
    assert node.mps.running == {"GPU-0"}
    assert await node.posted() == [("train", contract.EVENT_REASON_MPS_RESTARTED)]


async def test_a_daemon_that_answers_is_left_alone(node):
    node.promise(client())
    await node.keeper.ensure(client())
    await node.keeper.look()
    assert node.mps.calls == ["start GPU-0"]


async def test_logs_are_trimmed_at_each_look(node):
    node.promise(client(0), client(1, "next"))
    for _ in range(2):
        await node.keeper.look()
    assert sorted(node.mps.trimmed) == ["GPU-0", "GPU-0", "GPU-1", "GPU-1"]


async def test_a_log_that_cannot_be_trimmed_keeps_nothing_else_from_being_done(node):
    node.promise(client())
    node.mps.untrimmed = StorageError("emptying control.log: Permission denied")
    await node.keeper.look()
    assert node.mps.running == {"GPU-0"}


async def test_a_daemon_without_clients_is_ended(node):
    node.promise(client())
    await node.keeper.ensure(client())
    node.release(client())
    assert await node.keeper.look() is False
    assert node.mps.running == set()


async def test_a_daemon_that_another_agent_left_is_ended_when_nobody_needs_it(node):
    node.mps.running.add("GPU-1")
    await node.keeper.look()
    assert node.mps.calls == ["stop GPU-1"]


async def test_shared_memory_is_emptied_when_the_last_client_of_the_node_is_gone(node):
    one, other = client(0), client(1, "next")
    node.promise(one, other)
    await node.keeper.look()
    node.release(one)
    await node.keeper.look()
    assert node.mps.cleared == 0
    node.release(other)
    await node.keeper.look()
    assert node.mps.cleared == 1


async def test_shared_memory_stays_for_a_client_that_came_while_the_last_daemon_was_ended(node):
    node.mps.running.add("GPU-1")
    stop = node.mps.stop

    def stop_slowly(device_uuid):
        stop(device_uuid)
        node.promise(client())

    node.mps.stop = stop_slowly
    await node.keeper.look()
    assert node.mps.cleared == 0


async def test_a_server_is_ended_that_stays_in_fault(node):
    node.promise(client())
    await node.keeper.ensure(client())
    node.mps.states = {41: "ACTIVE", 42: FAULT}
    await node.keeper.look()
    assert 42 in node.mps.states
    await node.keeper.look()
    assert node.mps.states == {41: "ACTIVE"}


async def test_a_server_that_recovers_by_itself_is_left_alone(node):
    node.promise(client())
    await node.keeper.ensure(client())
    for state in (FAULT, "ACTIVE", FAULT):
        node.mps.states = {42: state}
        await node.keeper.look()
    assert node.mps.states == {42: FAULT}


async def test_one_daemon_in_trouble_does_not_keep_the_others_waiting(node):
    node.promise(client(0), client(1, "next"))
    node.mps.failure = MpsError("no")
    assert await node.keeper.look() is True
    node.mps.failure = None
    await node.keeper.look()
    assert node.mps.running == {"GPU-0", "GPU-1"}


async def test_a_daemon_that_cannot_be_ended_is_tried_again(node):
    node.mps.running.add("GPU-1")
    node.mps.failure = StorageError("reading /proc: Too many open files")
    assert await node.keeper.look() is True
    node.mps.failure = None
    assert await node.keeper.look() is False
    assert node.mps.running == set()


async def test_daemons_are_kept_while_their_directories_cannot_be_listed(node):
    node.promise(client())
    node.mps.unlisted = StorageError("reading /run/aliquot/mps: Input/output error")
    assert await node.keeper.look() is True
    assert node.mps.running == {"GPU-0"}


async def test_without_clients_unreadable_directories_are_looked_at_again(node):
    node.mps.unlisted = StorageError("reading /run/aliquot/mps: Input/output error")
    assert await node.keeper.look() is True
