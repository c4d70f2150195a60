"""What the state does not do: work that no change asks for."""

from scheduler_plugin.core.state import ClusterState
from tests.unit.scheduler_plugin.builders import make_node, make_pod


def test_an_inventory_that_changes_keeps_its_name_s_row():
    state = ClusterState()
    state.set_gpu_node(make_node("n1", 2))
    state.set_gpu_node(make_node("n2", 2))
    named, row = state.naming_count, state.row_of("n1")
    state.set_gpu_node(make_node("n1", 2, cordoned=True))
    assert (state.naming_count, state.row_of("n1")) == (named, row), "everything that was looked up by name is looked up anew"
    state.drop_gpu_node("n1")
    assert state.naming_count > named
    assert state.row_of("n1") is None


def test_a_pod_that_is_listed_again_as_it_was_changes_nothing():
    state = ClusterState()
    state.set_gpu_node(make_node("n1", 2))
    state.replace_pods([make_pod("bound", node="n1", vgpu="1"), make_pod("waits", vgpu="1")])
    changed, noted = state.columns.change_count, state.moment().position
    state.replace_pods([make_pod("bound", node="n1", vgpu="1"), make_pod("waits", vgpu="1")])
    assert (state.columns.change_count, state.moment().position) == (changed, noted)
