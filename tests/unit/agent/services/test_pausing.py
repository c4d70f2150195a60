# SPDX-License-Identifier: Apache-2.0
import asyncio
from dataclasses import replace

import pytest

from agent.core.limits import FailPolicy, limits_of
from agent.core.planning import Planned
from agent.errors import StorageError
from agent.services import pausing
from agent.services.events import EventRecorder
from agent.services.pausing import Pauser
from agent.services.pod_cache import PodCache
from aliquot import contract
from aliquot.contract.features import FeatureGates
from aliquot.contract.model import Isolation, Preferences
from tests.unit.agent.builders import BOOT, grant, ids, inventory, pod, share
from tests.unit.agent.claim_builders import claim_grant
from tests.unit.agent.fakes import Disk, FakeClock, FakeKubeApi, posted_on_pods, settle, until

TWO_GPUS = grant(ids("0:0", "1:0"), share(0), share(1))
BESIDE = grant(ids("0:1"), container="beside")
OTHER = grant(ids("0:2"), of=pod("other"))
MPS = replace(grant(ids("1:1"), share(1), of=pod("client")), isolation=Isolation.MPS)


def annotated(value: str | None = None, name: str = "train"):
    return pod(name, annotations={} if value is None else {contract.ANNOTATION_PAUSED: value})


class Harness:
    def __init__(self, base) -> None:
        self.disk = Disk(base)
        self.manager = self.disk.manager()
        self.pods = PodCache()
        self.api = FakeKubeApi()
        self.events = EventRecorder(self.api, FakeClock())
        self.pauser = Pauser(manager=self.manager, pods=self.pods, files=self.disk.files, events=self.events)

    async def granted(self, *grants, paused=False) -> None:
        preferences = Preferences(paused=paused)
        for one in grants:
            limits = limits_of(one, FailPolicy.CLOSED, preferences)
            await self.manager.commit(Planned(one, (), preferences), limits, dict, inventory(), 16)

    async def know(self, *pods) -> None:
        self.pods.pods_listed(pods)
        await settle()

    def paused(self, *grants) -> list[bool]:
        """What the limits of the grants say, device by device."""
        return [device.paused for one in grants for device in self.disk.files.limits(one.grant_id).devices]

    async def reported(self) -> list[tuple[str, str, str, bool]]:
        return [(event.pod, event.container, event.reason, event.warning) for event in await posted_on_pods(self.events, self.api)]


@pytest.fixture
async def node(tmp_path):
    return Harness(tmp_path)


async def test_closed_gate_resumes_and_names_itself_in_an_event(node):
    await node.granted(TWO_GPUS, paused=True)
    await node.know(annotated("true"))
    node.pauser = Pauser(manager=node.manager, pods=node.pods, files=node.disk.files, events=node.events, gates=FeatureGates())
    await node.pauser.follow()
    assert node.paused(TWO_GPUS) == [False, False]
    messages = {event.reason: event.message for event in await posted_on_pods(node.events, node.api)}
    assert "set featureGates: Pausing=true" in messages[contract.EVENT_REASON_PAUSE_IGNORED]


async def test_all_containers_of_a_pod_follow_its_annotation_on_all_their_devices(node):
    await node.granted(TWO_GPUS, BESIDE, OTHER)
    await node.know(annotated("true"), annotated(name="other"))
    assert await node.pauser.follow()
    assert (node.paused(TWO_GPUS, BESIDE), node.paused(OTHER)) == ([True] * 3, [False])
    await node.know(annotated("false"), annotated(name="other"))
    assert await node.pauser.follow()
    assert node.paused(TWO_GPUS, BESIDE) == [False] * 3
    reasons = (contract.EVENT_REASON_PAUSED, contract.EVENT_REASON_RESUMED)
    assert await node.reported() == [("train", container, reason, False) for reason in reasons for container in ("main", "beside")]


async def test_correct_state_is_neither_rewritten_nor_reported(node):
    await node.granted(TWO_GPUS, paused=True)
    await node.know(annotated("true"))
    written = node.manager.changes.count
    assert await node.pauser.follow()
    assert node.manager.changes.count == written
    assert await node.reported() == []


async def test_limits_of_unknown_pod_stay_unchanged(node):
    await node.granted(TWO_GPUS, paused=True)
    assert await node.pauser.follow()
    assert node.paused(TWO_GPUS) == [True, True]
    await node.know(annotated())
    assert await node.pauser.follow()
    assert node.paused(TWO_GPUS) == [False, False]


async def test_nothing_is_read_while_neither_annotations_nor_files_change(node, monkeypatch):
    await node.granted(TWO_GPUS)
    await node.know(annotated())
    assert await node.pauser.follow()
    monkeypatch.setattr(node.disk.files, "limits", lambda grant_id: pytest.fail(f"{grant_id} is looked at"))
    await node.know(annotated(), pod("another"))
    assert await node.pauser.follow()


async def test_limits_written_meanwhile_without_pause_receive_it(node):
    """As when a container starts with what its annotation said a moment ago."""
    await node.granted(TWO_GPUS)
    await node.know(annotated("true"))
    assert await node.pauser.follow()
    await node.granted(TWO_GPUS)
    assert node.paused(TWO_GPUS) == [False, False]
    assert await node.pauser.follow()
    assert node.paused(TWO_GPUS) == [True, True]


async def test_invalid_value_keeps_pause_and_is_reported_once(node, caplog):
    await node.granted(TWO_GPUS, paused=True)
    await node.granted(OTHER)
    for other in (None, "true", "false"):
        await node.know(annotated("maybe"), annotated(other, "other"))
        assert await node.pauser.follow()
    assert node.paused(TWO_GPUS) == [True, True]
    (event,) = [event for event in await posted_on_pods(node.events, node.api) if event.pod == "train"]
    assert (event.reason, event.warning) == (contract.EVENT_REASON_PAUSE_IGNORED, True)
    assert "expected true or false, found 'maybe'" in event.message
    assert caplog.text.count("expected true or false, found 'maybe'") == 1


async def test_pod_without_shim_gets_event_that_it_is_not_paused(node):
    node.manager.ledger = node.manager.ledger.adopting([MPS])
    await node.know(annotated("true", "client"))
    assert await node.pauser.follow()
    assert await node.reported() == [("client", "main", contract.EVENT_REASON_PAUSE_IGNORED, True)]
    await node.know(annotated("false", "client"))
    assert await node.pauser.follow()
    assert len(await node.reported()) == 1


async def test_unwritable_limits_delay_no_other_pod_and_are_retried(node, monkeypatch, caplog):
    await node.granted(TWO_GPUS, OTHER)
    await node.know(annotated("true"), annotated("true", "other"))
    amend = node.disk.files.amend_limits

    def failing(grant_id, change):
        if grant_id == TWO_GPUS.grant_id:
            raise StorageError("the disk is read-only")
        return amend(grant_id, change)

    with monkeypatch.context() as patched:
        patched.setattr(node.disk.files, "amend_limits", failing)
        patched.setattr(pausing, "RETRY_SECONDS", 0.01)
        assert not await node.pauser.follow()
        assert (node.paused(TWO_GPUS), node.paused(OTHER)) == ([False, False], [True])
        assert "not paused yet: the disk is read-only" in caplog.text
        running = asyncio.ensure_future(node.pauser.run())
        await until(lambda: caplog.text.count("not paused yet") > 2)
    await until(lambda: node.paused(TWO_GPUS) == [True, True])
    running.cancel()


async def test_the_loop_follows_pods_and_files_and_a_restart_of_the_agent(node, tmp_path):
    running = asyncio.ensure_future(node.pauser.run())
    await node.know(annotated("true"))
    await node.granted(TWO_GPUS)
    await until(lambda: node.paused(TWO_GPUS) == [True, True])
    node.pods.pod_changed(annotated())
    await until(lambda: node.paused(TWO_GPUS) == [False, False])
    node.pods.pod_changed(annotated("true"))
    await until(lambda: node.paused(TWO_GPUS) == [True, True])
    running.cancel()
    later = Harness(tmp_path)
    later.manager.load(BOOT)
    running = asyncio.ensure_future(later.pauser.run())
    await asyncio.sleep(0.05)
    assert later.paused(TWO_GPUS) == [True, True]
    await later.know(annotated())
    await until(lambda: later.paused(TWO_GPUS) == [False, False])
    running.cancel()


async def test_annotation_of_one_pod_does_not_pause_claim_of_several(node):
    of_claim = claim_grant("shared", share(0, 10), of=pod("train"))
    await node.granted(of_claim)
    await node.know(annotated("true"))
    await node.pauser.follow()
    assert node.paused(of_claim) == [False]
