"""Gangs: pods that start together or not at all, a name in a namespace and the number of members that must run."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from placement.request import RequestError
from proto import contract
from proto.errors import quote
from scheduler_plugin.core.pods import PodFacts

MAX_MEMBERS: Final = 4096


@dataclass(frozen=True, slots=True)
class Gang:
    """What a pod says of its gang."""

    namespace: str
    name: str
    minimum: int

    @property
    def key(self) -> tuple[str, str]:
        """What its members have in common."""
        return self.namespace, self.name


class Standing(NamedTuple):
    """How far a gang is that does not run yet."""

    planned: bool = False
    """Its members are expected somewhere, and it may still start there."""
    pauses: bool = False
    """It held room without starting, and makes no new plan for a while."""
    is_settled: bool = False
    """Members that wait at their nodes stay there whoever else then has no place: they made way often enough."""
    in_vain: bool = False
    """It was planned in vain: nothing was freed since, or that is so recent that it rests from planning. No new plan is made now."""

    @property
    def makes_plans(self) -> bool:
        """Whether its members may be expected elsewhere now."""
        return not (self.pauses or self.in_vain)


def gang_of(namespace: str, annotations: Mapping[str, str]) -> Gang | None:
    """Read a pod's gang, None when it is in none. Raises RequestError."""
    name, minimum = annotations.get(contract.ANNOTATION_GANG), annotations.get(contract.ANNOTATION_GANG_MIN)
    if name is None and minimum is None:
        return None
    if not name or minimum is None:
        raise RequestError(f"{contract.ANNOTATION_GANG} names a gang and {contract.ANNOTATION_GANG_MIN} its least members: give both")
    if not minimum.isascii() or not minimum.isdigit() or not 1 <= int(minimum[:9]) <= MAX_MEMBERS or len(minimum) > len(str(MAX_MEMBERS)):
        raise RequestError(f"{contract.ANNOTATION_GANG_MIN}: expected a number from 1 to {MAX_MEMBERS}, found {quote(minimum)}")
    return Gang(namespace, name, int(minimum))


def gang_of_pod(pod: PodFacts) -> Gang | None:
    """Read a pod's gang; None also when what it says cannot be read."""
    try:
        return gang_of(pod.namespace, pod.gpu.annotations) if pod.gpu is not None else None
    except RequestError:
        return None
