# SPDX-License-Identifier: Apache-2.0
"""Objects with pod templates: each kind of ``KINDS`` around each pod of golden/, created, applied again, changed and started by a queue."""

import asyncio
import base64
import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from aliquot import contract
from aliquot_lab.standin.patches import apply_json_patch
from scheduler_plugin.webhook.amounts import Options
from scheduler_plugin.webhook.normalise import Normaliser, Outcome
from scheduler_plugin.webhook.review import MAX_WARNING_CHARS, Reviews
from scheduler_plugin.webhook.templates import EACH, KINDS, TemplateKind, Templates
from scheduler_plugin.webhook.words import WORDS, Kind, Word

GOLDEN = Path(__file__).parent / "golden"
PODS = {str(path.relative_to(GOLDEN).with_suffix("")): yaml.safe_load(path.read_text())["pod"] for path in sorted(GOLDEN.rglob("*.yaml"))}
GPU_MIB = 81920
PROFILES = {"1g.10gb": 9728, "2g.20gb": 19968, "3g.40gb": 40192, "7g.80gb": 80896}
NORMALISER = Normaliser(Options(lambda _: (GPU_MIB,), mig_profiles=lambda _: PROFILES))
PLACES = [(kind, path) for kind in KINDS for path in (*kind.paths, *kind.resources)]
TEMPLATES = [(kind, path) for kind in KINDS for path in kind.paths]
JOB = KINDS[0]
GANG = {contract.ANNOTATION_GANG, contract.ANNOTATION_GANG_MIN}


def named(places: list[tuple[TemplateKind, str]]) -> list[Any]:
    return [pytest.param(kind, path, id=f"{kind.kind}-{path.split('/')[-2]}") for kind, path in places]


def template_of(pod: dict) -> dict:
    metadata = {name: value for name, value in pod.get("metadata", {}).items() if name in ("annotations", "labels")}
    return copy.deepcopy({**({"metadata": metadata} if metadata else {}), "spec": pod["spec"]})


def holding(kind: TemplateKind, path: str, value: dict) -> dict:
    """An object of a kind with a value at a path; ``EACH`` becomes a mapping in Kubeflow's kinds, and a list in all others."""
    steps = path.split("/")
    held: Any = copy.deepcopy(value)
    for step in reversed(steps):
        held = ({"Worker": held} if kind.group == "kubeflow.org" else [held]) if step == EACH else {step: held}
    return {"metadata": {"name": "training", "namespace": "team"}, **held}


def held_at(path: str, found: dict) -> dict:
    value: Any = found
    for step in path.split("/"):
        value = (next(iter(value.values())) if isinstance(value, dict) else value[0]) if step == EACH else value[step]
    return value


def admit(kind: TemplateKind, found: dict, old: dict | None = None, normaliser: Normaliser = NORMALISER) -> Outcome:
    outcome = Templates(normaliser).admit(kind.group, kind.kind, found, old)
    assert outcome.refusal == ""
    return outcome


def patched(found: dict, outcome: Outcome) -> dict:
    result = copy.deepcopy(found)
    apply_json_patch(result, json.loads(json.dumps(outcome.patch)))
    return result


def created(kind: TemplateKind, path: str, value: dict, normaliser: Normaliser = NORMALISER) -> dict:
    found = holding(kind, path, value)
    return patched(found, admit(kind, found, normaliser=normaliser))


def pod_from(kind: TemplateKind, template: dict) -> dict:
    """The pod that the kind's controller makes, with requests as the API server copies them from limits."""
    owner = {"kind": kind.controller, "name": "training", "controller": True}
    pod = copy.deepcopy({"metadata": {**template.get("metadata", {}), "name": "p", "ownerReferences": [owner]}, "spec": template["spec"]})
    for group in ("containers", "initContainers"):
        for container in pod["spec"].get(group, ()):
            if limits := container.get("resources", {}).get("limits"):
                container["resources"]["requests"] = {**limits, **container["resources"].get("requests", {})}
    return pod


# --- every kind, every upstream pod ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "path"), named(TEMPLATES))
def test_pods_of_rewritten_template_pass_pod_webhook_unchanged(kind: TemplateKind, path: str) -> None:
    for pod in PODS.values():
        check_pod_of_rewritten_template(kind, path, template_of(pod))


def check_pod_of_rewritten_template(kind: TemplateKind, path: str, template: dict) -> None:
    rewritten = held_at(path, created(kind, path, template))
    at_once, later = NORMALISER.admit(pod_from(kind, template)), NORMALISER.admit(pod_from(kind, rewritten))
    assert later.refusal == at_once.refusal
    assert later.is_gpu_pod == at_once.is_gpu_pod
    had = rewritten.get("metadata", {}).get("annotations", {})
    for operation in later.patch:
        assert operation["path"] == "/metadata/annotations"
        assert operation["value"].keys() - had.keys() <= GANG
    if at_once.is_gpu_pod and not at_once.refusal:
        assert amounts(rewritten) == amounts({"spec": patched(pod_from(kind, template), at_once)["spec"]})


def amounts(template: dict) -> list[dict[str, str]]:
    return [
        {name: str(amount) for name, amount in container.get("resources", {}).get("limits", {}).items()}
        for group in ("initContainers", "containers")
        for container in template["spec"].get(group, ())
    ]


@pytest.mark.parametrize(("kind", "path"), named(TEMPLATES))
def test_rewritten_object_stays_unchanged_on_readmission(kind: TemplateKind, path: str) -> None:
    for pod in PODS.values():
        rewritten = created(kind, path, template_of(pod))
        assert admit(kind, rewritten).patch == ()
        assert admit(kind, rewritten, rewritten).patch == ()


@pytest.mark.parametrize("name", [name for name, pod in PODS.items() if NORMALISER.admit(pod).refusal])
def test_template_with_refused_pods_is_allowed_with_warning(name: str) -> None:
    outcome = admit(JOB, holding(JOB, "spec/template", template_of(PODS[name])))
    assert outcome.patch == ()
    assert all(warning.startswith("spec.template: its pods will be refused: ") for warning in outcome.warnings)
    assert outcome.warnings


@pytest.mark.parametrize(("kind", "path"), named([(kind, path) for kind in KINDS for path in kind.resources]))
def test_resources_without_template_are_rewritten_in_their_place(kind: TemplateKind, path: str) -> None:
    found = created(kind, path, {"limits": {"nvidia.com/gpu": "2", "nvidia.com/gpumem": "1000", "cpu": "4"}})
    assert held_at(path, found) == {"limits": {"cpu": "4", "nvidia.com/vgpu": "2", "nvidia.com/vgpu-memory": "2000"}}


# --- updates --------------------------------------------------------------------------------------------------------


def merged(live: Any, manifest: Any) -> Any:
    """What kubectl's patch makes of a live object: mappings merge, lists of named entries merge by name, other lists are replaced."""
    if isinstance(live, dict) and isinstance(manifest, dict):
        return {name: merged(live.get(name), manifest[name]) if name in manifest else live[name] for name in {**live, **manifest}}
    if isinstance(live, list) and isinstance(manifest, list) and all("name" in entry for entry in [*live, *manifest]):
        had, wanted = ({entry["name"]: entry for entry in entries} for entries in (live, manifest))
        return list(merged(had, wanted).values())
    return copy.deepcopy(manifest)


@pytest.mark.parametrize("name", PODS)
@pytest.mark.parametrize("merge", [merged, lambda _, manifest: copy.deepcopy(manifest)], ids=["merged", "replaced"])
def test_second_apply_of_same_manifest_changes_nothing(merge: Any, name: str) -> None:
    manifest = holding(JOB, "spec/template", template_of(PODS[name]))
    live = patched(manifest, admit(JOB, manifest))
    again = merge(live, manifest)
    outcome = admit(JOB, again, live)
    assert as_stored(patched(again, outcome)) == as_stored(live)


def as_stored(value: Any) -> Any:
    """The value without what is empty, numbers as text, and lists of named entries in the order of the names."""
    if isinstance(value, dict):
        return {name: stored for name, entry in value.items() if (stored := as_stored(entry)) not in ({}, [])}
    if isinstance(value, list):
        entries = [as_stored(entry) for entry in value]
        return sorted(entries, key=lambda entry: entry["name"]) if entries and all("name" in entry for entry in entries) else entries
    return str(value)


def started(found: dict) -> dict:
    """A Job as Kueue changes it when it lets it start."""
    result = copy.deepcopy(found)
    result["spec"]["suspend"] = False
    template = result["spec"]["template"]
    template["spec"]["nodeSelector"] = {"kubernetes.io/hostname": "n1"}
    template["spec"]["tolerations"] = [*template["spec"].get("tolerations", ()), {"key": "queued", "operator": "Exists"}]
    metadata = template.setdefault("metadata", {})
    metadata["labels"] = {**metadata.get("labels", {}), "kueue.x-k8s.io/podset": "main"}
    metadata["annotations"] = {**metadata.get("annotations", {}), "kueue.x-k8s.io/workload": "job-training"}
    return result


@pytest.mark.parametrize("name", PODS)
@pytest.mark.parametrize("from_before", [False, True], ids=["rewritten", "from before the installation"])
def test_start_by_queue_changes_no_template(name: str, from_before: bool) -> None:
    found = holding(JOB, "spec/template", template_of(PODS[name]))
    live = found if from_before else patched(found, admit(JOB, found))
    assert admit(JOB, started(live), live).patch == ()
    assert admit(JOB, live, started(live)).patch == (), "an eviction takes the changes back"


def limits(**amounts: int) -> dict:
    return {"limits": {f"nvidia.com/{name.replace('_', '-')}": str(amount) for name, amount in amounts.items()}}


def one_container(resources: dict, annotations: dict | None = None) -> dict:
    spec = {"containers": [{"name": "main", "resources": resources}]}
    return {"metadata": {"annotations": annotations}, "spec": spec} if annotations else {"spec": spec}


@pytest.mark.parametrize(
    ("before", "after", "wanted"),
    [
        pytest.param(one_container(limits(gpu=1, gpumem=1000)), one_container(limits(gpu=2, gpumem=500)), (2, 1000), id="HAMi"),
        pytest.param(one_container(limits(gpumem=1000)), one_container(limits(gpumem=3000)), (1, 3000), id="HAMi without a number"),
        pytest.param(one_container({}, {"gpu-memory": "1000"}), one_container({}, {"gpu-memory": "4000"}), (1, 4000), id="KAI's memory"),
        pytest.param(
            one_container({}, {"gpu-fraction": "0.5"}), one_container({}, {"gpu-fraction": "0.25"}), (1, GPU_MIB // 4), id="KAI's fraction"
        ),
        pytest.param(
            one_container(limits(vgpu_number=1, vgpu_memory=1000)),
            one_container(limits(vgpu_number=2, vgpu_memory=1000)),
            (2, 2000),
            id="vgpu-manager",
        ),
        pytest.param(
            one_container(limits(vgpu=1, vgpu_memory=1000)), one_container(limits(vgpu=1, vgpu_memory=7000)), (1, 7000), id="ours"
        ),
    ],
)
def test_apply_with_other_amounts_rewrites_template(before: dict, after: dict, wanted: tuple[int, int]) -> None:
    kind = KINDS[2]
    live = created(kind, "spec/template", before)
    again = merged(live, holding(kind, "spec/template", after))
    found = held_at("spec/template", patched(again, admit(kind, again, live)))
    assert amounts(found) == [{"nvidia.com/vgpu": str(wanted[0]), "nvidia.com/vgpu-memory": str(wanted[1])}]
    assert not NORMALISER.admit(pod_from(kind, found)).refusal


def test_update_of_annotation_keeps_amounts_of_other_containers() -> None:
    kind, own = KINDS[2], {"name": "own", "resources": limits(vgpu=1, vgpu_memory=2000)}
    template = one_container({}, {"gpu-memory": "1000", "gpu-fraction-container-name": "main"})
    template["spec"]["containers"].append(own)
    live = created(kind, "spec/template", template)
    again = copy.deepcopy(live)
    again["spec"]["template"]["metadata"]["annotations"]["gpu-memory"] = "4000"
    main, other = amounts(held_at("spec/template", patched(again, admit(kind, again, live))))
    assert (main["nvidia.com/vgpu-memory"], other["nvidia.com/vgpu-memory"]) == ("4000", "2000")


CLUSTERS = {"no GPU": (), "one size": (GPU_MIB,), "two others": (46068, 143771)}


@pytest.mark.parametrize("manager", CLUSTERS)
@pytest.mark.parametrize("worker", CLUSTERS)
def test_job_that_another_cluster_rewrote_is_left_as_it_is(manager: str, worker: str) -> None:
    """MultiKueue copies a Job from its manager cluster to a worker cluster, which has other GPUs."""
    theirs = Normaliser(Options(lambda _: CLUSTERS[manager], mig_profiles=lambda _: PROFILES))
    ours = Normaliser(Options(lambda _: CLUSTERS[worker], mig_profiles=lambda _: PROFILES))
    for pod in PODS.values():
        found = holding(JOB, "spec/template", template_of(pod))
        first = admit(JOB, found, normaliser=theirs)
        copied = patched(found, first)
        again = admit(JOB, copied, normaliser=ours)
        assert again.patch == ()
        refused = [any("will be refused" in warning for warning in outcome.warnings) for outcome in (first, again)]
        assert refused[0] == refused[1]


# --- words around a template ----------------------------------------------------------------------------------------


ASKING = {"limits": {"nvidia.com/vgpu": "1", "nvidia.com/vgpu-memory": "100"}}
AROUND = [pytest.param(word, id=f"{word.kind} {word.name}") for word in WORDS if word.kind in (Kind.ANNOTATION, Kind.LABEL)]


def around(kind: TemplateKind, path: str, **metadata: dict[str, str]) -> dict:
    found = holding(kind, path, ASKING if path in kind.resources else one_container(ASKING))
    found["metadata"] |= metadata
    return found


@pytest.mark.parametrize("word", AROUND)
def test_word_on_owner_of_pods_is_named_in_a_warning(word: Word) -> None:
    name = word.name.replace("<name>", "main")
    for kind, path in PLACES:
        (warning,) = admit(kind, around(kind, path, **{f"{word.kind}s": {name: "some"}})).warnings
        assert warning.startswith(f"metadata: {word.kind} {name} has no effect: ")
        assert len(warning) <= MAX_WARNING_CHARS


def test_our_own_and_unknown_words_on_owner_are_warned_of() -> None:
    words = {"aliquot.dev/gang": "g", "app.io/x": "1", "kai.scheduler/new": "1", "hami.io/vgpu-time": "1"}
    found = around(JOB, "spec/template", annotations=words, labels={"aliquot.dev/class": "training"})
    assert admit(JOB, found).warnings == (
        "metadata: annotation aliquot.dev/gang has no effect: pods do not get it: write it in the metadata of their template",
        "metadata: annotation kai.scheduler/new has no effect: it is not known to Aliquot",
        "metadata: label aliquot.dev/class has no effect: pods do not get it: write it in the metadata of their template",
    )


@pytest.mark.parametrize(("kind", "path", "steps"), [(KINDS[1], "spec/jobTemplate/spec/template", ("spec", "jobTemplate")), (
    next(kind for kind in KINDS if kind.kind == "JobSet"), f"spec/replicatedJobs/{EACH}/template/spec/template",
    ("spec", "replicatedJobs", 0, "template"),
)])  # fmt: skip
def test_word_between_owner_and_template_is_warned_of(kind: TemplateKind, path: str, steps: tuple[str | int, ...]) -> None:
    found: Any = around(kind, path)
    inner = found
    for step in steps:
        inner = inner[step]
    inner["metadata"] = {"annotations": {"kai.scheduler/batch-min-member": "2"}}
    place = ".".join(map(str, (*steps, "metadata")))
    (warning,) = admit(kind, found).warnings
    assert warning.startswith(f"{place}: annotation kai.scheduler/batch-min-member has no effect")


def test_word_that_its_template_has_too_is_not_lost() -> None:
    words = {"labels": {"kai.scheduler/queue": "research"}}
    found = around(JOB, "spec/template", **words)
    found["spec"]["template"]["metadata"] = copy.deepcopy(words)
    (warning,) = admit(JOB, found).warnings
    assert warning.startswith("label kai.scheduler/queue has no effect")


@pytest.mark.parametrize("change", ["no GPU", "other scheduler", "controlled"])
def test_words_around_pods_of_others_are_left_to_them(change: str) -> None:
    found = around(JOB, "spec/template", annotations={"kai.scheduler/batch-min-member": "2"})
    if change == "no GPU":
        found["spec"]["template"]["spec"]["containers"][0]["resources"] = {}
    elif change == "other scheduler":
        found["spec"]["template"]["spec"]["schedulerName"] = "mine"
    else:
        found["metadata"]["ownerReferences"] = [{"kind": "JobSet", "name": "o", "controller": True}]
    assert not [warning for warning in admit(JOB, found).warnings if "batch-min-member" in warning]


# --- what is left alone ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)
def test_object_of_controller_is_left_alone_unless_its_template_is_never_compared(kind: TemplateKind) -> None:
    path = (*kind.paths, *kind.resources)[0]
    value = limits(gpumem=1000) if kind.resources else one_container(limits(gpumem=1000))
    found = holding(kind, path, value)
    found["metadata"]["ownerReferences"] = [{"kind": "Owner", "name": "o", "controller": True}]
    assert bool(admit(kind, found).patch) == kind.controlled


def test_only_templates_of_jobs_are_never_compared() -> None:
    """The Deployment controller makes ReplicaSets without end if one differs from its template."""
    assert {kind.kind for kind in KINDS if kind.controlled} == {"Job"}


@pytest.mark.parametrize(("group", "kind"), [("batch", "Other"), ("example.com", "Job"), ("", "Pod"), ("", "")])
def test_unknown_kinds_are_left_alone(group: str, kind: str) -> None:
    found = holding(JOB, "spec/template", one_container(limits(gpumem=1000)))
    assert Templates(NORMALISER).admit(group, kind, found).patch == ()


@pytest.mark.parametrize(("kind", "path"), named(PLACES))
def test_templates_without_gpus_are_left_alone(kind: TemplateKind, path: str) -> None:
    resources = {"limits": {"cpu": "1"}}
    assert admit(kind, holding(kind, path, resources if kind.resources else one_container(resources))).patch == ()


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["name", "limits", "nvidia.com/gpumem", "gpu-memory"]), inner)
    ),
    max_leaves=6,
)


def broken(value: Any, wrong: Any) -> Iterator[Any]:
    """Yield the value with each part of it replaced in turn."""
    yield wrong
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in entries:
        for other in broken(entry, wrong):
            result = copy.copy(value)
            result[key] = other
            yield result


@settings(max_examples=20)
@given(wrong=VALUES)
def test_objects_of_any_form_are_reviewed_without_error(wrong: Any) -> None:
    template = one_container({**limits(gpumem=1000), "requests": {}}, {"gpu-memory": "1000"})
    whole = holding(JOB, "spec/template", template)
    for found in broken(whole, wrong):
        if isinstance(found, dict):
            for new, old in ((found, None), (found, whole), (whole, found)):
                for operation in admit(JOB, new, old).patch:
                    assert operation["path"].startswith("/spec/template")


# --- quotas ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("annotations", "wanted"),
    [
        pytest.param({"aliquot.dev/gpu-type": "H200"}, "143151", id="the model is named"),
        pytest.param({"aliquot.dev/gpu-type": "A100"}, "81920", id="another model"),
        pytest.param({}, None, id="two sizes"),
    ],
)
def test_whole_gpus_count_memory_of_named_model(annotations: dict, wanted: str | None) -> None:
    sizes = {("H200",): (143151,), ("A100",): (81920,), (): (143151, 81920)}
    normaliser = Normaliser(Options(lambda preferences: sizes[tuple(preferences.gpu_type)], count_whole_gpus=True))
    [found] = amounts(held_at("spec/template", created(JOB, "spec/template", one_container(limits(vgpu=1), annotations), normaliser)))
    assert found.get("nvidia.com/vgpu-memory") == wanted


# --- the wire -------------------------------------------------------------------------------------------------------


def reviewed(found: dict, old: dict | None = None, path: str = "/templates/adopt") -> tuple[dict, list[str]]:
    request = {"uid": "r", "operation": "UPDATE" if old else "CREATE", "object": found, "oldObject": old}
    request["kind"] = {"group": JOB.group, "version": "v1", "kind": JOB.kind}
    body = json.dumps({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}).encode()
    counted: list[str] = []
    response = json.loads(asyncio.run(Reviews(NORMALISER, counted.append).by_path()[path](body)))["response"]
    return response, counted


def test_review_of_job_carries_patch_and_is_counted_as_template() -> None:
    found = holding(JOB, "spec/template", one_container({}, {"gpu-memory": "40960"}))
    response, counted = reviewed(found)
    assert (response["allowed"], counted) == (True, ["template"])
    apply_json_patch(found, json.loads(base64.b64decode(response["patch"])))
    assert amounts(found["spec"]["template"]) == [{"nvidia.com/vgpu": "1", "nvidia.com/vgpu-memory": "40960"}]
    again, counted = reviewed(found, found)
    assert (again["allowed"], "patch" in again, counted) == (True, False, ["untouched"])


def test_template_in_other_words_is_left_alone_where_namespace_is_not_adopted() -> None:
    foreign = holding(JOB, "spec/template", one_container({}, {"gpu-memory": "40960"}))
    response, counted = reviewed(foreign, path="/templates")
    assert (response, counted) == ({"uid": "r", "allowed": True}, ["untouched"])
    ours = holding(JOB, "spec/template", one_container({}, {"gpu-memory": "40960", "aliquot.dev/placement": "spread"}))
    assert reviewed(ours, path="/templates") == reviewed(ours)
