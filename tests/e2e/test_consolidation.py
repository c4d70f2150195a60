# SPDX-License-Identifier: Apache-2.0
"""Pods of a Deployment move between GPUs, within their budget, so that a pod of whole GPUs starts on the real kube-scheduler."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from aliquot import contract
from aliquot_cli import exit_codes
from aliquot_cli.__main__ import main
from tests.e2e.cluster.cluster import Cluster
from tests.e2e.invariants import PYTHON
from tests.e2e.kubectl import Kubectl, Object, eventually
from tests.e2e.product import (
    AGENT_NAMESPACE,
    GPU_MEMORY_MIB,
    GPUS,
    RESERVATIONS,
    Slice,
    Variant,
    assigned_uuids,
    patch,
    roll_out,
    scheduler_metric,
    schedulers_with,
    slice_pod,
    wait_until_rolled_out,
)
from tests.e2e.test_scheduler_faults import container_id

SELECTOR = "--selector=app.kubernetes.io/name=aliquot-scheduler"
SMALL_MIB = 20_000
LARGE_GPUS = 4
START_SECONDS = 90
SEARCH_SECONDS = 60
MOVES_SECONDS = 300
"""Four moves, each with a second for every step; before that the pause after the first search."""
REFUSAL = "no evictions here"
SEARCHES = "aliquot_scheduler_consolidations_total"
MOVES = "aliquot_scheduler_consolidation_moves_total"
PROGRAM = """
import sys
from scheduler_plugin import __main__ as program
from scheduler_plugin.services import consolidator
consolidator.FIRST_PAUSE_SECONDS = 10.0
sys.exit(program.main())
"""
"""The extender, which pauses for a minute after a search in vain; here for less."""
in_mode = partial(pytest.mark.parametrize, "consolidating", indirect=True)


def variant_of(mode: str) -> Variant:
    """Schedulers in a mode of consolidation."""
    program = {"op": "add", "path": "/spec/template/spec/containers/1/command", "value": [PYTHON, "-c", PROGRAM]}
    settings = schedulers_with(ALIQUOT_CONSOLIDATION=mode, ALIQUOT_FEATURE_GATES="Consolidation=true")
    return Variant(patches=(settings, patch("Deployment", "aliquot-scheduler", program)))


VARIANT = variant_of("plan")


@pytest.fixture(scope="module")
def consolidating(product: Kubectl, request: pytest.FixtureRequest) -> Kubectl:
    """kubectl in the product's namespace, with schedulers in this mode of consolidation."""
    roll_out(product, variant_of(request.param))
    return product.within(AGENT_NAMESPACE)


@pytest.fixture
def small(kubectl: Kubectl) -> Iterator[dict[str, str]]:
    """A Deployment of small pods, one on each GPU, under a budget that allows no disruption; the GPU of each pod by name."""
    kubectl.apply(small_pods("small"), budget("small", minAvailable=GPUS))
    eventually(lambda: len(running(kubectl, "small")) == GPUS, "all small pods to run", seconds=START_SECONDS)
    found = running(kubectl, "small")
    assert len(set(found.values())) == GPUS, "one on each GPU"
    yield found
    kubectl.run("delete", "deployment", "small", "--cascade=foreground", timeout_seconds=START_SECONDS)


def large_pod() -> Object:
    """A pod of whole GPUs, which fits in sum and on no GPUs that are free."""
    return slice_pod("large", Slice(LARGE_GPUS * GPU_MEMORY_MIB, vgpus=LARGE_GPUS))


def small_pods(name: str) -> Object:
    """A Deployment with one small pod for each GPU, that may move at once."""
    annotations = {
        contract.ANNOTATION_PLACEMENT: "spread",
        contract.ANNOTATION_MOVABLE: "true",
        contract.ANNOTATION_MIN_RUNTIME: "0s",
    }
    pod = slice_pod(name, Slice(SMALL_MIB), annotations=annotations)
    template = {"metadata": {"labels": {"app": name}, "annotations": annotations}, "spec": pod["spec"] | {"restartPolicy": "Always"}}
    spec = {"replicas": GPUS, "selector": {"matchLabels": {"app": name}}, "template": template}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name}, "spec": spec}


def budget(name: str, **allows: int) -> Object:
    spec = {"selector": {"matchLabels": {"app": name}}, **allows}
    return {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": {"name": name}, "spec": spec}


def running(kubectl: Kubectl, name: str) -> dict[str, str]:
    """The GPU of each running pod of a Deployment that is not ending, by pod name."""
    pods = [pod for pod in kubectl.all("pods", f"--selector=app={name}") if "deletionTimestamp" not in pod["metadata"]]
    return {pod["metadata"]["name"]: assigned_uuids(pod)[0] for pod in pods if pod["status"].get("phase") == "Running"}


def refusing_policy(namespace: str) -> list[Object]:
    """A policy of the API server that refuses all evictions in a namespace, and its binding."""
    api_version, metadata = "admissionregistration.k8s.io/v1", {"name": namespace}
    evictions = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods/eviction"]}
    policy = {"matchConstraints": {"resourceRules": [evictions]}, "validations": [{"expression": "false", "message": REFUSAL}]}
    here = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}}}
    binding = {"policyName": namespace, "validationActions": ["Deny"], "matchResources": here}
    return [
        {"apiVersion": api_version, "kind": "ValidatingAdmissionPolicy", "metadata": metadata, "spec": policy},
        {"apiVersion": api_version, "kind": "ValidatingAdmissionPolicyBinding", "metadata": metadata, "spec": binding},
    ]


@in_mode(["plan"])
@pytest.mark.timeout(2 * START_SECONDS + 3 * SEARCH_SECONDS + 400)
def test_plan_mode_reports_moves_and_evicts_no_pod(kubectl: Kubectl, consolidating: Kubectl, small: dict[str, str], tmp_path: Path) -> None:
    kubectl.apply(budget("small", minAvailable=GPUS - 1), large_pod())
    [reported] = eventually(
        lambda: [event for event in kubectl.events("large") if event.startswith(contract.EVENT_REASON_CONSOLIDATION)],
        "the planned moves in an event",
        seconds=SEARCH_SECONDS,
        otherwise=lambda: kubectl.explain("large"),
    )
    count = GPUS - LARGE_GPUS
    assert reported.startswith(f"{contract.EVENT_REASON_CONSOLIDATION}: {count} moves, which lose "), reported
    assert reported.endswith(": aliquot defrag plan shows them"), reported
    plan = plan_for(kubectl, "large", tmp_path / "plan.json")
    moving = {move["pod"] for move in plan["moves"]}
    assert len(moving) == count
    assert moving <= {f"{kubectl.namespace}/{name}" for name in small}

    # The command asks the API server, which knows rules that no plan can know.
    shown = defrag_plan(kubectl, "large")
    assert shown.exit_code == exit_codes.OK, shown.output
    assert shown.output.endswith("dry runs of the Eviction API: each eviction is allowed now\n")
    policy = refusing_policy(kubectl.namespace)
    kubectl.apply(*policy)
    try:
        refused = eventually(lambda: refused_plan(kubectl, "large"), "the API server to apply the policy", seconds=SEARCH_SECONDS)
    finally:
        for one in policy:
            kubectl.delete(one["kind"], one["metadata"]["name"])
    assert {pod for line in refused.splitlines() if REFUSAL in line for pod in moving if pod in line} == moving, refused

    assert running(kubectl, "small") == small
    assert not annotation(kubectl)
    assert scheduler_metric(consolidating, RESERVATIONS) == 0


@in_mode(["on"])
@pytest.mark.timeout(2 * START_SECONDS + SEARCH_SECONDS + MOVES_SECONDS + 400)
def test_small_pods_move_within_budget_until_large_pod_starts(
    kubectl: Kubectl, consolidating: Kubectl, small: dict[str, str], tmp_path: Path
) -> None:
    before, certificate = small, tmp_path / "plan.json"
    in_vain, moves = scheduler_metric(consolidating, SEARCHES, outcome="none"), scheduler_metric(consolidating, MOVES)

    # The budget allows no disruption: the scheduler finds no plan, and no pod ends.
    kubectl.apply(large_pod())
    eventually(lambda: scheduler_metric(consolidating, SEARCHES, outcome="none") > in_vain, "a search for moves", seconds=SEARCH_SECONDS)
    assert running(kubectl, "small") == before

    # The budget allows one at a time: four pods move, and the large pod starts on the GPUs that they left.
    kubectl.apply(budget("small", minAvailable=GPUS - 1))
    plan = plan_for(kubectl, "large", certificate)
    assert len(plan["moves"]) == GPUS - LARGE_GPUS
    checked = CliRunner().invoke(main, ["defrag", "check", str(certificate)])
    assert checked.exit_code == 0, f"the plan replays to the same end: {checked.output}"
    kubectl.wait_for_phase("large", "Running", seconds=MOVES_SECONDS)
    large = kubectl.get("pod", "large")
    assert len(set(assigned_uuids(large))) == LARGE_GPUS
    eventually(lambda: not annotation(kubectl), "the finished run to be cleared", seconds=START_SECONDS)
    eventually(lambda: len(running(kubectl, "small")) == GPUS, "all small pods to run again", seconds=START_SECONDS)
    after = running(kubectl, "small")
    assert len(before.keys() & after.keys()) == LARGE_GPUS, "as many pods moved as GPUs were needed"
    assert not set(after.values()) & set(assigned_uuids(large))
    assert scheduler_metric(consolidating, MOVES) - moves == LARGE_GPUS

    def reported() -> set[str]:
        return {event["involvedObject"]["name"] for event in kubectl.all("events") if event["reason"] == contract.EVENT_REASON_MOVED}

    eventually(lambda: reported() == before.keys() - after.keys(), "an event on each pod that moved", otherwise=lambda: str(reported()))
    wait_until_nothing_is_reserved(consolidating)


def plan_for(kubectl: Kubectl, pod: str, certificate: Path) -> dict:
    """What ``aliquot defrag plan`` shows and saves, once the scheduler knows the new budget."""

    def planned() -> dict | None:
        result = defrag_plan(kubectl, pod, "--save", str(certificate), "-o", "json")
        return json.loads(result.output) if result.exit_code == 0 else None

    found: dict = eventually(planned, "a plan", seconds=SEARCH_SECONDS)
    return found


def defrag_plan(kubectl: Kubectl, pod: str, *options: str) -> Result:
    """Run ``aliquot defrag plan`` for a pod."""
    return CliRunner().invoke(main, ["defrag", "plan", f"{kubectl.namespace}/{pod}", "--kubeconfig", str(kubectl.kubeconfig), *options])


def refused_plan(kubectl: Kubectl, pod: str) -> str:
    """What ``aliquot defrag plan`` shows of a plan that the API server refuses; empty before it does."""
    shown = defrag_plan(kubectl, pod)
    return shown.output if shown.exit_code == exit_codes.FINDINGS else ""


def wait_until_nothing_is_reserved(system: Kubectl) -> None:
    """Wait until no scheduler keeps room, after all pods are bound."""
    eventually(lambda: scheduler_metric(system, RESERVATIONS) == 0, "all reservations to end")


@pytest.mark.soak
@in_mode(["on"])
@pytest.mark.timeout(2 * START_SECONDS + MOVES_SECONDS + 400)
def test_schedulers_killed_between_moves_leave_nothing_and_large_pod_starts(
    kubectl: Kubectl, consolidating: Kubectl, small: dict[str, str], node: Cluster
) -> None:
    moves = scheduler_metric(consolidating, MOVES)
    kubectl.apply(budget("small", minAvailable=GPUS - 1), large_pod())
    eventually(lambda: 0 < scheduler_metric(consolidating, MOVES) - moves < LARGE_GPUS, "a run that is not over", seconds=MOVES_SECONDS)
    for pod in consolidating.all("pods", SELECTOR):
        node.kill_container(container_id(pod, "extender"))
    kubectl.wait_for_phase("large", "Running", seconds=MOVES_SECONDS)
    eventually(lambda: not annotation(kubectl), "the annotation of the run to be cleared", seconds=START_SECONDS)
    eventually(lambda: len(running(kubectl, "small")) == GPUS, "all small pods to run again", seconds=START_SECONDS)
    assert not set(running(kubectl, "small").values()) & set(assigned_uuids(kubectl.get("pod", "large")))
    wait_until_rolled_out(consolidating)
    wait_until_nothing_is_reserved(consolidating)
    assert len(small) == GPUS


def annotation(kubectl: Kubectl) -> str:
    """The moves that the scheduler wrote down for the large pod."""
    return str(kubectl.get("pod", "large")["metadata"]["annotations"].get(contract.ANNOTATION_CONSOLIDATION, ""))
