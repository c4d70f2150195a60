# SPDX-License-Identifier: Apache-2.0
"""A pod's request is kept while its limits and annotations stay the same."""

from aliquot.placement.request import RequestError, pod_request
from scheduler_plugin.core.cluster import requests as module
from scheduler_plugin.core.cluster.requests import PodRequests
from tests.unit.scheduler_plugin.builders import make_pod


def test_known_request_is_parsed_again_only_for_different_pod():
    requests = PodRequests()
    first = requests.of(make_pod("u", vgpu="1", vgpu_memory="300"))
    assert requests.of(make_pod("u", vgpu="1", vgpu_memory="300")) is first
    changed = make_pod("u", annotations={"aliquot.dev/numa": "strict"}, vgpu="1", vgpu_memory="300")
    assert requests.of(changed) == pod_request(changed.gpu) != first


def test_pod_without_gpu_has_no_request():
    assert PodRequests().of(make_pod("u")) is None


def test_error_of_invalid_request_is_kept_like_a_request():
    requests, pod = PodRequests(), make_pod("u", vgpu="none")
    error = requests.of(pod)
    assert isinstance(error, RequestError)
    assert requests.of(pod) is error


def test_oldest_request_is_dropped_beyond_the_bound(monkeypatch):
    monkeypatch.setattr(module, "MAX_KEPT", 2)
    requests, pods = PodRequests(), [make_pod(f"u{number}", vgpu="1") for number in range(3)]
    first = [requests.of(pod) for pod in pods]
    assert requests.of(pods[2]) is first[2]
    assert requests.of(pods[0]) is not first[0]
