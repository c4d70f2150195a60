# SPDX-License-Identifier: Apache-2.0
"""The files of deploy/monitoring as files: what Grafana and the operator would reject, and what would go stale."""

import importlib.util
import json
import re

import pytest
import yaml

from aliquot.paths import SOURCE_ROOT

DIRECTORY = SOURCE_ROOT / "deploy/monitoring"


@pytest.fixture(scope="module")
def maker():
    spec = importlib.util.spec_from_file_location("make_dashboards", DIRECTORY / "make_dashboards.py")
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules["make_dashboards"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_dashboards_equal_generated_ones(maker):
    assert {path.stem for path in (DIRECTORY / "dashboards").glob("*.json")} == set(maker.DASHBOARDS)
    for name, dashboard in maker.DASHBOARDS.items():
        assert (DIRECTORY / "dashboards" / f"{name}.json").read_text() == maker.to_json(dashboard), "run make_dashboards.py"


def test_panels_have_unique_ids_and_do_not_overlap(maker):
    for name in maker.DASHBOARDS:
        panels = json.loads((DIRECTORY / "dashboards" / f"{name}.json").read_text())["panels"]
        assert len({panel["id"] for panel in panels}) == len(panels)
        taken: set[tuple[int, int]] = set()
        for panel in panels:
            place = panel["gridPos"]
            cells = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}
            assert place["x"] + place["w"] <= maker.GRID_WIDTH
            assert not cells & taken, panel["title"]
            taken |= cells


def test_every_alert_states_severity_meaning_and_action():
    rules = yaml.safe_load_all((DIRECTORY / "alerts.yaml").read_text())
    alerts = [alert for rule in rules for group in rule["spec"]["groups"] for alert in group["rules"]]
    assert len({alert["alert"] for alert in alerts}) == len(alerts)
    for alert in alerts:
        assert alert["alert"].startswith("Aliquot")
        assert alert["labels"]["severity"] in ("warning", "critical")
        assert alert["annotations"]["summary"]
        assert len(alert["annotations"]["description"]) > 40


def test_every_monitoring_file_is_applied():
    kustomization = yaml.safe_load((DIRECTORY / "kustomization.yaml").read_text())
    (generator,) = kustomization["configMapGenerator"]
    assert {f"dashboards/{path.name}" for path in (DIRECTORY / "dashboards").iterdir()} == set(generator["files"])
    assert {path.name for path in DIRECTORY.glob("*.yaml")} - {"kustomization.yaml"} == set(kustomization["resources"])


def test_the_monitors_select_the_services_of_the_pods_that_are_deployed():
    objects = list(yaml.safe_load_all((DIRECTORY / "servicemonitor.yaml").read_text()))
    monitors, services = (
        {one["metadata"]["name"]: one for one in objects if one["kind"] == kind} for kind in ("ServiceMonitor", "Service")
    )
    for name, manifest in (("aliquot-agent", "base/agent.yaml"), ("aliquot-scheduler", "scheduler/scheduler.yaml")):
        documents = yaml.safe_load_all((SOURCE_ROOT / "deploy/daemonset" / manifest).read_text())
        workload = next(one for one in documents if one["kind"] in ("DaemonSet", "Deployment"))
        labels = workload["spec"]["template"]["metadata"]["labels"]
        service = services[f"{name}-metrics"]
        assert service["spec"]["selector"].items() <= labels.items()
        ports = {
            port["name"]: port["containerPort"]
            for one in workload["spec"]["template"]["spec"]["containers"]
            for port in one.get("ports", ())
        }
        assert all(ports[port["targetPort"]] == port["port"] for port in service["spec"]["ports"])
        assert monitors[name]["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
        endpoints = monitors[name]["spec"]["endpoints"]
        assert {endpoint["port"] for endpoint in endpoints} <= {port["name"] for port in service["spec"]["ports"]}
        assert all(endpoint["honorLabels"] for endpoint in endpoints), "what is said of a pod must stay that pod's"


def test_commands_that_alerts_name_exist():
    text = " ".join((DIRECTORY / "alerts.yaml").read_text().split())
    named = set(re.findall(r"`aliquot ([a-z]+)", text))
    from aliquot_cli.__main__ import main

    assert named
    assert named <= set(main.list_commands(None))
