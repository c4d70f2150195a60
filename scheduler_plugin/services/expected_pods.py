# SPDX-License-Identifier: Apache-2.0
"""The pods of a workload before they exist: their template, changed as the webhook will change the pods."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any, NamedTuple

import msgspec

from aliquot.contract.errors import ContractError
from scheduler_plugin.core.admit.kueue import PodSet, Workload
from scheduler_plugin.core.cluster.nodes import NodeRules, rules_of
from scheduler_plugin.core.cluster.objects import PodObject, pod_facts
from scheduler_plugin.core.cluster.pods import PodFacts
from scheduler_plugin.webhook.normalise import Normaliser


class ExpectedPod(NamedTuple):
    """A pod of a pod set."""

    pod: PodFacts
    rules: NodeRules
    """Without the labels and tolerations of its flavor."""


class Refused(NamedTuple):
    """Why the pods of a pod set can never get a seat."""

    sentence: str
    is_final: bool
    """Whether the webhook refuses the pods themselves."""


class ExpectedPods:
    """Reads templates by the rules of the webhook."""

    def __init__(self, normaliser: Normaliser) -> None:
        self._normaliser = normaliser

    def of(self, workload: Workload, pod_set: PodSet) -> ExpectedPod | Refused | None:
        """Return such a pod, without UID and node; None if it asks for no GPU of Aliquot."""
        where = f"pod set {pod_set.name}: "
        try:
            template = msgspec.json.decode(pod_set.template, type=dict[str, Any])
        except msgspec.DecodeError as exc:
            return Refused(f"{where}its template cannot be read: {exc}", is_final=False)
        pod = {"metadata": dict(template.get("metadata") or {}), "spec": dict(template.get("spec") or {})}
        pod["metadata"].update(namespace=workload.namespace, name=f"{workload.name}-{pod_set.name}")
        outcome = self._normaliser.admit(pod)
        if outcome.refusal:
            return Refused(where + outcome.refusal, is_final=True)
        changed = patched(pod, outcome.patch)
        changed["spec"].pop("schedulingGates", None)
        try:
            facts, rules = pod_facts(msgspec.convert(changed, PodObject)), rules_of(changed["spec"])
        except (msgspec.ValidationError, ContractError) as exc:
            return Refused(f"{where}its template cannot be read: {exc}", is_final=False)
        if facts.gpu is None:
            return None
        if facts.gpu.scheduler_name != self._normaliser.scheduler_name:
            text = f"its schedulerName is {facts.gpu.scheduler_name}, and only {self._normaliser.scheduler_name} gives seats"
            return Refused(f"{where}{text}: change it, or use a queue without this admission check", is_final=False)
        return ExpectedPod(facts, rules)


def patched(pod: Mapping[str, Any], patch: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    """Apply a patch of the webhook, which only sets whole values."""
    changed: dict[str, Any] = deepcopy(dict(pod))
    for operation in patch:
        *parents, last = operation["path"].split("/")[1:]
        place: Any = changed
        for key in parents:
            place = place[int(key)] if isinstance(place, list) else place[key]
        place[last] = operation["value"]
    return changed
