# SPDX-License-Identifier: Apache-2.0
"""Alerts and panels over series that a cluster may well have, evaluated by Prometheus' own ``promtool``.

tests/integration/test_prometheus.py runs them over a real scrape; here is what a minute of scraping cannot show: counters that begin above
zero, series of other programs, variants without a scheduler.
"""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from aliquot.paths import SOURCE_ROOT
from tests.integration.prometheus import rule_groups

MONITORING = SOURCE_ROOT / "deploy/monitoring"
PROMTOOL = shutil.which("promtool")
pytestmark = pytest.mark.skipif(PROMTOOL is None, reason="needs promtool, which is not installed (Debian: apt-get install prometheus)")

REJECTIONS = 'apiserver_admission_webhook_rejection_count{name="%s",error_type="%s",job="apiserver",instance="10.0.0.1:6443"}'
OURS, FAILED = "normalise.aliquot.dev", "calling_webhook_error"
API_SERVER = 'up{job="apiserver",instance="10.0.0.1:6443"}'


def panel(dashboard: str, title: str) -> str:
    """The query of a panel, as Grafana fills it in."""
    panels = json.loads((MONITORING / "dashboards" / f"{dashboard}.json").read_text())["panels"]
    [found] = [one for one in panels if one["title"] == title]
    return found["targets"][0]["expr"].replace("$__rate_interval", "5m").replace("$node", ".*")


def verify(directory: Path, series: dict[str, str], *expected: tuple[str, str, dict[str, float]]) -> None:
    """Evaluate queries over series that are scraped every 15 s.

    Args:
        series: values in promtool's notation by series.
        expected: a query, when to run it, and the values that it must give by series.
    """
    (directory / "rules.yaml").write_text(yaml.safe_dump({"groups": rule_groups((MONITORING / "alerts.yaml").read_text())}))
    asked: list[dict[str, Any]] = [
        {"expr": query, "eval_time": at, "exp_samples": [{"labels": labels, "value": value} for labels, value in wanted.items()]}
        for query, at, wanted in expected
    ]
    test = {
        "interval": "15s",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": asked,
    }
    (directory / "test.yaml").write_text(yaml.safe_dump({"rule_files": ["rules.yaml"], "evaluation_interval": "15s", "tests": [test]}))
    done = subprocess.run(
        [str(PROMTOOL), "test", "rules", "test.yaml"], cwd=directory, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def firing(alert: str) -> str:
    return f'count(ALERTS{{alertname="{alert}",alertstate="firing"}})'


@pytest.mark.parametrize(
    ("name", "kind", "fires"),
    [
        pytest.param(OURS, FAILED, True, id="ours could not be called"),
        pytest.param(OURS, "no_error", False, id="ours refused a pod"),
        pytest.param("normalise.example.org", FAILED, False, id="another"),
    ],
)
def test_first_webhook_failures_are_reported_without_earlier_zero_sample(tmp_path: Path, name: str, kind: str, fires: bool) -> None:
    series = {REJECTIONS % (name, kind): "_x40 7x80", API_SERVER: "1x120"}
    verify(tmp_path, series, (firing("AliquotWebhookFails"), "11m", {"{}": 1} if fires else {}))


def test_webhook_alert_ends_after_last_failure(tmp_path: Path) -> None:
    series = {REJECTIONS % (OURS, FAILED): "_x40 7x80", API_SERVER: "1x120"}
    verify(tmp_path, series, (firing("AliquotWebhookFails"), "20m", {}))


def test_failures_from_before_prometheus_are_not_reported(tmp_path: Path) -> None:
    """Such as those of the installation itself, before the webhook ran."""
    series = {REJECTIONS % (OURS, FAILED): "7x40", API_SERVER: "1x40"}
    verify(tmp_path, series, *((firing("AliquotWebhookFails"), at, {}) for at in ("30s", "6m")))


def test_further_failures_of_the_webhook_are_reported(tmp_path: Path) -> None:
    series = {REJECTIONS % (OURS, FAILED): "7x40 8x40", API_SERVER: "1x80"}
    verify(tmp_path, series, (firing("AliquotWebhookFails"), "9m", {}), (firing("AliquotWebhookFails"), "11m", {"{}": 1}))


def test_nodes_without_an_agent_that_could_be_scraped_are_reported(tmp_path: Path) -> None:
    series = {
        'kube_daemonset_status_number_unavailable{namespace="aliquot-system",daemonset="aliquot-agent",job="kube-state-metrics"}': "1x80"
    }
    verify(tmp_path, series, (firing("AliquotAgentMissing"), "10m", {}), (firing("AliquotAgentMissing"), "16m", {"{}": 1}))


@pytest.mark.parametrize(
    ("dashboard", "title", "series", "labels"),
    [
        ("cluster", "XIDs", 'aliquot_xids_total{node="n",device_uuid="GPU-1",xid="79"}', '{xid="79"}'),
        ("cluster", "Containers refused", 'aliquot_refusals_total{node="n",reason="no-room"}', '{reason="no-room"}'),
        ("node", "NVML errors", 'aliquot_nvml_errors_total{node="n",call="nvmlInit",code="9"}', '{call="nvmlInit", code="9"}'),
    ],
)
def test_the_first_event_of_a_kind_is_drawn(tmp_path: Path, dashboard: str, title: str, series: str, labels: str) -> None:
    """Its counter begins at 1; a second event and the agent's next start are drawn like any increase."""
    query = panel(dashboard, title)
    values = "_x40 1x40 2x40 0x40"
    verify(tmp_path, {series: values}, (query, "11m", {labels: 1}), (query, "18m", {labels: 0}), (query, "34m", {labels: 0}))
    verify(tmp_path, {series: "0x40 3x40"}, (f"round({query})", "12m", {labels: 3}))


@pytest.mark.parametrize(
    ("title", "name"),
    [("Resident memory of the agent", "process_resident_memory_bytes"), ("CPU of the agent", "process_cpu_seconds_total")],
)
def test_panels_of_the_agent_draw_no_other_program_of_its_node(tmp_path: Path, title: str, name: str) -> None:
    series = {
        f'{name}{{job="aliquot-agent",node="n",pod="aliquot-agent-x"}}': "50+15x40",
        f'{name}{{job="kubelet",node="n",metrics_path="/metrics"}}': "150+30x40",
    }
    verify(tmp_path, series, (f"count({panel('node', title)})", "9m", {"{}": 1}))
