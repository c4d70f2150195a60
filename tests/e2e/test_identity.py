"""Many pods start at once, and each gets exactly what it asked for."""

import pytest

from tests.e2e.kubectl import Kubectl, eventually
from tests.e2e.product import MIB, Slice, parse_events, slice_pod

pytestmark = pytest.mark.usefixtures("product")

PODS = 20


def test_twenty_pods_started_at_once_each_see_their_own_amount(kubectl: Kubectl) -> None:
    asked = {f"pod-{number}": 2048 + 100 * number for number in range(PODS)}
    kubectl.apply(*(slice_pod(name, Slice(mib), ["/bin/aliquot-cuda-client", "info"]) for name, mib in asked.items()))

    def ended() -> bool:
        return all(pod["status"].get("phase") in ("Succeeded", "Failed") for pod in kubectl.all("pods"))

    eventually(ended, f"{PODS} pods to end", seconds=90, otherwise=lambda: _phases(kubectl))
    seen = {name: parse_events(kubectl.logs(name))[-1]["total_bytes"] // MIB for name in asked}
    assert seen == asked


def _phases(kubectl: Kubectl) -> str:
    return ", ".join(f"{pod['metadata']['name']} {pod['status'].get('phase')}" for pod in kubectl.all("pods"))
