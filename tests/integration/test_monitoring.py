# SPDX-License-Identifier: Apache-2.0
"""Every query of the dashboards and alerts, and those of the guide, against what agent and scheduler really serve.

A query is parsed; each selector must match a series that is there, by name and by its label matchers, and each label that the query groups
by, joins on or writes into a legend must be a label of such a series.
"""

import json
import re
from collections.abc import Iterable, Iterator
from typing import TypeVar

import promql_parser as promql
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from aliquot import contract
from aliquot.contract.units import MIB
from aliquot.paths import SOURCE_ROOT
from scheduler_plugin.dashboard import history
from tests.integration.agent_nodes import container, eventually, make_node, manifest, running
from tests.integration.mig_nodes import a100_topology
from tests.integration.test_agent_usage import cuda, mig, until_used
from tests.integration.test_extender import api, create  # noqa: F401 - a fixture
from tests.integration.test_extender import running as running_scheduler
from tests.integration.test_webhook import make_certificate

pytestmark = pytest.mark.usefixtures("build_dir")

MONITORING = SOURCE_ROOT / "deploy/monitoring"
Series = dict[str, list[dict[str, str]]]
T = TypeVar("T")

EVENTUAL = {
    "aliquot_audit_findings": ("node", "kind", "namespace", "pod", "container", "device_uuid"),
    "aliquot_refusals_total": ("reason",),
    "aliquot_scheduler_node_rejections_total": ("reason",),
    "aliquot_nvml_errors_total": ("call", "code"),
    "aliquot_nvml_call_overdue_seconds": ("call", "device_uuid"),
    "aliquot_mps_supervisor_up": ("node",),
    "aliquot_xids_total": ("node", "device_uuid", "model", "xid"),
}
"""Families without a series until something happens that this test does not bring about; their labels are those in the code."""
FOREIGN = {
    "up": (),
    "apiserver_admission_webhook_rejection_count": ("name", "operation", "type", "error_type", "rejection_code"),
    "kube_daemonset_status_number_unavailable": ("namespace", "daemonset"),
    "kube_pod_labels": ("namespace", "pod", "uid"),
    "kube_pod_info": ("namespace", "pod", "uid", "node"),
    "DCGM_FI_DEV_GPU_TEMP": ("UUID", "gpu", "modelName", "Hostname"),
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE": ("UUID", "GPU_I_ID", "GPU_I_PROFILE", "gpu", "modelName", "Hostname"),
}
"""What others serve, as the API server, kube-state-metrics 2 and dcgm-exporter 4 document it."""
TARGET = ("job", "instance", "node", "pod", "namespace", "container")
"""Labels that Prometheus adds to every series of a scraped pod, where the series does not have them itself."""


def read(text: str, job: str) -> Series:
    """Every series of a page, with the labels that a scrape adds."""
    added = {"job": job, "instance": "10.0.0.1:9402", "pod": "x", "namespace": "aliquot-system", "container": "x"}
    if job == "aliquot-agent":
        added["node"] = "node-1"
    found: Series = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append({**added, **sample.labels})
    return found


@pytest.fixture
async def series(api, tmp_path) -> Series:  # noqa: F811
    """What both programs serve in a cluster where something goes on."""
    found: Series = {"up": [{"job": "aliquot-agent", "node": "node-1"}, {"job": "aliquot-scheduler", "pod": "x"}]}
    async with make_node(a100_topology(tmp_path, whole=1, instances=("gpu=1 profile=1g.10gb start=0",))) as node:
        await eventually(lambda: node.allocatable(contract.RESOURCE_MIG_PREFIX + "1g.10gb"), "the kubelet counts the instance")
        node.create_pod(manifest("hard", mig("hold")))
        node.create_pod(manifest("a", cuda("work", "--mib", "64", "--seconds", "60", mib=1024, cores=20)))
        node.create_pod(manifest("idle", container(mib=1024)))
        await running(node, "hard", "a", "idle")
        await until_used(node, "a", 64 * MIB)
        found |= read(await node.metrics(), "aliquot-agent")
    certificate, key = make_certificate(tmp_path, "webhook")
    async with running_scheduler(api, tls_cert_file=str(certificate), tls_key_file=str(key)) as extender:
        await extender.schedule(await create(api, "p", vgpu="1", vgpu_memory="400"), "n1", "n2")
        await extender.filter(await create(api, "q", vgpu="7"), "n1")
        _, page = await extender.page("/metrics")
        found |= read(page, "aliquot-scheduler")
    for families in (EVENTUAL, FOREIGN):
        for name, labels in families.items():
            found.setdefault(name, [dict.fromkeys((*TARGET, *labels), "any")])
    return found


def dashboard_queries() -> Iterator[tuple[str, str, list[str]]]:
    """Where a query stands, the query, and the labels its legend names."""
    for path in sorted((MONITORING / "dashboards").glob("*.json")):
        dashboard = json.loads(path.read_text())
        for panel in dashboard["panels"]:
            for target in panel.get("targets", ()):
                labels = re.findall(r"{{\s*(\w+)\s*}}", target["legendFormat"])
                yield f"{path.stem}: {panel['title']}", target["expr"], labels
        for variable in dashboard["templating"]["list"]:
            if variable["type"] == "query":
                inner = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"])
                yield f"{path.stem}: variable {variable['name']}", inner[1], [inner[2]]


def alert_queries() -> Iterator[tuple[str, str, list[str]]]:
    for rule in yaml.safe_load_all((MONITORING / "alerts.yaml").read_text()):
        for group in rule["spec"]["groups"]:
            for alert in group["rules"]:
                labels = re.findall(r"\$labels\.(\w+)", " ".join(alert["annotations"].values()))
                yield alert["alert"], alert["expr"], labels


def history_queries() -> Iterator[tuple[str, str, list[str]]]:
    """What the scheduler's own dashboard asks."""
    for subject in ({}, {"gpu": "GPU-1"}, {"pod": "a/b"}):
        for question, query in history.queries(subject, 3600.0):
            yield f"history of {subject or 'the cluster'}: {question.name}", query, []


def guide_queries() -> Iterator[tuple[str, str, list[str]]]:
    text = (MONITORING / "README.md").read_text()
    for number, block in enumerate(re.findall(r"```promql\n(.*?)```", text, re.DOTALL)):
        yield f"README.md, query {number + 1}", block, []


def parsed(query: str) -> promql.Expr:
    return promql.parse(query.replace("$__rate_interval", "5m").replace("$node", ".*").replace("$namespace", ".*").replace("$pod", ".*"))


def selectors(expression: promql.Expr) -> list[promql.VectorSelector]:
    found = []
    promql.walk(expression, lambda node: found.append(node) if isinstance(node, promql.VectorSelector) else None)
    return found


def nodes(expression: promql.Expr, kind: type[T]) -> list[T]:
    found: list[T] = []
    promql.walk(expression, lambda node: found.append(node) if isinstance(node, kind) else None)
    return found


def matching(selector: promql.VectorSelector, series: Series) -> list[dict[str, str]]:
    """The series that a selector would find if matchers on values were dropped, and those on other labels kept honest."""
    candidates = series.get(selector.name, [])
    wanted = [matcher.name for matcher in selector.matchers.matchers if matcher.name != "__name__"]
    return [labels for labels in candidates if all(name in labels for name in wanted)]


def test_queries_are_parsed_from_files():
    assert len(list(dashboard_queries())) > 40
    assert len(list(alert_queries())) > 10
    assert len(list(guide_queries())) >= 4
    assert len(list(history_queries())) > 10


async def test_every_query_names_existing_metrics_and_labels(series):
    wrong = []
    for where, query, legend in [*dashboard_queries(), *alert_queries(), *guide_queries(), *history_queries()]:
        expression = parsed(query)
        labels: set[str] = set()
        assert selectors(expression), where
        for selector in selectors(expression):
            found = matching(selector, series)
            if not found:
                wrong.append(f"{where}: nothing matches {selector.prettify()}")
            labels |= {name for one in found for name in one}
        made = set(re.findall(r'label_replace\(.*?,\s*"(\w+)"', query, re.DOTALL))
        named = {label for node in nodes(expression, promql.AggregateExpr) if node.modifier for label in node.modifier.labels}
        named |= {
            label
            for node in nodes(expression, promql.BinaryExpr)
            if node.modifier and node.modifier.matching
            for label in node.modifier.matching.labels
        }
        if missing := (named | set(legend)) - labels - made:
            wrong.append(f"{where}: no series has the label {', '.join(sorted(missing))}")
    assert not wrong, "\n".join(wrong)


async def test_label_values_in_queries_exist(series):
    """A matcher such as kind="over-limit" must name a value that the code can say."""
    from agent.core.audit import FindingKind
    from agent.core.health import HealthState
    from scheduler_plugin.services.telemetry import Outcome

    values: dict[tuple[str, str], Iterable[object]] = {
        ("aliquot_audit_findings", "kind"): set(FindingKind),
        ("aliquot_device_health_state", "state"): set(HealthState),
        ("aliquot_device_ecc_errors_total", "type"): {one["type"] for one in series["aliquot_device_ecc_errors_total"]},
        ("aliquot_operation_duration_seconds_bucket", "operation"): {
            one["operation"] for one in series["aliquot_operation_duration_seconds_bucket"]
        },
        ("aliquot_scheduler_verbs_total", "outcome"): set(Outcome),
        ("up", "job"): {one["job"] for one in series["up"]},
        ("process_resident_memory_bytes", "job"): {"aliquot-agent"},
        ("process_cpu_seconds_total", "job"): {"aliquot-agent"},
        ("kube_daemonset_status_number_unavailable", "daemonset"): {"aliquot-agent"},
        ("apiserver_admission_webhook_rejection_count", "error_type"): {"calling_webhook_error", "apiserver_internal_error", "no_error"},
        ("apiserver_admission_webhook_rejection_count", "name"): {".*[.]aliquot[.]dev"},
    }
    seen = set()
    for where, query, _ in [*dashboard_queries(), *alert_queries()]:
        for selector in selectors(parsed(query)):
            for matcher in selector.matchers.matchers:
                key = (selector.name, matcher.name)
                if matcher.value != ".*" and matcher.name != "__name__":
                    seen.add(key)
                    assert set(matcher.value.split("|")) <= {str(value) for value in values[key]}, where
    assert seen == values.keys()


def test_assumed_metric_names_exist_in_code():
    sources = " ".join(path.read_text() for folder in ("agent", "scheduler_plugin") for path in (SOURCE_ROOT / folder).rglob("*.py"))
    for name, labels in EVENTUAL.items():
        bare = name.removeprefix(contract.METRIC_PREFIX).removeprefix("scheduler_").removesuffix("_total")
        assert re.search(rf'{bare}"', sources), name
        for label in labels:
            assert f'"{label}"' in sources, label
