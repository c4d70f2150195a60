# SPDX-License-Identifier: Apache-2.0
"""Which pods a PodDisruptionBudget counts, and how far some ends exceed it."""

from dataclasses import replace

import msgspec
import pytest

from scheduler_plugin.core.cluster.budgets import Budget, Budgets, violations
from scheduler_plugin.wiring.cluster import decode_budget
from tests.unit.scheduler_plugin.builders import make_pod

SERVER = replace(make_pod("u1"), labels=(("app", "server"), ("tier", "gold")))


def read(selector: object, **status: object) -> Budget:
    """Read a budget as the API server writes it."""
    metadata = {"namespace": "team", "name": "b"}
    return decode_budget(msgspec.Raw(msgspec.json.encode({"metadata": metadata, "spec": {"selector": selector}, "status": status})))


@pytest.mark.parametrize(
    ("selector", "covered"),
    [
        ({"matchLabels": {"app": "server"}}, True),
        ({"matchLabels": {"app": "server", "tier": "silver"}}, False),
        ({"matchExpressions": [{"key": "app", "operator": "In", "values": ["client", "server"]}]}, True),
        ({"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}, False),
        ({"matchExpressions": [{"key": "app", "operator": "NotIn", "values": ["server"]}]}, False),
        ({"matchExpressions": [{"key": "zone", "operator": "NotIn", "values": ["a"]}]}, True),
        ({"matchExpressions": [{"key": "app", "operator": "Exists"}]}, True),
        ({"matchExpressions": [{"key": "app", "operator": "DoesNotExist"}]}, False),
        ({"matchLabels": {"app": "server"}, "matchExpressions": [{"key": "tier", "operator": "DoesNotExist"}]}, False),
        ({}, True),
        (None, False),
    ],
)
def test_a_selector_means_what_it_means_to_the_api_server(selector, covered):
    budgets = Budgets()
    budgets.put(read(selector))
    assert bool(budgets.covering(SERVER)) is covered


def test_pods_of_other_namespaces_and_those_let_go_already_are_not_counted():
    budgets, everybody = Budgets(), read({}, disruptionsAllowed=1, disruptedPods={"pod-u1": "2026-11-22T00:00:00Z"})
    budgets.put(everybody)
    assert everybody.allowed == 1
    assert not budgets.covering(SERVER)
    assert budgets.covering(replace(SERVER, name="another")) == {everybody.key}
    assert not budgets.covering(replace(SERVER, name="another", namespace="elsewhere"))


def test_a_selector_that_cannot_be_read_is_an_error():
    with pytest.raises(msgspec.ValidationError, match="Near"):
        read({"matchExpressions": [{"key": "app", "operator": "Near"}]})


def test_budget_decreases_with_each_ending_pod_and_excess_is_rejected():
    budgets = Budgets()
    budget = read({"matchLabels": {"app": "server"}}, disruptionsAllowed=2)
    budgets.replace([budget])
    servers = [replace(SERVER, uid=f"u{number}", name=f"server-{number}") for number in range(4)]
    other = replace(SERVER, uid="o", name="other", labels=(("app", "client"),))
    assert budgets.allowed_after([servers[0], other], [budget.key]) == {budget.key: 1}
    assert budgets.allowed_after(servers, [budget.key]) == {budget.key: 0}
    covered = [budgets.covering(pod) for pod in (*servers, other)]
    assert violations(covered, budgets.allowed_after([], [budget.key])) == 2
    assert violations(covered[3:], budgets.allowed_after([], [budget.key])) == 0


def test_budgets_come_change_and_go():
    budgets, budget = Budgets(), read({})
    budgets.put(budget)
    budgets.put(replace(budget, allowed=3))
    assert budgets.allowed_after([], budgets.covering(SERVER)) == {budget.key: 3}
    budgets.drop(budget)
    budgets.drop(budget)
    assert budgets.covering(SERVER) == frozenset()
    budgets.put(budget)
    budgets.replace([])
    assert budgets.covering(SERVER) == frozenset()


def test_budgets_that_allow_more_than_before_are_reported_once():
    budgets, covers_all = Budgets(), read({}, disruptionsAllowed=1)
    budgets.put(covers_all)
    assert not budgets.take_loosened(), "a new one lets nobody go who might not before"
    budgets.put(replace(covers_all, allowed=0))
    assert not budgets.take_loosened()
    budgets.replace([replace(covers_all, allowed=0)])
    assert not budgets.take_loosened(), "listed again"
    budgets.put(covers_all)
    assert [budget.allowed for budget in budgets.take_loosened()] == [0]
    assert not budgets.take_loosened()
    budgets.put(replace(covers_all, selector=None))
    assert [budget.counts(SERVER) for budget in budgets.take_loosened()] == [True]
    budgets.put(covers_all)
    budgets.take_loosened()
    budgets.replace([])
    assert [budget.counts(replace(SERVER, namespace=namespace)) for budget in budgets.take_loosened() for namespace in ("team", "x")] == [
        True,
        False,
    ]
