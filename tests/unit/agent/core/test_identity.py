# SPDX-License-Identifier: Apache-2.0
import pytest

from agent.core.identity import Claim, RememberedDevices, cdi_name, device_uuid_of, find_claim, grant_id, starting_container
from agent.core.refusal import Reason, Refusal
from aliquot.contract.model import ContainerSpec, ContainerState, ContainerStatus, Pod
from tests.unit.agent.builders import SECRET, VGPU, held, ids, limits, pod


class Known:
    """The pods that the API has reported."""

    def __init__(self, *pods: Pod) -> None:
        self._pods = pods

    def startable(self, namespace: str, name: str) -> Pod | None:
        return next((one for one in self._pods if (one.namespace, one.name) == (namespace, name)), None)

    def all_startable(self) -> tuple[Pod, ...]:
        return self._pods


def remembered(of: Pod, device_ids: frozenset[str], container: str = "main") -> RememberedDevices:
    return RememberedDevices(of.uid, container, VGPU, device_ids)


def find(listing, device_ids, *pods: Pod, memory=(), last_look: bool = False) -> Claim | Refusal:
    return find_claim(listing, memory, VGPU, device_ids, Known(*pods), last_look=last_look)


def init(name: str, vgpus: int = 1, *, restartable: bool = False) -> ContainerSpec:
    return ContainerSpec(name, limits(vgpus), init=True, restartable=restartable)


def app(vgpus: int = 1, name: str = "main") -> ContainerSpec:
    return ContainerSpec(name, limits(vgpus))


def reason(found: object) -> Reason:
    assert isinstance(found, Refusal), found
    return Reason(found.reason)


class TestGrantId:
    def test_it_does_not_depend_on_the_order_of_the_ids(self):
        assert grant_id(SECRET, VGPU, ["a", "b"]) == grant_id(SECRET, VGPU, ["b", "a"])

    def test_secrets_resources_and_ids_are_distinguished(self):
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


class TestFindClaim:
    def test_the_container_with_exactly_these_ids_claims_them(self):
        listing = [held(pod("a"), ids("0:0")), held(pod("b"), ids("0:0", "1:0")), held(pod("c"), ids("1:1"))]
        assert find(listing, ids("0:0", "1:0")) == Claim("default", "b", "main", frozenset())

    def test_checkpoint_gives_the_uid_of_the_pod(self):
        older, newer = pod("a", uid="uid-1"), pod("a", uid="uid-2")
        memory = [remembered(newer, ids("0:0")), remembered(older, ids("0:1")), remembered(pod("b"), ids("0:0"), "other")]
        claim = find([held(newer, ids("0:0"))], ids("0:0"), older, memory=memory)
        assert claim == Claim("default", "a", "main", frozenset({"uid-2"}))

    def test_another_resource_with_the_same_ids_does_not_count(self):
        listing = [held(pod("a"), ids("0:0"), resource="nvidia.com/other")]
        assert reason(find(listing, ids("0:0"))) is Reason.UNKNOWN_HOLDER

    def test_of_two_pods_listed_with_the_ids_the_active_one_claims_them(self):
        listing = [held(pod("dead"), ids("0:0")), held(pod("new"), ids("0:0"))]
        assert find(listing, ids("0:0"), pod("new")) == Claim("default", "new", "main", frozenset())

    def test_two_active_pods_with_the_same_ids_are_refused(self):
        listing = [held(pod("a"), ids("0:0")), held(pod("b"), ids("0:0"))]
        assert reason(find(listing, ids("0:0"), pod("a"), pod("b"))) is Reason.AMBIGUOUS_HOLDER

    @pytest.mark.parametrize(
        ("asks", "started", "app_ids"),
        [
            pytest.param(1, ids("0:0"), ids("0:0", "1:0"), id="the app container holds more"),
            pytest.param(2, ids("0:0", "1:0"), ids("0:0"), id="the app container holds fewer"),
        ],
    )
    def test_init_containers_pod_is_found_by_ids_it_passes_on(self, asks, started, app_ids):
        of = pod("a", init("warm-up", asks), app(len(app_ids)))
        assert find([held(of, app_ids)], started, of, pod("b", init("x", asks))) == Claim("default", "a", None, frozenset({"uid-a"}))

    def test_unlisted_pod_of_init_container_is_found_in_checkpoint(self):
        a, b = pod("a", init("warm-up")), pod("b", init("warm-up"))
        memory = [remembered(a, ids("0:1"), "warm-up"), remembered(b, ids("0:0"), "warm-up"), remembered(pod("dead"), ids("0:0"), "x")]
        assert find([], ids("0:0"), a, b, memory=memory) == Claim("default", "b", None, frozenset({"uid-b"}))

    def test_without_checkpoint_own_spec_counts_after_wait_for_others(self):
        a = pod("a", init("warm-up"), app(2))
        assert reason(find([], ids("0:0"), a)) is Reason.UNKNOWN_HOLDER
        assert find([], ids("0:0"), a, last_look=True) == Claim("default", "a", None, frozenset({"uid-a"}))
        assert reason(find([], ids("0:0"), a, pod("b", init("x")), last_look=True)) is Reason.AMBIGUOUS_HOLDER

    def test_checkpoint_naming_unknown_pod_causes_no_guess(self):
        memory = [remembered(pod("new"), ids("0:0"), "warm-up")]
        assert reason(find([], ids("0:0"), pod("a", init("warm-up")), memory=memory, last_look=True)) is Reason.UNKNOWN_HOLDER

    def test_a_sidecar_is_listed_by_itself_and_never_guessed(self):
        of = pod("a", init("side", restartable=True), app(2))
        assert reason(find([held(of, ids("0:0", "1:0"))], ids("0:0"), of, last_look=True)) is Reason.UNKNOWN_HOLDER

    def test_an_init_container_that_has_ended_is_not_started_again(self):
        of = pod("a", init("x"), app(2), statuses=[ContainerStatus("x", ContainerState.COMPLETED)])
        assert reason(find([held(of, ids("0:0", "1:0"))], ids("0:0"), of)) is Reason.UNKNOWN_HOLDER

    def test_ids_that_merely_overlap_are_no_sign(self):
        of = pod("a", init("init", 2), app(2))
        assert reason(find([held(of, ids("0:0", "1:0"))], ids("0:0", "2:0"), of)) is Reason.UNKNOWN_HOLDER

    def test_unheld_ids_are_refused_with_next_step(self):
        found = find([], ids("0:0"))
        assert reason(found) is Reason.UNKNOWN_HOLDER
        assert isinstance(found, Refusal)
        assert "retries" in found.message


def starting(containers, states, listed: str | None = "main", granted=(), *, last_look: bool = False, phase: str = "Pending"):
    statuses = [ContainerStatus(name, ContainerState(state)) for name, state in states.items()]
    return starting_container(pod("a", *containers, phase=phase, statuses=statuses), listed, VGPU, 1, set(granted), last_look=last_look)


class TestStartingContainer:
    ONE = (init("warm"), app())
    TWO = (init("first"), init("second"), app(2))

    def test_container_with_unshared_ids_is_identified(self):
        assert starting([app()], {}) == "main"
        assert starting([init("other", 2), app()], {}) == "main"

    def test_an_init_container_with_the_ids_of_the_app_container_comes_first(self):
        assert starting(self.ONE, {}) == "warm"

    def test_the_app_container_follows_once_it_is_known_to_have_ended(self):
        assert reason(starting(self.ONE, {"warm": "running"}, granted=["warm"])) is Reason.AMBIGUOUS_HOLDER
        assert starting(self.ONE, {"warm": "completed"}, granted=["warm"]) == "main"

    def test_container_running_by_status_is_never_the_starting_one(self):
        assert reason(starting(self.ONE, {"warm": "running"}, granted=["warm"], last_look=True)) is Reason.AMBIGUOUS_HOLDER

    def test_granted_container_not_yet_started_is_treated_as_restart_after_wait(self):
        assert reason(starting(self.ONE, {}, granted=["warm"])) is Reason.AMBIGUOUS_HOLDER
        assert starting(self.ONE, {}, granted=["warm"], last_look=True) == "warm"

    def test_one_that_failed_starts_again(self):
        assert starting(self.ONE, {"warm": "failed"}, granted=["warm"], last_look=True) == "warm"

    def test_in_a_pod_that_runs_its_init_containers_have_ended(self):
        assert starting(self.ONE, {}, phase="Running") == "main"

    def test_of_two_init_containers_the_first_that_has_not_ended_starts(self):
        assert starting(self.TWO, {}, listed=None) == "first"
        assert starting(self.TWO, {"first": "completed"}, listed=None, granted=["first"]) == "second"

    def test_one_without_devices_before_it_must_have_ended_by_the_status(self):
        containers = [ContainerSpec("setup", {}, init=True), *self.ONE]
        assert reason(starting(containers, {"setup": "running"})) is Reason.AMBIGUOUS_HOLDER
        assert starting(containers, {"setup": "completed"}) == "warm"

    def test_a_sidecar_follows_the_init_containers_before_it_only(self):
        containers = [init("warm"), init("side", restartable=True), init("late"), app(2)]
        assert starting(containers, {"warm": "completed"}, listed="side") == "side"
