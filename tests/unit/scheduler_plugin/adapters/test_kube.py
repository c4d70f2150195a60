# SPDX-License-Identifier: Apache-2.0
"""What the API answers, in our own types; what cannot be read is an error of its own kind."""

import json
import ssl
from typing import Any, cast

import pytest
from aiohttp import web

from aliquot.kube.api_server import ApiServer
from aliquot.kube.errors import KubeApiError, KubeNotFoundError
from scheduler_plugin.adapters import kube as module
from scheduler_plugin.adapters.aiohttp_transport import REQUEST_SECONDS, KubeConnection
from scheduler_plugin.adapters.clock import SystemClock
from scheduler_plugin.adapters.kube import KubeLease, KubeObjects, KubePods
from scheduler_plugin.services.leadership import FOLLOW_SECONDS, LEASE_SECONDS, RENEW_SECONDS
from tests.fakes.overloaded_api import RETRY_AFTER_SECONDS, overloaded_api
from tests.unit.authority import Authority
from tests.unit.scheduler_plugin.api import pod_object


class Connection:
    """Answers each request with the next body."""

    def __init__(self, *bodies: Any) -> None:
        self.bodies = [json.dumps(body).encode() for body in bodies]
        self.paths: list[str] = []
        self.seconds: list[float] = []

    async def request(self, method: str, path: str, *, seconds: float = REQUEST_SECONDS, **_: Any) -> bytes:
        self.paths.append(path)
        self.seconds.append(seconds)
        return self.bodies.pop(0)


@pytest.mark.parametrize(
    "answer", [[], pod_object() | {"spec": {"containers": [{"name": "c", "resources": {"requests": {"cpu": "lots"}}}]}}]
)
async def test_a_pod_that_cannot_be_read_is_an_error_of_the_api(answer):
    with pytest.raises(KubeApiError, match="cannot be read"):
        await KubePods(cast(Any, Connection(answer))).get_pod("team", "p1")


async def test_when_to_come_again_is_read_from_the_answer():
    with overloaded_api() as url:
        connection = KubeConnection(ApiServer(url, None, None))
        try:
            with pytest.raises(KubeApiError, match="HTTP 429") as caught:
                await connection.request("GET", "/api/v1/pods")
        finally:
            await connection.close()
    assert caught.value.retry_after_seconds == RETRY_AFTER_SECONDS


async def test_followed_lease_may_be_read_more_slowly_than_own_one():
    connection = Connection(*[{"metadata": {"resourceVersion": "1"}, "spec": {}}] * 3)
    await KubeLease(cast(Any, connection), "ns", "ours", SystemClock()).write("me", 15.0, 0, None)
    await KubeLease(cast(Any, connection), "ns", "ours", SystemClock()).read()
    await KubeLease(cast(Any, connection), "ns", "theirs", SystemClock(), FOLLOW_SECONDS).read()
    assert connection.seconds == [REQUEST_SECONDS, REQUEST_SECONDS, FOLLOW_SECONDS]
    assert RENEW_SECONDS + REQUEST_SECONDS < LEASE_SECONDS


async def serve(context: ssl.SSLContext, port: int = 0) -> tuple[web.AppRunner, int]:
    """Answer every request with {} until cleaned up; return also the port."""

    async def answer(_: web.Request) -> web.Response:
        return web.json_response({})

    app = web.Application()
    app.router.add_get("/x", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port, ssl_context=context, reuse_address=True)
    await site.start()
    return runner, runner.addresses[0][1]


async def test_rotated_cluster_ca_is_trusted_without_restart_and_old_one_is_not(tmp_path):
    old, new, ca = Authority("old"), Authority("new"), tmp_path / "ca.crt"

    def write(text: bytes) -> None:
        file = tmp_path / "new file"
        file.write_bytes(text)
        file.replace(ca)  # as the kubelet does

    write(old.certificate)
    server, port = await serve(old.serving_context(tmp_path))
    connection = KubeConnection(ApiServer(f"https://127.0.0.1:{port}", None, ca))
    try:
        assert await connection.request("GET", "/x") == b"{}"
        write(old.certificate + new.certificate)
        assert await connection.request("GET", "/x") == b"{}"
        await server.cleanup()
        server, _ = await serve(new.serving_context(tmp_path), port)
        assert await connection.request("GET", "/x") == b"{}"
        write(old.certificate)
        with pytest.raises(KubeApiError, match="CERTIFICATE_VERIFY_FAILED"):
            await connection.request("GET", "/x")
        write(b"nothing")
        with pytest.raises(KubeApiError, match=r"the API's CA .*ca\.crt"):
            await connection.request("GET", "/x")
        write(new.certificate)
        assert await connection.request("GET", "/x") == b"{}"
    finally:
        await connection.close()
        await server.cleanup()


async def test_pods_that_succeeded_are_read_page_by_page():
    pages = [{"metadata": {"continue": "next"}, "items": [pod_object("p1")]}, {"metadata": {}, "items": [pod_object("p2")]}]
    connection = Connection(*pages)
    assert [pod.name for pod in await KubePods(cast(Any, connection)).succeeded_pods("team")] == ["p1", "p2"]
    path = "/api/v1/namespaces/team/pods?fieldSelector=status.phase%3DSucceeded&limit=500"
    assert connection.paths == [path, f"{path}&continue=next"]


def ended_object(name: str, finished_at: str, **limits: Any) -> dict:
    pod = pod_object(name, **limits)
    ends = [{"state": {"terminated": {"finishedAt": "2026-03-02T10:00:00Z"}}}, {"state": {"terminated": {"finishedAt": finished_at}}}]
    pod["status"] |= {"phase": "Succeeded", "startTime": "2026-03-02T09:00:00Z", "containerStatuses": ends}
    return pod


async def test_ended_pods_with_gpus_are_sorted_by_their_ends():
    late, early = ended_object("late", "2026-03-02T12:00:00Z", vgpu="1"), ended_object("early", "2026-03-02T11:00:00Z", vgpu="1")
    running = pod_object("no-end", vgpu="1")
    first = {"metadata": {"continue": "next"}, "items": [late, ended_object("cpu", "2026-03-02T11:00:00Z")]}
    connection = Connection(first, {"metadata": {}, "items": [early]}, {"metadata": {}, "items": [running]})
    ended = await KubePods(cast(Any, connection)).ended_pods()
    assert [(one.pod.name, one.ended_at - (one.pod.started_at or 0.0)) for one in ended] == [("early", 7200.0), ("late", 10800.0)]
    assert [path.partition("phase%3D")[2] for path in connection.paths] == [
        "Succeeded&limit=500",
        "Succeeded&limit=500&continue=next",
        "Failed&limit=500",
    ]


async def test_only_so_many_pages_of_ended_pods_are_read(monkeypatch):
    monkeypatch.setattr(module, "MAX_PAGES", 3)
    connection = Connection(*({"metadata": {"continue": "next"}, "items": []} for _ in range(9)))
    assert await KubePods(cast(Any, connection)).ended_pods() == []
    assert [path.partition("phase%3D")[2].partition("&")[0] for path in connection.paths] == ["Succeeded"] * 3 + ["Failed"] * 3


async def test_pods_that_cannot_be_read_are_an_error_of_the_api():
    with pytest.raises(KubeApiError, match="cannot be read"):
        await KubePods(cast(Any, Connection({"metadata": {}, "items": [{"spec": 5}]}))).succeeded_pods("team")


async def test_object_of_any_kind_is_read_by_its_path():
    connection = Connection({"spec": {"parallelism": 4}})
    path = "/apis/batch/v1/namespaces/team/jobs/j"
    assert await KubeObjects(cast(Any, connection)).get_object(path) == {"spec": {"parallelism": 4}}
    assert connection.paths == [path]


async def test_missing_object_is_none_and_unreadable_one_an_error():
    class Missing:
        async def request(self, *_: Any) -> bytes:
            raise KubeNotFoundError("404")

    assert await KubeObjects(cast(Any, Missing())).get_object("/x") is None
    with pytest.raises(KubeApiError):
        await KubeObjects(cast(Any, Connection([]))).get_object("/x")
