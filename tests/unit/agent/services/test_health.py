# SPDX-License-Identifier: Apache-2.0
import asyncio
import threading
from collections.abc import Mapping

from agent.adapters.health_file import HealthFile
from agent.core.health import GpuHealth, HealthState, HealthTable
from agent.core.inventory import DeviceEvent, FailedDevice
from agent.core.ledger import Ledger
from agent.errors import StorageError
from agent.ports.kube import GpuNodeState, NodeEvent, NodeState, PodEvent
from agent.services import health
from agent.services.driver_watch import DriverWatch
from agent.services.events import EventRecorder
from agent.services.health import CordonController, HealthRecorder, HealthReporter
from agent.services.pod_cache import PodCache
from agent.services.reporting import Reporting
from agent.services.state import AgentState
from agent.services.telemetry import Telemetry
from aliquot import contract
from aliquot.contract.gpunode import Cordon
from tests.unit.agent.builders import gpu, grant, ids, instance, pod, reading, share
from tests.unit.agent.fakes import AT_ONCE, Disk, FakeClock, FakeDriver, FakeKubeApi, posted, settle, until

PARTITIONED = gpu(1, mig=[instance(1, 3)])


class Harness:
    def __init__(self, base) -> None:
        self.driver = FakeDriver(reading(gpu(0), PARTITIONED))
        self.watch = DriverWatch(self.driver, 1.0, AT_ONCE)
        self.pods = PodCache()
        self.api = FakeKubeApi()
        self.telemetry = Telemetry("node-1")
        self.manager = Disk(base).manager()
        self.events = EventRecorder(self.api, FakeClock())
        HealthReporter("node-1", state=AgentState(self.watch, self.pods, self.manager), reporting=Reporting(self.events, self.telemetry))

    def granted(self, *grants) -> None:
        self.manager.ledger = Ledger({one.grant_id: one for one in grants})

    async def look(self, *devices, failed=()) -> None:
        self.driver.answer = reading(*devices, failed=failed)
        await self.watch.poll()

    def count(self, name: str, **labels: str) -> float:
        named = {"node": "node-1", "model": "NVIDIA H200", **labels}
        return self.telemetry.registry.get_sample_value(contract.METRIC_PREFIX + name, named) or 0.0


async def test_gpu_loss_and_return_are_events_on_node_and_pods(tmp_path):
    node = Harness(tmp_path)
    node.pods.node_changed(NodeState("node-uid", {}, {}))
    await settle()
    node.granted(
        grant(ids("0:0"), share(0), of=pod("on-the-other")),
        grant(frozenset({"MIG-1-3"}), share("MIG-1-3"), of=pod("on-its-instance"), resource="nvidia.com/mig-1g.10gb"),
    )
    await node.look(gpu(0), PARTITIONED)
    await node.look(gpu(0), failed=(FailedDevice(1, "GPU-1", "GPU is lost", lost=True),))
    await node.look(gpu(0), PARTITIONED)
    events = await posted(node.events, node.api)
    on_node = [event for event in events if isinstance(event, NodeEvent)]
    assert [(event.node_uid, event.reason, event.warning) for event in on_node] == [
        ("node-uid", "AliquotGpuUnhealthy", True),
        ("node-uid", "AliquotGpuHealthy", False),
    ]
    assert on_node[0].message == "GPU GPU-1 is lost and gets no new containers: GPU is lost"
    on_pods = [event for event in events if isinstance(event, PodEvent)]
    assert [(event.pod, event.warning) for event in on_pods] == [("on-its-instance", True), ("on-its-instance", False)]
    assert node.count("device_health_transitions_total", device_uuid="GPU-1", state="lost") == 1
    assert node.count("device_health_transitions_total", device_uuid="GPU-1", state="healthy") == 1


async def test_xids_are_counted_and_a_suspect_gpu_makes_no_event(tmp_path):
    node = Harness(tmp_path)
    await node.look(gpu(0), PARTITIONED)
    node.watch.take_events([DeviceEvent("GPU-0", 92), DeviceEvent("GPU-0", 92), DeviceEvent("GPU-0", 31), DeviceEvent("GPU-0", None)])
    assert node.count("xids_total", device_uuid="GPU-0", xid="92") == 2
    assert node.count("xids_total", device_uuid="GPU-0", xid="31") == 1
    assert node.count("device_health_transitions_total", device_uuid="GPU-0", state="suspect") == 1
    assert await posted(node.events, node.api) == []


class Store:
    """A store with a disk that is full as often as the test sets."""

    def __init__(self, kept: Cordon | None = Cordon(), *, full: int = 0) -> None:  # noqa: B008 - a value
        self.kept = kept
        self.full = full

    def load(self) -> Cordon:
        if self.kept is None:
            raise StorageError("not a record of a cordon")
        return self.kept

    def save(self, cordon: Cordon) -> None:
        if self.full:
            self.full -= 1
            raise StorageError("No space left on device")
        self.kept = cordon


ONE = Cordon(devices=("GPU-0",))


def cordons(store: Store, **options) -> tuple[CordonController, DriverWatch, PodCache]:
    watch, pods = DriverWatch(FakeDriver(reading(gpu(0))), 1.0), PodCache()
    return CordonController(watch, pods, store, **options), watch, pods


async def test_a_cordon_is_remembered_and_holds_until_the_api_says_otherwise(monkeypatch):
    monkeypatch.setattr(health, "SAVE_AGAIN_SECONDS", 0.01)
    store = Store(full=2)
    controller, _, pods = cordons(store)
    following = asyncio.ensure_future(controller.run())
    pods.gpu_node_seen(GpuNodeState(ONE, "", {}))
    await until(lambda: store.kept == ONE)
    following.cancel()
    controller, watch, pods = cordons(store)
    controller.load()
    assert watch.cordon == ONE
    following = asyncio.ensure_future(controller.run())
    pods.gpu_node_seen(None)
    await until(lambda: store.kept == Cordon())
    assert watch.cordon == Cordon()
    following.cancel()


async def test_a_cordon_holds_at_once_on_a_disk_that_does_not_answer():
    disk = threading.Event()

    class Stuck(Store):
        def save(self, cordon: Cordon) -> None:
            disk.wait(60)
            super().save(cordon)

    store = Stuck()
    controller, watch, pods = cordons(store)
    following = asyncio.ensure_future(controller.run())
    for cordon in (ONE, Cordon(node=True)):
        pods.gpu_node_seen(GpuNodeState(cordon, "", {}))
        await settle()
        assert watch.cordon == cordon
    disk.set()
    await until(lambda: store.kept == Cordon(node=True))
    following.cancel()


async def test_unreadable_record_is_reported_and_replaced(caplog):
    store = Store(None)
    controller, watch, pods = cordons(store)
    controller.load()
    assert watch.cordon == Cordon()
    assert "cordons are unknown until the API reports them: not a record" in caplog.text
    following = asyncio.ensure_future(controller.run())
    pods.gpu_node_seen(GpuNodeState(ONE, "", {}))
    await until(lambda: store.kept == ONE)
    following.cancel()


async def test_new_work_waits_until_api_reports_cordons_or_fails():
    controller, watch, pods = cordons(Store())
    controller.load()
    assert not controller.is_known()
    pods.gpu_node_seen(GpuNodeState(ONE, "", {}))
    await settle()
    assert controller.is_known()
    assert watch.cordon == ONE  # also where the controller's own loop has not had its turn
    controller, watch, pods = cordons(Store(ONE))
    controller.load()
    pods.api_trouble(contract.GPU_NODE_PLURAL, "gpunodes cannot be listed")
    await settle()
    assert controller.is_known()
    assert watch.cordon == ONE


async def test_without_object_watch_no_gpu_is_cordoned():
    controller, watch, _ = cordons(Store(ONE), watched=False)
    controller.load()
    assert controller.is_known()
    assert watch.cordon == Cordon()


async def test_cordon_follows_object_and_unreadable_one_changes_nothing(caplog):
    watch, pods = DriverWatch(FakeDriver(reading(gpu(0))), 1.0), PodCache()
    following = asyncio.ensure_future(CordonController(watch, pods, Store()).run())

    async def seen(state: GpuNodeState | None) -> Cordon:
        pods.gpu_node_seen(state)
        await settle()
        return watch.cordon

    one = Cordon(devices=("GPU-0",))
    assert await seen(GpuNodeState(one, "", {})) == one
    assert await seen(GpuNodeState(None, "expected a bool", {})) == one
    assert "expected a bool" in caplog.text
    assert await seen(GpuNodeState(Cordon(node=True), "", {})) == Cordon(node=True)
    assert await seen(None) == Cordon()
    following.cancel()


class FullDisk:
    """A store on a disk that is full at the first try."""

    def __init__(self) -> None:
        self.tries = 0
        self.saved = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def load(self) -> HealthTable:
        return HealthTable()

    def save(self, gpus: Mapping[str, GpuHealth]) -> None:
        self.tries += 1
        if self.tries == 1:
            raise StorageError("no space left on device")
        self._loop.call_soon_threadsafe(self.saved.set)


async def test_unsaved_health_is_saved_on_retry_without_new_change(monkeypatch, caplog):
    monkeypatch.setattr(health, "SAVE_AGAIN_SECONDS", 0.02)
    watch, store = DriverWatch(FakeDriver(reading(gpu(0))), 1.0), FullDisk()
    await watch.poll()
    saving = asyncio.ensure_future(HealthRecorder(watch, store).run())
    await asyncio.wait_for(store.saved.wait(), 60)
    assert "no space left" in caplog.text
    await asyncio.sleep(0.2)
    assert store.tries == 2
    saving.cancel()


async def test_fault_of_quarantined_gpu_is_saved_although_its_state_stays(tmp_path):
    store, driver = HealthFile(tmp_path / "health"), FakeDriver(reading(gpu(0)))
    watch = DriverWatch(driver, 1.0)
    saving = asyncio.ensure_future(HealthRecorder(watch, store).run())
    await watch.poll()
    driver.answer = reading(failed=(FailedDevice(0, "GPU-0", "no answer"),))
    await watch.poll()
    await until(lambda: store.load().of("GPU-0").silent)
    watch.take_events([DeviceEvent("GPU-0", 62)])
    await until(lambda: not store.load().of("GPU-0").silent)
    assert store.load().of("GPU-0").hold_seconds > 30
    saving.cancel()


async def test_an_agent_that_is_replaced_remembers_a_quarantine(tmp_path, caplog):
    store = HealthFile(tmp_path / "health")

    async def life() -> DriverWatch:
        watch = DriverWatch(FakeDriver(reading(gpu(0), gpu(1))), 1.0)
        memory = HealthRecorder(watch, store)
        memory.load()
        saving = asyncio.ensure_future(memory.run())
        await watch.poll()
        lives.append(saving)
        return watch

    lives: list[asyncio.Future] = []
    first = await life()
    first.take_events([DeviceEvent("GPU-1", 62)])
    await until(lambda: HealthState.QUARANTINED in {health.state for health in store.load().gpus.values()})
    lives[0].cancel()
    second = await life()
    assert [entry.state for entry in second.inventory.devices] == [HealthState.HEALTHY, HealthState.QUARANTINED]
    lives[1].cancel()
    assert (tmp_path / "health").stat().st_mode & 0o777 == 0o600
    (tmp_path / "health").write_bytes(b"torn")
    third = await life()
    assert [entry.state for entry in third.inventory.devices] == [HealthState.HEALTHY, HealthState.HEALTHY]
    assert "GPU health of the previous run is not known" in caplog.text
    lives[2].cancel()
