# SPDX-License-Identifier: Apache-2.0
"""How devices enter containers: what is read from the node's disk, and how often."""

import asyncio
import json
from dataclasses import replace

import pytest

from agent.core.injection import DeviceInjection
from agent.ports.kube import NodeState
from agent.services import injection as module
from agent.services.driver_watch import DriverWatch
from agent.services.injection import LOOK_SECONDS, Injection
from agent.services.pod_cache import PodCache
from aliquot import contract
from tests.unit.agent.builders import VGPU, gpu, reading
from tests.unit.agent.fakes import Disk, FakeClock, FakeDriver, make_injection, settle, until

OLD_CONTAINERD = NodeState("node-uid", {}, {}, runtime_version="containerd://1.7.27", kubelet_version="v1.34.1")
"""It can inject by CDI, and does so only where somebody has set it up: the host's spec is the sign."""
HOST_SPEC = {"cdiVersion": "0.6.0", "kind": contract.NVIDIA_CDI_KIND, "devices": [{"name": "all", "containerEdits": {}}]}


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
async def disk(tmp_path) -> Disk:
    return Disk(tmp_path)


@pytest.fixture
async def pods() -> PodCache:
    known = PodCache()
    known.node_changed(OLD_CONTAINERD)
    return known


@pytest.fixture
async def injection(disk, clock, pods) -> Injection:
    return make_injection(disk.manager(), disk, pods, DriverWatch(FakeDriver(reading(gpu(0))), 1.0), DeviceInjection.AUTO, clock)


def write_host_spec(disk: Disk) -> None:
    directory = disk.base / "etc-cdi"
    directory.mkdir(exist_ok=True)
    (directory / "nvidia.json").write_text(json.dumps(HOST_SPEC))


async def test_a_spec_that_appears_on_the_host_is_seen_after_a_second(injection, disk, clock):
    assert not await injection.by_cdi()
    write_host_spec(disk)
    clock.seconds += LOOK_SECONDS / 2
    assert not await injection.by_cdi()
    clock.seconds += LOOK_SECONDS / 2
    assert await injection.by_cdi()


async def test_restarting_runtime_keeps_its_known_version(injection, disk, pods):
    """Kubelet cannot get the runtime's version then, and reports this in the Node object until its next look."""
    write_host_spec(disk)
    assert await injection.by_cdi()
    pods.node_changed(replace(OLD_CONTAINERD, runtime_version="containerd://Unknown"))
    await settle()
    assert await injection.by_cdi()


async def test_a_hundred_containers_in_a_second_are_one_look_at_the_disk(injection, disk, clock, monkeypatch):
    write_host_spec(disk)
    looks = []
    has_host_spec = disk.cdi.has_host_spec

    def counted() -> bool:
        looks.append(clock.seconds)
        return has_host_spec()

    monkeypatch.setattr(disk.cdi, "has_host_spec", counted)
    assert all([await injection.by_cdi() for _ in range(100)])
    assert len(looks) == 1


async def test_every_reply_with_name_hides_gpus_from_runtime_ignoring_names(injection, disk):
    write_host_spec(disk)
    answer = await injection.answer(VGPU, frozenset(["GPU-0::0"]), "grant")
    assert answer.cdi_name
    assert answer.env == {contract.ENV_NVIDIA_VISIBLE_DEVICES: contract.NO_VISIBLE_DEVICES}


async def test_sign_found_only_in_spec_is_logged_once(injection, disk, caplog):
    write_host_spec(disk)
    for _ in range(2):
        assert await injection.by_cdi()
    assert [record.levelname for record in caplog.records if "enable_cdi = true" in record.getMessage()] == ["WARNING"]


async def test_runtime_with_known_version_gives_no_warning(injection, disk, pods, caplog):
    pods.node_changed(replace(OLD_CONTAINERD, runtime_version="containerd://2.1.4"))
    await settle()
    write_host_spec(disk)
    assert await injection.by_cdi()
    assert "enable_cdi" not in caplog.text


class TestWhatIsKept:
    """An agent may start while the API is down, and what it answers then holds for as long as the pods live."""

    def life(self, disk: Disk, pods: PodCache, mode: DeviceInjection = DeviceInjection.AUTO) -> Injection:
        """Return what an agent that starts now has."""
        injection = make_injection(disk.manager(), disk, pods, DriverWatch(FakeDriver(reading(gpu(0))), 1.0), mode)
        injection.load()
        return injection

    async def test_a_node_that_was_never_heard_of_is_waited_for(self, disk):
        pods = PodCache()
        injection = self.life(disk, pods)
        assert "waiting for the Node object" in injection.trouble
        pods.node_changed(replace(OLD_CONTAINERD, runtime_version="containerd://Unknown"))
        await settle()
        assert injection.trouble
        pods.node_changed(OLD_CONTAINERD)
        await settle()
        assert injection.trouble == ""

    @pytest.mark.parametrize("mode", [DeviceInjection.CDI, DeviceInjection.LEGACY])
    async def test_configured_injection_causes_no_wait(self, disk, mode):
        assert self.life(disk, PodCache(), mode).trouble == ""

    async def test_the_next_agent_knows_the_node_before_the_api_answers(self, disk, pods):
        injection = self.life(disk, pods)
        running = asyncio.ensure_future(injection.run())
        await until(lambda: disk.versions.load().runtime == "containerd://1.7.27")
        pods.node_changed(replace(OLD_CONTAINERD, runtime_version="containerd://1.7.28"))
        await until(lambda: disk.versions.load().runtime == "containerd://1.7.28")
        running.cancel()
        after = self.life(disk, PodCache())
        assert after.trouble == ""
        assert not await after.by_cdi()

    async def test_damaged_record_counts_as_missing(self, disk, caplog):
        (disk.base / "state/node-versions").write_text("{}")
        assert self.life(disk, PodCache()).trouble
        assert "not a record of a node's versions" in caplog.text

    async def test_a_disk_that_fails_is_tried_again(self, disk, pods, monkeypatch, caplog):
        monkeypatch.setattr(module, "SAVE_AGAIN_SECONDS", 0.01)
        (disk.base / "state/node-versions").mkdir()
        injection = make_injection(disk.manager(), disk, pods, DriverWatch(FakeDriver(reading(gpu(0))), 1.0), DeviceInjection.AUTO)
        running = asyncio.ensure_future(injection.run())
        await until(lambda: "versions of kubelet and runtime not saved" in caplog.text)
        (disk.base / "state/node-versions").rmdir()
        await until(lambda: (disk.base / "state/node-versions").is_file())
        running.cancel()
