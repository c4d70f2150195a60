# SPDX-License-Identifier: Apache-2.0
"""A GPU pod that our webhook admits is left unchanged at a second look, as the API server gives it back.

Then /validate lets it through: in every vocabulary, with every setting.
"""

import asyncio
import copy
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from aliquot import contract
from aliquot.contract import units
from aliquot_lab.standin.patches import apply_json_patch
from scheduler_plugin.webhook.amounts import Options
from scheduler_plugin.webhook.normalise import Normaliser
from scheduler_plugin.webhook.review import Reviews

NATIVE = {
    "nvidia.com/vgpu": ["1", "2", "10"],
    "nvidia.com/vgpu-memory": ["4Gi", "4000", "4k", "3", "1e4", "8000Mi"],
    "nvidia.com/vgpu-cores": ["10", "50", "100", "1000"],
}
HAMI = {
    "nvidia.com/gpu": ["0", "1", "2", "10"],
    "nvidia.com/gpumem": ["0", "3000", "3Gi"],
    "nvidia.com/gpumem-percentage": ["10", "50", "99", "100"],
    "nvidia.com/gpucores": ["0", "10", "100"],
    "nvidia.com/priority": ["0", "1"],
}
OTHERS = {"nvidia.com/mig-1g.10gb": ["1", "2"], "nvidia.com/gpu.shared": ["1"], "cpu": ["1", "500m"]}
ANNOTATIONS = {
    "gpu-fraction": ["0.5", "0.3333"],
    "gpu-memory": ["4096", "4000"],
    "gpu-fraction.limit": ["0.5", "0.75"],
    "gpu-memory.limit": ["4Gi", "8000Mi"],
    "kai.scheduler/container.a.gpu-memory.portion.limit": ["0.75"],
    "gpu-fraction-num-devices": ["1", "2"],
    "gpu-fraction-container-name": ["a", "b"],
    "nvidia.com/container.a.gpu-memory.request": ["4Gi", "4000Mi"],
    "nvidia.com/container.a.gpu-memory.limit": ["4Gi", "6Gi"],
    "nvidia.com/container.b.gpu-memory.limit": ["6Gi"],
    "nvidia.com/container.a.gpu-compute.mode": ["sm-sharing", "time-slicing"],
    "nvidia.com/container.a.gpus.devices": ["GPU-1"],
    "nvidia.com/use-gputype": ["H100"],
    "nvidia.com/numa-bind": ["true"],
    "nvidia.com/vgpu-mode": ["hami-core", "mps", "mig"],
    "hami.io/gpu-scheduler-policy": ["binpack", "spread,numa"],
    "aliquot.dev/isolation": ["exclusive", "shim"],
    "aliquot.dev/memory-burst": ["2"],
    "aliquot.dev/paused": ["true", "maybe"],
    "aliquot.dev/assignment": ["{}"],
    "aliquot.dev/retry": ["7"],
}
ENV = [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}, {"name": "A", "value": "1"}]


def some_of(choices: dict[str, list[str]], most: int) -> st.SearchStrategy[dict[str, str]]:
    names = st.lists(st.sampled_from(sorted(choices)), max_size=most, unique=True)
    return names.flatmap(lambda chosen: st.fixed_dictionaries({name: st.sampled_from(choices[name]) for name in chosen}))


def containers(name: str) -> st.SearchStrategy[dict[str, Any]]:
    amounts = st.one_of(some_of(NATIVE, 3), some_of(HAMI, 4), some_of(OTHERS, 2), some_of({**NATIVE, **HAMI, **OTHERS}, 3))
    env = st.lists(st.sampled_from(ENV), max_size=2, unique_by=lambda entry: entry["name"])
    return st.builds(lambda limits, env: {"name": name, "resources": {"limits": limits}, "env": copy.deepcopy(env)}, amounts, env)


PODS = st.builds(
    lambda annotations, labels, first, others, inits, scheduler: {
        "metadata": {"name": "p", "annotations": annotations, "labels": labels},
        "spec": {"containers": [first, *others], "initContainers": inits, "schedulerName": scheduler},
    },
    some_of(ANNOTATIONS, 3),
    st.sampled_from([{}, {}, {}, {"hami.io/webhook": "ignore"}]),
    containers("a"),
    st.lists(containers("b"), max_size=1),
    st.lists(containers("i"), max_size=1),
    st.sampled_from(["default-scheduler", "hami-scheduler", "aliquot-scheduler", "mine"]),
)
SIZES = st.sampled_from([(), (81920,), (81008, 80962), (40960, 81920)])


def given_back(pod: dict[str, Any]) -> dict[str, Any]:
    """The pod as the API server hands it on: amounts in their canonical spelling, requests copied from limits.

    Source: k8s.io/apimachinery/pkg/api/resource.Quantity.CanonicalizeBytes; k8s.io/kubernetes/pkg/apis/core/v1.SetDefaults_Pod.
    """
    pod = copy.deepcopy(pod)
    for container in [*pod["spec"]["containers"], *pod["spec"]["initContainers"]]:
        resources = container.get("resources", {})
        limits = {name: canonical(amount) for name, amount in resources.get("limits", {}).items()}
        requests = {name: canonical(amount) for name, amount in resources.get("requests", {}).items()}
        container["resources"] = {"limits": limits, "requests": limits | requests}
    return pod


def canonical(text: str) -> str:
    value = units.parse_quantity(text)
    steps = [("Gi", 1 << 30), ("Mi", 1 << 20), ("Ki", 1 << 10)] if text.endswith("i") else [("M", 10**6), ("k", 10**3)]
    for suffix, scale in (*steps, ("", 1)):
        if value and value % scale == 0:
            return f"{value / scale}{suffix}"
    return f"{value * 1000}m" if value else "0"


def test_amounts_are_spelled_as_the_api_server_does():
    spelled = {"4000": "4k", "3": "3", "4Gi": "4Gi", "8000Mi": "8000Mi", "500m": "500m", "0": "0", "1e4": "10k"}
    assert {text: canonical(text) for text in spelled} == spelled


@given(PODS, SIZES, st.booleans(), st.booleans())
def test_what_was_admitted_once_is_left_alone_and_validated(pod, sizes, adopt, tolerate):
    normaliser = Normaliser(Options(lambda _: sizes, adopt), tolerate_gpu_taint=tolerate)
    pod = given_back(pod)
    outcome = normaliser.admit(pod)
    if outcome.refusal or (not outcome.is_gpu_pod and contract.ANNOTATION_ASSIGNMENT in pod["metadata"]["annotations"]):
        return  # the policy refuses what asks for no GPU and has an assignment
    apply_json_patch(pod, json.loads(json.dumps(outcome.patch)))
    pod = given_back(pod)
    again = normaliser.admit(pod)
    assert (again.refusal, again.patch) == ("", ())
    request = {"uid": "r", "operation": "CREATE", "object": pod}
    body = json.dumps({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}).encode()
    answer = asyncio.run(Reviews(normaliser, lambda _: None).validate(body))
    assert json.loads(answer)["response"] == {"uid": "r", "allowed": True}
