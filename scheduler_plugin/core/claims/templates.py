# SPDX-License-Identifier: Apache-2.0
"""The ResourceClaimTemplates that requests for vGPUs become: one for each shape, named by a hash of its content. Pure.

Invariant: templates of one name have one content. So a namespace has at most one object for each shape, however many pods use it.
Source: https://pkg.go.dev/k8s.io/api/resource/v1#ResourceClaimTemplate
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from aliquot import contract
from aliquot.contract import units
from aliquot.contract.model import ContainerRequest, CoresMode, Isolation, NumaMode, Preferences
from aliquot.placement import model_name
from aliquot.placement.request import RequestError

REQUEST: Final = "vgpu"
"""The one request of each template."""
TEMPLATE_PREFIX: Final = "aliquot-vgpu-"
HASH_CHARS: Final = 16
KEEP_SECONDS: Final = 24 * 3600.0
"""How long a template stays that no pod uses. A pod that comes later gets a new one."""
TOUCH_SECONDS: Final = 3600.0
"""The time of its last use is written again after this. It must be far below KEEP_SECONDS: a template in use by a pod that is being
admitted is never near its end."""
_ATTRIBUTES: Final = f"device.attributes['{contract.DRA_DRIVER}']"
_ON_ONE_NUMA_NODE: Final = "resource.kubernetes.io/numaNode"

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ClaimTemplate:
    """A ResourceClaimTemplate by its name and the spec of its claims."""

    name: str
    spec: Json


def template_of(asked: ContainerRequest, preferences: Preferences) -> ClaimTemplate:
    """Return the template for what a container asks for. Raises RequestError with what a claim cannot state."""
    _check(asked, preferences)
    exactly: Json = {"deviceClassName": _device_class(preferences), "allocationMode": "ExactCount", "count": asked.vgpus}
    if capacity := _capacity(asked, preferences):
        exactly["capacity"] = {"requests": capacity}
    if expressions := _expressions(preferences):
        exactly["selectors"] = [{"cel": {"expression": expression}} for expression in expressions]
    devices: Json = {"requests": [{"name": REQUEST, "exactly": exactly}]}
    if preferences.numa is NumaMode.STRICT and asked.vgpus > 1:
        devices["constraints"] = [{"requests": [REQUEST], "matchAttribute": _ON_ONE_NUMA_NODE}]
    if parameters := _parameters(preferences):
        devices["config"] = [{"requests": [REQUEST], "opaque": {"driver": contract.DRA_DRIVER, "parameters": parameters}}]
    spec = {"devices": devices}
    digest = hashlib.sha256(msgspec.json.encode(spec, order="deterministic")).hexdigest()
    return ClaimTemplate(f"{TEMPLATE_PREFIX}{digest[:HASH_CHARS]}", spec)


def has_content(found: Any, wanted: Any) -> bool:
    """Whether what the API stored is what was written. Fields that the API server, or a later version of it, adds are no difference."""
    if isinstance(wanted, Mapping):
        return isinstance(found, Mapping) and all(has_content(found.get(name), value) for name, value in wanted.items())
    if isinstance(wanted, Sequence) and not isinstance(wanted, str):
        same_length = isinstance(found, Sequence) and len(found) == len(wanted)
        return same_length and all(map(has_content, found, wanted))
    return bool(found == wanted)


def is_ours(name: str) -> bool:
    """Whether a template has a name as ``template_of`` makes it."""
    return name.startswith(TEMPLATE_PREFIX)


def is_due(last_used: float, now: float) -> bool:
    """Whether the time of a template's last use is to be written again."""
    return now - last_used > TOUCH_SECONDS


def is_old(last_used: float, now: float) -> bool:
    """Whether no pod has been admitted with a template for so long that it can go, unless a pod names it."""
    return now - last_used > KEEP_SECONDS


def _check(asked: ContainerRequest, preferences: Preferences) -> None:
    where = f"container {asked.container}"
    if asked.mig:
        raise RequestError(f"{where} asks for MIG instances, which cannot be claimed yet: ask for {contract.RESOURCE_VGPU} instead")
    if asked.memory_percent is not None:
        raise RequestError(
            f"{where} asks for a percentage of memory, which a claim cannot state: write MiB in {contract.RESOURCE_VGPU_MEMORY}"
        )
    if preferences.isolation not in (None, Isolation.SHIM, Isolation.EXCLUSIVE):
        raise RequestError(
            f"annotation {contract.ANNOTATION_ISOLATION}: {preferences.isolation} is not available to claims: write shim or exclusive"
        )
    if preferences.paused:
        raise RequestError(f"annotation {contract.ANNOTATION_PAUSED} is not available to claims: remove it")


def _device_class(preferences: Preferences) -> str:
    return contract.DRA_CLASS_WHOLE if preferences.isolation is Isolation.EXCLUSIVE else contract.DRA_CLASS


def _capacity(asked: ContainerRequest, preferences: Preferences) -> dict[str, str]:
    """Return the amounts of one GPU, in the notation that the API server gives back."""
    if preferences.isolation is Isolation.EXCLUSIVE:
        return {}
    memory, cores = asked.memory_bytes_per_vgpu, asked.cores_percent_per_vgpu
    return ({"memory": _binary(memory)} if memory is not None else {}) | ({"cores": str(cores)} if cores is not None else {})


def _binary(memory_bytes: int) -> str:
    """Return an amount with the largest suffix that leaves a whole number, as Kubernetes writes it."""
    amount, suffixes = memory_bytes // units.MIB, ["Mi", "Gi", "Ti"]
    while amount % 1024 == 0 and len(suffixes) > 1:
        amount //= 1024
        suffixes.pop(0)
    return f"{amount}{suffixes[0]}"


def _expressions(preferences: Preferences) -> list[str]:
    """Return CEL conditions on a device. A GPU must meet each."""
    models = [f"(?i){model_name.pattern(name)}" for name in preferences.gpu_type]
    not_models = [f"(?i){model_name.pattern(name)}" for name in preferences.gpu_type_not]
    product, uuid = f"{_ATTRIBUTES}.productName", f"{_ATTRIBUTES}.uuid"
    found = []
    if models:
        found.append(" || ".join(f"{product}.matches({_text(one)})" for one in models))
    found += [f"!{product}.matches({_text(one)})" for one in not_models]
    if preferences.gpu_uuid:
        found.append(f"{uuid} in [{', '.join(map(_text, preferences.gpu_uuid))}]")
    if preferences.gpu_uuid_not:
        found.append(f"!({uuid} in [{', '.join(map(_text, preferences.gpu_uuid_not))}])")
    return found


def _text(value: str) -> str:
    """Return a text as a literal of CEL, which has JSON's escapes."""
    return msgspec.json.encode(value).decode()


def _parameters(preferences: Preferences) -> Json:
    """Return the driver's parameters; empty without any, and for a whole GPU, whose class has them."""
    stated: Json = {}
    if preferences.priority is not None:
        stated["priority"] = str(preferences.priority)
    if preferences.cores_mode not in (None, CoresMode.CEILING):
        stated["coresMode"] = str(preferences.cores_mode)
    if preferences.memory_burst is not None:
        stated["memoryBurst"] = f"{preferences.memory_burst:g}"
    return {"apiVersion": contract.PARAMETERS_API_VERSION, "kind": contract.PARAMETERS_KIND, **stated} if stated else {}
