# SPDX-License-Identifier: Apache-2.0
import pytest

from agent.core.conflict import Evidence, find_conflict, is_our_socket, socket_name
from tests.unit.agent.builders import VGPU

MIG = "nvidia.com/mig-1g.10gb"


def test_a_free_name_has_no_conflict():
    assert find_conflict(VGPU, Evidence()) is None


def test_nvidias_plugin_for_whole_gpus_is_no_conflict():
    assert find_conflict(VGPU, Evidence(answering_sockets=["nvidia-gpu.sock", "nvidia.sock"])) is None


def test_own_ids_from_before_restart_are_no_conflict():
    assert find_conflict(VGPU, Evidence(allocatable_ids=["GPU-1::0", "GPU-1::15"])) is None
    assert find_conflict(MIG, Evidence(allocatable_ids=["MIG-1", "GPU-1::3"])) is None
    assert find_conflict(VGPU, Evidence(allocatable_ids=["MIG-1b2c"])) is None  # migStrategy: single


def test_foreign_ids_are_a_conflict():
    sentence = find_conflict(VGPU, Evidence(allocatable_ids=["GPU-1-0", "GPU-1-1"]))
    assert sentence is not None
    assert "'GPU-1-0'" in sentence
    assert "stop the other one" in sentence


@pytest.mark.parametrize(("resource", "socket"), [(VGPU, "nvidia-vgpu.sock"), (MIG, "nvidia-mig-1g.10gb.sock")])
def test_a_plugin_on_a_socket_named_after_the_resource_is_a_conflict(resource, socket):
    sentence = find_conflict(resource, Evidence(answering_sockets=["nvidia-gpu.sock", socket]))
    assert sentence is not None
    assert socket in sentence


def test_a_second_agent_is_a_conflict():
    sentence = find_conflict(VGPU, Evidence(answering_sockets=[socket_name(VGPU, "77-1")]))
    assert sentence is not None
    assert "another agent" in sentence


def test_own_plugin_of_other_resource_is_no_conflict():
    assert find_conflict(VGPU, Evidence(answering_sockets=[socket_name(MIG, "77-1")])) is None


def test_socket_names_differ_by_instance_and_resource():
    assert len({socket_name(VGPU, "1"), socket_name(VGPU, "2"), socket_name(MIG, "1")}) == 3
    assert is_our_socket(VGPU, socket_name(VGPU, "1a-2b"))
    assert not is_our_socket(VGPU, socket_name(MIG, "1a-2b"))
