"""How devices enter containers: what the node's disk is asked, and how often."""

import json
from dataclasses import replace

import pytest

from agent.core.injection import DeviceInjection
from agent.ports import NodeState
from agent.services.driver_watch import DriverWatch
from agent.services.injection import LOOK_SECONDS, Injection
from agent.services.pod_cache import PodCache
from proto import contract
from tests.unit.agent.builders import VGPU, gpu, reading
from tests.unit.agent.fakes import Disk, FakeClock, FakeDriver, make_injection, settle

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
    return make_injection(disk.book(), disk, pods, DriverWatch(FakeDriver(reading(gpu(0))), 1.0), DeviceInjection.AUTO, clock)


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


async def test_a_runtime_that_is_being_restarted_is_what_it_was(injection, disk, pods):
    """Kubelet cannot ask it for its version then, and says so in the Node object until its next look."""
    write_host_spec(disk)
    assert await injection.by_cdi()
    pods.node_changed(replace(OLD_CONTAINERD, runtime_version="containerd://Unknown"))
    await settle()
    assert await injection.by_cdi()


async def test_a_hundred_containers_in_a_second_are_one_look_at_the_disk(injection, disk, clock, monkeypatch):
    write_host_spec(disk)
    looks = []
    has_host_spec = disk.cdi.has_host_spec
    monkeypatch.setattr(disk.cdi, "has_host_spec", lambda: looks.append(clock.seconds) or has_host_spec())
    assert all([await injection.by_cdi() for _ in range(100)])
    assert len(looks) == 1


async def test_every_answer_with_a_name_hides_the_gpus_from_a_runtime_that_passes_the_name_over(injection, disk):
    write_host_spec(disk)
    answer = await injection.answer(VGPU, frozenset(["GPU-0::0"]), "grant")
    assert answer.cdi_name
    assert answer.env == {contract.ENV_NVIDIA_VISIBLE_DEVICES: contract.NO_VISIBLE_DEVICES}


async def test_what_only_the_spec_is_a_sign_of_is_said_once(injection, disk, caplog):
    write_host_spec(disk)
    for _ in range(2):
        assert await injection.by_cdi()
    assert [record.levelname for record in caplog.records if "enable_cdi = true" in record.getMessage()] == ["WARNING"]


async def test_a_runtime_whose_version_tells_is_not_warned_of(injection, disk, pods, caplog):
    pods.node_changed(replace(OLD_CONTAINERD, runtime_version="containerd://2.1.4"))
    await settle()
    write_host_spec(disk)
    assert await injection.by_cdi()
    assert "enable_cdi" not in caplog.text
