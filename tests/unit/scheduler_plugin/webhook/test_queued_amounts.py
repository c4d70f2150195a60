# SPDX-License-Identifier: Apache-2.0
"""What Kueue counts for a template in a queue: the MiB of the GPUs behind the queue's flavors, and behind the template's own selectors."""

import copy
import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from aliquot import contract
from aliquot_lab.standin.patches import apply_json_patch
from scheduler_plugin.core.admit.kueue import decode_flavor
from scheduler_plugin.core.admit.queues import GpuSizes, decode_cluster_queue, decode_local_queue
from scheduler_plugin.core.cluster.nodes import NodeDirectory, NodeFacts, Taint
from scheduler_plugin.core.cluster.state import ClusterState
from scheduler_plugin.core.fit.columnar import device_sizes
from scheduler_plugin.services.kueue_objects import KueueObjects
from scheduler_plugin.webhook.amounts import Options
from scheduler_plugin.webhook.normalise import Normaliser, Outcome
from scheduler_plugin.webhook.templates import Templates
from tests.unit.scheduler_plugin.builders import make_device, make_node

SIZES = {"small": 40960, "large": 81920}
"""MiB of the GPUs of each pool. Its nodes have the label ``pool``, and a taint that no pod tolerates yet: Kueue adds the toleration."""
EMPTY = "empty"
"""A pool at zero nodes."""
VGPU, MEMORY, PERCENT = contract.RESOURCE_VGPU, contract.RESOURCE_VGPU_MEMORY, contract.RESOURCE_VGPU_MEMORY_PERCENT
QUEUE = "kueue.x-k8s.io/queue-name"

REQUESTS: dict[str, tuple[dict[str, str], dict[str, str], int, int]] = {
    "a percentage": ({VGPU: "1", PERCENT: "50"}, {}, 1, 50),
    "a percentage of two GPUs": ({VGPU: "2", PERCENT: "50"}, {}, 2, 25),
    "HAMi's percentage": ({"nvidia.com/gpu": "1", "nvidia.com/gpumem-percentage": "30"}, {}, 1, 30),
    "KAI's fraction": ({}, {"gpu-fraction": "0.25"}, 1, 25),
    "a whole GPU": ({VGPU: "1"}, {}, 1, 100),
    "two whole GPUs": ({VGPU: "2"}, {}, 2, 100),
}
"""By name: limits, annotations, vGPUs, and the percentage of each."""
WHOLE = 100
MODEL = "H200"


class Rig:
    """A cluster with two pools, and one ClusterQueue for some flavors, each of one pool."""

    def __init__(self, *pools: str, covered: tuple[str, ...] = (VGPU, MEMORY)) -> None:
        self.state, self.directory = ClusterState(), NodeDirectory()
        for pool, mib in SIZES.items():
            for number in range(2):
                name = f"{pool}-{number}"
                self.state.set_gpu_node(make_node(name, [make_device(name, 0, mib=mib)]))
                self.directory.put(NodeFacts(name, {"pool": pool}, (Taint("dedicated", pool, "NoSchedule"),)))
        self.objects = KueueObjects(lambda: 0.0)
        group = {"coveredResources": covered, "flavors": [{"name": pool} for pool in pools]}
        spec = {"resourceGroups": [{"coveredResources": ["cpu"], "flavors": [{"name": "hosts"}]}, group]}
        self.objects.cluster_queues.listed([decode_cluster_queue(raw({"metadata": {"name": "gpus"}, "spec": spec}))])
        local = {"metadata": {"name": "mine", "namespace": "with-mine"}, "spec": {"clusterQueue": "gpus"}}
        self.objects.local_queues.listed([decode_local_queue(raw(local))])
        for pool in (*SIZES, EMPTY):
            flavor = {"metadata": {"name": pool}, "spec": {"nodeLabels": {"pool": pool}}}
            self.objects.flavors.changed(decode_flavor(raw(flavor)))
        options = Options(
            lambda preferences: device_sizes(self.state.columns, preferences),
            count_whole_gpus=True,
            sizes_behind=GpuSizes(self.state, self.directory),
            find_queue=self.objects.queue,
        )
        self.rules = Normaliser(options)

    def admit(self, job: dict[str, Any], old: dict[str, Any] | None = None) -> tuple[dict[str, Any], Outcome]:
        """Return the Job after the review, and the review's outcome."""
        outcome = Templates(self.rules).admit("batch", "Job", job, old, job["metadata"]["namespace"])
        changed = copy.deepcopy(job)
        apply_json_patch(changed, list(outcome.patch))
        return changed, outcome


def raw(item: Mapping[str, Any]) -> bytes:
    return json.dumps(item).encode()


def job_of(
    limits: dict[str, str], annotations: dict[str, str], queue: str = "mine", namespace: str = "with-mine", **spec: object
) -> dict[str, Any]:
    labels = {QUEUE: queue} if queue else {}
    container = {"name": "main", "resources": {"limits": limits}}
    template = {"metadata": {"annotations": annotations}, "spec": {"containers": [container], **spec}}
    return {"metadata": {"name": "job", "namespace": namespace, "labels": labels}, "spec": {"template": template}}


def limits_of(job: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = job["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]
    return {name: found[name] for name in (VGPU, MEMORY, PERCENT) if name in found}


def in_mib(vgpus: int, percent: int, mib: int) -> dict[str, str]:
    return {VGPU: str(vgpus), MEMORY: str(vgpus * (mib * percent // 100))}


def of_chosen_node(vgpus: int, percent: int) -> dict[str, str]:
    """What a request of no fixed size asks for."""
    return {VGPU: str(vgpus)} if percent == WHOLE else {VGPU: str(vgpus), PERCENT: str(vgpus * percent)}


@pytest.mark.parametrize(("request_name", "pool"), list(product(REQUESTS, SIZES)))
def test_queue_with_one_size_counts_mib_of_its_flavor(request_name, pool):
    limits, annotations, vgpus, percent = REQUESTS[request_name]
    job, outcome = Rig(pool).admit(job_of(limits, annotations))
    assert limits_of(job) == in_mib(vgpus, percent, SIZES[pool])
    assert not [warning for warning in outcome.warnings if "Kueue" in warning]


@pytest.mark.parametrize(("request_name", "pool"), list(product(REQUESTS, SIZES)))
@pytest.mark.parametrize("how", ["nodeSelector", "affinity"])
def test_selectors_of_template_narrow_flavors_further(request_name, pool, how):
    limits, annotations, vgpus, percent = REQUESTS[request_name]
    term = {"matchExpressions": [{"key": "pool", "operator": "In", "values": [pool]}]}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}
    spec = {"nodeSelector": {"pool": pool}} if how == "nodeSelector" else {"affinity": {"nodeAffinity": required}}
    for pools in (tuple(SIZES), (pool,)):
        job, _ = Rig(*pools).admit(job_of(limits, annotations, **spec))
        assert limits_of(job) == in_mib(vgpus, percent, SIZES[pool])


@pytest.mark.parametrize("request_name", REQUESTS)
@pytest.mark.parametrize("pools", [tuple(SIZES), ("small", EMPTY), (EMPTY,)], ids=" and ".join)
def test_queue_with_several_sizes_or_unknown_ones_says_what_to_do(request_name, pools):
    limits, annotations, vgpus, percent = REQUESTS[request_name]
    job, outcome = Rig(*pools).admit(job_of(limits, annotations))
    assert limits_of(job) == of_chosen_node(vgpus, percent)
    [warning] = [warning for warning in outcome.warnings if "Kueue" in warning]
    assert "ClusterQueue gpus" in warning
    assert contract.ANNOTATION_GPU_TYPE in warning
    assert len(warning) <= 240


@pytest.mark.parametrize("request_name", REQUESTS)
@pytest.mark.parametrize(
    ("queue", "namespace"),
    [("other", "with-mine"), ("mine", "elsewhere"), ("", "with-mine")],
    ids=["no such queue", "of another namespace", "no queue"],
)
def test_without_known_queue_amount_is_that_of_chosen_node(request_name, queue, namespace):
    limits, annotations, vgpus, percent = REQUESTS[request_name]
    job, outcome = Rig("small").admit(job_of(limits, annotations, queue, namespace))
    assert limits_of(job) == of_chosen_node(vgpus, percent)
    assert not [warning for warning in outcome.warnings if "Kueue" in warning]


@pytest.mark.parametrize("of_jobs", [True, False])
def test_queue_of_cron_job_is_that_of_its_jobs(of_jobs):
    own, made = ({}, {QUEUE: "mine"}) if of_jobs else ({QUEUE: "mine"}, {})
    template: dict[str, Any] = {"metadata": {"labels": made}, "spec": job_of({VGPU: "1", PERCENT: "50"}, {})["spec"]}
    cron: dict[str, Any] = {"metadata": {"name": "cron", "namespace": "with-mine", "labels": own}, "spec": {"jobTemplate": template}}
    outcome = Templates(Rig("large").rules).admit("batch", "CronJob", cron, None, "with-mine")
    apply_json_patch(cron, list(outcome.patch))
    assert limits_of(template) == (in_mib(1, 50, SIZES["large"]) if of_jobs else of_chosen_node(1, 50))


def test_label_that_kueue_adds_after_first_review_counts():
    """Kueue's own webhook adds the default queue, and the API server calls ours again."""
    rig = Rig("large")
    first, _ = rig.admit(job_of({"nvidia.com/gpu": "1", "nvidia.com/gpumem-percentage": "50"}, {}, ""))
    assert limits_of(first) == of_chosen_node(1, 50)
    first["metadata"]["labels"] = {QUEUE: "mine"}
    again, _ = rig.admit(first)
    assert limits_of(again) == in_mib(1, 50, SIZES["large"])


@pytest.mark.parametrize(("tolerated_by", "is_chosen"), [("nothing", False), ("the pod", True), ("the flavor", True)])
def test_flavor_with_taint_counts_if_it_is_tolerated(tolerated_by, is_chosen):
    rig, toleration = Rig(*SIZES), {"key": "spot", "operator": "Exists"}
    spec = {"nodeLabels": {"pool": "large"}, "nodeTaints": [{"key": "spot", "value": "yes", "effect": "NoSchedule"}]}
    if tolerated_by == "the flavor":
        spec["tolerations"] = [toleration]
    rig.objects.flavors.changed(decode_flavor(raw({"metadata": {"name": "large"}, "spec": spec})))
    job, _ = rig.admit(job_of({VGPU: "1", PERCENT: "50"}, {}, tolerations=[toleration] if tolerated_by == "the pod" else []))
    assert limits_of(job) == (of_chosen_node(1, 50) if is_chosen else in_mib(1, 50, SIZES["small"]))


def test_flavor_without_label_that_another_has_is_not_chosen_by_it():
    rig = Rig(*SIZES)
    rig.objects.flavors.changed(decode_flavor(raw({"metadata": {"name": "large"}, "spec": {"nodeLabels": {"gpu": "h100"}}})))
    job, _ = rig.admit(job_of({VGPU: "1", PERCENT: "50"}, {}, nodeSelector={"pool": "small"}))
    assert limits_of(job) == in_mib(1, 50, SIZES["small"])


@pytest.mark.parametrize("request_name", REQUESTS)
def test_pool_at_zero_counts_by_no_other_pool(request_name):
    """The cluster has GPUs of one size, and the queue's nodes come later."""
    limits, annotations, vgpus, percent = REQUESTS[request_name]
    rig = Rig(EMPTY)
    for number in range(2):
        rig.state.drop_gpu_node(f"large-{number}")
    job, outcome = rig.admit(job_of(limits, annotations))
    assert limits_of(job) == of_chosen_node(vgpus, percent)
    assert any("not known" in warning for warning in outcome.warnings)
    named, _ = rig.admit(job_of(limits, annotations | {contract.ANNOTATION_GPU_TYPE: MODEL}))
    assert limits_of(named) == in_mib(vgpus, percent, SIZES["small"])


def test_queue_that_counts_percentages_gets_percentages():
    job, outcome = Rig("large", covered=(VGPU, MEMORY, PERCENT)).admit(job_of({VGPU: "1", PERCENT: "50"}, {}))
    assert limits_of(job) == {VGPU: "1", PERCENT: "50"}
    assert not outcome.warnings


def test_queue_that_counts_no_memory_changes_nothing():
    job, _ = Rig("large", covered=(VGPU,)).admit(job_of({VGPU: "1", PERCENT: "50"}, {}))
    assert limits_of(job) == {VGPU: "1", PERCENT: "50"}


def test_missing_flavor_changes_nothing():
    rig = Rig("large")
    rig.objects.flavors.listed([])
    job, _ = rig.admit(job_of({VGPU: "1", PERCENT: "50"}, {}))
    assert limits_of(job) == {VGPU: "1", PERCENT: "50"}


@pytest.mark.parametrize("request_name", REQUESTS)
def test_second_apply_of_same_manifest_changes_nothing(request_name):
    """``kubectl apply`` merges the manifest into what is stored: the amounts of the review stay beside the manifest's own."""
    limits, annotations, *_ = REQUESTS[request_name]
    rig, manifest = Rig("small"), job_of(limits, annotations)
    stored, _ = rig.admit(manifest)
    merged = copy.deepcopy(stored)
    merged["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"] |= limits
    again, outcome = rig.admit(merged, stored)
    assert again["spec"] == stored["spec"]
    assert not outcome.refusal
    assert not outcome.warnings


@pytest.mark.parametrize("request_name", REQUESTS)
def test_pod_of_rewritten_template_is_left_as_counted(request_name):
    """Kueue adds the flavor's labels to the pods, and no pod counts by another size than its template."""
    limits, annotations, *_ = REQUESTS[request_name]
    rig = Rig("large")
    job, _ = rig.admit(job_of(limits, annotations))
    template = job["spec"]["template"]
    pod = {**template, "spec": {**template["spec"], "nodeSelector": {"pool": "large"}}}
    for rules in (rig.rules, rig.rules.behind(pod["spec"], "with-mine", "mine"), rig.rules.required_rules()):
        outcome = rules.admit(pod)
        assert not outcome.refusal
        assert not [one for one in outcome.patch if str(one["path"]).endswith("/resources")]


@pytest.mark.parametrize("change", ["a node of another size comes", "a node gets the label", "the only node goes", "sizes change"])
def test_nodes_that_change_count_at_once(change):
    rig = Rig("small")
    half = job_of({VGPU: "1", PERCENT: "50"}, {})
    assert limits_of(rig.admit(half)[0]) == in_mib(1, 50, SIZES["small"])
    if change == "a node of another size comes":
        rig.state.set_gpu_node(make_node("new", [make_device("new", 0, mib=SIZES["large"])]))
        rig.directory.put(NodeFacts("new", {"pool": "small"}))
        expected = of_chosen_node(1, 50)
    elif change == "a node gets the label":
        rig.directory.put(NodeFacts("large-0", {"pool": "small"}))
        expected = of_chosen_node(1, 50)
    elif change == "the only node goes":
        for number in range(2):
            rig.state.drop_gpu_node(f"small-{number}")
            rig.directory.drop(f"small-{number}")
        expected = of_chosen_node(1, 50)
    else:
        for number in range(2):
            rig.state.set_gpu_node(make_node(f"small-{number}", [make_device(f"small-{number}", 0, mib=20_000)]))
        expected = in_mib(1, 50, 20_000)
    assert limits_of(rig.admit(half)[0]) == expected


def test_percentage_of_queue_becomes_claim_that_could_not_state_it():
    rules = replace(Rig("small").rules, as_claims=True)
    pod = job_of({VGPU: "1", PERCENT: "50"}, {})["spec"]["template"]
    assert "a claim cannot state" in rules.admit(pod).refusal
    [template] = rules.behind({}, "with-mine", "mine").admit(pod).templates
    stated = job_of({VGPU: "1", MEMORY: str(SIZES["small"] // 2)}, {})["spec"]["template"]
    assert (template,) == rules.admit(stated).templates


@pytest.mark.parametrize("spec", [{"nodeSelector": {"pool": 5}}, {"affinity": "none"}, {"nodeSelector": ["pool"]}])
def test_spec_that_is_none_counts_by_all_nodes(spec):
    job, outcome = Rig("small").admit(job_of({VGPU: "1", PERCENT: "50"}, {}, **spec))
    assert limits_of(job) == {VGPU: "1", PERCENT: "50"}
    assert not outcome.refusal
