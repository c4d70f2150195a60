# SPDX-License-Identifier: Apache-2.0
"""Every pod that a manifest makes is counted, or the manifest is refused."""

import click
import pytest
import yaml

from aliquot_cli.explain.manifests import pods_of

TEMPLATE = {"spec": {"containers": [{"name": "m", "image": "x", "resources": {"limits": {"nvidia.com/vgpu-memory": 100}}}]}}


def document(kind: str, api_version: str = "v1", **spec) -> dict:
    return {"apiVersion": api_version, "kind": kind, "metadata": {"name": "it"}, "spec": {"template": TEMPLATE} | spec}


def names_of(tmp_path, *documents: dict) -> list[str]:
    manifest = tmp_path / "new.yaml"
    manifest.write_text(yaml.safe_dump_all(documents))
    return [pod.name for pod in pods_of(manifest, ())]


@pytest.mark.parametrize(
    ("made", "count"),
    [
        (document("Deployment", "apps/v1"), 1),
        (document("StatefulSet", "apps/v1", replicas=3), 3),
        (document("Deployment", "apps/v1", replicas=None), 1),
        (document("Job", "batch/v1", parallelism=3), 3),
        (document("Job", "batch/v1", parallelism=3, completions=2), 2),
        (document("Job", "batch/v1", completions=5), 1),
        ({"apiVersion": "batch/v1", "kind": "CronJob", "spec": {"jobTemplate": {"spec": {"template": TEMPLATE, "parallelism": 2}}}}, 2),
    ],
)
def test_pods_that_run_at_a_time_are_counted(tmp_path, made, count):
    assert len(names_of(tmp_path, made)) == count


def test_objects_without_pods_are_skipped(tmp_path):
    others = [document("Service"), document("Ingress", "networking.k8s.io/v1"), document("PodDisruptionBudget", "policy/v1")]
    assert names_of(tmp_path, *others, document("Deployment", "apps/v1")) == ["it-0"]


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (document("DaemonSet", "apps/v1"), "the pods of DaemonSet it cannot be counted: it creates a pod on every node"),
        (document("PyTorchJob", "kubeflow.org/v1"), "the pods of PyTorchJob it cannot be counted: expected Pod, Deployment, "),
        (document("JobSet", "jobset.x-k8s.io/v1alpha2"), "the pods of JobSet it cannot be counted"),
    ],
)
def test_uncountable_object_is_refused_even_next_to_countable_ones(tmp_path, other, says):
    with pytest.raises(click.ClickException) as caught:
        names_of(tmp_path, document("Deployment", "apps/v1"), other)
    assert says in caught.value.message


def test_priority_class_counts_when_known_and_is_named_when_unknown(tmp_path, capsys):
    def pod(name: str, **spec) -> dict:
        return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": TEMPLATE["spec"] | spec}

    manifest = tmp_path / "new.yaml"
    documents = [
        pod("critical", priorityClassName="system-node-critical"),
        pod("own", priorityClassName="mine"),
        pod("given", priorityClassName="theirs", priority=7),
    ]
    manifest.write_text(yaml.safe_dump_all(documents))
    assert {one.name: one.priority for one in pods_of(manifest, ())} == {"critical": 2_000_001_000, "own": 0, "given": 7}
    (line,) = capsys.readouterr().err.splitlines()
    assert "the priority of class mine is unknown" in line


def test_priority_of_a_class_of_work_is_named_when_unknown(tmp_path, capsys):
    manifest = tmp_path / "class.yaml"
    spec = {**TEMPLATE["spec"]}
    manifest.write_text(
        yaml.safe_dump({"kind": "Pod", "metadata": {"name": "p", "labels": {"aliquot.dev/class": "training"}}, "spec": spec})
    )
    assert [one.priority for one in pods_of(manifest, ())] == [0]
    assert "the priority of class aliquot-training is unknown" in capsys.readouterr().err
