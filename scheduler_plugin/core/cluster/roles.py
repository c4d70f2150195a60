# SPDX-License-Identifier: Apache-2.0
"""Which members count towards the minimum of their gang: of each role as many as the role's minimum. Pure.

Only the members say which roles there are, so a role without any member is unknown. It is not forgotten for that: the others fill no more
than their own minima, so with ``gang-min`` as the sum of all minima the gang stays incomplete. A member without a role always counts.

Members of one role can state different minima when their owner was resized: then the largest counts, as for gangs. Members with the same
``gang-min`` were created for the same size, so there a difference is a mistake.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from aliquot import contract
from aliquot.contract.errors import quote
from aliquot.placement.request import RequestError
from scheduler_plugin.core.cluster.pods import PodFacts

MAX_MEMBERS: Final = 4096


@dataclass(frozen=True, slots=True)
class Role:
    """The role of a member in its gang."""

    name: str
    minimum: int
    """How many members of this role count towards the minimum of the gang, from 0."""


def parse_role(annotations: Mapping[str, str], gang_minimum: int) -> Role | None:
    """Parse the role of a member; None without one. Raises RequestError."""
    name, minimum = annotations.get(contract.ANNOTATION_GANG_ROLE), annotations.get(contract.ANNOTATION_GANG_ROLE_MIN)
    if name is None and minimum is None:
        return None
    if not name or minimum is None:
        raise RequestError(f"{contract.ANNOTATION_GANG_ROLE} names a role and {contract.ANNOTATION_GANG_ROLE_MIN} its minimum: set both")
    return Role(name, parse_count(contract.ANNOTATION_GANG_ROLE_MIN, minimum, 0, gang_minimum))


def parse_count(annotation: str, text: str, least: int, most: int = MAX_MEMBERS) -> int:
    """Parse a number of members. Raises RequestError."""
    is_number = text.isascii() and text.isdigit() and len(text) <= len(str(MAX_MEMBERS))
    if not is_number or not least <= int(text) <= most:
        raise RequestError(f"{annotation}: expected a number from {least} to {most}, found {quote(text)}")
    return int(text)


def role_of(member: PodFacts) -> Role | None:
    """Return the role of a pod that is known as a member of a gang, so its annotations are valid; None without one."""
    annotations = {} if member.gpu is None else member.gpu.annotations
    name = annotations.get(contract.ANNOTATION_GANG_ROLE)
    return None if name is None else _role(name, annotations[contract.ANNOTATION_GANG_ROLE_MIN])


@lru_cache(maxsize=1024)
def _role(name: str, minimum: str) -> Role:
    """Return the one object for a role: filter counts thousands of members at each call."""
    return Role(name, int(minimum))


def counting(members: Iterable[PodFacts]) -> list[PodFacts]:
    """Return the members that count towards the minimum: of each role the first ones."""
    pods = list(members)
    roles = [role_of(pod) for pod in pods]
    if not any(roles):
        return pods
    minima, seen, found = minima_of(filter(None, roles)), Counter[str](), []
    for pod, role in zip(pods, roles, strict=True):
        if role is not None:
            seen[role.name] += 1
        if role is None or seen[role.name] <= minima[role.name]:
            found.append(pod)
    return found


def counted(members: Iterable[PodFacts]) -> int:
    """Return how many of these members count towards the minimum of their gang."""
    return len(counting(members))


def extras_last(placed: Sequence[PodFacts], others: Sequence[PodFacts]) -> tuple[list[PodFacts], list[PodFacts]]:
    """Split members without a place into those that count beside the placed ones, and those beyond the minimum of their role."""
    counts = {pod.uid for pod in counting([*placed, *others])}
    return [pod for pod in others if pod.uid in counts], [pod for pod in others if pod.uid not in counts]


def minima_of(roles: Iterable[Role]) -> dict[str, int]:
    """Return the minimum of each role; if its members state different ones, the largest."""
    minima: dict[str, int] = {}
    for role in roles:
        minima[role.name] = max(role.minimum, minima.get(role.name, 0))
    return minima


def by_role(members: Iterable[PodFacts]) -> dict[str, list[PodFacts]]:
    """Return the members of each role; those without one are left out."""
    found: dict[str, list[PodFacts]] = {}
    for pod in members:
        if (role := role_of(pod)) is not None:
            found.setdefault(role.name, []).append(pod)
    return found


def conflict_of(members: Iterable[PodFacts], gang_minimum: int) -> str:
    """Return why the roles that these members state contradict each other; empty if they do not.

    Args: gang_minimum: members with another one are left out: they were created for another size of the gang.
    """
    stated: dict[str, set[int]] = {}
    for pod in members:
        if (role := role_of(pod)) is not None and _gang_minimum(pod) == gang_minimum:
            stated.setdefault(role.name, set()).add(role.minimum)
    for name, minima in sorted(stated.items()):
        if len(minima) > 1:
            found = " and ".join(map(str, sorted(minima)))
            return f"members of role {name} state {found} as {contract.ANNOTATION_GANG_ROLE_MIN}: give all of them the same"
    total = sum(max(minima) for minima in stated.values())
    if total > gang_minimum:
        return f"the minima of its roles add up to {total}, but {contract.ANNOTATION_GANG_MIN} is {gang_minimum}: set it to the sum"
    return ""


def lacking_roles(members: Iterable[PodFacts], lacking: int) -> str:
    """Say which roles have too few members; empty if no member has a role. Args: lacking: how many the gang lacks."""
    pods = list(members)
    roles = by_role(pods)
    minima = minima_of(role for pod in pods if (role := role_of(pod)) is not None)
    short = {name: minima[name] - len(roles[name]) for name in sorted(roles) if len(roles[name]) < minima[name]}
    texts = [f"role {name} has {len(roles[name])} of {minima[name]}" for name in short]
    if roles and sum(short.values()) < lacking:
        names = ", ".join(f"{name} ({minima[name]})" for name in sorted(roles))
        texts.append(f"no role other than {names} has members")
    return " and ".join(texts)


def _gang_minimum(pod: PodFacts) -> int:
    return 0 if pod.gpu is None else int(pod.gpu.annotations[contract.ANNOTATION_GANG_MIN])
