# SPDX-License-Identifier: Apache-2.0
"""The webhook's configuration states the rule of adoption as the code does: which pods of which namespaces are sent, and to which path."""

import itertools
from collections.abc import Mapping
from typing import Any

import pytest
import yaml

from aliquot import contract
from scheduler_plugin.webhook.adoption import in_our_words, speaks_to_us
from scheduler_plugin.webhook.amounts import Options
from scheduler_plugin.webhook.draft import Draft
from tests.rendering import DAEMONSET
from tests.unit.deploy.test_manifests import asked_about_limits, body_of

MUTATING, VALIDATING = "MutatingWebhookConfiguration", "ValidatingWebhookConfiguration"
ADOPT_ALL = DAEMONSET / "components/adopt-all/kustomization.yaml"
NAMESPACES = (None, "true", "false", "dry-run", "anything")
"""Values of the namespace's label."""


def webhooks(kind: str, *, adopt_all: bool = False) -> list[dict[str, Any]]:
    documents = yaml.safe_load_all((DAEMONSET / "scheduler/webhook.yaml").read_text())
    (found,) = [item["webhooks"] for item in documents if item["kind"] == kind]
    if adopt_all:
        (patch,) = [one["patch"] for one in yaml.safe_load(ADOPT_ALL.read_text())["patches"] if one["target"]["kind"] == kind]
        for operation in yaml.safe_load(patch):
            _, _, place, *rest = operation["path"].split("/")
            assert rest == ["namespaceSelector", "matchExpressions"]
            found[int(place)]["namespaceSelector"]["matchExpressions"] = operation["value"]
    return found


def selected(webhook: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a webhook is for a namespace, as the API server reads a selector."""
    for term in webhook["namespaceSelector"]["matchExpressions"]:
        among = labels.get(term["key"]) in term["values"]
        if among != (term["operator"] == "In"):
            return False
    return True


def paths(kind: str, value: str | None, *, adopt_all: bool = False, ignored: bool = False) -> set[str]:
    labels = {} if value is None else {contract.LABEL_ADOPT: value}
    if ignored:
        labels[contract.LABEL_WEBHOOK] = "ignore"
    return {one["clientConfig"]["service"]["path"] for one in webhooks(kind, adopt_all=adopt_all) if selected(one, labels)}


@pytest.mark.parametrize(
    ("value", "adopt_all", "adopted"),
    [(None, False, False), ("true", False, True), ("false", False, False), ("dry-run", False, False), ("anything", False, False),
     (None, True, True), ("true", True, True), ("false", True, False), ("dry-run", True, False), ("anything", True, True)],
)  # fmt: skip
def test_each_namespace_has_one_path_by_its_label(value: str | None, adopt_all: bool, adopted: bool) -> None:
    dry = {"/mutate/dry-run"} if value == "dry-run" else set()
    templates = "/templates/adopt" if adopted else "/templates"
    assert paths(MUTATING, value, adopt_all=adopt_all) == dry | {"/mutate/adopt" if adopted else "/mutate", templates}
    assert paths(VALIDATING, value, adopt_all=adopt_all) == {"/validate/adopt" if adopted else "/validate"}


@pytest.mark.parametrize("value", NAMESPACES)
@pytest.mark.parametrize("kind", [MUTATING, VALIDATING])
@pytest.mark.parametrize("adopt_all", [False, True])
def test_an_ignored_namespace_stays_ignored_whatever_its_other_label(kind: str, value: str | None, adopt_all: bool) -> None:
    assert not paths(kind, value, adopt_all=adopt_all, ignored=True)


@pytest.mark.parametrize("kind", [MUTATING, VALIDATING])
def test_only_pods_for_aliquot_are_sent_from_namespaces_that_are_not_adopted(kind: str) -> None:
    """Others must not depend on our webhook: it can be down."""
    for webhook in webhooks(kind):
        guarded = [condition["name"] for condition in webhook["matchConditions"]][-2:] == ["asks-for-a-gpu", "is-for-aliquot"]
        assert guarded == (webhook["clientConfig"]["service"]["path"] in ("/mutate", "/validate", "/templates"))


def test_a_dry_run_holds_no_pod_up_while_the_webhook_is_down() -> None:
    (webhook,) = [one for one in webhooks(MUTATING) if one["clientConfig"]["service"]["path"] == "/mutate/dry-run"]
    assert webhook["failurePolicy"] == "Ignore"
    assert webhook["timeoutSeconds"] <= 2


RESOURCES = (
    "nvidia.com/vgpu",
    "nvidia.com/vgpu-memory",
    "nvidia.com/vgpu-number",
    "nvidia.com/vgpu-mem",
    "nvidia.com/gpumem",
    "nvidia.com/mig-1g.10gb",
)
WORDS: tuple[dict[str, Any], ...] = (
    {},
    {"schedulerName": "aliquot-scheduler"},
    {"schedulerName": "kai-scheduler"},
    {"labels": {"aliquot.dev/adopt": "true"}},
    {"labels": {"kai.scheduler/queue": "a"}},
    {"annotations": {"aliquot.dev/placement": "spread"}},
    {"annotations": {"gpu-memory": "4096"}},
)


def is_for_aliquot(pod: Mapping[str, Any], expression: str) -> bool:
    """Evaluate the condition. Its four parts are checked here one by one; tests/e2e shows that the whole is CEL."""
    names = {"l": pod["metadata"].get("labels", {}), "n": pod["metadata"].get("annotations", {})}
    named = any(eval(body_of(expression, variable), {variable: name}) for variable, values in names.items() for name in values)
    scheduler = pod["spec"].get("schedulerName", "") == expression.partition("schedulerName.orValue('') == '")[2].partition("'")[0]
    limits = pod["spec"]["containers"][0]["resources"]["limits"]
    return named or scheduler or asked_about_limits(limits, expression)


@pytest.mark.parametrize("kind", [MUTATING, VALIDATING])
def test_the_condition_for_aliquots_pods_is_the_rule_of_the_code(kind: str) -> None:
    expression, options, found = webhooks(kind)[0]["matchConditions"][1]["expression"], Options(lambda _: ()), set()
    for amounts, words in itertools.product(itertools.product((None, "0", "1"), repeat=len(RESOURCES)), WORDS):
        limits = {name: amount for name, amount in zip(RESOURCES, amounts, strict=True) if amount is not None}
        spec = {"containers": [{"name": "main", "resources": {"limits": limits}}], "schedulerName": words.get("schedulerName", "")}
        pod = {"metadata": {key: words[key] for key in ("labels", "annotations") if key in words}, "spec": spec}
        draft = Draft(pod)
        wanted = in_our_words(draft, options) or speaks_to_us(draft, contract.SCHEDULER_NAME)
        assert is_for_aliquot(pod, expression) == wanted, pod
        found.add(wanted)
    assert found == {True, False}
