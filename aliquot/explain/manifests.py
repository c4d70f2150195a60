"""Pods of manifests, as admission would make them: templates of controllers count once for each pod that runs at a time.

What makes pods whose number cannot be told from the manifest is refused, and so is every kind that is not Kubernetes' own: what its
controller makes of it is not known here. Objects that make no pods are passed over.
"""

from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import click
import msgspec
import yaml

from proto import units
from proto.errors import AliquotError
from proto.gpunode import GpuNode
from proto.model import Preferences
from scheduler_plugin.core.columnar import type_wanted
from scheduler_plugin.core.objects import PodObject, pod_facts
from scheduler_plugin.core.pods import PodFacts
from scheduler_plugin.webhook.normalise import Normaliser
from scheduler_plugin.webhook.vocabularies import Options

MAX_REPLICAS = 10_000
_REPLICATED = ("Deployment", "ReplicaSet", "StatefulSet", "ReplicationController")
"""Kinds whose pods come from a template, ``replicas`` of them."""
_PRIORITY_CLASSES = {"system-cluster-critical": 2_000_000_000, "system-node-critical": 2_000_001_000}
"""Those that every cluster has."""
_COUNTED = ("Pod", *_REPLICATED, "Job", "CronJob")


def pods_of(path: Path, nodes: Iterable[GpuNode], adopt_nvidia_gpu: bool = False) -> list[PodFacts]:
    """Read the pods of a file's documents. Raises click.ClickException with what is wrong.

    Args: nodes: by whose GPUs a part of one is turned into an amount.
    """
    normaliser = Normaliser(Options(partial(_device_sizes, list(nodes)), adopt_nvidia_gpu))
    try:
        documents = [document for document in yaml.safe_load_all(path.read_text()) if document]
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as exc:
        raise click.ClickException(f"{path}: {exc}") from exc
    pods = [pod for document in documents for pod in _pods(document, path)]
    if not pods:
        raise click.ClickException(f"{path}: expected pods of {', '.join(_COUNTED)}; found none")
    unknown = dict.fromkeys(name for pod in pods if (name := _set_priority(pod.get("spec"))))
    for name in unknown:
        why = "a snapshot has no priority classes; its pods count with priority 0 unless spec.priority says another"
        click.echo(f"{path}: the priority of class {name} is not known: {why}", err=True)
    return [_admitted(pod, normaliser, f"what-if-{path}-{number}") for number, pod in enumerate(pods)]


def _set_priority(spec: Any) -> str:
    """Give a pod the priority of its class, as admission would. Returns: the class where its priority is not known, otherwise nothing."""
    if not isinstance(spec, dict) or not spec.get("priorityClassName") or spec.get("priority") is not None:
        return ""  # admission says what is wrong with a spec that is none
    name = str(spec["priorityClassName"])
    if name not in _PRIORITY_CLASSES:
        return name
    spec["priority"] = _PRIORITY_CLASSES[name]
    return ""


def _pods(document: Any, path: Path) -> Iterator[dict[str, Any]]:
    try:
        kind, metadata = document["kind"], document.get("metadata") or {}
        name, namespace = str(metadata.get("name") or kind.lower()), str(metadata.get("namespace") or "default")
        if kind == "List":
            for item in document.get("items") or ():
                yield from _pods(item, path)
        elif kind == "Pod":
            yield deepcopy(document) | {"metadata": {**metadata, "name": name, "namespace": namespace}}
        elif kind in _COUNTED:
            spec = document["spec"]["jobTemplate"]["spec"] if kind == "CronJob" else document["spec"]
            count = _replicas(spec) if kind in _REPLICATED else _pods_at_once(spec)
            if not 0 <= count <= MAX_REPLICAS:
                raise click.ClickException(f"{path}: {kind} {name}: expected 0 to {MAX_REPLICAS} pods, found {count}")
            template = spec["template"]
            for number in range(count):
                own = {**(template.get("metadata") or {}), "name": f"{name}-{number}", "namespace": namespace}
                yield {"metadata": own, "spec": deepcopy(template["spec"])}
        elif kind == "DaemonSet":
            why = "it puts a pod on every node that its selectors and tolerations allow, which a snapshot does not know"
            raise click.ClickException(f"{path}: the pods of DaemonSet {name} cannot be counted: {why}; add one of its pods as a Pod")
        elif not _is_built_in(str(document.get("apiVersion") or "")):
            why = f"expected {', '.join(_COUNTED)}, found a kind of {document['apiVersion']}"
            raise click.ClickException(f"{path}: the pods of {kind} {name} cannot be counted: {why}; add what its controller makes of it")
    except (KeyError, TypeError, AttributeError, ValueError) as exc:
        raise click.ClickException(f"{path}: expected Kubernetes objects: {exc!r}") from exc


def _replicas(spec: Mapping[str, Any]) -> int:
    return _count(spec, "replicas", 1)


def _pods_at_once(job: Mapping[str, Any]) -> int:
    """Return how many pods of a Job run at a time."""
    parallelism = _count(job, "parallelism", 1)
    return min(parallelism, _count(job, "completions", parallelism))


def _count(spec: Mapping[str, Any], name: str, absent: int) -> int:
    value = spec.get(name)
    return absent if value is None else int(value)


def _is_built_in(api_version: str) -> bool:
    """Whether a kind is Kubernetes' own: of the core group, of one without a domain, or of one of the domain k8s.io."""
    group = api_version.rpartition("/")[0]
    return "." not in group or group.endswith(".k8s.io")


def _admitted(pod: dict[str, Any], normaliser: Normaliser, uid: str) -> PodFacts:
    name = f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
    outcome = normaliser.admit(pod)
    if outcome.refusal:
        raise click.ClickException(f"{name} would be refused at admission: {outcome.refusal}")
    for operation in outcome.patch:
        _apply(pod, operation)
    pod["metadata"]["uid"] = uid
    try:
        return pod_facts(msgspec.convert(pod, PodObject))
    except (msgspec.ValidationError, AliquotError) as exc:
        raise click.ClickException(f"{name}: {exc}") from exc


def _apply(pod: dict[str, Any], operation: Mapping[str, Any]) -> None:
    """Make one change; admission only ever adds a value at a path."""
    *way, last = str(operation["path"]).strip("/").split("/")
    place: Any = pod
    for step in way:
        place = place[int(step)] if isinstance(place, list) else place.setdefault(step, {})
    place[last] = operation["value"]


def _device_sizes(nodes: Iterable[GpuNode], preferences: Preferences) -> set[int]:
    return {
        entry.device.memory_bytes // units.MIB
        for node in nodes
        for entry in node.devices
        if not entry.device.mig_enabled and type_wanted(entry.device.model.lower(), preferences)
    }
