# SPDX-License-Identifier: Apache-2.0
"""Gangs: pods that start together or not at all. A gang has a name in a namespace, and a minimum number of members, also by role."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from aliquot import contract
from aliquot.contract.errors import quote
from aliquot.placement.request import RequestError
from scheduler_plugin.core.cluster.domains import DomainRequest, domain_request
from scheduler_plugin.core.cluster.pods import PodFacts
from scheduler_plugin.core.cluster.roles import Role, parse_count, parse_role

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
    role: Role | None = None
    """The pod's own role. Other members can have other roles."""

    @property
    def key(self) -> tuple[str, str]:
        """Namespace and name, which all members have in common."""
        return self.namespace, self.name


_OF_ROLES: Final = (contract.ANNOTATION_GANG_ROLE, contract.ANNOTATION_GANG_ROLE_MIN)
_OF_GANGS: Final = (contract.ANNOTATION_DOMAIN, contract.ANNOTATION_GANG_MAX, contract.ANNOTATION_GANG_RESTART, *_OF_ROLES)


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
    least, most = parse_count(contract.ANNOTATION_GANG_MIN, minimum, 1), annotations.get(contract.ANNOTATION_GANG_MAX)
    maximum = None if most is None else parse_count(contract.ANNOTATION_GANG_MAX, most, least)
    return Gang(namespace, name, least, domain, maximum, _restarts_whole(annotations), parse_role(annotations, least))


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
