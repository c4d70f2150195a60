# SPDX-License-Identifier: Apache-2.0
"""What the label of a class makes of pods and pod templates. What the manifest says itself wins."""

import json
from typing import Any

import pytest

from aliquot import contract
from aliquot_lab.standin.patches import apply_json_patch
from scheduler_plugin.core.classes import DEFAULT_CLASSES, parse_classes
from scheduler_plugin.webhook.amounts import Options
from scheduler_plugin.webhook.normalise import Normaliser
from scheduler_plugin.webhook.templates import Templates

GPU_MIB = 81920
VGPU, MEMORY, PERCENT, CORES = contract.RESOURCES_OF_VGPUS
QUEUE, QUEUE_PRIORITY = "kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/priority-class"


def admitted(pod: dict[str, Any], sizes: tuple[int, ...] = (GPU_MIB,), **classes: Any) -> dict[str, Any]:
    """The pod after admission."""
    outcome = Normaliser(Options(lambda _: sizes, classes=parse_classes(classes))).admit(pod)
    assert outcome.refusal == ""
    result: dict[str, Any] = json.loads(json.dumps(pod))
    apply_json_patch(result, json.loads(json.dumps(outcome.patch)))
    return result


def of_class(name: str, limits: dict[str, str], **fields: Any) -> dict[str, Any]:
    metadata = {
        "name": "p",
        "labels": {contract.LABEL_CLASS: name, **fields.pop("labels", {})},
        "annotations": fields.pop("annotations", {}),
    }
    return {"metadata": metadata, "spec": {"containers": [{"name": "main", "resources": {"limits": limits}}], **fields}}


def said(pod: dict[str, Any]) -> tuple[str, dict[str, str], dict[str, str]]:
    """PriorityClass, our annotations and the limits of the first container."""
    annotations = pod["metadata"].get("annotations", {})
    limits = pod["spec"]["containers"][0]["resources"]["limits"]
    ours = {name.removeprefix("aliquot.dev/"): text for name, text in annotations.items() if name.startswith("aliquot.dev/")}
    return pod["spec"].get("priorityClassName", ""), ours, limits


QUARTER = {VGPU: "1", MEMORY: str(GPU_MIB // 4), CORES: "25"}
TRAINING = {"priority": "low", "min-runtime": "5m", "movable": "true"}
INFERENCE = {"priority": "high", "movable": "false"}


@pytest.mark.parametrize(
    ("name", "limits", "wanted"),
    [
        ("training", {VGPU: "2"}, ("aliquot-training", TRAINING, {VGPU: "2"})),
        ("training", {MEMORY: "4096"}, ("aliquot-training", TRAINING, {VGPU: "1", MEMORY: "4096"})),
        ("inference", {VGPU: "1"}, ("aliquot-inference", INFERENCE, {VGPU: "1"})),
        ("interactive", {VGPU: "1"}, ("aliquot-interactive", {"movable": "false", "cores-mode": "weight"}, QUARTER)),
        (
            "interactive",
            {VGPU: "2"},
            ("aliquot-interactive", {"movable": "false", "cores-mode": "weight"}, {VGPU: "2", MEMORY: str(GPU_MIB // 2), CORES: "50"}),
        ),
        ("interactive", {MEMORY: "4096"}, ("aliquot-interactive", {"movable": "false"}, {VGPU: "1", MEMORY: "4096"})),
        ("interactive", {PERCENT: "100"}, ("aliquot-interactive", {"movable": "false"}, {VGPU: "1", PERCENT: "100"})),
        (
            "interactive",
            {"nvidia.com/mig-1g.10gb": "1"},
            ("aliquot-interactive", {"movable": "false"}, {"nvidia.com/mig-1g.10gb": "1"}),
        ),
        (
            "interactive",
            {"nvidia.com/gpu": "1", "nvidia.com/gpumem-percentage": "100"},
            ("aliquot-interactive", {"movable": "false"}, {VGPU: "1"}),
        ),
    ],
)
def test_a_label_sets_what_its_class_stands_for(name: str, limits: dict[str, str], wanted: Any) -> None:
    assert said(admitted(of_class(name, limits))) == wanted


def test_a_default_share_is_a_percentage_where_gpus_differ_in_size() -> None:
    _, _, limits = said(admitted(of_class("interactive", {VGPU: "1"}), sizes=(40960, 81920)))
    assert limits == {VGPU: "1", PERCENT: "25", CORES: "25"}


@pytest.mark.parametrize("name", sorted(DEFAULT_CLASSES))
def test_what_the_manifest_says_itself_wins(name: str) -> None:
    explicit = {
        contract.ANNOTATION_PRIORITY: "high" if name != "inference" else "low",
        contract.ANNOTATION_MIN_RUNTIME: "1h",
        contract.ANNOTATION_MOVABLE: "true" if name != "training" else "false",
        contract.ANNOTATION_CORES_MODE: "ceiling",
    }
    limits = {VGPU: "1", MEMORY: "1024", CORES: "5"}
    pod = of_class(name, limits, annotations=explicit, priorityClassName="mine")
    assert said(admitted(pod)) == ("mine", {key.removeprefix("aliquot.dev/"): text for key, text in explicit.items()}, limits)


def test_whole_gpus_asked_for_by_isolation_stay_whole() -> None:
    pod = of_class("interactive", {VGPU: "1"}, annotations={contract.ANNOTATION_ISOLATION: "exclusive"})
    assert said(admitted(pod))[2] == {VGPU: "1"}


def test_the_words_of_another_system_win_too() -> None:
    limits = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "3000", "nvidia.com/priority": "0"}
    _, annotations, amounts = said(admitted(of_class("training", limits)))
    assert annotations["priority"] == "high"
    assert amounts == {VGPU: "1", MEMORY: "3000"}


def test_an_unknown_class_is_refused_with_those_that_are() -> None:
    outcome = Normaliser(Options(lambda _: ())).admit(of_class("notebook", {VGPU: "1"}))
    assert outcome.refusal == (
        f"label {contract.LABEL_CLASS}: expected one of inference, interactive, training, found 'notebook': correct it, or remove it"
    )


def test_a_pod_without_a_gpu_is_not_changed() -> None:
    pod = of_class("training", {"cpu": "1"})
    assert admitted(pod) == pod


@pytest.mark.parametrize("name", sorted(DEFAULT_CLASSES))
def test_a_second_review_changes_nothing(name: str) -> None:
    once = admitted(of_class(name, {VGPU: "1"}))
    assert admitted(once) == once


def test_the_api_server_computes_the_priority_again() -> None:
    """Its admission has filled in the priority of a pod without a class; a value that differs from the class would be refused."""
    pod = of_class("inference", {VGPU: "1"}, priority=0, preemptionPolicy="PreemptLowerPriority")
    spec = admitted(pod)["spec"]
    assert (spec["priorityClassName"], spec["priority"], spec["preemptionPolicy"]) == ("aliquot-inference", None, None)


def test_priority_stays_where_the_pod_names_its_class() -> None:
    pod = of_class("inference", {VGPU: "1"}, priorityClassName="mine", priority=7, preemptionPolicy="Never")
    spec = admitted(pod)["spec"]
    assert (spec["priorityClassName"], spec["priority"], spec["preemptionPolicy"]) == ("mine", 7, "Never")


def test_an_operator_changes_a_class_in_one_place() -> None:
    changed: dict[str, Any] = {"interactive": {"priorityClass": "people", "memoryPercent": 0, "cores": 10, "annotations": {}}}
    assert said(admitted(of_class("interactive", {VGPU: "1"}), **changed)) == ("people", {}, {VGPU: "1", CORES: "10"})


# --- Kueue ---------------------------------------------------------------------------------------------------------------


def test_a_template_gets_the_priority_before_the_queue_reads_it() -> None:
    template = of_class("training", {VGPU: "1"})
    job: dict[str, Any] = {"metadata": {"name": "j", "labels": {QUEUE: "q"}}, "spec": {"template": template}}
    apply_json_patch(job, list(Templates(Normaliser(Options(lambda _: (GPU_MIB,)))).admit("batch", "Job", job).patch))
    assert job["spec"]["template"]["spec"]["priorityClassName"] == "aliquot-training"
    assert job["metadata"]["labels"] == {QUEUE: "q"}, "Kueue takes the pods' PriorityClass"


@pytest.mark.parametrize(
    ("labels", "wanted"),
    [
        pytest.param({QUEUE: "q"}, {QUEUE: "q", QUEUE_PRIORITY: "gold"}, id="in a queue"),
        pytest.param({}, {}, id="in no queue"),
        pytest.param({QUEUE: "q", QUEUE_PRIORITY: "mine"}, {QUEUE: "q", QUEUE_PRIORITY: "mine"}, id="with a priority of its own"),
    ],
)
def test_a_class_can_name_a_priority_of_kueue(labels: dict[str, str], wanted: dict[str, str]) -> None:
    options = Options(lambda _: (GPU_MIB,), classes=parse_classes({"training": {"kueuePriorityClass": "gold"}}))
    job: dict[str, Any] = {"metadata": {"name": "j", "labels": dict(labels)}, "spec": {"template": of_class("training", {VGPU: "1"})}}
    apply_json_patch(job, list(Templates(Normaliser(options)).admit("batch", "Job", job).patch))
    assert job["metadata"]["labels"] == wanted
    pod = of_class("training", {VGPU: "1"}, labels=labels)
    assert admitted(pod, training={"kueuePriorityClass": "gold"})["metadata"]["labels"] == {contract.LABEL_CLASS: "training"} | wanted


def test_updates_leave_the_label_of_the_queue_as_it_is() -> None:
    options = Options(lambda _: (GPU_MIB,), classes=parse_classes({"training": {"kueuePriorityClass": "gold"}}))
    job: dict[str, Any] = {"metadata": {"name": "j", "labels": {QUEUE: "q"}}, "spec": {"template": of_class("training", {VGPU: "1"})}}
    patch = Templates(Normaliser(options)).admit("batch", "Job", job, job).patch
    assert not [operation for operation in patch if operation["path"] == "/metadata/labels"]
