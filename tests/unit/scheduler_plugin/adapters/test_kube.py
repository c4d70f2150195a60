"""What the API answers, in our own types; what cannot be read is an error of its own kind."""

import json
from typing import Any

import pytest

from scheduler_plugin.adapters.clock import SystemClock
from scheduler_plugin.adapters.kube import REQUEST_SECONDS, KubeLease, KubePods
from scheduler_plugin.errors import KubeApiError
from scheduler_plugin.services.leadership import FOLLOW_SECONDS, LEASE_SECONDS, RENEW_SECONDS
from tests.unit.scheduler_plugin.api import pod_object


class Connection:
    """Answers every request with one body."""

    def __init__(self, body: Any) -> None:
        self.body = json.dumps(body).encode()
        self.seconds: list[float] = []

    async def request(self, method: str, path: str, *, seconds: float = REQUEST_SECONDS, **_: Any) -> bytes:
        self.seconds.append(seconds)
        return self.body


@pytest.mark.parametrize(
    "answer", [[], pod_object() | {"spec": {"containers": [{"name": "c", "resources": {"requests": {"cpu": "lots"}}}]}}]
)
async def test_a_pod_that_cannot_be_read_is_an_error_of_the_api(answer):
    with pytest.raises(KubeApiError, match="cannot be read"):
        await KubePods(Connection(answer)).get_pod("team", "p1")


async def test_a_lease_that_is_only_followed_may_take_longer_to_read_than_one_of_our_own():
    connection = Connection({"metadata": {"resourceVersion": "1"}, "spec": {}})
    await KubeLease(connection, "ns", "ours", SystemClock()).write("me", 15.0, 0, None)
    await KubeLease(connection, "ns", "ours", SystemClock()).read()
    await KubeLease(connection, "ns", "theirs", SystemClock(), FOLLOW_SECONDS).read()
    assert connection.seconds == [REQUEST_SECONDS, REQUEST_SECONDS, FOLLOW_SECONDS]
    assert RENEW_SECONDS + REQUEST_SECONDS < LEASE_SECONDS
