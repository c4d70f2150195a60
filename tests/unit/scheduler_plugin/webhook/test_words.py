# SPDX-License-Identifier: Apache-2.0
"""Every word with which a pod of another system can ask for something: the systems' documents name it, so the table has it, and admission
does with it what the table says.

DOCUMENTED has the words of each system's documents and constants, read at HAMi 4707fb02, KAI d5bc503a and the documents at 6a79fdbf,
Volcano ed72c7c8 with its vgpu-device-plugin 4fb76ba, vgpu-manager 3d7f66d.
"""

import copy
import json
from typing import Any

import pytest

from aliquot import contract
from aliquot_lab.standin.patches import apply_json_patch
from scheduler_plugin.core.cluster.state import ClusterState
from scheduler_plugin.settings import Settings
from scheduler_plugin.webhook.amounts import HAMI, Options
from scheduler_plugin.webhook.normalise import REPLACED_SCHEDULERS, Normaliser, Outcome
from scheduler_plugin.webhook.review import MAX_WARNING_CHARS
from scheduler_plugin.webhook.words import WORDS, Fate, Kind, Word, is_unknown
from scheduler_plugin.wiring.verbs import make_normaliser
from tests.unit.scheduler_plugin.builders import make_device, make_node

DOCUMENTED = {
    "HAMi": """nvidia.com/gpu nvidia.com/gpumem nvidia.com/gpumem-percentage nvidia.com/gpucores nvidia.com/priority nvidia.com/use-gputype
        nvidia.com/nouse-gputype nvidia.com/use-gpuuuid nvidia.com/nouse-gpuuuid nvidia.com/numa-bind hami.io/numa-alignment
        nvidia.com/vgpu-mode hami.io/gpu-scheduler-policy hami.io/node-scheduler-policy hami.io/device-scoring-weights hami.io/webhook
        CUDA_DISABLE_CONTROL GPU_CORE_UTILIZATION_POLICY CUDA_OVERSUBSCRIBE CUDA_TASK_PRIORITY hami-scheduler""",
    "KAI": """gpu-fraction gpu-memory gpu-fraction-num-devices gpu-fraction-container-name gpu-fraction.limit gpu-memory.limit
        kai.scheduler/container.<name>.gpu-memory.portion.limit pod-group-name kai.scheduler/batch-min-member kai.scheduler/queue
        kai.scheduler/node-pool priorityClassName kai.scheduler/preemptibility kai.scheduler/preemption-delay
        kai.scheduler/staleness-grace-period kai.scheduler/task-priority kai.scheduler/skip-podgrouper kai.scheduler/subgroup-name
        kai.scheduler/segment-size kai.scheduler/topology kai.scheduler/topology-required-placement
        kai.scheduler/topology-preferred-placement kai.scheduler/segment-topology-required-placement
        kai.scheduler/segment-topology-preferred-placement kai.scheduler/safe-to-consolidate kai.scheduler/background
        kai.scheduler/ignore-workload-api kai-scheduler""",
    "Run:ai": "runai-scheduler runai/queue runai/node-pool",
    "NVIDIA": """nvidia.com/container.<name>.gpu-memory.request nvidia.com/container.<name>.gpu-memory.limit
        nvidia.com/container.<name>.gpu-compute.mode nvidia.com/mig-<profile> nvidia.com/gpu.shared NVIDIA_VISIBLE_DEVICES
        NVIDIA_GPU_MEMORY_LIMIT NVIDIA_GPU_MEMORY_REQUEST""",
    "Volcano": """volcano.sh/vgpu-number volcano.sh/vgpu-memory volcano.sh/vgpu-memory-percentage volcano.sh/vgpu-cores
        volcano.sh/gpu-number volcano.sh/gpu-memory volcano.sh/vgpu-mode volcano.sh/vgpu-use-gpuuuid volcano.sh/vgpu-nouse-gpuuuid
        volcano.sh/vgpu-podgroup-policy volcano.sh/resource-strategy-scoring-type volcano.sh/resource-strategy-weight
        scheduling.volcano.sh/group-name scheduling.k8s.io/group-name
        scheduling.volcano.sh/group-min-member scheduling.volcano.sh/queue-name volcano.sh/preemptable volcano.sh/cooldown-time
        volcano.sh/sla-waiting-time volcano.sh/revocable-zone volcano.sh/jdb-min-available volcano.sh/jdb-max-unavailable
        volcano.sh/qos-level volcano.sh/numa-topology-policy volcano""",
    "vgpu-manager": """nvidia.com/vgpu-number nvidia.com/vgpu-memory nvidia.com/vgpu-cores nvidia.com/include-gpu-type
        nvidia.com/exclude-gpu-type nvidia.com/include-gpu-uuid nvidia.com/exclude-gpu-uuid nvidia.com/device-scheduler-policy
        nvidia.com/node-scheduler-policy nvidia.com/memory-scheduler-policy nvidia.com/device-topology-mode nvidia.com/cross-pod-topology
        nvidia.com/vgpu-compute-policy vgpu-manager.io/ignore-webhook vgpu-scheduler""",
    "coscheduling": """scheduling.x-k8s.io/pod-group pod-group.scheduling.sigs.k8s.io/name
        pod-group.scheduling.sigs.k8s.io/min-available""",
    "Koordinator": "gang.scheduling.koordinator.sh/name gang.scheduling.koordinator.sh/min-available",
    "Kubernetes": "spec.schedulingGroup spec.workloadRef",
}
GPU_MIB = 81920
VGPU, MEMORY, CORES = "nvidia.com/vgpu", "nvidia.com/vgpu-memory", "nvidia.com/vgpu-cores"
GANG = {"aliquot.dev/gang": "g", "aliquot.dev/gang-min": "3"}


def rules(**options: Any) -> Normaliser:
    return Normaliser(Options(lambda _: (GPU_MIB,), mig_profiles=lambda _: {"1g.10gb": 9728, "2g.20gb": 19968}, **options))


def make_pod(limits: dict[str, Any], *, annotations: Any = None, labels: Any = None, init: bool = False, **spec: Any) -> dict[str, Any]:
    asking = {"name": "main", "image": "cuda", "resources": {"limits": limits}}
    containers = {"containers": [{"name": "other"}], "initContainers": [asking]} if init else {"containers": [asking]}
    return {"metadata": {"name": "p", "annotations": annotations or {}, "labels": labels or {}}, "spec": containers | spec}


def admitted(pod: dict[str, Any], normaliser: Normaliser | None = None) -> tuple[dict[str, str], dict[str, str], Outcome]:
    """Return the container's limits and our annotations after admission; a second admission has nothing to add."""
    normaliser, patched = normaliser or rules(), copy.deepcopy(pod)
    outcome = normaliser.admit(pod)
    assert outcome.refusal == ""
    apply_json_patch(patched, json.loads(json.dumps(outcome.patch)))
    again = normaliser.admit(patched)
    assert (again.refusal, again.patch) == ("", ())
    (main,) = (c for group in ("containers", "initContainers") for c in patched["spec"].get(group, ()) if c["name"] == "main")
    ours = {name: text for name, text in patched["metadata"]["annotations"].items() if name.startswith("aliquot.dev/")}
    return {name: str(amount) for name, amount in main["resources"]["limits"].items()}, ours, outcome


def named(kind: Kind, name: str, text: str) -> dict[str, Any]:
    """A pod with one GPU and one more word."""
    pod = make_pod({VGPU: 1, MEMORY: 100})
    if kind is Kind.VARIABLE:
        pod["spec"]["containers"][0]["env"] = [{"name": name, "value": text}]
    elif kind is Kind.SCHEDULER:
        pod["spec"]["schedulerName"] = name
    elif kind is Kind.FIELD:
        pod["spec"][name.removeprefix("spec.")] = {"podGroupName": text}
    else:
        pod["metadata"][f"{kind}s"] = {name: text}
    return pod


def of_fate(fate: Fate, *kinds: Kind) -> list[Any]:
    return [pytest.param(word, id=f"{word.kind} {word.name}") for word in WORDS if word.fate is fate and word.kind in kinds]


@pytest.mark.parametrize("system", DOCUMENTED)
def test_table_has_every_documented_word_of_a_system(system):
    rows = {word.name for word in WORDS if word.system == system and not word.name.startswith("spec.volumes")}
    assert rows == set(DOCUMENTED[system].split())


@pytest.mark.parametrize("word", of_fate(Fate.LEFT, Kind.ANNOTATION, Kind.LABEL, Kind.VARIABLE))
def test_word_without_effect_changes_nothing_and_is_named_in_a_warning(word: Word):
    limits, ours, outcome = admitted(named(word.kind, word.name, "some"))
    assert (limits, ours) == ({VGPU: "1", MEMORY: "100"}, {})
    assert [warning for warning in outcome.warnings if word.name in warning and "has no effect" in warning]


@pytest.mark.parametrize("word", of_fate(Fate.REFUSED, Kind.ANNOTATION, Kind.LABEL, Kind.FIELD))
def test_word_that_cannot_be_honoured_is_refused_by_name(word: Word):
    refusal = rules().admit(named(word.kind, word.name, "some")).refusal
    assert word.name in refusal
    assert "remove it" in refusal or "set " in refusal


def test_warnings_of_all_words_at_once_are_short_enough_for_clients():
    pod = make_pod({VGPU: 1, MEMORY: 100}, volumes=[{"name": "mps", "hostPath": {"path": "/tmp/nvidia-mps"}}])
    left = [word for word in WORDS if word.fate is Fate.LEFT and word.kind is not Kind.FIELD]
    for kind in (Kind.ANNOTATION, Kind.LABEL):
        pod["metadata"][f"{kind}s"] = {word.name: "some" for word in left if word.kind is kind}
    variables = [{"name": word.name, "value": "1"} for word in left if word.kind is Kind.VARIABLE]
    pod["spec"]["containers"][0]["env"] = variables
    warnings = admitted(pod)[2].warnings
    assert max(map(len, warnings)) <= MAX_WARNING_CHARS
    assert [word.name for word in left if not any(word.name in warning for warning in warnings)] == []


@pytest.mark.parametrize("word", [word for word in WORDS if word.harmless], ids=lambda word: word.name)
def test_value_that_asks_for_nothing_passes_in_silence(word: Word):
    for text in word.harmless:
        assert admitted(named(word.kind, word.name, text))[2].warnings == ()


def test_default_scheduler_names_in_settings_are_those_of_the_table():
    taken = Settings(tls_cert_file="c", tls_key_file="k").taken_schedulers()
    assert taken == REPLACED_SCHEDULERS
    for name in REPLACED_SCHEDULERS:
        outcome = rules().admit(named(Kind.SCHEDULER, name, ""))
        assert {"op": "add", "path": "/spec/schedulerName", "value": "aliquot-scheduler"} in outcome.patch


PER_GPU = {
    "HAMi": ({"nvidia.com/gpu": 2, "nvidia.com/gpumem": 300, "nvidia.com/gpucores": 30}, (2, 600, 60)),
    "HAMi, percent": ({"nvidia.com/gpu": 1, "nvidia.com/gpumem-percentage": 50}, (1, 40960, None)),
    "Volcano": ({"volcano.sh/vgpu-number": 2, "volcano.sh/vgpu-memory": 300, "volcano.sh/vgpu-cores": 30}, (2, 600, 60)),
    "Volcano, percent": ({"volcano.sh/vgpu-number": 2, "volcano.sh/vgpu-memory-percentage": 25}, (2, 40960, None)),
    "Volcano, whole": ({"volcano.sh/vgpu-number": 2}, (2, None, None)),
    "Volcano, old sharing": ({"volcano.sh/gpu-memory": 1024}, (1, 1024, None)),
    "Volcano, old whole": ({"volcano.sh/gpu-number": 3}, (3, None, None)),
    "vgpu-manager": ({"nvidia.com/vgpu-number": 2, MEMORY: 10000, CORES: 10}, (2, 20000, 20)),
    "vgpu-manager, memory": ({"nvidia.com/vgpu-number": 8, MEMORY: 100}, (8, 800, None)),
    "vgpu-manager, whole": ({"nvidia.com/vgpu-number": 1}, (1, None, None)),
    "vgpu-manager, no number": ({MEMORY: 1024, CORES: 10}, (1, 1024, 10)),
}


@pytest.mark.parametrize("init", [False, True], ids=["app", "init only"])
@pytest.mark.parametrize("name", PER_GPU)
def test_amounts_per_gpu_become_the_containers_totals(name, init):
    written, (vgpus, mib, cores) = PER_GPU[name]
    wanted = {VGPU: vgpus, MEMORY: mib, CORES: cores}
    assert admitted(make_pod(written, init=init))[0] == {key: str(amount) for key, amount in wanted.items() if amount is not None}


@pytest.mark.parametrize(
    "limits",
    [
        {"volcano.sh/vgpu-number": 0, "volcano.sh/vgpu-memory": 100},
        {"nvidia.com/vgpu-number": 0, MEMORY: 100},
        {"nvidia.com/gpu": 0, "nvidia.com/gpumem": 100},
    ],
)
def test_number_of_zero_asks_for_no_gpu(limits):
    assert not rules().admit(make_pod(limits)).is_gpu_pod


def test_zero_of_another_system_leaves_our_amounts():
    assert admitted(make_pod({VGPU: 1, MEMORY: 100, "nvidia.com/vgpu-number": 0}))[0] == {VGPU: "1", MEMORY: "100"}


@pytest.mark.parametrize(
    "limits",
    [
        {VGPU: 1, "volcano.sh/vgpu-memory": 1},
        {VGPU: 1, "nvidia.com/vgpu-number": 1},
        {"nvidia.com/gpu": 1, "nvidia.com/vgpu-number": 1},
        {"nvidia.com/gpumem": 1, "volcano.sh/vgpu-memory": 1},
        {"volcano.sh/gpu-memory": 1, "volcano.sh/vgpu-memory": 1},
    ],
)
def test_two_vocabularies_in_one_container_are_refused(limits):
    assert "mixes two vocabularies" in rules().admit(make_pod(limits)).refusal


def test_names_of_hamis_resources_are_settings():
    renamed = rules(hami=HAMI.named(Settings(hami_resources="count=nvidia.com/vgpu, memory=hami.io/gpumem").hami_names()))
    assert admitted(make_pod({VGPU: 2, "hami.io/gpumem": 300}), renamed)[0] == {VGPU: "2", MEMORY: "600"}
    assert admitted(make_pod({VGPU: 2, MEMORY: 300}), renamed)[0] == {VGPU: "2", MEMORY: "300"}
    assert "mixes two" in renamed.admit(make_pod({VGPU: 2, MEMORY: 300, "hami.io/gpumem": 300})).refusal


ANNOTATIONS = {
    "nvidia.com/use-gputype": ("A10", {"gpu-type": "A10"}),
    "nvidia.com/nouse-gputype": ("A10", {"gpu-type-not": "A10"}),
    "nvidia.com/use-gpuuuid": ("GPU-1", {"gpu-uuid": "GPU-1"}),
    "nvidia.com/nouse-gpuuuid": ("GPU-1", {"gpu-uuid-not": "GPU-1"}),
    "nvidia.com/numa-bind": ("true", {"numa": "strict"}),
    "hami.io/numa-alignment": ("best-effort", {"numa": "prefer"}),
    "nvidia.com/vgpu-mode": ("hami-core", {"isolation": "shim"}),
    "hami.io/gpu-scheduler-policy": ("binpack,numa", {"placement": "binpack", "numa": "prefer"}),
    "hami.io/node-scheduler-policy": ("spread", {"placement": "spread"}),
    "volcano.sh/vgpu-mode": ("hami-core", {"isolation": "shim"}),
    "volcano.sh/vgpu-use-gpuuuid": ("GPU-1, ,GPU-2", {"gpu-uuid": "GPU-1,GPU-2"}),
    "volcano.sh/vgpu-nouse-gpuuuid": ("GPU-1", {"gpu-uuid-not": "GPU-1"}),
    "nvidia.com/include-gpu-type": ("A10,", {"gpu-type": "A10"}),
    "nvidia.com/exclude-gpu-type": ("A100", {"gpu-type-not": "A100"}),
    "nvidia.com/include-gpu-uuid": (" , ", {}),
    "nvidia.com/exclude-gpu-uuid": ("GPU-1", {"gpu-uuid-not": "GPU-1"}),
    "nvidia.com/device-scheduler-policy": ("binpack", {"placement": "binpack"}),
    "nvidia.com/node-scheduler-policy": ("none", {}),
    "nvidia.com/device-topology-mode": ("link", {"placement": "topology"}),
    "nvidia.com/vgpu-compute-policy": ("balance", {"cores-mode": "weight"}),
    "kai.scheduler/preemption-delay": ("1h0.5m", {"preemption-delay": "3630s"}),
    "kai.scheduler/safe-to-consolidate": ("false", {"movable": "false"}),
    "pod-group-name": ("g", None),
    "kai.scheduler/batch-min-member": ("3", None),
    "kai.scheduler/topology-required-placement": ("my-rack", None),
    "kai.scheduler/topology-preferred-placement": ("my-rack", None),
    "scheduling.volcano.sh/group-name": ("g", None),
    "scheduling.k8s.io/group-name": ("g", None),
    "scheduling.volcano.sh/group-min-member": ("3", None),
    "gang.scheduling.koordinator.sh/name": ("g", None),
    "gang.scheduling.koordinator.sh/min-available": ("3", None),
}
"""A value of each translated annotation, with ours; None: it needs its partner (GROUPS, and for topology
test_normalise.py). KAI's and NVIDIA's amounts: test_normalise.py."""
AMOUNTS_OF_KAI_AND_NVIDIA = ("gpu-", "kai.scheduler/container.", "nvidia.com/container.")


def test_every_translated_annotation_has_an_example():
    translated = {word.name for word in WORDS if word.fate is Fate.TRANSLATED and word.kind is Kind.ANNOTATION}
    assert translated == {name for name in translated if name.startswith(AMOUNTS_OF_KAI_AND_NVIDIA)} | ANNOTATIONS.keys()


@pytest.mark.parametrize("name", [name for name, (_, ours) in ANNOTATIONS.items() if ours is not None])
def test_annotation_becomes_ours(name):
    text, wanted = ANNOTATIONS[name]
    _, ours, _ = admitted(make_pod({VGPU: 1, MEMORY: 100, CORES: 10}, annotations={name: text}))
    assert ours == {f"aliquot.dev/{key}": value for key, value in wanted.items()}


AMOUNTS = {
    "gpu-fraction": "0.5",
    "gpu-memory": "2048",
    "gpu-fraction-num-devices": "2",
    "gpu-fraction-container-name": "main",
    "gpu-fraction.limit": "0.7",
    "gpu-memory.limit": "4Gi",
    "kai.scheduler/container.<name>.gpu-memory.portion.limit": "0.7",
    "nvidia.com/container.<name>.gpu-memory.request": "4Gi",
    "nvidia.com/container.<name>.gpu-memory.limit": "8Gi",
    "nvidia.com/container.<name>.gpu-compute.mode": "sm-sharing",
    "nvidia.com/include-gpu-uuid": "GPU-1",
    "nvidia.com/node-scheduler-policy": "spread",
    "hami.io/webhook": "ignore",
}
ASKING: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "ours": ({VGPU: 1, MEMORY: 100}, {}),
    "ours, whole": ({VGPU: 1}, {}),
    "MIG": ({"nvidia.com/mig-1g.10gb": 1}, {}),
    "HAMi": ({"nvidia.com/gpu": 1, "nvidia.com/gpumem": 100}, {}),
    "Volcano": ({"volcano.sh/vgpu-number": 1, "volcano.sh/vgpu-memory": 100}, {}),
    "vgpu-manager": ({"nvidia.com/vgpu-number": 1, MEMORY: 100}, {}),
    "KAI": ({}, {"gpu-memory": "1024", "gpu-fraction-container-name": "main"}),
    "NVIDIA": ({}, {"nvidia.com/container.main.gpu-memory.request": "4Gi"}),
}


def effect(pod: dict[str, Any]) -> tuple[str, list[Any], tuple[str, ...], bool]:
    """What admission makes of a pod, without the other systems' annotations and labels that it keeps."""
    outcome, patch = rules().admit(pod), []
    for operation in outcome.patch:
        value = operation["value"]
        if operation["path"].startswith("/metadata/"):
            value = {name: text for name, text in value.items() if name.startswith("aliquot.dev/")}
        patch += [(operation["path"], value)] if value else []
    return outcome.refusal, patch, outcome.warnings, outcome.is_gpu_pod


@pytest.mark.parametrize("where", ["app", "init only", "sidecar"])
@pytest.mark.parametrize("asking", ASKING)
def test_no_word_is_without_any_effect_next_to_any_amounts(asking, where):
    limits, annotations = ASKING[asking]
    plain = make_pod(limits, annotations=annotations, init=where != "app")
    if where == "sidecar":
        plain["spec"]["initContainers"][0]["restartPolicy"] = "Always"
    dropped = set()
    for word in [word for word in WORDS if word.kind in (Kind.ANNOTATION, Kind.LABEL)]:
        pod, name = copy.deepcopy(plain), word.name.replace("<name>", "main")
        if name not in annotations:
            pod["metadata"][f"{word.kind}s"][name] = AMOUNTS.get(word.name) or ANNOTATIONS.get(name, ("some", None))[0]
            dropped |= {name} if effect(pod) == effect(plain) else set()
    # It asks HAMi to leave the pod alone. Our own resources are ours all the same.
    assert dropped <= ({"hami.io/webhook"} if asking in ("ours", "ours, whole", "MIG", "vgpu-manager") else set())


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("nvidia.com/device-topology-mode", "link-strict"),
        ("nvidia.com/vgpu-compute-policy", "none"),
        ("hami.io/numa-alignment", "maybe"),
        ("hami.io/gpu-scheduler-policy", "mutex"),
        ("nvidia.com/vgpu-mode", "vulkan"),
    ],
)
def test_value_without_a_counterpart_is_refused_with_the_choices(name, text):
    refusal = rules().admit(make_pod({VGPU: 1, MEMORY: 100, CORES: 10}, annotations={name: text})).refusal
    assert f"annotation {name}: '{text}' is not supported" in refusal


GROUPS: dict[str, Any] = {
    "KAI": {"annotations": {"pod-group-name": "g", "kai.scheduler/batch-min-member": "3"}},
    "Volcano": {"annotations": {"scheduling.volcano.sh/group-name": "g", "scheduling.volcano.sh/group-min-member": "3"}},
    "Volcano, old": {"annotations": {"scheduling.k8s.io/group-name": "g", "scheduling.volcano.sh/group-min-member": "3"}},
    "Koordinator": {
        "annotations": {"gang.scheduling.koordinator.sh/name": "g", "gang.scheduling.koordinator.sh/min-available": "3"},
    },
    "lightweight coscheduling": {
        "labels": {"pod-group.scheduling.sigs.k8s.io/name": "g", "pod-group.scheduling.sigs.k8s.io/min-available": "3"}
    },
}
NAMED_ONLY = [
    ("annotations", "pod-group-name"),
    ("annotations", "scheduling.volcano.sh/group-name"),
    ("annotations", "scheduling.k8s.io/group-name"),
    ("annotations", "gang.scheduling.koordinator.sh/name"),
    ("labels", "scheduling.x-k8s.io/pod-group"),
    ("labels", "pod-group.scheduling.sigs.k8s.io/name"),
]


@pytest.mark.parametrize("system", GROUPS)
def test_group_with_name_and_size_becomes_a_gang(system):
    assert admitted(make_pod({VGPU: 1, MEMORY: 100}, **GROUPS[system]))[1] == GANG


@pytest.mark.parametrize(("where", "name"), NAMED_ONLY)
def test_group_without_its_size_is_refused_unless_pod_has_a_gang(where, name):
    words: dict[str, Any] = {where: {name: "g"}}
    pod = make_pod({VGPU: 1, MEMORY: 100}, **words)
    assert f"{name} makes the pod a member of a group" in rules().admit(pod).refusal
    pod["metadata"]["annotations"] |= GANG
    assert admitted(pod)[1] == GANG


def test_group_size_alone_becomes_a_gang_named_after_the_controller():
    pod = make_pod({VGPU: 1, MEMORY: 100}, annotations={"kai.scheduler/batch-min-member": "3"})
    assert "does not state the group's name" in rules().admit(pod).refusal
    pod["metadata"]["ownerReferences"] = [{"kind": "Job", "name": "g", "controller": True}]
    assert admitted(pod)[1] == GANG


def test_gang_with_another_size_than_the_group_is_refused():
    pod = make_pod({VGPU: 1, MEMORY: 100}, annotations={"pod-group-name": "x", "kai.scheduler/batch-min-member": "2"} | GANG)
    assert "keep one of the two" in rules().admit(pod).refusal


def test_native_group_needs_a_serving_scheduler_or_a_gang():
    pod = named(Kind.FIELD, "spec.schedulingGroup", "g")
    assert "'g' is not served" in rules().admit(pod).refusal
    assert admitted(pod, rules(scheduling_groups=True))[1] == {}
    pod["metadata"]["annotations"] = dict(GANG)
    assert admitted(pod)[1] == GANG


@pytest.mark.parametrize(("scheduler", "kind", "warned"), [
    ("kai-scheduler", "PyTorchJob", True), ("volcano", "Job", True), ("kai-scheduler", "ReplicaSet", False), ("", "PyTorchJob", False)
])  # fmt: skip
def test_group_that_only_the_replaced_scheduler_would_form_is_warned_of(scheduler, kind, warned):
    pod = make_pod({VGPU: 1, MEMORY: 100}, schedulerName=scheduler)
    pod["metadata"]["ownerReferences"] = [{"kind": kind, "name": "x", "controller": True}]
    assert any(f"the pods of a {kind} together" in warning for warning in admitted(pod)[2].warnings) == warned


def test_words_of_a_pod_that_keeps_its_scheduler_are_left_to_it():
    pod = make_pod({VGPU: 1, MEMORY: 100}, labels={"kai.scheduler/task-priority": "x"}, schedulerName="mine")
    pod["metadata"]["annotations"] = {"pod-group-name": "g", "kai.scheduler/of-tomorrow": "x"}
    _, ours, outcome = admitted(pod)
    assert ours == {}
    for name in ("kai.scheduler/task-priority", "kai.scheduler/of-tomorrow"):
        assert any(f"{name} has no effect: it is left to scheduler mine" in warning for warning in outcome.warnings)


def test_profiles_of_nodes_to_be_added_count_until_nodes_offer_some():
    state = ClusterState()
    normaliser = make_normaliser(Settings(mig_profiles="3g.40gb=40192, 1g.10gb=9728"), state)
    pod = make_pod({"nvidia.com/gpu": 2, "nvidia.com/gpumem": 8000}, annotations={"nvidia.com/vgpu-mode": "mig"})
    limits, _, _ = admitted(pod, normaliser)
    assert limits == {"nvidia.com/mig-1g.10gb": "2"}
    state.set_gpu_node(make_node(devices=[make_device("n1", 0, instances=2)]))
    assert "the nodes offer 1g.10gb with 100 MiB" in normaliser.admit(pod).refusal


@pytest.mark.parametrize("mode", ["nvidia.com/vgpu-mode", "volcano.sh/vgpu-mode"])
@pytest.mark.parametrize(
    ("mib", "wanted"), [(8000, {"nvidia.com/mig-1g.10gb": "2"}), (9729, {"nvidia.com/mig-2g.20gb": "2"}), (20000, None), (0, None)]
)
def test_mode_mig_chooses_smallest_profile_with_the_memory(mode, mib, wanted):
    pod = make_pod({"nvidia.com/gpu": 2, "nvidia.com/gpumem": mib}, annotations={mode: "mig"})
    if wanted is None:
        assert "1g.10gb with 9728 MiB, 2g.20gb with 19968 MiB" in rules().admit(pod).refusal
    else:
        assert admitted(pod)[0] == wanted


def test_host_mps_volume_is_warned_of():
    volumes = [{"name": "mps", "hostPath": {"path": "/tmp/nvidia-mps/"}}, {"name": "x", "emptyDir": {}}]
    (warning,) = admitted(make_pod({VGPU: 1, MEMORY: 100}, volumes=volumes))[2].warnings
    assert warning.startswith("a volume mounts /tmp/nvidia-mps of the node")


@pytest.mark.parametrize("kind", [Kind.ANNOTATION, Kind.LABEL])
@pytest.mark.parametrize(
    "name", ["kai.scheduler/of-tomorrow", "hami.io/of-tomorrow", "volcano.sh/of-tomorrow", "kai.scheduler/container.x.new"]
)
def test_word_of_another_system_that_no_row_has_is_warned_of(kind, name):
    assert admitted(named(kind, name, "some"))[2].warnings == (f"{kind} {name} has no effect: it is not known to Aliquot",)


def without_letter(name: str) -> str:
    """Misspell a word: the letter before the last is missing."""
    return name[:-2] + name[-1]


MISSPELT = [
    word for word in WORDS if word.kind in (Kind.ANNOTATION, Kind.LABEL) and "<" not in word.name and is_unknown(without_letter(word.name))
]


@pytest.mark.parametrize("word", MISSPELT, ids=lambda word: word.name)
def test_misspelt_word_is_warned_of_with_the_right_one(word: Word) -> None:
    name = without_letter(word.name)
    (warning,) = admitted(named(word.kind, name, "some"))[2].warnings
    assert warning == f"{word.kind} {name} has no effect: it is not known to Aliquot; did you mean {word.name}?"


@pytest.mark.parametrize("name", ["hami.io/vgpu-time", "hami.io/bind-phase", "volcano.sh/job-name", "kai.scheduler/top-owner-metadata"])
def test_word_that_a_system_writes_itself_passes_in_silence(name):
    for kind in (Kind.ANNOTATION, Kind.LABEL):
        assert admitted(named(kind, name, "some"))[2].warnings == ()


def test_word_is_found_as_label_and_as_annotation():
    for kind in (Kind.ANNOTATION, Kind.LABEL):
        (warning,) = admitted(named(kind, "volcano.sh/preemptable", "true"))[2].warnings
        assert warning.startswith(f"{kind} volcano.sh/preemptable has no effect")


def test_sub_group_of_a_gang_is_warned_of():
    pod = make_pod({VGPU: 1, MEMORY: 100}, annotations=dict(GANG), labels={"kai.scheduler/subgroup-name": "workers"})
    (warning,) = admitted(pod)[2].warnings
    assert warning.startswith("label kai.scheduler/subgroup-name has no effect: the pod's gang has one minimum")


def test_sub_group_without_gang_is_refused_and_with_role_silent():
    labels = {"kai.scheduler/subgroup-name": "workers"}
    assert "PodGroup that is not read" in rules().admit(make_pod({VGPU: 1, MEMORY: 100}, labels=labels)).refusal
    role = {contract.ANNOTATION_GANG_ROLE: "workers", contract.ANNOTATION_GANG_ROLE_MIN: "1"}
    outcome = admitted(make_pod({VGPU: 1, MEMORY: 100}, annotations=GANG | role, labels=labels))[2]
    assert (outcome.refusal, outcome.warnings) == ("", ())


@pytest.mark.parametrize("text", ["5", "soon", "5m!", ""])
def test_delay_that_is_no_duration_is_warned_of(text):
    _, ours, outcome = admitted(make_pod({VGPU: 1, MEMORY: 100}, annotations={"kai.scheduler/preemption-delay": text}))
    assert (ours, len(outcome.warnings)) == ({}, 1)


def test_cores_of_an_instance_chosen_by_memory_are_warned_of():
    pod = make_pod({"nvidia.com/gpumem": 8000, "nvidia.com/gpucores": 30}, annotations={"nvidia.com/vgpu-mode": "mig"})
    limits, _, outcome = admitted(pod)
    assert limits == {"nvidia.com/mig-1g.10gb": "1"}
    assert outcome.warnings == ("container main: nvidia.com/gpucores has no effect: an instance has the compute of its profile",)
