# SPDX-License-Identifier: Apache-2.0
"""Parses a pod's limits and annotations into a PodRequest, and refuses each input that no GPU can satisfy.

A refusal is a RequestError. Its message says what was found and what to write instead; the webhook shows it at admission, the agent in the
pod's events. Nothing here depends on a node: fit.py decides what a node can offer.
"""

import re
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Final, NoReturn, TypeVar

from aliquot import contract
from aliquot.contract import codec, units
from aliquot.contract.errors import AliquotError, ContractError, quote
from aliquot.contract.model import (
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
from aliquot.placement import mig

MAX_MEMORY_BURST: Final = 10.0
"""A larger ratio is a typing mistake."""

MAX_CONTAINERS: Final = 32
"""Containers of one pod that ask for GPUs. More are a mistake in a template, and each of them costs a search on each node."""

_RATIO: Final = re.compile(r"[0-9]{1,3}(?:\.[0-9]{1,6})?", re.ASCII)
_E = TypeVar("_E", bound=StrEnum)


class RequestError(AliquotError):
    """A pod asks for something that no GPU can give; the message says what to write instead."""


def pod_request(pod: Pod) -> PodRequest:
    """Parse the GPU side of a pod: the containers that ask for GPUs in spec order, and the preferences.

    The order of ``pod.containers`` is the kubelet's: init containers before app containers.

    Raises: RequestError: an amount or annotation that no GPU can satisfy, in any container.
    """
    requests = tuple(request for spec in pod.containers if (request := container_request(spec)) is not None)
    if len(requests) > MAX_CONTAINERS:
        raise RequestError(
            f"expected at most {MAX_CONTAINERS} containers that ask for GPUs, found {len(requests)}: split them over several pods"
        )
    preferences = pod_preferences(pod.annotations)
    for request in requests:
        _check_preferences(request, preferences)
    return PodRequest(requests, preferences)


def request_of_container(pod: Pod, container: str) -> tuple[ContainerRequest, Preferences]:
    """Parse the request of one container of a pod; the other containers are not checked.

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
    """Parse one container's limits; None if it asks for no GPU. Raises RequestError."""
    profiles = _mig_counts(spec)
    asks_vgpu = any(name in spec.limits for name in contract.RESOURCES_OF_VGPUS)
    if profiles and asks_vgpu:
        _refuse(spec, f"asks for {contract.RESOURCE_VGPU} and {profiles[0][0]} at once: keep one kind, or use two containers")
    if profiles:
        _check_device_count(spec, sum(count for _, count in profiles), "MIG instances")
        return ContainerRequest(spec.name, mig=profiles, init=_ends_before_the_apps(spec))
    return _vgpu_request(spec) if asks_vgpu else None


def _vgpu_request(spec: ContainerSpec) -> ContainerRequest:
    vgpus = _amount(spec, contract.RESOURCE_VGPU, units.parse_count) or 1
    _check_device_count(spec, vgpus, contract.RESOURCE_VGPU)
    memory_bytes, memory_percent = _memory_bytes(spec, vgpus), _memory_percent(spec, vgpus)
    if memory_bytes is not None and memory_percent is not None:
        _refuse(spec, f"sets both {contract.RESOURCE_VGPU_MEMORY} and {contract.RESOURCE_VGPU_MEMORY_PERCENT}: keep one")
    if memory_percent == units.WHOLE_GPU_PERCENT * vgpus:
        memory_percent = None  # all memory, as without an amount
    cores_percent, init = _cores_percent(spec, vgpus), _ends_before_the_apps(spec)
    return ContainerRequest(spec.name, vgpus, memory_bytes, cores_percent, init=init, memory_percent=memory_percent)


def _ends_before_the_apps(spec: ContainerSpec) -> bool:
    return spec.init and not spec.restartable


def pod_preferences(annotations: Mapping[str, str]) -> Preferences:
    """Parse the annotations for placement and enforcement. Raises RequestError for an invalid value."""
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
    """Return whether the pod's launches are paused; this may change while it runs. Raises RequestError."""
    text = annotations.get(contract.ANNOTATION_PAUSED, "false")
    if text not in ("true", "false"):
        raise RequestError(
            f"annotation {contract.ANNOTATION_PAUSED}: expected true or false, found {quote(text)}: correct it, or remove it"
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


def _memory_percent(spec: ContainerSpec, vgpus: int) -> int | None:
    return _percent(spec, vgpus, contract.RESOURCE_VGPU_MEMORY_PERCENT, "device memory")


def _cores_percent(spec: ContainerSpec, vgpus: int) -> int | None:
    return _percent(spec, vgpus, contract.RESOURCE_VGPU_CORES, "cores")


def _percent(spec: ContainerSpec, vgpus: int, resource: str, what: str) -> int | None:
    total = _amount(spec, resource, units.parse_percent)
    if total is None:
        return None
    most = units.WHOLE_GPU_PERCENT * vgpus
    if total > most:
        _refuse(
            spec,
            f"asks for {total} percent of {what} on {vgpus} vGPU{'s' * (vgpus > 1)}, which have {most} in all: "
            f"set {resource} to at most {most}, or ask for more vGPUs",
        )
    if total % vgpus != 0:
        fitting = f"{total - total % vgpus + vgpus}" if total < vgpus else f"{total - total % vgpus} or {total - total % vgpus + vgpus}"
        _refuse(
            spec,
            f"asks for {total} percent of {what}, which do not split evenly over {vgpus} vGPUs: set {resource} to {fitting}",
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
        raise RequestError(f"container {spec.name}, {resource}: {exc}, or remove the resource") from exc


def _check_device_count(spec: ContainerSpec, count: int, what: str) -> None:
    if count > contract.MAX_DEVICES_PER_CONTAINER:
        _refuse(
            spec,
            f"asks for {count} {what}: one container can use at most {contract.MAX_DEVICES_PER_CONTAINER}; "
            "split the work over several containers",
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
        raise RequestError(
            f"annotation {name}: expected one of {', '.join(choices)}, found {quote(text)}: correct it, or remove it"
        ) from None


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
            'write "1.5" to allow 50 percent more memory than requested, or remove it'
        )
    return float(text)


def _check_preferences(request: ContainerRequest, preferences: Preferences) -> None:
    """Refuse annotations that contradict the amounts of a container of the pod.

    With ``isolation: exclusive`` an amount of memory only counts for quotas: the container gets the whole GPU. fit.py checks that the
    amount is not less than the GPU has.
    """
    _check_pause(request, preferences)
    if not request.mig:
        _check_isolation(request, preferences)
        _check_amounts(request, preferences)


def _check_pause(request: ContainerRequest, preferences: Preferences) -> None:
    name = request.container
    if preferences.paused and (request.mig or preferences.isolation not in (None, Isolation.SHIM)):
        without_shim = "MIG instances" if request.mig else f"{contract.ANNOTATION_ISOLATION}: {preferences.isolation}"
        raise RequestError(
            f'container {name} asks for {without_shim} with {contract.ANNOTATION_PAUSED}: "true", but only the shim can pause: '
            "remove one of the two"
        )


def _check_isolation(request: ContainerRequest, preferences: Preferences) -> None:
    name = request.container
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


def _check_amounts(request: ContainerRequest, preferences: Preferences) -> None:
    name = request.container
    if preferences.cores_mode is CoresMode.WEIGHT and request.cores_percent is None:
        raise RequestError(
            f"container {name} has {contract.ANNOTATION_CORES_MODE}: weight, but no {contract.RESOURCE_VGPU_CORES}, which is its weight: "
            f"set {contract.RESOURCE_VGPU_CORES}, or remove the annotation"
        )
    if preferences.isolation is Isolation.EXCLUSIVE and request.memory_percent is not None:
        raise RequestError(
            f"container {name} asks for a part of a GPU's memory with {contract.ANNOTATION_ISOLATION}: exclusive, which gives whole GPUs: "
            f"remove {contract.RESOURCE_VGPU_MEMORY_PERCENT}, or the annotation"
        )
    if preferences.memory_burst is not None and (request.asks_whole_memory or preferences.isolation is Isolation.EXCLUSIVE):
        raise RequestError(
            f"container {name} asks for whole GPUs with {contract.ANNOTATION_MEMORY_BURST}, but a whole GPU has no memory to burst into: "
            f"set {contract.RESOURCE_VGPU_MEMORY} to less, or remove the annotation"
        )


def _names(pod: Pod) -> str:
    return ", ".join(spec.name for spec in pod.containers) or "none"
