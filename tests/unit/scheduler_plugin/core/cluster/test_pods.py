# SPDX-License-Identifier: Apache-2.0
import json

import msgspec
import pytest

from aliquot.contract.model import ContainerAssignment, PodAssignment
from scheduler_plugin.core.cluster.nodes import NodeDirectory, NodeFacts, Taint
from scheduler_plugin.core.cluster.objects import NodeObject, PodObject, host_amounts, pod_facts
from scheduler_plugin.core.cluster.pods import Use, footprint
from tests.unit.scheduler_plugin.builders import make_share, make_spec


def use_of(*containers: tuple) -> Use:
    """Place each container on the same device; return what the pod takes of it."""
    specs = [spec for spec, _ in containers]
    placed = tuple(ContainerAssignment(spec.name, (share,)) for spec, share in containers if share is not None)
    return footprint(specs, PodAssignment("u", placed))["GPU-n1-0"]


def share(mib: int, cores: int | None = None):
    return make_share("n1", 0, mib, cores)


def test_app_containers_add_up():
    assert use_of((make_spec("a"), share(100, 10)), (make_spec("b"), share(200))) == Use(300, 10, 2, 1)


def test_an_init_container_counts_only_beyond_what_comes_after_it():
    init, app = make_spec("i", init=True), make_spec("a")
    assert use_of((init, share(100, 10)), (app, share(300, 20))) == Use(300, 20, 1, 0)
    assert use_of((init, share(500, 10)), (app, share(300, 20))) == Use(500, 20, 1, 0)


def test_sidecar_runs_together_with_later_init_containers():
    sidecar, init, app = make_spec("s", sidecar=True), make_spec("i", init=True), make_spec("a")
    assert use_of((sidecar, share(100)), (init, share(400)), (app, share(50))) == Use(500, 0, 2, 2)


def test_init_container_before_sidecar_does_not_overlap_it():
    init, sidecar, app = make_spec("i", init=True), make_spec("s", sidecar=True), make_spec("a")
    assert use_of((init, share(400)), (sidecar, share(100)), (app, share(50))) == Use(400, 0, 2, 2)


def test_a_container_that_the_pod_lacks_still_counts():
    assert footprint([], PodAssignment("u", (ContainerAssignment("ghost", (share(7),)),))) == {"GPU-n1-0": Use(7, 0, 1, 1)}


# --- from the API's JSON ----------------------------------------------------------------------------------------------


def facts(**spec):
    text = json.dumps({"metadata": {"name": "p", "namespace": "ns", "uid": "u"}, "spec": spec, "status": {"phase": "Pending"}})
    return pod_facts(msgspec.json.decode(text, type=PodObject))


def container(cpu: str | int = "0", memory: str = "0", *, limits: dict | None = None, **fields) -> dict:
    return {"name": "c", "resources": {"requests": {"cpu": cpu, "memory": memory}, "limits": limits or {}}, **fields}


@pytest.mark.parametrize(
    ("spec", "cpu_milli", "memory_mib"),
    [
        pytest.param({"containers": [container("500m", "1Gi"), container(2, "512Mi")]}, 2500, 1536, id="containers add up"),
        pytest.param({"containers": [container("1")], "initContainers": [container("3")]}, 3000, 0, id="an init container alone is larger"),
        pytest.param(
            {"containers": [container("1")], "initContainers": [container("1", restartPolicy="Always"), container("1")]},
            2000,
            0,
            id="a sidecar runs on",
        ),
        pytest.param({"containers": [container("1")], "overhead": {"cpu": "250m", "memory": "1Mi"}}, 1250, 1, id="overhead"),
        pytest.param({"containers": [{"name": "c", "resources": {"limits": {"cpu": "2"}}}]}, 2000, 0, id="a limit is the request"),
        pytest.param(
            {"containers": [container("40", "1Gi")], "resources": {"requests": {"cpu": "32", "memory": "64Gi"}}},
            32000,
            65536,
            id="the pod's requests replace its containers'",
        ),
        pytest.param(
            {"containers": [container("1", "1Gi")], "initContainers": [container("40")], "resources": {"requests": {"cpu": 32}}},
            32000,
            1024,
            id="also an init container's, each resource by itself",
        ),
        pytest.param(
            {"containers": [container("1")], "resources": {"requests": {"cpu": "2"}}, "overhead": {"cpu": "250m"}},
            2250,
            0,
            id="overhead comes to the pod's requests",
        ),
        pytest.param(
            {"containers": [{"name": "c"}], "resources": {"requests": {"cpu": "1"}, "limits": {"cpu": "2", "memory": "1Gi"}}},
            1000,
            1024,
            id="the pod's limit is its request where nobody requests",
        ),
        pytest.param(
            {"containers": [container("1", "1Mi")], "resources": {"limits": {"cpu": "2", "memory": "1Gi"}}},
            1000,
            1,
            id="the pod's limit is not where a container requests",
        ),
        pytest.param({}, 0, 0, id="nothing"),
    ],
)
def test_cpu_and_memory_are_added_as_kube_scheduler_does(spec, cpu_milli, memory_mib):
    found = facts(**spec)
    assert (found.cpu_milli, found.memory_mib) == (cpu_milli, memory_mib)


def test_only_gpu_pods_keep_their_containers_and_our_annotations():
    assert facts(containers=[container()]).gpu is None
    text = json.dumps(
        {
            "metadata": {"name": "p", "uid": "u", "annotations": {"aliquot.dev/numa": "strict", "other": "x" * 1000}},
            "spec": {"containers": [container(limits={"nvidia.com/vgpu": 1})], "initContainers": [container(restartPolicy="Always")]},
        }
    )
    gpu = pod_facts(msgspec.json.decode(text, type=PodObject)).gpu
    assert gpu.annotations == {"aliquot.dev/numa": "strict"}
    assert [(spec.init, spec.restartable, spec.limits) for spec in gpu.containers] == [
        (True, True, {}),
        (False, False, {"nvidia.com/vgpu": "1"}),
    ]


@pytest.mark.parametrize(("gates", "names"), [(None, ()), ([], ()), ([{"name": "example.com/quota"}], ("example.com/quota",))])
def test_scheduling_gates_are_read(gates, names):
    found = facts(containers=[container()], schedulingGates=gates)
    assert (found.gates, found.is_gated) == (names, bool(names))


def test_only_a_pod_with_gpus_is_noted_as_one_that_is_prepared():
    wishes = {"volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}], "resourceClaims": [{"name": "nic"}]}
    assert not facts(containers=[container()], **wishes).needs_preparing
    assert facts(containers=[container(limits={"nvidia.com/vgpu": 1})], **wishes).needs_preparing
    assert not facts(containers=[container(limits={"nvidia.com/vgpu": 1})], volumes=[{"name": "scratch", "emptyDir": {}}]).needs_preparing


GPU = {"nvidia.com/vgpu": 1, "nvidia.com/vgpu-memory": 400, "nvidia.com/vgpu-cores": 10, "cpu": 1, "memory": "1Gi"}
REQUIRED = {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "kubernetes.io/hostname"}]}
IN_POOLS = {
    "requiredDuringSchedulingIgnoredDuringExecution": {
        "nodeSelectorTerms": [{"matchExpressions": [{"key": "pool", "operator": "In", "values": ["a", "b"]}]}]
    }
}
PREFERRED = {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1}]}


@pytest.mark.parametrize(
    "spec",
    [
        {"containers": [container(limits=GPU | {"ephemeral-storage": "1Gi"})]},
        {"containers": [container(limits=GPU), container(limits={"rdma/hca": 1})]},
        {"containers": [container(limits=GPU) | {"ports": [{"containerPort": 80, "hostPort": 80}]}]},
        {"resources": {"limits": {"hugepages-2Mi": "1Gi"}}},
        {"overhead": {"ephemeral-storage": "1Gi"}},
        {"volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]},
        {"volumes": [{"name": "data", "csi": {"driver": "x"}}]},
        {"volumes": [{"name": "data", "awsElasticBlockStore": {"volumeID": "x"}}]},
        {"volumes": [{"name": "data", "gcePersistentDisk": {"pdName": "x"}}]},
        {"resourceClaims": [{"name": "nic"}]},
        {"affinity": {"podAffinity": REQUIRED}},
        {"affinity": {"podAntiAffinity": REQUIRED}},
        {"topologySpreadConstraints": [{"whenUnsatisfiable": "DoNotSchedule"}]},
    ],
    ids=str,
)
def test_for_some_pods_kube_scheduler_looks_at_more_than_amounts(spec):
    waiting, bound = (facts(**({"containers": [container(limits=GPU)], "nodeName": node} | spec)) for node in ("", "a"))
    assert (waiting.is_picky, bound.is_picky) == (True, True)


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"containers": [container(limits=GPU) | {"ports": [{"containerPort": 80}]}]},
        {"volumes": [{"name": "scratch", "emptyDir": {}}, {"name": "token", "projected": {"sources": []}}]},
        {"affinity": {"podAntiAffinity": PREFERRED, "nodeAffinity": IN_POOLS}},
        {"topologySpreadConstraints": [{"whenUnsatisfiable": "ScheduleAnyway"}]},
    ],
    ids=str,
)
def test_for_others_it_looks_at_amounts_alone(spec):
    assert not facts(**({"containers": [container(limits=GPU)]} | spec)).is_picky


@pytest.mark.parametrize(
    ("spec", "allowed"),
    [
        ({}, "ab"),
        ({"affinity": {"nodeAffinity": PREFERRED}}, "ab"),
        ({"tolerations": [{"key": "new", "operator": "Exists"}]}, "abc"),
        ({"nodeSelector": {"pool": "b"}}, "b"),
        ({"nodeSelector": {"pool": "c"}}, ""),
        ({"nodeSelector": {"pool": "c"}, "tolerations": [{"key": "new", "operator": "Exists"}]}, "c"),
        ({"affinity": {"nodeAffinity": IN_POOLS}}, "ab"),
        ({"affinity": {"nodeAffinity": IN_POOLS}, "nodeSelector": {"pool": "a"}}, "a"),
    ],
    ids=str,
)
def test_nodes_that_pod_with_gpus_may_use_are_known(spec, allowed):
    directory = NodeDirectory()
    for pool in "abc":
        directory.put(NodeFacts(pool, {"pool": pool}, (Taint("new", effect="NoSchedule"),) if pool == "c" else ()))
    waiting, bound = (facts(containers=[container(limits=GPU)], nodeName=node, **spec).nodes for node in ("", "a"))
    assert waiting == bound
    assert directory.allowed(waiting) == set(allowed)
    assert facts(containers=[container()], **spec).nodes is None


def test_pods_of_one_template_share_their_rules():
    first, second = (facts(containers=[container(limits=GPU)], nodeSelector={"pool": "b"}).nodes for _ in range(2))
    assert first is second


def test_pod_with_required_anti_affinity_repels_others_with_or_without_gpus():
    repels = [facts(containers=[container()], affinity={"podAntiAffinity": terms}).repels for terms in (REQUIRED, PREFERRED)]
    assert repels == [True, False]
    assert not facts(containers=[container()], affinity={"podAffinity": REQUIRED}).repels


def test_a_nodes_allocatable_is_read():
    node = msgspec.json.decode(
        b'{"metadata":{"name":"n"},"status":{"allocatable":{"cpu":"15890m","memory":"32Gi","pods":"110"}}}', type=NodeObject
    )
    assert host_amounts(node) == (15890, 32768, 110)
