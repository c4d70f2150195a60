# SPDX-License-Identifier: Apache-2.0
import copy
import json

import pytest

from aliquot import contract
from aliquot_lab.standin.patches import apply_json_patch
from scheduler_plugin.webhook.amounts import Options
from scheduler_plugin.webhook.draft import Draft
from scheduler_plugin.webhook.normalise import GPU_TOLERATION, MAX_CONTAINERS, UNTOUCHED, Normaliser
from scheduler_plugin.webhook.review import MAX_WARNING_CHARS
from scheduler_plugin.webhook.vocabularies import FROM_LIMIT_RANGE, translate_amounts

VOID = [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}]
SCHEDULER = contract.SCHEDULER_NAME


def make_pod(limits: dict | None = None, *, annotations: dict | None = None, containers: list | None = None, **spec) -> dict:
    containers = containers or [{"name": "main", "image": "cuda", "resources": {"limits": dict(limits or {})}}]
    return {"metadata": {"name": "p", "annotations": annotations or {}}, "spec": {"containers": containers, **spec}}


def normaliser(sizes=(81920,), **options) -> Normaliser:
    return Normaliser(Options(lambda _: sizes, **{"count_whole_gpus": True, **options}))


def admitted(pod: dict, rules: Normaliser | None = None) -> dict:
    """Apply the patch and return the pod; the original must not have been touched."""
    before = copy.deepcopy(pod)
    outcome = (rules or normaliser()).admit(pod)
    assert outcome.refusal == ""
    assert pod == before
    patched = copy.deepcopy(pod)
    apply_json_patch(patched, json.loads(json.dumps(outcome.patch)))
    return patched


def limits_of(pod: dict, position: int = 0) -> dict:
    return pod["spec"]["containers"][position]["resources"].get("limits", {})


def refusal(pod: dict, rules: Normaliser | None = None) -> str:
    return (rules or normaliser()).admit(pod).refusal


@pytest.mark.parametrize("names", [("NVIDIA_GPU_MEMORY_LIMIT",), ("NVIDIA_GPU_MEMORY_LIMIT", "NVIDIA_GPU_MEMORY_REQUEST")])
def test_memory_variables_of_nvidias_hook_are_removed_with_warning(names):
    env = [{"name": name, "value": "81920"} for name in names]
    main = {"name": "main", "resources": {"limits": {"nvidia.com/vgpu-memory": "1000"}}, "env": [*env, {"name": "A", "value": "b"}]}
    pod = make_pod(containers=[main, {"name": "side", "env": list(env)}])
    found = admitted(pod)["spec"]["containers"]
    assert found[0]["env"] == [{"name": "A", "value": "b"}]
    assert [one for one in found[1]["env"] if one["name"] in names] == env
    [warning] = [text for text in normaliser().admit(pod).warnings if "NVIDIA_GPU_MEMORY" in text]
    assert all(name in warning for name in names)


# --- what users write, and what it becomes --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "becomes"),
    [
        pytest.param({"vgpu": "8"}, {"vgpu": "8", "vgpu-memory": "655360"}, id="whole GPUs"),
        pytest.param({"vgpu": 1, "vgpu-memory": 4000}, {"vgpu": "1", "vgpu-memory": "4000"}, id="numbers"),
        pytest.param({"vgpu-memory": "4Gi"}, {"vgpu": "1", "vgpu-memory": "4096"}, id="a binary amount means what it says"),
        pytest.param({"vgpu-memory": "4k"}, {"vgpu": "1", "vgpu-memory": "4k"}, id="as the API server spells 4000"),
        pytest.param({"vgpu-cores": "10"}, {"vgpu": "1", "vgpu-cores": "10", "vgpu-memory": "81920"}, id="cores alone: all memory"),
        pytest.param({"mig-1g.10gb": "2"}, {"mig-1g.10gb": "2"}, id="MIG"),
        pytest.param({"gpu": 1, "gpumem": 3000, "gpucores": 30}, {"vgpu": "1", "vgpu-memory": "3000", "vgpu-cores": "30"}, id="HAMi"),
        pytest.param(
            {"gpu": 2, "gpumem": 3000, "gpucores": 30}, {"vgpu": "2", "vgpu-memory": "6000", "vgpu-cores": "60"}, id="HAMi per GPU"
        ),
        pytest.param({"gpumem": 3000}, {"vgpu": "1", "vgpu-memory": "3000"}, id="HAMi defaults to one GPU"),
        pytest.param({"gpu": 2, "gpumem-percentage": 50}, {"vgpu": "2", "vgpu-memory": "81920"}, id="HAMi percentage"),
        pytest.param({"gpu": 1, "gpumem-percentage": 100}, {"vgpu": "1", "vgpu-memory": "81920"}, id="HAMi 100 percent is a whole GPU"),
        pytest.param({"gpu": 1, "gpumem": "3Gi"}, {"vgpu": "1", "vgpu-memory": "3072"}, id="HAMi with a binary amount"),
        pytest.param({"gpu": 1, "gpumem": 0, "gpucores": 0}, {"vgpu": "1", "vgpu-memory": "81920"}, id="HAMi zero asks for nothing"),
    ],
)
def test_resources_become_native_totals(written, becomes):
    pod = admitted(make_pod({f"nvidia.com/{name}": amount for name, amount in written.items()}))
    assert {name: str(amount) for name, amount in limits_of(pod).items()} == {f"nvidia.com/{name}": text for name, text in becomes.items()}
    assert pod["spec"]["schedulerName"] == SCHEDULER


@pytest.mark.parametrize(
    ("written", "becomes"),
    [
        ({"nvidia.com/use-gputype": "A100,V100"}, {"gpu-type": "A100,V100"}),
        ({"nvidia.com/nouse-gputype": "1080"}, {"gpu-type-not": "1080"}),
        ({"nvidia.com/use-gpuuuid": "GPU-1"}, {"gpu-uuid": "GPU-1"}),
        ({"nvidia.com/nouse-gpuuuid": "GPU-1"}, {"gpu-uuid-not": "GPU-1"}),
        *(({"nvidia.com/numa-bind": text}, {"numa": "strict"}) for text in ("1", "t", "T", "TRUE", "true", "True")),
        *(({"nvidia.com/numa-bind": text}, {}) for text in ("0", "false", "")),
        ({"nvidia.com/vgpu-mode": "hami-core"}, {"isolation": "shim"}),
        ({"hami.io/gpu-scheduler-policy": "binpack,numa"}, {"placement": "binpack", "numa": "prefer"}),
        ({"hami.io/gpu-scheduler-policy": "topology-aware"}, {"placement": "topology"}),
        ({"hami.io/node-scheduler-policy": "spread"}, {"placement": "spread"}),
    ],
)
def test_hami_annotations_are_translated_and_kept(written, becomes):
    pod = admitted(make_pod({"nvidia.com/gpu": 1, "nvidia.com/gpumem": 10}, annotations=written))
    assert pod["metadata"]["annotations"] == written | {f"aliquot.dev/{name}": text for name, text in becomes.items()}


HAMI_WISHES = {
    "nvidia.com/use-gputype": "H100",
    "nvidia.com/use-gpuuuid": "GPU-1",
    "nvidia.com/numa-bind": "true",
    "hami.io/gpu-scheduler-policy": "binpack",
}
OUR_WISHES = {"gpu-type": "H100", "gpu-uuid": "GPU-1", "numa": "strict", "placement": "binpack"}


@pytest.mark.parametrize("limits", [{"nvidia.com/vgpu-memory": 100}, {"nvidia.com/mig-1g.10gb": 1}], ids=["shares", "MIG"])
def test_hami_annotations_apply_to_pods_with_manually_rewritten_resources(limits):
    pod = admitted(make_pod(limits, annotations=HAMI_WISHES))
    assert pod["metadata"]["annotations"] == HAMI_WISHES | {f"aliquot.dev/{name}": text for name, text in OUR_WISHES.items()}
    assert normaliser().admit(pod).patch == ()


def test_hami_mode_mig_is_implied_by_mig_resource():
    mode = {"nvidia.com/vgpu-mode": "mig"}
    assert admitted(make_pod({"nvidia.com/mig-1g.10gb": 1}, annotations=mode))["metadata"]["annotations"] == mode
    assert "ask for a MIG instance by its resource" in refusal(make_pod({"nvidia.com/vgpu": 1}, annotations=mode))


def test_priority_alone_requests_no_gpu_and_with_one_ranks_work():
    side = {"name": "side", "resources": {"limits": {"nvidia.com/priority": "1"}}}
    main = {"name": "main", "resources": {"limits": {"nvidia.com/gpumem": "1000"}}}
    assert normaliser(adopt_nvidia_gpu=True).admit(make_pod(containers=[side])) == UNTOUCHED
    pod = admitted(make_pod(containers=[main, side]))
    assert [limits_of(pod, position) for position in (0, 1)] == [{"nvidia.com/vgpu": "1", "nvidia.com/vgpu-memory": "1000"}, {}]
    assert pod["metadata"]["annotations"] == {"aliquot.dev/priority": "low"}


def test_priority_on_pod_of_nvidia_plugin_warns_that_no_node_fits():
    outcome = normaliser().admit(make_pod({"nvidia.com/gpu": "1", "nvidia.com/priority": "1"}))
    assert (outcome.refusal, outcome.patch, outcome.is_gpu_pod) == ("", (), False)
    [warning] = outcome.warnings
    assert "no node offers nvidia.com/priority" in warning
    assert len(warning) <= MAX_WARNING_CHARS
    assert normaliser().admit(make_pod({"nvidia.com/gpu": "1", "nvidia.com/priority": "0"})) == UNTOUCHED


@pytest.mark.parametrize(("level", "want"), [(0, "high"), (1, "low")])
def test_hami_priority_becomes_an_annotation(level, want):
    pod = admitted(make_pod({"nvidia.com/gpu": 1, "nvidia.com/gpumem": 10, "nvidia.com/priority": level}))
    assert pod["metadata"]["annotations"] == {"aliquot.dev/priority": want}
    assert set(limits_of(pod)) == {"nvidia.com/vgpu", "nvidia.com/vgpu-memory"}


@pytest.mark.parametrize(
    ("annotations", "memory", "vgpus"),
    [
        ({"gpu-fraction": "0.5"}, "40960", "1"),
        ({"gpu-fraction": "0.25", "gpu-fraction-num-devices": "2"}, "40960", "2"),
        ({"gpu-memory": "4000"}, "4000", "1"),
        ({"gpu-memory": "4Gi"}, "4096", "1"),
        ({"nvidia.com/container.main.gpu-memory.request": "4Gi"}, "4096", "1"),
        ({"nvidia.com/container.main.gpu-memory.limit": "4Gi"}, "4096", "1"),
        ({"nvidia.com/container.main.gpu-memory.request": "10G"}, "9537", "1"),
    ],
)
def test_kai_and_nvidia_annotations_become_resources(annotations, memory, vgpus):
    pod = admitted(make_pod(annotations=annotations))
    assert limits_of(pod) == {"nvidia.com/vgpu": vgpus, "nvidia.com/vgpu-memory": memory}


def test_kai_names_the_container():
    containers = [{"name": "a"}, {"name": "b"}]
    pod = admitted(make_pod(containers=containers, annotations={"gpu-memory": "100", "gpu-fraction-container-name": "b"}))
    assert limits_of(pod, 1) == {"nvidia.com/vgpu": "1", "nvidia.com/vgpu-memory": "100"}
    assert pod["spec"]["containers"][0] == {"name": "a", "env": VOID}


def test_an_nvidia_limit_above_the_request_becomes_burst():
    annotations = {f"nvidia.com/container.main.gpu-memory.{part}": text for part, text in [("request", "4Gi"), ("limit", "6Gi")]}
    pod = admitted(make_pod(annotations=annotations | {"nvidia.com/container.main.gpu-compute.mode": "sm-sharing"}))
    assert pod["metadata"]["annotations"]["aliquot.dev/memory-burst"] == "1.5"
    assert pod["metadata"]["annotations"]["aliquot.dev/isolation"] == "mps"


KAI_PORTION_LIMIT = "kai.scheduler/container.{}.gpu-memory.portion.limit"


@pytest.mark.parametrize(
    ("annotations", "burst"),
    [
        ({"gpu-memory": "4096", "gpu-memory.limit": "6Gi"}, "1.5"),
        ({"gpu-memory": "4096", "gpu-memory.limit": "4Gi"}, None),
        ({"gpu-memory": "4096", "gpu-memory.limit": "8Gi", "nvidia.com/container.main.gpu-memory.request": "4Gi"}, "2"),
        ({"gpu-memory": "3000", "gpu-memory.limit": "6000Mi", "gpu-fraction-num-devices": "2"}, "2"),
        ({"gpu-fraction": "0.3", "gpu-fraction.limit": "0.9"}, "3"),
        ({"gpu-fraction": "0.5", KAI_PORTION_LIMIT.format("main"): "0.8"}, "1.6"),
    ],
)
def test_a_kai_limit_above_the_request_becomes_burst(annotations, burst):
    pod = admitted(make_pod(annotations=annotations))
    assert pod["metadata"]["annotations"].get("aliquot.dev/memory-burst") == burst
    assert normaliser().admit(pod).patch == ()


def test_unknown_annotations_of_kai_are_warned_about():
    pod = make_pod(annotations={"gpu-fraction": "0.5", "gpu-fraction-limit": "0.8", "gpu-memory-size": "4Gi"})
    [warning] = normaliser().admit(pod).warnings
    assert warning.startswith(
        "annotation gpu-fraction-limit, gpu-memory-size has no effect: known annotations are gpu-fraction, gpu-memory, gpu-fraction.limit"
    )


def nvidia_fractions(**amounts: tuple[str, str]) -> dict:
    parts = [(name, dict(zip(("request", "limit"), texts, strict=True))) for name, texts in amounts.items()]
    return {f"nvidia.com/container.{name}.gpu-memory.{part}": text for name, texts in parts for part, text in texts.items()}


def test_limit_above_one_container_request_does_not_raise_others():
    pair = [{"name": "a"}, {"name": "b"}]
    sentence = refusal(make_pod(containers=pair, annotations=nvidia_fractions(a=("4Gi", "4Gi"), b=("4Gi", "8Gi"))))
    assert "gpu-memory.limit are 1 and 2 times their requests, but a pod has one ratio" in sentence
    native = [{"name": "a", "resources": {"limits": {"nvidia.com/vgpu-memory": "100"}}}, {"name": "b"}]
    assert "are 1 and 2 times" in refusal(make_pod(containers=native, annotations=nvidia_fractions(b=("4Gi", "8Gi"))))


@pytest.mark.parametrize(("b", "burst"), [(("2Gi", "4Gi"), "2"), (("2Gi", "2Gi"), None)])
def test_one_ratio_in_all_containers_is_the_pods(b, burst):
    a = ("4Gi", "8Gi") if burst else ("4Gi", "4Gi")
    pod = admitted(make_pod(containers=[{"name": "a"}, {"name": "b"}, {"name": "side"}], annotations=nvidia_fractions(a=a, b=b)))
    assert pod["metadata"]["annotations"].get("aliquot.dev/memory-burst") == burst


def test_requests_are_kept_equal_to_limits():
    resources = {"limits": {"nvidia.com/vgpu-memory": "4Gi", "cpu": "1"}, "requests": {"nvidia.com/vgpu-memory": "4Gi", "cpu": "500m"}}
    pod = admitted(make_pod(containers=[{"name": "main", "resources": resources}]))
    assert pod["spec"]["containers"][0]["resources"] == {
        "limits": {"nvidia.com/vgpu-memory": "4096", "cpu": "1", "nvidia.com/vgpu": "1"},
        "requests": {"nvidia.com/vgpu-memory": "4096", "cpu": "500m"},
    }


EXCLUSIVE = {"aliquot.dev/isolation": "exclusive"}


def test_whole_gpu_containers_count_full_memory_and_others_their_request():
    limits = [{"nvidia.com/vgpu": "2"}, {"nvidia.com/vgpu-memory": "100"}, {"nvidia.com/mig-1g.10gb": "1"}, {"cpu": "1"}]
    init = {"name": "init", "resources": {"limits": {"nvidia.com/vgpu": "1"}}}
    containers = [{"name": f"c{number}", "resources": {"limits": amounts}} for number, amounts in enumerate(limits)]
    pod = admitted(make_pod(containers=containers, initContainers=[init]))
    counted = [limits_of(pod, position).get("nvidia.com/vgpu-memory") for position in range(len(limits))]
    assert counted == ["163840", "100", None, None]
    assert pod["spec"]["initContainers"][0]["resources"]["limits"]["nvidia.com/vgpu-memory"] == "81920"


@pytest.mark.parametrize("sizes", [pytest.param((), id="before there is a node"), (81008, 80962), (40960, 81920)])
@pytest.mark.parametrize("annotations", [{}, EXCLUSIVE])
def test_whole_gpus_of_unknown_size_stay_whole(sizes, annotations):
    pod = admitted(make_pod({"nvidia.com/vgpu": "1"}, annotations=annotations), normaliser(sizes))
    assert limits_of(pod) == {"nvidia.com/vgpu": "1"}


def test_exclusive_gpus_are_counted_too_and_stay_exclusive():
    pod = admitted(make_pod({"nvidia.com/vgpu": "2"}, annotations=EXCLUSIVE))
    assert limits_of(pod) == {"nvidia.com/vgpu": "2", "nvidia.com/vgpu-memory": "163840"}
    assert pod["metadata"]["annotations"] == EXCLUSIVE
    assert normaliser((81920, 40960)).admit(pod).patch == ()


def test_a_part_of_an_exclusive_gpu_is_refused():
    pod = make_pod({"nvidia.com/vgpu-memory": "100"}, annotations=EXCLUSIVE)
    assert "which gives whole GPUs: remove nvidia.com/vgpu-memory" in refusal(pod, normaliser((81920,)))


def test_exclusive_gpu_of_older_template_is_kept_while_no_gpu_is_known():
    pod = admitted(make_pod({"nvidia.com/vgpu": "2"}, annotations=EXCLUSIVE))
    outcome = normaliser(()).admit(pod)
    assert (outcome.refusal, outcome.patch) == ("", ())


def test_a_whole_gpu_cannot_burst_though_its_memory_is_counted():
    pod = make_pod({"nvidia.com/vgpu": "1"}, annotations={"aliquot.dev/memory-burst": "2"})
    assert "has no memory to burst into" in refusal(pod)


@pytest.mark.parametrize(
    ("annotations", "says"),
    [
        ({"aliquot.dev/paused": "yes"}, "annotation aliquot.dev/paused: expected true or false, found 'yes'"),
        ({"aliquot.dev/paused": "true", "aliquot.dev/isolation": "mps"}, "only the shim can pause: remove one of the two"),
    ],
)
def test_a_pause_that_nothing_would_keep_is_refused(annotations, says):
    assert says in refusal(make_pod({"nvidia.com/vgpu-memory": "100"}, annotations=annotations))


# --- whose business it is ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pod",
    [
        pytest.param(make_pod({"cpu": "1"}), id="no GPU"),
        pytest.param(make_pod({"nvidia.com/gpu": 1}), id="NVIDIA's own plugin serves it"),
        pytest.param(make_pod(containers=[{"name": "main", "env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]}]), id="env alone"),
        pytest.param({"metadata": None, "spec": {"containers": None}}, id="nothing at all"),
        pytest.param(
            {"metadata": {"labels": {"hami.io/webhook": "ignore"}}, "spec": make_pod({"nvidia.com/gpumem": 1})["spec"]}, id="opted out"
        ),
    ],
)
def test_other_pods_are_not_touched(pod):
    assert normaliser().admit(pod) == UNTOUCHED


@pytest.mark.parametrize("spec", [{}, {"nodeName": "n1"}, {"schedulerName": "mine"}], ids=["plain", "on a node", "another scheduler"])
@pytest.mark.parametrize(
    ("limits", "adopt", "left"),
    [
        pytest.param({"nvidia.com/gpu": "0"}, True, {}, id="adopted"),
        pytest.param({"nvidia.com/gpu": 0, "cpu": "1"}, True, {"cpu": "1"}, id="beside a CPU"),
        pytest.param({"nvidia.com/gpu": "0"}, False, {"nvidia.com/gpu": "0"}, id="NVIDIA's"),
        pytest.param({"nvidia.com/gpu": "0", "nvidia.com/gpumem": "0"}, False, {}, id="HAMi's"),
        pytest.param({"nvidia.com/gpu": "0", "nvidia.com/gpumem": "3000", "nvidia.com/gpucores": "30"}, False, {}, id="shares of none"),
        pytest.param({"nvidia.com/gpumem": "0"}, False, {}, id="no memory"),
    ],
)
def test_pod_with_zero_gpus_is_left_alone_without_zeros(limits, adopt, left, spec):
    annotations = {"nvidia.com/use-gputype": "H100", "nvidia.com/vgpu-mode": "whatever"}
    pod = make_pod(limits, annotations=annotations, **spec)
    outcome = normaliser(adopt_nvidia_gpu=adopt).admit(pod)
    assert (outcome.is_gpu_pod, outcome.warnings) == (False, ())
    wanted = copy.deepcopy(pod)
    wanted["spec"]["containers"][0]["resources"] = {"limits": left} if left else {}
    assert admitted(pod, normaliser(adopt_nvidia_gpu=adopt)) == wanted


def test_zeros_are_removed_next_to_gpu_containers_and_our_resources():
    zeros = {"nvidia.com/gpu": "0", "nvidia.com/gpumem": "0"}
    main = {"name": "main", "resources": {"limits": {"nvidia.com/vgpu": "2", "nvidia.com/vgpu-memory": "4000", **zeros}}}
    pod = admitted(make_pod(containers=[main, {"name": "side", "resources": {"limits": zeros}}]))
    assert [limits_of(pod, position) for position in (0, 1)] == [{"nvidia.com/vgpu": "2", "nvidia.com/vgpu-memory": "4000"}, {}]


def test_replica_next_to_zero_gpus_is_no_zero():
    assert "which states no amount" in refusal(
        make_pod({"nvidia.com/gpu": "0", "nvidia.com/gpu.shared": "1"}), normaliser(adopt_nvidia_gpu=True)
    )


def test_zeros_of_a_pod_that_opted_out_stay():
    pod = make_pod({"nvidia.com/gpu": "0", "nvidia.com/gpumem": "0"})
    pod["metadata"]["labels"] = {"hami.io/webhook": "ignore"}
    assert normaliser(adopt_nvidia_gpu=True).admit(pod) == UNTOUCHED


def test_a_way_of_computing_without_an_amount_asks_for_no_gpu():
    mode = {"nvidia.com/container.main.gpu-compute.mode": "sm-sharing"}
    assert normaliser().admit(make_pod({"nvidia.com/gpu": "1"}, annotations=mode)) == UNTOUCHED


def test_plain_nvidia_gpus_are_adopted_as_whole_ones_when_configured():
    pod = admitted(make_pod({"nvidia.com/gpu": "2"}), normaliser(adopt_nvidia_gpu=True))
    assert limits_of(pod) == {"nvidia.com/vgpu": "2", "nvidia.com/vgpu-memory": "163840"}


@pytest.mark.parametrize("name", ["", "default-scheduler", "hami-scheduler", "kai-scheduler", SCHEDULER])
def test_known_schedulers_are_replaced_by_ours(name):
    assert admitted(make_pod({"nvidia.com/vgpu": "1"}, schedulerName=name))["spec"]["schedulerName"] == SCHEDULER


OTHER_TAINT = {"key": "team", "operator": "Equal", "value": "ml", "effect": "NoSchedule"}


@pytest.mark.parametrize(
    "limits",
    [{"nvidia.com/vgpu": "1"}, {"nvidia.com/vgpu-memory": "4Gi"}, {"nvidia.com/mig-1g.10gb": "1"}, {"nvidia.com/gpumem": 3000}],
    ids=["whole", "share", "MIG", "HAMi"],
)
def test_gpu_pods_tolerate_the_taint_that_clouds_give_their_gpu_nodes(limits):
    pod = admitted(make_pod(limits, tolerations=[OTHER_TAINT]))
    assert pod["spec"]["tolerations"] == [OTHER_TAINT, {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    assert normaliser().admit(pod).patch == ()


@pytest.mark.parametrize(
    ("toleration", "covers"),
    [
        ({"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}, True),
        ({"key": "nvidia.com/gpu", "operator": "Exists"}, True),
        ({"operator": "Exists"}, True),
        ({"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoExecute"}, False),
        ({"key": "nvidia.com/gpu", "operator": "Equal", "value": "present", "effect": "NoSchedule"}, False),
        ({"key": "nvidia.com/gpu", "value": "", "effect": "NoSchedule"}, False),
        (OTHER_TAINT, False),
    ],
)
def test_a_toleration_is_added_unless_one_covers_the_taint_with_any_value(toleration, covers):
    pod = admitted(make_pod({"nvidia.com/vgpu": "1"}, tolerations=[toleration]))
    assert pod["spec"]["tolerations"] == [toleration, *([] if covers else [GPU_TOLERATION])]


def test_tolerations_are_left_alone_where_that_is_configured():
    rules = Normaliser(Options(lambda _: (81920,)), tolerate_gpu_taint=False)
    assert "tolerations" not in admitted(make_pod({"nvidia.com/vgpu": "1"}), rules)["spec"]


def test_another_scheduler_is_kept_with_a_warning():
    ready = make_pod({"nvidia.com/vgpu": "1", "nvidia.com/vgpu-memory": "100"}, schedulerName="mine", tolerations=[GPU_TOLERATION])
    outcome = normaliser().admit(ready)
    assert outcome.patch == ()
    assert "only aliquot-scheduler assigns GPUs" in outcome.warnings[0]


def test_containers_without_gpu_request_get_none_from_runtime():
    side = {"name": "side", "env": [{"name": "A", "value": "1"}, {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]}
    main = {"name": "main", "resources": {"limits": {"nvidia.com/vgpu": "1"}}}
    pod = make_pod(containers=[main, side], initContainers=[{"name": "init"}])
    after = admitted(pod)
    assert after["spec"]["containers"][1]["env"] == [{"name": "A", "value": "1"}, *VOID]
    assert after["spec"]["initContainers"][0]["env"] == VOID
    assert "env" not in after["spec"]["containers"][0]
    (warning,) = normaliser().admit(pod).warnings
    assert "container side" in warning


def test_a_gpu_container_names_no_gpus_itself():
    """Kubelet lets the pod's value win over what the agent sets: all would widen what it sees, void leave it without a GPU."""
    env = [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}, {"name": "A", "value": "1"}]
    pod = make_pod(containers=[{"name": "main", "resources": {"limits": {"nvidia.com/vgpu": "1"}}, "env": env}])
    assert admitted(pod)["spec"]["containers"][0]["env"] == [{"name": "A", "value": "1"}]
    (warning,) = normaliser().admit(pod).warnings
    assert "container main: NVIDIA_VISIBLE_DEVICES is removed" in warning


def test_what_has_no_effect_is_warned_about():
    main = {
        "name": "main",
        "resources": {"limits": {"nvidia.com/gpumem": 10}},
        "env": [{"name": "CUDA_DISABLE_CONTROL", "value": "true"}],
    }
    outcome = normaliser().admit(make_pod(containers=[main], annotations={"hami.io/device-scoring-weights": "slot=1"}))
    assert [warning.split(":")[0] for warning in outcome.warnings] == [
        "annotation hami.io/device-scoring-weights has no effect",
        "container main",
    ]


WRITTEN_BY_SCHEDULER = {"aliquot.dev/assignment": "{}", "aliquot.dev/retry": "7"}


@pytest.mark.parametrize("kept", [{}, {"aliquot.dev/gpu-type": "H100", "team": "a"}], ids=["nothing else", "what the user wrote"])
def test_copied_pod_loses_annotations_of_scheduler(kept):
    copied = make_pod({"nvidia.com/vgpu": "1"}, annotations=WRITTEN_BY_SCHEDULER | kept)
    assert admitted(copied)["metadata"]["annotations"] == kept
    [warning] = normaliser().admit(copied).warnings
    assert "aliquot.dev/assignment, aliquot.dev/retry is removed" in warning


def test_hold_is_removed_from_copy_and_kept_where_controller_passes_it_on():
    hold = {contract.ANNOTATION_HOLD: "job-a/main"}
    copied = make_pod({"nvidia.com/vgpu": "1"}, annotations=hold)
    assert contract.ANNOTATION_HOLD not in admitted(copied)["metadata"].get("annotations", {})
    [warning] = normaliser().admit(copied).warnings
    assert f"{contract.ANNOTATION_HOLD} is removed" in warning
    created = make_pod({"nvidia.com/vgpu": "1"}, annotations=hold)
    created["metadata"]["ownerReferences"] = [{"apiVersion": "batch/v1", "kind": "Job", "name": "a", "uid": "u", "controller": True}]
    assert admitted(created)["metadata"]["annotations"] == hold
    assert normaliser().required_rules().admit(copied).warnings == ()


def test_a_copy_that_asks_for_no_gpu_is_left_to_the_policy():
    assert normaliser().admit(make_pod(annotations=WRITTEN_BY_SCHEDULER)) == UNTOUCHED


def test_admitting_twice_changes_nothing_more():
    once = admitted(make_pod({"nvidia.com/gpu": 2, "nvidia.com/gpumem": 3000}, containers=None))
    assert normaliser().admit(once).patch == ()


# --- refusals say what to write -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pod", "sentence"),
    [
        (make_pod({"nvidia.com/vgpu": 1, "nvidia.com/vgpu-cores": 250}), "which have 100 in all"),
        (make_pod({"nvidia.com/vgpu": 2, "nvidia.com/vgpu-memory": 4001}), "set nvidia.com/vgpu-memory to 4000 or 4002"),
        (make_pod({"nvidia.com/vgpu-memory": "lots"}), "write a number such as 4 or 4Gi"),
        (make_pod({"nvidia.com/vgpu": 1}, annotations={"aliquot.dev/placement": "best"}), "expected one of frag, binpack"),
        (make_pod({"nvidia.com/vgpu": 1}, annotations={"aliquot.dev/gang": "g"}), "set both"),
        (make_pod({"nvidia.com/vgpu": 1}, annotations={"aliquot.dev/gang": "g", "aliquot.dev/gang-min": "0"}), "a number from 1 to"),
        (make_pod({"nvidia.com/vgpu": 1}, nodeName="n1"), "use a nodeSelector"),
        (make_pod({"nvidia.com/vgpu": 1, "nvidia.com/gpumem": 10}), "mixes two vocabularies"),
        (make_pod({"nvidia.com/gpumem": 10, "nvidia.com/gpumem-percentage": 10}), "sets both"),
        (make_pod({"nvidia.com/gpumem-percentage": 101}), "expected 1 to 100, found 101"),
        (make_pod({"nvidia.com/gpumem": "-5"}), "nvidia.com/gpumem: "),
        (make_pod({"nvidia.com/gpu": 1, "nvidia.com/gpucores": 120}), "which have 100 in all"),
        (
            make_pod({"nvidia.com/gpumem": 10}, annotations={"nvidia.com/vgpu-mode": "mig"}),
            "no node offers MIG instances now",
        ),
        (make_pod({"nvidia.com/gpumem": 10}, annotations={"hami.io/gpu-scheduler-policy": "mutex"}), "isolation: exclusive"),
        (
            make_pod({"nvidia.com/gpumem": 10}, annotations={"nvidia.com/use-gputype": "A", "aliquot.dev/gpu-type": "B"}),
            "keep one of the two",
        ),
        (make_pod(annotations={"gpu-fraction": "1.5"}), "a number between 0 and 1"),
        (make_pod(annotations={"gpu-fraction": "NaN"}), "a number between 0 and 1"),
        (make_pod(annotations={"gpu-fraction": "0.5", "gpu-memory": "5"}), "keep one"),
        (make_pod({"nvidia.com/vgpu": 1}, annotations={"gpu-memory": "5"}), "both by annotation gpu-memory and by a resource"),
        (make_pod(annotations={"gpu-memory": "5", "gpu-fraction-container-name": "x"}), "no container 'x'"),
        (make_pod(annotations={"nvidia.com/container.x.gpu-memory.request": "1Gi"}), "no container 'x'"),
        (
            make_pod(
                annotations={"nvidia.com/container.main.gpu-memory.request": "2Gi", "nvidia.com/container.main.gpu-memory.limit": "1Gi"}
            ),
            "is below the request",
        ),
        (make_pod(annotations={"nvidia.com/container.main.gpu-compute.mode": "magic"}), "time-slicing or sm-sharing"),
        (
            make_pod(annotations={"nvidia.com/container.main.gpu-memory.max": "4Gi"}),
            "is unknown: expected nvidia.com/container.<container>.",
        ),
        (make_pod({"nvidia.com/vgpu": 1}, annotations={"nvidia.com/container.main": "4Gi"}), "nvidia.com/container.main' is unknown"),
        (make_pod(annotations={"gpu-memory.limit": "8Gi"}), "add gpu-memory, or remove the limit"),
        (make_pod(annotations={"gpu-fraction.limit": "0.8"}), "add gpu-fraction, or remove the limit"),
        (make_pod(annotations={"gpu-memory": "5", "gpu-fraction.limit": "0.8"}), "add gpu-fraction, or remove the limit"),
        (make_pod(annotations={KAI_PORTION_LIMIT.format("main"): "0.8"}), "add gpu-fraction, or remove the limit"),
        (make_pod(annotations={"gpu-memory": "4096", "gpu-memory.limit": "8192"}), "an amount with a unit such as 8Gi, found '8192'"),
        (make_pod(annotations={"gpu-memory": "4096", "gpu-memory.limit": "2Gi"}), "gpu-memory.limit is below the request"),
        (make_pod(annotations={"gpu-memory": "4096", "gpu-memory.limit": "lots"}), "annotation gpu-memory.limit: "),
        (make_pod(annotations={"gpu-fraction": "0.5", "gpu-fraction.limit": "0.4"}), "gpu-fraction.limit is below the request"),
        (
            make_pod(annotations={"gpu-fraction": "0.5", "gpu-fraction.limit": "1.5"}),
            "gpu-fraction.limit: expected a number between 0 and 1",
        ),
        (
            make_pod(annotations={"gpu-fraction": "0.5", "gpu-fraction.limit": "0.8", KAI_PORTION_LIMIT.format("main"): "0.9"}),
            "differ, 0.8 and 0.9: keep one",
        ),
        (
            make_pod(annotations={"gpu-fraction": "0.5", KAI_PORTION_LIMIT.format("x"): "0.9"}),
            "of container x, but gpu-fraction applies to main",
        ),
        (
            make_pod(
                annotations={"gpu-memory": "4096", "gpu-memory.limit": "8Gi", "nvidia.com/container.main.gpu-memory.request": "4Gi"}
                | {"nvidia.com/container.main.gpu-memory.limit": "6Gi"}
            ),
            "different GPU memory limits for one container",
        ),
    ],
)
def test_bad_input_is_refused_with_what_to_write_instead(pod, sentence):
    assert sentence in refusal(pod)


@pytest.mark.parametrize("adopt", [False, True])
@pytest.mark.parametrize(
    ("limits", "annotations"),
    [
        pytest.param({"nvidia.com/vgpu-memory": "4096"}, {}, id="our words"),
        pytest.param({"nvidia.com/mig-1g.10gb": "1"}, {}, id="MIG"),
        pytest.param({"nvidia.com/vgpu": "1", "nvidia.com/vgpu-memory": "3000"}, {"nvidia.com/use-gputype": "H100"}, id="HAMi, translated"),
        pytest.param({}, {"gpu-memory": "4096"}, id="KAI"),
        pytest.param({}, {"nvidia.com/container.main.gpu-memory.request": "4Gi"}, id="NVIDIA"),
    ],
)
def test_nvidia_gpu_added_by_limit_range_is_refused_with_remedy(limits, annotations, adopt):
    added = make_pod({**limits, "nvidia.com/gpu": "1"}, annotations=annotations)
    assert FROM_LIMIT_RANGE in refusal(added, normaliser(adopt_nvidia_gpu=adopt))


def test_zero_nvidia_gpu_or_another_container_is_no_second_vocabulary():
    limits = {"nvidia.com/vgpu": "1", "nvidia.com/vgpu-memory": "4096"}
    none = make_pod({**limits, "nvidia.com/gpu": "0"})
    assert limits_of(admitted(none)).items() >= limits.items()
    annotated = make_pod({"nvidia.com/gpu": "0"}, annotations={"gpu-memory": "4096"})
    assert limits_of(admitted(annotated)).items() >= limits.items()
    other = {"name": "other", "resources": {"limits": {"nvidia.com/gpu": "1"}}}
    pod = admitted(make_pod(containers=[{"name": "main", "resources": {"limits": limits}}, other]))
    assert limits_of(pod, 1) == {"nvidia.com/gpu": "1"}


PERCENT = "nvidia.com/vgpu-memory-percent"


@pytest.mark.parametrize("sizes", [(), (40960, 81920), (46068, 49140)], ids=["no GPU yet", "two sizes", "more than 3 % apart"])
@pytest.mark.parametrize(
    ("written", "annotations", "wanted"),
    [
        pytest.param({}, {"gpu-fraction": "0.5"}, {"nvidia.com/vgpu": "1", PERCENT: "50"}, id="KAI"),
        pytest.param(
            {}, {"gpu-fraction": "0.5", "gpu-fraction-num-devices": "2"}, {"nvidia.com/vgpu": "2", PERCENT: "100"}, id="KAI, two devices"
        ),
        pytest.param({"nvidia.com/gpu": 2, "nvidia.com/gpumem-percentage": 30}, {}, {"nvidia.com/vgpu": "2", PERCENT: "60"}, id="HAMi"),
        pytest.param({"volcano.sh/vgpu-memory-percentage": 7}, {}, {"nvidia.com/vgpu": "1", PERCENT: "7"}, id="Volcano"),
        pytest.param({PERCENT: 7}, {}, {"nvidia.com/vgpu": "1", PERCENT: "7"}, id="ours"),
        pytest.param({"nvidia.com/gpumem-percentage": 100}, {}, {"nvidia.com/vgpu": "1"}, id="all is a whole GPU"),
    ],
)
def test_part_of_gpus_of_several_sizes_stays_a_percentage(sizes, written, annotations, wanted):
    rules = normaliser(sizes)
    pod = admitted(make_pod(written, annotations=annotations), rules)
    assert {name: str(amount) for name, amount in limits_of(pod).items()} == wanted
    assert rules.admit(pod).patch == ()


def test_fraction_between_percentages_is_rounded_down_with_a_warning():
    outcome = normaliser((40960, 81920)).admit(make_pod(annotations={"gpu-fraction": "0.333"}))
    assert outcome.warnings == ("gpu-fraction: 0.333 is no whole percentage: the GPUs differ in size, so the pod asks for 33 percent",)
    assert normaliser().admit(make_pod(annotations={"gpu-fraction": "0.333"})).warnings == ()


KNOWN = {"none": (), "one size": (81920,), "another size": (46068,), "two sizes": (40960, 81920), "two others": (46068, 143771)}


@pytest.mark.parametrize("first", KNOWN)
@pytest.mark.parametrize("second", KNOWN)
def test_fraction_stays_as_first_review_wrote_it_when_sizes_change(first, second):
    pod = admitted(make_pod(annotations={"gpu-fraction": "0.5", "gpu-fraction-num-devices": "2"}), normaliser(KNOWN[first]))
    again = normaliser(KNOWN[second]).admit(pod)
    assert (again.refusal, again.patch) == ("", ())
    is_other = first in ("one size", "another size") and not set(KNOWN[first]) <= set(KNOWN[second])
    assert [warning for warning in again.warnings if "the template may be older than the GPUs" in warning] == list(again.warnings)
    assert len(again.warnings) == is_other


@pytest.mark.parametrize(
    "limits", [{"nvidia.com/vgpu": 2, "nvidia.com/vgpu-memory": 9}, {"nvidia.com/vgpu": 1}, {"nvidia.com/vgpu-cores": 9}]
)
def test_fraction_beside_other_amounts_of_ours_is_refused(limits):
    assert "both by annotation gpu-fraction and by a resource" in refusal(make_pod(limits, annotations={"gpu-fraction": "0.5"}))


def test_percentage_and_amount_of_memory_together_are_refused():
    assert "keep one" in refusal(make_pod({"nvidia.com/vgpu-memory": 1, PERCENT: 1}))


def test_gpus_of_one_model_with_different_drivers_have_one_size():
    """0.5 of 81008 would not leave room for the other half on a GPU of 80962."""
    pod = admitted(make_pod(annotations={"gpu-fraction": "0.5"}), normaliser((81008, 80962)))
    assert limits_of(pod) == {"nvidia.com/vgpu": "1", "nvidia.com/vgpu-memory": "40481"}


@pytest.mark.parametrize(
    "pod",
    [
        {"spec": [1]},
        {"spec": {"containers": [7]}},
        {"spec": {"containers": {"a": 1}}},
        {"spec": {"containers": [{"env": ["A"]}]}},
        {"spec": {"containers": [{"name": 7}]}},
        {"spec": {"containers": [{"resources": {"limits": {"nvidia.com/vgpu": [1]}}}]}},
        {"spec": {"tolerations": [7]}},
        {"spec": {"nodeName": ["n1"]}},
        {"metadata": 7},
        {"metadata": {"labels": "a"}},
        {"metadata": {"annotations": {"gpu-fraction": 0.5}}},
    ],
    ids=json.dumps,
)
def test_what_is_no_pod_is_refused(pod):
    assert "expected a pod" in refusal(pod)


def test_sidecar_put_first_by_other_webhook_gets_no_gpu_on_readmission():
    pod = admitted(make_pod(annotations={"gpu-fraction": "0.5"}))
    pod["spec"]["containers"].insert(0, {"name": "proxy", "image": "proxy", "resources": {"limits": {"cpu": "2"}}})
    again = admitted(pod)
    assert limits_of(again, 0) == {"cpu": "2"}
    assert limits_of(again, 1) == limits_of(pod, 1) == {"nvidia.com/vgpu": "1", "nvidia.com/vgpu-memory": "40960"}


def annotated_for_each_container(count: int) -> dict:
    containers = [{"name": f"c{number}"} for number in range(count)]
    return make_pod(containers=containers, annotations={f"nvidia.com/container.c{n}.gpu-memory.request": "1Gi" for n in range(count)})


def test_containers_are_searched_once_for_all_annotations():
    """What a review costs is in proportion to its size: filter and bind wait for it."""

    class Counted(list):
        searches = 0

        def __iter__(self):
            self.searches += 1
            return super().__iter__()

    def searches(count: int) -> int:
        draft = Draft(annotated_for_each_container(count))
        draft.containers = Counted(draft.containers)
        translate_amounts(draft, Options(lambda _: (81920,)))
        return draft.containers.searches

    assert searches(200) == searches(2)


def test_pod_with_too_many_containers_is_refused_only_with_gpu_request():
    pod = annotated_for_each_container(MAX_CONTAINERS + 1)
    assert "at most 512 containers in a pod that asks for a GPU, found 513" in refusal(pod)
    assert normaliser().admit(make_pod(containers=pod["spec"]["containers"])) == UNTOUCHED


@pytest.mark.parametrize(
    ("count", "annotations", "says"),
    [
        ("2", {"numa": "strict"}, "aliquot.dev/numa: strict"),
        ("1", {"memory-burst": "1.5"}, "aliquot.dev/memory-burst"),
        ("1", {"isolation": "exclusive"}, "aliquot.dev/isolation: exclusive"),
    ],
)
def test_what_nothing_keeps_for_mig_instances_is_refused(count, annotations, says):
    pod = make_pod({"nvidia.com/mig-1g.10gb": count}, annotations={f"aliquot.dev/{name}": text for name, text in annotations.items()})
    assert f"container main asks for MIG instances with {says}, which MIG instances do not support" in refusal(pod)


@pytest.mark.parametrize(("count", "numa"), [("1", "strict"), ("2", "prefer")])
def test_one_mig_instance_needs_no_numa_preference_and_several_may(count, numa):
    assert refusal(make_pod({"nvidia.com/mig-1g.10gb": count}, annotations={"aliquot.dev/numa": numa})) == ""


@pytest.mark.parametrize(
    "zeros", [{"nvidia.com/vgpu": 0}, {"nvidia.com/vgpu": "0", "nvidia.com/vgpu-memory": "0", "nvidia.com/vgpu-cores": "0"}]
)
def test_zeros_in_our_words_ask_for_no_gpu(zeros):
    outcome = normaliser().admit(make_pod(zeros))
    assert (outcome.refusal, outcome.is_gpu_pod) == ("", False)
    assert limits_of(admitted(make_pod(zeros))) == {}
    side = {"name": "side", "resources": {"limits": zeros}}
    pod = admitted(make_pod(containers=[{"name": "main", "resources": {"limits": {"nvidia.com/mig-1g.10gb": "1"}}}, side]))
    assert [limits_of(pod, position) for position in (0, 1)] == [{"nvidia.com/mig-1g.10gb": "1"}, {}]


def test_memory_of_no_gpu_is_refused():
    assert "found '0'" in refusal(make_pod({"nvidia.com/vgpu": "0", "nvidia.com/vgpu-memory": "4000"}))


def test_unknown_words_under_our_own_prefixes_are_warned_about():
    (warning,) = normaliser().admit(make_pod({"nvidia.com/vgpu": "1"}, annotations={"aliquot.dev/gpu-typ": "H100"})).warnings
    assert warning.startswith("annotation aliquot.dev/gpu-typ has no effect: known annotations are ")
    assert "aliquot.dev/gpu-type," in warning
    outcome = normaliser().admit(make_pod({"nvidia.com/vgpu-mem": "100"}))
    assert (outcome.is_gpu_pod, outcome.patch) == (False, ())
    (warning,) = outcome.warnings
    assert warning.startswith("container main: no node offers nvidia.com/vgpu-mem, so the pod will stay pending: use nvidia.com/vgpu, ")


@pytest.mark.parametrize("limits", [{"nvidia.com/gpu": "1"}, {"nvidia.com/gpu.shared": "1"}])
def test_container_of_nvidia_plugin_keeps_what_that_plugin_provides(limits):
    main = {"name": "main", "resources": {"limits": {"nvidia.com/vgpu": "1"}}}
    pod = admitted(make_pod(containers=[main, {"name": "theirs", "resources": {"limits": limits}}, {"name": "none"}]))
    assert ["env" in container for container in pod["spec"]["containers"]] == [False, False, True]


@pytest.mark.parametrize("name", ["gpu-type", "gpu-type-not"])
def test_name_that_can_mean_no_model_is_refused(name):
    text = refusal(make_pod({"nvidia.com/vgpu": 1}, annotations={f"aliquot.dev/{name}": "H200,-"}))
    assert text.startswith(f"annotation aliquot.dev/{name}: '-' names no GPU model")


# --- topology of other systems ----------------------------------------------------------------------------------------

KUEUE, KAI = "kueue.x-k8s.io/podset-{}-topology", "kai.scheduler/topology-{}-placement"


def gang_member(**words: str) -> dict:
    pod = make_pod({contract.RESOURCE_VGPU: "1"})
    pod["metadata"]["annotations"] = {contract.ANNOTATION_GANG: "g", contract.ANNOTATION_GANG_MIN: "2", **words}
    return pod


@pytest.mark.parametrize("word", [KUEUE, KAI])
@pytest.mark.parametrize("mode", ["required", "preferred"])
@pytest.mark.parametrize(
    ("label", "level"),
    [
        ("cloud.example/topology-rack", "cloud.example/topology-rack"),
        ("nvidia.com/gpu.clique", "clique"),
    ],
)
def test_topology_of_other_systems_becomes_domain_of_gang(word, mode, label, level):
    annotations = admitted(gang_member(**{word.format(mode): label}))["metadata"]["annotations"]
    assert (annotations[contract.ANNOTATION_DOMAIN], annotations[contract.ANNOTATION_DOMAIN_LEVEL]) == (mode, level)


def test_hosts_are_left_to_kueue_for_each_pod_set():
    words = {word: gang_member(**{word.format("required"): "kubernetes.io/hostname"}) for word in (KUEUE, KAI)}
    levels = {word: admitted(pod)["metadata"]["annotations"].get(contract.ANNOTATION_DOMAIN_LEVEL) for word, pod in words.items()}
    assert levels == {KUEUE: None, KAI: "kubernetes.io/hostname"}


def test_unusable_level_is_left_to_kueue_and_refused_for_kai():
    assert contract.ANNOTATION_DOMAIN not in admitted(gang_member(**{KUEUE.format("required"): "pool"}))["metadata"]["annotations"]
    assert "cannot be a level" in refusal(gang_member(**{KAI.format("required"): "pool"}))


def test_unusable_level_that_kai_only_prefers_is_warned_of():
    pod = gang_member(**{KAI.format("preferred"): "pool"})
    (warning,) = normaliser().admit(pod).warnings
    assert "topology-preferred-placement has no effect: 'pool' cannot be a level here" in warning
    assert contract.ANNOTATION_DOMAIN not in admitted(pod)["metadata"]["annotations"]


@pytest.mark.parametrize("word", [KUEUE, KAI])
def test_topology_counts_also_for_gang_in_words_of_kai(word):
    pod = make_pod({contract.RESOURCE_VGPU: "1"})
    pod["metadata"]["annotations"] = {"pod-group-name": "g", "kai.scheduler/batch-min-member": "2", word.format("required"): "my-rack"}
    assert admitted(pod)["metadata"]["annotations"][contract.ANNOTATION_DOMAIN_LEVEL] == "my-rack"


def test_topology_of_kai_without_gang_is_refused_or_warned_of():
    def alone(word: str) -> dict:
        return make_pod({contract.RESOURCE_VGPU: "1"}, annotations={word: "my-rack"})

    assert "topology-required-placement: 'my-rack' holds for the members of a gang" in refusal(alone(KAI.format("required")))
    (warning,) = normaliser().admit(alone(KAI.format("preferred"))).warnings
    assert "topology-preferred-placement has no effect" in warning
    assert normaliser().admit(alone(KUEUE.format("required"))).warnings == ()


def test_second_topology_word_is_warned_of():
    pod = gang_member(**{KAI.format("required"): "rack", KAI.format("preferred"): "nvidia.com/gpu.clique"})
    (warning,) = [text for text in normaliser().admit(pod).warnings if "no effect beside" in text]
    assert "preferred" in warning
    assert admitted(pod)["metadata"]["annotations"][contract.ANNOTATION_DOMAIN_LEVEL] == "rack"
