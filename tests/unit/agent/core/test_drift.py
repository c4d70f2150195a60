# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.core.drift import CURES, Cure, DriftKind, FilesOfGrant, Snapshot, find_drifts
from agent.core.limits import DeviceFacts, FailPolicy, limits_of
from agent.core.region_layout import Limits
from aliquot import contract
from aliquot.contract.model import ContainerSpec, ContainerState, ContainerStatus, CoresMode, Preferences, Priority
from aliquot.contract.units import MIB
from tests.unit.agent.builders import VGPU, assigned, grant, held, ids, limits, pod, share
from tests.unit.agent.claim_builders import claim_grant

RUNNING = (ContainerStatus("main", ContainerState.RUNNING, "c1"),)
OWNER = pod("a", phase="Running", statuses=RUNNING, annotations=assigned("uid-a", main=[share(0)]))
GRANT = grant(ids("0:0"), share(0), of=OWNER)
INTACT = FilesOfGrant(GRANT, limits_of(GRANT, FailPolicy.CLOSED), region=True, spec="digest", written_spec="digest")


def snapshot(**changed) -> Snapshot:
    """A node with one container on which all agree, except for what is changed."""
    whole = Snapshot(
        {GRANT.grant_id: GRANT},
        {GRANT.grant_id: INTACT},
        pods_by_uid={OWNER.uid: OWNER},
        held=[held(OWNER, ids("0:0"))],
        device_uuids={"GPU-0", "GPU-1"},
        resources={VGPU},
    )
    return replace(whole, **changed)


def kinds(**changed) -> list[DriftKind]:
    return [drift.kind for drift in find_drifts(snapshot(**changed))]


def with_files(**changed) -> dict:
    return {"files": {GRANT.grant_id: replace(INTACT, **changed)}}


def with_pod(**changed) -> dict:
    one = replace(OWNER, **changed)
    return {"pods_by_uid": {one.uid: one}}


def test_node_with_agreeing_sources_has_no_drift():
    assert kinds() == []


def test_missing_source_gives_no_drift():
    assert kinds(pods_by_uid=None, held=None, device_uuids=None) == []
    assert kinds(held=None) == []


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        pytest.param({"row": None}, DriftKind.LOST_ROW, id="row gone"),
        pytest.param({"row": replace(GRANT, pod_uid="another")}, DriftKind.LOST_ROW, id="row of another"),
        pytest.param({"limits": None}, DriftKind.LOST_FILES, id="limits gone"),
        pytest.param({"region": False}, DriftKind.LOST_FILES, id="region gone"),
        pytest.param({"limits": Limits(())}, DriftKind.CHANGED_LIMITS, id="limits of no device"),
        pytest.param({"spec": None}, DriftKind.LOST_SPEC, id="spec gone"),
        pytest.param({"spec": "other"}, DriftKind.LOST_SPEC, id="spec changed"),
    ],
)
def test_wrong_files_are_written_again(files, kind):
    (drift,) = find_drifts(snapshot(**with_files(**files)))
    assert (drift.kind, drift.cure, drift.subject, drift.pod_uid) == (kind, Cure.REWRITE, GRANT.grant_id, "uid-a")


BURSTING = Preferences(memory_burst=1.5, priority=Priority.LOW)
WITH_CORES = replace(GRANT, shares=(share(0, cores=30),))


def with_limits(written: Limits, found: Limits | None = None, *, of=WITH_CORES, **changed) -> dict:
    """The grant's files: as the agent wrote the limits, and as they are found, or its device's with something changed."""
    (device,) = written.devices
    found = found or replace(written, devices=(replace(device, **changed),))
    return {"grants": {of.grant_id: of}, **with_files(row=of, limits=found, written_limits=written), "pods_by_uid": None}


@pytest.mark.parametrize(
    "changed",
    [
        {"sm_percent": 99},
        {"sm_percent": 0},
        {"memory_bytes": 101 * MIB},
        {"burst_bytes": 800 * MIB},
        {"priority": 1},
        {"priority_line": 0},
        {"sm_weight": 30},
        {"paused": True},
    ],
    ids=lambda changed: "-".join(changed),
)
def test_limits_that_differ_from_written_ones_are_written_again(changed):
    written = limits_of(WITH_CORES, FailPolicy.CLOSED, BURSTING, DeviceFacts(priority_lines={"GPU-0": 3}))
    assert kinds(**with_limits(written)) == []
    assert kinds(**with_limits(written, **changed)) == [DriftKind.CHANGED_LIMITS]


def test_another_fail_policy_in_the_limits_is_drift():
    written = limits_of(WITH_CORES, FailPolicy.CLOSED)
    assert kinds(**with_limits(written, replace(written, fail_open=True))) == [DriftKind.CHANGED_LIMITS]


def test_measurement_newer_than_limits_is_no_drift():
    written = limits_of(WITH_CORES, FailPolicy.CLOSED, BURSTING)
    assert kinds(**with_limits(written, overhead_bytes=7 * MIB, context_bytes=300 * MIB)) == []


@pytest.mark.parametrize(
    ("cores", "changed", "drifts"),
    [
        pytest.param(30, {"sm_percent": 99}, [], id="borrowed"),
        pytest.param(30, {"sm_percent": 29}, [DriftKind.CHANGED_LIMITS], id="less than it is entitled to"),
        pytest.param(30, {"sm_percent": 100}, [DriftKind.CHANGED_LIMITS], id="no ceiling"),
        pytest.param(30, {"sm_weight": 60, "sm_percent": 60}, [DriftKind.CHANGED_LIMITS], id="another weight"),
        pytest.param(100, {}, [], id="the weight of a whole GPU"),
    ],
)
def test_borrowed_sm_limit_above_the_grant_is_no_drift(cores, changed, drifts):
    one = replace(GRANT, shares=(share(0, cores=cores),))
    written = limits_of(one, FailPolicy.CLOSED, Preferences(cores_mode=CoresMode.WEIGHT))
    assert kinds(**with_limits(written, of=one, **changed)) == drifts


def test_unknown_limits_are_accepted_as_found_except_granted_amounts():
    before = limits_of(WITH_CORES, FailPolicy.OPEN, BURSTING)
    files = FilesOfGrant(WITH_CORES, before, region=True, spec="digest")
    node = {"grants": {GRANT.grant_id: WITH_CORES}, "pods_by_uid": None}
    assert kinds(**node, files={GRANT.grant_id: files}) == []
    (device,) = before.devices
    more = replace(files, limits=replace(before, devices=(replace(device, sm_percent=99),)))
    assert kinds(**node, files={GRANT.grant_id: more}) == [DriftKind.CHANGED_LIMITS]


def test_spec_unknown_to_agent_is_accepted_as_found():
    assert kinds(**with_files(written_spec=None)) == []


def test_files_of_no_grant_are_removed():
    (drift,) = find_drifts(snapshot(files={GRANT.grant_id: INTACT, "stray": FilesOfGrant(spec="x")}))
    assert (drift.kind, drift.cure, drift.subject) == (DriftKind.STRAY_FILES, Cure.REMOVE, "stray")


def test_grant_of_deleted_pod_with_other_holder_waits():
    (drift,) = find_drifts(snapshot(pods_by_uid={}, waiting=(GRANT,)))
    assert (drift.kind, drift.cure) == (DriftKind.POD_GONE, Cure.WAIT)


def test_a_running_container_that_kubelet_forgot_is_drift():
    assert kinds(held=[]) == [DriftKind.UNLISTED]


def test_waiting_container_may_still_get_other_ids():
    assert kinds(held=[], **with_pod(statuses=())) == []
    assert kinds(held=[held(OWNER, ids("1:1"))], **with_pod(statuses=())) == []


def test_ending_or_deleted_pod_is_no_drift():
    assert kinds(held=[], **with_pod(phase="Succeeded")) == []
    assert kinds(held=[], **with_pod(deletion_requested=True)) == []


def test_an_ordinary_init_container_is_never_listed():
    spec = ContainerSpec("main", limits(), init=True)
    assert kinds(held=[], **with_pod(containers=(spec,))) == []


def test_a_sidecar_is():
    spec = ContainerSpec("main", limits(), init=True, restartable=True)
    assert kinds(held=[], **with_pod(containers=(spec,))) == [DriftKind.UNLISTED]


def test_other_ids_of_a_running_container_are_drift():
    assert kinds(held=[held(OWNER, ids("0:7"))]) == [DriftKind.IDS_DIFFER]


def test_another_assignment_of_the_pod_is_drift_where_assignments_bind():
    moved = with_pod(annotations=assigned("uid-a", main=[share(1)]))
    assert kinds(**moved) == [DriftKind.ASSIGNMENT_DIFFERS]
    assert kinds(**moved, assigned=False) == []


def test_pod_placed_before_assignments_were_binding_is_no_drift():
    assert kinds(**with_pod(annotations={})) == []


@pytest.mark.parametrize("annotations", [{contract.ANNOTATION_ASSIGNMENT: "nonsense"}, assigned("uid-a", other=[share(0)])])
def test_assignment_without_the_container_is_drift(annotations):
    assert kinds(**with_pod(annotations=annotations)) == [DriftKind.ASSIGNMENT_DIFFERS]


def test_more_memory_than_was_granted_in_the_assignment_is_drift():
    assert kinds(**with_pod(annotations=assigned("uid-a", main=[share(0, 101)]))) == [DriftKind.ASSIGNMENT_DIFFERS]


MIG_SMALL, MIG_LARGE = f"{contract.RESOURCE_MIG_PREFIX}1g.10gb", f"{contract.RESOURCE_MIG_PREFIX}3g.40gb"
PROFILES = {"MIG-2-0": "1g.10gb", "MIG-2-1": "1g.10gb", "MIG-2-4": "3g.40gb"}


def of_assignment(*granted, assigned_to, profiles=PROFILES) -> list[DriftKind]:
    """Kinds of drift of one container with a grant for each resource, by resource and share."""
    owner = replace(OWNER, annotations=assigned(OWNER.uid, main=[share(name) for name in assigned_to]))
    grants = [grant(frozenset({name}), share(name), of=owner, resource=resource) for resource, name in granted]
    files = {
        one.grant_id: FilesOfGrant(one, limits_of(one, FailPolicy.CLOSED), region=True, spec="digest", written_spec="digest")
        for one in grants
    }
    listing = [held(owner, frozenset({name}), resource=resource) for resource, name in granted]
    by_id = {one.grant_id: one for one in grants}
    return kinds(
        grants=by_id, files=files, pods_by_uid={owner.uid: owner}, held=listing, device_uuids=None, resources=set(), profiles=profiles
    )


def test_another_mig_instance_than_the_assigned_one_is_drift():
    assert of_assignment((MIG_SMALL, "MIG-2-0"), assigned_to=["MIG-2-0"]) == []
    assert of_assignment((MIG_SMALL, "MIG-2-0"), assigned_to=["MIG-2-1"]) == [DriftKind.ASSIGNMENT_DIFFERS]
    assert of_assignment((MIG_SMALL, "MIG-2-0"), assigned_to=["MIG-2-4"]) == [DriftKind.ASSIGNMENT_DIFFERS]


def test_assignment_with_two_profiles_is_compared_per_profile():
    both = [(MIG_SMALL, "MIG-2-0"), (MIG_LARGE, "MIG-2-4")]
    assert of_assignment(*both, assigned_to=["MIG-2-0", "MIG-2-4"]) == []
    assert of_assignment(*both, assigned_to=["MIG-2-1", "MIG-2-4"]) == [DriftKind.ASSIGNMENT_DIFFERS]


def test_instance_missing_from_inventory_is_still_compared():
    both = [(MIG_SMALL, "MIG-2-0"), (MIG_LARGE, "MIG-2-4")]
    assert of_assignment(*both, assigned_to=["MIG-2-0", "MIG-2-4"], profiles={}) == []
    assert of_assignment(*both, assigned_to=["MIG-2-1", "MIG-2-4"], profiles={}) == [DriftKind.ASSIGNMENT_DIFFERS]


def test_missing_device_is_drift():
    assert kinds(device_uuids={"GPU-1"}) == [DriftKind.UNKNOWN_DEVICE]


@pytest.mark.parametrize("listed", [True, False])
def test_running_container_without_grant_is_drift_with_or_without_ids(listed):
    (drift,) = find_drifts(snapshot(grants={}, files={}, **({} if listed else {"held": []})))
    assert (drift.kind, drift.cure, str(drift.holder)) == (DriftKind.UNGRANTED, Cure.EVICT, "default/a/main")


def test_waiting_container_without_grant_is_no_drift():
    assert kinds(grants={}, files={}, **with_pod(statuses=())) == []


def test_resource_of_other_plugin_is_ignored():
    assert kinds(grants={}, files={}, **with_pod(containers=(ContainerSpec("main", {"example.com/gpu": "1", VGPU: "0"}),))) == []


def test_namesake_does_not_replace_deleted_pod():
    namesake = replace(OWNER, uid="uid-new", annotations=assigned("uid-new", main=[share(0)]))
    assert kinds(pods_by_uid={namesake.uid: namesake}) == [DriftKind.UNGRANTED]


def test_every_kind_has_a_cure():
    assert set(CURES) == set(DriftKind)


@st.composite
def nodes(draw):
    """Nodes with some pods, grants and files, all in any state."""
    grants, files, pods, listing = {}, {}, {}, []
    for number in range(draw(st.integers(0, 4))):
        given_ids, other_ids = ids(f"0:{number}"), ids(f"1:{number}")
        states = draw(st.sampled_from([(), RUNNING]))
        owner = pod(f"p{number}", phase=draw(st.sampled_from(["Pending", "Running", "Failed"])), statuses=states)
        one = grant(given_ids, share(draw(st.integers(0, 2))), of=owner)
        if draw(st.booleans()):
            grants[one.grant_id] = one
        if draw(st.booleans()):
            pods[owner.uid] = owner
        listing += draw(st.sampled_from([[], [held(owner, given_ids)], [held(owner, other_ids)]]))
        intact = FilesOfGrant(one, limits_of(one, FailPolicy.CLOSED), region=True, spec="s", written_spec="s")
        broken = draw(st.sampled_from([{}, {"row": None}, {"limits": None}, {"region": False}, {"spec": None}, {"spec": "t"}, None]))
        if broken is not None:
            files[one.grant_id] = replace(intact, **broken)
    return Snapshot(grants, files, pods, listing, {"GPU-0", "GPU-1"}, (), {VGPU}, draw(st.booleans()))


@given(nodes())
def test_cures_of_files_remove_file_drift_and_change_nothing_else(node):
    drifts = find_drifts(node)
    files = dict(node.files)
    for drift in drifts:
        if drift.cure is Cure.REMOVE:
            del files[drift.subject]
        elif drift.cure is Cure.REWRITE:
            one = node.grants[drift.subject]
            files[drift.subject] = FilesOfGrant(one, limits_of(one, FailPolicy.CLOSED), region=True, spec="w", written_spec="w")
    assert set(files) == set(node.grants)
    of_pods = [drift for drift in drifts if drift.cure is Cure.EVICT]
    assert list(find_drifts(replace(node, files=files))) == of_pods


@given(nodes())
def test_every_drift_is_reported_once_with_owner(node):
    drifts = find_drifts(node)
    assert len({(drift.kind, drift.subject) for drift in drifts}) == len(drifts)
    for drift in drifts:
        assert drift.sentence
        assert (drift.holder is None) == (drift.kind is DriftKind.STRAY_FILES)


def test_grant_of_claim_is_compared_with_files_only():
    """Kubelet lists no device IDs for it, and no scheduler of ours assigned it."""
    made = claim_grant("train", share(0), of=OWNER)
    files = replace(INTACT, row=made, limits=limits_of(made, FailPolicy.CLOSED), written_limits=None)
    both = {"grants": {GRANT.grant_id: GRANT, made.grant_id: made}}
    assert kinds(**both, files={GRANT.grant_id: INTACT, made.grant_id: files}) == []
    assert kinds(**both, files={GRANT.grant_id: INTACT, made.grant_id: replace(files, spec=None)}) == [DriftKind.LOST_SPEC]
