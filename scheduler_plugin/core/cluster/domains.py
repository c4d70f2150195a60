# SPDX-License-Identifier: Apache-2.0
"""Domains: groups of nodes with a fast network between them, such as an NVLink fabric, a rack or a zone.

A level says how nodes are grouped. ``clique`` is the NVLink fabric that the agent reports. ``rack``, ``zone`` and label keys group nodes by
a label. A node without a group on a level is a domain of its own, because a single node is nearer than any group.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from aliquot import contract
from aliquot.contract.errors import quote
from aliquot.contract.gpunode import GpuNode
from aliquot.placement.request import RequestError

CLIQUE: Final = "clique"
RACK: Final = "rack"
ZONE: Final = "zone"
ZONE_LABEL: Final = "topology.kubernetes.io/zone"
HOST_LABEL: Final = "kubernetes.io/hostname"
"""The level on which every node is a domain of its own."""
PLACE_WORDS: Final = ("topology", "rack", "zone", "clique", "rdma")
"""A node label with one of these in its key says where the node is. Other labels are not kept: a node has dozens."""

Labels = Mapping[str, str]


class DomainMode(StrEnum):
    """How much a gang needs to be in one domain."""

    REQUIRED = "required"
    """It waits until one domain has room for all members."""
    PREFERRED = "preferred"
    """It takes as few domains as possible."""


@dataclass(frozen=True, slots=True)
class DomainRequest:
    """What a gang asks for."""

    mode: DomainMode
    level: str = CLIQUE


def domain_request(annotations: Mapping[str, str]) -> DomainRequest | None:
    """Parse what a pod asks for; None without a request. Raises RequestError."""
    mode, level = annotations.get(contract.ANNOTATION_DOMAIN), annotations.get(contract.ANNOTATION_DOMAIN_LEVEL)
    if mode is None:
        if level is not None:
            raise RequestError(
                f"{contract.ANNOTATION_DOMAIN_LEVEL} is set without {contract.ANNOTATION_DOMAIN}: set it to required or preferred"
            )
        return None
    if mode not in tuple(DomainMode):
        raise RequestError(f"{contract.ANNOTATION_DOMAIN}: expected {' or '.join(DomainMode)}, found {quote(mode)}")
    level = CLIQUE if level is None else level
    if not is_level(level):
        raise RequestError(
            f"{contract.ANNOTATION_DOMAIN_LEVEL}: expected {CLIQUE}, {RACK}, {ZONE}, {HOST_LABEL}, or the key of a node label with one of "
            f"{', '.join(PLACE_WORDS)} in it, found {quote(level)}"
        )
    return DomainRequest(DomainMode(mode), level)


def is_level(text: str) -> bool:
    """Whether a text names a level that nodes can have."""
    return text == HOST_LABEL or _is_place(text)


def place_labels(labels: Labels) -> Labels:
    """Return the labels of a node that say where it is."""
    return {key: value for key, value in labels.items() if value and _is_place(key)}


def _is_place(key: str) -> bool:
    return any(word in key.lower() for word in PLACE_WORDS)


def domain_of(name: str, gpu: GpuNode | None, labels: Labels, level: str) -> str:
    """Return the domain of a node on a level; the node's name if it has no other."""
    if level == CLIQUE:
        cliques = {entry.fabric_clique for entry in gpu.devices} if gpu is not None else set[str]()
        return next(iter(cliques)) or name if len(cliques) == 1 else name
    if level == RACK:
        return next((labels[key] for key in sorted(labels) if key.rpartition("/")[2].lower().endswith(RACK)), name)
    return labels.get(ZONE_LABEL if level == ZONE else level, name)
