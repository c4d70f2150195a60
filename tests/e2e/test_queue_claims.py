# SPDX-License-Identifier: Apache-2.0
"""Kueue in front of claims: it counts their memory or their cores, by the sections that docs/use/dra.md shows."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest
import yaml

from aliquot import contract
from tests.e2e.cluster.cluster import Cluster
from tests.e2e.controllers import KUEUE_CONTROLLER, installed
from tests.e2e.kubectl import Kubectl, Object, eventually
from tests.e2e.product import GPU_MEMORY_MIB, GPUS, MIB, with_components
from tests.e2e.test_dra import GIB, GUIDE, memory_in, offered, request, template
from tests.e2e.test_queue_kinds import API, queues
from tests.e2e.test_queues import CONFIGURATION, START_SECONDS, queued_job, running, wait_until_counted, why_waiting

pytestmark = [pytest.mark.soak, pytest.mark.timeout(400)]

MEMORY, CORES, WHOLE = "aliquot.dev/claimed-memory", "aliquot.dev/claimed-cores", "aliquot.dev/claimed-gpus"
BY_CORES = "vgpu-by-cores.example.com"
"""The second class on the page: Kueue counts the cores of its claims."""


def configure(objects: Sequence[Object]) -> None:
    """Put the sections of the page into Kueue's configuration."""
    [text] = re.findall(r"^## Quotas by Kueue\n.*?```yaml\n(.*?)```", GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    sections = yaml.safe_load(text)
    [data] = [item["data"] for item in objects if item["kind"] == "ConfigMap" and CONFIGURATION in item["data"]]
    settings = yaml.safe_load(data[CONFIGURATION])
    data[CONFIGURATION] = yaml.safe_dump(settings | {name: settings.get(name, {}) | section for name, section in sections.items()})


@pytest.fixture(scope="module")
def claims(product: Kubectl, node: Cluster) -> Iterator[None]:
    """The product with its GPUs in slices, and Kueue; gone afterwards."""
    with (
        with_components(product, ["dra"]),
        installed(product, node, replace(KUEUE_CONTROLLER, configure=configure)),
    ):
        eventually(lambda: len(offered(product)) == GPUS, "the GPUs in ResourceSlices", otherwise=lambda: str(offered(product)))
        yield
    eventually(lambda: not offered(product), "no device of a driver that has left", seconds=60)


@contextmanager
def queue(kubectl: Kubectl, quota: Mapping[str, str]) -> Iterator[None]:
    """Have one queue in the block. Its jobs go first, or Kueue would keep it."""
    resources = [{"name": name, "nominalQuota": amount} for name, amount in quota.items()]
    group = {"coveredResources": list(quota), "flavors": [{"name": "gpus", "resources": resources}]}
    whole = {"apiVersion": API, "kind": "ClusterQueue", "metadata": {"name": "claims"}}
    way = {"apiVersion": API, "kind": "LocalQueue", "metadata": {"name": "claims"}, "spec": {"clusterQueue": "claims"}}
    with queues(kubectl, whole | {"spec": {"namespaceSelector": {}, "resourceGroups": [group]}}, way):
        try:
            yield
        finally:
            kubectl.run("delete", "jobs", "--all", "--now", "--cascade=foreground", timeout_seconds=START_SECONDS)


def job(name: str, claim_template: str) -> Object:
    """Return a job with one pod. Its container uses a claim that is made from a template."""
    made = queued_job(name, {}, "claims")
    pod = made["spec"]["template"]["spec"]
    pod["containers"][0]["resources"] = {"claims": [{"name": "gpu"}]}
    pod["resourceClaims"] = [{"name": "gpu", "resourceClaimTemplateName": claim_template}]
    return made


def wait_for_place_of(kubectl: Kubectl, earlier: str, later: Object) -> None:
    """Create a job that Kueue holds until an earlier one is gone, and let it run then."""
    name = later["metadata"]["name"]
    kubectl.apply(later)
    eventually(lambda: "insufficient unused quota" in why_waiting(kubectl, name), "Kueue to hold the later job")
    kubectl.delete("job", earlier)
    running(kubectl, name, 1)


@pytest.mark.usefixtures("claims")
def test_memory_of_claims_is_counted_and_job_waits_for_it(kubectl: Kubectl) -> None:
    with queue(kubectl, {MEMORY: "60Gi", WHOLE: "1"}):
        kubectl.apply(template("forty", request(memory="40Gi")), job("first", "forty"))
        wait_until_counted(kubectl, "first", {MEMORY: 40 * GIB * MIB})
        [pod] = running(kubectl, "first", 1)
        assert memory_in(kubectl, pod, "main") == [40 * GIB * MIB]
        wait_for_place_of(kubectl, "first", job("second", "forty"))


@pytest.mark.usefixtures("claims")
def test_whole_gpus_count_by_number_or_by_all_their_memory(kubectl: Kubectl) -> None:
    with queue(kubectl, {MEMORY: "200Gi", WHOLE: "1"}):
        kubectl.apply(
            template("by-class", request(device_class=contract.DRA_CLASS_WHOLE)), job("class", "by-class"),
            template("by-memory", request()), job("memory", "by-memory"),
        )  # fmt: skip
        wait_until_counted(kubectl, "class", {WHOLE: 1})
        wait_until_counted(kubectl, "memory", {MEMORY: GPU_MEMORY_MIB * MIB})
        for name in ("class", "memory"):
            [pod] = running(kubectl, name, 1)
            assert memory_in(kubectl, pod, "main") == [GPU_MEMORY_MIB * MIB]


@pytest.mark.usefixtures("claims")
def test_cores_of_claims_of_second_class_are_counted_and_job_waits(kubectl: Kubectl) -> None:
    shares = kubectl.get("deviceclass", contract.DRA_CLASS)
    kubectl.apply({**shares, "metadata": {"name": BY_CORES}})
    try:
        with queue(kubectl, {CORES: "100"}):
            kubectl.apply(template("sixty", request(device_class=BY_CORES, memory="10Gi", cores="60")), job("first", "sixty"))
            wait_until_counted(kubectl, "first", {CORES: 60})
            [pod] = running(kubectl, "first", 1)
            assert memory_in(kubectl, pod, "main") == [10 * GIB * MIB]
            wait_for_place_of(kubectl, "first", job("second", "sixty"))
    finally:
        kubectl.delete("deviceclass", BY_CORES)
