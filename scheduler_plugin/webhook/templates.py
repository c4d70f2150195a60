# SPDX-License-Identifier: Apache-2.0
"""Rewrites the pod templates of jobs and services as ``normalise`` rewrites their pods, so that a queue counts what the pods will take.

Kueue reads a Job's template before a pod exists, and knows only resources. Without this, a request in annotations counts as nothing.

Invariants: An object is never refused; if its pods will be, it gets a warning. ``/mutate`` changes nothing in a pod of a rewritten
template, except that it adds the gang, which can depend on the pod's owner. An update that asks for the amounts of the old template
leaves that template as it is: many templates must not change, and those from before the installation stay in their words.
"""

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, Final

from aliquot import contract
from aliquot.contract import units
from aliquot.contract.errors import ContractError
from scheduler_plugin.core.admit.queues import QUEUE_LABEL
from scheduler_plugin.core.cluster.pods import asks_gpu
from scheduler_plugin.webhook import per_gpu
from scheduler_plugin.webhook.amounts import Options
from scheduler_plugin.webhook.classes import queue_priority
from scheduler_plugin.webhook.draft import GROUPS, DraftContainer, Json
from scheduler_plugin.webhook.normalise import UNTOUCHED, Normaliser, Outcome
from scheduler_plugin.webhook.vocabularies import is_foreign_annotation
from scheduler_plugin.webhook.words import warnings_around

EACH: Final = "*"
"""In a path: all entries of a list or a mapping."""


@dataclass(frozen=True, slots=True)
class TemplateKind:
    """A kind of object, and where its pod templates are."""

    group: str
    kind: str
    plural: str
    controller: str
    """The kind that controls the pods."""
    paths: tuple[str, ...] = ()
    """The pod templates; steps are separated by slashes."""
    resources: tuple[str, ...] = ()
    """Resources of one container without a template around them."""
    controlled: bool = False
    """Whether an object that another one controls is rewritten as well. A controller may compare such an object with its own template,
    and replace it for ever if the two differ: Deployments do so with ReplicaSets. No controller changes the template of a Job."""


def _ray(spec: str) -> tuple[str, ...]:
    return f"{spec}/headGroupSpec/template", f"{spec}/workerGroupSpecs/{EACH}/template"


def _kubeflow(kind: str, field: str) -> TemplateKind:
    return TemplateKind("kubeflow.org", kind, f"{kind.lower()}s", kind, (f"spec/{field}/{EACH}/template",))


def _runtime(kind: str) -> TemplateKind:
    path = f"spec/template/spec/replicatedJobs/{EACH}/template/spec/template"
    return TemplateKind("trainer.kubeflow.org", kind, f"{kind.lower()}s", "Job", (path,))


KINDS: Final = (
    TemplateKind("batch", "Job", "jobs", "Job", ("spec/template",), controlled=True),
    TemplateKind("batch", "CronJob", "cronjobs", "Job", ("spec/jobTemplate/spec/template",)),
    TemplateKind("apps", "Deployment", "deployments", "ReplicaSet", ("spec/template",)),
    TemplateKind("apps", "ReplicaSet", "replicasets", "ReplicaSet", ("spec/template",)),
    TemplateKind("apps", "StatefulSet", "statefulsets", "StatefulSet", ("spec/template",)),
    TemplateKind("jobset.x-k8s.io", "JobSet", "jobsets", "Job", (f"spec/replicatedJobs/{EACH}/template/spec/template",)),
    TemplateKind(
        "leaderworkerset.x-k8s.io", "LeaderWorkerSet", "leaderworkersets", "StatefulSet",
        ("spec/leaderWorkerTemplate/leaderTemplate", "spec/leaderWorkerTemplate/workerTemplate"),
    ),
    TemplateKind("ray.io", "RayCluster", "rayclusters", "RayCluster", _ray("spec")),
    TemplateKind("ray.io", "RayJob", "rayjobs", "RayCluster", (*_ray("spec/rayClusterSpec"), "spec/submitterPodTemplate")),
    TemplateKind("ray.io", "RayService", "rayservices", "RayCluster", _ray("spec/rayClusterConfig")),
    TemplateKind(
        "ray.io", "RayCronJob", "raycronjobs", "RayCluster",
        (*_ray("spec/jobTemplate/rayClusterSpec"), "spec/jobTemplate/submitterPodTemplate"),
    ),
    _kubeflow("PyTorchJob", "pytorchReplicaSpecs"),
    _kubeflow("TFJob", "tfReplicaSpecs"),
    _kubeflow("JAXJob", "jaxReplicaSpecs"),
    _kubeflow("XGBoostJob", "xgbReplicaSpecs"),
    _kubeflow("PaddleJob", "paddleReplicaSpecs"),
    _kubeflow("MPIJob", "mpiReplicaSpecs"),
    TemplateKind("trainer.kubeflow.org", "TrainJob", "trainjobs", "Job", resources=("spec/trainer/resourcesPerNode",)),
    _runtime("TrainingRuntime"),
    _runtime("ClusterTrainingRuntime"),
)  # fmt: skip
"""The kinds that are rewritten. deploy/daemonset/scheduler/webhook.yaml has the same, for the API server."""

_BY_KIND: Final = {(kind.group, kind.kind): kind for kind in KINDS}
_GANG: Final = (
    contract.ANNOTATION_GANG,
    contract.ANNOTATION_GANG_MIN,
    contract.ANNOTATION_GANG_ROLE,
    contract.ANNOTATION_GANG_ROLE_MIN,
)
_BESIDE_MEMORY: Final = tuple(name for name in contract.RESOURCES_OF_VGPUS if name != contract.RESOURCE_VGPU_MEMORY)
_NAMELESS: Final = "unnamed"
_ANNOTATIONS: Final = "/metadata/annotations"
_RESOURCES: Final = "/resources"
_NO_METADATA: Final[Json] = {}


@dataclass(frozen=True, slots=True)
class _Place:
    """A pod template in an object, or resources without a template."""

    pointer: str
    """A JSON pointer."""
    value: Json
    bare: bool = False

    def pod(self, owner: Json) -> Json:
        """Return a pod as the controller makes it, except for its names."""
        if self.bare:
            return {"metadata": {"ownerReferences": [owner]}, "spec": {"containers": [{"name": "node", "resources": self.value}]}}
        metadata = self.value.get("metadata")
        metadata = dict(metadata) if isinstance(metadata, dict) else {}
        return {"metadata": {**metadata, "ownerReferences": [owner]}, "spec": self.value.get("spec")}

    def operations(self, patch: Sequence[Json]) -> Iterator[Json]:
        """Yield the operations on the object for those on the pod."""
        for operation in patch:
            path = operation["path"]
            if self.bare:
                if path.endswith(_RESOURCES):
                    yield {**operation, "path": self.pointer}
                continue
            if path == _ANNOTATIONS and not self.value.get("metadata"):
                yield {"op": "add", "path": f"{self.pointer}/metadata", "value": dict(_NO_METADATA)}
            yield {**operation, "path": self.pointer + path}


class Templates:
    """The rules for objects with pod templates."""

    def __init__(self, normaliser: Normaliser) -> None:
        """Args: normaliser: the rules for pods."""
        self._normaliser = normaliser

    def admit(self, group: str, kind: str, found: Mapping[str, Any], old: Mapping[str, Any] | None = None, namespace: str = "") -> Outcome:
        """Decide on an object that is being created or, with ``old``, updated. It is never refused."""
        known = _BY_KIND.get((group, kind))
        if known is None or (_is_controlled(found) and not known.controlled):
            return UNTOUCHED
        owner = {"kind": known.controller, "name": _name(found), "controller": True}
        operations: list[Json] = []
        warnings: list[str] = []
        for place, was in _changed_places(known, found, old):
            pod = place.pod(owner)
            rules = self._normaliser.behind(pod["spec"], namespace, _queue_name(found))
            outcome = _rewrite(rules, pod, was.pod(owner) if was is not None else None)
            operations += place.operations(outcome.patch)
            warnings += [text for text in (*_warnings(outcome, place), *self._lost_around(found, place, owner)) if text not in warnings]
        if old is None:
            operations += self._queue_priority(found, _places(known, found))
        return Outcome(patch=tuple(operations), warnings=tuple(warnings), is_gpu_pod=bool(operations or warnings))

    def _lost_around(self, found: Mapping[str, Any], place: _Place, owner: Json) -> Sequence[str]:
        """Return a warning for each word that stands around a template of our pods and not in it."""
        if _is_controlled(found):
            return ()  # its controller copied the words from another object; the warning came when that was created
        lost = list(warnings_around(_around(found, place.pointer), place.value.get("metadata")))
        return lost if lost and self._normaliser.places(place.pod(owner)) else ()

    def _queue_priority(self, found: Mapping[str, Any], places: Iterator[_Place]) -> Iterator[Json]:
        """Yield the operation that gives an object in a queue Kueue's priority, by the class of its first template that has one."""
        labels = labels_of(found)
        for place in places:
            profile = self._normaliser.options.classes.get(labels_of(place.value).get(contract.LABEL_CLASS, ""))
            if profile is not None:
                if added := queue_priority(labels, profile):
                    yield {"op": "add", "path": "/metadata/labels", "value": {**labels, **added}}
                return


def _rewrite(rules: Normaliser, pod: Json, old: Json | None) -> Outcome:
    """Return the changes to the pod of a template."""
    if not isinstance(pod["spec"], dict):
        return UNTOUCHED
    if old is None or not isinstance(old["spec"], dict):
        outcome = rules.admit(pod)
        return replace(outcome, patch=_without_gang(outcome.patch, pod))
    cleared = _without_derived(rules, pod, old)
    outcome = rules.admit(cleared)
    if outcome.refusal:
        return outcome
    patch = _without_gang(outcome.patch, pod)
    patch += _cleared_resources(pod, cleared, patch)
    if _amounts(old) not in (_amounts(pod), _amounts(_patched(cleared, patch))):
        return replace(outcome, patch=patch)
    return replace(outcome, patch=_undoing(patch, old), warnings=())


def _without_derived(rules: Normaliser, pod: Json, old: Json) -> Json:
    """Return the pod without the amounts that an earlier review wrote into it and that its words in another vocabulary replace.

    ``kubectl apply`` keeps what it did not write: a second apply of a manifest in HAMi's words has those beside ours.
    """
    result, previous = deepcopy(pod), dict(_containers(old))
    annotated = _foreign_annotations(pod) != _foreign_annotations(old)
    derived = _from_annotations(rules, old) if annotated else set()
    for key, container in _containers(result):
        was = previous.get(key)
        if was is None:
            continue
        stated, is_back = _own_words(_draft(container), _draft(was), rules.options)
        if is_back or key in derived:
            _remove_equal(container, was, apart=stated)
    return result


def _own_words(container: DraftContainer, was: DraftContainer, options: Options) -> tuple[Sequence[str], bool]:
    """Return the resources of a container's own words, which a review replaces, and whether they are back in a container without them."""
    asked = per_gpu.asking_system(container, options)
    if asked is not None:
        return asked.names, per_gpu.asking_system(was, options) is None
    percent = contract.RESOURCE_VGPU_MEMORY_PERCENT
    return (_BESIDE_MEMORY, not was.has(percent)) if container.has(percent) else ((), False)


def _from_annotations(rules: Normaliser, old: Json) -> set[tuple[str, str]]:
    """Return the containers that got their amounts from the template's annotations."""
    bare = deepcopy(old)
    for _, container in _containers(bare):
        _remove_equal(container, container)
    outcome = rules.admit(bare)
    if outcome.refusal:
        return set()
    again = dict(_containers(_patched(bare, outcome.patch)))
    return {key for key, container in _containers(old) if _of(container) == _of(again[key]) != _of({})}


def _is_controlled(found: Mapping[str, Any]) -> bool:
    metadata = found.get("metadata")
    owners = metadata.get("ownerReferences") if isinstance(metadata, dict) else None
    return any(isinstance(owner, dict) and owner.get("controller") for owner in (owners if isinstance(owners, list) else ()))


def labels_of(found: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the labels of an object; empty if it has none, or in another form."""
    metadata = found.get("metadata")
    labels = metadata.get("labels") if isinstance(metadata, dict) else None
    return labels if isinstance(labels, dict) else {}


def _queue_name(found: Mapping[str, Any]) -> str:
    """Return the name of the LocalQueue of an object, or of the jobs that it makes; empty without one.

    Kueue writes its default queue into the label. Then the API server calls this webhook again.
    """
    spec = found.get("spec")
    made = spec.get("jobTemplate") if isinstance(spec, dict) else None
    return str(labels_of(made if isinstance(made, dict) else found).get(QUEUE_LABEL) or "")


def _name(found: Mapping[str, Any]) -> str:
    metadata = found.get("metadata")
    return str((metadata.get("name") if isinstance(metadata, dict) else None) or _NAMELESS)


def _places(kind: TemplateKind, found: Mapping[str, Any]) -> Iterator[_Place]:
    """Yield the places of an object that are there; a part of another form than expected is passed over."""
    for paths, bare in ((kind.paths, False), (kind.resources, True)):
        for path in paths:
            yield from (_Place(pointer, value, bare) for pointer, value in _walk(found, path.split("/"), ""))


def _changed_places(kind: TemplateKind, found: Mapping[str, Any], old: Mapping[str, Any] | None) -> Iterator[tuple[_Place, _Place | None]]:
    """Yield the places that are new or differ from those of the old object, with the old place if there was one."""
    before = {place.pointer: place for place in _places(kind, old)} if old is not None else {}
    for place in _places(kind, found):
        was = before.get(place.pointer)
        if was is None or was.value != place.value:
            yield place, was


def _walk(value: Any, steps: Sequence[str], pointer: str) -> Iterator[tuple[str, Json]]:
    if not steps:
        if isinstance(value, dict):
            yield pointer, value
        return
    for key, entry in _entries(value, steps[0]):
        yield from _walk(entry, steps[1:], f"{pointer}/{str(key).replace('~', '~0').replace('/', '~1')}")


def _entries(value: Any, step: str) -> Iterator[tuple[str | int, Any]]:
    if isinstance(value, list) and step == EACH:
        yield from enumerate(value)
    elif isinstance(value, dict):
        yield from ((key, value[key]) for key in (value if step == EACH else (step,)) if key in value)


def _around(found: Mapping[str, Any], pointer: str) -> Iterator[tuple[str, Any]]:
    """Yield the metadata of the objects around a place, each with where it stands, the outermost first."""
    value: Any = found
    passed: list[str] = []
    for step in pointer.split("/")[1:]:
        if isinstance(value, dict) and "metadata" in value:
            yield ".".join((*passed, "metadata")), value["metadata"]
        value = next((entry for key, entry in _entries_of(value) if key == step), None)
        passed.append(step)


def _warnings(outcome: Outcome, place: _Place) -> Sequence[str]:
    if outcome.refusal:
        return (f"{place.pointer[1:].replace('/', '.')}: its pods will be refused: {outcome.refusal}",)
    return outcome.warnings


def _without_gang(patch: Sequence[Json], pod: Json) -> tuple[Json, ...]:
    """Return the operations without a gang that the pod does not name itself."""
    had = pod["metadata"].get("annotations") or {}
    result = []
    for operation in patch:
        if operation["path"] == _ANNOTATIONS:
            kept = {name: value for name, value in operation["value"].items() if name in had or name not in _GANG}
            if kept == had:
                continue
            operation = {**operation, "value": kept}
        result.append(operation)
    return tuple(result)


# --- updates --------------------------------------------------------------------------------------------------------


def _containers(pod: Json) -> Iterator[tuple[tuple[str, str], Json]]:
    """Yield each container by its group and name."""
    for group in GROUPS:
        found = pod["spec"].get(group)
        for container in found if isinstance(found, list) else ():
            if isinstance(container, dict):
                yield (group, str(container.get("name") or "")), container


def _draft(container: Json) -> DraftContainer:
    resources = container.get("resources")
    tables = resources if isinstance(resources, dict) else {}
    kept = {key: value for key, value in tables.items() if isinstance(value, dict)}
    return DraftContainer("containers", 0, {"name": container.get("name", ""), "resources": kept})


def _remove_equal(container: Json, was: Json, apart: Sequence[str] = ()) -> None:
    """Remove our resources that have the same amount as before."""
    before = _draft(was)
    for key in ("limits", "requests"):
        amounts = (container.get("resources") or {}).get(key)
        if isinstance(amounts, dict):
            had = {**before.requests, **before.limits}
            equal = [
                name for name in amounts if asks_gpu([name]) and name not in apart and _quantity(amounts[name]) == _quantity(had.get(name))
            ]
            for name in equal:
                del amounts[name]


def _foreign_annotations(pod: Json) -> Json:
    annotations = pod["metadata"].get("annotations")
    return {name: value for name, value in annotations.items() if is_foreign_annotation(name)} if isinstance(annotations, dict) else {}


def _of(container: Json) -> dict[str, object]:
    """Return a container's amounts, in a form that can be compared."""
    draft = _draft(container)
    return {name: _quantity(amount) for name, amount in {**draft.requests, **draft.limits}.items()}


def _amounts(pod: Json) -> tuple[Json, Json]:
    """Return all on which the amounts of a pod depend, in a form that can be compared."""
    return _foreign_annotations(pod), {str(key): _of(container) for key, container in _containers(pod)}


def _quantity(amount: object) -> object:
    try:
        return units.parse_quantity(str(amount))
    except ContractError:
        return amount


def _patched(pod: Json, patch: Sequence[Json]) -> Json:
    """Return the pod with the resources of the patch."""
    result = deepcopy(pod)
    for operation in patch:
        if operation["path"].endswith(_RESOURCES):
            _, _, group, position, _ = operation["path"].split("/")
            result["spec"][group][int(position)]["resources"] = operation["value"]
    return result


def _cleared_resources(pod: Json, cleared: Json, patch: Sequence[Json]) -> tuple[Json, ...]:
    """Return the operations for containers from which amounts were removed and that the patch does not mention."""
    mentioned = {operation["path"] for operation in patch}
    return tuple(
        {"op": "add", "path": path, "value": new["resources"]}
        for group in GROUPS
        for place, (old, new) in enumerate(zip(pod["spec"].get(group) or (), cleared["spec"].get(group) or (), strict=True))
        if old != new and (path := f"/spec/{group}/{place}{_RESOURCES}") not in mentioned
    )


def _undoing(patch: Sequence[Json], old: Json) -> tuple[Json, ...]:
    """Return the operations that set what the old pod has already, with its own values."""
    return tuple({**operation, "value": value} for operation in patch for value in _same(operation, old))


def _same(operation: Json, old: Json) -> Iterator[Any]:
    """Yield the old value in the operation's place if the two mean the same."""
    value: Any = old
    for step in operation["path"].split("/")[1:]:
        value = next((entry for key, entry in _entries_of(value) if key == step), None)
    is_resources = operation["path"].endswith(_RESOURCES) and isinstance(value, dict)
    if value == operation["value"] or (is_resources and _of({"resources": value}) == _of({"resources": operation["value"]})):
        yield value


def _entries_of(value: Any) -> Iterator[tuple[str, Any]]:
    return ((str(key), entry) for key, entry in _entries(value, EACH))
