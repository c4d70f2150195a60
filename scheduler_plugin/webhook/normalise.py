# SPDX-License-Identifier: Apache-2.0
"""Makes a GPU pod ready for scheduling: amounts in one vocabulary, the right scheduler, and no way around the limits; or refuses it.

Invariant: every amount becomes a resource in whole MiB and percent, in any vocabulary that the pod uses, so that ResourceQuota and the
scheduler count it. The memory of whole GPUs becomes one only where the settings say that all GPUs have the same memory. Elsewhere it is not
known yet, and only the number of GPUs is set (deploy/daemonset/components/require-memory refuses such pods where that matters).

Where nodes give out GPUs by dynamic resource allocation, the resources then become ResourceClaims (``claims``).

A pod that asks for no GPU is not changed, with one exception: amounts of zero are removed if no other system serves that resource.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, Final

from aliquot import contract
from aliquot.contract import units
from aliquot.contract.errors import ContractError, quote
from aliquot.contract.model import ContainerRequest, Isolation, NumaMode, PodRequest, Preferences
from aliquot.placement import model_name
from aliquot.placement.request import RequestError, pod_request
from scheduler_plugin.core.admit.queues import Queue
from scheduler_plugin.core.claims.templates import ClaimTemplate
from scheduler_plugin.core.cluster.durations import check_durations
from scheduler_plugin.core.cluster.gang import gang_of
from scheduler_plugin.core.cluster.pods import asks_gpu
from scheduler_plugin.core.consolidate.movable import check_movable
from scheduler_plugin.webhook.adoption import in_our_words, speaks_to_us, stays_with_its_owner, system_of
from scheduler_plugin.webhook.amounts import Options, part_of_memory
from scheduler_plugin.webhook.claims import is_translated, translate_to_claims
from scheduler_plugin.webhook.classes import apply_class
from scheduler_plugin.webhook.draft import Draft, DraftContainer, Json
from scheduler_plugin.webhook.groups import Finding, translate_groups, warn_of_lost_groups
from scheduler_plugin.webhook.per_gpu import NVIDIA_GPU, NVIDIA_SHARED
from scheduler_plugin.webhook.preferences import translate_preferences
from scheduler_plugin.webhook.topology_words import translate_topology
from scheduler_plugin.webhook.vocabularies import (
    check_vocabulary,
    is_foreign,
    remove_zeros,
    translate_amounts,
    warn_of_priorities,
    warn_of_unknown_annotations,
    warn_of_unknown_resources,
)
from scheduler_plugin.webhook.words import WORDS, Kind, check_words

REPLACED_SCHEDULERS: Final = ("default-scheduler", *(word.name for word in WORDS if word.kind is Kind.SCHEDULER))
"""The schedulers that give up their GPU pods to ours, unless the settings name others."""

MAX_CONTAINERS: Final = 512
"""Containers of a pod that asks for a GPU. A node takes fewer pods than this, and filter and bind wait while each container is read."""

GPU_TOLERATION: Final[Json] = {"key": NVIDIA_GPU, "operator": "Exists", "effect": "NoSchedule"}
"""The toleration that Kubernetes adds to pods with nvidia.com/gpu, but not to ours. Clouds taint GPU nodes by that name.

Source: k8s.io/kubernetes/plugin/pkg/admission/extendedresourcetoleration.
"""

WRITTEN_BY_SCHEDULER: Final = (contract.ANNOTATION_ASSIGNMENT, contract.ANNOTATION_RETRY)
"""Annotations that a new pod has only if it is a copy of another: ``kubectl debug --copy-to`` and Velero copy annotations."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result for one pod: a refusal if that is not empty, else the patch."""

    refusal: str = ""
    patch: tuple[Json, ...] = ()
    warnings: tuple[str, ...] = ()
    is_gpu_pod: bool = True
    """Whether the pod asks for a GPU of Aliquot."""
    templates: tuple[ClaimTemplate, ...] = ()
    """What must exist in the pod's namespace before the pod is admitted."""
    system: str = ""
    """The other system in whose words the pod asks for GPUs; empty for our own."""


UNTOUCHED: Final = Outcome(is_gpu_pod=False)


@dataclass(frozen=True, slots=True)
class Normaliser:
    """The rules of admission, with the settings that they depend on."""

    options: Options
    scheduler_name: str = contract.SCHEDULER_NAME
    replaced_schedulers: tuple[str, ...] = field(default=REPLACED_SCHEDULERS)
    tolerate_gpu_taint: bool = True
    """Whether GPU pods may run on nodes with the taint ``nvidia.com/gpu:NoSchedule``."""
    removed_annotations: tuple[str, ...] = WRITTEN_BY_SCHEDULER
    """Annotations that are removed from a GPU pod, with a warning."""
    as_claims: bool = False
    """Whether amounts become ResourceClaims: the nodes give out their GPUs by dynamic resource allocation."""
    plans_claims: bool = False
    """Whether our scheduler allocates these claims, and not kube-scheduler."""
    applies_classes: bool = True
    """Whether a pod gets what its class stands for."""
    adopts: bool = True
    """Whether pods in other systems' words are served without a word to Aliquot."""
    defers_gangs: bool = False
    """Whether a gang that is not stated is found later: for templates, whose pods have it in other objects."""

    def required_rules(self) -> "Normaliser":
        """Return the rules without the optional ones. ``/validate`` has its own rule for the assignment."""
        options = replace(self.options, count_whole_gpus=False)
        return replace(self, tolerate_gpu_taint=False, removed_annotations=(), options=options, applies_classes=False)

    def behind(self, spec: Mapping[str, Any], namespace: str, queue_name: str) -> "Normaliser":
        """Return the rules for a pod that its spec and its queue keep to some nodes. Args: queue_name: empty without a queue."""
        return replace(self, options=self.options.behind(spec, namespace, queue_name))

    def places(self, pod: Mapping[str, Any]) -> bool:
        """Whether a pod, or a template of pods, asks our scheduler for a GPU. An invalid one counts: its author has yet to correct it."""
        name = (pod.get("spec") or {}).get("schedulerName") or ""
        return self._takes(name) and self.admit(pod).is_gpu_pod

    def admit(self, pod: Mapping[str, Any], found: Finding | None = None) -> Outcome:
        """Decide on a pod that is being created. Args: found: its gang in other objects."""
        try:
            draft = Draft(pod)
            system = system_of(draft, self.options)
        except RequestError as exc:
            return Outcome(refusal=str(exc))
        if not self._takes_on(draft):
            return replace(UNTOUCHED, system=system)
        outcome = self._admit(draft, found)
        return replace(outcome, system=system) if outcome.is_gpu_pod else outcome

    def send_to_scheduler(self, pod: Mapping[str, Any]) -> Outcome:
        """Send a pod with claims of its own for our GPUs to our scheduler. Raises RequestError: this is no pod."""
        draft = Draft(pod)
        if draft.node_name:
            return UNTOUCHED
        if self._takes(draft.scheduler_name):
            draft.scheduler_name = self.scheduler_name
        else:
            draft.warnings.append(
                f"schedulerName {draft.scheduler_name} is kept: if it and {self.scheduler_name} both allocate claims, they may give one "
                "GPU twice, and the agent refuses the second pod"
            )
        return Outcome(patch=tuple(draft.patch()), warnings=tuple(draft.warnings))

    def serves(self, pod: Mapping[str, Any]) -> bool:
        """Whether the pod is Aliquot's to serve, if it asks for GPUs."""
        try:
            return self._takes_on(Draft(pod))
        except RequestError:
            return False

    def _takes_on(self, draft: Draft) -> bool:
        if in_our_words(draft, self.options):
            return True
        return not stays_with_its_owner(draft) and (self.adopts or speaks_to_us(draft, self.scheduler_name))

    def _admit(self, draft: Draft, found: Finding | None) -> Outcome:
        try:
            # Templates write zeros. They must go first, or a pod without GPUs would be treated as a GPU pod.
            remove_zeros(draft, self.options)
            warn_of_unknown_resources(draft)
            foreign = is_foreign(draft, self.options) and not is_translated(draft)
            if not foreign and not _asks_any(draft):
                warn_of_priorities(draft, self.options)
                return replace(UNTOUCHED, patch=tuple(draft.patch()), warnings=tuple(draft.warnings))
            # From here on it is a GPU pod. Preferences are translated first: translating amounts reads them.
            _check_size(draft)
            check_vocabulary(draft, self.options)
            self._remove_annotations(draft)
            warn_of_unknown_annotations(draft)
            translate_preferences(draft, self.options)
            if foreign:
                translate_amounts(draft, self.options)
            if not _asks_any(draft):
                return UNTOUCHED  # only annotations of another vocabulary, and they state no amount
            if self.applies_classes:
                apply_class(draft, self.options, may_share=not foreign)
            self._settle_other_words(draft, found)
            for container in draft.containers:
                _settle_amounts(container)
            # The checks that agent and scheduler make later: a pod that they would refuse is refused here.
            if not self._defers_gang(draft):
                gang_of("", draft.annotations)
            check_durations(draft.annotations)
            check_movable(draft.annotations)
            request = _count_percentages(draft, pod_request(draft.pod()), self.options)
            _check_instances(request)
            _check_names(request.preferences)
            _count_whole_gpus(draft, request, self.options)
            self._settle_scheduling(draft)
            _override_visible_devices(draft)
            _remove_memory_variables(draft)
            templates = translate_to_claims(draft, request, planned=self.plans_claims) if self.as_claims else ()
        except (RequestError, ContractError) as exc:
            return Outcome(refusal=str(exc))
        return Outcome(patch=tuple(draft.patch()), warnings=tuple(draft.warnings), templates=templates)

    def _remove_annotations(self, draft: Draft) -> None:
        # Kueue writes the hold into the template of the pod's controller, and a copy has no controller.
        held = () if draft.controller or not self.removed_annotations else (contract.ANNOTATION_HOLD,)
        found = [name for name in (*self.removed_annotations, *held) if draft.annotations.pop(name, None) is not None]
        if found:
            draft.warnings.append(
                f"annotation {', '.join(found)} is removed: only the scheduler may set it, and this pod is a copy of another"
            )

    def _settle_other_words(self, draft: Draft, found: Finding | None) -> None:
        """Honour, warn of or refuse what other systems' words ask for besides amounts. Raises RequestError."""
        kept = draft.scheduler_name if not self._takes(draft.scheduler_name) else ""
        check_words(draft, left_to=kept)
        if not kept and not self._defers_gang(draft):
            translate_groups(draft, self.options, found)
            translate_topology(draft)
            warn_of_lost_groups(draft, draft.scheduler_name)

    def _defers_gang(self, draft: Draft) -> bool:
        return self.defers_gangs and contract.ANNOTATION_GANG not in draft.annotations

    def _takes(self, scheduler_name: str) -> bool:
        """Whether a pod with this schedulerName is, or becomes, one of our scheduler."""
        return scheduler_name in ("", self.scheduler_name, *self.replaced_schedulers)

    def _settle_scheduling(self, draft: Draft) -> None:
        if self.tolerate_gpu_taint and not any(map(_tolerates_gpu_taint, draft.tolerations)):
            draft.tolerations.append(dict(GPU_TOLERATION))
        if draft.node_name:
            raise RequestError(
                f"spec.nodeName is {draft.node_name}, which bypasses the scheduler, so no GPU would be assigned: "
                "use a nodeSelector (kubernetes.io/hostname) instead"
            )
        if self._takes(draft.scheduler_name):
            draft.scheduler_name = self.scheduler_name
        else:
            draft.warnings.append(
                f"schedulerName {draft.scheduler_name} is kept, but only {self.scheduler_name} assigns GPUs: unless "
                f"{draft.scheduler_name} does so too, the containers will not start"
            )


def _asks_any(draft: Draft) -> bool:
    return any(asks_gpu({**container.limits, **container.requests}) for container in draft.containers)


def _tolerates_gpu_taint(toleration: Json) -> bool:
    """Whether a toleration covers the taint with any value. An empty key or effect matches all."""
    covered = toleration.get("key", "") in ("", NVIDIA_GPU) and toleration.get("effect", "") in ("", GPU_TOLERATION["effect"])
    return covered and toleration.get("operator") == GPU_TOLERATION["operator"]


def _settle_amounts(container: DraftContainer) -> None:
    """Complete one container's amounts and write them as the scheduler counts them: ``4Gi`` of an extended resource is 4294967296."""
    for resource in contract.RESOURCES_OF_VGPUS:
        if resource not in container.limits and resource in container.requests:
            container.limits[resource] = container.requests[resource]
    memory = container.limits.get(contract.RESOURCE_VGPU_MEMORY)
    if memory is not None:
        try:
            container.ask(contract.RESOURCE_VGPU_MEMORY, units.bytes_to_mib(units.parse_memory_bytes(memory)))
        except ContractError as exc:
            raise RequestError(f"container {container.name}, {contract.RESOURCE_VGPU_MEMORY}: {exc}") from exc
    if any(resource in container.limits for resource in contract.RESOURCES_OF_VGPUS):
        container.limits.setdefault(contract.RESOURCE_VGPU, "1")


def _count_percentages(draft: Draft, request: PodRequest, options: Options) -> PodRequest:
    """Turn percentages into MiB for a queue that counts MiB, if all GPUs of its flavors have one size. Return the request after that."""
    asking = [asked for asked in request.containers if asked.memory_percent is not None]
    if not asking or options.queue is None or options.queue.counts_percentages:
        return request
    containers = {container.name: container for container in draft.containers}
    for asked in asking:
        part = Fraction(asked.memory_percent or 0, asked.vgpus * units.WHOLE_GPU_PERCENT)
        memory = part_of_memory(draft, part, f"container {asked.container}", options)
        if memory.resource == contract.RESOURCE_VGPU_MEMORY_PERCENT:
            draft.warnings.append(f"container {asked.container}: Kueue has no quota for a percentage: {_of_one_size(options.queue)}")
            continue
        container = containers[asked.container]
        container.take(contract.RESOURCE_VGPU_MEMORY_PERCENT)
        container.ask(memory.resource, asked.vgpus * memory.amount)
    return pod_request(draft.pod())


def _of_one_size(queue: Queue) -> str:
    return (
        f"the GPUs of ClusterQueue {queue.name} differ in size or are not known: use one ClusterQueue for each size, or "
        f"name the model with {contract.ANNOTATION_GPU_TYPE}"
    )


def _count_whole_gpus(draft: Draft, request: PodRequest, options: Options) -> None:
    """Set the memory of containers that ask for whole GPUs, so that a quota counts it. Raises RequestError.

    Only where all GPUs, or all of the pod's queue, have exactly the same memory: on a larger GPU the pod would get a part instead of the
    whole, and on a smaller one it would not fit. GPUs that do not exist yet count as well, such as those of a node pool scaled to zero, so
    only the settings can say whether all are the same. While no GPU is known, no memory is set, and what a template has from before stays.
    """
    whole = _whole_gpus(request)
    sizes = options.device_sizes(request.preferences) if whole else ()
    for asked in whole:
        if asked.memory_bytes is None:
            if options.count_whole_gpus:
                _count_whole(draft, asked, sizes, options.queue)
        elif sizes and asked.memory_bytes not in [units.mib_to_bytes(asked.vgpus * size) for size in sizes]:
            raise RequestError(
                f"container {asked.container} asks for a part of a GPU's memory with {contract.ANNOTATION_ISOLATION}: exclusive, which "
                f"gives whole GPUs: remove {contract.RESOURCE_VGPU_MEMORY}, or the annotation"
            )


def _count_whole(draft: Draft, asked: ContainerRequest, sizes: Collection[int], queue: Queue | None) -> None:
    """Set the memory of a container with whole GPUs if they have one size."""
    if len(sizes) == 1:
        (container,) = (one for one in draft.containers if one.name == asked.container)
        container.ask(contract.RESOURCE_VGPU_MEMORY, asked.vgpus * min(sizes))
    elif queue is not None:
        draft.warnings.append(f"container {asked.container}: Kueue counts no memory for a whole GPU: {_of_one_size(queue)}")


def _whole_gpus(request: PodRequest) -> list[ContainerRequest]:
    """Return the containers that ask for whole GPUs."""
    exclusive = request.preferences.isolation is Isolation.EXCLUSIVE
    return [asked for asked in request.containers if not asked.mig and (exclusive or asked.asks_whole_memory)]


def _check_size(draft: Draft) -> None:
    if len(draft.containers) > MAX_CONTAINERS:
        raise RequestError(
            f"expected at most {MAX_CONTAINERS} containers in a pod that asks for a GPU, found {len(draft.containers)}: "
            "split them over several pods"
        )


def _check_instances(request: PodRequest) -> None:
    """Refuse annotations that MIG instances do not support: strict NUMA for several, memory burst, exclusive. Raises RequestError.

    The check is here and not where requests are read, so that pods admitted by an older version still start.
    """
    preferences = request.preferences
    for asked in request.containers:
        if not asked.mig:
            continue
        unsupported = []
        if preferences.numa is NumaMode.STRICT and sum(count for _, count in asked.mig) > 1:
            unsupported.append(f"{contract.ANNOTATION_NUMA}: strict")
        if preferences.memory_burst is not None:
            unsupported.append(contract.ANNOTATION_MEMORY_BURST)
        if preferences.isolation is Isolation.EXCLUSIVE:
            unsupported.append(f"{contract.ANNOTATION_ISOLATION}: exclusive")
        if unsupported:
            raise RequestError(
                f"container {asked.container} asks for MIG instances with {' and '.join(unsupported)}, which MIG instances do not support: "
                f"remove the annotation, ask for {contract.RESOURCE_VGPU} instead, or move the container to its own pod"
            )


def _check_names(preferences: Preferences) -> None:
    """Refuse a name in gpu-type or gpu-type-not that is no model's. Raises RequestError."""
    lists = ((contract.ANNOTATION_GPU_TYPE, preferences.gpu_type), (contract.ANNOTATION_GPU_TYPE_NOT, preferences.gpu_type_not))
    for annotation, names in lists:
        if wrong := [name for name in names if not model_name.is_name(name)]:
            raise RequestError(
                f"annotation {annotation}: {quote(wrong[0])} names no GPU model: write a word of its name such as H200, a part with stars "
                "such as *A10*, or = with the whole name such as =NVIDIA H200"
            )


def _remove_memory_variables(draft: Draft) -> None:
    """Keep the hook of NVIDIA's toolkit from other limits than the share's, and from a reservation that takes memory from other pods."""
    names = (contract.ENV_NVIDIA_MEMORY_LIMIT, contract.ENV_NVIDIA_MEMORY_REQUEST)
    for container in draft.containers:
        if asks_gpu(container.limits) and (removed := [name for name in names if container.remove_env(name)]):
            draft.warnings.append(
                f"container {container.name}: {' and '.join(removed)} is removed: {contract.RESOURCE_VGPU_MEMORY} is the container's limit"
            )


def _override_visible_devices(draft: Draft) -> None:
    """Keep NVIDIA's runtime from giving GPUs to containers by their environment, in addition to those that the agent grants.

    A container that asks for a GPU must not set the variable: the agent sets it, and kubelet would prefer the pod's own value. A container
    that asks NVIDIA's device plugin for a GPU is left to that plugin.
    """
    name = contract.ENV_NVIDIA_VISIBLE_DEVICES
    for container in draft.containers:
        gpu = asks_gpu(container.limits)
        if not gpu and (container.wants(NVIDIA_GPU) or container.wants(NVIDIA_SHARED)):
            continue
        if container.remove_env(name) if gpu else container.set_env(name, contract.NO_VISIBLE_DEVICES):
            done = "removed" if gpu else f"set to {contract.NO_VISIBLE_DEVICES}"
            draft.warnings.append(
                f"container {container.name}: {name} is {done}: a container gets only the GPUs that its resources ask for"
            )
