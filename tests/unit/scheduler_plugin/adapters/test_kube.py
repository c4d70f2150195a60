"""What the API answers, in our own types; what cannot be read is an error of its own kind."""

import json
from typing import Any

import pytest

from scheduler_plugin.adapters.kube import KubePods
from scheduler_plugin.errors import KubeApiError
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
