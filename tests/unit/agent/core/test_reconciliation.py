# SPDX-License-Identifier: Apache-2.0
from agent.core.reconciliation import CLAIMED_GRACE_SECONDS, LISTED_GRACE_SECONDS, NodeView, orphans, plan_releases
from aliquot.contract.model import Pod
from tests.unit.agent.builders import grant, held, ids, pod

GRANT = grant(ids("0:0"), of=pod("a"))


def plan(*, pods: tuple[Pod, ...] = (), listed=(), live: bool = False, claimed: bool = False, absent_seconds: float = 0.0):
    own = frozenset({GRANT.grant_id})
    view = NodeView({one.uid: one for one in pods}, listed, own if live else frozenset(), own if claimed else frozenset())
    return plan_releases([GRANT], view, {GRANT.grant_id: absent_seconds})


def test_grant_of_running_pod_is_kept_against_all_other_sources():
    assert plan(pods=(pod("a", phase="Running"),), listed=()).release == ()


def test_a_pod_being_deleted_still_runs():
    assert plan(pods=(pod("a", phase="Running", deleting=True),)).release == ()


def test_an_ended_pods_grant_is_released_even_while_kubelet_lists_it():
    assert plan(pods=(pod("a", phase="Succeeded"),), listed=[held(pod("a"), ids("0:0"))]).release == (GRANT,)


def test_a_deleted_pods_grant_is_released():
    assert plan(listed=[held(pod("b"), ids("0:1"))]).release == (GRANT,)


def test_pod_recreated_under_same_name_loses_old_grant():
    assert plan(pods=(pod("a", uid="uid-new"),), listed=[held(pod("a"), ids("0:5"))]).release == (GRANT,)


def test_deleted_pod_with_container_still_in_kubelet_waits_a_while():
    listed = [held(pod("a"), ids("0:0"))]
    assert plan(listed=listed).waiting == (GRANT,)
    assert plan(listed=listed, absent_seconds=LISTED_GRACE_SECONDS).release == (GRANT,)


def test_an_init_containers_ids_are_listed_with_its_app_container():
    assert plan(listed=[held(pod("a"), ids("0:0", "1:0"))]).waiting == (GRANT,)


def test_memory_that_a_process_still_holds_is_never_given_away():
    assert plan(live=True, absent_seconds=10 * LISTED_GRACE_SECONDS).waiting == (GRANT,)


def test_ambiguous_lock_keeps_grant_of_deleted_pod_for_a_while():
    assert plan(claimed=True, absent_seconds=CLAIMED_GRACE_SECONDS - 1).waiting == (GRANT,)
    assert plan(claimed=True, absent_seconds=CLAIMED_GRACE_SECONDS).release == (GRANT,)


def test_without_podresources_grant_of_deleted_pod_waits_but_ended_pod_does_not():
    assert plan(listed=None).waiting == (GRANT,)
    assert plan(listed=None, pods=(pod("a", phase="Failed"),)).release == (GRANT,)


def test_files_without_a_grant_are_orphans():
    assert orphans([GRANT.grant_id, "stray"], {GRANT.grant_id: GRANT}) == ("stray",)
