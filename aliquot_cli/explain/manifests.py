# SPDX-License-Identifier: Apache-2.0
"""Reads the pods of manifests, changed as the webhook changes them. A controller's template counts once for each pod that runs at a time.

Two kinds of object are an error: a DaemonSet, because the manifest does not say how many pods it creates, and any kind outside Kubernetes,
because the pods that its controller creates are unknown. Kubernetes objects that create no pods are skipped.
"""

from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import click
import msgspec
import yaml

from aliquot.contract import units
from aliquot.contract.errors import AliquotError
from aliquot.contract.gpunode import GpuNode
from aliquot.contract.model import Preferences
from aliquot.placement import mig, model_name
from scheduler_plugin.core.cluster.objects import PodObject, pod_facts
from scheduler_plugin.core.cluster.pods import PodFacts
from scheduler_plugin.webhook.amounts import Options
from scheduler_plugin.webhook.normalise import Normaliser

MAX_REPLICAS = 10_000
_REPLICATED = ("Deployment", "ReplicaSet", "StatefulSet", "ReplicationController")
"""Kinds that create ``replicas`` pods from a template."""
_PRIORITY_CLASSES = {"system-cluster-critical": 2_000_000_000, "system-node-critical": 2_000_001_000}
"""The priority classes that every cluster has."""
_COUNTED = ("Pod", *_REPLICATED, "Job", "CronJob")


def pods_of(path: Path, nodes: Iterable[GpuNode], adopt_nvidia_gpu: bool = False) -> list[PodFacts]:
    """Read the pods of a file's documents. Raises click.ClickException where the file is invalid.

    Args: nodes: the sizes of their GPUs turn a request for a part of a GPU into an amount of memory.
    """
    known = list(nodes)
    normaliser = Normaliser(Options(partial(device_sizes, known), adopt_nvidia_gpu, mig_profiles=partial(mig_profiles, known)))
    pods = [pod for document in _documents(path) for pod in _pods(document, path)]
    if not pods:
        raise click.ClickException(f"{path}: expected pods of {', '.join(_COUNTED)}; found no pod")
    for pod in pods:
        _normalise(pod, normaliser)
    unknown = dict.fromkeys(name for pod in pods if (name := _set_priority(pod.get("spec"))))  # a class of work sets it in admission
    for name in unknown:
        why = "a snapshot contains no priority classes. Its pods have priority 0 here unless they set spec.priority"
        click.echo(f"{path}: the priority of class {name} is unknown: {why}", err=True)
    return [_facts(pod, f"what-if-{path}-{number}") for number, pod in enumerate(pods)]


def _documents(path: Path) -> list[Any]:
    try:
        return [document for document in yaml.safe_load_all(path.read_text()) if document]
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as exc:
        raise click.ClickException(f"{path}: {exc}") from exc


def _set_priority(spec: Any) -> str:
    """Set the priority of the pod's class, as admission does. Returns: the class where its priority is unknown, otherwise empty."""
    if not isinstance(spec, dict) or not spec.get("priorityClassName") or spec.get("priority") is not None:
        return ""  # admission reports an invalid spec
    name = str(spec["priorityClassName"])
    if name not in _PRIORITY_CLASSES:
        return name
    spec["priority"] = _PRIORITY_CLASSES[name]
    return ""


def _pods(document: Any, path: Path) -> Iterator[dict[str, Any]]:
    """Yield the pods that one document creates."""
    try:
        kind = document["kind"]
        if kind == "List":
            for item in document.get("items") or ():
                yield from _pods(item, path)
        elif kind == "Pod":
            name, namespace = _name_of(document)
            yield deepcopy(document) | {"metadata": {**(document.get("metadata") or {}), "name": name, "namespace": namespace}}
        elif kind in _COUNTED:
            yield from _pods_of_template(document, path)
        else:
            _refuse_uncountable(document, path)
    except (KeyError, TypeError, AttributeError, ValueError) as exc:
        raise click.ClickException(f"{path}: expected Kubernetes objects: {exc!r}") from exc


def _name_of(document: Mapping[str, Any]) -> tuple[str, str]:
    """Return name and namespace of an object; without a name, its kind in lower case."""
    metadata = document.get("metadata") or {}
    return str(metadata.get("name") or document["kind"].lower()), str(metadata.get("namespace") or "default")


def _pods_of_template(document: Mapping[str, Any], path: Path) -> Iterator[dict[str, Any]]:
    """Yield the pods of a controller's template, numbered from 0."""
    kind, (name, namespace) = document["kind"], _name_of(document)
    spec = document["spec"]["jobTemplate"]["spec"] if kind == "CronJob" else document["spec"]
    count = _replicas(spec) if kind in _REPLICATED else _pods_at_once(spec)
    if not 0 <= count <= MAX_REPLICAS:
        raise click.ClickException(f"{path}: {kind} {name}: expected 0 to {MAX_REPLICAS} pods, found {count}")
    template = spec["template"]
    for number in range(count):
        metadata = {**(template.get("metadata") or {}), "name": f"{name}-{number}", "namespace": namespace}
        yield {"metadata": metadata, "spec": deepcopy(template["spec"])}


def _refuse_uncountable(document: Mapping[str, Any], path: Path) -> None:
    """Raise click.ClickException for an object that creates an unknown number of pods; return for one that creates no pods."""
    kind, (name, _) = document["kind"], _name_of(document)
    if kind == "DaemonSet":
        why = "it creates a pod on every node that its selectors and tolerations allow, and a snapshot does not contain those"
        raise click.ClickException(f"{path}: the pods of DaemonSet {name} cannot be counted: {why}; add one of its pods as a Pod")
    if not _is_built_in(str(document.get("apiVersion") or "")):
        why = f"expected {', '.join(_COUNTED)}, found a kind of {document['apiVersion']}"
        raise click.ClickException(f"{path}: the pods of {kind} {name} cannot be counted: {why}; add the pods that its controller creates")


def _replicas(spec: Mapping[str, Any]) -> int:
    return _count(spec, "replicas", 1)


def _pods_at_once(job: Mapping[str, Any]) -> int:
    """Return how many pods of a Job run at the same time."""
    parallelism = _count(job, "parallelism", 1)
    return min(parallelism, _count(job, "completions", parallelism))


def _count(spec: Mapping[str, Any], name: str, absent: int) -> int:
    value = spec.get(name)
    return absent if value is None else int(value)


def _is_built_in(api_version: str) -> bool:
    """Whether the kind belongs to Kubernetes: its group is core, has no domain, or ends in .k8s.io."""
    group = api_version.rpartition("/")[0]
    return "." not in group or group.endswith(".k8s.io")


def _normalise(pod: dict[str, Any], normaliser: Normaliser) -> None:
    """Change the pod as admission does. Raises click.ClickException for a pod that it refuses."""
    outcome = normaliser.admit(pod)
    if outcome.refusal:
        raise click.ClickException(f"{_full_name(pod)}: admission refuses this pod: {outcome.refusal}")
    for operation in outcome.patch:
        _apply(pod, operation)


def _facts(pod: dict[str, Any], uid: str) -> PodFacts:
    pod["metadata"]["uid"] = uid
    try:
        return pod_facts(msgspec.convert(pod, PodObject))
    except (msgspec.ValidationError, AliquotError) as exc:
        raise click.ClickException(f"{_full_name(pod)}: {exc}") from exc


def _full_name(pod: dict[str, Any]) -> str:
    return f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"


def _apply(pod: dict[str, Any], operation: Mapping[str, Any]) -> None:
    """Apply one operation of the patch. The webhook only adds a value at a path."""
    *parents, last = str(operation["path"]).strip("/").split("/")
    target: Any = pod
    for step in parents:
        target = target[int(step)] if isinstance(target, list) else target.setdefault(step, {})
    target[last] = operation["value"]


def device_sizes(nodes: Iterable[GpuNode], preferences: Preferences) -> set[int]:
    """Return the sizes, in MiB, of the nodes' GPUs that a pod with these preferences can get."""
    return {
        entry.device.memory_bytes // units.MIB
        for node in nodes
        for entry in node.devices
        if not entry.device.mig_enabled and model_name.wanted(entry.device.model, preferences.gpu_type, preferences.gpu_type_not)
    }


def mig_profiles(nodes: Iterable[GpuNode], preferences: Preferences) -> dict[str, int]:
    """Return the MIG profiles of the nodes that such a pod can get, each with the MiB of its smallest instance."""
    return mig.profile_sizes((entry.device for node in nodes for entry in node.devices), preferences)
