# SPDX-License-Identifier: Apache-2.0
"""What the example manifests of HAMi, KAI and NVIDIA become, and our own, and copies of running pods: each file of golden/ has a pod with
the fields of the upstream manifest that it names, or as the program that it names makes it, and what admission makes of it, with
``adopted`` where the setting adoptNvidiaGpu makes a difference. golden/native has every pod of deploy/examples as it is written there.
"""

import copy
import json
from pathlib import Path

import pytest
import yaml

from aliquot.placement.request import pod_request
from aliquot_lab.standin.patches import apply_json_patch
from scheduler_plugin.webhook.amounts import Options
from scheduler_plugin.webhook.draft import Draft
from scheduler_plugin.webhook.normalise import Normaliser, Outcome
from tests.rendering import EXAMPLES, pods_of

GOLDEN = Path(__file__).parent / "golden"
FILES = sorted(str(path.relative_to(GOLDEN).with_suffix("")) for path in GOLDEN.rglob("*.yaml"))
GPU_MIB = 81920
PROFILES = {"1g.10gb": 9728, "2g.20gb": 19968, "3g.40gb": 40192, "7g.80gb": 80896}
"""MiB of the instances of an A100 with 80 GiB."""
LEAST = {"hami": 15, "kai": 14, "nvidia": 8, "copies": 2, "native": 23}
"""How many manifests there are of each, at least: so that a lost file is noticed."""


def read(name: str) -> dict:
    return yaml.safe_load((GOLDEN / f"{name}.yaml").read_text())


def admit(pod: dict, *, adopt: bool) -> Outcome:
    return Normaliser(Options(lambda _: (GPU_MIB,), adopt, mig_profiles=lambda _: PROFILES)).admit(pod)


def described(outcome: Outcome) -> dict:
    """Say an outcome as the files do."""
    if outcome.refusal:
        return {"refused": outcome.refusal}
    if not outcome.is_gpu_pod:
        return {"untouched": True}
    patch = {"patch": json.loads(json.dumps(outcome.patch))}
    return patch | ({"warnings": list(outcome.warnings)} if outcome.warnings else {})


@pytest.mark.parametrize("adopt", [False, True], ids=["admitted", "adopted"])
@pytest.mark.parametrize("name", FILES)
def test_an_upstream_example_becomes_what_is_written_down(name, adopt):
    golden = read(name)
    wanted = golden.get("adopted", golden["admitted"]) if adopt else golden["admitted"]
    assert described(admit(golden["pod"], adopt=adopt)) == wanted


@pytest.mark.parametrize("name", FILES)
def test_admitted_pod_uses_our_vocabulary_and_stays_unchanged_on_readmission(name):
    pod = copy.deepcopy(read(name)["pod"])
    outcome = admit(pod, adopt=True)
    if outcome.refusal or not outcome.is_gpu_pod:
        return
    apply_json_patch(pod, json.loads(json.dumps(outcome.patch)))
    assert pod_request(Draft(pod).pod()).containers
    again = admit(pod, adopt=True)
    assert (again.refusal, again.patch) == ("", ())


def test_every_vocabulary_has_its_examples():
    assert {origin: sum(name.startswith(f"{origin}/") for name in FILES) >= least for origin, least in LEAST.items()} == dict.fromkeys(
        LEAST, True
    )


def test_every_pod_of_our_own_examples_is_there_as_it_is_written():
    written = [(f"deploy/examples/{path.name}", pod) for path in sorted(EXAMPLES.glob("*.yaml")) for pod in pods_of(path)]
    golden = [read(name) for name in FILES if name.startswith("native/")]
    assert sorted(written, key=str) == sorted(((one["upstream"], one["pod"]) for one in golden), key=str)
