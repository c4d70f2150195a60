# SPDX-License-Identifier: Apache-2.0
"""Roles in gangs: what a member may state, and what contradicts the other members."""

import pytest

from aliquot import contract
from aliquot.placement.request import RequestError
from scheduler_plugin.core.cluster.gang import gang_of
from scheduler_plugin.core.cluster.pods import PodFacts
from scheduler_plugin.core.cluster.roles import Role, conflict_of, counted, lacking_roles
from tests.unit.scheduler_plugin.builders import make_pod

GANG = {contract.ANNOTATION_GANG: "train", contract.ANNOTATION_GANG_MIN: "3"}


def of_role(name: str, minimum: object, gang_minimum: int = 3) -> dict[str, str]:
    sizes = {contract.ANNOTATION_GANG_MIN: str(gang_minimum), contract.ANNOTATION_GANG_ROLE_MIN: str(minimum)}
    return GANG | sizes | {contract.ANNOTATION_GANG_ROLE: name}


def members(*annotations: dict[str, str]) -> list[PodFacts]:
    return [make_pod(f"m{number}", annotations=one, vgpu="1") for number, one in enumerate(annotations)]


def test_role_is_part_of_the_gang():
    gang = gang_of("team", of_role("worker", 0))
    assert gang is not None
    assert gang.role == Role("worker", 0)


@pytest.mark.parametrize("minimum", ["-1", "4", "two", "", "1.0", "٣"])
def test_minimum_of_role_is_a_number_up_to_the_gang(minimum):
    with pytest.raises(RequestError, match=r"gang-role-min: expected a number from 0 to 3"):
        gang_of("team", of_role("worker", minimum))


@pytest.mark.parametrize("name", [contract.ANNOTATION_GANG_ROLE, contract.ANNOTATION_GANG_ROLE_MIN])
def test_half_of_a_role_is_refused(name):
    with pytest.raises(RequestError, match="set both"):
        gang_of("team", GANG | {name: "2"})
    with pytest.raises(RequestError, match="for the pods of a gang"):
        gang_of("team", {name: "2"})


def test_role_counts_up_to_its_minimum_and_others_always():
    worker, master = of_role("worker", 2), of_role("master", 1)
    assert counted(members(worker, worker, worker, worker)) == 2
    assert counted(members(worker, worker, worker, master, master)) == 3
    assert counted(members(of_role("burst", 0), GANG, GANG, GANG, GANG)) == 4


def test_resized_role_counts_up_to_its_largest_minimum():
    old, new = of_role("worker", 2, 3), of_role("worker", 4, 5)
    assert counted(members(old, old, new, new, new)) == 4
    assert conflict_of(members(old, old, new, new, new), 5) == ""


@pytest.mark.parametrize(
    ("stated", "says"),
    [
        ([of_role("worker", 2), of_role("worker", 1)], "members of role worker state 1 and 2"),
        ([of_role("worker", 3), of_role("master", 1)], "add up to 4, but aliquot.dev/gang-min is 3"),
        ([of_role("worker", 2), of_role("master", 1)], ""),
        ([of_role("worker", 2), GANG, GANG], ""),
    ],
)
def test_members_that_contradict_each_other_are_named(stated, says):
    conflict = conflict_of(members(*stated), 3)
    assert says in conflict
    assert bool(conflict) == bool(says)


@pytest.mark.parametrize(
    ("stated", "lacking", "says"),
    [
        ([of_role("worker", 2)] * 2, 1, "no role other than worker (2) has members"),
        ([of_role("worker", 2), of_role("master", 1)], 1, "role worker has 1 of 2"),
        ([of_role("worker", 2)], 2, "role worker has 1 of 2 and no role other than worker (2) has members"),
        ([GANG], 2, ""),
    ],
)
def test_roles_with_too_few_members_are_named(stated, lacking, says):
    assert lacking_roles(members(*stated), lacking) == says
