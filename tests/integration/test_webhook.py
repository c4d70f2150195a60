# SPDX-License-Identifier: Apache-2.0
"""The webhook as the API server calls it: AdmissionReviews over TLS, with a certificate that is rotated while it runs."""

import asyncio
import base64
import json
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from aliquot.contract.gpunode import encode_gpu_node
from aliquot.kube.api_server import ApiServer
from aliquot_lab.standin.patches import apply_json_patch
from scheduler_plugin import __main__ as program
from scheduler_plugin.adapters import http
from scheduler_plugin.adapters.aiohttp_transport import KubeConnection
from scheduler_plugin.settings import Settings
from tests.unit.scheduler_plugin.api import FakeApi, pod_object
from tests.unit.scheduler_plugin.builders import make_node


def make_certificate(directory: Path, name: str) -> tuple[Path, Path]:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    certificate, key = directory / f"{name}.crt", directory / f"{name}.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    subject = ["-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*command, *subject], check=True, capture_output=True)
    return certificate, key


class Caller:
    """The API server's side of the webhook."""

    def __init__(self, address: str) -> None:
        self.address = address

    async def post(self, path: str, body: bytes, trusted: Path) -> tuple[int, bytes]:
        context = ssl.create_default_context(cafile=str(trusted))
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"https://{self.address}/{path}", data=body, ssl=context) as response,
        ):
            return response.status, await response.read()

    async def review(self, path: str, pod: dict, trusted: Path, *, operation: str = "CREATE", old: dict | None = None) -> dict:
        group, kind = ("batch", "Job") if path.startswith("templates") else ("", "Pod")
        request = {"uid": "r-1", "operation": operation, "object": pod, "oldObject": old, "namespace": "team"}
        request["kind"] = {"group": group, "version": "v1", "kind": kind}
        review = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}
        status, data = await self.post(path, json.dumps(review).encode(), trusted)
        assert status == 200, data
        answer = json.loads(data)
        assert (answer["apiVersion"], answer["kind"], answer["response"]["uid"]) == ("admission.k8s.io/v1", "AdmissionReview", "r-1")
        return answer["response"]


@pytest.fixture
def certificate(tmp_path):
    return make_certificate(tmp_path, "webhook")


@asynccontextmanager
async def serving(
    certificate: tuple[Path, Path], linger_seconds: float = 0.0, owners: dict[str, dict] | None = None, gates: str = ""
) -> AsyncIterator[tuple[Caller, asyncio.Event]]:
    """Run a scheduler; what is yielded calls its webhook, and tells it to end."""
    async with FakeApi() as api:
        api.owners |= owners or {}
        await api.put("gpunodes", json.loads(encode_gpu_node(make_node("n1", 2))))
        connection = KubeConnection(ApiServer(api.url, None, None))
        settings = Settings(
            extender_address="127.0.0.1:0",
            webhook_address="127.0.0.1:0",
            linger_seconds=linger_seconds,
            metrics_address="127.0.0.1:0",
            tls_cert_file=str(certificate[0]),
            tls_key_file=str(certificate[1]),
            feature_gates=gates,
        )
        scheduler, stop = program.Scheduler(settings, connection), asyncio.Event()
        task = asyncio.create_task(scheduler.run(stop))
        while len(scheduler.addresses) < 3 or not scheduler.ready:
            assert not task.done(), task.result()
            await asyncio.sleep(0.01)
        yield Caller(scheduler.addresses["webhook"]), stop
        stop.set()
        await task
        await connection.close()


@pytest.fixture
async def caller(certificate):
    async with serving(certificate) as (called, _):
        yield called


def patched(pod: dict, response: dict) -> dict:
    assert (response["allowed"], response["patchType"]) == (True, "JSONPatch")
    apply_json_patch(pod, json.loads(base64.b64decode(response["patch"])))
    return pod


async def test_a_gpu_pod_is_made_ready(caller, certificate):
    pod = pod_object(vgpu_memory="4Gi")
    ready = patched(pod, await caller.review("mutate", pod, certificate[0]))
    assert ready["spec"]["schedulerName"] == "aliquot-scheduler"
    assert ready["spec"]["containers"][0]["resources"]["limits"] == {"nvidia.com/vgpu-memory": "4096", "nvidia.com/vgpu": "1"}
    assert (await caller.review("validate", ready, certificate[0])) == {"uid": "r-1", "allowed": True}


async def test_a_part_of_a_gpu_is_resolved_from_the_inventory(caller, certificate):
    pod = pod_object(gpu="2", gpumem_percentage="50")
    assert await caller.review("mutate", pod, certificate[0]) == {"uid": "r-1", "allowed": True}, "of a namespace that is not adopted"
    ready = patched(pod, await caller.review("mutate/adopt", pod, certificate[0]))
    assert ready["spec"]["containers"][0]["resources"]["limits"] == {"nvidia.com/vgpu-memory": "1000", "nvidia.com/vgpu": "2"}


async def test_template_of_job_is_rewritten_and_its_pod_passes_unchanged(caller, certificate):
    pod = pod_object(annotations={"gpu-memory": "1000"})
    template = {"metadata": {"annotations": pod["metadata"]["annotations"]}, "spec": pod["spec"]}
    job = {"metadata": {"name": "training"}, "spec": {"template": template}}
    ready = patched(job, await caller.review("templates/adopt", job, certificate[0]))
    rewritten = ready["spec"]["template"]
    assert rewritten["spec"]["containers"][0]["resources"]["limits"] == {"nvidia.com/vgpu": "1", "nvidia.com/vgpu-memory": "1000"}
    assert "patch" not in await caller.review(
        "mutate/adopt", {"metadata": {"name": "p", **rewritten["metadata"]}, "spec": rewritten["spec"]}, certificate[0]
    )
    assert "patch" not in await caller.review("templates/adopt", ready, certificate[0], operation="UPDATE", old=ready)


async def test_a_pod_without_gpus_is_allowed_as_it_is(caller, certificate):
    for path in ("mutate", "validate"):
        assert await caller.review(path, pod_object(), certificate[0]) == {"uid": "r-1", "allowed": True}


async def test_a_refusal_is_a_403_with_the_sentence(caller, certificate):
    for path in ("mutate", "validate"):
        response = await caller.review(path, pod_object(vgpu="1", vgpu_cores="250"), certificate[0])
        assert not response["allowed"]
        assert response["status"]["code"] == 403
        assert "set nvidia.com/vgpu-cores to at most 100" in response["status"]["message"]


async def test_only_binding_may_write_assignment(caller, certificate):
    theirs = {"aliquot.dev/assignment": "{}"}
    made, plain = pod_object(vgpu="1", annotations=theirs), pod_object(vgpu="1")
    for pod, old, operation in [(made, None, "CREATE"), (made, plain, "UPDATE"), (plain, made, "UPDATE")]:
        response = await caller.review("validate", pod, certificate[0], operation=operation, old=old)
        assert "is reserved" in response["status"]["message"]
    assert (await caller.review("validate", made, certificate[0], operation="UPDATE", old=made))["allowed"]


async def test_copy_of_running_pod_is_admitted_without_assignment_of_original(caller, certificate):
    """As ``kubectl debug --copy-to`` and Velero make one: completed before, with all annotations of the original."""
    first = pod_object(vgpu_memory="4Gi")
    running = patched(first, await caller.review("mutate", first, certificate[0]))
    running["metadata"]["annotations"] = {"team": "a", "aliquot.dev/assignment": "{}"}
    response = await caller.review("mutate", running, certificate[0])
    assert "aliquot.dev/assignment is removed" in response["warnings"][0]
    copied = patched(running, response)
    assert copied["metadata"]["annotations"] == {"team": "a"}
    assert (await caller.review("validate", copied, certificate[0])) == {"uid": "r-1", "allowed": True}


@pytest.mark.parametrize("body", [b"", b"{}", b'{"apiVersion":"v1","kind":"Pod","request":{"uid":"x"}}', b"[" * 10_000])
async def test_what_is_no_review_gets_a_400(caller, certificate, body):
    status, text = await caller.post("mutate", body, certificate[0])
    assert status == 400
    assert b"AdmissionReview" in text


async def test_a_rotated_certificate_is_used_without_a_restart(caller, certificate, tmp_path, monkeypatch):
    with pytest.raises(aiohttp.ClientConnectorCertificateError):
        await caller.post("mutate", b"{}", make_certificate(tmp_path, "other")[0])
    new = make_certificate(tmp_path, "new")
    for source, target in zip(new, certificate, strict=True):
        target.write_bytes(source.read_bytes())
    for _ in range(100):
        try:
            status, _ = await caller.post("mutate", b"{}", new[0])
            break
        except aiohttp.ClientConnectorCertificateError:
            await asyncio.sleep(0.05)
    assert status == 400


@pytest.fixture(autouse=True)
def quick_rotation(monkeypatch):
    monkeypatch.setattr(http, "CERTIFICATE_SECONDS", 0.1)


async def test_caller_of_terminating_webhook_is_still_answered(certificate):
    async with serving(certificate, linger_seconds=5.0) as (caller, stop), asyncio.timeout(60):
        stop.set()
        await asyncio.sleep(0.3)
        assert (await caller.review("mutate", pod_object(), certificate[0]))["allowed"]
        with pytest.raises(aiohttp.ClientConnectionError):
            await call_for_ever(caller, certificate[0])


async def call_for_ever(caller: Caller, trusted: Path) -> None:
    while True:
        await caller.review("mutate", pod_object(), trusted)
        await asyncio.sleep(0.2)


@pytest.mark.parametrize(("gates", "gang"), [("GangsFromOwners=true", ("job-j-job-1-ui", "4")), ("", None)])
async def test_gang_of_labelled_namespace_is_read_from_job_over_http(certificate, gates, gang):
    job: dict = {"metadata": {"name": "j", "uid": "job-1-uid"}, "spec": {"parallelism": 4, "completions": 4, "completionMode": "Indexed"}}
    namespace: dict = {"metadata": {"name": "team", "labels": {"aliquot.dev/gang-from-owner": "true"}}}
    owners = {"/api/v1/namespaces/team": namespace, "/apis/batch/v1/namespaces/team/jobs/j": job}
    async with serving(certificate, owners=owners, gates=gates) as (caller, _):
        pod = pod_object(vgpu="1", vgpu_memory="100")
        pod["metadata"]["ownerReferences"] = [
            {"apiVersion": "batch/v1", "kind": "Job", "name": "j", "uid": "job-1-uid", "controller": True}
        ]
        annotations = patched(pod, await caller.review("mutate", pod, certificate[0]))["metadata"]["annotations"]
        assert annotations.get("aliquot.dev/gang") == (gang and gang[0])
        assert annotations.get("aliquot.dev/gang-min") == (gang and gang[1])
        assert (await caller.review("validate", pod, certificate[0]))["allowed"]
