# SPDX-License-Identifier: Apache-2.0
"""Many pods start at once, and each gets exactly what it asked for, where it was assigned."""

import pytest

from tests.e2e.kubectl import Kubectl, eventually
from tests.e2e.product import MIB, Slice, assigned_uuids, parse_events, slice_pod

pytestmark = pytest.mark.usefixtures("product")


@pytest.mark.timeout(400)
@pytest.mark.parametrize("pods", [24, pytest.param(60, marks=pytest.mark.soak)])
def test_pods_started_together_each_see_own_amount_and_gpu(kubectl: Kubectl, pods: int) -> None:
    asked = {f"pod-{number}": 2048 + 100 * number for number in range(pods)}
    kubectl.apply(*(slice_pod(name, Slice(mib), ["/bin/aliquot-cuda-client", "info"]) for name, mib in asked.items()))

    def ended() -> bool:
        return all(pod["status"].get("phase") in ("Succeeded", "Failed") for pod in kubectl.all("pods"))

    eventually(ended, f"{pods} pods to end", seconds=300, otherwise=lambda: _phases(kubectl))
    seen, assigned = {}, {}
    for pod in kubectl.all("pods"):
        name = pod["metadata"]["name"]
        device = parse_events(kubectl.logs(name))[-1]
        seen[name] = (device["total_bytes"] // MIB, [f"GPU-{device['uuid']}"])
        assigned[name] = (asked[name], assigned_uuids(pod))
    assert seen == assigned


def _phases(kubectl: Kubectl) -> str:
    return ", ".join(f"{pod['metadata']['name']} {pod['status'].get('phase')}" for pod in kubectl.all("pods"))
