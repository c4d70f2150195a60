# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import pytest

from agent.core.ledger import Ledger
from agent.core.planning import Node
from agent.core.steering import devices_for, prefer_ids, waiting_containers
from aliquot.contract.model import ContainerSpec, Pod, Policy
from tests.unit.agent.builders import BOOT, VGPU, assigned, gpu, grant, ids, inventory, limits, pod, share
from tests.unit.agent.partitions import dynamic_gpu, place

INVENTORY = inventory(gpu(0), gpu(1), gpu(2), gpu(3))
AVAILABLE = [f"GPU-{minor}::{replica}" for replica in range(2) for minor in range(4)]


def node(*grants, policy: Policy | None = None) -> Node:
    return Node(INVENTORY, Ledger().adopting(grants), 16, BOOT, policy, lambda _: True)


def wanted(pods: list[Pod], *grants, size: int = 1, policy: Policy | None = None, first_come: bool = False) -> tuple[str, ...]:
    known = node(*grants, policy=policy)
    return devices_for(waiting_containers(pods, known.ledger, VGPU, size), known, first_come=first_come)


class TestPreferIds:
    def test_one_id_of_each_wanted_device_is_taken(self):
        assert prefer_ids(AVAILABLE, [], 2, ["GPU-3", "GPU-1"], frozenset()) == ("GPU-3::0", "GPU-1::0")

    def test_what_must_be_included_comes_first_and_counts(self):
        assert prefer_ids(AVAILABLE, ["GPU-2::1"], 2, ["GPU-3"], frozenset()) == ("GPU-2::1", "GPU-3::0")

    def test_without_preference_devices_are_distinct(self):
        chosen = prefer_ids(AVAILABLE, [], 4, (), frozenset())
        assert len({device_id.partition("::")[0] for device_id in chosen}) == 4

    def test_the_count_is_met_even_when_devices_are_not_enough(self):
        assert len(prefer_ids(["GPU-0::0", "GPU-0::1", "GPU-0::2"], [], 3, (), frozenset())) == 3

    def test_ids_held_by_grant_come_last(self):
        assert prefer_ids(AVAILABLE, [], 1, ["GPU-3"], frozenset({"GPU-3::0"})) == ("GPU-3::1",)

    def test_packing_prefers_the_fullest_device(self):
        assert prefer_ids([*AVAILABLE, "GPU-1::2"], [], 1, (), frozenset()) == ("GPU-1::0",)
        available = [device_id for device_id in AVAILABLE if device_id != "GPU-2::0"]
        assert prefer_ids(available, [], 1, (), frozenset(), packing=True) == ("GPU-2::1",)

    def test_preferred_device_without_free_id_is_skipped(self):
        assert prefer_ids(["GPU-0::0"], [], 1, ["GPU-3"], frozenset()) == ("GPU-0::0",)


class TestWanted:
    def test_the_one_pending_pod_of_this_size_gets_its_assigned_devices(self):
        one = pod("a", annotations=assigned("uid-a", main=[share(3)]))
        other = pod("b", ContainerSpec("main", limits(2)), annotations=assigned("uid-b", main=[share(0, 50), share(1, 50)]))
        assert wanted([one, other]) == ("GPU-3",)
        assert wanted([one, other], size=2) == ("GPU-0", "GPU-1")

    def test_two_differently_assigned_pods_give_no_advice(self):
        pods = [pod(name, annotations=assigned(f"uid-{name}", main=[share(3)])) for name in ("a", "b")]
        assert wanted(pods) == ()

    def test_granted_running_and_deleted_pods_do_not_wait(self):
        one = pod("a", annotations=assigned("uid-a", main=[share(3)]))
        pods = [
            one,
            pod("granted"),
            replace(pod("running"), phase="Running"),
            pod("going", deleting=True),
            pod("none", ContainerSpec("c", {})),
        ]
        assert wanted(pods, grant(ids("0:0"), of=pod("granted"))) == ("GPU-3",)

    def test_a_broken_assignment_or_request_gives_no_advice(self):
        assert wanted([pod("a")]) == ()
        assert wanted([pod("a", ContainerSpec("main", {VGPU: "many"}))]) == ()

    def test_local_placement_advises_its_current_choice(self):
        full = [grant(ids(f"{minor}:0"), share(minor, 950), of=pod("other")) for minor in (0, 1, 3)]
        assert wanted([pod("a")], *full, policy=Policy.FRAG) == ("GPU-2",)

    def test_assignment_overrides_local_placement(self):
        there = pod("a", annotations=assigned("uid-a", main=[share(3)]))
        assert wanted([there], policy=Policy.BINPACK) == ("GPU-3",)
        full = [grant(ids(f"{minor}:0"), share(minor, 950), of=pod("other")) for minor in (0, 1, 3)]
        assert wanted([there, pod("b")], *full, policy=Policy.BINPACK) == ()

    @pytest.mark.parametrize("policy", [None, Policy.BINPACK])
    def test_assignment_of_first_container_is_chosen_whatever_others_have(self, policy):
        assignments = [assigned(f"uid-{name}", main=[share(minor)]) for name, minor in (("a", 3), ("b", 1))]
        pods = [pod(name, annotations=annotations) for name, annotations in zip("ab", assignments, strict=True)]
        assert wanted(pods, policy=policy, first_come=True) == ("GPU-3",)
        assert wanted([pods[0], pod("c")], policy=policy, first_come=True) == ("GPU-3",)

    @pytest.mark.parametrize("policy", [None, Policy.BINPACK])
    def test_each_container_of_a_pod_has_an_assignment_of_its_own(self, policy):
        specs = [ContainerSpec(name, limits(1)) for name in ("first", "second")]
        both = pod("a", *specs, annotations=assigned("uid-a", first=[share(3)], second=[share(1)]))
        assert wanted([both], policy=policy, first_come=True) == ("GPU-3",)
        assert wanted([both], policy=policy) == ()

    def test_equal_requests_get_the_same_advice(self):
        assert wanted([pod("a"), pod("b")], policy=Policy.BINPACK)

    def test_different_requests_may_share_one_advised_device(self):
        pods = [pod("a"), pod("b", ContainerSpec("main", limits(1, 999)))]
        assert len(wanted(pods, policy=Policy.BINPACK)) == 1
        assert wanted(pods, grant(ids("1:0"), share(1, 100), of=pod("other")), policy=Policy.BINPACK) == ()


class TestPlaces:
    """For a MIG instance made on demand the IDs name the GPU, at any placement."""

    RESOURCE = "nvidia.com/mig-2g.20gb"
    ON = inventory(dynamic_gpu(0), dynamic_gpu(1))

    def wanted(self, one: Pod, policy: Policy | None = None) -> tuple[str, ...]:
        known = Node(self.ON, Ledger(), 16, BOOT, policy, lambda _: True)
        return devices_for(waiting_containers([one], known.ledger, self.RESOURCE, 1), known)

    def test_an_assigned_place_wants_an_id_of_its_gpu(self):
        annotations = assigned("uid-a", main=[share(place(2, "2g.20gb", 1).uuid, 19968)])
        assert self.wanted(pod("a", ContainerSpec("main", {self.RESOURCE: "1"}), annotations=annotations)) == ("GPU-1",)

    def test_local_placement_wants_an_id_of_the_gpu_it_would_take(self):
        (uuid,) = self.wanted(pod("a", ContainerSpec("main", {self.RESOURCE: "1"})), Policy.BINPACK)
        assert uuid in ("GPU-0", "GPU-1")
