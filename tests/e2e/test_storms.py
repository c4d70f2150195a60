# SPDX-License-Identifier: Apache-2.0
"""Many pods arrive while the agent is killed or replaced; each gets its own share, and who ran before notices nothing."""

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from release.dockerfile import build_images
from tests.e2e.cluster.cluster import Cluster
from tests.e2e.cluster.paths import BUILD, ROOT
from tests.e2e.invariants import Invariants
from tests.e2e.kubectl import Kubectl, Object, eventually
from tests.e2e.product import (
    AGENT_IMAGE,
    AGENT_NAMESPACE,
    BUILD_OPTIONS,
    CLIENT_IMAGE,
    DOCKERFILE,
    MIB,
    Client,
    Slice,
    parse_events,
    slice_pod,
    wait_until_agents_rolled_out,
)
from tests.e2e.test_restarts import end_agent

SEED = int(os.environ.get("ALIQUOT_E2E_SEED", time.time_ns() % 10**6))
"""When the agent is killed; a failed scenario names it, and ALIQUOT_E2E_SEED repeats it."""
STORM_MIB = 3000
KILLS = 3
LASTING_SECONDS = 4
"""How long a pod of the storm lasts; a third of them run at once. Longer than kubelet takes to start an agent again."""
ARRIVING_MIB = 3000
ARRIVING_PODS = 8

NEXT_IMAGE = f"{AGENT_IMAGE}-next"
NEXT_VERSION = """
FROM agent AS next
RUN for library in /usr/local/lib/aliquot/*.so*; do echo next >> $library; done
"""
"""Other bytes with the same meaning: the loader reads an ELF file by its headers."""


@pytest.mark.parametrize("pods", [24, pytest.param(40, marks=pytest.mark.soak), pytest.param(200, marks=pytest.mark.scale)])
@pytest.mark.timeout(1300)
def test_agent_killed_randomly_during_pod_storm_gives_every_pod_own_share(
    invariants: Invariants, kubectl: Kubectl, node: Cluster, product: Kubectl, node_name: str, pods: int
) -> None:
    """A Job, because kubelet fails a pod when it requests the pod's devices and no agent replies; the Job makes another."""
    moments = sorted(random.Random(SEED).sample(range(1, pods // 4), KILLS))
    storm = Storm(kubectl, pods, parallelism=pods // 3)
    killed = 0
    for moment in moments:
        storm.wait_for(moment, f"to be killed at {moments} (ALIQUOT_E2E_SEED={SEED})")
        if storm.succeeded() == pods:
            break
        end_agent(product, node, node_name)
        killed += 1
    assert killed, f"the storm was over before the agent was killed (ALIQUOT_E2E_SEED={SEED})"
    storm.wait_for(pods, f"after the agent was killed at {moments} (ALIQUOT_E2E_SEED={SEED})")
    storm.every_pod_saw_its_share()
    invariants.hold()


@pytest.mark.timeout(3 * ARRIVING_PODS * 90 + 800)
def test_an_agent_is_upgraded_and_rolled_back_while_pods_run_and_arrive(
    invariants: Invariants, kubectl: Kubectl, product: Kubectl, next_image: str
) -> None:
    """Containers that run keep the shim they mapped, and new ones get the new one.

    Kubelet refuses a pod that it allocates devices for while no agent replies; every other pod gets its share.
    """
    system = product.within(AGENT_NAMESPACE)
    arrive(kubectl, "before")
    upgrade(system, next_image)
    arrive(kubectl, "meanwhile")
    wait_until_agents_rolled_out(system)
    arrive(kubectl, "after")
    invariants.hold()
    assert shim(kubectl, "newcomer") != shim(kubectl, "holder")
    assert shares_of(kubectl, "before") == shares_of(kubectl, "after") == [ARRIVING_MIB * MIB] * ARRIVING_PODS
    assert set(shares_of(kubectl, "meanwhile")) <= {ARRIVING_MIB * MIB}
    upgrade(system, AGENT_IMAGE)
    wait_until_agents_rolled_out(system)
    invariants.hold()
    assert shim(kubectl, "newcomer") == shim(kubectl, "holder")


def arrive(kubectl: Kubectl, when: str) -> None:
    """Create some pods at once."""
    kubectl.apply(*(slice_pod(f"{when}-{number}", Slice(ARRIVING_MIB)) for number in range(ARRIVING_PODS)))


def shares_of(kubectl: Kubectl, when: str) -> list[int]:
    """What the pods of one moment see as their memory, in bytes; those that the kubelet refused are left out."""
    names = [f"{when}-{number}" for number in range(ARRIVING_PODS)]
    pods = [kubectl.wait_for_phase(name, "Running", "Failed", seconds=90) for name in names]
    running = [pod["metadata"]["name"] for pod in pods if pod["status"]["phase"] == "Running"]
    return [device["total_bytes"] for name in running for device in Client(kubectl, name).devices()]


def upgrade(system: Kubectl, image: str) -> None:
    """Have another agent rolled out; the caller waits for it."""
    system.run("set", "image", "daemonset/aliquot-agent", f"agent={image}")


@pytest.fixture
def next_image(product: Kubectl, node: Cluster, tmp_path: Path) -> Iterator[str]:
    """The agent's image with another shim, on the node; the agent is the released one again afterwards."""
    dockerfile = tmp_path / "Dockerfile"
    dockerfile.write_text(DOCKERFILE.read_text() + NEXT_VERSION)
    [archive] = build_images(dockerfile, ROOT, {"next": NEXT_IMAGE}, BUILD / "images/next", BUILD_OPTIONS)
    node.import_image(archive)
    yield NEXT_IMAGE
    upgrade(product.within(AGENT_NAMESPACE), AGENT_IMAGE)
    wait_until_agents_rolled_out(product.within(AGENT_NAMESPACE))


_SELECTOR = "batch.kubernetes.io/job-name=storm"


class Storm:
    """A Job with pods that print what they see and end."""

    def __init__(self, kubectl: Kubectl, pods: int, *, parallelism: int) -> None:
        self._kubectl = kubectl
        self._pods = pods
        container = {
            "name": "main",
            "image": CLIENT_IMAGE,
            "imagePullPolicy": "IfNotPresent",
            "command": ["/bin/sh", "-c", f"/bin/aliquot-cuda-client info && sleep {LASTING_SECONDS}"],
            "resources": {"limits": Slice(STORM_MIB).limits},
        }
        spec = {
            "completions": pods,
            "parallelism": parallelism,
            "backoffLimit": 1000,
            "template": {"spec": {"restartPolicy": "Never", "terminationGracePeriodSeconds": 1, "containers": [container]}},
        }
        kubectl.apply({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "storm"}, "spec": spec})

    def pods(self) -> list[Object]:
        """Every pod the Job made and that is there."""
        return self._kubectl.all("pods", f"--selector={_SELECTOR}")

    def succeeded(self) -> int:
        """How many of its pods have done their work."""
        return int(self._kubectl.get("job", "storm").get("status", {}).get("succeeded", 0))

    def wait_for(self, succeeded: int, when: str) -> None:
        """Wait until so many pods have done their work."""
        eventually(
            lambda: self.succeeded() >= succeeded,
            f"{succeeded} of {self._pods} pods to succeed {when}",
            seconds=400,
            otherwise=self._states,
        )

    def every_pod_saw_its_share(self) -> None:
        """As many pods as there should be have each printed one device, with the memory it asked for; those refused printed nothing."""
        said = self._kubectl.run("logs", f"--selector={_SELECTOR}", "--tail=-1", "--ignore-errors", timeout_seconds=120)
        printed = "\n".join(line for line in said.splitlines() if line.startswith("{"))  # kubectl says there whose log it cannot get
        seen = [event["total_bytes"] for event in parse_events(printed) if event["event"] == "device"]
        assert seen == [STORM_MIB * MIB] * self._pods

    def _states(self) -> str:
        states = [f"{pod['status'].get('phase')} {pod['status'].get('reason', '')}".strip() for pod in self.pods()]
        return ", ".join(f"{states.count(state)} {state}" for state in sorted(set(states)))


def shim(kubectl: Kubectl, pod: str) -> str:
    """What tells a pod's shim from another: the checksum of the library that stands in for the driver's."""
    return kubectl.exec(pod, "sh", "-c", "sha256sum $(find /usr/lib -name libcuda.so.1)").split()[0]
