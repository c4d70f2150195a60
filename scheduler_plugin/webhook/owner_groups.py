# SPDX-License-Identifier: Apache-2.0
"""Finds the gang of a pod from its owners: name and minimum size, by one table of the kinds that own pods.

The functions are pure. They yield a reference to each object that they need, and get the object back, or None if there is no such object.
``grouper`` reads the objects.

Invariant: no derived gang waits for a pod that is created only after members of it started. So what starts in steps is several gangs, one
for each step, or no gang. A gang counts the pods that ask for a GPU: others need no place of ours.

Sources: JobSet 0.12, LeaderWorkerSet 0.9, KubeRay 1.6, training-operator 1.9, mpi-operator 0.8, trainer 2.0.
"""

import re
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

from aliquot.contract.errors import quote
from aliquot.placement.request import RequestError
from scheduler_plugin.core.cluster.roles import MAX_MEMBERS, Role

Json: TypeAlias = Mapping[str, Any]

_API_VERSION: Final = re.compile(r"(?:[a-z0-9][a-z0-9.-]*/)?v[a-z0-9]+")
_UID_CHARS: Final = 8
"""Part of an owner's UID in the gang's name, so that an owner that was recreated under its name has another gang."""
_INDEX: Final = "batch.kubernetes.io/job-completion-index"
_JOBSET: Final = "jobset.sigs.k8s.io"
_LWS: Final = "leaderworkerset.sigs.k8s.io"
_KUBEFLOW_ROLE: Final = "training.kubeflow.org/replica-type"
_RAY_HEAD: Final = "headgroup"
_MPI_LAUNCHER: Final = "an MPI launcher may be created only when its workers run"


@dataclass(frozen=True, slots=True)
class Reference:
    """An object in the pod's namespace."""

    api_version: str
    plural: str
    kind: str
    name: str
    uid: str = ""
    """The UID that it must have; empty for any."""


@dataclass(frozen=True, slots=True)
class Group:
    """The gang of a pod."""

    name: str
    minimum: int
    only_if_asked: bool = False
    """Whether only a pod that asks for it by its own label is in this gang: its kind starts pods that do not need each other as well."""
    role: Role | None = None
    """The pod's role, if pods of several roles with GPUs start together."""


@dataclass(frozen=True, slots=True)
class Alone:
    """The pod starts by itself, and why."""

    why: str
    is_refused: bool = False
    """Whether a pod that asks for a gang by its own label is refused, because the sentence names what to change."""


Steps: TypeAlias = Generator[Reference, Json | None, Group | Alone]


@dataclass(frozen=True, slots=True)
class OwnedPod:
    """What the rules read of a pod."""

    name: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    controller: Mapping[str, Any]
    """Its controlling ownerReference; empty without one."""
    joins: Callable[[Json], bool]
    """Whether a pod of this template asks our scheduler for a GPU."""


@dataclass(frozen=True, slots=True)
class OwnerKind:
    """One row: a kind of object that owns pods or owners of pods."""

    group: str
    kind: str
    plural: str
    gang: str
    """What is a gang, for the documents."""
    rule: Callable[[OwnedPod, "Found"], Steps] | None = None
    """None: no pod has this kind as its controller."""
    version: str = ""
    """For an object that a label names, not an ownerReference."""
    is_read: bool = True
    """Whether the scheduler needs the right to get it."""


@dataclass(frozen=True, slots=True)
class Found:
    """An owner that exists."""

    row: OwnerKind
    reference: Reference
    content: Json = field(default_factory=dict)

    @property
    def spec(self) -> Json:
        """The owner's spec."""
        return _mapping(self.content.get("spec"))

    def gang_name(self, part: str = "") -> str:
        """Return a name for the gang of all, or of a part of, this owner's pods."""
        uid = str(_mapping(self.content.get("metadata")).get("uid") or self.reference.uid)
        return "-".join(filter(None, (self.row.kind.lower(), self.reference.name, part, uid[:_UID_CHARS])))


def group_of(pod: OwnedPod) -> Steps:
    """Find the gang of a pod by its controller. Raises RequestError: an owner is missing or unreadable."""
    row = row_of(pod.controller)
    if row is None or row.rule is None:
        kind = str(pod.controller.get("kind") or "")
        why = f"no gang can be derived from a {kind}" if kind else "the pod has no controller"
        return Alone(why, is_refused=True)
    if row.kind == "StatefulSet" and (name := pod.labels.get(f"{_LWS}/name")):
        # A worker's chain of owners has five links. The labels say the same.
        [lws] = [other for other in OWNERS if other.kind == "LeaderWorkerSet"]
        reference = Reference(f"{lws.group}/{lws.version}", lws.plural, lws.kind, name)
        return _of_lws(pod, (yield from _read_reference(lws, reference)))
    found = yield from _read(row, pod.controller)
    return (yield from row.rule(pod, found))


def row_of(owner: Json) -> OwnerKind | None:
    """Return the row of an ownerReference; None for a kind without one."""
    group, _, _ = _api_version(owner).rpartition("/")
    return next((row for row in OWNERS if (row.group, row.kind) == (group, owner.get("kind"))), None)


# --- reading --------------------------------------------------------------------------------------------------------------


def _read(row: OwnerKind, owner: Json) -> Generator[Reference, Json | None, Found]:
    reference = Reference(_api_version(owner), row.plural, row.kind, str(owner.get("name") or ""), str(owner.get("uid") or ""))
    return (yield from _read_reference(row, reference))


def _read_reference(row: OwnerKind, reference: Reference) -> Generator[Reference, Json | None, Found]:
    if not row.is_read:
        return Found(row, reference)
    content = yield reference
    if content is None:
        raise RequestError(f"the gang of the pod is unknown: its owner {reference.kind} {quote(reference.name)} does not exist")
    return Found(row, reference, content)


def _api_version(owner: Json) -> str:
    """Return the version of an ownerReference, which becomes part of a path. Raises RequestError."""
    text = str(owner.get("apiVersion") or "")
    if text and not _API_VERSION.fullmatch(text):
        raise RequestError(f"ownerReference {quote(str(owner.get('name')))}: expected an apiVersion such as batch/v1, found {quote(text)}")
    return text


def controller_of(content: Json) -> Json:
    """Return the ownerReference of the object that controls this one; empty without one."""
    owners = _mapping(content.get("metadata")).get("ownerReferences")
    found = (_mapping(owner) for owner in (owners if isinstance(owners, list) else ()))
    return next((owner for owner in found if owner.get("controller")), {})


def _mapping(value: Any) -> Json:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Json]:
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


def _count(value: Any, default: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def _gang_of_roles(name: str, minima: Mapping[str, int], own: str) -> Group | Alone:
    """Return the gang of pods with GPUs in several roles. Args: minima: how many of each role it needs. own: the pod's role."""
    found = _gang(name, sum(minima.values()))
    if isinstance(found, Alone) or len(minima) < 2 or own not in minima:
        return found
    return replace(found, role=Role(own, minima[own]))


def _gang(name: str, minimum: int, *, only_if_asked: bool = False) -> Group | Alone:
    """Return the gang of so many pods with GPUs."""
    if minimum > MAX_MEMBERS:
        return Alone(f"it would have {minimum} members, and at most {MAX_MEMBERS} can start together", is_refused=True)
    return Group(name, minimum, only_if_asked) if minimum > 1 else Alone("only one of its pods asks for a GPU")


# --- batch ----------------------------------------------------------------------------------------------------------------


def _of_job(pod: OwnedPod, job: Found) -> Steps:
    parent = controller_of(job.content)
    row = row_of(parent)
    if row is not None and row.kind == "JobSet":
        return _of_jobset(pod, job, (yield from _read(row, parent)))
    if parent.get("kind") == "MPIJob":
        return Alone(_MPI_LAUNCHER)
    if parent.get("kind") == "RayJob":
        return Alone("the job that submits a RayJob starts after its cluster")
    # Kubernetes' own rule for a gang (gate WorkloadWithJob): all pods exist at once, and each has its own part of the work.
    is_parallel = job.spec.get("completionMode") == "Indexed" and job.spec.get("completions") == job.spec.get("parallelism")
    return _gang(job.gang_name(), _pods_of_job(job.spec), only_if_asked=not is_parallel)


def _pods_of_job(spec: Json) -> int:
    """Return how many pods of a Job run at the same time."""
    parallelism = _count(spec.get("parallelism"), 1)
    return min(parallelism, _count(spec.get("completions"), parallelism))


def _of_jobset(pod: OwnedPod, job: Found, jobset: Found) -> Group | Alone:
    if waits := _waits_for_first_pod(pod, job):
        is_first = pod.labels.get(_INDEX, pod.annotations.get(_INDEX)) == "0"
        return Alone(waits) if is_first else _gang(job.gang_name("followers"), _pods_of_job(job.spec) - 1)
    jobs = _list(jobset.spec.get("replicatedJobs"))
    in_order = _mapping(jobset.spec.get("startupPolicy")).get("startupPolicyOrder") == "InOrder"
    if not in_order and not any(one.get("dependsOn") for one in jobs):
        return _gang(jobset.gang_name(), _pods_of_jobs(pod, jobs))
    labels = _mapping(_mapping(job.content.get("metadata")).get("labels"))
    own = str(labels.get(f"{_JOBSET}/replicatedjob-name") or pod.labels.get(f"{_JOBSET}/replicatedjob-name") or "")
    return _gang(jobset.gang_name(own), _pods_of_jobs(pod, [one for one in jobs if one.get("name") == own]))


def _waits_for_first_pod(pod: OwnedPod, job: Found) -> str:
    """Say why the pods of a Job wait for its first pod; empty if they do not. JobSet copies the topology from it to the others."""
    stated = {**_mapping(_mapping(job.content.get("metadata")).get("annotations")), **pod.annotations}
    is_exclusive = f"alpha.{_JOBSET}/exclusive-topology" in stated and f"alpha.{_JOBSET}/node-selector" not in stated
    return "JobSet creates the others once this pod has a node (exclusive-topology)" if is_exclusive else ""


def _pods_of_jobs(pod: OwnedPod, jobs: Iterable[Json]) -> int:
    """Add up the pods with GPUs of the replicated jobs of a JobSet."""
    total = 0
    for one in jobs:
        spec = _mapping(_mapping(one.get("template")).get("spec"))
        if pod.joins(_mapping(spec.get("template"))):
            total += _count(one.get("replicas"), 1) * _pods_of_job(spec)
    return total


# --- LeaderWorkerSet, StatefulSet, Deployment -----------------------------------------------------------------------------


def _of_stateful_set(pod: OwnedPod, owner: Found) -> Steps:
    del pod
    yield from ()
    if owner.spec.get("podManagementPolicy") != "Parallel":
        return Alone("this StatefulSet starts its pods one by one: set podManagementPolicy: Parallel", is_refused=True)
    status = _mapping(owner.content.get("status"))
    if status.get("currentRevision") != status.get("updateRevision"):
        return Alone("a rolling update of this StatefulSet replaces its pods one by one")
    return _gang(owner.gang_name(), _count(owner.spec.get("replicas"), 1), only_if_asked=True)


def _of_lws(pod: OwnedPod, owner: Found) -> Group | Alone:
    template = _mapping(owner.spec.get("leaderWorkerTemplate"))
    size_text = pod.annotations.get(f"{_LWS}/size", "")
    size = int(size_text) if size_text.isascii() and size_text.isdigit() else _count(template.get("size"), 1)
    is_leader = pod.labels.get(f"{_LWS}/worker-index") == "0"
    leader = pod.name if is_leader else pod.annotations.get(f"{_LWS}/leader-name", "")
    workers = size - 1 if pod.joins(_mapping(template.get("workerTemplate"))) else 0
    if owner.spec.get("startupPolicy") == "LeaderReady" or f"{_LWS}/exclusive-topology" in pod.annotations:
        if is_leader:
            return Alone("LeaderWorkerSet creates the workers after the leader (LeaderReady, or exclusive-topology)")
        return _gang(owner.gang_name(f"{leader}-workers"), workers)
    leads = pod.joins(_mapping(template.get("leaderTemplate") or template.get("workerTemplate")))
    return _gang(owner.gang_name(leader), workers + leads)


def _of_replica_set(pod: OwnedPod, owner: Found) -> Steps:
    del pod
    parent = controller_of(owner.content)
    row = row_of(parent)
    if parent and (row is None or row.kind != "Deployment"):
        return Alone(f"no gang can be derived from a {parent.get('kind')}", is_refused=True)
    if row is None:
        return _gang(owner.gang_name(), _count(owner.spec.get("replicas"), 1), only_if_asked=True)
    deployment = yield from _read(row, parent)
    if _mapping(deployment.spec.get("strategy")).get("type") != "Recreate":
        return Alone("this Deployment replaces its pods one by one: set strategy.type: Recreate", is_refused=True)
    return _gang(deployment.gang_name(), _count(deployment.spec.get("replicas"), 1), only_if_asked=True)


# --- Ray ------------------------------------------------------------------------------------------------------------------


def _of_ray_cluster(pod: OwnedPod, owner: Found) -> Steps:
    yield from ()
    may_grow = bool(owner.spec.get("enableInTreeAutoscaling"))
    head = _mapping(_mapping(owner.spec.get("headGroupSpec")).get("template"))
    minima = {_RAY_HEAD: 1} if pod.joins(head) else {}
    for workers in _list(owner.spec.get("workerGroupSpecs")):
        if not workers.get("suspend") and pod.joins(_mapping(workers.get("template"))):
            replicas = _ray_replicas(workers, may_grow=may_grow) * _count(workers.get("numOfHosts"), 1)
            name = str(workers.get("groupName") or "")
            minima[name] = minima.get(name, 0) + replicas
    return _gang_of_roles(owner.gang_name(), minima, pod.labels.get("ray.io/group", ""))


def _ray_replicas(workers: Json, *, may_grow: bool) -> int:
    """Return the replicas that a group of workers has at the start. Source: GetWorkerGroupDesiredReplicas of KubeRay."""
    least = _count(workers.get("minReplicas"), 0)
    if may_grow:
        return least
    wanted = _count(workers.get("replicas"), least)
    return max(least, min(wanted, _count(workers.get("maxReplicas"), wanted)))


# --- Kubeflow -------------------------------------------------------------------------------------------------------------


def _of_training_job(specs: str) -> Callable[[OwnedPod, Found], Steps]:
    """Return the rule of a kind whose field with this name has the pods of each role."""

    def rule(pod: OwnedPod, owner: Found) -> Steps:
        yield from ()
        minima, without = dict[str, int](), 0
        least = _mapping(owner.spec.get("elasticPolicy")).get("minReplicas")
        for role, spec in _mapping(owner.spec.get(specs)).items():
            replicas = _count(_mapping(spec).get("replicas"), 1)
            if role.lower() == "worker":
                replicas = min(replicas, _count(least, replicas))
            if pod.joins(_mapping(_mapping(spec).get("template"))):
                minima[role.lower()] = replicas
            else:
                without += replicas
        total = sum(minima.values())
        minimum = _at_least(owner, total, without)
        if minimum < total:  # minAvailable counts all roles together
            return _gang(owner.gang_name(), minimum)
        return _gang_of_roles(owner.gang_name(), minima, pod.labels.get(_KUBEFLOW_ROLE, "").lower())

    return rule


def _at_least(owner: Found, with_gpu: int, without: int) -> int:
    """Return the minimum of pods with GPUs that a job's minAvailable leaves. It also counts the pods without GPUs."""
    policy = _mapping(_mapping(owner.spec.get("runPolicy")).get("schedulingPolicy"))
    return min(with_gpu, max(1, _count(policy.get("minAvailable"), with_gpu + without) - without))


def _of_mpi_job(pod: OwnedPod, owner: Found) -> Steps:
    yield from ()
    role = pod.labels.get(_KUBEFLOW_ROLE) or pod.labels.get("training.kubeflow.org/job-role") or ""
    if role.lower() == "launcher":
        return Alone(_MPI_LAUNCHER)
    workers = _mapping(_mapping(owner.spec.get("mpiReplicaSpecs")).get("Worker"))
    replicas = _count(workers.get("replicas"), 1) if pod.joins(_mapping(workers.get("template"))) else 0
    return _gang(owner.gang_name("workers"), _at_least(owner, replicas, 1))


def _of_workflow(pod: OwnedPod, owner: Found) -> Steps:
    del pod, owner
    yield from ()
    return Alone("the steps of a Workflow start one after another")


_KUBEFLOW_ROLES: Final = (
    "all pods with GPUs, each role with its own minimum; `elasticPolicy.minReplicas` workers. A lower `minAvailable` is one minimum for "
    "all roles"
)

OWNERS: Final = (
    OwnerKind(
        "batch",
        "Job",
        "jobs",
        "the pods that run at the same time; without the pod's own label only if it is Indexed with `completions` = `parallelism`",
        _of_job,
    ),
    OwnerKind(
        "jobset.x-k8s.io",
        "JobSet",
        "jobsets",
        "all its pods; with `dependsOn` or `startupPolicy: InOrder` one gang for each replicated job; with exclusive-topology the first "
        "pod of each Job starts alone, and its others are a gang",
    ),
    OwnerKind(
        "leaderworkerset.x-k8s.io",
        "LeaderWorkerSet",
        "leaderworkersets",
        "leader and workers of one group; with `LeaderReady` or exclusive-topology the leader starts alone, and its workers are a gang",
        version="v1",
    ),
    OwnerKind(
        "apps", "StatefulSet", "statefulsets", "only by the pod's own label, and with `podManagementPolicy: Parallel`", _of_stateful_set
    ),
    OwnerKind("apps", "ReplicaSet", "replicasets", "as its Deployment; alone only by the pod's own label", _of_replica_set),
    OwnerKind("apps", "Deployment", "deployments", "only by the pod's own label, and with `strategy.type: Recreate`"),
    OwnerKind(
        "ray.io",
        "RayCluster",
        "rayclusters",
        "head and workers, each worker group with its own minimum; with autoscaling `minReplicas` workers. A RayJob is its cluster",
        _of_ray_cluster,
    ),
    *(
        OwnerKind("kubeflow.org", kind, f"{kind.lower()}s", _KUBEFLOW_ROLES, _of_training_job(specs))
        for kind, specs in (
            ("PyTorchJob", "pytorchReplicaSpecs"),
            ("TFJob", "tfReplicaSpecs"),
            ("XGBoostJob", "xgbReplicaSpecs"),
            ("PaddleJob", "paddleReplicaSpecs"),
            ("JAXJob", "jaxReplicaSpecs"),
        )
    ),
    OwnerKind("kubeflow.org", "MPIJob", "mpijobs", "the workers; the launcher starts alone", _of_mpi_job),
    OwnerKind("argoproj.io", "Workflow", "workflows", "no gang: its steps start one after another", _of_workflow, is_read=False),
)
"""The table. A TrainJob is its JobSet."""
