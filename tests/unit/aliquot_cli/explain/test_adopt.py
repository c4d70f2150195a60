# SPDX-License-Identifier: Apache-2.0
"""``aliquot adopt report``: what pods of other systems would become, from files and from a cluster."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from aliquot import contract
from aliquot_cli import exit_codes
from aliquot_cli.errors import NotFoundError
from aliquot_cli.explain import adopt
from aliquot_cli.explain.adoption import ADOPTED, DRY_RUN, IGNORED, LEFT, TEMPLATES, WEBHOOK_PATH, Reporter, in_object, rule_of, selects
from tests.rendering import DAEMONSET

HAMI = {"nvidia.com/gpu": "2", "nvidia.com/gpumem": "3000"}


def pod_spec(limits: Mapping[str, str] | None = None, **fields: Any) -> dict[str, Any]:
    return {"containers": [{"name": "main", "resources": {"limits": dict(limits or {})}}], **fields}


def item(kind: str, name: str, *, namespace: str = "ml", owner: str = "", template: bool = True, **pod: Any) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": name, "namespace": namespace, "annotations": pod.pop("annotations", {})}
    if owner:
        metadata["ownerReferences"] = [dict(zip(("kind", "name"), owner.split("/"), strict=True), controller=True)]
    spec = pod.get("spec", pod_spec(HAMI))
    return {"kind": kind, "metadata": metadata, "spec": {"template": {"metadata": {}, "spec": spec}} if template else spec}


def configuration() -> dict[str, Any]:
    documents = yaml.safe_load_all((DAEMONSET / "scheduler/webhook.yaml").read_text())
    (found,) = [one for one in documents if one["kind"] == "MutatingWebhookConfiguration"]
    return dict(found)


class ListedCluster:
    """Answers lists by path."""

    def __init__(self, *items: dict[str, Any], namespaces: Mapping[str, Mapping[str, str]] | None = None, installed: bool = True) -> None:
        self.items, self.installed = items, installed
        self.namespaces = namespaces or {"ml": {}}

    def get(self, path: str, query: Mapping[str, str] | None = None) -> Any:
        del query
        if path == WEBHOOK_PATH:
            if not self.installed:
                raise NotFoundError(path)
            return configuration()
        if path == "/api/v1/namespaces":
            return {"items": [{"metadata": {"name": name, "labels": dict(labels)}} for name, labels in self.namespaces.items()]}
        kinds = {form.format(""): kind for kind, form in TEMPLATES.items()} | {"/api/v1/pods": "Pod"}
        kind = kinds.get(path)
        return {"items": [{key: value for key, value in one.items() if key != "kind"} for one in self.items if one["kind"] == kind]}


def run(*arguments: str, **options: Any) -> Result:
    return CliRunner().invoke(adopt.adopt, ["report", *arguments], **options)


def reported(monkeypatch: pytest.MonkeyPatch, cluster: ListedCluster) -> dict[str, dict[str, Any]]:
    """The rows of the report on a cluster, by namespace and object."""
    monkeypatch.setattr(adopt, "connect", lambda _: cluster)
    monkeypatch.setattr(adopt, "gpu_nodes", lambda _: {})
    return {f"{row['namespace']}/{row['object']}": row for row in json.loads(run("-o", "json").output)}


def test_files_are_reported_without_a_cluster(tmp_path: Path) -> None:
    (tmp_path / "hami.yaml").write_text(yaml.safe_dump_all([item("Deployment", "serve"), item("ConfigMap", "none", spec={"a": 1})]))
    (tmp_path / "README.md").write_text("no manifest: {")
    result = run("-f", str(tmp_path))
    assert result.exit_code == exit_codes.OK
    [titles, line, _, total] = result.output.splitlines()
    assert titles.split() == ["NAMESPACE", "OBJECT", "SYSTEM", "TODAY", "WOULD", "BE", "AS"]
    assert line.split(maxsplit=5)[:5] == ["ml", "Deployment/serve", "HAMi", "-", "translated"]
    assert "main: nvidia.com/vgpu: 2, nvidia.com/vgpu-memory: 6000; schedulerName: aliquot-scheduler" in line
    assert total == "HAMi: 1 translated"


def test_a_refused_pod_is_a_finding() -> None:
    both = item("Pod", "both", template=False, annotations={"gpu-fraction": "0.5", "gpu-memory": "4096"}, spec=pod_spec())
    result = run("-f", "-", "-o", "json", input=yaml.safe_dump(both))
    assert result.exit_code == exit_codes.FINDINGS
    (row,) = json.loads(result.output)
    assert (row["outcome"], row["text"]) == ("refused", "the pod has both annotations gpu-fraction and gpu-memory: keep one")


def test_pods_without_gpus_are_not_reported() -> None:
    result = run("-f", "-", input=yaml.safe_dump(item("Pod", "web", template=False, spec=pod_spec({"cpu": "1"}))))
    assert (result.exit_code, result.output) == (exit_codes.OK, "no pod asks for NVIDIA GPUs\n")


def test_a_file_that_is_no_yaml_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("a: [")
    result = run("-f", str(tmp_path))
    assert result.exit_code == exit_codes.FAILED
    assert "bad.yaml" in result.output


def test_templates_at_any_depth_are_found() -> None:
    job_set = {
        "kind": "JobSet",
        "metadata": {"name": "train", "namespace": "ml"},
        "spec": {"replicatedJobs": [{"name": "a", "template": {"spec": {"template": {"metadata": {}, "spec": pod_spec(HAMI)}}}}] * 2},
    }
    listed = {"kind": "List", "items": [job_set, item("CronJob", "nightly")]}
    assert [asked.object for asked in in_object(listed)] == ["JobSet/train", "JobSet/train", "CronJob/nightly"]


def test_word_on_owner_of_pods_is_reported_as_lost() -> None:
    nightly = item("CronJob", "nightly", spec=pod_spec(HAMI), annotations={"kai.scheduler/batch-min-member": "2"})
    nightly["spec"]["metadata"] = {"labels": {"kai.scheduler/queue": "a"}}
    ((row,), (kept,)) = (
        Reporter((), adopt_nvidia_gpu=False).rows(in_object(one))
        for one in (nightly, item("Job", "other", spec=pod_spec(HAMI, schedulerName="mine"), annotations={"pod-group-name": "g"}))
    )
    assert [warning.split(" has no effect")[0] for warning in row.warnings] == [
        "metadata: annotation kai.scheduler/batch-min-member",
        "spec.metadata: label kai.scheduler/queue",
    ]
    assert not [warning for warning in kept.warnings if "pod-group-name" in warning]


def test_each_controller_counts_once_and_pods_of_other_controllers_by_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = reported(
        monkeypatch,
        ListedCluster(
            item("Deployment", "serve"),
            item("ReplicaSet", "serve-1", owner="Deployment/serve"),
            item("Pod", "serve-1-a", owner="ReplicaSet/serve-1", template=False),
            item("Job", "step", owner="JobSet/train"),
            item("Pod", "step-0", owner="Job/step", template=False),
            *(item("Pod", f"worker-{number}", owner="PyTorchJob/fit", template=False) for number in range(3)),
            item("Pod", "bare", template=False),
        ),
    )
    assert {name: row["pods"] for name, row in rows.items()} == {
        "ml/Deployment/serve": 1,
        "ml/Job/step": 1,
        "ml/PyTorchJob/fit": 3,
        "ml/Pod/bare": 1,
    }


def test_a_report_says_what_happens_today(monkeypatch: pytest.MonkeyPatch) -> None:
    spaces = {
        "plain": {},
        "yes": {contract.LABEL_ADOPT: "true"},
        "dry": {contract.LABEL_ADOPT: "dry-run"},
        "off": {contract.LABEL_WEBHOOK: "ignore", contract.LABEL_ADOPT: "true"},
    }
    pods = [item("Pod", "p", namespace=name, template=False) for name in spaces]
    ours = item("Pod", "ours", namespace="plain", template=False, spec=pod_spec({"nvidia.com/vgpu": "1"}))
    rows = reported(monkeypatch, ListedCluster(*pods, ours, namespaces=spaces))
    today = {name: row["today"] for name, row in rows.items()}
    assert today == {"plain/Pod/p": LEFT, "plain/Pod/ours": "served", "yes/Pod/p": ADOPTED, "dry/Pod/p": DRY_RUN, "off/Pod/p": IGNORED}
    assert {row["outcome"] for name, row in rows.items() if name.endswith("/p")} == {"translated"}


def test_without_the_webhook_every_pod_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = ListedCluster(item("Pod", "p", template=False), namespaces={"ml": {contract.LABEL_ADOPT: "true"}}, installed=False)
    assert reported(monkeypatch, cluster)["ml/Pod/p"]["today"] == LEFT


def test_plain_gpus_stay_with_their_device_plugin_unless_they_are_adopted() -> None:
    plain = item("Pod", "p", template=False, spec=pod_spec({"nvidia.com/gpu": "1"}))
    ((left,), (taken,)) = (Reporter((), adopt_nvidia_gpu=adopt).rows(in_object(plain)) for adopt in (False, True))
    assert (left.outcome, left.system) == ("not ours", "")
    assert (taken.outcome, taken.system) == ("translated", "NVIDIA")


@pytest.mark.parametrize(
    ("selector", "holds"),
    [
        ({}, True),
        ({"matchLabels": {"a": "1"}}, True),
        ({"matchLabels": {"a": "2"}}, False),
        ({"matchExpressions": [{"key": "a", "operator": "In", "values": ["1"]}]}, True),
        ({"matchExpressions": [{"key": "b", "operator": "In", "values": ["1"]}]}, False),
        ({"matchExpressions": [{"key": "b", "operator": "NotIn", "values": ["1"]}]}, True),
        ({"matchExpressions": [{"key": "a", "operator": "Exists"}, {"key": "b", "operator": "DoesNotExist"}]}, True),
        ({"matchExpressions": [{"key": "b", "operator": "Exists"}]}, False),
    ],
)
def test_selectors_are_read_as_the_api_server_reads_them(selector: Mapping[str, Any], holds: bool) -> None:
    assert selects(selector, {"a": "1"}) is holds


def test_the_rule_is_that_of_the_installed_webhook() -> None:
    rule = rule_of(ListedCluster())  # type: ignore[arg-type]
    assert [rule({contract.LABEL_ADOPT: value}) for value in ("true", "dry-run", "false")] == [ADOPTED, DRY_RUN, LEFT]
