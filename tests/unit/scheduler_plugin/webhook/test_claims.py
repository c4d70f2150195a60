# SPDX-License-Identifier: Apache-2.0
"""Pods of every vocabulary become pods with claims, or are refused with a sentence; no pod keeps an amount that no node offers."""

import asyncio
import base64
import copy
import json
from typing import Any

import pytest

from aliquot_lab.standin.patches import apply_json_patch
from scheduler_plugin.core.claims.templates import is_ours
from scheduler_plugin.core.cluster.pods import asks_gpu
from scheduler_plugin.webhook.amounts import Options
from scheduler_plugin.webhook.normalise import Normaliser, Outcome
from scheduler_plugin.webhook.review import Reviews
from tests.unit.scheduler_plugin.webhook.test_golden import FILES, GPU_MIB, PROFILES, read
from tests.unit.scheduler_plugin.webhook.test_normalise import VOID, make_pod

RULES = Normaliser(Options(lambda _: (GPU_MIB,), mig_profiles=lambda _: PROFILES), as_claims=True)


def changed(pod: dict[str, Any], outcome: Outcome) -> dict[str, Any]:
    """The pod after the patch."""
    assert outcome.refusal == ""
    patched = copy.deepcopy(pod)
    apply_json_patch(patched, json.loads(json.dumps(outcome.patch)))
    return patched


def translated(pod: dict[str, Any]) -> dict[str, Any]:
    return changed(pod, RULES.admit(pod))


def containers_of(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]]


def asks(container: dict[str, Any]) -> bool:
    resources = container.get("resources") or {}
    return asks_gpu({**(resources.get("limits") or {}), **(resources.get("requests") or {})})


@pytest.mark.parametrize("name", FILES)
def test_every_vocabulary_becomes_claims_or_a_refusal_with_reason(name):
    pod = read(name)["pod"]
    as_resources = Normaliser(RULES.options).admit(pod)
    outcome = RULES.admit(pod)
    if as_resources.refusal or not as_resources.is_gpu_pod:
        assert (outcome.refusal, outcome.is_gpu_pod, outcome.templates) == (as_resources.refusal, as_resources.is_gpu_pod, ())
        return
    if outcome.refusal:
        assert any(word in outcome.refusal for word in ("MIG instances", "percentage", "not available")), outcome.refusal
        return
    before, after = changed(pod, as_resources), changed(pod, outcome)
    assert not any(map(asks, containers_of(after)))
    uses = [[claim["name"] for claim in one.get("resources", {}).get("claims", ())] for one in containers_of(after)]
    assert [len(one) for one in uses] == [int(asks(one)) for one in containers_of(before)]
    claims = {claim["name"]: claim["resourceClaimTemplateName"] for claim in after["spec"]["resourceClaims"]}
    assert sorted(claims) == sorted(name for one in uses for name in one)
    assert set(claims.values()) == {template.name for template in outcome.templates}


@pytest.mark.parametrize("name", FILES)
def test_pod_with_claims_stays_unchanged_when_webhook_is_called_again(name):
    pod = read(name)["pod"]
    outcome = RULES.admit(pod)
    if outcome.refusal or not outcome.is_gpu_pod:
        return
    again = RULES.admit(changed(pod, outcome))
    assert (again.refusal, again.patch, again.templates) == ("", (), ())
    assert RULES.required_rules().admit(changed(pod, outcome)).patch == ()


def test_enough_of_the_examples_become_claims():
    assert sum(bool(RULES.admit(read(name)["pod"]).templates) for name in FILES) >= 30


def test_containers_of_one_shape_share_template_and_have_own_claims():
    limits = {"nvidia.com/vgpu-memory": "4Gi", "cpu": "1"}
    pod = make_pod(containers=[{"name": name, "resources": {"limits": dict(limits)}} for name in ("a", "b")])
    found = translated(pod)
    assert [one["resources"]["claims"] for one in found["spec"]["containers"]] == [
        [{"name": "aliquot-vgpu-0", "request": "vgpu"}],
        [{"name": "aliquot-vgpu-1", "request": "vgpu"}],
    ]
    assert [one["resources"]["limits"] for one in found["spec"]["containers"]] == [{"cpu": "1"}] * 2
    assert len({claim["resourceClaimTemplateName"] for claim in found["spec"]["resourceClaims"]}) == 1
    assert len(RULES.admit(pod).templates) == 1


def test_claims_of_the_pod_itself_stay_and_keep_their_names():
    own = {"name": "aliquot-vgpu-0", "resourceClaimName": "mine"}
    main = {"name": "main", "resources": {"limits": {"nvidia.com/vgpu": "1"}, "claims": [{"name": "aliquot-vgpu-0"}]}}
    found = translated(make_pod(containers=[main], resourceClaims=[own]))
    assert found["spec"]["resourceClaims"][0] == own
    assert [claim["name"] for claim in found["spec"]["containers"][0]["resources"]["claims"]] == ["aliquot-vgpu-0", "aliquot-vgpu-1"]


def test_container_beside_one_with_claim_sees_no_gpu():
    pod = make_pod(containers=[{"name": "main", "resources": {"limits": {"nvidia.com/vgpu": "1"}}}, {"name": "side"}])
    assert translated(pod)["spec"]["containers"][1]["env"] == VOID


def test_gang_is_refused_and_placement_is_warned_of():
    gang = {"aliquot.dev/gang": "g", "aliquot.dev/gang-min": "2"}
    assert "gangs are not available" in RULES.admit(make_pod({"nvidia.com/vgpu": "1"}, annotations=gang)).refusal
    outcome = RULES.admit(make_pod({"nvidia.com/vgpu": "1"}, annotations={"aliquot.dev/placement": "spread"}))
    assert any("has no effect" in warning for warning in outcome.warnings)
    assert outcome.templates


class MadeTemplates:
    def __init__(self, trouble: str = "") -> None:
        self.trouble = trouble
        self.made: list[tuple[str, str]] = []

    async def ensure(self, namespace, templates):
        self.made += [(namespace, template.name) for template in templates]
        return self.trouble


def mutated(templates: MadeTemplates, **fields: Any) -> dict[str, Any]:
    request = {"uid": "r", "operation": "CREATE", "namespace": "team", "object": make_pod({"nvidia.com/vgpu": "1"}), **fields}
    body = json.dumps({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}).encode()
    return json.loads(asyncio.run(Reviews(RULES, lambda _: None, claims=templates).mutate(body)))["response"]


def test_template_is_made_in_the_pods_namespace_before_admission():
    templates = MadeTemplates()
    assert mutated(templates)["allowed"]
    [(namespace, name)] = templates.made
    assert (namespace, is_ours(name)) == ("team", True)


def test_pod_is_refused_when_its_template_cannot_be_made():
    response = mutated(MadeTemplates("no API server"))
    assert (response["allowed"], response["status"]["message"]) == (False, "no API server")


def test_dry_run_makes_no_template():
    templates = MadeTemplates()
    assert mutated(templates, dryRun=True)["allowed"]
    assert templates.made == []


def test_pod_templates_of_jobs_keep_their_amounts():
    template = {"spec": make_pod({"nvidia.com/vgpu-memory": "4Gi"})["spec"]}
    body = {"uid": "r", "operation": "CREATE", "namespace": "team", "object": {"metadata": {"name": "j"}, "spec": {"template": template}}}
    body["kind"] = {"group": "batch", "kind": "Job", "version": "v1"}
    templates = MadeTemplates()
    reviews = Reviews(RULES, lambda _: None, claims=templates)
    review = json.dumps({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": body}).encode()
    response = json.loads(asyncio.run(reviews.templates(review)))["response"]
    patch = json.loads(base64.b64decode(response["patch"]))
    assert all("resourceClaims" not in operation["path"] for operation in patch)
    assert templates.made == []
