# SPDX-License-Identifier: Apache-2.0
import asyncio
import fcntl
import itertools
import struct
from contextlib import contextmanager
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from agent.core.compat_metrics import CompatMetrics
from agent.core.holdings import Holdings
from agent.core.inventory import DeviceReading, DriverReading, FailedDevice
from agent.core.limits import FailPolicy, limits_of
from agent.core.metrics import family
from agent.core.overhead import GpuProcess
from agent.core.planning import Planned
from agent.core.region_layout import OWN_GEOMETRY, SLOT_DEVICE, SLOT_HEADER
from agent.services.driver_watch import DriverWatch
from agent.services.monitor import (
    DEAD_AFTER_SECONDS,
    UTILIZATION_MOST_SECONDS,
    UTILIZATION_SECONDS,
    Monitor,
    MonitorOptions,
    ReadinessSources,
    ScrapeSources,
)
from agent.services.pod_cache import PodCache
from agent.services.state import AgentState
from agent.services.telemetry import Telemetry
from aliquot.contract.model import ContainerSpec, ContainerState, ContainerStatus, Isolation, Preferences
from aliquot.contract.units import MIB
from tests.unit.agent.builders import VGPU, gpu, grant, ids, instance, inventory, pod, reading, share
from tests.unit.agent.fakes import Disk, FakeClock, FakeDriver, settle


class FakeRegistrar:
    troubles: dict[str, str]

    def __init__(self) -> None:
        self.troubles = {}


class Harness:
    def __init__(self, base, compat: CompatMetrics = CompatMetrics.NONE) -> None:
        self.disk = Disk(base)
        self.manager = self.disk.manager()
        self.driver = FakeDriver(reading(gpu(0), gpu(1)))
        self.watch = DriverWatch(self.driver, 1.0)
        self.registrar = FakeRegistrar()
        self.telemetry = Telemetry()
        self.clock = FakeClock()
        self.further: list[str] = []
        self.overhead: dict[tuple[str, str], int] = {}
        self.holdings = Holdings()
        self.bypassed: set[str] = set()
        self.pods = PodCache()
        self.monitor = Monitor(
            MonitorOptions("0.1.0", "node-1", 16, compat), state=AgentState(self.watch, self.pods, self.manager), files=self.disk.files,
            readiness=ReadinessSources(lambda: self.registrar.troubles, lambda: self.further), telemetry=self.telemetry, clock=self.clock,
            sources=ScrapeSources(
                lambda: self.overhead, lambda: self.holdings, lambda: self.bypassed,
                further=[lambda: [family("drift", "From elsewhere.", ("kind",), [(("orphan",), 2)])]],
            ),
        )  # fmt: skip

    async def commit(self, one):
        await self.manager.commit(Planned(one, (), Preferences()), limits_of(one, FailPolicy.CLOSED), dict, self.watch.inventory, 16)
        return self.disk.base / "run/containers" / one.grant_id / "region"

    def scrape(self) -> dict[str, list]:
        page = self.monitor.metrics("")
        assert page.status == 200
        return {family.name: family.samples for family in text_string_to_metric_families(page.body.decode())}


@pytest.fixture
async def node(tmp_path):
    return Harness(tmp_path)


async def test_a_scrape_shows_devices_grants_and_counters(node):
    await node.watch.poll()
    one = grant(ids("0:0"), share(0, 300), of=pod("train"))
    await node.manager.commit(Planned(one, (), Preferences()), limits_of(one, FailPolicy.CLOSED), dict, inventory(), 16)
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
    await node.manager.commit(Planned(one, (), Preferences()), limits_of(one, FailPolicy.CLOSED), dict, node.watch.inventory, 16)
    metrics = node.scrape()
    assert [sample.value for sample in metrics["aliquot_container_memory_used_bytes"]] == [40 * MIB]
    assert metrics["aliquot_container_refusals"] == []


async def test_measured_overhead_is_shown(node):
    await node.watch.poll()
    one = grant(ids("0:0"))
    await node.manager.commit(Planned(one, (), Preferences()), limits_of(one, FailPolicy.CLOSED), dict, inventory(), 16)
    assert node.scrape()["aliquot_container_overhead_bytes"] == []
    node.overhead[(one.grant_id, "GPU-0")] = 6 * MIB
    assert [sample.value for sample in node.scrape()["aliquot_container_overhead_bytes"]] == [6 * MIB]


async def test_a_released_container_has_no_series(node):
    await node.watch.poll()
    one = grant(ids("0:0"))
    await node.manager.commit(Planned(one, (), Preferences()), limits_of(one, FailPolicy.CLOSED), dict, inventory(), 16)
    await node.manager.release([one])
    assert node.scrape()["aliquot_container_info"] == []


async def test_an_init_container_that_completed_has_no_series_until_it_runs_again(node):
    await node.watch.poll()
    owner = pod("train", ContainerSpec("main", {VGPU: "1"}, init=True))
    await node.commit(grant(ids("0:0"), of=owner))

    async def series(state: ContainerState) -> int:
        node.pods.pods_listed([replace(owner, statuses=(ContainerStatus("main", state),))])
        await settle()
        metrics = node.scrape()
        (count,) = {len(metrics[f"aliquot_container_{name}"]) for name in ("launches", "info")}
        return count

    assert [await series(state) for state in (ContainerState.RUNNING, ContainerState.COMPLETED)] == [1, 0]
    assert sum(sample.value for sample in node.scrape()["aliquot_device_shares_allocated"]) == 1
    assert [await series(state) for state in (ContainerState.RUNNING, ContainerState.FAILED)] == [1, 1]


@pytest.mark.parametrize("owner", [{"pod_uid": "uid-next"}, {"container": "second"}], ids=["another pod", "another container"])
async def test_usage_of_container_is_not_shown_for_next_with_same_ids(node, owner):
    await node.watch.poll()
    one = grant(ids("0:0"))
    region = await node.commit(one)
    fields = [0] * len(SLOT_DEVICE.unpack(bytes(SLOT_DEVICE.size)))
    fields[10] = 1000  # launches
    with region.open("r+b") as file:
        file.seek(OWN_GEOMETRY.slot(0))
        file.write(SLOT_HEADER.pack(1, 7, 0, 0, 50) + SLOT_DEVICE.pack(*fields))
    assert [sample.value for sample in node.scrape()["aliquot_container_launches"]] == [1000]
    await node.commit(replace(one, **owner))
    assert [sample.value for sample in node.scrape()["aliquot_container_launches"]] == [0]


async def test_a_spoilt_region_spoils_no_scrape(node):
    await node.watch.poll()
    one = grant(ids("0:0"))
    await node.manager.commit(Planned(one, (), Preferences()), limits_of(one, FailPolicy.CLOSED), dict, inventory(), 16)
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


async def test_missing_driver_makes_agent_unready_but_does_not_end_it(node):
    assert b"driver" in node.monitor.readiness("").body
    assert node.monitor.health("").status == 200


async def test_node_with_only_unshareable_gpus_reports_that(node):
    trouble = "GPU-x: it has no memory of its own"
    node.driver.answer = DriverReading("580", 13000, (), (FailedDevice(0, None, trouble),))
    await node.watch.poll()
    page = node.monitor.readiness("")
    assert (page.status, trouble in page.body.decode(), b"can be shared" in page.body) == (503, True, True)
    node.driver.answer = DriverReading("580", 13000, ())
    await node.watch.poll()
    assert b"lists no GPU" in node.monitor.readiness("").body


async def test_a_stopped_event_loop_is_noticed(node):
    running = asyncio.ensure_future(node.monitor.run())
    await asyncio.sleep(0)
    node.clock.seconds += DEAD_AFTER_SECONDS + 1
    assert node.monitor.health("").status == 503
    running.cancel()


async def test_a_container_has_its_series_before_it_touched_the_driver(node):
    await node.watch.poll()
    await node.commit(grant(ids("0:0"), share(0, 300, 40)))
    node.holdings = Holdings({"GPU-0"})
    metrics = node.scrape()
    for name in ("memory_used_bytes", "memory_driver_bytes", "utilization_ratio", "refusals", "throttled_seconds", "launches_waiting"):
        assert [sample.value for sample in metrics[f"aliquot_container_{name}"] if not sample.name.endswith("_created")] == [0.0], name
    assert [sample.value for sample in metrics["aliquot_container_enforcement_in_force"]] == [1.0]


def write_slot(region, *, busy_ns: int, launches: int) -> None:
    """A process that no longer lives, unless somebody holds its lock."""
    fields = [0] * 16
    fields[10], fields[11], fields[12], fields[13] = launches, busy_ns, busy_ns // 2, 1
    with region.open("r+b") as file:
        file.seek(OWN_GEOMETRY.slot(3))
        file.write(SLOT_HEADER.pack(1, 77, 0, 0, 5) + SLOT_DEVICE.pack(*fields))


@contextmanager
def living(region):
    """Hold the lock of that process."""
    with region.open("r+b") as file:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, struct.pack("@hhqqi0q", fcntl.F_WRLCK, 0, OWN_GEOMETRY.slot(3), 1, 0))
        yield


async def test_utilisation_is_what_was_paid_for_between_scrapes(node):
    await node.watch.poll()
    region = await node.commit(grant(ids("0:0"), share(0, 300, 40)))
    assert [sample.value for sample in node.scrape()["aliquot_container_utilization_ratio"]] == [0.0]
    node.clock.seconds += 1
    write_slot(region, busy_ns=1_000_000_000, launches=5)
    node.clock.seconds += 2 * UTILIZATION_SECONDS - 1
    assert [sample.value for sample in node.scrape()["aliquot_container_utilization_ratio"]] == [0.1]
    node.clock.seconds += 2 * UTILIZATION_SECONDS
    write_slot(region, busy_ns=6_000_000_000, launches=9)
    metrics = node.scrape()
    assert [sample.value for sample in metrics["aliquot_container_utilization_ratio"]] == [0.5]
    assert [sample.value for sample in metrics["aliquot_container_busy_seconds"]] == [6.0]
    assert [sample.value for sample in metrics["aliquot_container_launches"]] == [9.0]


async def test_the_driver_knows_best_how_busy_a_container_is(node):
    await node.watch.poll()
    one = grant(ids("0:0"), share(0, 300))
    region = await node.commit(one)

    def said() -> list[float]:
        return [sample.value for sample in node.scrape()["aliquot_container_utilization_ratio"]]

    assert said() == [0.0], "no process, so it does nothing"
    write_slot(region, busy_ns=0, launches=0)
    with living(region):
        assert said() == [], "it has a process, which launches without paying, and the driver does not tell"
        node.holdings = Holdings({"GPU-0"}, {(one.grant_id, "GPU-0"): [GpuProcess("GPU-0", 1077, 0, 0.75)]})
        assert said() == [0.75]
        node.holdings = Holdings()
        write_slot(region, busy_ns=0, launches=5)
        assert said() == [], "nobody pays for launches that are free"
        write_slot(region, busy_ns=1, launches=6)
        assert said() == [0.0], "launches are paid for, and nothing was for long"
        node.holdings = Holdings({"GPU-0"}, {(one.grant_id, "GPU-0"): [GpuProcess("GPU-0", 1078, 0)]}, uncounted={one.grant_id: 1})
        assert said() == [], "another process goes round the shim, and the driver does not tell"


async def test_without_shim_container_utilization_comes_from_driver(node):
    await node.watch.poll()
    await node.commit(one := replace(grant(ids("0:0")), isolation=Isolation.MPS))

    def said() -> list[float]:
        return [sample.value for sample in node.scrape()["aliquot_container_utilization_ratio"]]

    assert said() == []
    node.holdings = Holdings({"GPU-0"})
    assert said() == [0.0]
    node.holdings = Holdings({"GPU-0"}, {(one.grant_id, "GPU-0"): [GpuProcess("GPU-0", 7, 0, ratio) for ratio in (0.25, 0.5)]})
    assert said() == [0.75]


async def test_inconclusive_single_check_is_not_reported(node):
    await node.watch.poll()
    region = await node.commit(grant(ids("0:0"), share(0, 300, 40)))
    write_slot(region, busy_ns=1_000_000_000, launches=5)
    assert node.scrape()["aliquot_container_utilization_ratio"] == []
    node.clock.seconds += UTILIZATION_MOST_SECONDS + 1
    write_slot(region, busy_ns=9_000_000_000, launches=6)
    assert node.scrape()["aliquot_container_utilization_ratio"] == [], "an average over so long a time is not of lately"
    node.clock.seconds += UTILIZATION_MOST_SECONDS + 1
    assert [sample.value for sample in node.scrape()["aliquot_container_utilization_ratio"]] == [0.0], "it did nothing at all"


async def test_counters_continue_after_unreadable_region(node):
    await node.watch.poll()
    region = await node.commit(grant(ids("0:0"), share(0, 300, 40)))
    write_slot(region, busy_ns=1_000_000_000, launches=5)
    node.scrape()
    whole = region.read_bytes()
    region.write_bytes(b"spoilt")
    assert node.scrape()["aliquot_container_launches"] == []
    region.write_bytes(whole)
    write_slot(region, busy_ns=2_000_000_000, launches=6)
    assert [sample.value for sample in node.scrape()["aliquot_container_launches"]] == [6.0]


async def test_a_process_outside_and_what_others_add_are_shown(node):
    await node.watch.poll()
    one = grant(ids("0:0"))
    await node.commit(one)
    node.bypassed.add(one.grant_id)
    metrics = node.scrape()
    assert [sample.value for sample in metrics["aliquot_container_enforcement_in_force"]] == [0.0]
    assert [sample.value for sample in metrics["aliquot_drift"]] == [2.0]


async def test_other_names_are_served_only_where_that_is_set(node, tmp_path):
    assert not any(name.startswith("hami_") for name in node.scrape())
    other = Harness(tmp_path / "other", CompatMetrics.HAMI)
    await other.watch.poll()
    owner = pod("train")
    other.pods.pods_listed([owner])
    await asyncio.sleep(0)
    await other.commit(grant(ids("0:0"), share(0, 300), of=owner))
    metrics = other.scrape()
    assert [sample.value for sample in metrics["hami_vgpu_memory_limit_bytes"]] == [300 * MIB]
    assert [sample.labels["container_index"] for sample in metrics["hami_vgpu_memory_allocated_bytes"]] == ["0"]
    assert "aliquot_container_memory_limit_bytes" in metrics


MEDIA = ["text/plain", "application/openmetrics-text", "application/json", "*/*", "", "text/plain;q=0.5"]
VERSIONS = ["", "0.0.4", "1.0.0", "1.x", "x", "1..0", "1.0.0.0.x", "9" * 5000, "-1", "\u0661", "1_0", "1.0.0 ", "="]


async def test_every_accept_header_gets_the_metrics(node):
    options = list(itertools.product(VERSIONS, ("", "values", "x")))
    parts = [f"{media};version={version};escaping={escaping}" for media in MEDIA for version, escaping in options]
    for accept in [*parts, *map(",".join, itertools.pairwise(parts)), ",,;;", "version=1.x"]:
        page = node.monitor.metrics(accept)
        assert page.status == 200, accept
        assert b"aliquot_build_info" in page.body, accept
        assert "\n" not in page.content_type
        assert page.content_type.startswith(("text/plain; version=", "application/openmetrics-text; version=")), accept
