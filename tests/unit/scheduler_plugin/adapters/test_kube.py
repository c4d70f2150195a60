"""What the API answers, in our own types; what cannot be read is an error of its own kind."""

import json
from typing import Any

import pytest

from scheduler_plugin.adapters.kube import KubePods
from scheduler_plugin.errors import KubeApiError
from tests.unit.scheduler_plugin.api import pod_object


class Connection:
    """Answers each request with the next body."""

    def __init__(self, *bodies: Any) -> None:
        self.bodies = [json.dumps(body).encode() for body in bodies]
        self.paths: list[str] = []

    async def request(self, method: str, path: str, *, seconds: float = 0.0) -> bytes:
        self.paths.append(path)
        return self.bodies.pop(0)


@pytest.mark.parametrize(
    "answer", [[], pod_object() | {"spec": {"containers": [{"name": "c", "resources": {"requests": {"cpu": "lots"}}}]}}]
)
async def test_a_pod_that_cannot_be_read_is_an_error_of_the_api(answer):
    with pytest.raises(KubeApiError, match="cannot be read"):
        await KubePods(Connection(answer)).get_pod("team", "p1")


async def test_pods_that_succeeded_are_read_page_by_page():
    pages = [{"metadata": {"continue": "next"}, "items": [pod_object("p1")]}, {"metadata": {}, "items": [pod_object("p2")]}]
    connection = Connection(*pages)
    assert [pod.name for pod in await KubePods(connection).succeeded_pods("team")] == ["p1", "p2"]
    path = "/api/v1/namespaces/team/pods?fieldSelector=status.phase%3DSucceeded&limit=500"
    assert connection.paths == [path, f"{path}&continue=next"]


async def test_pods_that_cannot_be_read_are_an_error_of_the_api():
    with pytest.raises(KubeApiError, match="cannot be read"):
        await KubePods(Connection({"metadata": {}, "items": [{"spec": 5}]})).succeeded_pods("team")
