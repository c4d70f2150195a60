# SPDX-License-Identifier: Apache-2.0
"""Gangs: pods that start together or not at all. A gang has a name in a namespace, and a minimum number of members."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from aliquot import contract
from aliquot.contract.errors import quote
from aliquot.placement.request import RequestError
from scheduler_plugin.core.cluster.domains import DomainRequest, domain_request
from scheduler_plugin.core.cluster.pods import PodFacts

MAX_MEMBERS: Final = 4096
WHOLE: Final = "whole"


@dataclass(frozen=True, slots=True)
class Gang:
    """The gang of a pod, as its annotations state it."""

    namespace: str
    name: str
    minimum: int
    domain: DomainRequest | None = None
    maximum: int | None = None
    """How many members may run at the same time."""
    restarts_whole: bool = False
    """Whether all members are to be restarted if too few are left."""

    @property
    def key(self) -> tuple[str, str]:
        """Namespace and name, which all members have in common."""
        return self.namespace, self.name


_OF_GANGS: Final = (contract.ANNOTATION_DOMAIN, contract.ANNOTATION_GANG_MAX, contract.ANNOTATION_GANG_RESTART)


class Standing(NamedTuple):
    """The state of a gang that does not run yet."""

    planned: bool = False
    """Its members have reservations, and it may still start there."""
    pauses: bool = False
    """It reserved room without starting, and makes no new plan for a while."""
    is_settled: bool = False
    """Members that wait at their nodes stay there, even if others then have no room: they were moved often enough."""
    planning_failed: bool = False
    """Planning failed, and since then no room was freed or too little time passed. No new plan is made now."""

    @property
    def makes_plans(self) -> bool:
        """Whether a new plan may move its members now."""
        return not (self.pauses or self.planning_failed)


def gang_of(namespace: str, annotations: Mapping[str, str]) -> Gang | None:
    """Parse a pod's gang; None for a pod without one. Raises RequestError."""
    name, minimum = annotations.get(contract.ANNOTATION_GANG), annotations.get(contract.ANNOTATION_GANG_MIN)
    domain = domain_request(annotations)
    if name is None and minimum is None:
        if stray := next((other for other in _OF_GANGS if other in annotations), None):
            raise RequestError(f"{stray} is for the pods of a gang: set {contract.ANNOTATION_GANG} too, or remove it")
        return None
    if not name or minimum is None:
        raise RequestError(f"{contract.ANNOTATION_GANG} names a gang and {contract.ANNOTATION_GANG_MIN} its minimum of members: set both")
    least, most = _count(contract.ANNOTATION_GANG_MIN, minimum, 1), annotations.get(contract.ANNOTATION_GANG_MAX)
    maximum = None if most is None else _count(contract.ANNOTATION_GANG_MAX, most, least)
    return Gang(namespace, name, least, domain, maximum, _restarts_whole(annotations))


def _count(annotation: str, text: str, least: int) -> int:
    """Parse a number of members. Raises RequestError."""
    is_number = text.isascii() and text.isdigit() and len(text) <= len(str(MAX_MEMBERS))
    if not is_number or not least <= int(text) <= MAX_MEMBERS:
        raise RequestError(f"{annotation}: expected a number from {least} to {MAX_MEMBERS}, found {quote(text)}")
    return int(text)


def _restarts_whole(annotations: Mapping[str, str]) -> bool:
    """Parse whether a gang restarts whole. Raises RequestError."""
    text = annotations.get(contract.ANNOTATION_GANG_RESTART)
    if text not in (None, WHOLE):
        raise RequestError(f"{contract.ANNOTATION_GANG_RESTART}: expected {WHOLE}, found {quote(text)}: correct it, or remove it")
    return text is not None


def gang_of_pod(pod: PodFacts) -> Gang | None:
    """Parse a pod's gang; None for a pod without one, or with invalid annotations."""
    try:
        return gang_of(pod.namespace, pod.gpu.annotations) if pod.gpu is not None else None
    except RequestError:
        return None
