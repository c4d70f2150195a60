# SPDX-License-Identifier: Apache-2.0
"""The metrics of a real agent on a simulated node: what is there from when on, what it says, and that it ends."""

import asyncio
import urllib.request
from collections.abc import Callable

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from aliquot import contract
from aliquot.contract.units import MIB
from tests.integration.agent_nodes import container, inject, make_node, manifest, running
from tests.integration.test_agent_audit import around
from tests.integration.test_agent_usage import cuda, go

pytestmark = pytest.mark.usefixtures("build_dir")

OF_NODE = {"device_uuid", "pod", "container"}
"""Labels of series that are about something on one node."""
HAMI = "--compat-metrics=hami"

Series = dict[str, list[tuple[dict[str, str], float]]]


async def scrape(node) -> Series:
    """Every sample of a scrape by its name."""
    found: Series = {}
    for family in text_string_to_metric_families(await node.metrics()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def of_pod(series: Series, name: str, pod: str) -> list[float]:
    return [value for labels, value in series.get(contract.METRIC_PREFIX + name, ()) if labels["pod"] == pod]


async def until(node, condition: Callable[[Series], bool]) -> Series:
    """Scrape until the condition holds; return that scrape."""
    async with asyncio.timeout(25):
        while True:
            series = await scrape(node)
            if condition(series):
                return series
            await asyncio.sleep(0.3)


async def test_a_container_is_measured_from_its_grant_to_its_end():
    async with make_node("t4x2", HAMI) as node:
        node.create_pod(
            manifest("a", cuda("work", "--mib", "256", "--seconds", "60", "--kernel-us", "1000", wait=True, mib=2048, cores=20))
        )
        await running(node, "a")
        series = await scrape(node)
        (labels,) = [labels for labels, _ in series["aliquot_container_info"]]
        assert labels["uid"] == node.pod("a")["metadata"]["uid"]
        assert labels["node"] == node.options.name
        idle = {"memory_used_bytes": 0, "memory_driver_bytes": 0, "utilization_ratio": 0, "launches_total": 0, "throttled_seconds_total": 0}
        assert {name: of_pod(series, f"container_{name}", "a") for name in idle} == {name: [value] for name, value in idle.items()}
        assert of_pod(series, "container_memory_limit_bytes", "a") == [2048 * MIB]
        assert of_pod(series, "container_enforcement_in_force", "a") == [1]

        go(node, "a")
        series = await until(
            node,
            lambda now: (
                of_pod(now, "container_throttled_seconds_total", "a") > [1.0]
                and of_pod(now, "container_utilization_ratio", "a") > [0.1]
                and of_pod(now, "container_launches_waiting", "a") == [1]  # its one thread, at nearly every moment
            ),
        )
        (used,), (driver,) = of_pod(series, "container_memory_used_bytes", "a"), of_pod(series, "container_memory_driver_bytes", "a")
        assert used == pytest.approx(driver, rel=0.1)
        assert used >= 256 * MIB
        assert of_pod(series, "container_processes", "a") == [1]
        assert of_pod(series, "container_cores_limit_ratio", "a") == [0.2]
        assert of_pod(series, "container_utilization_ratio", "a") < [0.3]
        hami = {labels["pod"]: value for labels, value in series["hami_vgpu_memory_limit_bytes"]}
        assert hami == {"a": 2048 * MIB}
        assert [value for _, value in series["hami_container_device_utilization_ratio"]] > [10.0]

        node.delete_pod("a")
        series = await until(node, lambda now: not of_pod(now, "container_info", "a"))
        assert not [name for name, samples in series.items() for labels, _ in samples if labels.get("pod") == "a"]


async def test_container_without_compute_limit_has_utilization_from_driver():
    async with make_node("t4x2") as node:
        node.create_pod(manifest("a", cuda("work", "--mib", "256", "--seconds", "60", "--kernel-us", "1000", wait=True, mib=2048)))
        await running(node, "a")
        go(node, "a")
        series = await until(node, lambda now: of_pod(now, "container_utilization_ratio", "a") > [0.3])
        assert of_pod(series, "container_launches_total", "a") > [0]
        assert of_pod(series, "container_busy_seconds_total", "a") == [0], "nobody pays"


async def test_devices_show_their_sensors_and_the_agent_its_own_work():
    async with make_node("h200x8") as node:
        node.create_pod(manifest("a", container(mib=1024)))
        await running(node, "a")
        series = await scrape(node)
        uuids = {gpu.uuid for gpu in node.inventory.gpus}
        for name in ("temperature_celsius", "power_watts", "power_limit_watts", "sm_clock_hertz", "memory_utilization_ratio", "info"):
            values = {labels["device_uuid"]: value for labels, value in series[f"aliquot_device_{name}"]}
            assert values.keys() == uuids, name
            assert name == "memory_utilization_ratio" or all(value > 0 for value in values.values()), name
        assert {labels["type"] for labels, _ in series["aliquot_device_ecc_errors_total"]} == {"corrected", "uncorrected"}
        operations = {labels["operation"]: value for labels, value in series["aliquot_operation_duration_seconds_count"]}
        for name in ("Allocate", "PreStartContainer", "GetPreferredAllocation", "read-driver"):
            assert operations[name] > 0, name
        assert [value for _, value in series["process_resident_memory_bytes"]] > [0.0]
        assert not [name for name in series if name.startswith("hami_")]


async def test_device_and_container_series_name_node_and_device_series_name_model():
    async with make_node("t4x2") as node:
        node.create_pod(manifest("a", container(mib=1024)))
        node.create_pod(manifest("thief", around(node, "hold", "--mib", "50", spec={"name": "main"})))
        await running(node, "a", "thief")
        inject(node, "xid", "62", "--gpu", "1")
        late = ("aliquot_xids_total", "aliquot_device_health_transitions_total", "aliquot_audit_findings", "aliquot_drift")
        series = await until(node, lambda now: all(now.get(name) for name in late))
        nameless = [name for name, samples in series.items() for labels, _ in samples if OF_NODE & labels.keys() and "node" not in labels]
        assert [name for name in nameless if name.startswith(contract.METRIC_PREFIX)] == []
        of_devices = [(name, labels) for name, samples in series.items() for labels, _ in samples if "device_uuid" in labels]
        assert {name for name, labels in of_devices if "pod" not in labels and not labels.get("model")} == set()
        assert {labels["node"] for name in late for labels, _ in series[name]} == {node.options.name}


async def test_openmetrics_is_served_to_a_scraper_that_asks_for_it():
    async with make_node("t4x2", HAMI) as node:
        request = urllib.request.Request(
            f"{await node.agent.metrics_url(10)}/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"}
        )

        def fetch() -> tuple[str, str]:
            with urllib.request.urlopen(request, timeout=5) as answer:
                return answer.headers["Content-Type"], answer.read().decode()

        content_type, text = await asyncio.to_thread(fetch)
        assert content_type.startswith("application/openmetrics-text")
        names = {family.name for family in parse_openmetrics(text)}
        assert {"aliquot_device_health", "aliquot_refusals", "hami_gpu_memory_limit_bytes"} <= names
