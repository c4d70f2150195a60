"""Makes a GPU pod ready for scheduling: amounts in one vocabulary, the right scheduler, and no way around the limits; or refuses it.

Every amount ends up as a resource in whole MiB and percent, however it was asked for, so that ResourceQuota and the scheduler count it. The
memory of whole GPUs does where the settings say that all GPUs have the same; elsewhere nobody knows it yet, and only their count is there
(deploy/daemonset/components/require-memory refuses such pods where that matters). A pod that asks for no GPU is none of our business and is
not touched; amounts of zero in words that no other system serves are taken out of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from placement.request import RequestError, pod_request
from proto import contract, units
from proto.errors import ContractError
from proto.model import Isolation, NumaMode, PodRequest
from scheduler_plugin.core.gang import gang_of
from scheduler_plugin.core.pods import asks_gpu
from scheduler_plugin.webhook.draft import Draft, DraftContainer, Json
from scheduler_plugin.webhook.vocabularies import (
    NVIDIA_GPU,
    NVIDIA_SHARED,
    Options,
    check_vocabulary,
    is_foreign,
    remove_zeros,
    translate_amounts,
    translate_wishes,
    warn_of_priorities,
    warn_of_unknown_annotations,
    warn_of_unknown_resources,
)

REPLACED_SCHEDULERS: Final = ("", "default-scheduler", "hami-scheduler", "kai-scheduler")

MAX_CONTAINERS: Final = 512
"""Containers of a pod that asks for a GPU: a node takes fewer pods, and what is said of each is worked out where filter and bind wait."""

GPU_TOLERATION: Final[Json] = {"key": NVIDIA_GPU, "operator": "Exists", "effect": "NoSchedule"}
"""What Kubernetes itself gives to pods that ask for nvidia.com/gpu, and keeps from ours: clouds taint GPU nodes by that name.

Source: k8s.io/kubernetes/plugin/pkg/admission/extendedresourcetoleration.
"""

WRITTEN_BY_SCHEDULER: Final = (contract.ANNOTATION_ASSIGNMENT, contract.ANNOTATION_RETRY)
"""What a pod being created has only when it was made from another: ``kubectl debug --copy-to`` and Velero take annotations along."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What becomes of a pod: a refusal when there is a sentence, else the patch."""

    refusal: str = ""
    patch: tuple[Json, ...] = ()
    warnings: tuple[str, ...] = ()
    concerns_us: bool = True


UNTOUCHED: Final = Outcome(concerns_us=False)


@dataclass(frozen=True, slots=True)
class Normaliser:
    """The rules, with what they depend on."""

    options: Options
    scheduler_name: str = contract.SCHEDULER_NAME
    replaced_schedulers: tuple[str, ...] = field(default=REPLACED_SCHEDULERS)
    tolerate_gpu_taint: bool = True
    """Whether GPU pods may land on nodes with the taint ``nvidia.com/gpu:NoSchedule``."""
    removed_annotations: tuple[str, ...] = WRITTEN_BY_SCHEDULER
    """What a GPU pod loses, with a warning."""

    def of_what_is_required(self) -> "Normaliser":
        """Return the rules without what a pod can do without. ``/validate`` has a rule of its own for the assignment."""
        options = replace(self.options, count_whole_gpus=False)
        return replace(self, tolerate_gpu_taint=False, removed_annotations=(), options=options)

    def admit(self, pod: Mapping[str, Any]) -> Outcome:
        """Decide on a pod that is being created."""
        try:
            draft = Draft(pod)
            remove_zeros(draft, self.options)
            warn_of_unknown_resources(draft)
            foreign = is_foreign(draft, self.options)
            if not foreign and not _asks_any(draft):
                warn_of_priorities(draft)
                return replace(UNTOUCHED, patch=tuple(draft.patch()), warnings=tuple(draft.warnings))
            _check_size(draft)
            check_vocabulary(draft)
            self._remove_annotations(draft)
            warn_of_unknown_annotations(draft)
            translate_wishes(draft)
            if foreign:
                translate_amounts(draft, self.options)
            if not _asks_any(draft):
                return UNTOUCHED  # an annotation that says how to compute, and no other how much
            for container in draft.containers:
                _settle_amounts(container)
            gang_of("", draft.annotations)
            request = pod_request(draft.pod())
            _check_instances(request)
            _count_whole_gpus(draft, request, self.options)
            self._settle_scheduling(draft)
        except (RequestError, ContractError) as exc:
            return Outcome(refusal=str(exc))
        _close_side_doors(draft)
        return Outcome(patch=tuple(draft.patch()), warnings=tuple(draft.warnings))

    def _remove_annotations(self, draft: Draft) -> None:
        found = [name for name in self.removed_annotations if draft.annotations.pop(name, None) is not None]
        if found:
            draft.warnings.append(
                f"annotation {', '.join(found)} is removed: the scheduler writes it, for each pod anew, and this one was made from another"
            )

    def _settle_scheduling(self, draft: Draft) -> None:
        if self.tolerate_gpu_taint and not any(map(_tolerates_gpu_taint, draft.tolerations)):
            draft.tolerations.append(dict(GPU_TOLERATION))
        if draft.node_name:
            raise RequestError(
                f"spec.nodeName is {draft.node_name}, which passes the scheduler by, so no GPU would be assigned: "
                "use a nodeSelector (kubernetes.io/hostname) instead"
            )
        if draft.scheduler_name in self.replaced_schedulers:
            draft.scheduler_name = self.scheduler_name
        elif draft.scheduler_name != self.scheduler_name:
            draft.warnings.append(
                f"schedulerName {draft.scheduler_name} is kept, but only {self.scheduler_name} assigns GPUs: unless the other does, "
                "the containers will not start"
            )


def _asks_any(draft: Draft) -> bool:
    return any(asks_gpu({**container.limits, **container.requests}) for container in draft.containers)


def _tolerates_gpu_taint(toleration: Json) -> bool:
    """Whether a toleration covers the taint with any value. An empty key or effect stands for all."""
    covered = toleration.get("key", "") in ("", NVIDIA_GPU) and toleration.get("effect", "") in ("", GPU_TOLERATION["effect"])
    return covered and toleration.get("operator") == GPU_TOLERATION["operator"]


def _settle_amounts(container: DraftContainer) -> None:
    """Complete one container's amounts and spell them as the scheduler counts them: ``4Gi`` of an extended resource is 4294967296."""
    for resource in (contract.RESOURCE_VGPU, contract.RESOURCE_VGPU_MEMORY, contract.RESOURCE_VGPU_CORES):
        if resource not in container.limits and resource in container.requests:
            container.limits[resource] = container.requests[resource]
    memory = container.limits.get(contract.RESOURCE_VGPU_MEMORY)
    if memory is not None:
        try:
            container.ask(contract.RESOURCE_VGPU_MEMORY, units.bytes_to_mib(units.parse_memory_bytes(memory)))
        except ContractError as exc:
            raise RequestError(f"container {container.name}, {contract.RESOURCE_VGPU_MEMORY}: {exc}") from exc
    if memory is not None or contract.RESOURCE_VGPU_CORES in container.limits:
        container.limits.setdefault(contract.RESOURCE_VGPU, "1")


def _count_whole_gpus(draft: Draft, request: PodRequest, options: Options) -> None:
    """Write how much memory whole GPUs have, so that a quota counts it. Raises RequestError.

    Only where it is exactly the same for all: of a larger GPU a part would be given instead of the whole, and on a smaller one there would
    be no room. Whether that is so of GPUs that are not there yet, of a pool scaled to zero say, only the settings can tell. Where no GPU is
    known yet, nothing is written.
    """
    exclusive = request.preferences.isolation is Isolation.EXCLUSIVE
    whole = [asked for asked in request.containers if not asked.mig and (exclusive or asked.memory_bytes is None)]
    if not whole:
        return
    sizes = options.device_sizes(request.preferences)
    containers = {container.name: container for container in draft.containers}
    for asked in whole:
        if asked.memory_bytes is None:
            if options.count_whole_gpus and len(sizes) == 1:
                containers[asked.container].ask(contract.RESOURCE_VGPU_MEMORY, asked.vgpus * min(sizes))
        elif asked.memory_bytes not in [units.mib_to_bytes(asked.vgpus * size) for size in sizes]:
            raise RequestError(
                f"container {asked.container} asks for a part of a GPU's memory with {contract.ANNOTATION_ISOLATION}: exclusive, which "
                f"gives whole GPUs: remove {contract.RESOURCE_VGPU_MEMORY}, or the annotation"
            )


def _check_size(draft: Draft) -> None:
    if len(draft.containers) > MAX_CONTAINERS:
        raise RequestError(
            f"expected at most {MAX_CONTAINERS} containers in a pod that asks for a GPU, found {len(draft.containers)}: "
            "divide them among pods"
        )


def _check_instances(request: PodRequest) -> None:
    """Refuse annotations that nothing keeps for MIG instances: one NUMA node for several, more memory, a GPU alone. Raises RequestError.

    Here and not where requests are read, so that pods admitted before this was refused still start.
    """
    preferences = request.preferences
    for asked in request.containers:
        if not asked.mig:
            continue
        unkept = []
        if preferences.numa is NumaMode.STRICT and sum(count for _, count in asked.mig) > 1:
            unkept.append(f"{contract.ANNOTATION_NUMA}: strict")
        if preferences.memory_burst is not None:
            unkept.append(contract.ANNOTATION_MEMORY_BURST)
        if preferences.isolation is Isolation.EXCLUSIVE:
            unkept.append(f"{contract.ANNOTATION_ISOLATION}: exclusive")
        if unkept:
            raise RequestError(
                f"container {asked.container} asks for MIG instances with {' and '.join(unkept)}, which nothing keeps for them: remove the "
                f"annotation, ask for {contract.RESOURCE_VGPU} instead, or put the container into a pod of its own"
            )


def _close_side_doors(draft: Draft) -> None:
    """Keep NVIDIA's runtime from handing GPUs to containers by their environment, beside what we grant.

    A container that asks for a GPU names none itself: the agent sets the variable, and kubelet lets the pod's own value win over it.
    One that asks NVIDIA's device plugin for a GPU is that plugin's to give one.
    """
    name = contract.ENV_NVIDIA_VISIBLE_DEVICES
    for container in draft.containers:
        gpu = asks_gpu(container.limits)
        if not gpu and (container.wants(NVIDIA_GPU) or container.wants(NVIDIA_SHARED)):
            continue
        if container.remove_env(name) if gpu else container.set_env(name, contract.NO_VISIBLE_DEVICES):
            done = "removed" if gpu else f"set to {contract.NO_VISIBLE_DEVICES}"
            draft.warnings.append(f"container {container.name}: {name} is {done}: a container gets the GPUs that it asks for as resources")
