# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import pytest

from agent.core.claim_groups import groups_of, of_every_request
from agent.core.claims import decode_claim
from agent.core.ledger import ClaimRequest, Grant
from agent.core.refusal import Reason, Refusal
from aliquot.contract.model import Pod
from tests.unit.agent.claim_builders import body, claim_grant, claim_object, ref, result, using


def groups(names: str, *pods: Pod, prepared: tuple[Grant, ...] = (), known: tuple[Pod, ...] | None = None, reserved: bool = True):
    """The names in each group, or the refusal. Args: known: pods in the watch, unless all. reserved: for the pods; else for a group."""
    claim = decode_claim(body(claim_object("train", *(result(0, request=name) for name in names), pods=pods if reserved else ())))
    claim = replace(claim, reserved=True)  # for its pods, or for a group
    found = groups_of(ref("train"), claim, {pod.uid: pod for pod in (pods if known is None else known)}, prepared)
    return found if isinstance(found, Refusal) else ["".join(group.names) for group in found]


def prepared(*joint: str) -> tuple[Grant, ...]:
    """The grants of a claim that was prepared with these groups."""
    one, every = claim_grant("train"), tuple(sorted("".join(joint)))
    requests = [ClaimRequest(one.owner_uid, "train", names[0], (), every, joined=tuple(names[1:])) for names in joint]
    return tuple(replace(one, grant_id=request.request, claim=request) for request in requests)


ALL = [""]


@pytest.mark.parametrize(
    ("names", "pods", "wanted"),
    [
        pytest.param("a", [using("p", "train", main=ALL)], ["a"], id="one request"),
        pytest.param("ab", [using("p", "train", main=ALL)], ["ab"], id="all of two"),
        pytest.param("abcd", [using("p", "train", main=ALL)], ["abcd"], id="all of four"),
        pytest.param("abc", [using("p", "train", main="abc")], ["abc"], id="all by name"),
        pytest.param("ab", [using("p", "train", main="ba")], ["ab"], id="named in another order"),
        pytest.param("ab", [using("p", "train", main=["a", ""])], ["ab"], id="one by name and all"),
        pytest.param("ab", [using("p", "train", one="a", two="b")], ["a", "b"], id="one for each container"),
        pytest.param("abcd", [using("p", "train", one="ac", two="bd")], ["ac", "bd"], id="two for each container"),
        pytest.param("abc", [using("p", "train", main="ac")], ["ac", "b"], id="one that no container uses"),
        pytest.param("ab", [using("p", "train", one=ALL, two="ab")], ["ab"], id="containers share both"),
        pytest.param("ab", [using("p", "train", one=ALL), using("q", "train", one=ALL)], ["ab"], id="pods share both"),
        pytest.param("ab", [using("p", "train", one="a"), using("q", "train", one="b")], ["a", "b"], id="one for each pod"),
        pytest.param("ab", [using("p", "other", main=ALL)], ["a", "b"], id="a container of another claim"),
    ],
)
def test_requests_that_a_container_uses_together_are_one_group(names, pods, wanted):
    assert groups(names, *pods) == wanted


@pytest.mark.parametrize(
    ("names", "pods", "parts"),
    [
        pytest.param(
            "ab",
            [using("p", "train", one=ALL, two="b")],
            ["p/one uses requests a and b together", "p/two uses request b"],
            id="both and one",
        ),
        pytest.param(
            "ab",
            [using("p", "train", one="b", two=ALL)],
            ["p/two uses requests a and b together", "p/one uses request b"],
            id="one and both",
        ),
        pytest.param(
            "abc", [using("p", "train", one="ab", two="bc")], ["p/one uses requests a and b together", "requests b and c"], id="overlap"
        ),
        pytest.param("ab", [using("p", "train", one=ALL), using("q", "train", one="a")], ["q/one uses request a"], id="another pod"),
    ],
)
def test_mixed_use_is_refused_with_both_containers_and_a_cure(names, pods, parts):
    refusal = groups(names, *pods)
    assert refusal.reason is Reason.REQUEST_INVALID
    assert [part for part in [*parts, "let both containers use the same requests"] if part not in refusal.message] == []


@pytest.mark.parametrize("reserved", [True, False], ids=["reserved for the pod", "reserved for a group"])
def test_claim_with_several_requests_waits_until_its_pod_is_known(reserved):
    refused = groups("ab", using("p", "train", main=ALL), known=(), reserved=reserved)
    assert isinstance(refused, Refusal)
    assert refused.reason is Reason.NOT_READY
    assert ("has not seen pod p yet" in refused.message) is reserved
    assert groups("a", using("p", "train", main=ALL), known=(), reserved=reserved) == ["a"]


def test_claim_that_no_container_uses_has_separate_grants():
    assert groups("ab", using("p", "train")) == ["a", "b"]


def test_known_pods_decide_when_claim_is_reserved_for_a_group():
    assert groups("ab", using("p", "train", main=ALL), reserved=False) == ["ab"]
    ended = replace(using("p", "train", main=ALL), phase="Failed")
    assert isinstance(groups("ab", ended, reserved=False), Refusal)


def test_use_by_pod_that_has_ended_does_not_matter():
    assert groups("ab", replace(using("q", "train", main="b"), phase="Succeeded"), using("p", "train", main=ALL)) == ["ab"]


@pytest.mark.parametrize("joint", [["ab"], ["a", "b"]])
@pytest.mark.parametrize(
    "pod", [using("p", "train", main=ALL), using("p", "train", one="a", two="b"), using("p", "train", one=ALL, two="b")]
)
def test_what_was_prepared_as_a_whole_stays(joint, pod):
    assert groups("ab", pod, prepared=prepared(*joint)) == joint


def test_claim_prepared_in_part_is_grouped_again():
    assert groups("ab", using("p", "train", main=ALL), prepared=prepared("a", "b")[:1]) == ["ab"]


def test_grants_come_once_in_order_of_requests():
    joint, single = prepared("ac", "b")
    assert of_every_request([single, joint]) == [joint, single]
    assert of_every_request([joint]) == of_every_request([single]) == ()
