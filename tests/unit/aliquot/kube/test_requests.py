# SPDX-License-Identifier: Apache-2.0
import pytest

from aliquot.kube import requests


@pytest.mark.parametrize(("path", "want"), [("/x", "/x?a=1&b=%2F"), ("/x?y=z", "/x?y=z&a=1&b=%2F")])
def test_options_follow_those_of_the_path(path, want):
    assert requests.with_options(path, a="1", b="/") == want
    assert requests.with_options(path) == path


def test_names_are_quoted_in_paths():
    assert requests.pod_path("team", "a/b", "eviction") == "/api/v1/namespaces/team/pods/a%2Fb/eviction"
    assert requests.object_path("/api/v1/nodes", "n?1") == "/api/v1/nodes/n%3F1"
    assert requests.namespaced("leases", "team", "apis/coordination.k8s.io/v1") == "/apis/coordination.k8s.io/v1/namespaces/team/leases"


def test_json_pointer_escapes_each_key():
    assert requests.json_pointer("status", "capacity", "nvidia.com/vgpu~x") == "/status/capacity/nvidia.com~1vgpu~0x"


def test_eviction_names_the_uid_and_may_be_tried_only():
    assert requests.eviction("team", "a", "u1")["deleteOptions"] == {"preconditions": {"uid": "u1"}}
    assert requests.eviction("team", "a", "u1", dry_run=True)["deleteOptions"] == {"preconditions": {"uid": "u1"}, "dryRun": ["All"]}


@pytest.mark.parametrize("length", [1024, 1025])
def test_long_message_of_an_event_is_cut(length):
    event = requests.event({"name": "e"}, {"kind": "Pod"}, "us", 86_400.5, type="Normal", reason="Why", message="x" * length)
    assert len(event["message"]) == 1024
    assert event["message"].endswith("…") is (length > 1024)
    assert event["firstTimestamp"] == event["lastTimestamp"] == "1970-01-02T00:00:00Z"


def test_moments_are_written_as_the_api_does():
    assert requests.timestamp(0.9) == "1970-01-01T00:00:00Z"
    assert requests.micro_timestamp(0.5) == "1970-01-01T00:00:00.500000Z"
