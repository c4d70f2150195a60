# SPDX-License-Identifier: Apache-2.0
"""The migration pages promise what each foreign manifest becomes; the webhook has to agree."""

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

USE = Path(__file__).parents[3] / "docs/use"
PAGE = USE / "migration.md"
SYSTEMS = ("kai", "runai", "vgpu-manager", "volcano")
"""The systems with a page of their own."""


def pairs(page: Path) -> list[tuple[dict, dict]]:
    """Before and after, as a page has them."""
    blocks = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL)]
    return list(zip(blocks[::2], blocks[1::2], strict=True))


PAIRS = pairs(PAGE)
PAGES = {"hami": PAIRS, **{name: pairs(USE / f"migration-{name}.md") for name in SYSTEMS}}
ALL_PAIRS = [pytest.param(*pair, id=f"{name}-{pair[0]['metadata']['name']}") for name, found in PAGES.items() for pair in found]


def essence(pod: dict) -> dict:
    """What the page is about: our annotations, the scheduler, each container's limits."""
    annotations = pod["metadata"].get("annotations", {})
    return {
        "annotations": {name: text for name, text in annotations.items() if name.startswith(contract.ANNOTATION_PREFIX)},
        "scheduler": pod["spec"]["schedulerName"],
        "priority": pod["spec"].get("priorityClassName"),
        "limits": [
            {k: str(v) for k, v in container.get("resources", {}).get("limits", {}).items()} for container in pod["spec"]["containers"]
        ],
    }


@pytest.mark.parametrize(("before", "after"), ALL_PAIRS)
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


@pytest.mark.parametrize(("before", "after"), ALL_PAIRS)
def test_what_the_page_says_to_write_is_admitted_without_changes_of_meaning(before, after):
    del before
    outcome = Normaliser(Options(lambda _: {81920}), adopts=False).admit(after)
    assert (outcome.refusal, outcome.warnings, outcome.system) == ("", (), "")
    admitted = copy.deepcopy(after)
    apply_json_patch(admitted, json.loads(json.dumps(outcome.patch)))
    assert essence(admitted) == essence(after)


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_page_of_a_system_has_pairs_links_and_what_changes(name):
    text = (USE / f"migration-{name}.md").read_text()
    assert len(PAGES[name]) >= 4
    assert "## What changes" in text
    assert f"migration-{name}.md" in PAGE.read_text()
    assert all(f"(migration.md#{part})" in text for part in ("adopt-a-namespace", "quotas-and-limit-ranges", "all-words"))


def test_a_job_of_volcano_keeps_its_members_and_their_amounts():
    """Volcano's controller makes the pods, so the page rewrites the Job by hand."""
    old, new = (yaml.safe_load(block) for block in re.findall(r"```yml\n(.*?)```", (USE / "migration-volcano.md").read_text(), re.DOTALL))
    (task,), template = old["spec"]["tasks"], new["spec"]["template"]
    assert task["replicas"] == new["spec"]["parallelism"] == new["spec"]["completions"]
    gang = template["metadata"]["annotations"]
    assert (gang[contract.ANNOTATION_GANG], gang[contract.ANNOTATION_GANG_MIN]) == (
        old["metadata"]["name"],
        str(old["spec"]["minAvailable"]),
    )
    made = []
    for pod in (
        {"metadata": {"annotations": gang}, "spec": {**task["template"]["spec"], "schedulerName": old["spec"]["schedulerName"]}},
        template,
    ):
        outcome = Normaliser(Options(lambda _: {81920})).admit(pod)
        assert outcome.refusal == ""
        admitted = copy.deepcopy(pod)
        apply_json_patch(admitted, json.loads(json.dumps(outcome.patch)))
        made.append(essence(admitted))
    assert made[0] == made[1]
