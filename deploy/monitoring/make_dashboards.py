# SPDX-License-Identifier: Apache-2.0
"""Writes the Grafana dashboards: ``python deploy/monitoring/make_dashboards.py``.

This file has the content of the panels, and adds positions and defaults. tests/unit/deploy/test_monitoring.py compares the files with its
output, and the metrics and labels of every query with those that the agent and the scheduler serve.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DIRECTORY = Path(__file__).resolve().parent / "dashboards"
SCHEMA_VERSION = 39
GRID_WIDTH = 24
RATE = "$__rate_interval"

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}

BYTES, RATIO, SECONDS, COUNT, CELSIUS, WATTS = "bytes", "percentunit", "s", "short", "celsius", "watt"


@dataclass(frozen=True)
class Panel:
    """One panel. ``queries`` has each query with the name of its line."""

    title: str
    queries: tuple[tuple[str, str], ...]
    unit: str = COUNT
    kind: str = "timeseries"
    width: int = 8
    height: int = 8
    help: str = ""
    red_from: float | None = None
    """Values from this one are shown in red."""
    stacked: bool = False


@dataclass(frozen=True)
class Row:
    """Panels under a heading."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Dashboard:
    """One dashboard. ``variables`` are the labels that users select, with the query that lists their values."""

    uid: str
    title: str
    help: str
    rows: tuple[Row, ...]
    variables: tuple[tuple[str, str], ...] = field(default=())


def stat(title: str, query: str, unit: str = COUNT, *, red_from: float | None = None, help: str = "") -> Panel:  # noqa: A002
    """Return a panel with a single number."""
    return Panel(title, ((query, ""),), unit, "stat", width=4, height=4, red_from=red_from, help=help)


def events(counter: str, by: str) -> str:
    """Return a query for the number of events in the interval, for counters that are created at the first event.

    Such a counter starts at 1, so its increase misses the first event.
    """
    return f"sum by ({by}) (({counter} unless {counter} offset {RATE}) or increase({counter}[{RATE}]))"


CLUSTER = Dashboard(
    uid="aliquot-cluster",
    title="Aliquot / Cluster",
    help="All nodes: what is allocated, what is used, and what is wrong.",
    rows=(
        Row(
            "Now",
            (
                stat("Nodes with GPUs", "count(count by (node) (aliquot_device_health))"),
                stat("GPUs", "count(aliquot_device_health)"),
                stat("GPUs not healthy", "count(aliquot_device_health == 0) or vector(0)", red_from=1),
                stat("Shares", "sum(aliquot_device_shares_allocated)"),
                stat("Memory allocated", "sum(aliquot_device_memory_allocated_bytes) / sum(aliquot_device_memory_total_bytes)", RATIO),
                stat("Memory used", "sum(aliquot_device_memory_used_bytes) / sum(aliquot_device_memory_total_bytes)", RATIO),
            ),
        ),
        Row(
            "Use",
            (
                Panel(
                    "Device memory",
                    (
                        ("sum(aliquot_device_memory_total_bytes)", "total"),
                        ("sum(aliquot_device_memory_allocated_bytes)", "allocated"),
                        ("sum(aliquot_device_memory_used_bytes)", "used"),
                    ),
                    BYTES,
                ),
                Panel("Utilisation by node", (("avg by (node) (aliquot_device_utilization_ratio)", "{{node}}"),), RATIO),
                Panel("Cores allocated by node", (("avg by (node) (aliquot_device_cores_allocated_ratio)", "{{node}}"),), RATIO),
                Panel(
                    "Memory in use by namespace",
                    (("sum by (namespace) (aliquot_container_memory_used_bytes)", "{{namespace}}"),),
                    BYTES,
                    stacked=True,
                ),
                Panel(
                    "Time throttled by namespace",
                    ((f"sum by (namespace) (rate(aliquot_container_throttled_seconds_total[{RATE}]))", "{{namespace}}"),),
                    SECONDS,
                    help="Seconds per second that launches waited for compute.",
                ),
                Panel(
                    "Allocations refused by namespace",
                    ((f"sum by (namespace) (rate(aliquot_container_refusals_total[{RATE}]))", "{{namespace}}"),),
                    "ops",
                ),
            ),
        ),
        Row(
            "Problems",
            (
                Panel("Drift", (("sum by (kind) (aliquot_drift)", "{{kind}}"),), red_from=1),
                Panel("Audit findings", (("sum by (kind) (aliquot_audit_findings)", "{{kind}}"),), red_from=1),
                Panel(
                    "GPUs by state",
                    (("sum by (state) (aliquot_device_health_state)", "{{state}}"),),
                    stacked=True,
                ),
                Panel("Containers refused", ((events("aliquot_refusals_total", "reason"), "{{reason}}"),)),
                Panel("XIDs", ((events("aliquot_xids_total", "xid"), "XID {{xid}}"),)),
                Panel(
                    "Containers without enforced limits",
                    (("count by (node) (aliquot_container_enforcement_in_force == 0)", "{{node}}"),),
                    red_from=1,
                ),
            ),
        ),
        Row(
            "Scheduler",
            (
                Panel(
                    "Placement attempts",
                    ((f"sum by (result) (rate(aliquot_scheduler_attempts_total[{RATE}]))", "{{result}}"),),
                    "ops",
                ),
                Panel(
                    "Time to answer, 99th percentile",
                    (
                        (
                            f"histogram_quantile(0.99, sum by (le, verb) (rate(aliquot_scheduler_verb_duration_seconds_bucket[{RATE}])))",
                            "{{verb}}",
                        ),
                    ),
                    SECONDS,
                ),
                Panel(
                    "Nodes rejected",
                    ((f"sum by (reason) (rate(aliquot_scheduler_node_rejections_total[{RATE}]))", "{{reason}}"),),
                    "ops",
                ),
                Panel(
                    "Fragmentation",
                    (
                        (
                            "max(sum by (pod) (aliquot_scheduler_model_fragmented_gpus) / sum by (pod) (aliquot_scheduler_model_gpus))",
                            "mean part of a GPU that fits no usual shape",
                        ),
                    ),
                    RATIO,
                ),
                Panel("Reservations", (("sum by (stage) (aliquot_scheduler_reservations)", "{{stage}}"),)),
                Panel("Age of the scheduler's state", (("max by (pod) (aliquot_scheduler_watch_lag_seconds)", "{{pod}}"),), SECONDS),
            ),
        ),
    ),
)

_ON_NODE = '{node=~"$node"}'
_OF_AGENT = '{job="aliquot-agent", node=~"$node"}'
"""For metrics that every program has: the kubelet's series have a node label too."""


def _seconds_of(operation: str) -> tuple[str, str]:
    """Return the query for the 99th percentile of an operation's time on the selected nodes, and the name of its line."""
    series = f'aliquot_operation_duration_seconds_bucket{{node=~"$node", operation="{operation}"}}'
    return f"histogram_quantile(0.99, sum by (le) (rate({series}[{RATE}])))", operation


NODE = Dashboard(
    uid="aliquot-node",
    title="Aliquot / Node",
    help="The GPUs of a node, the containers that share them, and the agent.",
    variables=(("node", "label_values(aliquot_device_info, node)"),),
    rows=(
        Row(
            "GPUs",
            (
                Panel(
                    "Memory allocated",
                    (
                        (
                            f"aliquot_device_memory_allocated_bytes{_ON_NODE} / aliquot_device_memory_total_bytes{_ON_NODE}",
                            "{{device_uuid}}",
                        ),
                    ),
                    RATIO,
                ),
                Panel(
                    "Memory used",
                    ((f"aliquot_device_memory_used_bytes{_ON_NODE} / aliquot_device_memory_total_bytes{_ON_NODE}", "{{device_uuid}}"),),
                    RATIO,
                ),
                Panel("Utilisation", ((f"aliquot_device_utilization_ratio{_ON_NODE}", "{{device_uuid}}"),), RATIO),
                Panel("Temperature", ((f"aliquot_device_temperature_celsius{_ON_NODE}", "{{device_uuid}}"),), CELSIUS),
                Panel(
                    "Power",
                    (
                        (f"aliquot_device_power_watts{_ON_NODE}", "{{device_uuid}}"),
                        (f"max(aliquot_device_power_limit_watts{_ON_NODE})", "limit"),
                    ),
                    WATTS,
                ),
                Panel(
                    "Memory errors",
                    ((f"increase(aliquot_device_ecc_errors_total{_ON_NODE}[1h])", "{{device_uuid}} {{type}}"),),
                    help="In the last hour.",
                ),
                Panel("State", ((f"aliquot_device_health_state{_ON_NODE} == 1", "{{device_uuid}} {{state}}"),), kind="table", width=12),
                Panel("GPU models", ((f"aliquot_device_info{_ON_NODE}", ""),), kind="table", width=12),
            ),
        ),
        Row(
            "Shares",
            (
                Panel(
                    "Memory of limit",
                    (
                        (
                            f"aliquot_container_memory_used_bytes{_ON_NODE} / aliquot_container_memory_limit_bytes{_ON_NODE}",
                            "{{namespace}}/{{pod}} {{container}}",
                        ),
                    ),
                    RATIO,
                ),
                Panel(
                    "Utilisation",
                    ((f"aliquot_container_utilization_ratio{_ON_NODE}", "{{namespace}}/{{pod}} {{container}}"),),
                    RATIO,
                    stacked=True,
                ),
                Panel(
                    "Time throttled",
                    ((f"rate(aliquot_container_throttled_seconds_total{_ON_NODE}[{RATE}])", "{{namespace}}/{{pod}} {{container}}"),),
                    SECONDS,
                ),
                Panel("Containers and their GPUs", ((f"aliquot_container_info{_ON_NODE}", ""),), kind="table", width=24),
            ),
        ),
        Row(
            "Agent",
            (
                Panel("Time to start a container, 99th percentile", (_seconds_of("PreStartContainer"), _seconds_of("Allocate")), SECONDS),
                Panel("Time to read the driver, 99th percentile", (_seconds_of("read-driver"),), SECONDS),
                Panel("Time to reconcile, 99th percentile", (_seconds_of("reconcile"),), SECONDS),
                Panel("NVML errors", ((events(f"aliquot_nvml_errors_total{_ON_NODE}", "call, code"), "{{call}} {{code}}"),)),
                Panel("Resident memory of the agent", ((f"process_resident_memory_bytes{_OF_AGENT}", "{{pod}}"),), BYTES),
                Panel("CPU of the agent", ((f"rate(process_cpu_seconds_total{_OF_AGENT}[{RATE}])", "{{pod}}"),), RATIO),
            ),
        ),
    ),
)

_OF_TENANT = '{namespace=~"$namespace", pod=~"$pod"}'
_SHARE = "{{pod}} {{container}}"
TENANT = Dashboard(
    uid="aliquot-tenant",
    title="Aliquot / Tenant",
    help="The pods of a namespace: what they were granted, what they use, and what limits them.",
    variables=(
        ("namespace", "label_values(aliquot_container_info, namespace)"),
        ("pod", 'label_values(aliquot_container_info{namespace=~"$namespace"}, pod)'),
    ),
    rows=(
        Row(
            "Now",
            (
                stat("Shares", f"count(aliquot_container_info{_OF_TENANT}) or vector(0)"),
                stat("Memory granted", f"sum(aliquot_container_memory_limit_bytes{_OF_TENANT})", BYTES),
                stat("Memory used", f"sum(aliquot_container_memory_used_bytes{_OF_TENANT})", BYTES),
                stat("Compute used, in GPUs", f"sum(aliquot_container_utilization_ratio{_OF_TENANT})"),
                stat("Refused in the last hour", f"sum(increase(aliquot_container_refusals_total{_OF_TENANT}[1h]))", red_from=1),
                stat("Limits not enforced", f"count(aliquot_container_enforcement_in_force{_OF_TENANT} == 0) or vector(0)", red_from=1),
            ),
        ),
        Row(
            "Memory",
            (
                Panel(
                    "Used of limit",
                    ((f"aliquot_container_memory_used_bytes{_OF_TENANT} / aliquot_container_memory_limit_bytes{_OF_TENANT}", _SHARE),),
                    RATIO,
                    red_from=0.95,
                ),
                Panel("Used", ((f"aliquot_container_memory_used_bytes{_OF_TENANT}", _SHARE),), BYTES),
                Panel("Allocations refused", ((f"rate(aliquot_container_refusals_total{_OF_TENANT}[{RATE}])", _SHARE),), "ops"),
            ),
        ),
        Row(
            "Compute",
            (
                Panel(
                    "Used, and the limit",
                    (
                        (f"aliquot_container_utilization_ratio{_OF_TENANT}", _SHARE),
                        (f"aliquot_container_cores_ceiling_ratio{_OF_TENANT}", f"limit of {_SHARE}"),
                    ),
                    RATIO,
                ),
                Panel(
                    "Time throttled",
                    ((f"rate(aliquot_container_throttled_seconds_total{_OF_TENANT}[{RATE}])", _SHARE),),
                    SECONDS,
                    help="Seconds per second that launches waited for compute.",
                ),
                Panel("Launches", ((f"rate(aliquot_container_launches_total{_OF_TENANT}[{RATE}])", _SHARE),), "ops"),
                Panel("Containers and their GPUs", ((f"aliquot_container_info{_OF_TENANT}", ""),), kind="table", width=24),
            ),
        ),
    ),
)

DASHBOARDS = {"cluster": CLUSTER, "node": NODE, "tenant": TENANT}


def to_json(dashboard: Dashboard) -> str:
    """Return the JSON that Grafana imports."""
    document = {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": dashboard.help,
        "tags": ["aliquot", "gpu"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_datasource(), *(_variable(name, query) for name, query in dashboard.variables)]},
        "panels": list(_panels(dashboard.rows)),
    }
    return json.dumps(document, indent=2) + "\n"


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus", "current": {}, "hide": 0}


def _variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "sort": 1,
        "current": {"text": "All", "value": "$__all"},
    }


def _panels(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    identifier, top = 0, 0
    for row in rows:
        identifier += 1
        yield {
            "id": identifier,
            "type": "row",
            "title": row.title,
            "collapsed": False,
            "gridPos": {"x": 0, "y": top, "w": GRID_WIDTH, "h": 1},
            "panels": [],
        }
        top += 1
        left = tallest = 0
        for panel in row.panels:
            if left + panel.width > GRID_WIDTH:
                top, left, tallest = top + tallest, 0, 0
            identifier += 1
            yield _panel(panel, identifier, {"x": left, "y": top, "w": panel.width, "h": panel.height})
            left, tallest = left + panel.width, max(tallest, panel.height)
        top += tallest


def _panel(panel: Panel, identifier: int, place: dict[str, int]) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    if panel.red_from is not None:
        steps.append({"color": "red", "value": panel.red_from})
    custom = {"stacking": {"mode": "normal" if panel.stacked else "none"}, "fillOpacity": 25 if panel.stacked else 8}
    return {
        "id": identifier,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.help,
        "datasource": DATASOURCE,
        "gridPos": place,
        "targets": [_target(panel, number, query, name) for number, (query, name) in enumerate(panel.queries)],
        "fieldConfig": {
            "defaults": {
                "unit": panel.unit,
                "thresholds": {"mode": "absolute", "steps": steps},
                **({"custom": custom} if panel.kind == "timeseries" else {}),
            },
            "overrides": [],
        },
        "options": {"reduceOptions": {"calcs": ["lastNotNull"]}} if panel.kind == "stat" else {},
    }


def _target(panel: Panel, number: int, query: str, name: str) -> dict[str, Any]:
    target: dict[str, Any] = {"refId": chr(ord("A") + number), "datasource": DATASOURCE, "expr": query, "legendFormat": name}
    if panel.kind == "table":
        target |= {"format": "table", "instant": True}
    return target


def main() -> None:
    """Write all dashboards."""
    DIRECTORY.mkdir(exist_ok=True)
    for name, dashboard in DASHBOARDS.items():
        (DIRECTORY / f"{name}.json").write_text(to_json(dashboard))


if __name__ == "__main__":
    main()
