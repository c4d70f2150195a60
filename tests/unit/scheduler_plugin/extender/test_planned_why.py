# SPDX-License-Identifier: Apache-2.0
"""``why`` for pods with planned claims: the gate, what the planner waits for, and what to do."""

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from unittest import mock

import msgspec
import pytest

from aliquot import contract
from aliquot.contract.model import Policy
from aliquot.kube.errors import KubeRefusedError
from aliquot_cli.explain.show import why_lines
from scheduler_plugin.core.cluster.journal import Rules
from scheduler_plugin.core.explain.why import Why
from scheduler_plugin.core.score.cost import DEFAULT_WEIGHTS
from scheduler_plugin.services.explainer import Explainer
from tests.integration.claim_world import ClaimWorld, Json
from tests.unit.scheduler_plugin.claim_builders import asking, class_of, slice_of

HELD = f"team/p: scheduling gate {contract.PLANNED} holds it back until its ResourceClaims are allocated: "


def make_world(*requests: Json, nodes: tuple[str, ...] = ("n1",), **fields: object) -> ClaimWorld:
    """Make nodes of one GPU of 1000 MiB, and a pod that is held."""
    world = ClaimWorld(nodes, devices=1)
    world.create_pod("p", *(requests or [asking(memory="400Mi")]), **fields)  # type: ignore[arg-type]
    world.tell()
    return world


def runs(world: ClaimWorld, name: str, memory: str = "700Mi") -> None:
    """Run a pod."""
    world.create_pod(name, asking(memory=memory), priority=5)
    plan(world)
    world.kube_scheduler(name)
    world.tell()


def plan(world: ClaimWorld) -> None:
    world.tell()
    asyncio.run(world.planner.step())
    world.tell()


def why(world: ClaimWorld, *, planner: bool = True) -> Why:
    """Return what the page says of the pod."""
    plans = [world.why.sentence] if planner else []
    explainer = Explainer(world.context, Rules(Policy.FRAG, DEFAULT_WEIGHTS), lambda: 0.0, *plans)
    reply = asyncio.run(explainer.why("team", "p"))
    assert reply.status == HTTPStatus.OK
    return msgspec.json.decode(reply.body, type=Why)


def relisted(world: ClaimWorld, change: Callable[[Json], object]) -> ClaimWorld:
    """Change the pod as the API has it."""
    change(world.pods["p"])
    world.relist()
    return world


def without_claim() -> ClaimWorld:
    world = make_world()
    world.claims.clear()
    world.relist()
    return world


def with_claim_that_ends() -> ClaimWorld:
    world = make_world()
    (claim,) = world.claims.values()
    claim["metadata"]["deletionTimestamp"] = "2100-01-01T00:00:00Z"
    world.relist()
    return world


def while_slices_are_unknown() -> ClaimWorld:
    world = make_world()
    world.context.claims.is_current = False
    return world


def without_planned_node() -> ClaimWorld:
    world = make_world()
    world.watch.slices.listed([slice_of(node) for node in world.nodes.values()])
    return world


def with_foreign_request() -> ClaimWorld:
    world = make_world(asking(memory="400Mi"), asking("nic", device_class="nic"))
    world.watch.classes.listed([class_of(), class_of("nic", "device.driver == 'nic.example.com'")])
    return world


def while_full() -> ClaimWorld:
    world = ClaimWorld(["n1"], devices=1)
    runs(world, "old")
    world.create_pod("p", asking(memory="400Mi"))
    plan(world)
    return world


def while_others_end() -> ClaimWorld:
    world = while_full()
    world.terminate("old")
    world.tell()
    return world


@pytest.mark.parametrize(
    ("make", "waits_for", "cure"),
    [
        pytest.param(make_world, "there is room on node n1", "the log of the scheduler's leader", id="fits"),
        pytest.param(while_full, "not enough free memory", "claim less", id="full"),
        pytest.param(while_others_end, "room on node n1 is free when the pods have ended", "", id="others end"),
        pytest.param(without_planned_node, "no node offers GPUs for planned claims", "component dra-planned", id="no node"),
        pytest.param(without_claim, "does not exist", "create it", id="no claim"),
        pytest.param(with_claim_that_ends, "is being deleted", "recreate the pod", id="claim ends"),
        pytest.param(while_slices_are_unknown, "has not listed", "try again", id="unknown"),
        pytest.param(with_foreign_request, "devices of several drivers", "recreate the pod", id="drivers"),
        pytest.param(lambda: make_world(gang=2), "2 members must start together, and 1 can be planned", "gang-min", id="gang"),
        pytest.param(
            lambda: relisted(make_world(), lambda pod: pod["spec"]["schedulingGates"].append({"name": "example.com/wait"})),
            "its other scheduling gates",
            "example.com/wait",
            id="another gate",
        ),
        pytest.param(
            lambda: relisted(make_world(), lambda pod: pod["status"].pop("resourceClaimStatuses")),
            "has not made all of its claims",
            "ResourceClaimTemplates",
            id="no claim of template",
        ),
        pytest.param(
            lambda: relisted(make_world(gang=2), lambda pod: pod["metadata"]["annotations"].update({contract.ANNOTATION_GANG_MIN: "x"})),
            contract.ANNOTATION_GANG_MIN,
            "",
            id="invalid gang",
        ),
        pytest.param(
            lambda: relisted(make_world(), lambda pod: pod["metadata"].update(deletionTimestamp="2100-01-01T00:00:00Z")),
            "its deletion was requested",
            "",
            id="terminating",
        ),
    ],
)
def test_sentence_names_gate_cause_and_cure(make, waits_for, cure):
    found = why(make())
    assert found.waits
    assert found.gates
    [line, *_] = why_lines(found)
    assert line.startswith(HELD)
    assert waits_for in line
    assert cure in line
    assert "kube-scheduler alone decides" not in line


def test_pod_without_label_of_its_gate_is_not_found():
    world = relisted(make_world(), lambda pod: pod["metadata"]["labels"].clear())
    world.planned.receiver.listed([])  # the API server leaves it out
    assert f"lacks the label {contract.LABEL_ALLOCATION}: planned" in why(world).sentence


def test_scheduler_that_reads_no_claims_says_how_to_allocate_them():
    sentence = why(make_world(), planner=False).sentence
    assert f"gate {contract.PLANNED} holds it back" in sentence
    assert "open its feature gate DynamicResourceAllocation" in sentence


def test_refused_write_points_to_the_log():
    world = make_world()
    with mock.patch.object(world, "_change", side_effect=KubeRefusedError("forbidden")):
        plan(world)
    assert "a write of its claims or its gate was refused" in why(world).sentence


def test_node_that_kube_scheduler_could_not_use_is_named():
    world = make_world()
    plan(world)
    world.kube_scheduler("p", accepts=False)
    plan(world)
    sentence = why(world).sentence
    assert sentence.startswith("Aliquot's scheduler allocates its ResourceClaims: kube-scheduler could not use node n1, which is avoided")


def test_gang_without_room_for_all_says_for_how_many():
    world = make_world(asking(memory="900Mi"), gang=2)
    world.create_pod("q", asking(memory="900Mi"), gang=2)
    plan(world)
    assert "no room for 2 members at once" in why(world).sentence


def test_pod_with_allocated_claims_waits_for_nothing_here():
    world = make_world()
    plan(world)
    assert not world.is_gated("p")
    assert why(world).sentence == "its ResourceClaims are allocated, so it can only run on their node"
    world.kube_scheduler("p")
    world.tell()
    assert why(world).sentence.startswith("bound to node n1")


def test_gate_of_another_system_is_named_before_claims():
    world = make_world()
    del world.pods["p"]["metadata"]["labels"]
    world.pods["p"]["spec"]["schedulingGates"] = [{"name": "kueue.x-k8s.io/admission"}]
    world.claims.clear()
    world.relist()
    world.planned.receiver.listed([])  # the API server leaves it out
    found = why(world)
    assert found.sentence.startswith("scheduling gates hold it back (kueue.x-k8s.io/admission); without them it waits for a ResourceClaim")
    assert found.gates == ("kueue.x-k8s.io/admission",)
