# SPDX-License-Identifier: Apache-2.0
import hashlib
from dataclasses import replace

import msgspec
import pytest

from agent.core.backends import Abilities
from agent.core.cgroups import ContainerRef
from agent.core.claims import ClaimNode, RequestGroup, decode_claim, device_status, plan_group
from agent.core.ledger import GRANT_ROWS, Grant, Ledger
from agent.core.limits import FailPolicy, limits_of
from agent.core.metrics import shares_on
from agent.core.owners import owner_of, pod_uids_of, uses_unknown_claim
from agent.core.planning import Planned
from agent.core.refusal import Reason, Refusal
from aliquot import contract
from aliquot.contract.codec import MigPlace
from aliquot.contract.errors import ContractError
from aliquot.contract.features import FeatureGates
from aliquot.contract.model import ClaimUse, ContainerSpec, ContainerState, ContainerStatus, CoresMode, Isolation, MigInstance, Priority
from aliquot.contract.units import MIB
from aliquot.placement.device import AccountingError
from aliquot.placement.fit import Reject
from tests.unit.agent.builders import BOOT, SECRET, gpu, grant, ids, instance, inventory, share
from tests.unit.agent.claim_builders import NODE, body, claim_object, parameters, ref, result, user

INVENTORY = inventory(gpu(0, mib=1000), gpu(1, mib=1000))


def node(*grants: Grant, **changes) -> ClaimNode:
    ledger = Ledger({one.grant_id: one for one in grants})
    known = {"abilities": Abilities(most_memory_burst=2.0), "pods": {}, "inventory": INVENTORY, "ledger": ledger}
    return ClaimNode(secret=SECRET, boot_id=BOOT, pool=NODE, shares_per_gpu=4, **{**known, **changes})


def place_on_demand(profile: str, start: int, size: int, mib: int) -> MigInstance:
    return MigInstance(str(MigPlace("GPU-0", profile, start)), "GPU-0", profile, mib * MIB, 0, 0, start, size, most_on_device=7)


def plan(claim, at: ClaimNode, *, name: str = "train") -> Planned | Refusal:
    decoded = decode_claim(body(claim))
    return plan_group(ref(name, decoded.uid), decoded, RequestGroup(decoded.requests[:1]), at)


def granted(claim, at: ClaimNode | None = None, *, name: str = "train") -> Grant:
    planned = plan(claim, at or node(), name=name)
    assert isinstance(planned, Planned), planned
    return planned.grant


def refused(claim, at: ClaimNode | None = None) -> Refusal:
    refusal = plan(claim, at or node())
    assert isinstance(refusal, Refusal)
    return refusal


class TestAmounts:
    def test_consumed_memory_is_granted_and_cores_are_unreserved(self):
        assert granted(claim_object("train", result(1, mib=300))).shares == (share(1, 300),)

    def test_cores_count_only_when_claim_states_them(self):
        assert granted(claim_object("train", result(0, cores=30), cores_stated=True)).shares == (share(0, 100, 30),)

    def test_several_devices_keep_their_order(self):
        assert granted(claim_object("train", result(1), result(0))).device_names == ("GPU-1", "GPU-0")

    def test_device_without_consumed_memory_is_granted_whole(self):
        assert granted(claim_object("train", result(0, mib=None))).shares == (share(0, 1000),)

    def test_fixed_share_has_memory_of_its_name(self):
        at = node(inventory=inventory(gpu(0, mib=40960)))
        fixed = claim_object("train", result("gpu-0-20g-1", mib=None, consumedCapacity=None))
        assert granted(fixed, at).shares == (share(0, 20480),)

    def test_fixed_share_counts_beside_other_shares(self):
        at = node(inventory=inventory(gpu(0, mib=40960)))
        first = granted(claim_object("a", result(0, mib=30720)), at, name="a")
        refusal = refused(
            claim_object("train", result("gpu-0-20g-0", mib=None, consumedCapacity=None)), replace(at, ledger=Ledger({"1": first}))
        )
        assert refusal.reason is Reason.OVERCOMMITTED

    @pytest.mark.parametrize("amount", ["0", "100m", "many"])
    def test_amount_that_is_no_whole_number_is_refused(self, amount):
        claim = claim_object("train", {**result(0), "consumedCapacity": {"memory": amount}})
        assert refused(claim).reason is Reason.REQUEST_INVALID


class TestRoom:
    def test_claim_that_exceeds_what_other_door_leaves_is_refused(self):
        other = grant(ids("0:0"), share(0, 950))
        refusal = refused(claim_object("train", result(0, mib=100)), node(other))
        assert refusal.reason is Reason.OVERCOMMITTED
        assert "which has 50 MiB" in refusal.message
        assert "default/train/main 950 MiB" in refusal.message

    def test_refusal_names_both_claims(self):
        refusal = refused(claim_object("train", result(0, mib=100)), node(granted(claim_object("other", result(0, mib=950)), name="other")))
        assert refusal.message.startswith("claim default/train was allocated 100 MiB")
        assert "Already granted there: claim default/other 950 MiB." in refusal.message

    def test_one_device_twice_in_request_is_refused(self):
        refusal = refused(claim_object("train", result(0, mib=10), result(0, mib=10)))
        assert (refusal.reason, "device gpu-0 twice" in refusal.message) == (Reason.REQUEST_INVALID, True)

    def test_more_devices_than_container_can_have_are_refused(self):
        refusal = refused(claim_object("train", *(result(minor) for minor in range(17))))
        assert "has 17 devices; a container can have 16" in refusal.message

    def test_grant_of_same_request_does_not_count_twice(self):
        first = granted(claim_object("train", result(0, mib=900)))
        assert granted(claim_object("train", result(0, mib=900)), node(first)) == first


class TestRefusals:
    def test_unhealthy_gpu(self):
        broken = replace(INVENTORY, devices=(replace(INVENTORY.devices[0], trouble="XID 79"), INVENTORY.devices[1]))
        assert refused(claim_object("train", result(0)), node(inventory=broken)).reason is Reject.UNHEALTHY

    @pytest.mark.parametrize("answers", [True, False])
    def test_gpu_that_was_only_silent_is_granted_once_it_answers(self, answers):
        silent = replace(INVENTORY.devices[0], trouble="no answer", silent=True, answers=answers)
        quiet = replace(INVENTORY, devices=(silent, INVENTORY.devices[1]))
        if answers:
            assert granted(claim_object("train", result(0)), node(inventory=quiet))
        else:
            assert refused(claim_object("train", result(0)), node(inventory=quiet)).reason is Reason.NOT_READY

    def test_device_that_may_be_silent_since_start_is_waited_for(self):
        started = replace(INVENTORY, devices=INVENTORY.devices[:1], unidentified=("GPU with NVML index 1: no answer",))
        refusal = refused(claim_object("train", result(1)), node(inventory=started))
        assert (refusal.reason, "GPU with NVML index 1: no answer" in refusal.message) == (Reason.NOT_READY, True)
        assert refused(claim_object("train", result(1)), node(inventory=replace(started, unidentified=()))).reason is Reason.DEVICE_UNKNOWN

    def test_gpu_in_mig_mode(self):
        assert refused(claim_object("train", result(0)), node(inventory=inventory(gpu(0, mig=[instance(0, 0)])))).reason is Reject.MIG_MODE

    @pytest.mark.parametrize("wrong", [{"device": "gpu-7"}, {"pool": "node-2"}])
    def test_unknown_device(self, wrong):
        assert refused(claim_object("train", {**result(0), **wrong})).reason is Reason.DEVICE_UNKNOWN

    def test_admin_access_without_setting(self):
        refusal = refused(claim_object("train", result(0, adminAccess=True)))
        assert (refusal.reason, "adminAccess" in refusal.message) == (Reason.REQUEST_INVALID, True)

    def test_damaged_ledger_row_on_gpu(self):
        ledger = Ledger({}, {"lost": frozenset({"GPU-0"})})
        assert refused(claim_object("train", result(0)), node(ledger=ledger)).reason is Reason.LEDGER_DAMAGED

    def test_container_with_second_grant(self):
        pod = user("train", "train")
        pod = replace(
            pod, containers=(replace(pod.containers[0], claims=(*pod.containers[0].claims, *user("x", "more").containers[0].claims)),)
        )
        first = granted(claim_object("train", result(0), pods=[pod]), node(pods={pod.uid: pod}))
        refusal = plan(claim_object("more", result(1), pods=[pod]), node(first, pods={pod.uid: pod}), name="more")
        assert isinstance(refusal, Refusal)
        assert "uses request gpu of claim train and request gpu of claim more" in refusal.message

    def test_grant_of_earlier_claim_with_same_name_is_no_second_grant(self):
        pod = user("train", "train")
        earlier = granted(claim_object("train", result(0), uid="uid-before", pods=[pod]), node(pods={pod.uid: pod}))
        assert granted(claim_object("train", result(0), pods=[pod]), node(earlier, pods={pod.uid: pod})).claim.uid == "uid-train"


class TestParameters:
    def test_claims_parameters_replace_those_of_class(self):
        claim = claim_object(
            "train", result(0), stated=parameters(priority="high"), of_class=parameters(priority="low", coresMode="weight")
        )
        planned = plan(claim, node())
        assert isinstance(planned, Planned)
        assert (planned.preferences.priority, planned.preferences.cores_mode) == (Priority.HIGH, CoresMode.WEIGHT)
        assert planned.grant.claim.preferences == planned.preferences

    def test_parameters_of_another_request_do_not_count(self):
        claim = claim_object("train", result(0), stated=parameters(priority="high"))
        claim["status"]["allocation"]["devices"]["config"][0]["requests"] = ["other"]
        assert granted(claim).claim.preferences.priority is None

    @pytest.mark.parametrize(
        ("stated", "sentence"),
        [
            ({"apiVersion": "aliquot.dev/v9", "kind": "VgpuParameters"}, "found aliquot.dev/v9 VgpuParameters"),
            (parameters(isolatoin="shim"), "isolatoin"),
            (parameters(isolation="mps"), "isolation mps is not available to claims"),
            (parameters(memoryBurst="0.5"), "expected a ratio from 1 to 10"),
        ],
    )
    def test_unknown_or_wrong_parameters_are_refused(self, stated, sentence):
        refusal = refused(claim_object("train", result(0), stated=stated))
        assert (refusal.reason, sentence in refusal.message) == (Reason.REQUEST_INVALID, True)

    def test_exclusive_is_whole_gpu_only(self):
        whole = claim_object("train", result(0, mib=1000), stated=parameters(isolation="exclusive"))
        assert granted(whole).shares == (share(0, 1000, 100),)
        assert granted(whole).backend is Isolation.EXCLUSIVE
        assert "whole GPU" in refused(claim_object("train", result(0, mib=10), stated=parameters(isolation="exclusive"))).message

    @pytest.mark.parametrize(
        ("abilities", "sentence"),
        [
            (Abilities(gates=FeatureGates(), most_memory_burst=2.0), "MemoryBurst"),
            (Abilities(most_memory_burst=1.2), "exceeds 1.2"),
        ],
    )
    def test_burst_that_node_does_not_allow_is_refused(self, abilities, sentence):
        claim = claim_object("train", result(0), stated=parameters(memoryBurst="1.5"))
        assert sentence in refused(claim, node(abilities=abilities)).message


class TestJointRequests:
    """Several requests that one container uses."""

    @staticmethod
    def of(*results, at: ClaimNode | None = None, **stated) -> Planned | Refusal:
        decoded = decode_claim(body(claim_object("train", *results, **stated)))
        return plan_group(ref("train"), decoded, RequestGroup(decoded.requests), at or node())

    def grant(self, *results, at: ClaimNode | None = None, **stated) -> Grant:
        planned = self.of(*results, at=at, **stated)
        assert isinstance(planned, Planned), planned
        return planned.grant

    def refusal(self, *results, at: ClaimNode | None = None, **stated) -> Refusal:
        refusal = self.of(*results, at=at, **stated)
        assert isinstance(refusal, Refusal)
        return refusal

    @pytest.mark.parametrize(
        ("parts", "cores_stated", "shares"),
        [
            pytest.param([(0, 100, None), (1, 200, None)], False, [share(0, 100), share(1, 200)], id="two GPUs"),
            pytest.param([(1, 200, 30), (0, 100, 20)], True, [share(1, 200, 30), share(0, 100, 20)], id="in the order of the requests"),
            pytest.param([(0, 100, 30), (0, 200, 20)], True, [share(0, 300, 50)], id="one GPU twice"),
            pytest.param([(0, 100, None), (0, 200, None)], False, [share(0, 300)], id="one GPU twice, without cores"),
            pytest.param([(1, 1, 1), (0, 2, 2), (1, 3, 3), (0, 4, 4)], True, [share(1, 4, 4), share(0, 6, 6)], id="two GPUs twice"),
        ],
    )
    def test_container_sees_each_gpu_once_with_sums(self, parts, cores_stated, shares):
        results = [result(device, mib, cores, f"r{number}") for number, (device, mib, cores) in enumerate(parts)]
        made = self.grant(*results, cores_stated=cores_stated)
        assert list(made.shares) == shares
        assert [(limit.uuid, limit.memory_bytes, limit.sm_percent) for limit in limits_of(made, FailPolicy.CLOSED).devices] == [
            (one.device_uuid, one.memory_bytes, one.cores_percent or 0) for one in shares
        ]
        assert made.promised == tuple(share(*part) for part in parts)
        assert GRANT_ROWS.decode(GRANT_ROWS.encode(made)) == made

    def test_stated_cores_of_one_part_are_the_limit_of_all(self):
        claim = claim_object("train", result(0, 100, 30, "a"), result(0, 100, None, "b"), cores_stated=True)
        del claim["spec"]["devices"]["requests"][1]["exactly"]["capacity"]
        decoded = decode_claim(body(claim))
        planned = plan_group(ref("train"), decoded, RequestGroup(decoded.requests), node())
        assert isinstance(planned, Planned), planned
        assert planned.grant.shares == (share(0, 200, 30),)
        state = Ledger().granting(planned.grant, INVENTORY, 4).states(INVENTORY, 4)[0]
        assert (state.used_cores_percent, state.unreserved_shares) == (30, 1)

    def test_ledger_and_metrics_count_each_part_as_its_allocator_does(self):
        made = self.grant(*(result(0, 100, 10, f"r{number}") for number in range(3)), cores_stated=True)
        state = Ledger().granting(made, INVENTORY, 4).states(INVENTORY, 4)[0]
        assert (state.used_shares, state.used_memory_bytes, state.used_cores_percent) == (3, 300 * MIB, 30)
        assert len(shares_on(INVENTORY.devices[0], [made])) == 3
        with pytest.raises(AccountingError):
            Ledger().granting(made, INVENTORY, 2)

    def test_parts_that_do_not_fit_together_are_refused(self):
        refusal = self.refusal(result(0, 600, None, "a"), result(0, 600, None, "b"))
        assert (refusal.reason, "another request of this claim" in refusal.message) == (Reason.OVERCOMMITTED, True)

    def test_status_has_each_allocation_with_its_amount(self):
        made = self.grant(result(0, 100, None, "a", shareID="one"), result(0, 200, None, "b", shareID="two"))
        found = [(one["device"], one["shareID"], one["data"]["memoryBytes"] // MIB) for one in device_status([made], 0.0)]
        assert found == [("gpu-0", "one", 100), ("gpu-0", "two", 200)]

    @pytest.mark.parametrize("stated", [{"priority": "high"}, {"isolation": "exclusive"}, {"memoryBurst": "1.5"}, {"coresMode": "weight"}])
    def test_parameters_of_one_request_only_are_refused(self, stated):
        claim = claim_object("train", result(0, 100, None, "a"), result(1, 100, None, "b"), stated=parameters(**stated))
        claim["status"]["allocation"]["devices"]["config"][0]["requests"] = ["b"]
        decoded = decode_claim(body(claim))
        refusal = plan_group(ref("train"), decoded, RequestGroup(decoded.requests), node())
        assert isinstance(refusal, Refusal)
        assert (refusal.reason, "uses requests a and b, but their parameters differ" in refusal.message) == (Reason.REQUEST_INVALID, True)

    @pytest.mark.parametrize("priority", ["high", "low"])
    def test_parameters_of_all_requests_count(self, priority):
        made = self.grant(result(0, 100, None, "a"), result(1, 100, None, "b"), stated=parameters(priority=priority))
        assert made.claim is not None
        assert made.claim.preferences.priority is Priority(priority)

    def test_admin_access_of_one_request_only_is_refused(self):
        refusal = self.refusal(result(0, None, None, "a", adminAccess=True), result(1, 100, None, "b"), at=node(admin_access=True))
        assert (refusal.reason, "not all of them have adminAccess" in refusal.message) == (Reason.REQUEST_INVALID, True)

    def test_admin_access_of_all_requests_takes_no_part(self):
        watching = [result(device, None, None, f"r{number}", adminAccess=True) for number, device in enumerate((0, 1, 0))]
        made = self.grant(*watching, at=node(admin_access=True))
        assert (made.takes_part, made.device_names) == (False, ("GPU-0", "GPU-1"))

    def test_devices_of_all_requests_count_for_most_of_container(self):
        gpus = inventory(*(gpu(minor) for minor in range(18)))
        many = [result(minor, 1, None, f"r{minor % 2}") for minor in range(17)]
        refusal = self.refusal(*many, at=node(inventory=gpus))
        assert "requests r0 and r1 have 17 devices; a container can have 16" in refusal.message
        assert len(self.grant(*many[:16], result(0, 1, None, "r1"), at=node(inventory=gpus)).shares) == 16

    def test_gpu_and_mig_instance_are_refused(self):
        of_instance = result(TestMigInstances.NAMES[0], None, None, "b", consumedCapacity=None)
        with pytest.raises(ContractError, match="has GPUs and MIG instances"):
            self.of(result(1, 100, None, "a"), of_instance, at=node(inventory=TestMigInstances.INVENTORY))

    def test_gpu_in_mig_mode_is_shared_alone(self):
        at = node(inventory=TestMigInstances.ON_DEMAND)
        assert self.grant(result(0, 100, None, "a"), result(0, 200, None, "b"), at=at).shares == (share(0, 300),)
        refusal = self.refusal(result(0, 100, None, "a"), result(1, 100, None, "b"), at=at)
        assert "a program can use one MIG instance only" in refusal.message

    def test_second_claim_of_container_is_refused_with_cure(self):
        pod = replace(user("p", "train"), containers=(ContainerSpec("main", {}, claims=(ClaimUse("train", ""), ClaimUse("other", ""))),))
        first = granted(claim_object("other", result(1), pods=[pod]), node(pods={pod.uid: pod}), name="other")
        refusal = self.refusal(result(0, 100, None, "a"), result(1, 100, None, "b"), pods=[pod], at=node(first, pods={pod.uid: pod}))
        assert refusal.message.startswith(
            "container main of pod default/p uses request gpu of claim other and requests a and b of claim train"
        )
        assert refusal.message.endswith("A container can use one claim: write one claim with several requests, or a count")

    def test_grants_of_earlier_boot_with_other_groups_are_replaced(self):
        separate = [replace(granted(claim_object("train", result(0, 600, None, name))), boot_id="boot-0") for name in "ab"]
        planned = self.of(result(0, 500, None, "a"), result(0, 500, None, "b"), at=node(*separate))
        assert isinstance(planned, Planned), planned
        assert (planned.grant.grant_id, planned.superseded) == (separate[0].grant_id, (separate[1],))

    @pytest.mark.parametrize("request_name", ["", "a", "b"])
    def test_each_use_of_a_joint_request_is_use_of_the_grant(self, request_name):
        made = self.grant(result(0, 100, None, "a"), result(1, 100, None, "b"))
        pods = [user("p", "train", request_name)]
        assert pod_uids_of(made, pods) == {"", pods[0].uid}
        assert not uses_unknown_claim(pods, [made])


def test_row_of_earlier_agent_is_read_as_one_request():
    made = granted(claim_object("train", result(0, mib=200)))
    row = msgspec.json.decode(GRANT_ROWS.encode(made))
    for name in ("joined", "parts"):
        del row["grant"]["claim"][name]
    del row["grant"]["claim"]["devices"][0]["request"]
    row["sha256"] = hashlib.sha256(msgspec.json.encode(row["grant"])).hexdigest()
    assert GRANT_ROWS.decode(msgspec.json.encode(row)) == made


class TestUsers:
    def test_grant_names_first_pod_and_its_container(self):
        pod = user("first", "train", "gpu")
        made = granted(claim_object("train", result(0), pods=[pod]), node(pods={pod.uid: pod}))
        assert str(made.holder) == "default/first/main"

    def test_processes_of_every_pod_of_claim_belong_to_its_grant(self):
        first, second = user("first", "train"), user("second", "train", "gpu")
        stranger = user("third", "other")
        made = granted(claim_object("train", result(0), pods=[first]), node(pods={first.uid: first}))
        assert pod_uids_of(made, [first, second, stranger]) == {first.uid, second.uid}
        running = replace(second, statuses=(ContainerStatus("main", ContainerState.RUNNING, "c2"),))
        owner = owner_of(ContainerRef(second.uid, "c2"), 1, pods_by_uid={second.uid: running}, grants=[made], counted_pids={})
        assert (owner.container, owner.grants) == ("main", (made,))


def test_subrequest_is_known_by_name_of_its_request():
    claim = decode_claim(body(claim_object("train", result(0, request="gpu/large"))))
    assert [one.name for one in claim.requests] == ["gpu"]


def test_devices_of_other_drivers_are_ignored():
    claim = decode_claim(body(claim_object("train", result(0), {**result(0), "driver": "nic.example.com"})))
    assert [len(one.devices) for one in claim.requests] == [1]


def test_claim_that_cannot_be_read_is_an_error():
    with pytest.raises(ContractError, match="ResourceClaim"):
        decode_claim(b'{"metadata": 1}')


def test_status_reports_amounts_of_each_device():
    (one,) = device_status([granted(claim_object("train", result(0, mib=200)))], 0.0)
    assert (one["device"], one["shareID"], one["data"]["memoryBytes"]) == ("gpu-0", "share-0", 200 * MIB)


def test_claim_with_parameters_nested_too_deeply_is_an_error():
    nested = b"[" * 5000 + b"]" * 5000  # 10 KiB, the most that the API takes
    config = b'{"source": "FromClaim", "opaque": {"driver": "nic.example.com", "parameters": {"a": %s}}}' % nested
    with pytest.raises(ContractError, match="too deeply"):
        decode_claim(b'{"metadata": {"uid": "u"}, "status": {"allocation": {"devices": {"config": [%s]}}}}' % config)


class TestAdminAccess:
    CLAIM = claim_object("watch", result(0, mib=None, adminAccess=True), result(1, mib=None, adminAccess=True))

    def test_takes_no_part_of_full_gpus_and_leaves_all_to_others(self):
        full = grant(ids("0:0", "1:0"), share(0, 1000, 100), share(1, 1000, 100))
        watching = granted(self.CLAIM, node(full, admin_access=True), name="watch")
        assert (watching.takes_part, watching.under_shim) == (False, False)
        later = node(watching)
        assert granted(claim_object("train", result(0, mib=1000)), later).shares == (share(0, 1000),)
        assert later.ledger.granting(watching, INVENTORY, 4).states(INVENTORY, 4)[0].free_memory_bytes == 1000 * MIB

    def test_is_no_share_of_gpu_in_metrics(self):
        watching, training = granted(self.CLAIM, node(admin_access=True), name="watch"), granted(claim_object("train", result(0, mib=500)))
        assert shares_on(INVENTORY.devices[0], [watching, training]) == [share(0, 500)]

    def test_sees_gpu_that_takes_no_new_work(self):
        broken = replace(INVENTORY, devices=tuple(replace(entry, trouble="XID 79") for entry in INVENTORY.devices))
        assert len(granted(self.CLAIM, node(admin_access=True, inventory=broken), name="watch").shares) == 2

    def test_status_says_that_nothing_is_limited(self):
        first, _ = device_status([granted(self.CLAIM, node(admin_access=True), name="watch")], 0.0)
        assert first["conditions"][0]["message"] == "admin access, without a limit"


class TestMigInstances:
    INVENTORY = inventory(gpu(0, mig=[instance(0, 0, mib=100), instance(0, 1, mib=100)]), gpu(1, mib=1000))
    NAMES = ("gpu-0-mig-1g10gb-0-0-0", "gpu-0-mig-1g10gb-1-1-0")
    PLACES = (place_on_demand("1g.10gb", 0, 1, 100), place_on_demand("7g.80gb", 0, 8, 900))
    ON_DEMAND = inventory(gpu(0, mib=1000, mig=PLACES), gpu(1, mib=1000))
    """GPU 0 is in MIG mode. The agent can make a small instance there, or one with all slices and 900 MiB."""

    def of(self, name: str, *others: Grant, **stated):
        return plan(claim_object("train", result(name, mib=None, consumedCapacity=None), **stated), node(*others, inventory=self.INVENTORY))

    def test_instance_is_granted_whole_by_hardware(self):
        planned = self.of(self.NAMES[0])
        assert isinstance(planned, Planned), planned
        assert planned.grant.shares == (share("MIG-0-0", 100),)
        assert (planned.grant.backend, planned.grant.resource) == (Isolation.MIG, "nvidia.com/mig-1g.10gb")

    def test_instance_in_use_is_refused(self):
        first = self.of(self.NAMES[0])
        second = plan(
            claim_object("other", result(self.NAMES[0], mib=None, consumedCapacity=None)),
            node(first.grant, inventory=self.INVENTORY),
            name="other",
        )
        assert isinstance(second, Refusal)
        assert second.reason is Reason.OVERCOMMITTED

    @pytest.mark.parametrize("stated", [{"isolation": "exclusive"}, {"memoryBurst": "1.5"}])
    def test_parameters_that_no_instance_has_are_refused(self, stated):
        assert self.of(self.NAMES[0], stated=parameters(**stated)).reason is Reason.REQUEST_INVALID

    @pytest.mark.parametrize(
        ("results", "stated"),
        [
            pytest.param([result(0, mib=100)], parameters(isolation="exclusive"), id="exclusive"),
            pytest.param([result(0, mib=100)], parameters(memoryBurst="1.5"), id="burst"),
            pytest.param([result(0, mib=100), result(1, mib=100)], None, id="several devices"),
            pytest.param([result(0, mib=100, adminAccess=True)], None, id="admin access"),
        ],
    )
    def test_what_shares_in_mig_mode_lack_is_refused_with_cure(self, results, stated):
        claim = claim_object("train", *results, **({} if stated is None else {"stated": stated}))
        refusal = refused(claim, node(inventory=self.ON_DEMAND, admin_access=True))
        assert (refusal.reason, "request class vgpu.aliquot.dev" in refusal.message) == (Reason.REQUEST_INVALID, True)

    def test_shares_of_gpu_in_mig_mode_fill_its_instance(self):
        at = node(inventory=self.ON_DEMAND)
        first = granted(claim_object("first", result(0, mib=600)), at, name="first")
        assert (first.backend, first.resource, first.shares) == (Isolation.SHIM, contract.RESOURCE_VGPU, (share(0, 600),))
        ledger = Ledger().granting(first, at.inventory, at.shares_per_gpu)
        assert granted(claim_object("fits", result(0, mib=300)), replace(at, ledger=ledger), name="fits")
        assert refused(claim_object("train", result(0, mib=301)), replace(at, ledger=ledger)).reason is Reason.OVERCOMMITTED

    @pytest.mark.parametrize("first_is_share", [True, False])
    def test_gpu_has_shares_or_other_instances(self, first_is_share):
        at = node(inventory=self.ON_DEMAND)
        wanted = [result(0, mib=100), result("gpu-0-mig-1g10gb-0", mib=None, consumedCapacity=None)]
        first, second = wanted if first_is_share else reversed(wanted)
        ledger = Ledger().granting(granted(claim_object("first", first), at, name="first"), at.inventory, at.shares_per_gpu)
        refusal = refused(claim_object("train", second), replace(at, ledger=ledger))
        assert refusal.reason is Reason.OVERCOMMITTED
        assert ("which has MIG instances in use" in refusal.message) is not first_is_share
        assert "Already granted there: claim default/first" in refusal.message

    def test_request_of_gpu_and_instance_is_refused(self):
        mixed = claim_object("train", result(self.NAMES[0], mib=None), result(1))
        with pytest.raises(ContractError, match="GPUs and MIG instances"):
            plan(mixed, node(inventory=self.INVENTORY))
