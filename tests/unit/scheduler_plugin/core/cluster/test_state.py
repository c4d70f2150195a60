# SPDX-License-Identifier: Apache-2.0
"""What a change of a pod or an inventory changes in the state, and what it does not: work that no change asks for."""

from dataclasses import replace
from typing import Any

import pytest

from aliquot import contract
from scheduler_plugin.core.cluster.pods import Use
from scheduler_plugin.core.cluster.state import ClusterState, Reservation
from scheduler_plugin.core.score.cost import HostDemand
from tests.unit.scheduler_plugin.builders import make_node, make_pod, make_share


def test_an_inventory_that_changes_keeps_its_name_s_row():
    state = ClusterState()
    state.set_gpu_node(make_node("n1", 2))
    state.set_gpu_node(make_node("n2", 2))
    named, row = state.naming_count, state.row_of("n1")
    state.set_gpu_node(make_node("n1", 2, cordoned=True))
    assert (state.naming_count, state.row_of("n1")) == (named, row), "all names are looked up again"
    state.drop_gpu_node("n1")
    assert state.naming_count > named
    assert state.row_of("n1") is None


def test_a_pod_that_is_listed_again_as_it_was_changes_nothing():
    state = ClusterState()
    state.set_gpu_node(make_node("n1", 2))
    state.replace_pods([make_pod("bound", node="n1", vgpu="1"), make_pod("waits", vgpu="1")])
    changed, noted = state.columns.change_count, state.moment().position
    state.replace_pods([make_pod("bound", node="n1", vgpu="1"), make_pod("waits", vgpu="1")])
    assert (state.columns.change_count, state.moment().position) == (changed, noted)


def in_gang(name: str | None) -> dict[str, str]:
    return {} if name is None else {contract.ANNOTATION_GANG: name, contract.ANNOTATION_GANG_MIN: "2"}


def members(state: ClusterState, name: str) -> set[str]:
    return {pod.uid for pod in state.gang_members(("team", name))}


@pytest.mark.parametrize("later", ["b", None], ids=["another gang", "no gang"])
def test_pod_that_changes_gang_leaves_former_one(later):
    state = ClusterState()
    for uid in ("u1", "u2"):
        state.set_pod(make_pod(uid, annotations=in_gang("a"), vgpu="1"))
    state.set_pod(make_pod("u1", annotations=in_gang(later), vgpu="1"))
    assert members(state, "a") == {"u2"}
    assert members(state, "b") == ({"u1"} if later else set())
    state.drop_pod("u1")
    assert (members(state, "a"), members(state, "b")) == ({"u2"}, set())
    state.drop_pod("u2")
    assert members(state, "a") == set()


def test_only_pod_that_completes_gang_is_worth_retry():
    state, counts = ClusterState(), []
    pods = [make_pod(uid, annotations=in_gang("a"), vgpu="1") for uid in ("u1", "u2", "u3", "u4", "u5")]
    single = {contract.ANNOTATION_GANG: "a", contract.ANNOTATION_GANG_MIN: "5"}
    for pod in (
        pods[0],
        replace(pods[1], gates=("example.com/quota",)),
        replace(pods[2], deletion_requested=True),
        pods[1],
        replace(pods[1], labels=(("app", "a"),)),
        make_pod("u2", annotations=in_gang("a") | {contract.ANNOTATION_RETRY: "1"}, vgpu="1"),
        pods[3],
        make_pod("u5", annotations=single, vgpu="1"),
        pods[4],
    ):
        state.set_pod(pod)
        counts.append(state.freed_count)
    assert counts == [0, 0, 0, 1, 1, 1, 1, 1, 2]


@pytest.mark.parametrize(("field", "column"), [("cpu_milli", "cpu_used_milli"), ("memory_mib", "ram_used_mib")])
def test_bound_pod_resized_in_place_counts_with_new_size(field, column):
    state = ClusterState()
    state.set_gpu_node(make_node("n1", 1))

    def amounts(amount: int) -> dict[str, Any]:
        return {field: amount}

    pod = make_pod("u1", node="n1", shares={"main": [make_share("n1", 0)]}, vgpu="1", **amounts(1000))
    state.set_pod(pod)
    state.set_pod(replace(pod, **amounts(3000)))
    assert getattr(state.columns, column)[state.row_of("n1")] == 3000
    state.drop_pod("u1")
    assert getattr(state.columns, column)[state.row_of("n1")] == 0


def test_bound_pod_keeps_devices_when_older_version_of_it_arrives():
    state = ClusterState()
    state.set_gpu_node(make_node("n1", 1))
    bound = make_pod("u1", node="n1", shares={"main": [make_share("n1", 0)]}, vgpu="1")
    state.set_pod(bound)
    state.replace_pods([make_pod("u1", vgpu="1")])
    assert state.pods["u1"] == bound
    assert state.device_states("n1")[0].used_shares == 1


def test_nodes_with_changed_pods_are_reported_once_with_latest_last():
    state = ClusterState()
    for name in ("n1", "n2", "n3"):
        state.set_gpu_node(make_node(name, 2))
    begun = state.pod_change_count
    assert state.pods_changed_since(begun) == []
    for name in ("n1", "n2", "n1"):
        state.set_pod(make_pod(f"on-{name}-{state.pod_change_count}", node=name, shares={"main": [make_share(name, 0)]}, vgpu="1"))
    assert state.pods_changed_since(begun) == ["n2", "n1"]
    assert state.pods_changed_since(state.pods_changed_at("n2")) == ["n1"]
    state.drop_gpu_node("n1")
    assert state.pods_changed_since(begun) == ["n2"]


def changes(name: str, state: ClusterState) -> None:
    """Make a change after which a node counts as one with changed pods, or does not."""
    bound = make_pod("bound", node="n1", shares={"main": [make_share("n1", 0)]}, vgpu="1")
    match name:
        case "comes" | "changes" | "is to end" | "ends":
            state.set_pod(bound)
        case "another node's":
            state.set_pod(replace(bound, node_name="n9"))
        case "one without GPUs":
            state.set_pod(make_pod("cpu", node="n1"))
        case "one that waits":
            state.set_pod(make_pod("waits", vgpu="1"))
        case "uncordoned":
            state.set_gpu_node(make_node("n1", 2, cordoned=True))
            state.set_gpu_node(make_node("n1", 2))
        case "expired" | "let go":
            state.reserve(Reservation("expected", "n1", {"GPU-n1-0": Use(100, 0, 1, 1)}, HostDemand(0, 0), expires_at=1.0))


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("comes", True),
        ("changes", True),
        ("is to end", True),
        ("ends", True),
        ("uncordoned", True),
        ("expired", True),
        ("another node's", False),
        ("one without GPUs", False),
        ("one that waits", False),
        ("let go", False),
    ],
)
def test_node_counts_as_changed_for_pods_that_need_victims(name, counts):
    state = ClusterState()
    state.set_gpu_node(make_node("n1", 2))
    before = state.pod_change_count
    changes(name, state)
    if name in ("changes", "is to end", "ends"):
        before = state.pod_change_count
    match name:
        case "changes":
            state.set_pod(replace(state.pods["bound"], labels=(("app", "a"),)))
        case "is to end":
            state.set_pod(replace(state.pods["bound"], deletion_requested=True))
        case "ends":
            state.drop_pod("bound")
        case "expired":
            assert state.expire(1.0, 1.0) == 1
        case "let go":
            state.release("expected")  # plans are tried and given up a thousand times a second
    assert (state.pods_changed_since(before) == ["n1"]) is counts
    assert (state.pod_change_count > before) is counts
