# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import pytest

from agent.core.owners import used_by, uses_unknown_claim
from tests.unit.agent.builders import grant, ids
from tests.unit.agent.claim_builders import claim_grant, user


@pytest.mark.parametrize(
    ("pods", "unknown"),
    [
        pytest.param([], False, id="no pod"),
        pytest.param([user("a", "train")], False, id="all requests of a known claim"),
        pytest.param([user("a", "train", "gpu")], False, id="known request"),
        pytest.param([user("a", "train", "other")], True, id="another request of a known claim"),
        pytest.param([user("a", "train"), user("b", "foreign")], True, id="unknown claim"),
        pytest.param([user("b", "foreign", phase="Failed")], False, id="ended pod"),
    ],
)
def test_unknown_claims_are_those_of_pods_without_grant(pods, unknown):
    assert uses_unknown_claim(pods, [claim_grant("train")]) is unknown


def test_pod_uses_grants_of_its_claims_and_its_own():
    pod = user("a", "train", "gpu")
    mine = [claim_grant("train"), grant(ids("0:0"), of=pod)]
    others = [
        claim_grant("other"),
        replace(claim_grant("train"), namespace="elsewhere"),
        claim_grant("other", of=pod),
        grant(ids("0:1"), of=user("b", "train")),
    ]
    assert used_by(pod, [*others, *mine]) == tuple(mine)
