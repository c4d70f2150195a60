# SPDX-License-Identifier: Apache-2.0
"""Translates what users of other systems write into our resources and annotations. ``words.py`` has the table of all words.

Per GPU    HAMi's, Volcano's and vgpu-manager's resources: ``per_gpu.py``
KAI        annotations gpu-fraction, gpu-memory, both also with .limit, gpu-fraction-num-devices, gpu-fraction-container-name;
           kai.scheduler/container.<name>.gpu-memory.portion.limit: KAI's own webhook writes gpu-fraction.limit in this form. Run:ai has
           the same annotations
NVIDIA     annotations nvidia.com/container.<name>.gpu-memory.request and .limit, .gpu-compute.mode; nvidia.com/gpu where it is adopted.
           Replicas (nvidia.com/gpu.shared) state no amount and stay with the device plugin that offers them

A request without a counterpart is refused, with what to write instead; a setting without effect gets a warning.
tests/unit/scheduler_plugin/webhook/golden/ shows the result for each of their example manifests.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Final

from aliquot import contract
from aliquot.contract import units
from aliquot.contract.errors import QuantityError, quote
from aliquot.placement.request import RequestError
from scheduler_plugin.core.cluster.pods import asks_gpu
from scheduler_plugin.webhook import per_gpu
from scheduler_plugin.webhook.amounts import NATIVE, Memory, Options, PerGpu, count, equal_parts, mib, mib_up, part_of_memory
from scheduler_plugin.webhook.draft import Draft, DraftContainer
from scheduler_plugin.webhook.per_gpu import NVIDIA_GPU, NVIDIA_SHARED, VGPU_MANAGER, asking_system

HAMI_OPT_OUT: Final = ("hami.io/webhook", "ignore")
_KNOWN: Final = tuple(
    sorted(str(value) for name, value in vars(contract).items() if name.startswith("ANNOTATION_") and name != "ANNOTATION_PREFIX")
)

KAI_FRACTION: Final = "gpu-fraction"
KAI_MEMORY: Final = "gpu-memory"
KAI_FRACTION_LIMIT: Final = "gpu-fraction.limit"
KAI_MEMORY_LIMIT: Final = "gpu-memory.limit"
_KAI_DEVICES: Final = "gpu-fraction-num-devices"
_KAI_CONTAINER: Final = "gpu-fraction-container-name"
_KAI_KNOWN: Final = (KAI_FRACTION, KAI_MEMORY, KAI_FRACTION_LIMIT, KAI_MEMORY_LIMIT, _KAI_DEVICES, _KAI_CONTAINER)
_KAI_PORTION_LIMIT: Final = re.compile(r"kai\.scheduler/container\.([a-z0-9-]{1,63})\.gpu-memory\.portion\.limit")

_NVIDIA_PREFIX: Final = "nvidia.com/container."
_NVIDIA_WRITTEN_BY_BINDER: Final = (".gpus.devices", ".gpu-compute.portion")
"""What KAI's binder writes on a pod; a copy of the pod has it too. Source: kai-scheduler/KAI-Scheduler pkg/binder/plugins/nvfractions."""
_NVIDIA_KEY: Final = re.compile(r"nvidia\.com/container\.([a-z0-9-]{1,63})\.(gpu-memory\.request|gpu-memory\.limit|gpu-compute\.mode)")
NO_BURST: Final = "1"
"""The ratio of a gpu-memory.limit that equals its request."""
_NVIDIA_MODES: Final = {"time-slicing": None, "sm-sharing": "mps"}

FROM_LIMIT_RANGE: Final = "A resource that the pod does not set comes from a LimitRange of its namespace: remove it there"


def opted_out(draft: Draft) -> bool:
    """Whether the pod has HAMi's label that leaves it alone."""
    return draft.labels.get(HAMI_OPT_OUT[0]) == HAMI_OPT_OUT[1]


def asked_system(draft: Draft, container: DraftContainer, options: Options) -> PerGpu | None:
    """Return the system in which a container asks, unless the pod opted out. vgpu-manager's cannot: two of its names are ours."""
    system = asking_system(container, options)
    return system if system is VGPU_MANAGER or not opted_out(draft) else None


def check_vocabulary(draft: Draft, options: Options) -> None:
    """Refuse a container that asks in two vocabularies: no node offers both.

    A LimitRange can cause this without the user: the API server runs all of admission again when a webhook requests it, and the LimitRange
    then adds nvidia.com/gpu again after we removed it. Source: k8s.io/apiserver/pkg/admission/reinvocation.go.

    Raises: RequestError.
    """
    for container in draft.containers:
        mixed = list(_vocabularies(container, options))
        if len(mixed) > 1:
            raise RequestError(
                f"container {container.name} mixes two vocabularies, {mixed[0]} and {mixed[1]}: keep {contract.RESOURCE_VGPU}* (totals) or "
                f"{NVIDIA_GPU}* (per GPU). {FROM_LIMIT_RANGE}, and limit "
                f"requests.{contract.RESOURCE_VGPU} in a ResourceQuota"
            )


def _vocabularies(container: DraftContainer, options: Options) -> Iterator[str]:
    """Yield a resource of each vocabulary in which a container asks, ours first."""
    systems = [system for system in per_gpu.systems(options) if any(map(container.wants, system.marks))]
    theirs = {name for system in systems for name in system.names}
    yield from sorted(_our_names(container) - theirs)[:1]
    if NVIDIA_GPU not in theirs:
        yield from [name for name in (NVIDIA_GPU, NVIDIA_SHARED) if container.wants(name)][:1]
    for system in systems:
        yield next(filter(container.wants, (system.count, *system.marks)))


def _our_names(container: DraftContainer) -> set[str]:
    """Return the resources of our vocabulary that a container names."""
    return {name for name in {**container.limits, **container.requests} if asks_gpu([name])}


def is_foreign(draft: Draft, options: Options) -> bool:
    """Whether the pod asks for a GPU in another vocabulary that we translate."""
    if any(asked_system(draft, container, options) is not None for container in draft.containers):
        return True
    return not opted_out(draft) and any(map(is_foreign_annotation, draft.annotations))


def is_foreign_annotation(name: str) -> bool:
    """Whether an annotation asks for a GPU in KAI's or NVIDIA's words."""
    if name.startswith(_NVIDIA_PREFIX):
        return not name.endswith(_NVIDIA_WRITTEN_BY_BINDER)
    return name in (KAI_FRACTION, KAI_MEMORY, KAI_FRACTION_LIMIT, KAI_MEMORY_LIMIT) or _KAI_PORTION_LIMIT.fullmatch(name) is not None


def remove_zeros(draft: Draft, options: Options) -> None:
    """Remove the GPU resources of containers that ask for no GPU, as templates write them: ``nvidia.com/gpu: 0``.

    In our vocabulary a container asks for no GPU if all amounts are 0. In others, which a pod can opt out of, a number of 0 is enough.
    """
    for container in draft.containers:
        _remove_our_zeros(container)
        if not opted_out(draft):
            per_gpu.remove_zeros(container, options)


def _remove_our_zeros(container: DraftContainer) -> None:
    ours = _our_names(container)
    if not any(map(container.wants, ours)):
        for resource in ours:
            container.take(resource)


def warn_of_unknown_resources(draft: Draft) -> None:
    """Warn of resources that resemble ours, but that no node offers."""
    known = (*NATIVE, VGPU_MANAGER.count)
    for container in draft.containers:
        unknown = [
            name for name in {**container.limits, **container.requests} if name.startswith(contract.RESOURCE_VGPU) and name not in known
        ]
        if unknown:
            draft.warnings.append(
                f"container {container.name}: no node offers {', '.join(sorted(unknown))}, so the pod will stay pending: "
                f"use {', '.join(NATIVE)}"
            )


def warn_of_unknown_annotations(draft: Draft) -> None:
    """Warn of annotations with our prefix that are unknown, and of KAI's annotations that belong to a request the pod has not."""
    unknown = [name for name in draft.annotations if name.startswith(contract.ANNOTATION_PREFIX) and name not in _KNOWN]
    if unknown:
        draft.warnings.append(f"annotation {', '.join(sorted(unknown))} has no effect: known annotations are {', '.join(_KNOWN)}")
    idle = [name for name in (_KAI_CONTAINER, _KAI_DEVICES) if name in draft.annotations]
    if idle and not {KAI_FRACTION, KAI_MEMORY} & draft.annotations.keys():
        draft.warnings.append(f"annotation {', '.join(idle)} has no effect: the pod has neither {KAI_FRACTION} nor {KAI_MEMORY}")


def warn_of_priorities(draft: Draft, options: Options) -> None:
    """Warn if a pod for NVIDIA's device plugin has a priority of HAMi: no node offers that resource, so the pod fits nowhere."""
    if opted_out(draft):
        return
    priority, memory = options.hami.priority, options.hami.memory
    for container in draft.containers:
        if container.wants(NVIDIA_GPU) and priority and container.wants(priority):
            draft.warnings.append(
                f"container {container.name}: {NVIDIA_GPU} alone goes to NVIDIA's device plugin, and no node offers {priority}, so "
                f"the pod will stay pending: remove {priority}, or set {memory}"
            )


def translate_amounts(draft: Draft, options: Options) -> None:
    """Translate the amounts of other vocabularies. Raises RequestError, ContractError."""
    for container in draft.containers:
        if (system := asked_system(draft, container, options)) is not None:
            per_gpu.translate(draft, container, system, options)
    if not opted_out(draft):
        _set_burst(draft, _translate_kai(draft, options), _translate_nvidia(draft))


# --- KAI ------------------------------------------------------------------------------------------------------------


def _translate_kai(draft: Draft, options: Options) -> dict[str, str]:
    """Set the container's memory. Return its memory burst, as text, by container name; empty without a limit.

    Source: kai-scheduler/KAI-Scheduler pkg/admission/webhook/v1alpha2/nvfractions, and its rules for a valid pod.
    """
    unknown = [name for name in draft.annotations if name.startswith((KAI_FRACTION, KAI_MEMORY)) and name not in _KAI_KNOWN]
    if unknown:
        draft.warnings.append(f"annotation {', '.join(sorted(unknown))} has no effect: known annotations are {', '.join(_KAI_KNOWN)}")
    limits = _kai_fraction_limits(draft)
    _check_kai(draft, limits)
    if KAI_FRACTION in draft.annotations:
        return _translate_kai_fraction(draft, limits, options)
    return _translate_kai_memory(draft) if KAI_MEMORY in draft.annotations else {}


def _check_kai(draft: Draft, limits: Mapping[str, str]) -> None:
    """Refuse a limit without a request, and two requests. Raises RequestError."""
    for limited, base in ((bool(limits), KAI_FRACTION), (KAI_MEMORY_LIMIT in draft.annotations, KAI_MEMORY)):
        if limited and base not in draft.annotations:
            raise RequestError(f"an annotation sets a limit for {base}, but the pod has no {base}: add {base}, or remove the limit")
    if KAI_FRACTION in draft.annotations and KAI_MEMORY in draft.annotations:
        raise RequestError(f"the pod has both annotations {KAI_FRACTION} and {KAI_MEMORY}: keep one")


def _translate_kai_memory(draft: Draft) -> dict[str, str]:
    container, limit = _kai_container(draft), draft.annotations.get(KAI_MEMORY_LIMIT)
    vgpus = count(draft.annotations.get(_KAI_DEVICES, "1"), _KAI_DEVICES)
    each = mib(draft.annotations[KAI_MEMORY], KAI_MEMORY)
    _ask(container, vgpus, [Memory(contract.RESOURCE_VGPU_MEMORY, each)], KAI_MEMORY)
    return {} if limit is None else {container.name: _ratio(_kai_limit_mib(limit), each, KAI_MEMORY_LIMIT)}


def _translate_kai_fraction(draft: Draft, limits: Mapping[str, str], options: Options) -> dict[str, str]:
    container, fraction = _kai_container(draft), draft.annotations[KAI_FRACTION]
    vgpus = count(draft.annotations.get(_KAI_DEVICES, "1"), _KAI_DEVICES)
    part = _fraction(fraction, KAI_FRACTION)
    forms = [part_of_memory(draft, part, f"{KAI_FRACTION}: {fraction}", options), *equal_parts(draft, part, options)]
    if (kept := _stated_memory(container, vgpus)) is not None and kept not in forms:
        draft.warnings.append(
            f"container {container.name} keeps {kept.resource}: {vgpus * kept.amount}, although that is {KAI_FRACTION}: {fraction} "
            "of no known GPU: the template may be older than the GPUs"
        )
        forms.append(kept)
    _ask(container, vgpus, forms, KAI_FRACTION)
    if others := limits.keys() - {"", container.name}:
        raise RequestError(
            f"the annotations limit the GPU memory of container {min(others)}, but {KAI_FRACTION} applies to {container.name}: "
            "name one container"
        )
    limit = next(iter(limits.values()), None)
    return {} if limit is None else {container.name: _ratio(_fraction(limit, KAI_FRACTION_LIMIT), part, KAI_FRACTION_LIMIT)}


def _stated_memory(container: DraftContainer, vgpus: int) -> Memory | None:
    """Return the MiB of each vGPU that a container has next to its fraction; None without them.

    A template keeps the MiB of the GPUs that were known when it was rewritten. Its pods come later, when those may be gone.
    """
    if not container.asks(contract.RESOURCE_VGPU, vgpus) or not container.wants(contract.RESOURCE_VGPU_MEMORY):
        return None
    each, rest = divmod(units.parse_quantity(container.limits.get(contract.RESOURCE_VGPU_MEMORY, "0")), vgpus)
    return Memory(contract.RESOURCE_VGPU_MEMORY, each) if each and not rest else None


def _kai_fraction_limits(draft: Draft) -> dict[str, str]:
    """Return the limits that are parts of a GPU, by the container that they name, or by ''. Raises RequestError if they differ."""
    limits = {match[1]: text for name, text in draft.annotations.items() if (match := _KAI_PORTION_LIMIT.fullmatch(name))}
    if KAI_FRACTION_LIMIT in draft.annotations:
        limits[""] = draft.annotations[KAI_FRACTION_LIMIT]
    if len(set(limits.values())) > 1:
        raise RequestError(
            f"annotation {KAI_FRACTION_LIMIT} and those of containers differ, {' and '.join(sorted(limits.values()))}: keep one"
        )
    return limits


def _kai_limit_mib(text: str) -> int:
    """Read a limit of memory. Unlike the request it must have a unit. Raises RequestError."""
    if text.isdecimal():
        raise RequestError(f"annotation {KAI_MEMORY_LIMIT}: expected an amount with a unit such as 8Gi, found {quote(text)}")
    return mib_up(text, f"annotation {KAI_MEMORY_LIMIT}")


def _kai_container(draft: Draft) -> DraftContainer:
    """Return the container to which the annotations apply: the named one, the one that has GPU memory already, or the first.

    The one with GPU memory comes before the first, because another webhook can put sidecars in front of it.
    """
    apps = draft.app_containers()
    name = draft.annotations.get(_KAI_CONTAINER)
    if name is not None:
        found = next((container for container in draft.containers if container.name == name), None)
    else:
        found = next((container for container in apps if _has_memory(container)), next(iter(apps), None))
    if found is None:
        raise RequestError(f"annotation {_KAI_CONTAINER}: the pod has no container {quote(name or '')}")
    return found


def _fraction(text: str, annotation: str) -> Fraction:
    try:
        value = units.parse_quantity(text)
    except QuantityError:
        value = Fraction(0)
    if not 0 < value < 1:
        raise RequestError(f"annotation {annotation}: expected a number between 0 and 1 such as 0.5, found {quote(text)}")
    return value


# --- NVIDIA -----------------------------------------------------------------------------------------------------------


def _translate_nvidia(draft: Draft) -> dict[str, str]:
    """Set the containers' memory. Return the memory burst of each, as text, by container name."""
    bursts: dict[str, str] = {}
    containers = {container.name: container for container in reversed(draft.containers)}
    for container_name, amounts in _nvidia_amounts(draft).items():
        if (container := containers.get(container_name)) is None:
            raise RequestError(f"annotation nvidia.com/container.{container_name}…: the pod has no container {quote(container_name)}")
        if (ratio := _translate_nvidia_container(draft, container, amounts)) is not None:
            bursts[container_name] = ratio
    return bursts


def _nvidia_amounts(draft: Draft) -> dict[str, dict[str, str]]:
    """Read the annotations: by container, and by what follows its name. Raises RequestError for an unknown one."""
    asked: dict[str, dict[str, str]] = {}
    for name, text in draft.annotations.items():
        if (match := _NVIDIA_KEY.fullmatch(name)) is not None:
            asked.setdefault(match[1], {})[match[2]] = text
        elif name.startswith(_NVIDIA_PREFIX) and not name.endswith(_NVIDIA_WRITTEN_BY_BINDER):
            raise RequestError(
                f"annotation {quote(name)} is unknown: expected {_NVIDIA_PREFIX}<container>.gpu-memory.request, .gpu-memory.limit or "
                ".gpu-compute.mode"
            )
    return asked


def _set_burst(draft: Draft, kai: Mapping[str, str], nvidia: Mapping[str, str]) -> None:
    """Set the pod's memory burst to that of its containers. Raises RequestError if theirs differ.

    KAI's own webhook writes both vocabularies, so a request can be in both and its limit in one of them only.
    """
    if any(nvidia.get(name, NO_BURST) not in (ratio, NO_BURST) for name, ratio in kai.items()):
        raise RequestError("KAI's and NVIDIA's annotations set different GPU memory limits for one container: keep one")
    bursts = {**nvidia, **kai}
    ratios = set(bursts.values())
    # The burst holds for the whole pod, so a container with GPU memory and without a limit counts as one that may not burst.
    if ratios - {NO_BURST} and contract.ANNOTATION_MEMORY_BURST not in draft.annotations:
        ratios.update(NO_BURST for other in draft.containers if other.name not in bursts and _has_memory(other))
    if len(ratios) > 1:
        raise RequestError(
            f"the containers' gpu-memory.limit are {' and '.join(sorted(ratios))} times their requests, "
            f"but a pod has one ratio ({contract.ANNOTATION_MEMORY_BURST}): make them equal"
        )
    for ratio in ratios - {NO_BURST}:
        draft.set_annotation(contract.ANNOTATION_MEMORY_BURST, ratio, "the GPU memory limit")


def _translate_nvidia_container(draft: Draft, container: DraftContainer, amounts: dict[str, str]) -> str | None:
    """Set one container's memory. Return its memory burst, as text, or None if it states no memory."""
    mode = amounts.get("gpu-compute.mode")
    if mode is not None and mode not in _NVIDIA_MODES:
        raise RequestError(f"gpu-compute.mode of container {container.name}: expected {' or '.join(_NVIDIA_MODES)}, found {quote(mode)}")
    if mode is not None and (isolation := _NVIDIA_MODES[mode]) is not None:
        draft.set_annotation(contract.ANNOTATION_ISOLATION, isolation, f"gpu-compute.mode: {mode}")
    limit, request = amounts.get("gpu-memory.limit"), amounts.get("gpu-memory.request", amounts.get("gpu-memory.limit"))
    if request is None:
        return None
    where = f"container {container.name}: gpu-memory"
    asked, ceiling = mib_up(request, f"{where}.request"), mib_up(limit or request, f"{where}.limit")
    ratio = _ratio(ceiling, asked, f"{where}.limit {quote(limit or '')}")
    if limit is None:
        draft.warnings.append(f"container {container.name} has no gpu-memory.limit: its gpu-memory.request is its limit")
    _ask(container, 1, [Memory(contract.RESOURCE_VGPU_MEMORY, asked)], "gpu-memory.request")
    return ratio


def _ratio(limit: Fraction | int, asked: Fraction | int, source: str) -> str:
    """Return a memory burst as text, such as ``1.5``. Raises RequestError for a limit below the request."""
    if limit < asked:
        raise RequestError(f"{source} is below the request: raise it, or remove it")
    return f"{float(Fraction(limit) / asked):.6f}".rstrip("0").rstrip(".")


# --- amounts ----------------------------------------------------------------------------------------------------------


def _has_memory(container: DraftContainer) -> bool:
    return container.has(contract.RESOURCE_VGPU_MEMORY) or container.has(contract.RESOURCE_VGPU_MEMORY_PERCENT)


def _ask(container: DraftContainer, vgpus: int, forms: Sequence[Memory], source: str) -> None:
    """Set the amounts of an annotation. The annotation stays: the pod is reviewed again if another webhook changed it after ours.

    Args: forms: the memory of one vGPU, and other forms of it that an earlier review may have set.
    """
    wanted = [{contract.RESOURCE_VGPU: vgpus, memory.resource: vgpus * memory.amount} for memory in forms]
    asked = {resource for resource in (*NATIVE, NVIDIA_GPU, NVIDIA_SHARED) if container.wants(resource)}
    if not asked:
        for resource, amount in wanted[0].items():
            container.ask(resource, amount)
    elif not any(asked == form.keys() and all(container.asks(*item) for item in form.items()) for form in wanted):
        raise RequestError(
            f"container {container.name} asks for GPUs both by annotation {source} and by a resource: keep one. {FROM_LIMIT_RANGE}"
        )
