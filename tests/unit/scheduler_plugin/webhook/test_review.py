# SPDX-License-Identifier: Apache-2.0
"""What /validate makes of pods that other webhooks changed after ours; the wire is in tests/integration/test_webhook.py."""

import asyncio
import json
from typing import Any

import pytest

from scheduler_plugin.webhook.amounts import Options
from scheduler_plugin.webhook.normalise import GPU_TOLERATION, Normaliser
from scheduler_plugin.webhook.review import Reviews

READY: dict[str, Any] = {"schedulerName": "aliquot-scheduler", "tolerations": [GPU_TOLERATION]}
VOID = [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}]


def container(name: str = "main", limits: dict[str, str] | None = None, **fields: Any) -> dict[str, Any]:
    """A container as the API server has it: requests are copied from limits."""
    amounts = {f"nvidia.com/{resource}": amount for resource, amount in (limits or {}).items()}
    return {"name": name, "resources": {"limits": amounts, "requests": dict(amounts)} if amounts else {}, **fields}


def validated(*containers: dict[str, Any], operation: str = "CREATE", metadata: dict[str, Any] | None = None, **spec: Any) -> str:
    """Return the refusal, or nothing."""
    pod = {"metadata": {"name": "p", **(metadata or {})}, "spec": {"containers": list(containers), **spec}}
    request = {"uid": "r", "operation": operation, "object": pod, "oldObject": pod if operation == "UPDATE" else None}
    body = json.dumps({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}).encode()
    reviews = Reviews(Normaliser(Options(lambda _: (81920, 40960))), lambda _: None)
    response = json.loads(asyncio.run(reviews.validate_adopted(body)))["response"]
    assert response["allowed"] == ("status" not in response)
    return response.get("status", {}).get("message", "")


@pytest.mark.parametrize(
    ("operation", "spec", "announced"),
    [("CREATE", READY, True), ("UPDATE", READY, False), ("CREATE", {"schedulerName": "default-scheduler"}, False)],
    ids=["valid", "an update", "refused"],
)
def test_new_valid_pod_is_announced_as_it_will_be_stored(operation, spec, announced):
    pod = {"metadata": {"name": "p"}, "spec": {"containers": [container(limits={"vgpu": "1"})], **spec}}
    request = {"uid": "r", "operation": operation, "object": pod, "oldObject": pod if operation == "UPDATE" else None}
    found: list[Any] = []
    reviews = Reviews(Normaliser(Options(lambda _: (81920, 40960))), lambda _: None, on_valid=found.append)
    asyncio.run(reviews.validate(json.dumps({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}).encode()))
    assert found == [pod] * announced


def test_a_pod_as_our_webhook_leaves_it_is_let_through():
    main = container(limits={"vgpu": "1", "vgpu-memory": "4k", "vgpu-cores": "50"})
    assert validated(main, container("side", env=VOID), **READY) == ""


def test_a_pod_that_a_replica_with_other_settings_left_is_let_through():
    """It lacks the toleration, and its whole GPU is not counted."""
    assert validated(container(limits={"vgpu": "1"}), schedulerName="aliquot-scheduler") == ""


def test_copy_admitted_by_old_replica_with_retry_annotation_is_allowed():
    assert validated(container(limits={"vgpu": "1"}), metadata={"annotations": {"aliquot.dev/retry": "7"}}, **READY) == ""


@pytest.mark.parametrize(
    ("containers", "spec", "sentence"),
    [
        pytest.param([container(limits={"vgpu-memory": "4Gi"})], READY, "/spec/containers/0/resources", id="memory not in MiB"),
        pytest.param([container(limits={"vgpu": "1"})], {"schedulerName": "default-scheduler"}, "/spec/schedulerName", id="scheduler"),
        pytest.param([container(limits={"vgpu": "1"})], READY | {"nodeName": "n1"}, "use a nodeSelector", id="a node's name"),
        pytest.param(
            [container(limits={"vgpu": "1"}), container("side", env=[{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}])],
            READY,
            "/spec/containers/1/env",
            id="a sidecar that sees all GPUs",
        ),
        pytest.param([container(limits={"mig-1g.10gb": "1"})], {}, "/spec/schedulerName", id="MIG"),
        pytest.param(
            [container(limits={"vgpu": "1", "gpu": "1"})], READY, "comes from a LimitRange of its namespace", id="a LimitRange's GPU"
        ),
        pytest.param([container(limits={"vgpu": "1", "vgpu-cores": "250"})], READY, "which have 100 in all", id="nonsense"),
    ],
)
def test_what_another_webhook_put_in_after_ours_is_refused(containers, spec, sentence):
    assert sentence in validated(*containers, **spec)


def test_the_refusal_says_what_to_do():
    refusal = validated(container(limits={"vgpu": "1"}), schedulerName="default-scheduler")
    assert "give that webhook's MutatingWebhookConfiguration a name that sorts before aliquot" in refusal


def test_running_pod_is_not_checked_again():
    assert validated(container(limits={"vgpu-memory": "4Gi"}), operation="UPDATE") == ""


def test_pod_opted_out_of_other_vocabularies_is_allowed_as_mutate_allowed_it():
    assert validated(container(limits={"gpu": "1", "gpumem": "3000"}), metadata={"labels": {"hami.io/webhook": "ignore"}}) == ""
