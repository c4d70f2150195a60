# SPDX-License-Identifier: Apache-2.0
"""docs/use/migration.md promises what each foreign manifest becomes; the webhook has to agree."""

import copy
import json
import re
from pathlib import Path

import pytest
import yaml

from aliquot import contract
from aliquot_lab.standin.patches import apply_json_patch
from scheduler_plugin.webhook.amounts import Options
from scheduler_plugin.webhook.normalise import Normaliser

PAGE = Path(__file__).parents[3] / "docs/use/migration.md"
BLOCKS = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)]
PAIRS = list(zip(BLOCKS[::2], BLOCKS[1::2], strict=True))


def essence(pod: dict) -> dict:
    """What the page is about: our annotations, the scheduler, each container's limits."""
    annotations = pod["metadata"].get("annotations", {})
    return {
        "annotations": {name: text for name, text in annotations.items() if name.startswith(contract.ANNOTATION_PREFIX)},
        "scheduler": pod["spec"]["schedulerName"],
        "limits": [{k: str(v) for k, v in container["resources"]["limits"].items()} for container in pod["spec"]["containers"]],
    }


@pytest.mark.parametrize(("before", "after"), [pytest.param(*pair, id=pair[0]["metadata"]["name"]) for pair in PAIRS])
def test_a_manifest_becomes_what_the_page_says(before, after):
    outcome = Normaliser(Options(lambda _: {81920})).admit(before)
    assert outcome.refusal == ""
    admitted = copy.deepcopy(before)
    apply_json_patch(admitted, json.loads(json.dumps(outcome.patch)))
    assert essence(admitted) == essence(after)


def test_time_slicing_replica_becomes_manual_share_of_gpu():
    """No webhook rewrites it; the page's own arithmetic has to hold, and what it tells people to write has to be admitted as it is."""
    old, new = re.findall(r"```yml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    configuration, before = yaml.safe_load_all(old)
    after = yaml.safe_load(new)
    (shared,) = configuration["sharing"]["timeSlicing"]["resources"]
    assert before["spec"]["containers"][0]["resources"]["limits"] == {shared["name"]: 1}
    limits = after["spec"]["containers"][0]["resources"]["limits"]
    assert limits[contract.RESOURCE_VGPU_MEMORY] * shared["replicas"] == 81920
    assert limits[contract.RESOURCE_VGPU_CORES] * shared["replicas"] == 100
    outcome = Normaliser(Options(lambda _: {81920})).admit(after)
    assert outcome.refusal == ""
    admitted = copy.deepcopy(after)
    apply_json_patch(admitted, json.loads(json.dumps(outcome.patch)))
    assert essence(admitted)["limits"] == [{name: str(amount) for name, amount in limits.items()}]


def test_the_page_has_a_pair_for_each_system():
    assert {pair[0]["metadata"]["name"] for pair in PAIRS} == {
        "share",
        "pair",
        "chosen",
        "fraction",
        "worker",
        "burst",
        "runai",
        "volcano",
        "manager",
    }
