"""What users of HAMi, KAI and NVIDIA's own sharing write, in our words. The forms are.

HAMi       resources nvidia.com/gpu with gpumem, gpumem-percentage, gpucores (per GPU; ours are totals), priority; nvidia.com/ and hami.io/
           annotations
KAI        annotations gpu-fraction, gpu-memory, both also with .limit, gpu-fraction-num-devices, gpu-fraction-container-name;
           kai.scheduler/container.<name>.gpu-memory.portion.limit, as which its own webhook writes gpu-fraction.limit
NVIDIA     annotations nvidia.com/container.<name>.gpu-memory.request and .limit, .gpu-compute.mode; nvidia.com/gpu where it is adopted.
           Replicas (nvidia.com/gpu.shared) are parts of no stated size and stay with the device plugin that offers them

A part of a GPU's memory (percentages, fractions) becomes MiB here, from the inventory: all GPUs that the pod can land on must then be of
one size, or nearly. What has no equal is refused with what to write instead; what has no effect is warned about. What each of their
example manifests becomes is in tests/unit/scheduler_plugin/webhook/golden/.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from placement.request import RequestError, pod_preferences
from proto import contract, units
from proto.errors import ContractError, QuantityError, quote
from proto.model import NumaMode, Policy, Preferences, Priority
from scheduler_plugin.core.pods import asks_gpu
from scheduler_plugin.webhook.draft import Draft, DraftContainer

NVIDIA_GPU: Final = "nvidia.com/gpu"
NVIDIA_SHARED: Final = "nvidia.com/gpu.shared"
HAMI_MEMORY: Final = "nvidia.com/gpumem"
HAMI_MEMORY_PERCENT: Final = "nvidia.com/gpumem-percentage"
HAMI_CORES: Final = "nvidia.com/gpucores"
HAMI_PRIORITY: Final = "nvidia.com/priority"
HAMI_RESOURCES: Final = (HAMI_MEMORY, HAMI_MEMORY_PERCENT, HAMI_CORES)
"""What asks for a GPU in HAMi besides nvidia.com/gpu; a priority alone does not."""
HAMI_OPT_OUT: Final = ("hami.io/webhook", "ignore")
NATIVE: Final = (contract.RESOURCE_VGPU, contract.RESOURCE_VGPU_MEMORY, contract.RESOURCE_VGPU_CORES)
_KNOWN: Final = tuple(
    sorted(str(value) for name, value in vars(contract).items() if name.startswith("ANNOTATION_") and name != "ANNOTATION_PREFIX")
)

_HAMI_LISTS: Final = {
    "nvidia.com/use-gputype": contract.ANNOTATION_GPU_TYPE,
    "nvidia.com/nouse-gputype": contract.ANNOTATION_GPU_TYPE_NOT,
    "nvidia.com/use-gpuuuid": contract.ANNOTATION_GPU_UUID,
    "nvidia.com/nouse-gpuuuid": contract.ANNOTATION_GPU_UUID_NOT,
}
_HAMI_NUMA: Final = "nvidia.com/numa-bind"
_HAMI_TRUE: Final = ("1", "t", "T", "TRUE", "true", "True")
"""What HAMi reads as yes. Source: Go's strconv.ParseBool."""
_HAMI_MODE: Final = "nvidia.com/vgpu-mode"
_HAMI_GPU_POLICY: Final = "hami.io/gpu-scheduler-policy"
_HAMI_NODE_POLICY: Final = "hami.io/node-scheduler-policy"
_HAMI_WEIGHTS: Final = "hami.io/device-scoring-weights"
_HAMI_POLICIES: Final = {"binpack": Policy.BINPACK, "spread": Policy.SPREAD, "topology-aware": Policy.TOPOLOGY}
_HAMI_MODES: Final = {"hami-core": "shim", "mps": "mps"}
_HAMI_IDLE_ENV: Final = ("CUDA_DISABLE_CONTROL", "GPU_CORE_UTILIZATION_POLICY", "CUDA_OVERSUBSCRIBE")

KAI_FRACTION: Final = "gpu-fraction"
KAI_MEMORY: Final = "gpu-memory"
KAI_FRACTION_LIMIT: Final = "gpu-fraction.limit"
KAI_MEMORY_LIMIT: Final = "gpu-memory.limit"
_KAI_DEVICES: Final = "gpu-fraction-num-devices"
_KAI_CONTAINER: Final = "gpu-fraction-container-name"
_KAI_KNOWN: Final = (KAI_FRACTION, KAI_MEMORY, KAI_FRACTION_LIMIT, KAI_MEMORY_LIMIT, _KAI_DEVICES, _KAI_CONTAINER)
_KAI_PORTION_LIMIT: Final = re.compile(r"kai\.scheduler/container\.([a-z0-9-]{1,63})\.gpu-memory\.portion\.limit")
_KAI_IDLE_LABELS: Final = ("kai.scheduler/queue", "kai.scheduler/node-pool", "priorityClassName")

_NVIDIA_PREFIX: Final = "nvidia.com/container."
_NVIDIA_WRITTEN_BY_BINDER: Final = (".gpus.devices", ".gpu-compute.portion")
"""What KAI's binder notes on a pod, and a copy of it brings along. Source: kai-scheduler/KAI-Scheduler pkg/binder/plugins/nvfractions."""
_NVIDIA_KEY: Final = re.compile(r"nvidia\.com/container\.([a-z0-9-]{1,63})\.(gpu-memory\.request|gpu-memory\.limit|gpu-compute\.mode)")
NO_BURST: Final = "1"
"""The ratio of a gpu-memory.limit that is no more than its request."""
_NVIDIA_MODES: Final = {"time-slicing": None, "sm-sharing": "mps"}

FROM_LIMIT_RANGE: Final = "A resource that the pod does not name itself is added by a LimitRange of its namespace: take it out there"

ONE_SIZE_PERCENT: Final = 3
"""GPUs whose memory differs by no more are of one size where a part of it is asked for: how much can be promised of GPUs of one model
differs between drivers by less than a percent, as during an upgrade, and of those sold with the same amount by little more."""

DeviceSizes = Callable[[Preferences], Collection[int]]
"""The memory sizes, in MiB, of the GPUs that a pod with these preferences can land on."""


@dataclass(frozen=True, slots=True)
class Options:
    """What translation depends on besides the pod."""

    device_sizes: DeviceSizes
    adopt_nvidia_gpu: bool = False
    """Whether plain nvidia.com/gpu is ours too: only where no other device plugin serves it."""
    count_whole_gpus: bool = False
    """Whether whole GPUs get their memory written, for quotas: only where all GPUs that a pod may ever meet have one size."""


def _opted_out(draft: Draft) -> bool:
    return draft.labels.get(HAMI_OPT_OUT[0]) == HAMI_OPT_OUT[1]


def check_vocabulary(draft: Draft) -> None:
    """Refuse a container that asks in our words and in others: no node has all of that.

    A LimitRange brings it about unasked: its defaults are put in again after we took nvidia.com/gpu away, as the API server runs all of
    admission once more when a webhook asks for it. Source: k8s.io/apiserver/pkg/admission/reinvocation.go.

    Raises: RequestError.
    """
    for container in draft.containers:
        ours = sorted(name for name in {**container.limits, **container.requests} if asks_gpu([name]))
        theirs = [name for name in (NVIDIA_GPU, NVIDIA_SHARED, *HAMI_RESOURCES) if container.wants(name)]
        if ours and theirs:
            raise RequestError(
                f"container {container.name} asks in two vocabularies at once, {ours[0]} and {theirs[0]}: keep {contract.RESOURCE_VGPU} "
                f"and its kin (totals), or {NVIDIA_GPU} and its kin (per GPU). {FROM_LIMIT_RANGE}, and limit "
                f"requests.{contract.RESOURCE_VGPU} in a ResourceQuota"
            )


def is_foreign(draft: Draft, options: Options) -> bool:
    """Whether the pod asks for a GPU in words that are not ours, and leaves them to us."""
    if _opted_out(draft):
        return False
    return any(map(_is_foreign_annotation, draft.annotations)) or any(_asks_hami(container, options) for container in draft.containers)


def _is_foreign_annotation(name: str) -> bool:
    if name.startswith(_NVIDIA_PREFIX):
        return not name.endswith(_NVIDIA_WRITTEN_BY_BINDER)
    return name in (KAI_FRACTION, KAI_MEMORY, KAI_FRACTION_LIMIT, KAI_MEMORY_LIMIT) or _KAI_PORTION_LIMIT.fullmatch(name) is not None


def remove_zeros(draft: Draft, options: Options) -> None:
    """Remove the amounts of containers that ask for no GPU in our words or HAMi's, as templates write them: ``nvidia.com/gpu: 0``.

    Ours are none when all of them are zero; HAMi's, which a pod can opt out of, also when only nvidia.com/gpu is.
    """
    for container in draft.containers:
        ours = [name for name in {**container.limits, **container.requests} if asks_gpu([name])]
        if not any(map(container.wants, ours)):
            for resource in ours:
                container.take(resource)
    if _opted_out(draft):
        return
    for container in draft.containers:
        if _speaks_hami(container, options) and not _asks_hami(container, options):
            for resource in (NVIDIA_GPU, NVIDIA_SHARED, *HAMI_RESOURCES):
                container.take(resource)


def warn_of_unknown_resources(draft: Draft) -> None:
    """Say which resources are nearly ours, and offered by no node."""
    for container in draft.containers:
        unknown = [
            name for name in {**container.limits, **container.requests} if name.startswith(contract.RESOURCE_VGPU) and name not in NATIVE
        ]
        if unknown:
            draft.warnings.append(
                f"container {container.name}: no node offers {', '.join(sorted(unknown))}, so the pod will wait: "
                f"known are {', '.join(NATIVE)}"
            )


def warn_of_unknown_annotations(draft: Draft) -> None:
    """Say which of a GPU pod's annotations with our prefix mean nothing."""
    unknown = [name for name in draft.annotations if name.startswith(contract.ANNOTATION_PREFIX) and name not in _KNOWN]
    if unknown:
        draft.warnings.append(f"annotation {', '.join(sorted(unknown))} has no effect: known are {', '.join(_KNOWN)}")


def warn_of_priorities(draft: Draft) -> None:
    """Say of a pod that is left to NVIDIA's device plugin that the priority that HAMi let it have keeps it from every node."""
    if _opted_out(draft):
        return
    for container in draft.containers:
        if container.wants(NVIDIA_GPU) and container.wants(HAMI_PRIORITY):
            draft.warnings.append(
                f"container {container.name}: {NVIDIA_GPU} alone is left to NVIDIA's device plugin, and no node offers {HAMI_PRIORITY}, so "
                f"the pod will wait: remove it, or say with {HAMI_MEMORY} how much memory"
            )


def translate_wishes(draft: Draft) -> None:
    """Rewrite what HAMi's annotations and priorities say of any GPU pod: they often stay when its resources are rewritten by hand.

    Raises: RequestError, ContractError.
    """
    _translate_hami_annotations(draft)
    for container in draft.containers:
        if (priority := _amount(container, HAMI_PRIORITY, _whole)) is not None:
            draft.set_annotation(contract.ANNOTATION_PRIORITY, Priority.LOW if priority else Priority.HIGH, HAMI_PRIORITY)


def translate_amounts(draft: Draft, options: Options) -> None:
    """Rewrite what other vocabularies ask for. Raises RequestError, ContractError."""
    for container in draft.containers:
        if _asks_hami(container, options):
            _translate_hami(draft, container, options)
    _set_burst(draft, _translate_kai(draft, options), _translate_nvidia(draft))
    if idle := [label for label in _KAI_IDLE_LABELS if label in draft.labels]:
        draft.warnings.append(
            f"label {', '.join(idle)} has no effect: queues and quotas are Kueue's or ResourceQuota's, and the priority is "
            "spec.priorityClassName's"
        )


# --- HAMi -----------------------------------------------------------------------------------------------------------


def _asks_hami(container: DraftContainer, options: Options) -> bool:
    """Whether a container asks for a GPU so. No GPUs are none, however much memory each of them should have."""
    if not _speaks_hami(container, options):
        return False
    return any(map(container.wants, (NVIDIA_SHARED, *((NVIDIA_GPU,) if container.has(NVIDIA_GPU) else HAMI_RESOURCES))))


def _speaks_hami(container: DraftContainer, options: Options) -> bool:
    adopted = (NVIDIA_GPU, NVIDIA_SHARED) if options.adopt_nvidia_gpu else ()
    return any(map(container.has, (*HAMI_RESOURCES, *adopted)))


def _asks_mig(container: DraftContainer) -> bool:
    return any(name.startswith(contract.RESOURCE_MIG_PREFIX) for name in container.limits)


def _translate_hami_annotations(draft: Draft) -> None:
    for theirs, ours in _HAMI_LISTS.items():
        if (text := draft.annotations.get(theirs)) is not None:
            draft.set_annotation(ours, text, theirs)
    if draft.annotations.get(_HAMI_NUMA) in _HAMI_TRUE:
        draft.set_annotation(contract.ANNOTATION_NUMA, NumaMode.STRICT, _HAMI_NUMA)
    text = draft.annotations.get(_HAMI_MODE)
    if text is not None and not (text == "mig" and any(map(_asks_mig, draft.containers))):
        if text not in _HAMI_MODES:
            raise RequestError(
                f"annotation {_HAMI_MODE}: {quote(text)} has no equal here: ask for an instance by its resource, such as "
                f"{contract.RESOURCE_MIG_PREFIX}1g.10gb: 1, or write hami-core"
            )
        draft.set_annotation(contract.ANNOTATION_ISOLATION, _HAMI_MODES[text], _HAMI_MODE)
    _translate_hami_policy(draft)
    if _HAMI_WEIGHTS in draft.annotations:
        draft.warnings.append(f"annotation {_HAMI_WEIGHTS} has no effect: weights are set for the whole cluster")
    for container in draft.containers:
        idle = sorted(str(entry["name"]) for entry in container.env if entry.get("name") in _HAMI_IDLE_ENV)
        if idle:
            draft.warnings.append(f"container {container.name}: {', '.join(idle)} has no effect: limits do not come from the environment")


def _translate_hami_policy(draft: Draft) -> None:
    source = _HAMI_GPU_POLICY if _HAMI_GPU_POLICY in draft.annotations else _HAMI_NODE_POLICY
    if draft.annotations.get(_HAMI_NODE_POLICY, draft.annotations.get(source)) != draft.annotations.get(source):
        draft.warnings.append(f"annotation {_HAMI_NODE_POLICY} has no effect beside {source}: one placement holds for nodes and their GPUs")
    for word in filter(None, (part.strip() for part in draft.annotations.get(source, "").split(","))):
        if word in _HAMI_POLICIES:
            draft.set_annotation(contract.ANNOTATION_PLACEMENT, _HAMI_POLICIES[word], source)
        elif word == "numa":
            draft.set_annotation(contract.ANNOTATION_NUMA, NumaMode.PREFER, source)
        else:
            raise RequestError(
                f"annotation {source}: {quote(word)} has no equal here: write {', '.join(_HAMI_POLICIES)} or numa, "
                f"or {contract.ANNOTATION_ISOLATION}: exclusive for a GPU alone"
            )


def _translate_hami(draft: Draft, container: DraftContainer, options: Options) -> None:
    if container.has(NVIDIA_SHARED):
        raise RequestError(
            f"container {container.name} asks for {NVIDIA_SHARED}, a part of no stated size: say how much with "
            f"{contract.RESOURCE_VGPU_MEMORY} and {contract.RESOURCE_VGPU_CORES}"
        )
    count = _amount(container, NVIDIA_GPU, _whole)
    memory_bytes = _amount(container, HAMI_MEMORY, _memory_or_zero)
    percent = _amount(container, HAMI_MEMORY_PERCENT, _whole)
    cores = _amount(container, HAMI_CORES, _whole)
    vgpus = count or 1
    if memory_bytes and percent:
        raise RequestError(f"container {container.name} sets both {HAMI_MEMORY} and {HAMI_MEMORY_PERCENT}: keep one")
    if percent and not 1 <= percent <= units.WHOLE_GPU_PERCENT:
        raise RequestError(f"container {container.name}, {HAMI_MEMORY_PERCENT}: expected 1 to 100, found {percent}")
    if percent and percent < units.WHOLE_GPU_PERCENT:
        memory_bytes = units.mib_to_bytes(_part_mib(draft, Fraction(percent, 100), f"{HAMI_MEMORY_PERCENT}: {percent}", options))
    container.ask(contract.RESOURCE_VGPU, vgpus)
    if memory_bytes:
        container.ask(contract.RESOURCE_VGPU_MEMORY, vgpus * units.bytes_to_mib(memory_bytes))
    if cores:
        container.ask(contract.RESOURCE_VGPU_CORES, vgpus * cores)


# --- KAI ------------------------------------------------------------------------------------------------------------


def _translate_kai(draft: Draft, options: Options) -> dict[str, str]:
    """Ask for the container's memory; return how far it may burst, by its name, as text, where its limit says so.

    Source: kai-scheduler/KAI-Scheduler pkg/admission/webhook/v1alpha2/nvfractions, and its rules for a valid pod.
    """
    unknown = [name for name in draft.annotations if name.startswith((KAI_FRACTION, KAI_MEMORY)) and name not in _KAI_KNOWN]
    if unknown:
        draft.warnings.append(f"annotation {', '.join(sorted(unknown))} has no effect: known are {', '.join(_KAI_KNOWN)}")
    limits = _kai_fraction_limits(draft)
    fraction, memory = draft.annotations.get(KAI_FRACTION), draft.annotations.get(KAI_MEMORY)
    memory_limit = draft.annotations.get(KAI_MEMORY_LIMIT)
    for limited, base in ((bool(limits), KAI_FRACTION), (memory_limit is not None, KAI_MEMORY)):
        if limited and base not in draft.annotations:
            raise RequestError(f"the annotations limit what a pod with {base} may use, and it has none: add {base}, or remove the limit")
    if fraction is not None and memory is not None:
        raise RequestError(f"the pod has both annotations {KAI_FRACTION} and {KAI_MEMORY}: keep one")
    if fraction is None and memory is None:
        return {}
    container = _kai_container(draft)
    vgpus = _count(draft.annotations.get(_KAI_DEVICES, "1"), _KAI_DEVICES)
    if fraction is None:
        mib = _mib(memory or "", KAI_MEMORY)
        _ask(container, vgpus, vgpus * mib, KAI_MEMORY)
        return {} if memory_limit is None else {container.name: _ratio(_kai_limit_mib(memory_limit), mib, KAI_MEMORY_LIMIT)}
    part = _fraction(fraction, KAI_FRACTION)
    _ask(container, vgpus, vgpus * _part_mib(draft, part, f"{KAI_FRACTION}: {fraction}", options), KAI_FRACTION)
    if others := limits.keys() - {"", container.name}:
        raise RequestError(f"the annotations limit the GPU memory of container {min(others)}, but {KAI_FRACTION} is {container.name}'s")
    limit = next(iter(limits.values()), None)
    return {} if limit is None else {container.name: _ratio(_fraction(limit, KAI_FRACTION_LIMIT), part, KAI_FRACTION_LIMIT)}


def _kai_fraction_limits(draft: Draft) -> dict[str, str]:
    """Return the limits that are parts of a GPU, by the container that they name, or by ''. Raises RequestError when they differ."""
    limits = {match[1]: text for name, text in draft.annotations.items() if (match := _KAI_PORTION_LIMIT.fullmatch(name))}
    if KAI_FRACTION_LIMIT in draft.annotations:
        limits[""] = draft.annotations[KAI_FRACTION_LIMIT]
    if len(set(limits.values())) > 1:
        raise RequestError(f"annotation {KAI_FRACTION_LIMIT} and those of containers say {' and '.join(sorted(limits.values()))}: keep one")
    return limits


def _kai_limit_mib(text: str) -> int:
    """Read a limit of memory, which has a unit, as the request has none. Raises RequestError."""
    if text.isdecimal():
        raise RequestError(f"annotation {KAI_MEMORY_LIMIT}: expected an amount with a unit such as 8Gi, found {quote(text)}")
    return _mib_up(text, f"annotation {KAI_MEMORY_LIMIT}")


def _kai_container(draft: Draft) -> DraftContainer:
    """Return the container that is meant: the named one, the one that asks already (sidecars can be put before it), or the first."""
    apps = draft.app_containers()
    name = draft.annotations.get(_KAI_CONTAINER)
    if name is not None:
        found = next((container for container in draft.containers if container.name == name), None)
    else:
        found = next((container for container in apps if container.has(contract.RESOURCE_VGPU_MEMORY)), next(iter(apps), None))
    if found is None:
        raise RequestError(f"annotation {_KAI_CONTAINER}: there is no container {quote(name or '')} in the pod")
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
    """Ask for the containers' memory; return how far each may burst, by its name, as text."""
    asked: dict[str, dict[str, str]] = {}
    for name, text in draft.annotations.items():
        if (match := _NVIDIA_KEY.fullmatch(name)) is not None:
            asked.setdefault(match[1], {})[match[2]] = text
        elif name.startswith(_NVIDIA_PREFIX) and not name.endswith(_NVIDIA_WRITTEN_BY_BINDER):
            raise RequestError(
                f"annotation {quote(name)} means nothing: expected {_NVIDIA_PREFIX}<container>.gpu-memory.request, .gpu-memory.limit or "
                ".gpu-compute.mode"
            )
    bursts: dict[str, str] = {}
    containers = {container.name: container for container in reversed(draft.containers)}
    for container_name, amounts in asked.items():
        if (container := containers.get(container_name)) is None:
            raise RequestError(
                f"annotation nvidia.com/container.{container_name}…: there is no container {quote(container_name)} in the pod"
            )
        if (ratio := _translate_nvidia_container(draft, container, amounts)) is not None:
            bursts[container_name] = ratio
    return bursts


def _set_burst(draft: Draft, kai: Mapping[str, str], nvidia: Mapping[str, str]) -> None:
    """Let the pod burst as far as each of its containers may. Raises RequestError when they may not as far as each other.

    KAI's own webhook writes both vocabularies, so that one request can be there with the limit in the other alone.
    """
    if any(nvidia.get(name, NO_BURST) not in (ratio, NO_BURST) for name, ratio in kai.items()):
        raise RequestError("KAI's annotations and NVIDIA's have two limits for the GPU memory of one container: keep one")
    bursts = {**nvidia, **kai}
    ratios = set(bursts.values())
    if ratios - {NO_BURST} and contract.ANNOTATION_MEMORY_BURST not in draft.annotations:
        ratios.update(NO_BURST for other in draft.containers if other.name not in bursts and other.has(contract.RESOURCE_VGPU_MEMORY))
    if len(ratios) > 1:
        raise RequestError(
            f"the containers' gpu-memory.limit are {' and '.join(sorted(ratios))} times their requests: "
            f"one ratio holds for a pod ({contract.ANNOTATION_MEMORY_BURST})"
        )
    for ratio in ratios - {NO_BURST}:
        draft.set_annotation(contract.ANNOTATION_MEMORY_BURST, ratio, "the limit of GPU memory")


def _translate_nvidia_container(draft: Draft, container: DraftContainer, amounts: dict[str, str]) -> str | None:
    """Ask for one container's memory; return how far it may burst, as text, or None when it asks for none."""
    mode = amounts.get("gpu-compute.mode")
    if mode is not None and mode not in _NVIDIA_MODES:
        raise RequestError(f"gpu-compute.mode of container {container.name}: expected {' or '.join(_NVIDIA_MODES)}, found {quote(mode)}")
    if mode is not None and (isolation := _NVIDIA_MODES[mode]) is not None:
        draft.set_annotation(contract.ANNOTATION_ISOLATION, isolation, f"gpu-compute.mode: {mode}")
    limit, request = amounts.get("gpu-memory.limit"), amounts.get("gpu-memory.request", amounts.get("gpu-memory.limit"))
    if request is None:
        return None
    where = f"container {container.name}: gpu-memory"
    asked, ceiling = _mib_up(request, f"{where}.request"), _mib_up(limit or request, f"{where}.limit")
    ratio = _ratio(ceiling, asked, f"{where}.limit {quote(limit or '')}")
    if limit is None:
        draft.warnings.append(f"container {container.name}: without gpu-memory.limit it is held to its gpu-memory.request")
    _ask(container, 1, asked, "gpu-memory.request")
    return ratio


def _ratio(limit: Fraction | int, asked: Fraction | int, source: str) -> str:
    """Say how far memory may burst, as text. Raises RequestError."""
    if limit < asked:
        raise RequestError(f"{source} is below the request: raise it, or remove it")
    return f"{float(Fraction(limit) / asked):.6f}".rstrip("0").rstrip(".")


def _mib_up(text: str, source: str) -> int:
    """Read bytes and round up to MiB: at least what was asked."""
    try:
        value = units.parse_quantity(text)
    except QuantityError as exc:
        raise RequestError(f"{source}: {exc}") from exc
    mib = -(-value // units.MIB)
    if mib < 1 or mib * units.MIB > units.MAX_MEMORY_BYTES:
        raise RequestError(f"{source}: expected bytes such as 4Gi, found {quote(text)}")
    return int(mib)


# --- amounts ----------------------------------------------------------------------------------------------------------


def _amount(container: DraftContainer, resource: str, read: Callable[[str], int]) -> int | None:
    text = container.take(resource)
    if text is None:
        return None
    try:
        return read(text)
    except ContractError as exc:
        raise RequestError(f"container {container.name}, {resource}: {exc}, or leave the line out") from exc


def _whole(text: str) -> int:
    value = units.parse_quantity(text)
    if value.denominator != 1 or value < 0:
        raise QuantityError(f"expected a whole number, found {quote(text)}")
    return value.numerator


def _memory_or_zero(text: str) -> int:
    """Read MiB, or a binary amount; 0 asks for nothing, as in HAMi."""
    return 0 if units.parse_quantity(text) == 0 else units.parse_memory_bytes(text)


def _count(text: str, annotation: str) -> int:
    try:
        return units.parse_count(text)
    except QuantityError as exc:
        raise RequestError(f"annotation {annotation}: {exc}") from exc


def _mib(text: str, annotation: str) -> int:
    """Read MiB, or a binary amount, which KAI itself does not take."""
    try:
        return units.bytes_to_mib(units.parse_memory_bytes(text))
    except QuantityError as exc:
        raise RequestError(f"annotation {annotation}: {exc}") from exc


def _ask(container: DraftContainer, vgpus: int, mib: int, source: str) -> None:
    """Ask for what an annotation means. It stays on the pod, which comes again when another webhook changed it after us."""
    wanted = {contract.RESOURCE_VGPU: vgpus, contract.RESOURCE_VGPU_MEMORY: mib}
    asked = {resource for resource in (*NATIVE, NVIDIA_GPU, NVIDIA_SHARED) if container.wants(resource)}
    if asked and not (asked == wanted.keys() and all(container.asks(resource, amount) for resource, amount in wanted.items())):
        raise RequestError(
            f"container {container.name} asks for GPUs by annotation {source} and by a resource too: keep one. {FROM_LIMIT_RANGE}"
        )
    for resource, amount in wanted.items():
        container.ask(resource, amount)


def _part_mib(draft: Draft, part: Fraction, source: str, options: Options) -> int:
    """Turn a part of a GPU's memory into MiB of the GPUs that the pod can land on: of the smallest, so that it fits on each."""
    sizes = sorted(set(options.device_sizes(pod_preferences(draft.pod().annotations))))
    if not sizes or units.WHOLE_GPU_PERCENT * sizes[0] < (units.WHOLE_GPU_PERCENT - ONE_SIZE_PERCENT) * sizes[-1]:
        found = f"GPUs of {', '.join(f'{size} MiB' for size in sizes)}" if sizes else "no GPU"
        raise RequestError(
            f"{source} is a part of a GPU's memory, and {found} match the pod: ask for MiB with {contract.RESOURCE_VGPU_MEMORY}, or "
            f"name one type with {contract.ANNOTATION_GPU_TYPE}"
        )
    return max(1, int(sizes[0] * part))
