# SPDX-License-Identifier: Apache-2.0
"""Translates the annotations of other systems for placement and enforcement, and HAMi's priority, into ours.

They are read on any GPU pod: users often keep them when they rewrite the resources by hand.
"""

import re
from collections.abc import Mapping
from fractions import Fraction
from math import ceil
from typing import Final

from aliquot import contract
from aliquot.contract.errors import quote
from aliquot.contract.model import CoresMode, NumaMode, Policy, Priority
from aliquot.placement.request import RequestError
from scheduler_plugin.webhook.amounts import Options, take_amount, whole
from scheduler_plugin.webhook.draft import Draft, DraftContainer
from scheduler_plugin.webhook.per_gpu import MIG_MODE, MODES, asking_system

_LISTS: Final = {
    "nvidia.com/use-gputype": contract.ANNOTATION_GPU_TYPE,
    "nvidia.com/nouse-gputype": contract.ANNOTATION_GPU_TYPE_NOT,
    "nvidia.com/use-gpuuuid": contract.ANNOTATION_GPU_UUID,
    "nvidia.com/nouse-gpuuuid": contract.ANNOTATION_GPU_UUID_NOT,
    "volcano.sh/vgpu-use-gpuuuid": contract.ANNOTATION_GPU_UUID,
    "volcano.sh/vgpu-nouse-gpuuuid": contract.ANNOTATION_GPU_UUID_NOT,
    "nvidia.com/include-gpu-type": contract.ANNOTATION_GPU_TYPE,
    "nvidia.com/exclude-gpu-type": contract.ANNOTATION_GPU_TYPE_NOT,
    "nvidia.com/include-gpu-uuid": contract.ANNOTATION_GPU_UUID,
    "nvidia.com/exclude-gpu-uuid": contract.ANNOTATION_GPU_UUID_NOT,
}
_BLANKS_IN_LISTS: Final = ("volcano.sh/", "nvidia.com/include-", "nvidia.com/exclude-")
"""Systems that skip empty entries of a list; in HAMi's they are mistakes."""
_HAMI_TRUE: Final = ("1", "t", "T", "TRUE", "true", "True")
"""The values that HAMi reads as true. Source: Go's strconv.ParseBool."""

_HAMI_NUMA: Final = "nvidia.com/numa-bind"
_MODES: Final = {"hami-core": "shim", "mps": "mps"}
_POLICIES: Final = {"binpack": Policy.BINPACK, "spread": Policy.SPREAD, "topology-aware": Policy.TOPOLOGY}
_POLICY_PAIRS: Final = (
    ("hami.io/gpu-scheduler-policy", "hami.io/node-scheduler-policy"),
    ("nvidia.com/device-scheduler-policy", "nvidia.com/node-scheduler-policy"),
)
"""For each system the policy among GPUs, which decides, and that among nodes."""
_NO_POLICY: Final = "none"

_KAI_DELAY: Final = "kai.scheduler/preemption-delay"
_GO_UNIT_SECONDS: Final = {"h": 3600, "m": 60, "s": 1}
_GO_DURATION_PART: Final = re.compile(r"([0-9]{1,7}(?:\.[0-9]{1,6})?)([hms])", re.ASCII)

_CHOICES: Final[Mapping[str, Mapping[str, tuple[str, str] | None]]] = {
    "hami.io/numa-alignment": {
        "none": None,
        "best-effort": (contract.ANNOTATION_NUMA, NumaMode.PREFER),
        "strict": (contract.ANNOTATION_NUMA, NumaMode.STRICT),
    },
    "nvidia.com/device-topology-mode": {
        "none": None,
        "numa": (contract.ANNOTATION_NUMA, NumaMode.PREFER),
        "numa-strict": (contract.ANNOTATION_NUMA, NumaMode.STRICT),
        "link": (contract.ANNOTATION_PLACEMENT, Policy.TOPOLOGY),
    },
    "kai.scheduler/safe-to-consolidate": {
        "true": None,
        "false": (contract.ANNOTATION_MOVABLE, "false"),
    },
    "nvidia.com/vgpu-compute-policy": {
        "fixed": None,
        "balance": (contract.ANNOTATION_CORES_MODE, CoresMode.WEIGHT),
    },
}
"""Annotations with one word as the value: what each means, or None for our default."""


def translate_preferences(draft: Draft, options: Options) -> None:
    """Set our annotations from those of other systems. Raises RequestError, ContractError."""
    for theirs, ours in _LISTS.items():
        if (text := _list(draft, theirs)) is not None:
            draft.set_annotation(ours, text, theirs)
    if draft.annotations.get(_HAMI_NUMA) in _HAMI_TRUE:
        draft.set_annotation(contract.ANNOTATION_NUMA, NumaMode.STRICT, _HAMI_NUMA)
    for name in _CHOICES:
        _translate_choice(draft, name)
    for name in MODES:
        _translate_mode(draft, name, options)
    for of_gpus, of_nodes in _POLICY_PAIRS:
        _translate_policy(draft, of_gpus, of_nodes)
    _translate_delay(draft)
    for container in draft.containers:
        if (priority := take_amount(container, options.hami.priority, whole)) is not None:
            draft.set_annotation(contract.ANNOTATION_PRIORITY, Priority.LOW if priority else Priority.HIGH, options.hami.priority)


def _list(draft: Draft, name: str) -> str | None:
    text = draft.annotations.get(name)
    if text is None or not name.startswith(_BLANKS_IN_LISTS):
        return text
    return ",".join(filter(None, (part.strip() for part in text.split(",")))) or None


def _translate_choice(draft: Draft, name: str) -> None:
    if (text := draft.annotations.get(name)) is None:
        return
    meanings = _CHOICES[name]
    if text not in meanings:
        raise RequestError(f"annotation {name}: {quote(text)} is not supported: write {', '.join(meanings)}, or remove it")
    if (meaning := meanings[text]) is not None:
        draft.set_annotation(*meaning, name)


def _translate_mode(draft: Draft, name: str, options: Options) -> None:
    text = draft.annotations.get(name)
    if text is None or (text == MIG_MODE and any(_asks_mig(container, options) for container in draft.containers)):
        return
    if text not in _MODES:
        raise RequestError(
            f"annotation {name}: {quote(text)} is not supported: ask for a MIG instance by its resource, such as "
            f"{contract.RESOURCE_MIG_PREFIX}1g.10gb: 1, or write hami-core"
        )
    draft.set_annotation(contract.ANNOTATION_ISOLATION, _MODES[text], name)


def _asks_mig(container: DraftContainer, options: Options) -> bool:
    """Whether a container asks for MIG instances, by their resource or by the memory of one."""
    named = any(name.startswith(contract.RESOURCE_MIG_PREFIX) for name in container.limits)
    return named or asking_system(container, options) is not None


def _translate_policy(draft: Draft, of_gpus: str, of_nodes: str) -> None:
    source = of_gpus if of_gpus in draft.annotations else of_nodes
    if draft.annotations.get(of_nodes, draft.annotations.get(source)) != draft.annotations.get(source):
        draft.warnings.append(f"annotation {of_nodes} has no effect next to {source}: one placement policy applies to nodes and their GPUs")
    for word in filter(None, (part.strip() for part in draft.annotations.get(source, "").split(","))):
        if word in _POLICIES:
            draft.set_annotation(contract.ANNOTATION_PLACEMENT, _POLICIES[word], source)
        elif word == "numa":
            draft.set_annotation(contract.ANNOTATION_NUMA, NumaMode.PREFER, source)
        elif word != _NO_POLICY:
            raise RequestError(
                f"annotation {source}: {quote(word)} is not supported: write {', '.join(_POLICIES)} or numa, "
                f"or {contract.ANNOTATION_ISOLATION}: exclusive for a whole GPU"
            )


def _translate_delay(draft: Draft) -> None:
    """Set the delay before others end for the pod, in whole seconds. As in KAI, a text that is no duration has no effect."""
    text = draft.annotations.get(_KAI_DELAY)
    if text is None:
        return
    parts = _GO_DURATION_PART.findall(text)
    if not parts or "".join(amount + unit for amount, unit in parts) != text:
        draft.warnings.append(f"annotation {_KAI_DELAY} has no effect: expected a duration such as 30s or 1h30m, found {quote(text)}")
        return
    seconds = sum(Fraction(amount) * _GO_UNIT_SECONDS[unit] for amount, unit in parts)
    draft.set_annotation(contract.ANNOTATION_PREEMPTION_DELAY, f"{ceil(seconds)}s", _KAI_DELAY)
