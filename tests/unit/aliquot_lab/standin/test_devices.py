# SPDX-License-Identifier: Apache-2.0
import random

import pytest

from aliquot_lab.standin.devices import (
    Allocation,
    AllocationError,
    CheckpointError,
    DeviceTable,
    PluginDevice,
    decode_checkpoint,
    encode_checkpoint,
)

RESOURCE = "example.com/device"


def table(*ids, unhealthy=(), held=()):
    made = DeviceTable()
    made.replace(RESOURCE, [PluginDevice(device_id, device_id not in unhealthy) for device_id in ids])
    made.allocations = [Allocation(pod, "main", RESOURCE, tuple(device_ids), b"answer") for pod, device_ids in held]
    return made


def candidates(of, count, *, pod="new", reusable=(), resource=RESOURCE, align=False):
    return of.candidates(Allocation(pod, "main", resource, (), b""), count, reusable, random.Random(0), align=align)


def test_free_and_healthy_devices_are_offered():
    found = candidates(table("a", "b", "c", "d", unhealthy=("b",), held=[("old", ["c"])]), 1)
    assert sorted(found.pool) == ["a", "d"]
    assert found.missing == 1


def test_reused_devices_are_taken_before_free_ones():
    found = candidates(table("a", "b", held=[("new-init", ["a"])]), 2, reusable=("a",))
    assert (found.must_include, found.pool, found.missing) == (("a",), ("b",), 1)


def test_a_container_that_holds_its_devices_gets_no_others():
    assert candidates(table("a", "b", held=[("new", ["a"])]), 1) is None


@pytest.mark.parametrize(
    ("of", "count", "resource", "complaint"),
    [
        pytest.param(table("a"), 2, RESOURCE, "Requested: 2, Available: 1", id="too few"),
        pytest.param(table("a", unhealthy=("a",)), 1, RESOURCE, "no healthy devices present", id="none healthy"),
        pytest.param(table("a"), 1, "example.com/other", "unregistered device", id="unregistered"),
        pytest.param(table("a", "b", held=[("new", ["a"])]), 2, RESOURCE, "from 1 to 2", id="request changed"),
        pytest.param(
            table("a", "b", unhealthy=("a",), held=[("new", ["a"])]), 1, RESOURCE, "no longer healthy", id="held became unhealthy"
        ),
    ],
)
def test_unserved_request_has_reason(of, count, resource, complaint):
    with pytest.raises(AllocationError, match=complaint):
        candidates(of, count, resource=resource)


def test_devices_of_ended_pods_are_free_again():
    made = table("a", "b", held=[("old", ["a"]), ("alive", ["b"])])
    made.release_all_but({"alive"})
    assert made.in_use(RESOURCE) == {"b"}


def test_a_resource_stays_known_while_a_container_holds_it():
    made = table("a", held=[("pod", ["a"])])
    del made.advertised[RESOURCE]
    assert made.manages(RESOURCE)
    made.release_all_but(())
    assert not made.manages(RESOURCE)


def test_a_checkpoint_brings_allocations_back_and_devices_only_by_name():
    made = table("a", "b", held=[("pod", ["b", "a"])])
    back = decode_checkpoint(encode_checkpoint(made))
    assert back.in_use(RESOURCE) == {"a", "b"}
    assert back.allocations[0].response == b"answer"
    assert back.advertised == {RESOURCE: {}}


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[]", b'{"Data": {}, "Checksum": 1}', encode_checkpoint(table("a")).replace(b'"a"', b'"z"')]
)
def test_a_damaged_checkpoint_is_an_error(content):
    with pytest.raises(CheckpointError):
        decode_checkpoint(content)


def test_numa_alignment_prefers_the_node_with_most_room():
    made = DeviceTable()
    made.replace(
        RESOURCE,
        [PluginDevice(f"{node}{number}", healthy=True, numa_nodes=(node,)) for node, room in ((0, 2), (1, 5)) for number in range(room)],
    )
    assert {device_id[0] for device_id in candidates(made, 2, align=True).pool} == {"1"}
