import asyncio
from dataclasses import replace

import pytest

from agent.core.mps_records import SupervisorState, Wish
from agent.errors import MpsError, StorageError
from agent.services import mps_keeper
from agent.services.events import EventRecorder
from agent.services.mps_keeper import MpsKeeper
from proto.model import Isolation
from tests.unit.agent.builders import grant, ids, pod, share
from tests.unit.agent.fakes import Disk, FakeClock, FakeKubeApi, posted
from tests.unit.agent.partitions import FakeMpsDaemons

GPU, OTHER = "GPU-0", "GPU-1"


def client(device: int = 0, name: str = "train"):
    return replace(grant(ids(f"{device}:{sum(name.encode())}"), share(device, 1024, 30), of=pod(name)), isolation=Isolation.MPS)


class Harness:
    def __init__(self, base) -> None:
        self.book = Disk(base).book()
        self.daemons = FakeMpsDaemons()
        self.restart()

    def restart(self) -> None:
        """Have another agent."""
        self.daemons.left = dict(self.daemons.wishes)
        self.api = FakeKubeApi()
        self.events = EventRecorder(self.api, FakeClock())
        self.keeper = MpsKeeper(
            "node-1", self.daemons, "/run/aliquot/mps", book=self.book, models=lambda: {GPU: "NVIDIA T4"}, events=self.events
        )

    async def given(self, *grants) -> None:
        self.book.ledger = self.book.ledger.adopting(grants)
        for one in grants:
            await self.keeper.ensure(one)

    def release(self, *grants) -> None:
        self.book.ledger = self.book.ledger.releasing([one.grant_id for one in grants])

    async def told(self):
        return sorted(event.pod for event in await posted(self.events, self.api))

    def families(self):
        return {made.name: list(made.samples) for made in self.keeper.families()}


@pytest.fixture
async def node(tmp_path):
    harness = Harness(tmp_path)
    await harness.keeper.load()
    return harness


async def test_a_client_gets_the_daemon_of_its_gpu_its_limits_and_the_shared_memory(node):
    edits = await node.keeper.ensure(client())
    assert "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=1024M" in edits["env"]
    assert [mount["hostPath"] for mount in edits["mounts"]] == ["/run/aliquot/mps/GPU-0/pipe", "/host/shm"]
    assert node.daemons.wishes.keys() == {GPU}


async def test_grants_of_other_backends_need_nothing(node):
    assert await node.keeper.ensure(grant(ids("0:0"))) == {}
    assert node.daemons.wishes == {}


async def test_the_wish_names_clients_with_the_generation_each_was_given(node):
    one, two = client(), client(name="next")
    await node.given(one, two)
    generation = node.daemons.states[GPU].generation
    assert node.daemons.wishes[GPU] == Wish(GPU, {one.grant_id: generation, two.grant_id: generation})


async def test_clients_that_start_together_are_told_of_nothing(node):
    grants = [client(0, f"p{number}") for number in range(5)]
    node.book.ledger = node.book.ledger.adopting(grants)
    await asyncio.gather(*(node.keeper.ensure(one) for one in grants))
    await node.keeper.look()
    assert await node.told() == []


@pytest.mark.parametrize(
    ("about", "words"),
    [(None, "no aliquot-mps runs on this node"), (SupervisorState(50, "/host/shm", "no such program"), "no such program")],
)
async def test_without_a_supervisor_that_can_start_one_a_client_is_refused_with_the_reason(node, about, words):
    node.daemons.about = about
    with pytest.raises(MpsError, match=words):
        await node.keeper.ensure(client())
    assert words in node.keeper.trouble
    assert node.daemons.wishes == {}


async def test_a_supervisor_that_comes_and_goes_is_a_change_and_known_by_its_process(node):
    assert (node.keeper.trouble, node.keeper.supervisor_pid) == ("", 50)
    seen, node.daemons.about = node.keeper.changes.count, None
    await node.keeper.look()
    await node.keeper.look()
    assert (node.keeper.changes.count, node.keeper.supervisor_pid) == (seen + 1, None)
    node.daemons.about = SupervisorState(51, "/host/shm")
    await node.keeper.look()
    assert (node.keeper.trouble, node.keeper.supervisor_pid) == ("", 51)


async def test_what_a_supervisor_says_that_cannot_be_read_is_trouble_and_ends_nothing(node):
    await node.given(client())
    node.daemons.failure = StorageError("supervisor.json: not a state of aliquot-mps")
    await node.keeper.look()
    assert "supervisor.json" in node.keeper.trouble
    with pytest.raises(StorageError):
        await node.keeper.ensure(client())
    node.restart()
    await node.keeper.load()
    assert "supervisor.json" in node.keeper.trouble
    assert node.daemons.wishes.keys() == {GPU}


async def test_a_daemon_that_does_not_start_is_the_reason_to_refuse(node):
    node.daemons.trouble = "no MPS here"
    with pytest.raises(MpsError, match="no MPS here"):
        await node.keeper.ensure(client())


async def test_a_supervisor_that_does_nothing_is_not_waited_for_for_ever(node, monkeypatch):
    monkeypatch.setattr(mps_keeper, "START_SECONDS", 0.1)
    node.daemons.restart = lambda _: None
    with pytest.raises(MpsError, match="has not started the MPS daemon of GPU-0 within"):
        await node.keeper.ensure(client())


async def test_clients_of_a_daemon_that_died_are_told_once(node):
    await node.given(client(), client(name="next"), client(1, "elsewhere"))
    node.daemons.restart(GPU)
    for _ in range(2):
        await node.keeper.look()
    assert await node.told() == ["next", "train"]
    assert node.families()["aliquot_mps_daemon_restarts_total"] == [(("node-1", GPU, "NVIDIA T4"), 1.0)]


async def test_one_that_starts_as_the_first_after_it_is_not_told_and_the_others_are(node):
    await node.given(client(), client(name="next"))
    node.daemons.restart(GPU)
    await node.keeper.ensure(client(name="next"))
    await node.keeper.look()
    assert await node.told() == ["train"]


async def test_nothing_is_told_while_no_supervisor_lives_or_no_daemon_runs(node):
    await node.given(client())
    node.daemons.restart(GPU)
    about, node.daemons.about = node.daemons.about, None
    await node.keeper.look()
    assert await node.told() == []
    node.daemons.about, node.daemons.trouble = about, "no driver"
    node.daemons.restart(GPU)
    await node.keeper.look()
    assert await node.told() == []


async def test_another_agent_tells_clients_what_happened_while_none_was_there(node):
    await node.given(client(), client(1, "elsewhere"))
    node.restart()
    node.daemons.restart(GPU)
    await node.keeper.load()
    await node.keeper.look()
    assert await node.told() == ["train"]
    node.restart()
    await node.keeper.load()
    await node.keeper.look()
    assert await node.told() == []


async def test_a_daemon_without_clients_is_wanted_no_more(node):
    one, two = client(), client(name="next")
    await node.given(one, two)
    node.release(one)
    await node.keeper.look()
    assert node.daemons.wishes[GPU].clients.keys() == {two.grant_id}
    node.release(two)
    await node.keeper.look()
    assert node.daemons.wishes == {}


async def test_a_wish_of_an_earlier_agent_that_nobody_needs_is_withdrawn(node):
    node.daemons.wishes[OTHER] = Wish(OTHER)
    await node.keeper.look()
    assert node.daemons.wishes == {}


async def test_wishes_that_are_right_are_not_written_again(node):
    await node.given(client())
    writes = node.daemons.writes
    await node.keeper.look()
    assert node.daemons.writes == writes


@pytest.mark.parametrize("damaged", [True, False])
async def test_a_wish_that_is_lost_or_cannot_be_read_is_written_anew(node, damaged):
    await node.given(client())
    lost = node.daemons.wishes.pop(GPU)
    node.restart()
    if damaged:  # there, and not among what can be read
        node.daemons.wishes[GPU] = lost
    await node.keeper.load()
    writes = node.daemons.writes
    await node.keeper.look()
    assert node.daemons.writes == writes + 1
    assert node.daemons.wishes.keys() == {GPU}


class TestUnserved:
    async def test_clients_are_served_by_the_daemon_they_started_with(self, node):
        await node.given(client(), client(1, "elsewhere"))
        await node.keeper.look()
        assert node.keeper.unserved == set()

    async def test_no_client_is_served_without_a_supervisor_or_while_what_it_says_cannot_be_read(self, node):
        one, two = client(), client(1, "elsewhere")
        await node.given(one, two)
        about, node.daemons.about = node.daemons.about, None
        await node.keeper.look()
        assert node.keeper.unserved == {one.grant_id, two.grant_id}
        node.daemons.about = about
        await node.keeper.look()
        assert node.keeper.unserved == set()
        node.daemons.failure = StorageError("supervisor.json: not a state of aliquot-mps")
        await node.keeper.look()
        assert node.keeper.unserved == {one.grant_id, two.grant_id}

    async def test_while_a_daemon_does_not_run_its_clients_are_not_served_and_those_of_others_are(self, node):
        one = client()
        await node.given(one, client(1, "elsewhere"))
        node.daemons.trouble = "no driver"
        node.daemons.restart(GPU)
        await node.keeper.look()
        assert node.keeper.unserved == {one.grant_id}

    async def test_a_client_of_an_earlier_daemon_is_not_served_until_it_starts_anew(self, node):
        one, two = client(), client(name="next")
        await node.given(one, two)
        node.daemons.restart(GPU)
        for _ in range(2):
            await node.keeper.look()
        assert node.keeper.unserved == {one.grant_id, two.grant_id}
        await node.keeper.ensure(one)
        assert node.keeper.unserved == {two.grant_id}
        node.release(two)
        await node.keeper.look()
        assert node.keeper.unserved == set()

    async def test_another_agent_knows_of_it(self, node):
        one = client()
        await node.given(one, client(1, "elsewhere"))
        node.daemons.restart(GPU)
        await node.keeper.look()
        node.restart()
        await node.keeper.load()
        await node.keeper.look()
        assert node.keeper.unserved == {one.grant_id}
        assert await node.told() == []


async def test_metrics_say_whether_there_is_a_supervisor_where_one_is_or_clients_are(node):
    assert node.families()["aliquot_mps_supervisor_up"] == [(("node-1",), 1.0)]
    await node.given(client())
    node.daemons.about = None
    await node.keeper.look()
    assert node.families()["aliquot_mps_supervisor_up"] == [(("node-1",), 0.0)]
    node.release(client())
    await node.keeper.look()
    assert "aliquot_mps_supervisor_up" not in node.families()
