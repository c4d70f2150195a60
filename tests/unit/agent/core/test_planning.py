# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import pytest

from agent.core.backends import Abilities, MigStrategy
from agent.core.health import HealthTable
from agent.core.ledger import Ledger
from agent.core.planning import Node, Planned, plan_grant, read_request
from agent.core.refusal import Reason, Refusal
from aliquot import contract
from aliquot.contract.gpunode import Cordon
from aliquot.contract.model import ClaimUse, ContainerSpec, Isolation, Pod, Policy
from aliquot.placement.fit import Reject
from tests.unit.agent.builders import BOOT, ask, assigned, gpu, grant, ids, instance, inventory, limits, pod, share
from tests.unit.agent.claim_builders import claim_grant
from tests.unit.agent.partitions import dynamic_gpu, place

INVENTORY = inventory(gpu(0, mib=1000), gpu(1, mib=1000), gpu(2, mib=1000))


def node(*grants, policy: Policy | None = None, active: tuple[str, ...] = (), on=INVENTORY, shares: int = 16, live=frozenset()) -> Node:
    return Node(on, Ledger().adopting(grants), shares, BOOT, policy, lambda uid: uid in active, live_grants=live)


def granted(outcome: Planned | Refusal) -> Planned:
    assert isinstance(outcome, Planned), outcome
    return outcome


def refused(outcome: object, reason: Reason | Reject) -> str:
    assert isinstance(outcome, Refusal), outcome
    assert outcome.reason is reason, outcome
    return outcome.message


def placed(*shares, **settings):
    """A pod with a container ``main`` that was assigned these shares."""
    one = pod(**settings)
    return replace(one, annotations={**one.annotations, **assigned(one.uid, main=shares)})


class TestAssigned:
    def test_container_gets_assignment_of_pod_with_any_ids(self):
        planned = granted(plan_grant(ask(placed(share(1)), ids("0:0")), node()))
        assert planned.grant.shares == (share(1),)
        assert planned.grant.pod_uid == "uid-train"
        assert planned.grant.boot_id == BOOT

    def test_each_container_gets_its_own_part(self):
        containers = (ContainerSpec("a", limits(mib=100)), ContainerSpec("b", limits(mib=200)))
        one = replace(pod("two", *containers), annotations=assigned("uid-two", a=[share(0, 100)], b=[share(2, 200)]))
        assert granted(plan_grant(ask(one, ids("0:0"), container="b"), node())).grant.shares == (share(2, 200),)

    def test_pod_without_assignment_is_refused(self):
        message = refused(plan_grant(ask(pod(), ids("0:0")), node()), Reason.ASSIGNMENT_MISSING)
        assert contract.SCHEDULER_NAME in message
        assert "placement: local" in message

    def test_an_assignment_of_an_earlier_pod_of_the_name_is_stale(self):
        one = pod(annotations=assigned("uid-before", main=[share(0)]))
        refused(plan_grant(ask(one, ids("0:0")), node()), Reason.ASSIGNMENT_STALE)

    @pytest.mark.parametrize("text", ["", "{}", '{"v":1}', "[" * 10_000, "nonsense"])
    def test_a_broken_assignment_is_refused(self, text):
        one = pod(annotations={contract.ANNOTATION_ASSIGNMENT: text})
        refused(plan_grant(ask(one, ids("0:0")), node()), Reason.ASSIGNMENT_INVALID)

    def test_assignment_without_the_container_is_refused(self):
        one = pod(annotations=assigned("uid-train", other=[share(0)]))
        assert "only for other" in refused(plan_grant(ask(one, ids("0:0")), node()), Reason.ASSIGNMENT_INVALID)

    @pytest.mark.parametrize("given", [share(0, 101), share(0, 99), share(0, 100, cores=10)])
    def test_amounts_come_from_the_spec_and_another_amount_is_refused(self, given):
        message = refused(plan_grant(ask(placed(given), ids("0:0")), node()), Reason.ASSIGNMENT_INVALID)
        assert "the pod's spec requests 100 MiB" in message

    def test_fewer_devices_than_requested_are_refused(self):
        one = placed(share(0, 50), name="two")
        one = replace(one, containers=(ContainerSpec("main", limits(2, 100)),))
        assert "expected 2 devices" in refused(plan_grant(ask(one, ids("0:0", "1:0")), node()), Reason.ASSIGNMENT_INVALID)

    def test_unknown_device_is_refused_with_the_known_ones(self):
        message = refused(plan_grant(ask(placed(share(9)), ids("0:0")), node()), Reason.DEVICE_UNKNOWN)
        assert "GPU-0, GPU-1, GPU-2" in message

    def test_share_that_does_not_fit_is_refused_with_the_holders(self):
        holder = grant(ids("0:1"), share(0, 950), of=pod("other"))
        message = refused(plan_grant(ask(placed(share(0)), ids("0:0")), node(holder)), Reject.MEMORY)
        assert "50 MiB" in message
        assert "default/other/main 950 MiB" in message

    def test_an_unhealthy_device_is_refused(self):
        refused(plan_grant(ask(placed(share(0)), ids("0:0")), node(on=INVENTORY.after_device_trouble("GPU-0", "lost"))), Reject.UNHEALTHY)

    def test_a_device_without_a_free_share_is_refused(self):
        holder = grant(ids("0:1"), share(0), of=pod("other"))
        refused(plan_grant(ask(placed(share(0)), ids("0:0")), node(holder, shares=1)), Reject.SHARES)

    def test_restart_is_planned_without_its_own_grant(self):
        one = placed(share(0, 900))
        one = replace(one, containers=(ContainerSpec("main", limits(1, 900)),))
        before = grant(ids("0:0"), share(0, 900), of=one)
        assert granted(plan_grant(ask(one, ids("0:0")), node(before))).grant == before


@pytest.mark.parametrize("policy", [None, Policy.FRAG], ids=["assigned", "local"])
class TestSettingsThatWereLowered:
    """What a node allows from now on keeps no container from coming back to what it has."""

    def pods(self, policy: Policy | None) -> list[Pod]:
        return [placed(share(), name=f"p{number}") if policy is None else pod(f"p{number}") for number in range(4)]

    def node(self, policy: Policy | None, *, on=None, shares: int = 16) -> Node:
        grants = [grant(ids(f"0:{number}"), share(), of=one) for number, one in enumerate(self.pods(policy))]
        return node(*grants, policy=policy, on=on or INVENTORY, shares=shares)

    def test_container_restarts_on_device_above_a_lowered_share_limit(self, policy):
        planned = granted(plan_grant(ask(self.pods(policy)[1], ids("0:1")), self.node(policy, shares=2)))
        assert planned.grant == grant(ids("0:1"), share(), of=self.pods(policy)[1])

    def test_new_container_does_not_profit_from_that(self, policy):
        new = placed(share(), name="new") if policy is None else pod("new")
        refused(plan_grant(ask(new, ids("0:9")), self.node(policy, shares=4, on=inventory(gpu(0)))), Reject.SHARES)

    def test_a_restart_is_still_checked_for_memory(self, policy):
        outcome = plan_grant(ask(self.pods(policy)[1], ids("0:1")), self.node(policy, on=inventory(gpu(0, mib=350))))
        refused(outcome, Reject.MEMORY)

    @pytest.mark.parametrize("most", [1.0, 1.25])
    def test_container_restarts_with_the_burst_allowed_now(self, policy, most):
        one = self.pods(policy)[1]
        one = replace(one, annotations={**one.annotations, contract.ANNOTATION_MEMORY_BURST: "1.5"})
        now = replace(self.node(policy), abilities=Abilities(most_memory_burst=most))
        assert granted(plan_grant(ask(one, ids("0:1")), now)).preferences.memory_burst == most


def test_container_reassigned_to_other_device_is_new_there():
    before = grant(ids("0:1"), share(0), of=pod())
    there = grant(ids("1:0"), share(1), of=pod("there"))
    refused(plan_grant(ask(placed(share(1)), ids("0:1")), node(before, there, shares=1)), Reject.SHARES)


class TestPlacedBeforeAssignmentsBound:
    def test_a_container_that_restarts_keeps_what_it_had(self):
        before = grant(ids("0:0"), share(1), of=pod())
        assert granted(plan_grant(ask(pod(), ids("0:0")), node(before))).grant == before

    def test_what_it_had_is_refused_when_it_no_longer_fits(self):
        before = grant(ids("0:0"), share(1), of=pod())
        on = INVENTORY.after_device_trouble("GPU-1", "lost")
        assert "GPU-1" in refused(plan_grant(ask(pod(), ids("0:0")), node(before, on=on)), Reject.UNHEALTHY)

    @pytest.mark.parametrize("holder", [pod(uid="uid-before"), pod("other")], ids=["an earlier pod of its name", "another pod"])
    def test_another_pods_shares_are_not_reused(self, holder):
        refused(plan_grant(ask(pod(), ids("0:0")), node(grant(ids("0:0"), share(1), of=holder))), Reason.ASSIGNMENT_MISSING)

    def test_existing_assignment_is_binding(self):
        before = grant(ids("0:0"), share(1), of=pod())
        assert granted(plan_grant(ask(placed(share(2)), ids("0:0")), node(before))).grant.shares == (share(2),)


class TestRequest:
    def test_invalid_amount_is_refused_with_the_parsers_message(self):
        one = pod("bad", ContainerSpec("main", {contract.RESOURCE_VGPU: "1", contract.RESOURCE_VGPU_CORES: "250"}))
        assert "at most 100" in refused(read_request(one, "main"), Reason.REQUEST_INVALID)

    def test_wrong_number_of_ids_is_refused(self):
        refused(plan_grant(ask(pod(), ids("0:0", "1:0")), node()), Reason.REQUEST_DIFFERS)

    @pytest.mark.parametrize("isolation", ["mps", "driver"])
    def test_an_isolation_this_node_lacks_is_refused_with_those_it_has(self, isolation):
        one = pod(annotations={contract.ANNOTATION_ISOLATION: isolation})
        assert "It offers shim, exclusive." in refused(plan_grant(ask(one, ids("0:0")), node()), Reason.ISOLATION_UNAVAILABLE)


class TestLocal:
    def test_gpu_in_the_ids_is_chosen_when_it_fits(self):
        assert granted(plan_grant(ask(pod(), ids("1:0")), node(policy=Policy.FRAG))).grant.shares == (share(1),)

    def test_other_gpu_is_chosen_when_it_does_not_fit(self):
        full = grant(ids("1:1"), share(1, 1000), of=pod("other"))
        shares = granted(plan_grant(ask(pod(), ids("1:0")), node(full, policy=Policy.FRAG))).grant.shares
        assert shares[0].device_uuid != "GPU-1"

    def test_the_policy_decides_and_not_the_ids(self):
        other = grant(ids("2:0"), share(2, 500), of=pod("other"))
        packed = plan_grant(ask(pod(), ids("0:0")), node(other, policy=Policy.BINPACK))
        assert granted(packed).grant.shares == (share(2),)
        spread = plan_grant(ask(pod(), ids("2:1")), node(other, policy=Policy.SPREAD))
        assert granted(spread).grant.shares != (share(2),)

    @pytest.mark.parametrize("minor", [0, 1, 2])
    def test_ids_decide_between_equally_good_gpus(self, minor):
        planned = plan_grant(ask(pod(), ids(f"{minor}:0")), node(policy=Policy.BINPACK))
        assert granted(planned).grant.shares == (share(minor),)

    def test_a_full_node_is_refused_with_what_is_free(self):
        full = [grant(ids(f"{i}:1"), share(i, 950), of=pod("other")) for i in range(3)]
        assert "50 MiB" in refused(plan_grant(ask(pod(), ids("1:0")), node(*full, policy=Policy.FRAG)), Reject.MEMORY)

    def test_restarting_container_keeps_its_device(self):
        one = pod()
        before = grant(ids("0:0"), share(2), of=one)
        assert granted(plan_grant(ask(one, ids("0:0")), node(before, policy=Policy.FRAG))).grant.shares == (share(2),)

    @pytest.mark.parametrize("policy", [Policy.FRAG, None])
    def test_cordon_stops_new_containers_but_not_restarting_ones(self, policy):
        on = INVENTORY.judged(HealthTable(), Cordon(node=True))
        one = placed(share(0))
        refused(plan_grant(ask(one, ids("0:0")), node(policy=policy, on=on)), Reject.CORDONED)
        before = grant(ids("0:0"), share(0), of=one)
        assert granted(plan_grant(ask(one, ids("0:0")), node(before, policy=policy, on=on))).grant.shares == (share(0),)
        refused(plan_grant(ask(one, ids("0:1")), node(before, policy=policy, on=on)), Reject.CORDONED)

    def test_container_on_failed_gpu_is_placed_again(self):
        one = pod()
        before = grant(ids("0:0"), share(2), of=one)
        after = plan_grant(ask(one, ids("0:0")), node(before, policy=Policy.FRAG, on=INVENTORY.after_device_trouble("GPU-2", "lost")))
        assert granted(after).grant.shares == (share(0),)

    @pytest.mark.parametrize("before", [(), (grant(ids("0:0"), share(0), of=pod()),)], ids=["new", "placed elsewhere before"])
    def test_a_pod_that_a_scheduler_has_placed_gets_what_it_was_assigned(self, before):
        """While agents go over from local placement to the scheduler, one after the other."""
        planned = granted(plan_grant(ask(placed(share(1)), ids("0:0")), node(*before, policy=Policy.BINPACK)))
        assert planned.grant.shares == (share(1),)

    def test_an_assignment_that_does_not_fit_is_refused_here_too(self):
        full = grant(ids("1:5"), share(1, 950), of=pod("other"))
        refused(plan_grant(ask(placed(share(1)), ids("0:0")), node(full, policy=Policy.BINPACK)), Reject.MEMORY)

    @pytest.mark.parametrize(
        "annotations",
        [{contract.ANNOTATION_ASSIGNMENT: "{"}, assigned("uid-earlier", main=[share(1)]), assigned("uid-train", other=[share(1)])],
        ids=["broken", "of another pod", "of another container"],
    )
    def test_assignment_of_another_container_is_ignored(self, annotations):
        full = grant(ids("1:5"), share(1, 950), of=pod("other"))
        one = pod(annotations=annotations)
        assert granted(plan_grant(ask(one, ids("0:0")), node(full, policy=Policy.BINPACK))).grant.shares == (share(0),)

    def test_request_without_memory_gets_whole_device(self):
        one = pod("whole", ContainerSpec("main", limits(1, None)))
        assert granted(plan_grant(ask(one, ids("0:0")), node(policy=Policy.FRAG))).grant.shares == (share(0, 1000),)


class TestIdsInUse:
    def test_ids_of_a_pod_that_still_runs_are_refused(self):
        other = grant(ids("0:0"), share(0), of=pod("other"))
        message = refused(plan_grant(ask(placed(share(1)), ids("0:0")), node(other, active=("uid-other",))), Reason.IDS_HELD)
        assert "default/other/main" in message

    @pytest.mark.parametrize("before", [grant(ids("0:0"), of=pod("gone")), grant(ids("0:0", "1:0"), of=pod("gone"))])
    def test_ids_of_deleted_pod_are_refused_while_its_process_runs(self, before):
        on = node(before, live=frozenset({before.grant_id}))
        message = refused(plan_grant(ask(placed(share(0)), ids("0:0")), on), Reason.IDS_HELD)
        assert "default/gone/main" in message

    def test_ids_of_deleted_pod_are_reused_with_their_memory(self):
        other = grant(ids("0:0"), share(0, 1000), of=pod("other"))
        planned = granted(plan_grant(ask(placed(share(0)), ids("0:0")), node(other)))
        assert planned.superseded == ()  # the same id: the row itself is replaced
        partly = grant(ids("0:0", "1:0"), share(0, 1000), share(1, 1000), of=pod("other"))
        assert granted(plan_grant(ask(placed(share(0)), ids("0:0")), node(partly))).superseded == (partly,)

    def test_what_an_init_container_held_passes_to_the_app_container(self):
        one = pod("a", ContainerSpec("init", limits(1, 1000), init=True), ContainerSpec("main", limits(2, 2000)))
        one = replace(one, annotations=assigned(one.uid, init=[share(0, 1000)], main=[share(0, 1000), share(1, 1000)]))
        init = grant(ids("0:0"), share(0, 1000), of=one, container="init")
        planned = granted(plan_grant(ask(one, ids("0:0", "1:0")), node(init, active=(one.uid,))))
        assert planned.superseded == (init,)

    def test_container_with_new_ids_replaces_its_old_grant(self):
        one = placed(share(0))
        before = grant(ids("0:5"), share(0), of=one)
        assert granted(plan_grant(ask(one, ids("0:0")), node(before, active=(one.uid,)))).superseded == (before,)


class TestMig:
    ON = inventory(gpu(0, mig=[instance(0, 0), instance(0, 1), instance(0, 2, profile="2g.20gb", mib=200)]))
    RESOURCE = "nvidia.com/mig-1g.10gb"

    def asking(self, **annotations: str):
        return replace(pod("mig", ContainerSpec("main", {self.RESOURCE: "1"})), annotations=annotations)

    def test_local_placement_gives_the_instances_the_ids_name(self):
        planned = granted(
            plan_grant(ask(self.asking(), frozenset({"MIG-0-1"}), resource=self.RESOURCE), node(policy=Policy.FRAG, on=self.ON))
        )
        assert [given.device_uuid for given in planned.grant.shares] == ["MIG-0-1"]

    def test_an_assigned_instance_is_given(self):
        one = self.asking(**assigned("uid-mig", main=[share("MIG-0-1")]))
        planned = granted(plan_grant(ask(one, frozenset({"MIG-0-0"}), resource=self.RESOURCE), node(on=self.ON)))
        assert [given.device_uuid for given in planned.grant.shares] == ["MIG-0-1"]

    @pytest.mark.parametrize(("uuid", "reason"), [("MIG-0-2", Reason.ASSIGNMENT_INVALID), ("MIG-9-9", Reason.DEVICE_UNKNOWN)])
    def test_an_instance_of_another_profile_or_node_is_refused(self, uuid, reason):
        one = self.asking(**assigned("uid-mig", main=[share(uuid)]))
        refused(plan_grant(ask(one, frozenset({"MIG-0-0"}), resource=self.RESOURCE), node(on=self.ON)), reason)

    def test_an_instance_in_use_is_refused(self):
        other = grant(frozenset({"MIG-0-1"}), share("MIG-0-1"), of=pod("other"), resource=self.RESOURCE)
        one = self.asking(**assigned("uid-mig", main=[share("MIG-0-1")]))
        refused(plan_grant(ask(one, frozenset({"MIG-0-0"}), resource=self.RESOURCE), node(other, on=self.ON)), Reject.MIG_PROFILE)

    def test_two_profiles_of_one_container_are_two_grants(self):
        both = ContainerSpec("main", {self.RESOURCE: "1", "nvidia.com/mig-2g.20gb": "1"})
        one = replace(pod("mig", both), annotations=assigned("uid-mig", main=[share("MIG-0-0"), share("MIG-0-2", 200)]))
        for resource, uuid in ((self.RESOURCE, "MIG-0-0"), ("nvidia.com/mig-2g.20gb", "MIG-0-2")):
            planned = granted(plan_grant(ask(one, frozenset({uuid}), resource=resource), node(on=self.ON)))
            assert [given.device_uuid for given in planned.grant.shares] == [uuid]


class TestBackends:
    @pytest.mark.parametrize(("isolation", "backend"), [(None, Isolation.SHIM), ("exclusive", Isolation.EXCLUSIVE), ("mps", Isolation.MPS)])
    def test_grant_records_its_backend(self, isolation, backend):
        annotations = {contract.ANNOTATION_ISOLATION: isolation} if isolation else {}
        whole = isolation == "exclusive"
        one = pod("a", ContainerSpec("main", limits(mib=None if whole else 100)), annotations=annotations)
        on = replace(node(policy=Policy.BINPACK), abilities=Abilities(without_mps=""))
        grant = granted(plan_grant(ask(one, ids("0:0")), on)).grant
        assert grant.backend is backend
        assert grant.under_shim is (backend is Isolation.SHIM)

    def test_a_burst_above_what_the_node_allows_is_refused(self):
        one = pod(annotations={contract.ANNOTATION_MEMORY_BURST: "1.5"})
        sentence = refused(plan_grant(ask(one, ids("0:0")), node(policy=Policy.BINPACK)), Reason.ISOLATION_UNAVAILABLE)
        assert "memoryOversubscription" in sentence

    def test_a_burst_within_it_is_granted(self):
        one = pod(annotations={contract.ANNOTATION_MEMORY_BURST: "1.5"})
        on = replace(node(policy=Policy.BINPACK), abilities=Abilities(most_memory_burst=1.5))
        assert granted(plan_grant(ask(one, ids("0:0")), on)).preferences.memory_burst == 1.5


class TestExclusive:
    """Annotations change while a pod waits; what quotas counted, the limits, does not."""

    WHOLE = share(0, 1000, cores=100)

    def asking(self, mib: int | None, **annotations: str):
        exclusive = {contract.ANNOTATION_ISOLATION: "exclusive"}
        return pod("a", ContainerSpec("main", limits(mib=mib)), annotations={**exclusive, **annotations})

    @pytest.mark.parametrize("mib", [1, 999])
    def test_local_placement_gives_no_whole_gpu_for_less_memory_than_it_has(self, mib):
        message = refused(plan_grant(ask(self.asking(mib), ids("0:0")), node(policy=Policy.FRAG)), Reject.MEMORY)
        assert "3 with more memory than that (at least 1000 MiB, GPU-" in message

    def test_assignment_gives_no_whole_gpu_for_less_memory_either(self):
        one = self.asking(1, **assigned("uid-a", main=[self.WHOLE]))
        message = refused(plan_grant(ask(one, ids("0:0")), node()), Reject.MEMORY)
        assert "aliquot.dev/isolation: exclusive gives whole GPUs" in message

    def test_restart_grants_no_more_than_requested(self):
        before = replace(grant(ids("0:0"), self.WHOLE, of=self.asking(1)), isolation=Isolation.EXCLUSIVE)
        refused(plan_grant(ask(self.asking(1), ids("0:0")), node(before)), Reject.MEMORY)

    @pytest.mark.parametrize("mib", [None, 1000, 2000], ids=["no amount", "all of it", "counted as a larger GPU"])
    @pytest.mark.parametrize("policy", [None, Policy.FRAG], ids=["assigned", "local"])
    def test_whole_gpu_is_granted_for_its_memory_or_more(self, mib, policy):
        one = self.asking(mib, **assigned("uid-a", main=[self.WHOLE]))
        shares = granted(plan_grant(ask(one, ids("0:0")), node(policy=policy))).grant.shares
        assert [(given.memory_bytes, given.cores_percent) for given in shares] == [(self.WHOLE.memory_bytes, 100)]


class TestSingleStrategy:
    ON = inventory(gpu(0, mig=[instance(0, 0, profile="3g.40gb"), instance(0, 4, profile="3g.40gb")]))

    def node(self, *grants) -> Node:
        return replace(node(*grants, policy=Policy.BINPACK, on=self.ON), abilities=Abilities(mig_strategy=MigStrategy.SINGLE))

    def plan(self, *grants, **asked):
        one = pod("a", ContainerSpec("main", limits(**asked)), annotations=asked.pop("annotations", None))
        return plan_grant(ask(one, frozenset({"MIG-0-4"})), self.node(*grants))

    def test_a_vgpu_is_the_instance_that_its_id_names(self):
        grant = granted(self.plan(mib=None)).grant
        assert [given.device_uuid for given in grant.shares] == ["MIG-0-4"]
        assert grant.backend is Isolation.MIG

    def test_an_instance_in_use_is_not_given_twice(self):
        taken = replace(grant(frozenset({"MIG-0-0"}), share("MIG-0-4", 100), of=pod("b")), isolation=Isolation.MIG)
        assert granted(self.plan(taken, mib=None)).grant.shares[0].device_uuid == "MIG-0-0"

    def test_memory_that_the_instance_has_is_granted(self):
        granted(self.plan(mib=100))

    @pytest.mark.parametrize(("asked", "reason"), [({"mib": 101}, Reject.MEMORY), ({"mib": 100, "cores": 10}, Reject.CORES)])
    def test_request_beyond_the_instance_is_refused(self, asked, reason):
        assert "each vGPU is a MIG instance 3g.40gb" in refused(self.plan(**asked), reason)


class TestPlaces:
    ON = inventory(dynamic_gpu(0))
    RESOURCE = "nvidia.com/mig-2g.20gb"

    def plan(self, *grants, policy=Policy.BINPACK, annotations=None):
        one = pod("a", ContainerSpec("main", {self.RESOURCE: "1"}), annotations=annotations)
        return plan_grant(ask(one, ids("0:0"), resource=self.RESOURCE), node(*grants, policy=policy, on=self.ON))

    def test_local_placement_names_a_place(self):
        (given,) = granted(self.plan()).grant.shares
        assert given.device_uuid == place(0, "2g.20gb").uuid
        assert given.memory_bytes == place(0, "2g.20gb").memory_bytes

    def test_a_restarting_container_keeps_its_place(self):
        before = granted(self.plan()).grant
        before = replace(before, shares=(replace(before.shares[0], device_uuid=place(4, "2g.20gb").uuid),))
        assert granted(self.plan(before)).grant.shares == before.shares

    def test_an_assigned_place_is_taken(self):
        annotations = assigned("uid-a", main=[share(place(2, "2g.20gb").uuid, 19968)])
        assert granted(self.plan(policy=None, annotations=annotations)).grant.shares[0].device_uuid == place(2, "2g.20gb").uuid

    def test_assigned_place_that_overlaps_a_grant_is_refused(self):
        taken = grant(ids("0:1"), share(place(3).uuid, 9728), resource="nvidia.com/mig-1g.10gb")
        annotations = assigned("uid-a", main=[share(place(2, "2g.20gb").uuid, 19968)])
        assert "in use" in refused(self.plan(taken, policy=None, annotations=annotations), Reject.MIG_PROFILE)


class TestDamagedGrant:
    """A container with unknown amounts may run: nothing more is granted where it may be."""

    HIDDEN = "a-damaged-grant"

    def closed(self, *devices: str, policy: Policy | None = None, grants=()) -> Node:
        open_node = node(*grants, policy=policy, active=("uid-train",))
        return replace(open_node, ledger=open_node.ledger.with_unclear({self.HIDDEN: frozenset(devices)}))

    def test_assigned_gpu_is_refused_and_the_others_are_not(self):
        message = refused(plan_grant(ask(placed(share(1)), ids("0:0")), self.closed("GPU-1")), Reason.LEDGER_DAMAGED)
        assert "nothing more is granted on GPU-1" in message
        assert "damaged-grant" in message
        granted(plan_grant(ask(placed(share(0)), ids("0:0")), self.closed("GPU-1")))

    def test_every_gpu_is_refused_while_its_devices_are_unknown(self):
        for index in range(3):
            refused(plan_grant(ask(placed(share(index)), ids("0:0")), self.closed()), Reason.LEDGER_DAMAGED)

    def test_local_placement_takes_another_gpu_or_says_why_not(self):
        chosen = granted(plan_grant(ask(pod(), ids("0:0")), self.closed("GPU-0", policy=Policy.BINPACK)))
        assert chosen.grant.shares[0].device_uuid != "GPU-0"
        outcome = plan_grant(ask(pod(), ids("0:0")), self.closed(policy=Policy.BINPACK))
        assert isinstance(outcome, Refusal)
        assert "nothing more is granted on GPU-0, GPU-1, GPU-2" in outcome.message

    def test_container_that_has_a_grant_there_restarts(self):
        one = placed(share(1))
        before = grant(ids("0:0"), share(1), of=one)
        assert granted(plan_grant(ask(one, ids("0:0")), self.closed("GPU-1", grants=(before,)))).grant.shares == before.shares

    def test_its_own_start_makes_it_clear_again(self):
        asked = ask(placed(share(1)), ids("0:0"))
        ledger = Ledger().with_unclear({asked.grant_id: frozenset(("GPU-1",))})
        planned = granted(plan_grant(asked, replace(node(), ledger=ledger)))
        assert ledger.granting(planned.grant, INVENTORY, 16).unclear == {}


def test_container_start_supersedes_no_grant_of_claim():
    owner = pod("train")
    made = claim_grant("train", share(1, 10), of=owner)
    node = Node(inventory(), Ledger({made.grant_id: made}), 16, BOOT, Policy.FRAG, lambda _: True)
    planned = plan_grant(ask(owner, ids("0:0")), node)
    assert isinstance(planned, Planned)
    assert planned.superseded == ()


def test_container_with_prepared_claim_gets_no_vgpu():
    """Its second limits file would hide the first."""
    use = (ClaimUse("data", ""),)
    beside = ContainerSpec("beside", limits(mib=100))
    one = replace(
        pod("train", ContainerSpec("main", limits(mib=100), claims=use), beside), annotations=assigned("uid-train", beside=[share(1)])
    )
    prepared = node(claim_grant("data", share(0), of=one))
    message = refused(plan_grant(ask(one, ids("1:0")), prepared), Reason.REQUEST_INVALID)
    assert "uses request gpu of claim data and requests nvidia.com/vgpu" in message
    assert granted(plan_grant(ask(one, ids("1:0"), container="beside"), prepared)).grant.shares == (share(1),)
