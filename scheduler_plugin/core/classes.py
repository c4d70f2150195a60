# SPDX-License-Identifier: Apache-2.0
"""Classes of work: what one label on a pod stands for. The setting ``classes`` changes these profiles, and adds others.

A profile holds defaults. What the pod itself says always wins.
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from aliquot import contract
from aliquot.contract import units
from aliquot.contract.errors import quote
from aliquot.placement.request import RequestError, pod_preferences
from scheduler_plugin.core.cluster.durations import check_durations, parse_duration
from scheduler_plugin.core.consolidate.movable import check_movable

ANNOTATIONS: Final = (
    contract.ANNOTATION_CORES_MODE,
    contract.ANNOTATION_GPU_TYPE,
    contract.ANNOTATION_GPU_TYPE_NOT,
    contract.ANNOTATION_MEMORY_BURST,
    contract.ANNOTATION_MIN_RUNTIME,
    contract.ANNOTATION_MOVABLE,
    contract.ANNOTATION_NUMA,
    contract.ANNOTATION_PLACEMENT,
    contract.ANNOTATION_PREEMPTION_DELAY,
    contract.ANNOTATION_PRIORITY,
)
"""The annotations that a profile may set. The others name one pod, one group or one GPU, or choose how a share is isolated."""


class ClassError(ValueError):
    """Profiles that cannot be read. The message says what was expected and what was found."""


class Profile(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """What a class stands for."""

    priority_class: str = ""
    """PriorityClass: which pods end for which. Empty: that of the cluster."""
    kueue_priority_class: str = ""
    """Kueue's WorkloadPriorityClass, which must exist. Empty: Kueue takes the pods' PriorityClass."""
    annotations: dict[str, str] = {}
    memory_percent: int = 0
    """Default share for a container that asks for nvidia.com/vgpu and states no amount: memory of each GPU. 0: whole GPUs."""
    cores: int = 0
    """The same for percent of SM time. 0: what the others leave."""
    idle_yield_after: str = ""
    """After this time without any use of its GPUs, a pod gives way first, to all that wait. Such as 30m. Empty: never."""
    idle_end_after: str = ""
    """After this time it ends. Empty: never."""


DEFAULT_CLASSES: Final[Mapping[str, Profile]] = {
    "training": Profile(
        priority_class="aliquot-training",
        annotations={
            contract.ANNOTATION_PRIORITY: "low",
            contract.ANNOTATION_MIN_RUNTIME: "5m",
            contract.ANNOTATION_MOVABLE: "true",
        },
    ),
    "inference": Profile(
        priority_class="aliquot-inference",
        annotations={contract.ANNOTATION_PRIORITY: "high", contract.ANNOTATION_MOVABLE: "false"},
    ),
    "interactive": Profile(
        priority_class="aliquot-interactive",
        annotations={contract.ANNOTATION_MOVABLE: "false", contract.ANNOTATION_CORES_MODE: "weight"},
        memory_percent=25,
        cores=25,
        idle_yield_after="1h",
    ),
}
"""Training gives way, after five minutes without loss, and uses what the others leave. Inference goes first on a shared GPU. A notebook has
a quarter of a GPU, and uses more compute only while others leave it; idle, it leaves its compute to them, and after an hour its GPU to
a pod that waits."""


def parse_classes(value: Any) -> Mapping[str, Profile]:
    """Lay the fields of classes over the defaults: ``{training: {priorityClass: batch}}``. Raises ClassError."""
    try:
        stated = msgspec.convert(value, dict[str, dict[str, Any]])
        known = {name: msgspec.to_builtins(profile) for name, profile in DEFAULT_CLASSES.items()}
        found = {name: msgspec.convert({**known.get(name, {}), **fields}, Profile) for name, fields in stated.items()}
    except msgspec.ValidationError as exc:
        fields = ", ".join(msgspec.structs.fields(Profile)[index].encode_name for index in range(len(msgspec.structs.fields(Profile))))
        raise ClassError(f"classes: {exc}; want names of classes, each with some of {fields}") from exc
    for name, profile in found.items():
        _check(name, profile)
    return {**DEFAULT_CLASSES, **found}


def _check(name: str, profile: Profile) -> None:
    if unknown := [annotation for annotation in profile.annotations if annotation not in ANNOTATIONS]:
        raise ClassError(f"class {name}: annotation {quote(unknown[0])} cannot be set by a class; it may set {', '.join(ANNOTATIONS)}")
    for field, percent in (("memoryPercent", profile.memory_percent), ("cores", profile.cores)):
        if not 0 <= percent <= units.WHOLE_GPU_PERCENT:
            raise ClassError(f"class {name}: {field}: expected 0 to {units.WHOLE_GPU_PERCENT} percent of a GPU, found {percent}")
    for field, text in (("idleYieldAfter", profile.idle_yield_after), ("idleEndAfter", profile.idle_end_after)):
        if text and not parse_duration(text):
            raise ClassError(
                f"class {name}: {field}: expected a time such as 30m, 12h or 2d, found {quote(text)}: correct it, or remove it"
            )
    try:
        pod_preferences(profile.annotations)
        check_durations(profile.annotations)
        check_movable(profile.annotations)
    except RequestError as exc:
        raise ClassError(f"class {name}: {exc}") from exc
