import asyncio

import pytest
from prometheus_client.parser import text_string_to_metric_families

from agent.core.inventory import DeviceReading, DriverReading
from agent.core.limits import FailPolicy, limits_of
from agent.core.planning import Planned
from agent.services.driver_watch import DriverWatch
from agent.services.monitor import DEAD_AFTER_SECONDS, Monitor
from agent.services.telemetry import Telemetry
from proto.model import Preferences
from proto.units import MIB
from tests.unit.agent.builders import VGPU, board, gpu, grant, ids, instance, pod, reading, share
from tests.unit.agent.fakes import Disk, FakeClock, FakeDriver


class FakeRegistrar:
    troubles: dict[str, str]

    def __init__(self) -> None:
        self.troubles = {}


class Harness:
    def __init__(self, base) -> None:
        self.disk = Disk(base)
        self.book = self.disk.book()
        self.driver = FakeDriver(reading(gpu(0), gpu(1)))
        self.watch = DriverWatch(self.driver, 1.0)
        self.registrar = FakeRegistrar()
        self.telemetry = Telemetry()
        self.clock = FakeClock()
        self.further: list[str] = []
        self.overhead: dict[tuple[str, str], int] = {}
        self.monitor = Monitor(
            "0.1.0", watch=self.watch, book=self.book, files=self.disk.files, registrar=self.registrar, telemetry=self.telemetry,
            troubles=lambda: self.further, clock=self.clock, overhead_bytes=lambda: self.overhead,
        )  # fmt: skip

    def scrape(self) -> dict[str, list]:
        page = self.monitor.metrics("")
        assert page.status == 200
        return {family.name: family.samples for family in text_string_to_metric_families(page.body.decode())}


@pytest.fixture
def node(tmp_path):
    return Harness(tmp_path)


async def test_a_scrape_shows_devices_grants_and_counters(node):
    await node.watch.poll()
    one = grant(ids("0:0"), share(0, 300), of=pod("train"))
    await node.book.commit(Planned(one, (), Preferences()), limits_of(one, FailPolicy.CLOSED), dict, board(), 16)
    node.telemetry.refusal("no-pod")
    node.telemetry.registration(VGPU, succeeded=True)
    metrics = node.scrape()
    assert {sample.labels["device_uuid"]: sample.value for sample in metrics["aliquot_device_memory_allocated_bytes"]} == {
        "GPU-0": 300 * MIB,
        "GPU-1": 0,
    }
    assert metrics["aliquot_container_memory_used_bytes"][0].value == 0
    assert metrics["aliquot_refusals"][0].value == 1
    assert metrics["aliquot_build_info"][0].labels["driver_version"] == "580.159.03"


async def test_a_mig_container_uses_what_the_driver_says_of_its_instance(node):
    device = gpu(0, mig=[instance(0, 0)])
    node.driver.answer = DriverReading("580", 13000, (DeviceReading(device, 0, None, {"MIG-0-0": 40 * MIB}),))
    await node.watch.poll()
    one = grant(frozenset({"MIG-0-0"}), share("MIG-0-0", 100), resource="nvidia.com/mig-1g.10gb")
    await node.book.commit(Planned(one, (), Preferences()), limits_of(one, FailPolicy.CLOSED), dict, node.watch.board, 16)
    metrics = node.scrape()
    assert [sample.value for sample in metrics["aliquot_container_memory_used_bytes"]] == [40 * MIB]
    assert metrics["aliquot_container_refusals"] == []


async def test_measured_overhead_is_shown(node):
    await node.watch.poll()
    one = grant(ids("0:0"))
    await node.book.commit(Planned(one, (), Preferences()), limits_of(one, FailPolicy.CLOSED), dict, board(), 16)
    assert node.scrape()["aliquot_container_overhead_bytes"] == []
    node.overhead[(one.grant_id, "GPU-0")] = 6 * MIB
    assert [sample.value for sample in node.scrape()["aliquot_container_overhead_bytes"]] == [6 * MIB]


async def test_a_released_container_has_no_series(node):
    await node.watch.poll()
    one = grant(ids("0:0"))
    await node.book.commit(Planned(one, (), Preferences()), limits_of(one, FailPolicy.CLOSED), dict, board(), 16)
    await node.book.release([one])
    assert node.scrape()["aliquot_container_info"] == []


async def test_a_spoilt_region_spoils_no_scrape(node):
    await node.watch.poll()
    one = grant(ids("0:0"))
    await node.book.commit(Planned(one, (), Preferences()), limits_of(one, FailPolicy.CLOSED), dict, board(), 16)
    (node.disk.base / "run/containers" / one.grant_id / "region").write_bytes(b"\xff" * 100)
    metrics = node.scrape()
    assert metrics["aliquot_container_memory_used_bytes"] == []
    assert len(metrics["aliquot_container_memory_limit_bytes"]) == 1


async def test_openmetrics_is_spoken_to_who_asks_for_it(node):
    page = node.monitor.metrics("application/openmetrics-text; version=1.0.0")
    assert page.content_type.startswith("application/openmetrics-text")
    assert page.body.endswith(b"# EOF\n")


async def test_ready_means_that_every_resource_is_registered(node):
    assert node.monitor.readiness("").status == 503
    await node.watch.poll()
    assert node.monitor.readiness("").status == 503
    node.registrar.troubles = {VGPU: "another device plugin holds nvidia.com/vgpu"}
    page = node.monitor.readiness("")
    assert page.status == 503
    assert b"another device plugin" in page.body
    node.registrar.troubles = {VGPU: ""}
    assert node.monitor.readiness("").status == 200
    node.further.append("the shim is not installed yet")
    assert b"shim" in node.monitor.readiness("").body


async def test_a_missing_driver_is_why_it_is_not_ready_and_no_reason_to_die(node):
    assert b"driver" in node.monitor.readiness("").body
    assert node.monitor.health("").status == 200


async def test_a_stopped_event_loop_is_noticed(node):
    running = asyncio.ensure_future(node.monitor.run())
    await asyncio.sleep(0)
    node.clock.seconds += DEAD_AFTER_SECONDS + 1
    assert node.monitor.health("").status == 503
    running.cancel()
