# SPDX-License-Identifier: Apache-2.0
"""The dashboard as a client and as a browser sees it. The browser's tests need Chromium (Debian: ``chromium``); .ci/run installs it."""

import asyncio
import gzip
import json
import os
import shutil
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Any

import promql_parser as promql
import pytest
import pytest_asyncio
from aiohttp import web

from aliquot.kube.api_server import ApiServer
from scheduler_plugin.__main__ import Scheduler
from scheduler_plugin.adapters import prometheus
from scheduler_plugin.adapters.aiohttp_transport import KubeConnection
from scheduler_plugin.adapters.http import HttpServer
from scheduler_plugin.adapters.prometheus import Prometheus
from scheduler_plugin.core.cluster.decisions import Decision
from scheduler_plugin.core.cluster.reasons import NodeReason
from scheduler_plugin.core.cluster.state import ClusterState
from scheduler_plugin.dashboard.history import POINTS, History
from scheduler_plugin.dashboard.pages import Dashboard
from scheduler_plugin.dashboard.picture import Painter
from scheduler_plugin.settings import Settings
from tests.unit.scheduler_plugin.api import FakeApi
from tests.unit.scheduler_plugin.builders import make_device, make_node, make_pod, make_share, request_of

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
in_browser = pytest.mark.skipif(BROWSER is None, reason="needs Chromium, which is not installed (Debian: apt-get install chromium)")


@dataclass
class Served:
    """A served cluster that a test may change."""

    url: str
    state: ClusterState
    waiting: list[Decision]
    prometheus: "FakePrometheus"

    async def get(self, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
        def ask() -> tuple[int, dict[str, str], bytes]:
            request = urllib.request.Request(self.url + path, headers={name.replace("_", "-"): text for name, text in headers.items()})
            try:
                with urllib.request.urlopen(request, timeout=10) as answer:
                    return answer.status, dict(answer.headers), answer.read()
            except urllib.error.HTTPError as answer:
                with answer:
                    return answer.code, dict(answer.headers), answer.read()

        return await asyncio.to_thread(ask)

    async def seen(self, fragment: str = "") -> str:
        """Return the document as Chromium has it after the scripts ran."""
        flags = ["--headless=new", "--disable-gpu", "--virtual-time-budget=2000", "--dump-dom"]
        if os.geteuid() == 0:
            flags.append("--no-sandbox")  # Chromium's sandbox refuses to run as root
        process = await asyncio.create_subprocess_exec(
            str(BROWSER), *flags, f"{self.url}/{fragment}", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        out, err = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == 0, err.decode()[-400:]
        return out.decode()


class FakePrometheus:
    """Answers range queries as Prometheus does: a grid of points, and an error for what its grammar does not know."""

    def __init__(self) -> None:
        self.queries: list[str] = []
        self.value = 3 * 2.0**30
        self.speaks = asyncio.Event()
        self.speaks.set()
        self.answer: Callable[[], web.Response] | None = None
        """Makes what is given instead of a proper answer."""
        application = web.Application()
        application.router.add_post("/prefix/api/v1/query_range", self._query_range)
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)

    async def start(self) -> str:
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        return f"http://{host}:{port}/prefix"

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _query_range(self, request: web.Request) -> web.Response:
        form = await request.post()
        self.queries.append(str(form["query"]))
        await self.speaks.wait()
        if self.answer is not None:
            return self.answer()
        promql.parse(str(form["query"]))
        start, end, step = (float(str(form[name])) for name in ("start", "end", "step"))
        values = [[start + step * number, str(self.value)] for number in range(int((end - start) / step) + 1)]
        return web.json_response({"status": "success", "data": {"resultType": "matrix", "result": [{"metric": {}, "values": values}]}})


@pytest_asyncio.fixture
async def served() -> AsyncIterator[Served]:
    waiting: list[Decision] = []
    state = ClusterState()
    fake, clock = FakePrometheus(), iter(range(1_000_000_000, 2_000_000_000, 60))
    store = Prometheus(await fake.start())
    sick = make_node("node-b", [make_device("node-b", 0, model="NVIDIA L40S")])
    state.set_gpu_node(make_node("node-a", [make_device("node-a", minor, mib=81920) for minor in range(2)]))
    state.set_gpu_node(replace(sick, devices=(replace(sick.devices[0], trouble="XID 79"),)))
    share = make_share("node-a", 0, 20480, 30)
    state.set_pod(make_pod("one", node="node-a", vgpu="1", vgpu_memory="20480", vgpu_cores="30", shares={"main": [share]}))
    painter = Painter(state)
    history = History(store, lambda: float(next(clock)))
    dashboard = Dashboard(lambda: painter.draw(waiting, leads=True, trouble="", history=True), history)
    server = HttpServer("127.0.0.1", 0, pages=dashboard.pages())
    yield Served(f"http://{await server.start()}", state, waiting, fake)
    await server.stop()
    await store.close()
    await fake.stop()


def wait_for_gpu(served: Served, name: str) -> None:
    pod = make_pod(name, vgpu="1", vgpu_memory="90000")
    served.waiting.append(Decision(pod, request_of(pod), 1.0, 1, 0, {NodeReason.MEMORY: 2}))


async def test_an_unchanged_cluster_is_not_sent_twice(served):
    status, headers, body = await served.get("/cluster.json")
    assert (status, json.loads(body)["nodes"][0]["name"]) == (200, "node-a")
    assert (await served.get("/cluster.json", If_None_Match=headers["ETag"]))[0] == 304
    served.state.drop_pod("one")
    assert (await served.get("/cluster.json", If_None_Match=headers["ETag"]))[0] == 200


async def test_what_is_sent_is_compressed_for_those_who_take_it(served):
    _, headers, body = await served.get("/cluster.json", Accept_Encoding="gzip")
    assert headers["Content-Encoding"] == "gzip"
    assert gzip.decompress(body) == (await served.get("/cluster.json"))[2]


@pytest.mark.parametrize("path", ["/", "/dashboard.js", "/dashboard.css", "/cluster.json"])
async def test_every_page_is_closed_to_other_sites(served, path):
    status, headers, _ = await served.get(path)
    assert status == 200
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    assert headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize("path", ["/../settings.py", "/%2e%2e/settings.py", "/assets/index.html"])
async def test_nothing_else_is_served(served, path):
    assert (await served.get(path))[0] == 404


@in_browser
async def test_each_gpu_is_filled_with_the_slices_of_named_pods(served):
    document = await served.seen()
    assert 'data-uuid="GPU-node-a-0"' in document
    assert "team/pod-one: 20 GiB, 30 % cores" in document
    assert "20 of 80 GiB" in document
    assert "GPU 0: XID 79" in document


@in_browser
async def test_waiting_pods_say_why(served):
    wait_for_gpu(served, "big")
    document = await served.seen()
    assert "team/pod-big" in document
    assert f"2 nodes: {NodeReason.MEMORY.sentence}" in document


@in_browser
async def test_a_pod_in_the_address_is_opened(served):
    document = await served.seen("#pod=team/pod-one")
    assert "kubectl vgpu describe pod -n team pod-one" in document
    assert "20480 MiB" in document


@in_browser
async def test_name_with_markup_is_shown_as_text(served):
    pod = make_pod("x", vgpu="1", vgpu_memory="90000")
    named = replace(pod, name="<img src=x onerror=alert(1)>")
    served.waiting.append(Decision(named, request_of(pod), 1.0, 1, 0, {NodeReason.MEMORY: 1}))
    document = await served.seen()
    assert "<img" not in document
    assert "&lt;img src=x onerror=alert(1)&gt;" in document


# --- the past ---


@pytest.mark.parametrize(
    ("subject", "matchers", "lines"),
    [
        pytest.param("", "", ["total", "promised", "used", "busy", "waiting pods"], id="cluster"),
        pytest.param("gpu=GPU-node-a-0", '{device_uuid="GPU-node-a-0"}', ["total", "promised", "used", "busy", "throttled"], id="GPU"),
        pytest.param("pod=team/pod-one", '{namespace="team", pod="pod-one"}', ["limit", "used", "busy", "throttled"], id="pod"),
    ],
)
async def test_history_of_subject_is_queried_only_from_prometheus(served, subject, matchers, lines):
    status, _, body = await served.get(f"/history.json?{subject}")
    past = json.loads(body)
    assert (status, [line["name"] for line in past["lines"]]) == (200, lines)
    assert all(len(line["points"]) == POINTS + 1 for line in past["lines"])
    assert past["end"] - past["start"] == 3600
    assert len(served.prometheus.queries) == len(lines)
    assert all(matchers in query for query in served.prometheus.queries)


@pytest.mark.parametrize(
    "parameters",
    ["gpu=x%22%7D%20or%20vector(1)", "pod=team", "pod=a/b/c", "pod=a/b%0A", "gpu=a&pod=b/c", "query=up", "span=10y", "gpu=", "pod=/x"],
)
async def test_a_browser_cannot_ask_for_anything_else(served, parameters):
    status, headers, _ = await served.get(f"/history.json?{parameters}")
    assert (status, served.prometheus.queries) == (400, [])
    assert "default-src 'none'" in headers["Content-Security-Policy"]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        pytest.param(lambda: web.Response(text="<html>"), "with an invalid body", id="another program"),
        pytest.param(lambda: web.Response(status=302, headers={"Location": "http://127.0.0.1:9/"}), "status 302", id="a redirection"),
        pytest.param(lambda: web.Response(body=b"x" * (prometheus.MAX_ANSWER_BYTES + 1)), "more than 1024 KiB", id="too much"),
        pytest.param(lambda: web.json_response({"status": "error", "error": "overloaded"}, status=503), "overloaded", id="its own error"),
        pytest.param(
            lambda: web.json_response({"status": "success", "data": {"result": [{"values": []}, {"values": []}]}}),
            "2 series",
            id="not one series",
        ),
    ],
)
async def test_a_prometheus_that_does_not_answer_so_is_reported(served, answer, said):
    served.prometheus.answer = answer
    status, _, body = await served.get("/history.json?pod=team/pod-one")
    assert status == 502
    assert said in body.decode()


async def test_silent_prometheus_delays_one_page_by_seconds_and_no_other(served, monkeypatch):
    monkeypatch.setattr(prometheus, "REQUEST_SECONDS", 0.5)
    served.prometheus.speaks.clear()
    asked = asyncio.create_task(served.get("/history.json"))
    assert (await served.get("/cluster.json"))[0] == 200
    status, _, body = await asked
    assert (status, b"no reply within 0.5 s" in body) == (502, True)
    assert len(served.prometheus.queries) <= prometheus.AT_ONCE * 2
    served.prometheus.speaks.set()
    assert (await served.get("/history.json"))[0] == 200


async def test_the_scheduler_serves_the_past_where_its_settings_name_a_prometheus():
    fake = FakePrometheus()
    async with FakeApi() as api:
        connection = KubeConnection(ApiServer(api.url, None, None))
        loopback: dict[str, Any] = {"extender_address": "127.0.0.1:0", "webhook_address": "", "metrics_address": "127.0.0.1:0"}
        settings = Settings(**loopback, dashboard_address="127.0.0.1:0", prometheus_url=await fake.start())
        scheduler, stop = Scheduler(settings, connection), asyncio.Event()
        running = asyncio.create_task(scheduler.run(stop))
        async with asyncio.timeout(60):
            while len(scheduler.addresses) < 3:  # noqa: ASYNC110 - no event reports the start
                await asyncio.sleep(0.02)
        served = Served(f"http://{scheduler.addresses['dashboard']}", ClusterState(), [], fake)
        assert json.loads((await served.get("/cluster.json"))[2])["history"] is True
        assert (await served.get("/history.json"))[0] == 200
        stop.set()
        await running
        await connection.close()
    await fake.stop()


@in_browser
async def test_a_gpu_in_the_address_is_opened_with_its_past(served):
    document = await served.seen("#gpu=GPU-node-a-0")
    assert "kubectl vgpu describe gpu GPU-node-a-0" in document
    assert "memory: total 3.0 GiB, promised 3.0 GiB, used 3.0 GiB" in document
    assert document.count("<polyline") == 5 + 5
    assert document.count("<svg") == 3 + 2


@in_browser
async def test_unavailable_history_is_reported_and_current_state_shown(served):
    served.prometheus.answer = lambda: web.json_response({"status": "error", "error": "overloaded"}, status=503)
    document = await served.seen("#pod=team/pod-one")
    assert "No history: Prometheus refused a query: overloaded" in document
    assert "20480 MiB" in document


@in_browser
async def test_a_thousand_nodes_are_drawn_and_searched(served):
    for number in range(1000):
        node = f"gpu-{number:04d}"
        served.state.set_gpu_node(make_node(node, 8))
        share = make_share(node, 3, 400)
        served.state.set_pod(make_pod(node, node=node, vgpu="1", vgpu_memory="400", shares={"main": [share]}))
    document = await served.seen("#gpu=GPU-gpu-0999-3")
    assert document.count("data-node=") == 1002
    assert document.count("data-uuid=") == 8003
    assert "team/pod-gpu-0999: 0.4 GiB" in document
    assert "gpu-0999, GPU 3" in document
