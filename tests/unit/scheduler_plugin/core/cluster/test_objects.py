# SPDX-License-Identifier: Apache-2.0
"""Pods from the API are reduced to what the scheduler reads, for any request."""

import json

import msgspec
import pytest

from scheduler_plugin.core.cluster.objects import MOST
from scheduler_plugin.core.cluster.pods import PodFacts
from scheduler_plugin.core.cluster.state import ClusterState
from scheduler_plugin.wiring.cluster import decode_pod
from tests.unit.scheduler_plugin.api import pod_object
from tests.unit.scheduler_plugin.builders import make_node


def pod_text(uid: str, **requests: str) -> bytes:
    amounts = ",".join(f'"{name}":"{amount}"' for name, amount in requests.items())
    spec = f'{{"nodeName":"n1","containers":[{{"name":"main","resources":{{"requests":{{{amounts}}}}}}}]}}'
    return f'{{"metadata":{{"name":"{uid}","namespace":"team","uid":"{uid}"}},"spec":{spec}}}'.encode()


def decoded(text: bytes) -> PodFacts:
    return decode_pod(msgspec.Raw(text))


@pytest.mark.parametrize("requests", [{"cpu": "9E"}, {"memory": "9E"}, {"cpu": "9E", "memory": "8388607Ti"}], ids=str)
def test_impossible_amounts_count_as_maximum_and_end_no_pod(requests):
    state = ClusterState()
    state.set_gpu_node(make_node("n1"))
    state.set_host("n1", 64_000, 512 * 1024)
    pods = [decoded(pod_text(f"u{number}", **requests)) for number in range(200)]
    for pod in pods:
        assert max(pod.cpu_milli, pod.memory_mib) == MOST
        state.set_pod(pod)
    state.columns.derive()
    assert int(state.columns.cpu_free_milli[0]) == 64_000 - sum(pod.cpu_milli for pod in pods)
    assert int(state.columns.ram_free_mib[0]) == 512 * 1024 - sum(pod.memory_mib for pod in pods)


def test_terminating_pod_reports_when_grace_period_is_over():
    text = pod_text("u1").replace(b'"uid":"u1"', b'"uid":"u1","deletionTimestamp":"1970-01-01T00:01:40Z"')
    assert (decoded(text).deletion_requested, decoded(text).ends_by) == (True, 100.0)
    assert decoded(pod_text("u1")).ends_by is None


@pytest.mark.parametrize(
    ("is_ending", "reason", "is_preempted"),
    [(True, "PreemptionByScheduler", True), (True, "EvictionByEvictionAPI", False), (False, "PreemptionByScheduler", False)],
)
def test_pod_that_ends_for_another_is_known_by_its_condition(is_ending, reason, is_preempted):
    pod = json.loads(pod_text("u1"))
    pod["metadata"] |= {"deletionTimestamp": "2026-11-29T10:00:00Z"} if is_ending else {}
    pod["status"] = {"phase": "Running", "conditions": [{"type": "DisruptionTarget", "status": "True", "reason": reason}]}
    assert decoded(json.dumps(pod).encode()).is_preempted is is_preempted


@pytest.mark.parametrize(
    ("fields", "uid"), [({"controller": "job", "vgpu": "1"}, "job"), ({"vgpu": "1"}, ""), ({"controller": "job"}, "")], ids=str
)
def test_pod_with_gpus_names_its_controller(fields, uid):
    assert decode_pod(msgspec.Raw(json.dumps(pod_object(**fields)).encode())).controller_uid == uid
