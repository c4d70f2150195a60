# SPDX-License-Identifier: Apache-2.0
"""Pods of other systems are left alone until their namespace, or they themselves, ask for Aliquot."""

import asyncio
import base64
import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from aliquot import contract
from aliquot_lab.standin.patches import apply_json_patch
from scheduler_plugin.webhook.amounts import HAMI, Options
from scheduler_plugin.webhook.normalise import Normaliser, Outcome
from scheduler_plugin.webhook.review import Reviews

LABELLED = Normaliser(Options(lambda _: (81920,)), adopts=False)
ADOPTING = Normaliser(Options(lambda _: (81920,)))


def pod(*limits: Mapping[str, str], **fields: Any) -> dict[str, Any]:
    containers = [{"name": f"c{number}", "resources": {"limits": dict(amounts)}} for number, amounts in enumerate(limits or ({},))]
    metadata = {"name": "p", "labels": fields.pop("labels", {}), "annotations": fields.pop("annotations", {})}
    return {"metadata": metadata, "spec": {"containers": containers, **fields}}


SYSTEMS = (
    pytest.param("HAMi", pod({"nvidia.com/gpu": "1", "nvidia.com/gpumem": "3000"}), id="HAMi"),
    pytest.param("KAI", pod(annotations={"gpu-memory": "4096"}, schedulerName="kai-scheduler"), id="KAI"),
    pytest.param("Run:ai", pod(annotations={"gpu-fraction": "0.5"}, schedulerName="runai-scheduler"), id="Run:ai"),
    pytest.param("NVIDIA", pod(annotations={"nvidia.com/container.c0.gpu-memory.request": "4Gi"}), id="NVIDIA's fractions"),
    pytest.param("NVIDIA", pod({"nvidia.com/mig-1g.10gb": "1"}), id="NVIDIA's MIG instances"),
    pytest.param("Volcano", pod({"volcano.sh/vgpu-number": "1", "volcano.sh/vgpu-memory": "3000"}, schedulerName="volcano"), id="Volcano"),
    pytest.param(
        "vgpu-manager",
        pod({"nvidia.com/vgpu-number": "1", "nvidia.com/vgpu-memory": "1024"}, schedulerName="vgpu-scheduler"),
        id="vgpu-manager, with two of our names",
    ),
)


def change(original: dict[str, Any], **words: Any) -> dict[str, Any]:
    changed: dict[str, Any] = json.loads(json.dumps(original))
    for part in ("labels", "annotations"):
        changed["metadata"][part] |= words.pop(part, {})
    changed["spec"] |= words
    return changed


@pytest.mark.parametrize(("system", "original"), SYSTEMS)
def test_a_pod_of_another_system_is_left_alone_where_nothing_says_otherwise(system: str, original: dict[str, Any]) -> None:
    assert LABELLED.admit(original) == Outcome(is_gpu_pod=False, system=system)


@pytest.mark.parametrize(("system", "original"), SYSTEMS)
@pytest.mark.parametrize(
    "words",
    [
        {"labels": {contract.LABEL_ADOPT: "true"}},
        {"annotations": {contract.ANNOTATION_PLACEMENT: "spread"}},
        {"schedulerName": contract.SCHEDULER_NAME},
    ],
    ids=["label", "annotation", "schedulerName"],
)
def test_a_pod_that_says_something_to_aliquot_is_served(system: str, original: dict[str, Any], words: dict[str, Any]) -> None:
    found = LABELLED.admit(change(original, **words))
    known = "KAI" if system == "Run:ai" and "schedulerName" in words else system  # Run:ai's other words are KAI's
    assert (found.refusal, found.is_gpu_pod, found.system) == ("", True, known)
    assert found == ADOPTING.admit(change(original, **words))


@pytest.mark.parametrize(("system", "original"), SYSTEMS)
def test_a_pod_of_an_adopted_namespace_can_stay_with_its_owner(system: str, original: dict[str, Any]) -> None:
    assert ADOPTING.admit(change(original, labels={contract.LABEL_ADOPT: "false"})) == Outcome(is_gpu_pod=False, system=system)
    assert ADOPTING.admit(original).is_gpu_pod


@pytest.mark.parametrize("name", [*contract.RESOURCES_OF_VGPUS])
@pytest.mark.parametrize("label", ["false", "true", ""])
def test_our_own_resources_are_served_everywhere(name: str, label: str) -> None:
    ours = pod({name: "1"}, labels={contract.LABEL_ADOPT: label})
    assert LABELLED.admit(ours) == ADOPTING.admit(ours)
    assert LABELLED.admit(ours).is_gpu_pod
    assert LABELLED.admit(ours).system == ""


def test_a_pod_that_mixes_our_resources_and_anothers_is_ours() -> None:
    mixed = pod({"nvidia.com/vgpu-memory": "4096"}, {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "3000"})
    assert LABELLED.admit(mixed) == ADOPTING.admit(mixed)
    one = pod({"nvidia.com/vgpu": "1", "nvidia.com/gpumem": "3000"})
    assert "mixes two vocabularies" in LABELLED.admit(one).refusal


def test_hamis_resources_are_hamis_also_under_our_name() -> None:
    options = Options(lambda _: (81920,), hami=HAMI.named({"count": "nvidia.com/vgpu"}))
    asked = pod({"nvidia.com/vgpu": "1", "nvidia.com/gpumem": "3000"})
    assert Normaliser(options, adopts=False).admit(asked) == Outcome(is_gpu_pod=False, system="HAMi")
    assert Normaliser(options).admit(asked).is_gpu_pod


def test_zeros_of_another_system_are_not_touched_where_it_is_at_home() -> None:
    zeros = pod({"nvidia.com/gpu": "0", "nvidia.com/gpumem": "0"})
    assert not LABELLED.admit(zeros).patch
    assert ADOPTING.admit(zeros).patch


# --- the endpoints -------------------------------------------------------------------------------------------------------


def review(path: str, reviewed: dict[str, Any]) -> tuple[dict[str, Any], Counter[tuple[str, str]]]:
    """Call one endpoint; return the reply and what was counted."""
    counted: Counter[tuple[str, str]] = Counter()
    reviews = Reviews(ADOPTING, lambda _: None, lambda system, outcome: counted.update([(system, outcome)]))
    request = {"uid": "r", "operation": "CREATE", "object": reviewed}
    body = json.dumps({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}).encode()
    return json.loads(asyncio.run(reviews.by_path()[path](body)))["response"], counted


REFUSED = pod(annotations={"gpu-memory": "4096", "gpu-fraction": "0.5"})


@pytest.mark.parametrize(("system", "original"), SYSTEMS)
def test_a_dry_run_changes_nothing_warns_and_counts(system: str, original: dict[str, Any]) -> None:
    reply, counted = review("/mutate/dry-run", original)
    assert (reply["allowed"], "patch" in reply) == (True, False)
    assert reply["warnings"][0].startswith(f"dry run: Aliquot would adopt this pod of {system} as ")
    assert f"schedulerName: {contract.SCHEDULER_NAME}" in reply["warnings"][0]
    assert counted == {(system, "would_adopt"): 1}


def test_a_dry_run_says_what_each_container_would_ask_for() -> None:
    reply, _ = review("/mutate/dry-run", pod({"nvidia.com/gpu": "2", "nvidia.com/gpumem": "3000", "nvidia.com/priority": "0"}))
    wanted = 'c0: nvidia.com/vgpu: 2, nvidia.com/vgpu-memory: 6000; aliquot.dev/priority: "high"; schedulerName: aliquot-scheduler'
    assert reply["warnings"] == [f"dry run: Aliquot would adopt this pod of HAMi as {wanted}"]


def test_a_dry_run_refuses_nothing() -> None:
    reply, counted = review("/mutate/dry-run", REFUSED)
    assert reply["allowed"]
    assert reply["warnings"][0].startswith("dry run: Aliquot would refuse this pod of KAI: the pod has both annotations")
    assert counted == {("KAI", "would_refuse"): 1}


@pytest.mark.parametrize(
    "reviewed", [pod({"nvidia.com/vgpu-memory": "4096"}), pod({"cpu": "1"}), {"spec": 1}], ids=["ours", "no GPU", "none"]
)
def test_a_dry_run_has_nothing_to_say_of_other_pods(reviewed: dict[str, Any]) -> None:
    reply, counted = review("/mutate/dry-run", reviewed)
    assert reply == {"uid": "r", "allowed": True}
    assert not counted


def test_what_became_of_pods_is_counted_by_system() -> None:
    hami = pod({"nvidia.com/gpu": "1", "nvidia.com/gpumem": "3000"})
    assert review("/mutate/adopt", hami)[1] == {("HAMi", "adopted"): 1}
    assert review("/mutate/adopt", REFUSED)[1] == {("KAI", "refused"): 1}
    assert review("/mutate", change(hami, labels={contract.LABEL_ADOPT: "false"}))[1] == {("HAMi", "left"): 1}
    assert not review("/mutate/adopt", pod({"nvidia.com/vgpu": "1"}))[1]


@pytest.mark.parametrize(("system", "original"), SYSTEMS)
@pytest.mark.parametrize(("mutate", "validate"), [("/mutate", "/validate"), ("/mutate/adopt", "/validate/adopt")])
def test_what_mutate_makes_of_a_pod_is_valid(mutate: str, validate: str, system: str, original: dict[str, Any]) -> None:
    del system
    made = json.loads(json.dumps(original))
    reply, _ = review(mutate, original)
    apply_json_patch(made, json.loads(base64.b64decode(reply.get("patch", b"W10="))))
    assert (made != original) == (mutate == "/mutate/adopt")
    assert review(validate, made)[0] == {"uid": "r", "allowed": True}
