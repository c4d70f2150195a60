# SPDX-License-Identifier: Apache-2.0
import asyncio
from dataclasses import replace

import pytest

from agent.core.mps_records import DaemonRequest, SupervisorState
from agent.errors import MpsError, StorageError
from agent.services import mps_controller
from agent.services.events import EventRecorder
from agent.services.mps_controller import MpsController
from aliquot.contract.model import Isolation
from tests.unit.agent.builders import grant, ids, pod, share
from tests.unit.agent.fakes import Disk, FakeClock, FakeKubeApi, posted_on_pods
from tests.unit.agent.partitions import FakeMpsDaemons

GPU, OTHER = "GPU-0", "GPU-1"


def client(device: int = 0, name: str = "train"):
    return replace(grant(ids(f"{device}:{sum(name.encode())}"), share(device, 1024, 30), of=pod(name)), isolation=Isolation.MPS)


class Harness:
    def __init__(self, base) -> None:
        self.manager = Disk(base).manager()
        self.daemons = FakeMpsDaemons()
        self.restart()

    def restart(self) -> None:
        """Have another agent."""
        self.daemons.left = dict(self.daemons.wishes)
        self.api = FakeKubeApi()
        self.events = EventRecorder(self.api, FakeClock())
        self.controller = MpsController(
            "node-1", self.daemons, "/run/aliquot/mps", manager=self.manager, models=lambda: {GPU: "NVIDIA T4"}, events=self.events
        )

    async def given(self, *grants) -> None:
        self.manager.ledger = self.manager.ledger.adopting(grants)
        for one in grants:
            await self.controller.ensure(one)

    def release(self, *grants) -> None:
        self.manager.ledger = self.manager.ledger.releasing([one.grant_id for one in grants])

    async def reported(self):
        return sorted(event.pod for event in await posted_on_pods(self.events, self.api))

    def families(self):
        return {made.name: list(made.samples) for made in self.controller.families()}


@pytest.fixture
async def node(tmp_path):
    harness = Harness(tmp_path)
    await harness.controller.load()
    return harness


async def test_client_gets_daemon_limits_and_shared_memory_of_its_gpu(node):
    edits = await node.controller.ensure(client())
    assert "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=1024M" in edits["env"]
    assert [mount["hostPath"] for mount in edits["mounts"]] == ["/run/aliquot/mps/GPU-0/pipe", "/host/shm"]
    assert node.daemons.wishes.keys() == {GPU}


async def test_grants_of_other_backends_need_nothing(node):
    assert await node.controller.ensure(grant(ids("0:0"))) == {}
    assert node.daemons.wishes == {}


async def test_request_names_clients_with_their_generation(node):
    one, two = client(), client(name="next")
    await node.given(one, two)
    generation = node.daemons.states[GPU].generation
    assert node.daemons.wishes[GPU] == DaemonRequest(GPU, {one.grant_id: generation, two.grant_id: generation})


async def test_clients_starting_together_get_no_event(node):
    grants = [client(0, f"p{number}") for number in range(5)]
    node.manager.ledger = node.manager.ledger.adopting(grants)
    await asyncio.gather(*(node.controller.ensure(one) for one in grants))
    await node.controller.look()
    assert await node.reported() == []


@pytest.mark.parametrize(
    ("about", "words"),
    [(None, "no aliquot-mps runs on this node"), (SupervisorState(50, "/host/shm", "no such program"), "no such program")],
)
async def test_without_working_supervisor_client_is_refused_with_reason(node, about, words):
    node.daemons.about = about
    with pytest.raises(MpsError, match=words):
        await node.controller.ensure(client())
    assert words in node.controller.trouble
    assert node.daemons.wishes == {}


async def test_supervisor_restart_is_change_identified_by_process(node):
    assert (node.controller.trouble, node.controller.supervisor_pid) == ("", 50)
    seen, node.daemons.about = node.controller.changes.count, None
    await node.controller.look()
    await node.controller.look()
    assert (node.controller.changes.count, node.controller.supervisor_pid) == (seen + 1, None)
    node.daemons.about = SupervisorState(51, "/host/shm")
    await node.controller.look()
    assert (node.controller.trouble, node.controller.supervisor_pid) == ("", 51)


async def test_unreadable_supervisor_report_is_fault_and_ends_no_client(node):
    await node.given(client())
    node.daemons.failure = StorageError("supervisor.json: not a state of aliquot-mps")
    await node.controller.look()
    assert "supervisor.json" in node.controller.trouble
    with pytest.raises(StorageError):
        await node.controller.ensure(client())
    node.restart()
    await node.controller.load()
    assert "supervisor.json" in node.controller.trouble
    assert node.daemons.wishes.keys() == {GPU}


async def test_a_daemon_that_does_not_start_is_the_reason_to_refuse(node):
    node.daemons.trouble = "no MPS here"
    with pytest.raises(MpsError, match="no MPS here"):
        await node.controller.ensure(client())


async def test_wait_for_idle_supervisor_ends(node, monkeypatch):
    monkeypatch.setattr(mps_controller, "START_SECONDS", 0.1)
    node.daemons.restart = lambda _: None
    with pytest.raises(MpsError, match="has not started the MPS daemon of GPU-0 within"):
        await node.controller.ensure(client())


async def test_clients_of_dead_daemon_get_one_event(node):
    await node.given(client(), client(name="next"), client(1, "elsewhere"))
    node.daemons.restart(GPU)
    for _ in range(2):
        await node.controller.look()
    assert await node.reported() == ["next", "train"]
    assert node.families()["aliquot_mps_daemon_restarts_total"] == [(("node-1", GPU, "NVIDIA T4"), 1.0)]


async def test_client_starting_after_daemon_restart_gets_no_event_but_others_do(node):
    await node.given(client(), client(name="next"))
    node.daemons.restart(GPU)
    await node.controller.ensure(client(name="next"))
    await node.controller.look()
    assert await node.reported() == ["train"]


async def test_without_supervisor_or_daemon_no_event_is_sent(node):
    await node.given(client())
    node.daemons.restart(GPU)
    about, node.daemons.about = node.daemons.about, None
    await node.controller.look()
    assert await node.reported() == []
    node.daemons.about, node.daemons.trouble = about, "no driver"
    node.daemons.restart(GPU)
    await node.controller.look()
    assert await node.reported() == []


async def test_new_agent_notifies_clients_of_events_during_its_absence(node):
    await node.given(client(), client(1, "elsewhere"))
    node.restart()
    node.daemons.restart(GPU)
    await node.controller.load()
    await node.controller.look()
    assert await node.reported() == ["train"]
    node.restart()
    await node.controller.load()
    await node.controller.look()
    assert await node.reported() == []


async def test_a_daemon_without_clients_is_wanted_no_more(node):
    one, two = client(), client(name="next")
    await node.given(one, two)
    node.release(one)
    await node.controller.look()
    assert node.daemons.wishes[GPU].clients.keys() == {two.grant_id}
    node.release(two)
    await node.controller.look()
    assert node.daemons.wishes == {}


async def test_unneeded_request_of_earlier_agent_is_withdrawn(node):
    node.daemons.wishes[OTHER] = DaemonRequest(OTHER)
    await node.controller.look()
    assert node.daemons.wishes == {}


async def test_correct_requests_are_not_rewritten(node):
    await node.given(client())
    writes = node.daemons.writes
    await node.controller.look()
    assert node.daemons.writes == writes


@pytest.mark.parametrize("damaged", [True, False])
async def test_lost_or_unreadable_request_is_rewritten(node, damaged):
    await node.given(client())
    lost = node.daemons.wishes.pop(GPU)
    node.restart()
    if damaged:  # there, and not among what can be read
        node.daemons.wishes[GPU] = lost
    await node.controller.load()
    writes = node.daemons.writes
    await node.controller.look()
    assert node.daemons.writes == writes + 1
    assert node.daemons.wishes.keys() == {GPU}


class TestUnserved:
    async def test_clients_are_served_by_the_daemon_they_started_with(self, node):
        await node.given(client(), client(1, "elsewhere"))
        await node.controller.look()
        assert node.controller.unserved == set()

    async def test_client_is_refused_without_supervisor_or_with_unreadable_report(self, node):
        one, two = client(), client(1, "elsewhere")
        await node.given(one, two)
        about, node.daemons.about = node.daemons.about, None
        await node.controller.look()
        assert node.controller.unserved == {one.grant_id, two.grant_id}
        node.daemons.about = about
        await node.controller.look()
        assert node.controller.unserved == set()
        node.daemons.failure = StorageError("supervisor.json: not a state of aliquot-mps")
        await node.controller.look()
        assert node.controller.unserved == {one.grant_id, two.grant_id}

    async def test_stopped_daemon_refuses_its_clients_but_not_those_of_others(self, node):
        one = client()
        await node.given(one, client(1, "elsewhere"))
        node.daemons.trouble = "no driver"
        node.daemons.restart(GPU)
        await node.controller.look()
        assert node.controller.unserved == {one.grant_id}

    async def test_client_of_earlier_daemon_is_refused_until_restart(self, node):
        one, two = client(), client(name="next")
        await node.given(one, two)
        node.daemons.restart(GPU)
        for _ in range(2):
            await node.controller.look()
        assert node.controller.unserved == {one.grant_id, two.grant_id}
        await node.controller.ensure(one)
        assert node.controller.unserved == {two.grant_id}
        node.release(two)
        await node.controller.look()
        assert node.controller.unserved == set()

    async def test_another_agent_knows_of_it(self, node):
        one = client()
        await node.given(one, client(1, "elsewhere"))
        node.daemons.restart(GPU)
        await node.controller.look()
        node.restart()
        await node.controller.load()
        await node.controller.look()
        assert node.controller.unserved == {one.grant_id}
        assert await node.reported() == []


async def test_metrics_report_supervisor_when_it_or_clients_exist(node):
    assert node.families()["aliquot_mps_supervisor_up"] == [(("node-1",), 1.0)]
    await node.given(client())
    node.daemons.about = None
    await node.controller.look()
    assert node.families()["aliquot_mps_supervisor_up"] == [(("node-1",), 0.0)]
    node.release(client())
    await node.controller.look()
    assert "aliquot_mps_supervisor_up" not in node.families()
