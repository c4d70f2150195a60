"""From a pod's limits and annotations to a PodRequest, with every input that no GPU can satisfy refused.

A refusal is a RequestError whose message says what was found and what to write instead; the webhook shows it at admission, the
agent in the pod's events. Nothing here depends on a node: what one cannot offer today is a matter of fit.py.
"""

import re
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Final, NoReturn, TypeVar

from placement import mig
from proto import codec, contract, units
from proto.errors import AliquotError, ContractError, quote
from proto.model import (
    ContainerRequest,
    ContainerSpec,
    CoresMode,
    Isolation,
    NumaMode,
    Pod,
    PodRequest,
    Policy,
    Preferences,
    Priority,
)

MAX_MEMORY_BURST: Final = 10.0
"""A ceiling of more than ten times the memory promised is a slip of the keyboard."""

MAX_CONTAINERS: Final = 32
"""Containers of one pod that ask for GPUs: more are a slip of a template, and every one of them costs a search on every node."""

_RATIO: Final = re.compile(r"[0-9]{1,3}(?:\.[0-9]{1,6})?", re.ASCII)
_E = TypeVar("_E", bound=StrEnum)


class RequestError(AliquotError):
    """A pod asks for something that no GPU can give; the message says what to write instead."""


def pod_request(pod: Pod) -> PodRequest:
    """Read what a pod asks of GPUs: its requesting containers in spec order, and its preferences.

    The order of ``pod.containers`` is the kubelet's: init containers before app containers.

    Raises: RequestError: an amount or annotation that cannot be honoured, in any container.
    """
    requests = tuple(request for spec in pod.containers if (request := container_request(spec)) is not None)
    if requests and all(request.init for request in requests):
        raise RequestError(
            f"init container {requests[0].container} asks for a GPU but no app container does, and devices are only attributed to those: "
            f"move the limits to an app container too, or make it a sidecar (restartPolicy: Always)"
        )
    if len(requests) > MAX_CONTAINERS:
        raise RequestError(f"expected at most {MAX_CONTAINERS} containers that ask for GPUs, found {len(requests)}: divide them among pods")
    preferences = pod_preferences(pod.annotations)
    for request in requests:
        _check_preferences(request, preferences)
    return PodRequest(requests, preferences)


def request_of_container(pod: Pod, container: str) -> tuple[ContainerRequest, Preferences]:
    """Read what one container of a pod asks; the other containers are not looked at.

    Raises: RequestError: as pod_request, or the container does not exist or asks for no GPU.
    """
    spec = next((spec for spec in pod.containers if spec.name == container), None)
    if spec is None:
        raise RequestError(f"expected a container {quote(container)} in pod {pod.namespace}/{pod.name}, found {_names(pod)}")
    request = container_request(spec)
    if request is None:
        raise RequestError(f"container {container} asks for no GPU: set {contract.RESOURCE_VGPU} in its limits")
    preferences = pod_preferences(pod.annotations)
    _check_preferences(request, preferences)
    return request, preferences


def container_request(spec: ContainerSpec) -> ContainerRequest | None:
    """Read one container's limits, or None when it asks for no GPU. Raises RequestError."""
    profiles = _mig_counts(spec)
    asks_vgpu = any(name in spec.limits for name in (contract.RESOURCE_VGPU, contract.RESOURCE_VGPU_MEMORY, contract.RESOURCE_VGPU_CORES))
    init = spec.init and not spec.restartable
    if profiles:
        if asks_vgpu:
            _refuse(spec, f"asks for {contract.RESOURCE_VGPU} and {profiles[0][0]} at once: keep one kind, or use two containers")
        _check_device_count(spec, sum(count for _, count in profiles), "MIG instances")
        return ContainerRequest(spec.name, mig=profiles, init=init)
    if not asks_vgpu:
        return None
    vgpus = _amount(spec, contract.RESOURCE_VGPU, units.parse_count) or 1
    _check_device_count(spec, vgpus, contract.RESOURCE_VGPU)
    return ContainerRequest(spec.name, vgpus, _memory_bytes(spec, vgpus), _cores_percent(spec, vgpus), init=init)


def pod_preferences(annotations: Mapping[str, str]) -> Preferences:
    """Read the annotations that steer placement and enforcement. Raises RequestError for a value that is none of the choices."""
    return Preferences(
        gpu_type=_names_in(annotations, contract.ANNOTATION_GPU_TYPE),
        gpu_type_not=_names_in(annotations, contract.ANNOTATION_GPU_TYPE_NOT),
        gpu_uuid=_names_in(annotations, contract.ANNOTATION_GPU_UUID),
        gpu_uuid_not=_names_in(annotations, contract.ANNOTATION_GPU_UUID_NOT),
        policy=_choice_in(annotations, contract.ANNOTATION_PLACEMENT, Policy),
        numa=_choice_in(annotations, contract.ANNOTATION_NUMA, NumaMode),
        isolation=_choice_in(annotations, contract.ANNOTATION_ISOLATION, Isolation),
        priority=_choice_in(annotations, contract.ANNOTATION_PRIORITY, Priority),
        memory_burst=_memory_burst(annotations),
        cores_mode=_choice_in(annotations, contract.ANNOTATION_CORES_MODE, CoresMode),
        paused=is_paused(annotations),
    )


def is_paused(annotations: Mapping[str, str]) -> bool:
    """Read whether a pod's launches are to wait; this may change while it runs. Raises RequestError."""
    text = annotations.get(contract.ANNOTATION_PAUSED, "false")
    if text not in ("true", "false"):
        raise RequestError(
            f"annotation {contract.ANNOTATION_PAUSED}: {quote(text)} is none of true, false: write one of these, or remove it"
        )
    return text == "true"


# --- limits -------------------------------------------------------------------------------------------------------


def _memory_bytes(spec: ContainerSpec, vgpus: int) -> int | None:
    total = _amount(spec, contract.RESOURCE_VGPU_MEMORY, units.parse_memory_bytes)
    if total is None:
        return None
    mib = units.bytes_to_mib(total)
    if mib < vgpus:
        _refuse(
            spec, f"asks for {mib} MiB of device memory on {vgpus} vGPUs: {contract.RESOURCE_VGPU_MEMORY} is the total, at least 1 MiB each"
        )
    if mib % vgpus != 0:
        fitting = f"{mib - mib % vgpus} or {mib - mib % vgpus + vgpus}"
        _refuse(
            spec,
            f"asks for {mib} MiB of device memory, which does not split evenly over {vgpus} vGPUs: "
            f"set {contract.RESOURCE_VGPU_MEMORY} to {fitting}",
        )
    return total


def _cores_percent(spec: ContainerSpec, vgpus: int) -> int | None:
    total = _amount(spec, contract.RESOURCE_VGPU_CORES, units.parse_percent)
    if total is None:
        return None
    most = units.WHOLE_GPU_PERCENT * vgpus
    if total > most:
        _refuse(
            spec,
            f"asks for {total} percent of cores on {vgpus} vGPU{'s' * (vgpus > 1)}, which have {most} in all: "
            f"set {contract.RESOURCE_VGPU_CORES} to at most {most}, or ask for more vGPUs",
        )
    if total % vgpus != 0:
        fitting = f"{total - total % vgpus + vgpus}" if total < vgpus else f"{total - total % vgpus} or {total - total % vgpus + vgpus}"
        _refuse(
            spec,
            f"asks for {total} percent of cores, which do not split evenly over {vgpus} vGPUs: "
            f"set {contract.RESOURCE_VGPU_CORES} to {fitting}",
        )
    return total


def _mig_counts(spec: ContainerSpec) -> tuple[tuple[str, int], ...]:
    resources = sorted(name for name in spec.limits if name.startswith(contract.RESOURCE_MIG_PREFIX))
    counts = []
    for resource in resources:
        try:
            profile = mig.profile_of_resource(resource)
        except ContractError as exc:
            raise RequestError(f"container {spec.name}, {quote(resource)}: {exc}") from exc
        counts.append((profile, _parsed(spec, resource, units.parse_count)))
    return tuple(counts)


def _amount(spec: ContainerSpec, resource: str, parse: Callable[[str], int]) -> int | None:
    return _parsed(spec, resource, parse) if resource in spec.limits else None


def _parsed(spec: ContainerSpec, resource: str, parse: Callable[[str], int]) -> int:
    try:
        return parse(spec.limits[resource])
    except ContractError as exc:
        raise RequestError(f"container {spec.name}, {resource}: {exc}, or leave the line out") from exc


def _check_device_count(spec: ContainerSpec, count: int, what: str) -> None:
    if count > contract.MAX_DEVICES_PER_CONTAINER:
        _refuse(
            spec,
            f"asks for {count} {what}: one container can use at most {contract.MAX_DEVICES_PER_CONTAINER}; "
            "divide the work over several containers",
        )


def _refuse(spec: ContainerSpec, sentence: str) -> NoReturn:
    raise RequestError(f"container {spec.name} {sentence}")


# --- annotations --------------------------------------------------------------------------------------------------


def _choice_in(annotations: Mapping[str, str], name: str, choices: type[_E]) -> _E | None:
    text = annotations.get(name)
    if text is None:
        return None
    try:
        return choices(text)
    except ValueError:
        raise RequestError(f"annotation {name}: {quote(text)} is none of {', '.join(choices)}: write one of these, or remove it") from None


def _names_in(annotations: Mapping[str, str], name: str) -> tuple[str, ...]:
    text = annotations.get(name)
    if text is None:
        return ()
    try:
        return codec.decode_list(text)
    except ContractError as exc:
        raise RequestError(f"annotation {name}: {exc}; or remove it") from exc


def _memory_burst(annotations: Mapping[str, str]) -> float | None:
    text = annotations.get(contract.ANNOTATION_MEMORY_BURST)
    if text is None:
        return None
    if _RATIO.fullmatch(text) is None or not 1.0 <= float(text) <= MAX_MEMORY_BURST:
        raise RequestError(
            f"annotation {contract.ANNOTATION_MEMORY_BURST}: expected a ratio from 1 to {MAX_MEMORY_BURST:g}, found {quote(text)}: "
            'write "1.5" to let the pod use half as much again as it was promised, or remove it'
        )
    return float(text)


def _check_preferences(request: ContainerRequest, preferences: Preferences) -> None:
    """Refuse annotations that contradict the amounts of a container of the pod.

    An amount of memory beside ``isolation: exclusive`` is for quotas to count: the GPU is given whole. That it is no less than the GPU
    has is a matter of fit.py.
    """
    name = request.container
    if preferences.paused and (request.mig or preferences.isolation not in (None, Isolation.SHIM)):
        without_shim = "MIG instances" if request.mig else f"{contract.ANNOTATION_ISOLATION}: {preferences.isolation}"
        raise RequestError(
            f'container {name} asks for {without_shim} with {contract.ANNOTATION_PAUSED}: "true", and only the shim can pause: '
            "remove one of the two"
        )
    if request.mig:
        return
    if preferences.isolation is Isolation.MIG:
        raise RequestError(
            f"container {name} asks for {contract.RESOURCE_VGPU} with {contract.ANNOTATION_ISOLATION}: mig: "
            f"ask for an instance by its resource instead, such as {contract.RESOURCE_MIG_PREFIX}1g.10gb: 1"
        )
    if preferences.isolation is Isolation.EXCLUSIVE and request.cores_percent is not None:
        raise RequestError(
            f"container {name} asks for a part of a GPU's cores with {contract.ANNOTATION_ISOLATION}: exclusive, which gives whole GPUs: "
            f"remove {contract.RESOURCE_VGPU_CORES}, or the annotation"
        )
    if preferences.cores_mode is CoresMode.WEIGHT and request.cores_percent is None:
        raise RequestError(
            f"container {name} asks for no cores with {contract.ANNOTATION_CORES_MODE}: weight, and its cores are its weight: "
            f"set {contract.RESOURCE_VGPU_CORES}, or remove the annotation"
        )
    if preferences.memory_burst is not None and (request.memory_bytes is None or preferences.isolation is Isolation.EXCLUSIVE):
        raise RequestError(
            f"container {name} asks for whole GPUs with {contract.ANNOTATION_MEMORY_BURST}, but there is no memory beyond a whole one: "
            f"set {contract.RESOURCE_VGPU_MEMORY} to less, or remove the annotation"
        )


def _names(pod: Pod) -> str:
    return ", ".join(spec.name for spec in pod.containers) or "none"
