"""What the API answers, in our own types; what cannot be read is an error of its own kind."""

import json
from typing import Any

import pytest

from program.api_server import ApiServer
from scheduler_plugin.adapters.kube import KubeConnection, KubePods
from scheduler_plugin.errors import KubeApiError
from tests.fakes.overloaded_api import RETRY_AFTER_SECONDS, overloaded_api
from tests.unit.scheduler_plugin.api import pod_object


class Connection:
    """Answers every request with one body."""

    def __init__(self, body: Any) -> None:
        self.body = json.dumps(body).encode()

    async def request(self, method: str, path: str) -> bytes:
        return self.body


@pytest.mark.parametrize(
    "answer", [[], pod_object() | {"spec": {"containers": [{"name": "c", "resources": {"requests": {"cpu": "lots"}}}]}}]
)
async def test_a_pod_that_cannot_be_read_is_an_error_of_the_api(answer):
    with pytest.raises(KubeApiError, match="cannot be read"):
        await KubePods(Connection(answer)).get_pod("team", "p1")


async def test_when_to_come_again_is_read_from_the_answer():
    with overloaded_api() as url:
        connection = KubeConnection(ApiServer(url, None, None))
        try:
            with pytest.raises(KubeApiError, match="HTTP 429") as caught:
                await connection.request("GET", "/api/v1/pods")
        finally:
            await connection.close()
    assert caught.value.retry_after_seconds == RETRY_AFTER_SECONDS
