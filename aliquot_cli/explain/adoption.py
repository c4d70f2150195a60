# SPDX-License-Identifier: Apache-2.0
"""What pods and pod templates would become if Aliquot served them, and whether it serves them today. Reads only, and changes nothing.

The code is the webhook's own. Each controller counts once, by its template; pods of controllers outside Kubernetes count by the pods that
they have now.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from aliquot import contract
from aliquot.contract.gpunode import GpuNode
from aliquot_cli.access import Cluster, listed
from aliquot_cli.errors import NotFoundError
from aliquot_cli.explain.manifests import device_sizes, mig_profiles
from scheduler_plugin.webhook.adoption import becomes
from scheduler_plugin.webhook.amounts import Options
from scheduler_plugin.webhook.normalise import Normaliser, Outcome
from scheduler_plugin.webhook.words import warnings_around

Json = Mapping[str, Any]
NamespaceRule = Callable[[Json], str]
"""Whether new pods of a namespace with these labels are adopted today: ADOPTED, LEFT, DRY_RUN or IGNORED."""
ADOPTED, LEFT, DRY_RUN, IGNORED, UNKNOWN = "adopted", "left alone", "dry run", "ignored", "-"
SERVED, TRANSLATED, REFUSED, OTHERS = "served", "translated", "refused", "not ours"
NVIDIA_DOMAIN: Final = "nvidia.com/"

WEBHOOK_PATH: Final = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/aliquot"
WEBHOOKS: Final = {ADOPTED: "adopt.aliquot.dev", DRY_RUN: "dry-run.aliquot.dev"}
TEMPLATES: Final = {
    "Deployment": "/apis/apps/v1/{}deployments",
    "StatefulSet": "/apis/apps/v1/{}statefulsets",
    "DaemonSet": "/apis/apps/v1/{}daemonsets",
    "ReplicaSet": "/apis/apps/v1/{}replicasets",
    "ReplicationController": "/api/v1/{}replicationcontrollers",
    "CronJob": "/apis/batch/v1/{}cronjobs",
    "Job": "/apis/batch/v1/{}jobs",
}


@dataclass(frozen=True, slots=True)
class Asked:
    """A pod, or the pod that a template makes."""

    namespace: str
    object: str
    """Kind and name."""
    pod: Json
    pods: int = 1
    """How many pods of this kind were found; 1 for a template."""
    around: tuple[tuple[str, Json], ...] = ()
    """The metadata of the objects around a template, each with its place."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the report."""

    namespace: str
    object: str
    system: str
    """The system whose words the pod has; empty for our own."""
    today: str
    outcome: str
    text: str
    """What it becomes, or why it is refused."""
    warnings: tuple[str, ...] = ()
    pods: int = 1


# --- where pods come from -------------------------------------------------------------------------------------------------


def in_cluster(cluster: Cluster, namespace: str | None) -> Iterator[Asked]:
    """Yield the templates of Kubernetes' controllers, and the pods that have none. Raises AccessError."""
    scope = f"namespaces/{namespace}/" if namespace else ""
    for kind, path in TEMPLATES.items():
        for item in listed(cluster, path.format(scope)):
            if _owner(item).partition("/")[0] not in TEMPLATES:
                yield from in_object({**item, "kind": kind})
    yield from _pods(listed(cluster, f"/api/v1/{scope}pods"))


def _pods(items: Iterable[Json]) -> Iterator[Asked]:
    groups: dict[tuple[str, str], Asked] = {}
    for item in items:
        owner = _owner(item)
        if owner.partition("/")[0] in TEMPLATES:
            continue
        namespace, name = item["metadata"].get("namespace", ""), item["metadata"].get("name", "")
        key = namespace, owner or f"Pod/{name}"
        known = groups.get(key)
        groups[key] = replace(known, pods=known.pods + 1) if known else Asked(*key, item)
    yield from groups.values()


def _owner(item: Json) -> str:
    """Return kind and name of an object's controller; empty without one."""
    owners = item.get("metadata", {}).get("ownerReferences") or ()
    return next((f"{one.get('kind')}/{one.get('name')}" for one in owners if one.get("controller")), "")


def in_object(value: Any) -> Iterator[Asked]:
    """Yield the pod, or each pod template at any depth, of one object of any kind."""
    return _within(value, Asked("", "", {}), "")


def _within(value: Any, outer: Asked, path: str) -> Iterator[Asked]:
    """Yield the pods at any depth. Args: outer: the object around, without a pod yet; path: of the value in it."""
    if isinstance(value, list):
        for place, entry in enumerate(value):
            yield from _within(entry, outer, f"{path}{place}.")
    elif isinstance(value, dict):
        metadata, spec = _mapping(value.get("metadata")), _mapping(value.get("spec"))
        if "kind" in value and "metadata" in value:
            outer, path = Asked(str(metadata.get("namespace") or outer.namespace), f"{value['kind']}/{_name(metadata)}", {}), ""
        if isinstance(spec.get("containers"), list):
            yield replace(outer, pod={"metadata": {**metadata, "namespace": outer.namespace}, "spec": spec})
            return
        outer = replace(outer, around=(*outer.around, (f"{path}metadata", metadata)))
        for key, entry in value.items():
            yield from _within(entry, outer, f"{path}{key}.")


def _mapping(value: Any) -> Json:
    return value if isinstance(value, dict) else {}


def _name(metadata: Json) -> str:
    return metadata.get("name") or metadata.get("generateName") or "?"


# --- who is adopted today -------------------------------------------------------------------------------------------------


def rule_of(cluster: Cluster) -> NamespaceRule:
    """Return the rule of the installed webhook; without one, nothing is adopted. Raises AccessError."""
    try:
        webhooks = cluster.get(WEBHOOK_PATH).get("webhooks") or ()
    except NotFoundError:
        return lambda _: LEFT
    selectors = {one["name"]: one.get("namespaceSelector") or {} for one in webhooks}

    def rule(labels: Json) -> str:
        if labels.get(contract.LABEL_WEBHOOK) == "ignore":
            return IGNORED
        return next((word for word, name in WEBHOOKS.items() if name in selectors and selects(selectors[name], labels)), LEFT)

    return rule


def selects(selector: Json, labels: Json) -> bool:
    """Whether a label selector holds."""
    if any(labels.get(key) != value for key, value in (selector.get("matchLabels") or {}).items()):
        return False
    return all(_holds(term, labels) for term in selector.get("matchExpressions") or ())


def _holds(term: Json, labels: Json) -> bool:
    key, values = term["key"], term.get("values") or ()
    answers: Mapping[str, bool] = {
        "In": key in labels and labels[key] in values,
        "NotIn": labels.get(key) not in values,
        "Exists": key in labels,
        "DoesNotExist": key not in labels,
    }
    return answers[term["operator"]]


def namespace_rules(cluster: Cluster, rule: NamespaceRule) -> Callable[[str], str]:
    """Return what happens today in each namespace. Raises AccessError."""
    found = {item["metadata"]["name"]: rule(item["metadata"].get("labels") or {}) for item in listed(cluster, "/api/v1/namespaces")}
    return lambda namespace: found.get(namespace, UNKNOWN)


# --- the report -------------------------------------------------------------------------------------------------------------


class Reporter:
    """Says what each pod would become."""

    def __init__(self, nodes: Iterable[GpuNode], *, adopt_nvidia_gpu: bool) -> None:
        """Args: nodes: their GPUs turn a part of a GPU into an amount of memory, and a memory into a MIG profile."""
        known = list(nodes)
        options = Options(partial(device_sizes, known), adopt_nvidia_gpu, mig_profiles=partial(mig_profiles, known))
        self._adopting = Normaliser(options)
        self._ours = replace(self._adopting, adopts=False)

    def rows(self, asked: Iterable[Asked], today: Callable[[str], str] = lambda _: UNKNOWN) -> list[Row]:
        """Return a row for each pod that asks for NVIDIA GPUs, by namespace and object."""
        found = [row for one in asked if (row := self._row(one, today(one.namespace))) is not None]
        return sorted(found, key=lambda row: (row.namespace, row.object, row.text))

    def _row(self, asked: Asked, namespace: str) -> Row | None:
        outcome = self._adopting.admit(asked.pod)
        fate, text = _fate(outcome, asked.pod)
        if fate == OTHERS and not _names_gpus(asked.pod):
            return None
        if namespace == IGNORED:
            today = IGNORED
        elif self._ours.serves(asked.pod):
            today = SERVED
        else:
            today = LEFT if namespace == ADOPTED and fate == OTHERS else namespace
        lost = warnings_around(asked.around, asked.pod["metadata"]) if self._adopting.places(asked.pod) else ()
        return Row(asked.namespace, asked.object, outcome.system, today, fate, text, (*outcome.warnings, *lost), asked.pods)


def _fate(outcome: Outcome, pod: Json) -> tuple[str, str]:
    if outcome.refusal:
        return REFUSED, outcome.refusal
    if not outcome.is_gpu_pod:
        return OTHERS, "it stays with its device plugin"
    return TRANSLATED if outcome.system else SERVED, becomes(outcome.patch, pod)


def _names_gpus(pod: Json) -> bool:
    """Whether a container names a GPU of NVIDIA in any way."""
    spec = pod.get("spec") or {}
    return any(_asks_nvidia(one) for group in ("initContainers", "containers") for one in spec.get(group) or ())


def _asks_nvidia(container: Json) -> bool:
    kinds = (container.get("resources") or {}).values()  # limits, requests, and claims, which are a list
    return any(name.startswith(NVIDIA_DOMAIN) for amounts in kinds if isinstance(amounts, dict) for name in amounts)


def summary(rows: Sequence[Row]) -> list[str]:
    """Return one line for each system, with its counts by outcome."""
    systems: dict[str, Counter[str]] = {}
    for row in rows:
        systems.setdefault(row.system or (contract.PRODUCT if row.outcome == SERVED else "other"), Counter())[row.outcome] += 1
    return [f"{name}: " + ", ".join(f"{count} {fate}" for fate, count in counts.most_common()) for name, counts in sorted(systems.items())]
