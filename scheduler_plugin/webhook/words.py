# SPDX-License-Identifier: Apache-2.0
"""The one table of what pods of other systems can say: for each word, whether it is translated, left without effect, or refused.

Invariant: no word is dropped in silence. A word without effect gets an admission warning, and one that Aliquot cannot honour refuses the
pod with what to write instead. A word in the domain of one of these systems that is no row, such as one of a newer version, gets a warning
too. The translations themselves are in the modules beside this one; docs/use/migration.md has the table, and
tests/unit/scheduler_plugin/webhook/test_words.py walks it.

Words that a system writes for itself, such as the device that its scheduler chose, ask for nothing and are not here.
"""

import difflib
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Any, Final

from aliquot import contract
from aliquot.contract.errors import quote
from aliquot.contract.features import Gate
from aliquot.placement.request import RequestError
from scheduler_plugin.webhook.draft import Draft


class Kind(StrEnum):
    """Where a word stands in a pod."""

    RESOURCE = "resource"
    ANNOTATION = "annotation"
    LABEL = "label"
    SCHEDULER = "schedulerName"
    FIELD = "field"
    VARIABLE = "variable"
    """An environment variable of a container."""


class Fate(StrEnum):
    """What happens to a word."""

    TRANSLATED = "translated"
    LEFT = "no effect, with a warning"
    """Its owner may still read it; Aliquot does not."""
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Word:
    """One row. In ``name``, ``<…>`` stands for any text."""

    system: str
    kind: Kind
    name: str
    fate: Fate
    text: str
    """What it becomes, why it has no effect, or what to write instead."""
    harmless: tuple[str, ...] = ()
    """Values that ask for nothing."""


SETTINGS_FROM_RESOURCES: Final = "limits are set by resources, not by the environment"
_PRIORITY: Final = "use Kueue for queues, ResourceQuota for quotas and spec.priorityClassName for the priority"
_QUEUE: Final = "use Kueue for queues"
_POOL: Final = "use a nodeSelector with a label of the nodes"
_PREEMPTION: Final = "set spec.priorityClassName, with a preemptionPolicy, and a PodDisruptionBudget"
_PART: Final = "`nvidia.com/vgpu-memory` if the GPUs that match have one size, else `nvidia.com/vgpu-memory-percent`"
_DOMAIN: Final = "use Kueue's topology-aware scheduling, or a podAffinity with the topologyKey"
_CLUSTER: Final = "Aliquot has no such setting for one pod"
_GANG: Final = (
    f"`{contract.ANNOTATION_GANG}` and `{contract.ANNOTATION_GANG_MIN}`, if the pod states name and size; a name alone is refused"
)
_GANG_OR_READ: Final = f"{_GANG}, unless the gate `{Gate.GANGS_FROM_OWNERS}` lets its PodGroup be read"
_SUBGROUP: Final = (
    f"`{contract.ANNOTATION_GANG_ROLE}` and `{contract.ANNOTATION_GANG_ROLE_MIN}`, if the gate `{Gate.GANGS_FROM_OWNERS}` lets its "
    "PodGroup be read; else refused"
)
_NO_SUBGROUP: Final = f"give each of them a gang of its own with {contract.ANNOTATION_GANG} and {contract.ANNOTATION_GANG_MIN}"


def _of(system: str, kind: Kind, fate: Fate, text: str, *names: str, harmless: tuple[str, ...] = ()) -> tuple[Word, ...]:
    return tuple(Word(system, kind, name, fate, text, harmless) for name in names)


_T, _L, _R = Fate.TRANSLATED, Fate.LEFT, Fate.REFUSED
_HAMI = (
    *_of("HAMi", Kind.RESOURCE, _T, "`nvidia.com/vgpu`; alone it stays with NVIDIA's device plugin", "nvidia.com/gpu"),
    *_of("HAMi", Kind.RESOURCE, _T, "`nvidia.com/vgpu-memory`, the total", "nvidia.com/gpumem"),
    *_of("HAMi", Kind.RESOURCE, _T, _PART, "nvidia.com/gpumem-percentage"),
    *_of("HAMi", Kind.RESOURCE, _T, "`nvidia.com/vgpu-cores`, the total", "nvidia.com/gpucores"),
    *_of("HAMi", Kind.RESOURCE, _T, "`aliquot.dev/priority`", "nvidia.com/priority"),
    *_of("HAMi", Kind.ANNOTATION, _T, "`aliquot.dev/gpu-type`, by words: `*A10*` is a part", "nvidia.com/use-gputype"),
    *_of("HAMi", Kind.ANNOTATION, _T, "`aliquot.dev/gpu-type-not`", "nvidia.com/nouse-gputype"),
    *_of("HAMi", Kind.ANNOTATION, _T, "`aliquot.dev/gpu-uuid`", "nvidia.com/use-gpuuuid"),
    *_of("HAMi", Kind.ANNOTATION, _T, "`aliquot.dev/gpu-uuid-not`", "nvidia.com/nouse-gpuuuid"),
    *_of("HAMi", Kind.ANNOTATION, _T, "`aliquot.dev/numa`", "nvidia.com/numa-bind", "hami.io/numa-alignment"),
    *_of("HAMi", Kind.ANNOTATION, _T, "`aliquot.dev/isolation`; `mig`: the smallest profile with the MiB", "nvidia.com/vgpu-mode"),
    *_of(
        "HAMi", Kind.ANNOTATION, _T, "`aliquot.dev/placement`, `-numa`", "hami.io/gpu-scheduler-policy", "hami.io/node-scheduler-policy"
    ),
    *_of("HAMi", Kind.ANNOTATION, _L, "weights are set for the whole cluster", "hami.io/device-scoring-weights"),
    *_of("HAMi", Kind.LABEL, _T, "`ignore`: the pod is left alone", "hami.io/webhook"),
    *_of(
        "HAMi", Kind.VARIABLE, _L, SETTINGS_FROM_RESOURCES, "CUDA_DISABLE_CONTROL", "GPU_CORE_UTILIZATION_POLICY", "CUDA_OVERSUBSCRIBE",
        "CUDA_TASK_PRIORITY",
    ),
    *_of("HAMi", Kind.SCHEDULER, _T, "`aliquot-scheduler`", "hami-scheduler"),
)  # fmt: skip
_KAI = (
    *_of("KAI", Kind.ANNOTATION, _T, _PART, "gpu-fraction"),
    *_of("KAI", Kind.ANNOTATION, _T, "`nvidia.com/vgpu-memory`", "gpu-memory"),
    *_of("KAI", Kind.ANNOTATION, _T, "`nvidia.com/vgpu`", "gpu-fraction-num-devices"),
    *_of("KAI", Kind.ANNOTATION, _T, "the container that gets the share, also an init container", "gpu-fraction-container-name"),
    *_of(
        "KAI", Kind.ANNOTATION, _T, "`aliquot.dev/memory-burst`", "gpu-fraction.limit", "gpu-memory.limit",
        "kai.scheduler/container.<name>.gpu-memory.portion.limit",
    ),
    *_of("KAI", Kind.ANNOTATION, _T, _GANG_OR_READ, "pod-group-name", "kai.scheduler/batch-min-member"),
    *_of("KAI", Kind.LABEL, _L, _PRIORITY, "kai.scheduler/queue", "priorityClassName"),
    *_of("KAI", Kind.LABEL, _L, _POOL, "kai.scheduler/node-pool"),
    *_of("KAI", Kind.LABEL, _L, _PREEMPTION, "kai.scheduler/preemptibility", "kai.scheduler/background"),
    *_of("KAI", Kind.ANNOTATION, _T, "`aliquot.dev/movable`", "kai.scheduler/safe-to-consolidate"),
    *_of("KAI", Kind.ANNOTATION, _L, "Workloads of Kubernetes are not read", "kai.scheduler/ignore-workload-api"),
    *_of("KAI", Kind.ANNOTATION, _T, "`aliquot.dev/preemption-delay`", "kai.scheduler/preemption-delay"),
    *_of("KAI", Kind.ANNOTATION, _L, _CLUSTER, "kai.scheduler/staleness-grace-period"),
    *_of("KAI", Kind.LABEL, _L, _CLUSTER, "kai.scheduler/task-priority"),
    *_of("KAI", Kind.ANNOTATION, _L, "no gang is derived from the pod's owner", "kai.scheduler/skip-podgrouper"),
    *_of("KAI", Kind.LABEL, _T, _SUBGROUP, "kai.scheduler/subgroup-name"),
    *_of("KAI", Kind.ANNOTATION, _R, _NO_SUBGROUP, "kai.scheduler/segment-size"),
    *_of(
        "KAI", Kind.ANNOTATION, _T, "`aliquot.dev/domain` and its level, of a gang; without a gang it is refused",
        "kai.scheduler/topology-required-placement",
    ),
    *_of(
        "KAI", Kind.ANNOTATION, _T, "`aliquot.dev/domain` and its level, of a gang; without a gang there is a warning",
        "kai.scheduler/topology-preferred-placement",
    ),
    *_of("KAI", Kind.ANNOTATION, _R, _DOMAIN, "kai.scheduler/segment-topology-required-placement"),
    *_of("KAI", Kind.ANNOTATION, _L, _DOMAIN, "kai.scheduler/topology", "kai.scheduler/segment-topology-preferred-placement"),
    *_of("KAI", Kind.SCHEDULER, _T, "`aliquot-scheduler`", "kai-scheduler"),
    *_of(
        "KAI", Kind.FIELD, _L, f"Aliquot's MPS daemons do not listen there: remove the volume, and set "
        f"{contract.ANNOTATION_ISOLATION}: mps for nodes that offer it", "spec.volumes[].hostPath.path: /tmp/nvidia-mps",
    ),
)  # fmt: skip
_RUNAI = (
    *_of("Run:ai", Kind.SCHEDULER, _T, "`aliquot-scheduler`; annotations as in KAI", "runai-scheduler"),
    *_of("Run:ai", Kind.LABEL, _L, _QUEUE, "runai/queue"),
    *_of("Run:ai", Kind.LABEL, _L, _POOL, "runai/node-pool"),
)
_NVIDIA = (
    *_of(
        "NVIDIA", Kind.ANNOTATION, _T, "`nvidia.com/vgpu-memory`, `aliquot.dev/memory-burst`",
        "nvidia.com/container.<name>.gpu-memory.request", "nvidia.com/container.<name>.gpu-memory.limit",
    ),
    *_of("NVIDIA", Kind.ANNOTATION, _T, "`aliquot.dev/isolation`", "nvidia.com/container.<name>.gpu-compute.mode"),
    *_of("NVIDIA", Kind.RESOURCE, _T, "the same", "nvidia.com/mig-<profile>"),
    *_of(
        "NVIDIA", Kind.RESOURCE, _R, "a replica states no amount. Without `adopt-nvidia-gpu`, it stays with NVIDIA's device plugin",
        "nvidia.com/gpu.shared",
    ),
    *_of("NVIDIA", Kind.VARIABLE, _T, "removed with a warning; the agent sets it", "NVIDIA_VISIBLE_DEVICES"),
    *_of(
        "NVIDIA", Kind.VARIABLE, _T, "removed with a warning; `nvidia.com/vgpu-memory` is the limit",
        "NVIDIA_GPU_MEMORY_LIMIT", "NVIDIA_GPU_MEMORY_REQUEST",
    ),
)  # fmt: skip
_VOLCANO = (
    *_of("Volcano", Kind.RESOURCE, _T, "`nvidia.com/vgpu`", "volcano.sh/vgpu-number", "volcano.sh/gpu-number"),
    *_of("Volcano", Kind.RESOURCE, _T, "`nvidia.com/vgpu-memory`, the total", "volcano.sh/vgpu-memory", "volcano.sh/gpu-memory"),
    *_of("Volcano", Kind.RESOURCE, _T, "as HAMi's `gpumem-percentage`", "volcano.sh/vgpu-memory-percentage"),
    *_of("Volcano", Kind.RESOURCE, _T, "`nvidia.com/vgpu-cores`, the total", "volcano.sh/vgpu-cores"),
    *_of("Volcano", Kind.ANNOTATION, _T, "as HAMi's `vgpu-mode`", "volcano.sh/vgpu-mode"),
    *_of("Volcano", Kind.ANNOTATION, _T, "`aliquot.dev/gpu-uuid`", "volcano.sh/vgpu-use-gpuuuid"),
    *_of("Volcano", Kind.ANNOTATION, _T, "`aliquot.dev/gpu-uuid-not`", "volcano.sh/vgpu-nouse-gpuuuid"),
    *_of(
        "Volcano", Kind.ANNOTATION, _L, f"use {contract.ANNOTATION_PLACEMENT}", "volcano.sh/vgpu-podgroup-policy",
        "volcano.sh/resource-strategy-scoring-type", "volcano.sh/resource-strategy-weight",
    ),
    *_of(
        "Volcano", Kind.ANNOTATION, _T, _GANG_OR_READ, "scheduling.volcano.sh/group-name", "scheduling.k8s.io/group-name",
        "scheduling.volcano.sh/group-min-member",
    ),
    *_of("Volcano", Kind.ANNOTATION, _L, _QUEUE, "scheduling.volcano.sh/queue-name"),
    *_of("Volcano", Kind.ANNOTATION, _L, _PREEMPTION, "volcano.sh/preemptable", "volcano.sh/cooldown-time"),
    *_of(
        "Volcano", Kind.ANNOTATION, _L, _CLUSTER, "volcano.sh/sla-waiting-time", "volcano.sh/revocable-zone",
        "volcano.sh/jdb-min-available", "volcano.sh/jdb-max-unavailable", "volcano.sh/qos-level",
    ),
    *_of(
        "Volcano", Kind.ANNOTATION, _L, f"use {contract.ANNOTATION_NUMA}", "volcano.sh/numa-topology-policy", harmless=("none",)
    ),
    *_of("Volcano", Kind.SCHEDULER, _T, "`aliquot-scheduler`", "volcano"),
)  # fmt: skip
_MANAGER = (
    *_of("vgpu-manager", Kind.RESOURCE, _T, "`nvidia.com/vgpu`; the other two are then per GPU", "nvidia.com/vgpu-number"),
    *_of("vgpu-manager", Kind.RESOURCE, _T, "the same name, the total", "nvidia.com/vgpu-memory", "nvidia.com/vgpu-cores"),
    *_of("vgpu-manager", Kind.ANNOTATION, _T, "`aliquot.dev/gpu-type`, by words: `*A10*` is a part", "nvidia.com/include-gpu-type"),
    *_of("vgpu-manager", Kind.ANNOTATION, _T, "`aliquot.dev/gpu-type-not`", "nvidia.com/exclude-gpu-type"),
    *_of("vgpu-manager", Kind.ANNOTATION, _T, "`aliquot.dev/gpu-uuid`", "nvidia.com/include-gpu-uuid"),
    *_of("vgpu-manager", Kind.ANNOTATION, _T, "`aliquot.dev/gpu-uuid-not`", "nvidia.com/exclude-gpu-uuid"),
    *_of(
        "vgpu-manager", Kind.ANNOTATION, _T, "`aliquot.dev/placement`", "nvidia.com/device-scheduler-policy",
        "nvidia.com/node-scheduler-policy",
    ),
    *_of(
        "vgpu-manager", Kind.ANNOTATION, _T, "`aliquot.dev/numa`, or placement `topology`; `link-strict` is refused",
        "nvidia.com/device-topology-mode",
    ),
    *_of("vgpu-manager", Kind.ANNOTATION, _T, "`aliquot.dev/cores-mode`; `none` is refused", "nvidia.com/vgpu-compute-policy"),
    *_of(
        "vgpu-manager", Kind.ANNOTATION, _L, f"oversubscription is per pod: {contract.ANNOTATION_MEMORY_BURST}",
        "nvidia.com/memory-scheduler-policy", harmless=("none",),
    ),
    *_of("vgpu-manager", Kind.ANNOTATION, _R, _DOMAIN, "nvidia.com/cross-pod-topology", harmless=("false",)),
    *_of(
        "vgpu-manager", Kind.ANNOTATION, _L, "label the namespace aliquot.dev/webhook=ignore", "vgpu-manager.io/ignore-webhook"
    ),
    *_of("vgpu-manager", Kind.SCHEDULER, _T, "`aliquot-scheduler`", "vgpu-scheduler"),
)  # fmt: skip
_GROUPS = (
    *_of("coscheduling", Kind.LABEL, _T, _GANG_OR_READ, "scheduling.x-k8s.io/pod-group"),
    *_of(
        "coscheduling", Kind.LABEL, _T, _GANG, "pod-group.scheduling.sigs.k8s.io/name", "pod-group.scheduling.sigs.k8s.io/min-available"
    ),
    *_of(
        "Koordinator", Kind.ANNOTATION, _T, _GANG, "gang.scheduling.koordinator.sh/name", "gang.scheduling.koordinator.sh/min-available"
    ),
    *_of(
        "Kubernetes", Kind.FIELD, _R, f"set {contract.ANNOTATION_GANG} and {contract.ANNOTATION_GANG_MIN}, or open the gate GangScheduling "
        f"of Aliquot's kube-scheduler and set `schedulingGroups`; for schedulingGroup also the gate `{Gate.GANGS_FROM_OWNERS}`",
        "spec.schedulingGroup", "spec.workloadRef",
    ),
)  # fmt: skip

WORDS: Final = (*_HAMI, *_KAI, *_RUNAI, *_NVIDIA, *_VOLCANO, *_MANAGER, *_GROUPS)

_PLACES: Final = (Kind.ANNOTATION, Kind.LABEL)
_DOMAINS: Final = (
    "hami.io/", "kai.scheduler/", "run.ai/", "runai/", "scheduling.volcano.sh/", "volcano.sh/", "vgpu-manager.io/",
    "gang.scheduling.koordinator.sh/",
)  # fmt: skip
_WRITTEN: Final = re.compile(
    r"hami\.io/(vgpu|bind|.*alloc).*|volcano\.sh/(job|task|queue-name|template|vgpu-(node|time|ids)).*"
    r"|(kai\.scheduler|run\.ai|runai)/(top-owner|stale|last|accounting|shared|podgroup).*"
)
"""What these systems write on pods themselves. No pod asks for anything with it."""
_IN_TEMPLATE: Final = "pods do not get it: write it in the metadata of their template"

HOST_MPS: Final = "/tmp/nvidia-mps"  # noqa: S108  (no file of ours: the directory of a host's MPS daemon)
_MOST_NAMES_CHARS: Final = 120
_NEAR: Final = 0.8
"""How alike a misspelling and its word are (difflib's ratio): one wrong letter in five."""
_NAMES: Final = tuple(word.name.replace("<name>", "*") for word in WORDS if word.kind in _PLACES)
"""Patterns of annotations and labels."""
_IDLE: Final = tuple(word for word in WORDS if word.kind in _PLACES and word.fate is not Fate.TRANSLATED)


def check_words(draft: Draft, *, left_to: str = "") -> None:
    """Warn of the words without effect, and refuse the pod for one that Aliquot cannot honour.

    Args: left_to: the scheduler that keeps the pod, if it is not ours; its words are then its own.
    Raises: RequestError.
    """
    idle: dict[tuple[Kind, str], list[str]] = {}
    for kind, name, why in _idle_words(draft, left_to):
        idle.setdefault((kind, why), []).append(name)
    for (kind, why), names in idle.items():
        # Clients cut long warnings off, so a long list of names becomes one warning each.
        texts = [", ".join(sorted(names))] if sum(map(len, names)) < _MOST_NAMES_CHARS else sorted(names)
        draft.warnings += [f"{kind} {named} has no effect: {why}" for named in texts]
    _warn_of_variables(draft)
    _warn_of_host_mps(draft)


def is_unknown(name: str) -> bool:
    """Whether an annotation or a label is in the domain of another system, but no word of the table, in either place."""
    return name.startswith(_DOMAINS) and _WRITTEN.fullmatch(name) is None and not any(fnmatchcase(name, row) for row in _NAMES)


def _why_unknown(name: str) -> str:
    """Say that a word is not known, and which word of the same system it may be a misspelling of."""
    domain, _, last = name.partition("/")
    known = {row.partition("/")[2]: row for row in _NAMES if row.startswith(f"{domain}/") and "*" not in row}
    near = difflib.get_close_matches(last, known, n=1, cutoff=_NEAR)
    return "it is not known to Aliquot" + (f"; did you mean {known[near[0]]}?" if near else "")


def _idle_words(draft: Draft, left_to: str) -> Iterator[tuple[Kind, str, str]]:
    """Yield each word without effect, and why, wherever it stands: some systems read both places. Raises RequestError."""
    left = f"it is left to scheduler {left_to}" if left_to else ""
    for kind, values in ((Kind.ANNOTATION, draft.annotations), (Kind.LABEL, draft.labels)):
        for word in _IDLE:
            if (value := values.get(word.name, "")) and value not in word.harmless:
                yield kind, word.name, left or _why_idle(draft, kind, word, value)
        for name in filter(is_unknown, values):
            yield kind, name, left or _why_unknown(name)


def _why_idle(draft: Draft, kind: Kind, word: Word, value: str) -> str:
    """Say why a word that is not translated has no effect. Raises RequestError: the pod must not have it."""
    if word.text == _NO_SUBGROUP and contract.ANNOTATION_GANG in draft.annotations:
        return "the pod's gang starts as a whole"
    if word.fate is Fate.REFUSED:
        raise RequestError(f"{kind} {word.name}: {quote(value)} is not supported: {word.text}, or remove it")
    return word.text


def warnings_around(around: Iterable[tuple[str, Any]], template: Any) -> Iterator[str]:
    """Yield a warning for each word that an object around a pod template has, and the template has not: pods do not get it.

    Some systems read such words on a pod's owner as well. Ours on an owner are a mistake.

    Args: around: metadata of the objects, each with its place. template: the template's metadata. All may have any form.
    """
    for place, metadata in around:
        for kind in _PLACES:
            inside = _texts_of(template, kind)
            for name, value in _texts_of(metadata, kind).items():
                if value and inside.get(name) != value and (why := _why_idle_around(kind, name, value)):
                    yield f"{place}: {kind} {name} has no effect: {why}"


def _texts_of(metadata: Any, kind: Kind) -> dict[str, str]:
    values = metadata.get(f"{kind}s") if isinstance(metadata, dict) else None
    return {str(name): str(value) for name, value in values.items()} if isinstance(values, dict) else {}


def _why_idle_around(kind: Kind, name: str, value: str) -> str:
    """Say why a word has no effect on an object around a template; empty if it is no word, or asks for nothing."""
    if name.startswith(contract.ANNOTATION_PREFIX):
        return _IN_TEMPLATE
    word = next((word for word in WORDS if word.kind is kind and fnmatchcase(name, word.name.replace("<name>", "*"))), None)
    if word is None:
        return _why_unknown(name) if is_unknown(name) else ""
    if value in word.harmless:
        return ""
    return _IN_TEMPLATE if word.fate is Fate.TRANSLATED else word.text


def _warn_of_variables(draft: Draft) -> None:
    names: Collection[str] = [word.name for word in WORDS if word.kind is Kind.VARIABLE and word.fate is Fate.LEFT]
    for container in draft.containers:
        if idle := sorted(str(entry["name"]) for entry in container.env if entry.get("name") in names):
            draft.warnings.append(f"container {container.name}: {', '.join(idle)} has no effect: {SETTINGS_FROM_RESOURCES}")


def _warn_of_host_mps(draft: Draft) -> None:
    if HOST_MPS in draft.host_paths():
        (word,) = (word for word in WORDS if word.kind is Kind.FIELD and word.name.endswith(HOST_MPS))
        draft.warnings.append(f"a volume mounts {HOST_MPS} of the node, but {word.text}")
