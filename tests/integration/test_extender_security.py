# SPDX-License-Identifier: Apache-2.0
"""Only the allowed clients may call the extender; a slow, broken or hostile one can harm neither the others nor the state."""

import asyncio
import json
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import aiohttp
import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from aliquot import contract
from aliquot.contract.gpunode import encode_gpu_node
from aliquot.kube.api_server import ApiServer
from aliquot.process.settings import SettingsError
from scheduler_plugin import __main__ as program
from scheduler_plugin.adapters import http
from scheduler_plugin.adapters.aiohttp_transport import KubeConnection
from scheduler_plugin.core.cluster.state import ClusterState
from scheduler_plugin.errors import WireError
from scheduler_plugin.extender.bind import Binder
from scheduler_plugin.extender.preempt import choose_victims
from scheduler_plugin.extender.prioritize import prioritize_nodes
from scheduler_plugin.ports import PodApi
from scheduler_plugin.settings import Settings
from scheduler_plugin.webhook.amounts import Options
from scheduler_plugin.webhook.normalise import Normaliser
from scheduler_plugin.webhook.review import Reviews
from scheduler_plugin.wiring.cluster import decode_pod
from tests.integration.test_extender import running
from tests.unit.scheduler_plugin.api import FakeApi, pod_object
from tests.unit.scheduler_plugin.builders import filter_body, make_context, make_node, make_pod, make_share

# --- who may ask ----------------------------------------------------------------------------------------------------


def test_beyond_loopback_the_extender_needs_certificates_of_both_sides():
    for flags in ([], ["--tls-cert-file=c", "--tls-key-file=k"]):
        with pytest.raises(SettingsError, match="each client that reaches it can bind pods"):
            Settings.load(["--extender-address=0.0.0.0:9410", "--webhook-address=", *flags], {})


def authority(directory: Path, name: str) -> tuple[Path, Path, Path]:
    """Make a CA and a certificate of it for 127.0.0.1; return certificate, key and CA."""
    ca, ca_key, key, request, certificate = (directory / f"{name}{end}" for end in ("-ca.crt", "-ca.key", ".key", ".csr", ".crt"))
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    extensions = directory / f"{name}.ext"
    extensions.write_text("subjectAltName=IP:127.0.0.1\n")
    signed = ["-CA", ca, "-CAkey", ca_key, "-CAcreateserial", "-days", "2", "-extfile", extensions]
    for command in (
        ["req", "-x509", *curve, "-days", "2", "-subj", f"/CN={name}-ca", "-keyout", ca_key, "-out", ca],
        ["req", *curve, "-subj", f"/CN={name}", "-keyout", key, "-out", request],
        ["x509", "-req", "-in", request, *signed, "-out", certificate],
    ):
        subprocess.run(["openssl", *map(str, command)], check=True, capture_output=True)
    return certificate, key, ca


async def test_only_clients_of_configured_authorities_are_served_including_later_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(http, "CERTIFICATE_SECONDS", 0.1)
    certificate, key, ca = authority(tmp_path, "ours")
    stranger = authority(tmp_path, "stranger")
    async with FakeApi() as api:
        await api.put("gpunodes", json.loads(encode_gpu_node(make_node("n1", 2))))
        connection = KubeConnection(ApiServer(api.url, None, None))
        scheduler = program.Scheduler(
            Settings(
                extender_address="127.0.0.1:0",
                webhook_address="",
                metrics_address="127.0.0.1:0",
                tls_cert_file=str(certificate),
                tls_key_file=str(key),
                client_ca_file=str(ca),
            ),
            connection,
        )
        stop = asyncio.Event()
        task = asyncio.create_task(scheduler.run(stop))
        while not scheduler.ready:  # noqa: ASYNC110 - readiness is a property, as /readyz reads it
            await asyncio.sleep(0.01)
        body = json.dumps({"Pod": pod_object("p", vgpu="1"), "NodeNames": ["n1"]}).encode()

        async def ask(own: tuple[Path, Path] | None) -> int:
            context = ssl.create_default_context(cafile=str(ca))
            if own is not None:
                context.load_cert_chain(*map(str, own))
            async with aiohttp.ClientSession() as session:
                address = f"https://{scheduler.addresses['extender']}/filter"
                async with session.post(address, data=body, ssl=context) as response:
                    return response.status

        assert await ask((certificate, key)) == 200
        before = scheduler.cluster.context.state.columns.change_count
        for own in (None, stranger[:2]):
            with pytest.raises(aiohttp.ClientError):
                await ask(own)
        assert scheduler.cluster.context.state.columns.change_count == before
        ca.write_bytes(ca.read_bytes() + stranger[2].read_bytes())
        for _ in range(100):
            try:
                status = await ask(stranger[:2])
                break
            except aiohttp.ClientError:
                await asyncio.sleep(0.05)
        assert status == 200
        stop.set()
        await task
        await connection.close()


# --- slow clients ---------------------------------------------------------------------------------------------------


@pytest.fixture
async def api():
    async with FakeApi() as served:
        await served.put("gpunodes", json.loads(encode_gpu_node(make_node("n1", 2))))
        yield served


HEAD = b"POST /filter HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.parametrize(
    "sent",
    [b"", HEAD[:14], HEAD + b"X-Slow: ", HEAD + b"Content-Length: 9\r\n\r\n{"],
    ids=["nothing", "half a line", "half a head", "half a body"],
)
async def test_clients_that_stop_midway_are_dropped_and_delay_no_one(api, monkeypatch, sent):
    monkeypatch.setattr(http, "FIRST_REQUEST_SECONDS", 0.3)
    monkeypatch.setattr(http, "BODY_SECONDS", 0.3)
    async with running(api) as extender:
        host, port = extender.scheduler.addresses["extender"].split(":")
        slow = [await asyncio.open_connection(host, int(port)) for _ in range(50)]
        for _, writer in slow:
            writer.write(sent)
        pod = await api.put("pods", pod_object("p", vgpu="1"))
        assert (await asyncio.wait_for(extender.filter(pod, "n1"), 1))["NodeNames"] == ["n1"]
        answers = await asyncio.wait_for(asyncio.gather(*(_rest(reader) for reader, _ in slow)), 5)
        assert all(answer == b"" or answer.startswith(b"HTTP/1.1 408") for answer in answers)
        for _, writer in slow:
            writer.close()
        assert (await extender.filter(pod, "n1"))["NodeNames"] == ["n1"]


async def _rest(reader: asyncio.StreamReader) -> bytes:
    """Read what is sent before the end of the connection; of an answer, its first line."""
    try:
        return await reader.readline()
    except ConnectionError:
        return b""


# --- hostile bodies -------------------------------------------------------------------------------------------------

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
ODD = ["1e9999999", "9" * 400, "-1", "-9E", "9E", "1Ki", "0.5", [None], {"limits": {"nvidia.com/vgpu": "x"}}, "0001-01-01T00:00:00"]
IMAGINED = {
    "metadata": {"name": "new", "labels": {"nvidia.com/gpu.count": "2", "nvidia.com/gpu.memory": "1000"}},
    "status": {"allocatable": {"cpu": "8", "memory": "64Gi", "pods": "110", "nvidia.com/vgpu": "20"}},
}
ENDING = pod_object("p", vgpu="1")
ENDING["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
CREATED = pod_object("p", vgpu="1", vgpu_memory="4Gi", annotations={contract.ANNOTATION_GPU_TYPE: "h200"})
CREATED["spec"]["containers"][0]["env"] = [{"name": contract.ENV_NVIDIA_VISIBLE_DEVICES, "value": "all"}]
CREATED["spec"] |= {"schedulerName": "default-scheduler", "tolerations": [{"key": "team", "operator": "Exists"}]}
VALID = {
    "filter": {"Pod": pod_object("p", vgpu="1", vgpu_memory="300"), "Nodes": None, "NodeNames": ["n1", "n2"]},
    "prioritize": {"Pod": pod_object("p", vgpu="1"), "Nodes": {"items": [{"metadata": {"name": "n1"}}, IMAGINED]}, "NodeNames": None},
    "filter of nodes": {"Pod": ENDING, "Nodes": {"items": [IMAGINED]}, "NodeNames": None},
    "preempt": {
        "Pod": pod_object("p", vgpu="2"),
        "NodeNameToVictims": {"n1": {"Pods": [pod_object("v", vgpu="1")], "NumPDBViolations": 0}},
        "NodeNameToMetaVictims": {"n1": {"Pods": [{"UID": "b1"}], "NumPDBViolations": 0}},
    },
    "bind": {"PodName": "p", "PodNamespace": "team", "PodUID": "uid-p", "Node": "n1"},
    "review": {
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "request": {"uid": "r", "operation": "CREATE", "object": CREATED},
    },
}


def places(inside: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every object and list of a document with each of its keys, however deep."""
    keys = inside if isinstance(inside, dict) else range(len(inside)) if isinstance(inside, list) else ()
    for key in keys:
        yield inside, key
        yield from places(inside[key])


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, bytes]:
    """Draw a valid body with one thing in it replaced, or its text cut or changed."""
    verb = draw(st.sampled_from(sorted(VALID)))
    document = json.loads(json.dumps(VALID[verb]))
    place, key = draw(st.sampled_from(list(places(document))))
    if draw(st.booleans()):
        place[key] = draw(json_values | st.sampled_from(ODD))
    elif isinstance(place, dict):
        del place[key]
    text = json.dumps(document).encode()
    at = draw(st.integers(0, len(text)))
    return verb, draw(st.sampled_from([text, text, text, text[:at], text[:at] + b"\xff" + text[at:], text[:at] + b'"' + text[at:]]))


def hostile(verb: str, timestamp: str = "2026-01-01T00:00:00Z", **amounts: str) -> tuple[str, bytes]:
    """Make a valid body with another time of deletion, or other amounts of the node."""
    document = json.loads(json.dumps({"Pod": ENDING, "Nodes": {"items": [IMAGINED]}, "NodeNames": None}))
    document["Pod"]["metadata"]["deletionTimestamp"] = timestamp
    document["Nodes"]["items"][0]["status"]["allocatable"] |= amounts
    return verb, json.dumps(document).encode()


class NoApi:
    async def bind(self, *_: object) -> None:
        raise AssertionError("nothing may be bound")

    async def get_pod(self, *_: object) -> None:
        return None


@given(bodies())
@example(hostile("filter", "0001-01-01T00:00:00"))
@example(hostile("prioritize", "0001-01-01T00:00:00+23:59"))
@example(hostile("filter", cpu="-9E"))
@example(hostile("prioritize", memory="-9E"))
@example(hostile("filter", pods="9E"))
@example(hostile("filter", **{"nvidia.com/vgpu-memory": "9E"}))
@example(
    (
        "filter",
        json.dumps({"Pod": ENDING, "Nodes": {"items": [IMAGINED]}}).encode().replace(b'"status": {"all', b'"\xff": 1, "status": {"all'),
    )
)
def test_any_body_is_answered_or_refused_and_leaves_at_most_an_expectation(drawn):
    verb, body = drawn
    state = ClusterState()
    for name in ("n1", "n2"):
        state.set_gpu_node(make_node(name, 2))
    state.set_pod(make_pod("b1", node="n1", shares={"main": [make_share("n1", 0, 700)]}, vgpu="1"))
    context = make_context(state)
    held = {uid: state.footprint_of(uid) for uid in state.pods}
    before = state.columns.change_count
    reviews = Reviews(Normaliser(Options(lambda _: {1000})), lambda _: None)
    try:
        match verb:
            case "filter" | "filter of nodes":
                json.loads(filter_body(context, body, 0.0))
            case "prioritize":
                json.loads(prioritize_nodes(context, body))
            case "preempt":
                json.loads(asyncio.run(choose_victims(context, body)))
            case "bind":
                pod_api = cast(PodApi, NoApi())  # a binding that fails asks for no more
                assert json.loads(asyncio.run(Binder(context, pod_api, lambda: True).bind(body)))["Error"]
            case "review":
                for ask in reviews.by_path().values():
                    json.loads(asyncio.run(ask(body)))
    except WireError:
        assert state.columns.change_count == before, "a refused body changed something"
    state.expire(1e9, 1e9)
    assert {uid: state.footprint_of(uid) for uid in state.pods} == held
    assert not state.reservations


annotations = st.dictionaries(
    st.sampled_from([value for name, value in vars(contract).items() if name.startswith("ANNOTATION_") and isinstance(value, str)]),
    st.text(max_size=30) | st.sampled_from(['{"version":1}', "binpack", "strict", "1.5", "-1", "9" * 300, "exclusive", "NaN", "high"]),
    max_size=3,
)


@given(annotations, st.booleans())
def test_any_annotation_is_read_or_refused_with_a_sentence(given_annotations, bound):
    pod = pod_object("p", vgpu="1", vgpu_memory="300", annotations=given_annotations, node="n1" if bound else "")
    state = ClusterState()
    state.set_gpu_node(make_node("n1", 2))
    context = make_context(state)
    state.set_pod(decode_pod(msgspec.Raw(json.dumps(pod).encode())))
    body = json.dumps({"Pod": pod, "NodeNames": ["n1"]}).encode()
    answer = json.loads(filter_body(context, body, 0.0))
    assert answer["NodeNames"] or answer["FailedNodes"] or answer["FailedAndUnresolvableNodes"]["n1"]
    json.loads(prioritize_nodes(context, body))
    if bound and not state.footprint_of("uid-p"):
        assert state.unaccounted["uid-p"]


ODD_QUERIES = [
    "",
    "?",
    "?pod=",
    "?pod=%00",
    "?pod=%ff&namespace=%ED%A0%80",
    "?pod=../../nodes",
    "?pod=p&pod=q",
    "?namespace=a/b&pod=a%2Fb",
    "?span=x",
]


@pytest.mark.parametrize("query", ODD_QUERIES)
async def test_no_query_of_a_page_is_an_error_of_the_server(api, caplog, query):
    async with running(api) as extender:
        for path in (
            "/metrics",
            "/healthz",
            "/readyz",
            "/explain/why",
            "/explain/snapshot",
            "/decisions",
            "/decisions/record",
            "/x",
            "/%00",
        ):
            status, _ = await extender.page(f"{path}{query}")
            assert status < 500, path
    assert "Traceback" not in caplog.text
