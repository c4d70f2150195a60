# SPDX-License-Identifier: Apache-2.0
"""The gang of a pod by its owners and PodGroups: one example of each kind at least, and a model in which no derived gang waits for ever.

The objects are written after the APIs of JobSet 0.12, LeaderWorkerSet 0.9, KubeRay 1.6, training-operator 1.9, mpi-operator 0.8, Argo
Workflows 3 and KAI. Their controllers do not run here.
"""

import asyncio
import base64
import copy
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aliquot import contract
from aliquot.kube.errors import KubeApiError
from aliquot_lab.standin.patches import apply_json_patch
from scheduler_plugin.webhook.amounts import Options
from scheduler_plugin.webhook.grouper import KEPT_SECONDS, Grouper
from scheduler_plugin.webhook.normalise import Normaliser
from scheduler_plugin.webhook.owner_groups import OWNERS
from scheduler_plugin.webhook.pod_groups import POD_GROUPS
from scheduler_plugin.webhook.review import Reviews

Json = dict[str, Any]
ASKED = {contract.LABEL_GANG_FROM_OWNER: "true"}
LWS, JOBSET, KUBEFLOW = "leaderworkerset.sigs.k8s.io", "jobset.sigs.k8s.io", "training.kubeflow.org"


class Cluster:
    """Objects by path, and a count of the reads."""

    def __init__(self, *objects: Json, namespace_labels: Mapping[str, str] | None = None) -> None:
        self.reads: list[str] = []
        self.fails = False
        self.objects: dict[str, Json] = {"/api/v1/namespaces/team": {"metadata": {"labels": dict(namespace_labels or {})}}}
        for item in objects:
            self.add(item)

    def add(self, item: Json) -> None:
        plural = item["kind"].lower() + "s"
        self.objects[f"/apis/{item['apiVersion']}/namespaces/team/{plural}/{item['metadata']['name']}"] = item

    async def get_object(self, path: str) -> Json | None:
        self.reads.append(path)
        await asyncio.sleep(0)
        if self.fails:
            raise KubeApiError("GET: 503")
        return self.objects.get(path)


class Webhook:
    """The webhook with the gate open; every admitted pod must also pass /validate and a second /mutate."""

    def __init__(self, cluster: Cluster, *, for_all: bool = False, gate: bool = True, **options: Any) -> None:
        self.now = 0.0
        self.role: tuple[str | None, str | None] = (None, None)
        """The role and its minimum of the pod that was admitted last."""
        normaliser = Normaliser(Options(lambda _: (81920,), gangs_from_owners=gate, **options))

        def grouper(rules: Normaliser) -> Grouper:
            return Grouper(rules, cluster, lambda: self.now, for_all=for_all)

        self._reviews = Reviews(normaliser, lambda _: None, grouper=grouper if gate else None)

    def admit(self, pod: Json) -> tuple[str, tuple[str, str] | None, list[str]]:
        """Return the refusal, the gang with its minimum, and the warnings."""
        return asyncio.run(self.admitted(pod))

    async def admitted(self, pod: Json) -> tuple[str, tuple[str, str] | None, list[str]]:
        response = await self._review(self._reviews.mutate_adopted, pod)
        if not response["allowed"]:
            return response["status"]["message"], None, []
        patched = copy.deepcopy(pod)
        apply_json_patch(patched, json.loads(base64.b64decode(response["patch"])) if "patch" in response else [])
        assert (await self._review(self._reviews.validate_adopted, patched))["allowed"]
        assert "patch" not in await self._review(self._reviews.mutate_adopted, patched)
        annotations = patched["metadata"].get("annotations", {})
        gang = annotations.get(contract.ANNOTATION_GANG)
        self.role = annotations.get(contract.ANNOTATION_GANG_ROLE), annotations.get(contract.ANNOTATION_GANG_ROLE_MIN)
        return "", None if gang is None else (gang, annotations[contract.ANNOTATION_GANG_MIN]), response.get("warnings", [])

    def warnings(self, path: str, item: Json, group: str = "") -> str:
        """Return what another endpoint warns of; it admits every object."""
        response = asyncio.run(self._review(self._reviews.by_path()[path], item, group))
        assert response["allowed"]
        return "; ".join(response.get("warnings", ()))

    async def _review(self, verb: Callable[[bytes], Any], item: Json, group: str = "") -> Json:
        kind = {"group": group, "version": "v1", "kind": item.get("kind", "Pod")}
        request = {"uid": "r", "operation": "CREATE", "namespace": "team", "kind": kind, "object": item}
        body = json.dumps({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}).encode()
        response: Json = json.loads(await verb(body))["response"]
        return response


# --- objects --------------------------------------------------------------------------------------------------------------


def template(gpus: int = 1) -> Json:
    """The template of a pod with so many whole GPUs, in HAMi's words: what the webhook makes of a template counts."""
    limits = {"nvidia.com/gpu": gpus, "nvidia.com/gpumem": 1000} if gpus else {}
    return {"spec": {"containers": [{"name": "main", "resources": {"limits": limits}}]}}


def owned(api_version: str, kind: str, name: str, spec: Json, *, owner: Json | None = None, **content: Any) -> Json:
    metadata: Json = {"name": name, "namespace": "team", "uid": f"{kind}-{name}"[:8].lower() + "-uid", **content.pop("metadata", {})}
    if owner is not None:
        metadata["ownerReferences"] = [reference(owner)]
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, "spec": spec, **content}


def reference(owner: Json) -> Json:
    return {
        "apiVersion": owner["apiVersion"], "kind": owner["kind"], "name": owner["metadata"]["name"], "uid": owner["metadata"]["uid"],
        "controller": True,
    }  # fmt: skip


def pod_of(owner: Json | None, name: str = "p", *, labels: Any = None, annotations: Any = None, gpus: int = 1, **spec: Any) -> Json:
    metadata: Json = {"name": name, "namespace": "team", "labels": labels or {}, "annotations": annotations or {}}
    if owner is not None:
        metadata["ownerReferences"] = [reference(owner)]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, **template(gpus)}
    pod["spec"] |= spec
    return pod


def job(name: str = "j", parallelism: int | None = 4, owner: Json | None = None, **spec: Any) -> Json:
    metadata = spec.pop("metadata", {})
    return owned("batch/v1", "Job", name, {"parallelism": parallelism, **spec, "template": template()}, owner=owner, metadata=metadata)


def indexed(name: str = "j", parallelism: int = 4) -> Json:
    return job(name, parallelism, completions=parallelism, completionMode="Indexed")


def replicated(name: str, replicas: int = 1, parallelism: int = 1, gpus: int = 1, **fields: Any) -> Json:
    return {"name": name, "replicas": replicas, "template": {"spec": {"parallelism": parallelism, "template": template(gpus)}}, **fields}


def jobset(*jobs: Json, **spec: Any) -> Json:
    return owned("jobset.x-k8s.io/v1alpha2", "JobSet", "js", {"replicatedJobs": list(jobs), **spec})


def job_of(owner: Json, replicated_job: str, parallelism: int = 1, index: int = 0, **metadata: Any) -> Json:
    labels = {f"{JOBSET}/replicatedjob-name": replicated_job}
    return job(f"js-{replicated_job}-{index}", parallelism, owner, metadata={"labels": labels, **metadata})


def lws(size: int = 3, leader: Json | None = None, **spec: Any) -> Json:
    groups: Json = {"size": size, "workerTemplate": template()} | ({} if leader is None else {"leaderTemplate": leader})
    return owned("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", "l", {"leaderWorkerTemplate": groups, **spec})


def lws_pod(index: int, size: int = 3, annotations: Mapping[str, str] | None = None) -> Json:
    """A pod at the first call of the webhook: a worker has no index yet, and a leader no key of its group."""
    set_of = owned("apps/v1", "StatefulSet", "l" if index == 0 else "l-0", {})
    labels = {f"{LWS}/name": "l"} | ({f"{LWS}/worker-index": "0"} if index == 0 else {})
    stated = {f"{LWS}/size": str(size), **(annotations or {})} | ({} if index == 0 else {f"{LWS}/leader-name": "l-0"})
    return pod_of(set_of, "l-0" if index == 0 else f"l-0-{index}", labels=labels, annotations=stated)


def ray(workers: list[Json], head_gpus: int = 0, **spec: Any) -> Json:
    return owned("ray.io/v1", "RayCluster", "r", {"headGroupSpec": {"template": template(head_gpus)}, "workerGroupSpecs": workers, **spec})


def ray_workers(replicas: int | None = None, least: int = 0, hosts: int = 1, **fields: Any) -> Json:
    return {
        "groupName": "w",
        "replicas": replicas,
        "minReplicas": least,
        "maxReplicas": 9,
        "numOfHosts": hosts,
        "template": template(),
    } | fields


def training(kind: str, field: str, roles: Mapping[str, tuple[int, int]], **spec: Any) -> Json:
    """Args: roles: replicas and GPUs of each."""
    specs = {role: {"replicas": replicas, "template": template(gpus)} for role, (replicas, gpus) in roles.items()}
    version = "v2beta1" if kind == "MPIJob" else "v1"
    return owned(f"kubeflow.org/{version}", kind, "t", {field: specs, **spec})


def stateful_set(policy: str = "Parallel", *, updates: bool = False) -> Json:
    status = {"currentRevision": "a", "updateRevision": "b" if updates else "a"}
    return owned("apps/v1", "StatefulSet", "s", {"replicas": 3, "podManagementPolicy": policy, "template": template()}, status=status)


def deployment(strategy: str = "Recreate") -> tuple[Json, Json]:
    parent = owned("apps/v1", "Deployment", "d", {"replicas": 3, "strategy": {"type": strategy}, "template": template()})
    return parent, owned("apps/v1", "ReplicaSet", "d-1", {"replicas": 3, "template": template()}, owner=parent)


@dataclass(frozen=True)
class Case:
    """The objects, the pod, its gang and minimum where the pod asks (None: alone), and where only its namespace asks."""

    objects: tuple[Json, ...]
    pod: Json
    gang: tuple[str, int] | None
    by_default: bool = True
    """Whether the same gang is formed where only the namespace asks."""
    said: str = ""
    """Part of the refusal or the warning where the pod asks."""


def of(owner: Json, gang: tuple[str, int] | None, *objects: Json, **fields: Any) -> Case:
    """A pod that this object owns."""
    pod = pod_of(owner, **{key: fields.pop(key) for key in ("labels", "annotations") if key in fields})
    return Case((owner, *objects), pod, gang, **fields)


def cases() -> Iterator[Any]:
    """Yield examples. A gang's name is followed by the first eight characters of its owner's UID."""
    yield "Job, Indexed", of(indexed(), ("job-j-job-j-ui", 4))
    yield "Job, not Indexed", of(job(), ("job-j-job-j-ui", 4), by_default=False)
    yield "Job with more completions than pods", of(job(completions=9), ("job-j-job-j-ui", 4), by_default=False)
    yield "Job with fewer completions", of(job(completions=3), ("job-j-job-j-ui", 3), by_default=False)
    yield "Job of one pod", of(job(parallelism=None), None, said="only one of its pods")
    yield "Job of too many pods", of(indexed(parallelism=5000), None, said="5000 members")
    parent = owned("ray.io/v1", "RayJob", "rj", {})
    yield "submitter of a RayJob", of(job(owner=parent), None, said="starts after its cluster")
    set_of = jobset(replicated("a", 2, 2), replicated("b"), replicated("driver", gpus=0))
    yield "JobSet", of(job_of(set_of, "a", 2), ("jobset-js-jobset-j", 5), set_of)
    set_of = jobset(replicated("prepare", gpus=0), replicated("workers", 2, 2, dependsOn=[{"name": "prepare", "status": "Complete"}]))
    yield "JobSet, dependsOn", of(job_of(set_of, "workers", 2), ("jobset-js-workers-jobset-j", 4), set_of)
    set_of = jobset(replicated("a", 2), replicated("b", 3), startupPolicy={"startupPolicyOrder": "InOrder"})
    yield "JobSet, InOrder", of(job_of(set_of, "b"), ("jobset-js-b-jobset-j", 3), set_of)
    set_of = jobset(replicated("a", 2, 3))
    exclusive = {f"alpha.{JOBSET}/exclusive-topology": "rack"}
    for completion, gang in (("0", None), ("2", ("job-js-a-0-followers-job-js-a", 2))):
        labels = {"batch.kubernetes.io/job-completion-index": completion}
        yield (
            f"JobSet, exclusive, pod {completion}",
            of(job_of(set_of, "a", 3), gang, set_of, annotations=exclusive, labels=labels, said="" if gang else "once this pod has a node"),
        )
    placed = exclusive | {f"alpha.{JOBSET}/node-selector": "true"}
    yield "JobSet, exclusive by selectors", of(job_of(set_of, "a", 3), ("jobset-js-jobset-j", 6), set_of, annotations=placed)
    for index in (0, 2):
        yield f"LeaderWorkerSet, pod {index}", Case((lws(),), lws_pod(index), ("leaderworkerset-l-l-0-leaderwo", 3))
        cpu = lws(leader=template(0))
        if index:
            yield "LeaderWorkerSet, leader without a GPU", Case((cpu,), lws_pod(index), ("leaderworkerset-l-l-0-leaderwo", 2))
    for name, owner, annotations in (
        ("LeaderReady", lws(startupPolicy="LeaderReady"), {}),
        ("exclusive", lws(), {f"{LWS}/exclusive-topology": "rack"}),
    ):
        yield f"LeaderWorkerSet, {name}, leader", Case((owner,), lws_pod(0, annotations=annotations), None, said="after the leader")
        workers = ("leaderworkerset-l-l-0-workers-leaderwo", 2)
        yield f"LeaderWorkerSet, {name}, worker", Case((owner,), lws_pod(1, annotations=annotations), workers)
    yield "StatefulSet", of(stateful_set(), ("statefulset-s-stateful", 3), by_default=False)
    yield "StatefulSet, in order", of(stateful_set("OrderedReady"), None, said="set podManagementPolicy: Parallel")
    yield "StatefulSet, updating", of(stateful_set(updates=True), None, said="rolling update")
    parent, made = deployment()
    yield "Deployment", Case((parent, made), pod_of(made), ("deployment-d-deployme", 3), by_default=False)
    parent, made = deployment("RollingUpdate")
    yield "Deployment, rolling", Case((parent, made), pod_of(made), None, said="set strategy.type: Recreate")
    yield "ReplicaSet", of(owned("apps/v1", "ReplicaSet", "rs", {"replicas": 2}), ("replicaset-rs-replicas", 2), by_default=False)
    rollout = owned("argoproj.io/v1alpha1", "Rollout", "ro", {})
    yield "ReplicaSet of a Rollout", of(owned("apps/v1", "ReplicaSet", "rs", {"replicas": 2}, owner=rollout), None, said="from a Rollout")
    yield "RayCluster", of(ray([ray_workers(2), ray_workers(1, hosts=3)], 1), ("raycluster-r-raycluste"[:-1], 6))
    yield "RayCluster, head without a GPU", of(ray([ray_workers(2)]), ("raycluster-r-rayclust", 2))
    yield "RayCluster, autoscaling", of(ray([ray_workers(5, least=2)], enableInTreeAutoscaling=True), ("raycluster-r-rayclust", 2))
    yield "RayCluster, default replicas", of(ray([ray_workers(least=2)]), ("raycluster-r-rayclust", 2))
    yield "RayCluster, a suspended group", of(ray([ray_workers(2), ray_workers(3, suspend=True)]), ("raycluster-r-rayclust", 2))
    for kind, field in (
        ("PyTorchJob", "pytorchReplicaSpecs"), ("TFJob", "tfReplicaSpecs"), ("XGBoostJob", "xgbReplicaSpecs"),
        ("PaddleJob", "paddleReplicaSpecs"), ("JAXJob", "jaxReplicaSpecs"),
    ):  # fmt: skip
        owner = training(kind, field, {"Master": (1, 1), "Worker": (3, 1)})
        yield kind, of(owner, (f"{kind.lower()}-t-{owner['metadata']['uid'][:8]}", 4))
    elastic = training("PyTorchJob", "pytorchReplicaSpecs", {"Worker": (4, 1)}, elasticPolicy={"minReplicas": 2})
    yield "PyTorchJob, elastic", of(elastic, ("pytorchjob-t-pytorchj", 2))
    policy = {"schedulingPolicy": {"minAvailable": 3}}
    least = training("PyTorchJob", "pytorchReplicaSpecs", {"Master": (1, 0), "Worker": (4, 1)}, runPolicy=policy)
    yield "PyTorchJob, minAvailable", of(least, ("pytorchjob-t-pytorchj", 2))
    mpi = training("MPIJob", "mpiReplicaSpecs", {"Launcher": (1, 1), "Worker": (3, 1)})
    yield "MPIJob", of(mpi, ("mpijob-t-workers-mpijob-t", 3))
    yield "MPIJob, launcher", of(mpi, None, labels={f"{KUBEFLOW}/replica-type": "launcher"}, said="launcher")
    yield "MPIJob, launcher's Job", of(job(owner=mpi), None, mpi, said="launcher")
    yield "Workflow", of(owned("argoproj.io/v1alpha1", "Workflow", "w", {}), None, said="one after another")
    yield "Job of Volcano", of(owned("batch.volcano.sh/v1alpha1", "Job", "v", {}), None, said="no gang can be derived from a Job")
    yield "no owner", Case((), pod_of(None), None, said="no controller")


CASES: dict[str, Case] = dict(cases())


def torch(workers: int = 4, **fields: Any) -> Json:
    return training("PyTorchJob", "pytorchReplicaSpecs", {"Master": (1, 1), "Worker": (workers, 1)}, **fields)


RAY_GROUPS = [ray_workers(5, least=2), ray_workers(4, least=0, groupName="burst")]


@pytest.mark.parametrize(
    ("owner", "label", "role", "minimum", "wanted"),
    [
        (torch(), f"{KUBEFLOW}/replica-type", "master", "5", ("master", "1")),
        (torch(), f"{KUBEFLOW}/replica-type", "Worker", "5", ("worker", "4")),
        (torch(elasticPolicy={"minReplicas": 2}), f"{KUBEFLOW}/replica-type", "worker", "3", ("worker", "2")),
        (torch(runPolicy={"schedulingPolicy": {"minAvailable": 3}}), f"{KUBEFLOW}/replica-type", "worker", "3", (None, None)),
        (torch(), "app", "worker", "5", (None, None)),
        (ray(RAY_GROUPS, 1, enableInTreeAutoscaling=True), "ray.io/group", "headgroup", "3", ("headgroup", "1")),
        (ray(RAY_GROUPS, 1, enableInTreeAutoscaling=True), "ray.io/group", "w", "3", ("w", "2")),
        (ray(RAY_GROUPS, 0, enableInTreeAutoscaling=True), "ray.io/group", "burst", "2", ("burst", "0")),
        (ray([ray_workers(2, hosts=3)], 1), "ray.io/group", "w", "7", ("w", "6")),
        (ray([ray_workers(2)]), "ray.io/group", "w", "2", (None, None)),
    ],
)
def test_roles_of_an_owner_have_their_own_minima(owner, label, role, minimum, wanted):
    webhook = Webhook(Cluster(owner))
    refusal, gang, warnings = webhook.admit(pod_of(owner, labels=ASKED | {label: role}))
    assert (refusal, warnings, webhook.role) == ("", [], wanted)
    assert gang is not None
    assert gang[1] == minimum


def test_role_of_pod_that_differs_from_its_owner_is_refused():
    own = {contract.ANNOTATION_GANG_ROLE: "worker", contract.ANNOTATION_GANG_ROLE_MIN: "3"}
    pod = pod_of(torch(), labels=ASKED | {f"{KUBEFLOW}/replica-type": "worker"}, annotations=own)
    assert contract.ANNOTATION_GANG_ROLE_MIN in Webhook(Cluster(torch())).admit(pod)[0]


def test_every_kind_of_the_table_has_an_example():
    seen = {item["kind"] for case in CASES.values() for item in case.objects}
    assert {row.kind for row in OWNERS} <= seen


@pytest.mark.parametrize("name", CASES)
def test_asking_pod_is_in_gang_of_owner_or_learns_why_not(name):
    case = CASES[name]
    case.pod["metadata"]["labels"].pop(contract.LABEL_GANG_FROM_OWNER, None)
    pod = copy.deepcopy(case.pod)
    pod["metadata"]["labels"] |= ASKED
    refusal, gang, warnings = Webhook(Cluster(*case.objects)).admit(pod)
    assert gang == (None if case.gang is None else (case.gang[0], str(case.gang[1])))
    texts = [refusal, *warnings]
    assert any(case.said in text for text in texts) if case.said else not any(texts)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("where", ["namespace", "setting"])
def test_namespace_or_setting_forms_only_gangs_of_pods_that_need_each_other(name, where):
    case = CASES[name]
    cluster = Cluster(*case.objects, namespace_labels=ASKED if where == "namespace" else {})
    refusal, gang, warnings = Webhook(cluster, for_all=where == "setting").admit(case.pod)
    assert (refusal, warnings) == ("", [])
    assert gang == ((case.gang[0], str(case.gang[1])) if case.gang is not None and case.by_default else None)


@pytest.mark.parametrize("name", CASES)
def test_no_gang_is_formed_unasked(name):
    case = CASES[name]
    assert Webhook(Cluster(*case.objects)).admit(case.pod) == ("", None, [])
    off = copy.deepcopy(case.pod)
    off["metadata"]["labels"] |= {contract.LABEL_GANG_FROM_OWNER: "false"}
    cluster = Cluster(*case.objects, namespace_labels=ASKED)
    assert Webhook(cluster, for_all=True).admit(off) == ("", None, [])
    assert cluster.reads == []


@pytest.mark.parametrize("name", CASES)
def test_closed_gate_refuses_label_of_pod_and_ignores_that_of_namespace(name):
    case = CASES[name]
    cluster = Cluster(*case.objects, namespace_labels=ASKED)
    assert Webhook(cluster, gate=False).admit(case.pod) == ("", None, [])
    asking = copy.deepcopy(case.pod)
    asking["metadata"]["labels"] |= ASKED
    assert "feature gate GangsFromOwners" in Webhook(cluster, gate=False).admit(asking)[0]
    assert cluster.reads == []


# --- what is not looked at ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pod",
    [
        pytest.param(pod_of(indexed(), labels=ASKED, gpus=0), id="no GPU"),
        pytest.param(pod_of(indexed(), labels=ASKED, schedulerName="other"), id="another scheduler"),
        pytest.param(pod_of(indexed(), labels=ASKED, annotations={"aliquot.dev/gang": "g", "aliquot.dev/gang-min": "2"}), id="own gang"),
    ],
)
def test_pod_without_need_of_a_gang_reads_nothing(pod):
    cluster = Cluster(indexed())
    assert Webhook(cluster).admit(pod)[0] == ""
    assert cluster.reads == []


def test_pod_of_another_kind_reads_no_namespace():
    cluster = Cluster(namespace_labels=ASKED)
    assert Webhook(cluster).admit(pod_of(owned("apps/v1", "DaemonSet", "d", {})))[:2] == ("", None)
    assert cluster.reads == []


def test_kai_word_opts_out_of_gang_by_namespace():
    pod = pod_of(indexed(), annotations={"kai.scheduler/skip-podgrouper": "true"})
    assert Webhook(Cluster(indexed(), namespace_labels=ASKED)).admit(pod)[:2] == ("", None)


# --- what fails -----------------------------------------------------------------------------------------------------------


def test_pod_with_unknown_gang_is_refused_until_api_answers():
    cluster, pod = Cluster(indexed()), pod_of(indexed(), labels=ASKED)
    webhook = Webhook(cluster)
    cluster.fails = True

    async def twice() -> list[Any]:
        first = await webhook.admitted(pod)
        cluster.fails = False
        return [first, await webhook.admitted(pod)]

    refused, admitted = asyncio.run(twice())
    assert "the gang of the pod is unknown, try again: GET: 503" in refused[0]
    assert admitted[1] == ("job-j-job-j-ui", "4")


@pytest.mark.parametrize(
    ("label", "objects", "said"),
    [
        ("true", (), "its owner Job 'j' does not exist"),
        ("maybe", (), "of the pod: expected true or false, found 'maybe'"),
    ],
)
def test_wrong_label_or_missing_owner_is_refused(label, objects, said):
    pod = pod_of(indexed(), labels={contract.LABEL_GANG_FROM_OWNER: label})
    assert said in Webhook(Cluster(*objects)).admit(pod)[0]


@pytest.mark.parametrize("version", ["../v1", "batch/v1/namespaces/other", "batch/v1?x", "Batch/v1", "batch /v1"])
def test_owner_reference_leads_to_no_other_path(version):
    pod = pod_of(indexed(), labels=ASKED)
    pod["metadata"]["ownerReferences"][0]["apiVersion"] = version
    cluster = Cluster(indexed())
    assert "expected an apiVersion" in Webhook(cluster).admit(pod)[0]
    assert cluster.reads == []


@pytest.mark.parametrize("broken", [None, [], "x", 7, {"spec": "x"}, {"spec": {"replicatedJobs": 3}}, {"spec": {"replicas": True}}])
def test_owner_of_unexpected_form_breaks_nothing(broken):
    for case in CASES.values():
        cluster = Cluster(*case.objects)
        for path, item in cluster.objects.items():
            cluster.objects[path] = {**item, **broken} if isinstance(broken, dict) else {**item, "spec": broken}
        pod = copy.deepcopy(case.pod)
        pod["metadata"]["labels"] |= ASKED
        refusal, gang, warnings = Webhook(cluster).admit(pod)
        assert refusal or gang or warnings


# --- reads ----------------------------------------------------------------------------------------------------------------


def test_pods_of_one_owner_at_once_read_it_once():
    set_of = jobset(replicated("a", 1, 8))
    made = job_of(set_of, "a", 8)
    cluster = Cluster(set_of, made, namespace_labels=ASKED)
    webhook = Webhook(cluster)

    async def all_at_once() -> list[Any]:
        return await asyncio.gather(*(webhook.admitted(pod_of(made, f"p-{number}")) for number in range(8)))

    assert {gang for _, gang, _ in asyncio.run(all_at_once())} == {("jobset-js-jobset-j", "8")}
    assert len(cluster.reads) == 3


def test_size_that_changed_counts_after_a_moment():
    cluster = Cluster(indexed(parallelism=4))
    webhook, pod = Webhook(cluster), pod_of(indexed(), labels=ASKED)

    async def sizes() -> Iterator[str]:
        found = []
        for after in (0.0, KEPT_SECONDS / 2, KEPT_SECONDS):
            webhook.now = after
            found.append((await webhook.admitted(pod))[1])
            cluster.add(indexed(parallelism=6))
        return iter(gang[1] for gang in found if gang is not None)

    assert list(asyncio.run(sizes())) == ["4", "4", "6"]


def test_recreated_owner_is_read_again_at_once():
    old, new = indexed(parallelism=4), indexed(parallelism=6)
    new["metadata"]["uid"] = "another-uid"
    cluster = Cluster(old)
    webhook = Webhook(cluster)

    async def both() -> list[Any]:
        first = await webhook.admitted(pod_of(old, labels=ASKED))
        cluster.add(new)
        return [first[1], (await webhook.admitted(pod_of(new, labels=ASKED)))[1], (await webhook.admitted(pod_of(old, labels=ASKED)))[0]]

    first, second, gone = asyncio.run(both())
    assert (first[1], second[1], first[0] == second[0]) == ("4", "6", False)
    assert "does not exist" in gone


# --- PodGroups ------------------------------------------------------------------------------------------------------------

SPECS: dict[str, Json] = {
    "KAI": {"minMember": 3}, "Volcano": {"minMember": 3}, "coscheduling": {"minMember": 3},
    "Kubernetes": {"schedulingPolicy": {"gang": {"minCount": 3}}},
}  # fmt: skip


def naming(word: str, name: str = "g") -> Json:
    pod = pod_of(None)
    if word.startswith("spec."):
        pod["spec"][word.removeprefix("spec.")] = {"podGroupName": name}
    else:
        pod["metadata"]["labels" if word == "scheduling.x-k8s.io/pod-group" else "annotations"][word] = name
    return pod


@pytest.mark.parametrize("api", POD_GROUPS, ids=lambda api: api.word)
def test_pod_group_gives_gang_its_minimum(api):
    for version in api.api_versions:
        cluster = Cluster(owned(version, "PodGroup", "g", SPECS[api.system]))
        assert Webhook(cluster).admit(naming(api.word)) == ("", ("g", "3"), [])


IDLE: dict[str, Json] = {
    "KAI": {
        "topologyConstraint": {"requiredTopologyLevel": "my/rack", "preferredTopologyLevel": "my/host"},
        "queue": "a",
        "minSubGroup": 2,
    },
    "Volcano": {"minTaskMember": {"worker": 4}, "minResources": {"cpu": "1"}, "networkTopology": {"mode": "soft"}, "priorityClassName": ""},
    "coscheduling": {"scheduleTimeoutSeconds": 30},
    "Kubernetes": {"priorityClassName": "high", "podGroupTemplateRef": {"workload": {"workloadName": "w"}}},
}


@pytest.mark.parametrize("api", POD_GROUPS, ids=lambda api: api.word)
def test_field_of_pod_group_without_effect_is_named_in_a_warning(api):
    cluster = Cluster(owned(api.api_versions[0], "PodGroup", "g", SPECS[api.system] | IDLE[api.system]))
    refusal, gang, (warning,) = Webhook(cluster).admit(naming(api.word))
    assert (refusal, gang) == ("", ("g", "3"))
    assert warning == f"PodGroup 'g': {IDLE_NAMES[api.system]} of its spec has no effect here"


IDLE_NAMES = {
    "KAI": "topologyConstraint.preferredTopologyLevel, minSubGroup, queue",
    "Volcano": "minTaskMember, minResources, networkTopology",
    "coscheduling": "scheduleTimeoutSeconds",
    "Kubernetes": "priorityClassName",
}


@pytest.mark.parametrize("api", POD_GROUPS, ids=lambda api: api.word)
def test_pod_that_names_missing_pod_group_is_refused(api):
    refusal = Webhook(Cluster()).admit(naming(api.word))[0]
    assert api.word in refusal
    assert "create it before the pod" in refusal


@pytest.mark.parametrize("api", POD_GROUPS, ids=lambda api: api.word)
def test_closed_gate_refuses_name_without_size(api):
    cluster = Cluster(owned(api.api_versions[0], "PodGroup", "g", SPECS[api.system]))
    assert api.word in Webhook(cluster, gate=False).admit(naming(api.word))[0]
    assert cluster.reads == []


def test_basic_group_of_kubernetes_starts_pod_by_pod():
    cluster = Cluster(owned("scheduling.k8s.io/v1alpha2", "PodGroup", "g", {"schedulingPolicy": {"basic": {}}}))
    assert Webhook(cluster).admit(naming("spec.schedulingGroup")) == ("", ("g", "1"), [])


def test_group_of_kubernetes_is_left_to_kube_scheduler_that_serves_it():
    cluster = Cluster()
    assert Webhook(cluster, scheduling_groups=True).admit(naming("spec.schedulingGroup")) == ("", None, [])
    assert cluster.reads == []


TOPOLOGIES: dict[str, tuple[str, Json, str]] = {
    "KAI required": ("pod-group-name", {"topologyConstraint": {"requiredTopologyLevel": "my/rack"}}, "required"),
    "KAI preferred": ("pod-group-name", {"topologyConstraint": {"preferredTopologyLevel": "my/rack"}}, "preferred"),
    "Kubernetes": ("spec.schedulingGroup", {"schedulingConstraints": {"topology": [{"key": "my/rack"}]}}, "required"),
}


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_topology_of_pod_group_becomes_domain_of_gang(name):
    word, spec, mode = TOPOLOGIES[name]
    api = next(api for api in POD_GROUPS if api.word == word)
    normaliser = Normaliser(Options(lambda _: (81920,), gangs_from_owners=True))
    cluster = Cluster(owned(api.api_versions[0], "PodGroup", "g", SPECS[api.system] | spec))
    found = asyncio.run(Grouper(normaliser, cluster, lambda: 0.0, for_all=False).find(naming(word), "team"))
    outcome = normaliser.admit(naming(word), found)
    [annotations] = [one["value"] for one in outcome.patch if one["path"] == "/metadata/annotations"]
    assert (annotations[contract.ANNOTATION_DOMAIN], annotations[contract.ANNOTATION_DOMAIN_LEVEL]) == (mode, "my/rack")


@pytest.mark.parametrize(
    ("word", "spec", "said"),
    [
        ("pod-group-name", {"subGroups": [{"name": "a", "minMember": 3}]}, "to be a, found ''"),
        ("pod-group-name", {"subGroups": [{"name": "a"}, {"name": "b", "parent": "a"}]}, "nested subGroups"),
        ("pod-group-name", {"subGroups": [{"name": "a", "minSubGroup": 2}]}, "nested subGroups"),
        ("pod-group-name", {"subGroups": [{"name": "a", "topologyConstraint": {"requiredTopologyLevel": "my/rack"}}]}, "the whole group"),
        ("scheduling.volcano.sh/group-name", {"minTaskMember": {"a": 3}}, "set annotation volcano.sh/task-spec"),
        ("pod-group-name", {"topologyConstraint": {"requiredTopologyLevel": "pool"}}, "cannot be a level"),
        ("scheduling.volcano.sh/group-name", {"networkTopology": {"mode": "hard"}}, "networkTopology.mode: hard"),
    ],
)
def test_pod_group_that_cannot_be_honoured_is_refused(word, spec, said):
    api = next(api for api in POD_GROUPS if api.word == word)
    cluster = Cluster(owned(api.api_versions[0], "PodGroup", "g", SPECS[api.system] | spec))
    assert said in Webhook(cluster).admit(naming(word))[0]


@pytest.mark.parametrize(
    ("word", "spec", "part", "wanted"),
    [
        ("pod-group-name", {"subGroups": [{"name": "head", "minMember": 1}, {"name": "work", "minMember": 4}]}, "work", ("5", "work", "4")),
        ("pod-group-name", {"subGroups": [{"name": "head"}, {"name": "work", "minMember": 2}]}, "head", ("3", "head", "1")),
        ("scheduling.volcano.sh/group-name", {"minTaskMember": {"head": 1, "work": 2}}, "work", ("3", "work", "2")),
        ("scheduling.k8s.io/group-name", {"minTaskMember": {"work": 3, "idle": 0}}, "idle", ("3", "idle", "0")),
        ("scheduling.volcano.sh/group-name", {"minTaskMember": {"head": 1, "work": 3}}, "work", ("3", None, None)),
    ],
)
def test_parts_of_pod_group_are_roles(word, spec, part, wanted):
    api = next(api for api in POD_GROUPS if api.word == word)
    pod = naming(word)
    where = "labels" if api.system == "KAI" else "annotations"
    pod["metadata"].setdefault(where, {})[api.part] = part
    webhook = Webhook(Cluster(owned(api.api_versions[0], "PodGroup", "g", SPECS[api.system] | spec)))
    assert webhook.admit(pod)[:2] == ("", ("g", wanted[0]))
    assert (wanted[0], *webhook.role) == wanted


@pytest.mark.parametrize(
    ("word", "spec"),
    [
        ("pod-group-name", {"subGroups": [{"name": "a", "minMember": 2}]}),
        ("scheduling.volcano.sh/group-name", {"minTaskMember": {"a": 2}}),
    ],
)
def test_more_members_than_parts_add_up_to_are_refused(word, spec):
    api = next(api for api in POD_GROUPS if api.word == word)
    pod = naming(word)
    pod["metadata"].setdefault("labels" if api.system == "KAI" else "annotations", {})[api.part] = "a"
    cluster = Cluster(owned(api.api_versions[0], "PodGroup", "g", SPECS[api.system] | spec))
    assert "minMember 3, more than the 2" in Webhook(cluster).admit(pod)[0]


def test_pod_group_counts_before_owner():
    pod = naming("pod-group-name")
    pod["metadata"] |= {"labels": dict(ASKED), "ownerReferences": [reference(indexed())]}
    cluster = Cluster(indexed(), owned("scheduling.run.ai/v2alpha2", "PodGroup", "g", {"minMember": 2}))
    assert Webhook(cluster).admit(pod) == ("", ("g", "2"), [])


# --- templates and dry runs ------------------------------------------------------------------------------------------------

NAMED_LATER: dict[str, Json] = {
    "label": {"labels": ASKED},
    "PodGroup": {"annotations": {"pod-group-name": "g"}},
    "domain": {"annotations": {contract.ANNOTATION_DOMAIN: "required"}, "labels": ASKED},
    "KAI's topology": {"annotations": {"kai.scheduler/topology-required-placement": "rack"}, "labels": ASKED},
}


@pytest.mark.parametrize("name", NAMED_LATER)
def test_template_is_warned_of_gang_only_while_gate_is_closed(name):
    item = job()
    item["spec"]["template"]["metadata"] = NAMED_LATER[name]
    cluster = Cluster()
    assert Webhook(cluster).warnings("/templates/adopt", item, "batch") == ""
    assert "its pods will be refused" in Webhook(cluster, gate=False).warnings("/templates/adopt", item, "batch")
    assert cluster.reads == []


def test_template_with_wrong_gang_is_warned_of_with_open_gate():
    item = job()
    item["spec"]["template"]["metadata"] = {"annotations": {contract.ANNOTATION_GANG: "g"}}
    assert "its pods will be refused" in Webhook(Cluster()).warnings("/templates/adopt", item, "batch")


def test_dry_run_reads_pod_group():
    pod = naming("pod-group-name")
    assert "would refuse this pod" in Webhook(Cluster()).warnings("/mutate/dry-run", pod)
    cluster = Cluster(owned("scheduling.run.ai/v2alpha2", "PodGroup", "g", {"minMember": 3}))
    assert "would adopt this pod" in Webhook(cluster).warnings("/mutate/dry-run", pod)


# --- no deadlock ----------------------------------------------------------------------------------------------------------


@dataclass
class Pod:
    """A pod of the model: it exists once all pods of ``after`` started."""

    content: Json
    after: tuple[str, ...] = ()


def starts_whole(objects: list[Json], pods: Mapping[str, Pod]) -> bool:
    """Run controllers and scheduler to the end: a gang starts once as many of its members exist as its minimum says."""
    webhook = Webhook(Cluster(*objects, namespace_labels=ASKED))
    gangs: dict[str, tuple[str, str] | None] = {}
    started: set[str] = set()
    while True:
        for name, pod in pods.items():
            if name not in gangs and started.issuperset(pod.after):
                refusal, gangs[name], _ = webhook.admit(pod.content)
                assert refusal == ""
        members: dict[str, list[str]] = {}
        for name, gang in gangs.items():
            members.setdefault(name if gang is None else gang[0], []).append(name)
        ready = {name for name, gang in gangs.items() if gang is None or len(members[gang[0]]) >= int(gang[1])}
        if ready <= started:
            return started == set(pods)
        started |= ready


GPUS = st.sampled_from([0, 1])


@given(
    st.lists(st.tuples(st.integers(1, 2), st.integers(1, 3), GPUS), min_size=1, max_size=3),
    st.sampled_from(["", "dependsOn", "InOrder", "exclusive"]),
)
def test_no_gang_of_jobset_waits_for_later_pods(shape, mode):
    jobs = [replicated(f"r{number}", *sizes) for number, sizes in enumerate(shape)]
    if mode == "dependsOn":
        for number, one in enumerate(jobs[1:]):
            one["dependsOn"] = [{"name": f"r{number}", "status": "Ready"}]
    set_of = jobset(*jobs, **({"startupPolicy": {"startupPolicyOrder": "InOrder"}} if mode == "InOrder" else {}))
    objects, pods = [set_of], dict[str, Pod]()
    earlier: tuple[str, ...] = ()
    for number, (replicas, parallelism, gpus) in enumerate(shape):
        names: list[str] = []
        for index in range(replicas):
            made = job_of(set_of, f"r{number}", parallelism, index, uid=f"r{number}{index}-uid-uid")
            objects.append(made)
            first = f"r{number}-{index}-0"
            for position in range(parallelism):
                name = f"r{number}-{index}-{position}"
                stated = {f"alpha.{JOBSET}/exclusive-topology": "rack"} if mode == "exclusive" else {}
                labels = {"batch.kubernetes.io/job-completion-index": str(position)}
                after = (first,) if mode == "exclusive" and position else ()
                pods[name] = Pod(pod_of(made, name, labels=labels, annotations=stated, gpus=gpus), (*earlier, *after))
                names.append(name)
        if mode in ("dependsOn", "InOrder"):
            earlier = tuple(names)
    assert starts_whole(objects, pods)


@given(st.integers(1, 5), GPUS, st.sampled_from(["LeaderCreated", "LeaderReady"]), st.booleans())
def test_no_gang_of_leader_worker_set_waits_for_later_pods(size, leader_gpus, policy, exclusive):
    owner = lws(size, template(leader_gpus), startupPolicy=policy)
    stated = {f"{LWS}/exclusive-topology": "rack"} if exclusive else {}
    pods = {str(index): Pod(lws_pod(index, size, stated)) for index in range(size)}
    pods["0"].content["spec"] = template(leader_gpus)["spec"]
    for index in range(1, size):
        pods[str(index)].after = ("0",) if exclusive or policy == "LeaderReady" else ()
    assert starts_whole([owner], pods)
