import pytest

from agent.core.identity import Holder, cdi_name, device_uuid_of, find_holder, grant_id
from agent.core.refusal import Reason, Refusal
from proto.model import ContainerSpec, Pod
from tests.unit.agent.builders import SECRET, VGPU, held, ids, limits, pod


def lookup(*pods: Pod):
    return lambda namespace, name: next((one for one in pods if (one.namespace, one.name) == (namespace, name)), None)


def reason(found: Holder | Refusal) -> Reason:
    assert isinstance(found, Refusal), found
    return Reason(found.reason)


class TestGrantId:
    def test_it_does_not_depend_on_the_order_of_the_ids(self):
        assert grant_id(SECRET, VGPU, ["a", "b"]) == grant_id(SECRET, VGPU, ["b", "a"])

    def test_it_tells_secrets_resources_and_ids_apart(self):
        names = {
            grant_id(SECRET, VGPU, ["a", "b"]),
            grant_id(b"t" * 32, VGPU, ["a", "b"]),
            grant_id(SECRET, "nvidia.com/mig-1g.10gb", ["a", "b"]),
            grant_id(SECRET, VGPU, ["ab"]),
            grant_id(SECRET, VGPU, ["a"]),
        }
        assert len(names) == 5

    def test_it_is_a_valid_cdi_device_name(self):
        name = grant_id(SECRET, VGPU, ["a"])
        assert len(name) == 24
        assert name.isalnum()
        assert name == name.lower()
        assert cdi_name(name) == f"aliquot.dev/vgpu={name}"


def test_a_replica_names_its_gpu_and_a_mig_id_names_itself():
    assert device_uuid_of("GPU-1::15") == "GPU-1"
    assert device_uuid_of("MIG-7") == "MIG-7"


class TestFindHolder:
    def test_the_container_with_exactly_these_ids_is_the_holder(self):
        listing = [held(pod("a"), ids("0:0")), held(pod("b"), ids("0:0", "1:0")), held(pod("c"), ids("1:1"))]
        assert find_holder(listing, VGPU, ids("0:0", "1:0"), lookup()) == Holder("default", "b", "main")

    def test_another_resource_with_the_same_ids_does_not_count(self):
        listing = [held(pod("a"), ids("0:0"), resource="nvidia.com/other")]
        assert reason(find_holder(listing, VGPU, ids("0:0"), lookup())) is Reason.UNKNOWN_HOLDER

    def test_of_two_pods_listed_with_the_ids_the_active_one_holds_them(self):
        listing = [held(pod("dead"), ids("0:0")), held(pod("new"), ids("0:0"))]
        assert find_holder(listing, VGPU, ids("0:0"), lookup(pod("new"))) == Holder("default", "new", "main")

    def test_two_active_pods_with_the_same_ids_are_refused(self):
        listing = [held(pod("a"), ids("0:0")), held(pod("b"), ids("0:0"))]
        assert reason(find_holder(listing, VGPU, ids("0:0"), lookup(pod("a"), pod("b")))) is Reason.AMBIGUOUS_HOLDER

    @pytest.mark.parametrize(
        ("init_asks", "started", "app_ids"),
        [
            pytest.param(1, ids("0:0"), ids("0:0", "1:0"), id="the app container holds more"),
            pytest.param(2, ids("0:0", "1:0"), ids("0:0"), id="the app container holds fewer"),
        ],
    )
    def test_an_init_container_is_known_by_the_ids_it_shares_with_its_pod(self, init_asks, started, app_ids):
        of = pod("a", ContainerSpec("warm-up", limits(init_asks), init=True), ContainerSpec("main", limits(len(app_ids))))
        assert find_holder([held(of, app_ids)], VGPU, started, lookup(of)) == Holder("default", "a", "warm-up")

    def test_a_sidecar_is_listed_by_itself_and_never_guessed(self):
        of = pod("a", ContainerSpec("side", limits(1), init=True, restartable=True), ContainerSpec("main", limits(2)))
        assert reason(find_holder([held(of, ids("0:0", "1:0"))], VGPU, ids("0:0"), lookup(of))) is Reason.UNKNOWN_HOLDER

    def test_two_init_containers_that_could_be_meant_are_refused(self):
        of = pod("a", ContainerSpec("x", limits(1), init=True), ContainerSpec("y", limits(1), init=True), ContainerSpec("main", limits(2)))
        assert reason(find_holder([held(of, ids("0:0", "1:0"))], VGPU, ids("0:0"), lookup(of))) is Reason.AMBIGUOUS_HOLDER

    def test_ids_that_merely_overlap_are_no_sign(self):
        of = pod("a", ContainerSpec("init", limits(2), init=True), ContainerSpec("main", limits(2)))
        assert reason(find_holder([held(of, ids("0:0", "1:0"))], VGPU, ids("0:0", "2:0"), lookup(of))) is Reason.UNKNOWN_HOLDER

    def test_ids_nobody_holds_are_refused_with_what_happens_next(self):
        found = find_holder([], VGPU, ids("0:0"), lookup())
        assert reason(found) is Reason.UNKNOWN_HOLDER
        assert "retry" in found.message
