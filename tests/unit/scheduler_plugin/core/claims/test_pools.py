# SPDX-License-Identifier: Apache-2.0
"""Devices for claims beside pods with device IDs on the same GPUs."""

from collections.abc import Mapping
from typing import Any

import pytest

from aliquot import contract
from scheduler_plugin.core.claims.pools import Guess, Pools
from scheduler_plugin.core.cluster.hold_uids import claim_uid, hold_uid
from scheduler_plugin.core.cluster.pods import Footprint, Use
from tests.unit.scheduler_plugin.builders import make_node
from tests.unit.scheduler_plugin.claim_builders import asking, claim_of, class_of, slice_of

TAINT = {"key": contract.PLANNED, "effect": "NoSchedule"}
GPU = "GPU-n1-0"


def make_pools(footprints: Mapping[str, Footprint], *more: Mapping[str, Any], devices: int = 1) -> Pools:
    """A node with planned GPUs, and further devices in its slice."""
    pools = Pools()
    pools.replace_classes([class_of(), class_of("mig", f"device.attributes['{contract.DRA_DRIVER}'].type == 'mig'")])
    one = slice_of(make_node(devices=devices), taints=[TAINT])
    one["spec"]["devices"] += more
    pools.replace_slices([one])
    pools.footprints_on = lambda _: footprints
    return pools


def allocated(pools: Pools, *requests: dict[str, Any], gone: frozenset[str] = frozenset()) -> list[str]:
    """The names of the devices that a claim gets; empty if it does not fit."""
    found = pools.allocate("n1", pools.read([claim_of("c", *requests)]), (), gone)
    return [taken.device[2] for group in found or () for taken in group]


@pytest.mark.parametrize(
    ("use", "amounts", "fits"),
    [
        pytest.param(Use(600, 0, 1, 1), {"memory": "400Mi"}, True, id="exact memory"),
        pytest.param(Use(601, 0, 1, 1), {"memory": "400Mi"}, False, id="too much memory"),
        pytest.param(Use(1, 70, 1, 0), {"memory": "1Mi", "cores": "30"}, True, id="exact cores"),
        pytest.param(Use(1, 70, 2, 1), {"memory": "1Mi", "cores": "30"}, False, id="a pod needs what is left of the cores"),
        pytest.param(Use(1, 0, 15, 15), {"memory": "1Mi", "cores": "99"}, True, id="pods without cores need one percent together"),
        pytest.param(Use(1, 0, 16, 16), {"memory": "1Mi"}, False, id="no share left"),
        pytest.param(Use(1, 0, 1, 1), {}, False, id="whole GPU"),
    ],
)
def test_claim_gets_what_pods_leave_of_gpu(use: Use, amounts: Mapping[str, Any], fits: bool) -> None:
    assert bool(allocated(make_pools({"pod": {GPU: use}}), asking(**amounts))) is fits


def test_claims_guesses_and_ending_pods_do_not_count_twice() -> None:
    whole = {GPU: Use(1000, 0, 1, 1)}
    asked = asking(memory="1000Mi")
    assert not allocated(make_pools({"pod": whole}), asked)
    assert not allocated(make_pools({hold_uid("pod"): whole}), asked)
    assert allocated(make_pools({"pod": whole}), asked, gone=frozenset({"pod"}))
    assert allocated(make_pools({claim_uid("pod"): whole}), asked), "a claim counts by its allocation"
    guessed = make_pools({"pod": whole})
    guessed.guess("pod", Guess("n1", ()))
    assert allocated(guessed, asked), "a guess counts by its devices"


def instance(name: str) -> dict[str, Any]:
    texts = {"type": "mig", "uuid": f"MIG-{name}", "parentUUID": "GPU-n1-9", "profile": "1g.10gb"}
    attributes = {key: {"string": text} for key, text in texts.items()}
    return {"name": name, "attributes": attributes, "capacity": {"memory": {"value": "100Mi"}}, "taints": [TAINT]}


def test_mig_instance_of_pod_is_not_given_to_claim() -> None:
    pools = make_pools({"pod": {"MIG-a": Use(100, 0, 1, 1)}}, instance("a"), instance("b"))
    assert allocated(pools, asking(device_class="mig")) == ["b"]
    assert not allocated(pools, asking(device_class="mig", count=2))


def test_pod_on_gpu_leaves_fixed_shares_to_the_counters() -> None:
    """A fixed share names the GPU as its origin; it must not count as taken itself."""
    texts = {"type": "fixed", "parentUUID": GPU, "profile": "1g"}
    fixed = {
        "name": "gpu-0-1g-0",
        "attributes": {key: {"string": text} for key, text in texts.items()},
        "capacity": {"memory": {"value": "1Gi"}},
        "taints": [TAINT],
    }
    pools = make_pools({"pod": {GPU: Use(1, 0, 1, 1)}}, fixed)
    pools.set_class(class_of("fixed", f"device.attributes['{contract.DRA_DRIVER}'].type == 'fixed'"))
    assert allocated(pools, asking(device_class="fixed")) == ["gpu-0-1g-0"]
