# SPDX-License-Identifier: Apache-2.0
"""Translates the topology of Kueue and KAI, on a pod that is in a gang of ours, into a domain of the gang.

Kueue names node labels on the pods of a pod set. If it manages the pod, it also chooses the nodes itself; both together agree. A label that
cannot be a level here is left to Kueue. KAI's scheduler does not see the pod, so such a label of KAI is refused if KAI requires it. So is
what KAI requires of a pod that is in no gang. What it only prefers gets a warning.
"""

from collections.abc import Sequence
from typing import Final

from aliquot import contract
from aliquot.contract.errors import quote
from aliquot.placement.request import RequestError
from scheduler_plugin.core.cluster.domains import CLIQUE, HOST_LABEL, PLACE_WORDS, DomainMode, is_level
from scheduler_plugin.webhook.draft import Draft

_KUEUE: Final = {
    "kueue.x-k8s.io/podset-required-topology": DomainMode.REQUIRED,
    "kueue.x-k8s.io/podset-preferred-topology": DomainMode.PREFERRED,
}
_KAI: Final = {
    "kai.scheduler/topology-required-placement": DomainMode.REQUIRED,
    "kai.scheduler/topology-preferred-placement": DomainMode.PREFERRED,
}
_GFD_CLIQUE: Final = "nvidia.com/gpu.clique"
"""The label in which GPU feature discovery writes what our agent reports in the inventory."""


_IN_A_GANG: Final = f"holds for the members of a gang: set {contract.ANNOTATION_GANG} and {contract.ANNOTATION_GANG_MIN}, or remove it"


def translate_topology(draft: Draft) -> None:
    """Set the domain of a gang. Raises RequestError."""
    found = [(name, mode) for name, mode in (_KUEUE | _KAI).items() if name in draft.annotations]
    if contract.ANNOTATION_GANG not in draft.annotations:
        _settle_without_gang(draft, [name for name, _ in found if name in _KAI])
        return
    for name, mode in found[:1]:
        _set_domain(draft, name, mode)
    if len(found) > 1:
        draft.warnings.append(f"annotation {', '.join(name for name, _ in found[1:])} has no effect beside {found[0][0]}")


def _set_domain(draft: Draft, name: str, mode: DomainMode) -> None:
    """Set the domain to the node label that an annotation names. Raises RequestError."""
    key = draft.annotations[name]
    if name in _KAI or (is_level(key) and key != HOST_LABEL):  # Kueue may give each pod set a host of its own
        set_domain(draft, name, mode, key)


def set_domain(draft: Draft, source: str, mode: DomainMode, key: str) -> None:
    """Set the domain of the pod's gang to a node label. Raises RequestError."""
    if not is_level(key):
        trouble = (
            f"{quote(key)} cannot be a level here: expected {HOST_LABEL}, or a node label with one of {', '.join(PLACE_WORDS)} in its key"
        )
        if mode is DomainMode.REQUIRED:
            raise RequestError(f"{source}: {trouble}")
        draft.warnings.append(f"{source} has no effect: {trouble}")
        return
    draft.set_annotation(contract.ANNOTATION_DOMAIN, mode, source)
    draft.set_annotation(contract.ANNOTATION_DOMAIN_LEVEL, CLIQUE if key == _GFD_CLIQUE else key, source)


def _settle_without_gang(draft: Draft, found: Sequence[str]) -> None:
    for name in found:
        if _KAI[name] is DomainMode.REQUIRED:
            raise RequestError(f"annotation {name}: {quote(draft.annotations[name])} {_IN_A_GANG}")
        draft.warnings.append(f"annotation {name} has no effect: it {_IN_A_GANG}")
