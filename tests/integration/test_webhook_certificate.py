# SPDX-License-Identifier: Apache-2.0
"""The scheduler's own certificate: what the API server, which knows the webhook configurations only, sees of it."""

import asyncio
import base64
import contextlib
import json
import re
import ssl
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import yaml

from aliquot.contract.gpunode import encode_gpu_node
from aliquot.kube.api_server import ApiServer
from scheduler_plugin import __main__ as program
from scheduler_plugin.adapters.aiohttp_transport import KubeConnection
from scheduler_plugin.adapters.authority import WebhookAuthority
from scheduler_plugin.core.certificate import WEBHOOK_CONFIGURATION, WEBHOOK_SERVICE, Step, host_names
from scheduler_plugin.services import certificate_controller
from scheduler_plugin.settings import Settings
from tests.unit.scheduler_plugin.api import WEBHOOKS, FakeApi
from tests.unit.scheduler_plugin.builders import make_node

NAMESPACE, SECRET = "aliquot-system", "aliquot-webhook-certificate"
NAMES = host_names(NAMESPACE)
DAY = 86400.0
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch):
    monkeypatch.setattr(certificate_controller, "PERIOD_SECONDS", 0.05)


@pytest.fixture
async def api():
    async with FakeApi() as served:
        await served.put("gpunodes", json.loads(encode_gpu_node(make_node("n1", 2))))
        for plural in WEBHOOKS:
            webhook = {"name": "check.aliquot.dev", "clientConfig": {"service": {"name": "aliquot-webhook"}}}
            await served.put(plural, {"metadata": {"name": "aliquot"}, "webhooks": [webhook]})
        yield served


@contextlib.asynccontextmanager
async def replica(api: FakeApi) -> AsyncIterator[program.Scheduler]:
    connection = KubeConnection(ApiServer(api.url, None, None))
    settings = Settings(
        extender_address="127.0.0.1:0",
        webhook_address="127.0.0.1:0",
        linger_seconds=0.0,
        metrics_address="127.0.0.1:0",
        webhook_certificate_secret=SECRET,
    )
    scheduler, stop = program.Scheduler(settings, connection), asyncio.Event()
    task = asyncio.create_task(scheduler.run(stop))
    try:
        await until(lambda: task.done() or (len(scheduler.addresses) == 3 and scheduler.ready))
        yield scheduler
    finally:
        stop.set()
        await task
        await connection.close()


def controller_of(scheduler: program.Scheduler) -> certificate_controller.CertificateController:
    assert scheduler.certificates.controller is not None
    return scheduler.certificates.controller


async def until(done) -> None:
    async with asyncio.timeout(60):
        while not done():  # noqa: ASYNC110 - what is waited for has no event of its own
            await asyncio.sleep(0.01)


def secret(api: FakeApi) -> dict[str, bytes]:
    item = api.objects["secrets"].get((NAMESPACE, SECRET), {})
    return {key: base64.b64decode(value) for key, value in item.get("data", {}).items()}


async def keep(api: FakeApi, data: dict[str, bytes]) -> None:
    text = {key: base64.b64encode(value).decode() for key, value in data.items()}
    await api.put("secrets", {"metadata": {"name": SECRET, "namespace": NAMESPACE}, "data": text})


def bundle(api: FakeApi, plural: str) -> bytes:
    [webhook] = api.objects[plural]["", "aliquot"]["webhooks"]
    return base64.b64decode(webhook["clientConfig"].get("caBundle", ""))


async def call(api: FakeApi, scheduler: program.Scheduler) -> bytes:
    """Call the webhook as the API server does, and return the certificate that it showed (DER)."""
    trusted = bundle(api, "validatingwebhookconfigurations").decode()
    host, port = scheduler.addresses["webhook"].split(":")
    context = ssl.create_default_context(cadata=trusted)
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    reader, writer = await asyncio.open_connection(host, int(port), ssl=context, server_hostname=NAMES[0])
    shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.write(b"POST /validate HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
    assert (await reader.read()).startswith(b"HTTP/1.1 400")
    writer.close()
    await writer.wait_closed()
    return shown


def certificate(api: FakeApi) -> bytes:
    return ssl.PEM_cert_to_DER_cert(secret(api)["tls.crt"].decode())


def trusted_everywhere(api: FakeApi) -> bool:
    return bool(secret(api)) and all(bundle(api, plural) == secret(api)["ca.crt"] for plural in WEBHOOKS)


async def status(scheduler: program.Scheduler, page: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(f"http://{scheduler.addresses['status']}/{page}") as response:
        return response.status, await response.text()


async def test_two_replicas_serve_one_certificate_that_the_api_server_trusts(api):
    async with replica(api) as one, replica(api) as two:
        await until(lambda: trusted_everywhere(api) and controller_of(one).serves and controller_of(two).serves)
        assert await call(api, one) == await call(api, two) == certificate(api)
        assert (await status(one, "readyz"))[0] == 200
        writes = [request for request in api.requests if request.startswith("PATCH")]
        await asyncio.sleep(0.2)
        assert [request for request in api.requests if request.startswith("PATCH")] == writes, (
            "what is as it should be is not written again"
        )


@pytest.mark.parametrize("age_days", [70, 2600], ids=["certificate", "certificate and authority"])
async def test_a_renewal_costs_no_caller_a_connection(api, age_days):
    """The Secret's content is exchanged for one that is due while a client keeps calling: it never meets one that it does not trust."""
    young = WebhookAuthority().carry_out(Step.START_AFRESH, {}, NAMES, time.time())
    await keep(api, young)
    async with replica(api) as one, replica(api) as two:
        await until(lambda: trusted_everywhere(api) and controller_of(one).serves and controller_of(two).serves)
        old = WebhookAuthority().carry_out(Step.START_AFRESH, {}, NAMES, time.time() - age_days * DAY)
        leaf = WebhookAuthority().carry_out(Step.RENEW_CERTIFICATE, old, NAMES, time.time() - 70 * DAY)
        for plural in WEBHOOKS:
            item = api.objects[plural]["", "aliquot"]
            item["webhooks"][0]["clientConfig"]["caBundle"] = base64.b64encode(leaf["ca.crt"] + young["ca.crt"]).decode()
            await api.put(plural, item)
        await keep(api, {**leaf, "ca.crt": leaf["ca.crt"] + young["ca.crt"]})
        shown: set[bytes] = set()
        async with asyncio.timeout(60):
            while not ({await call(api, one), await call(api, two)} == {certificate(api)} and trusted_everywhere(api)):
                shown.add(await call(api, one))
        assert secret(api)["tls.crt"] != leaf["tls.crt"]
        authorities = secret(api)["ca.crt"].count(b"BEGIN CERTIFICATE")
        assert authorities == (3 if age_days > 2433 else 2), "old and new authorities are trusted together"


async def test_outage_at_renewal_keeps_served_certificate_and_is_reported(api, caplog):
    due = WebhookAuthority().carry_out(Step.START_AFRESH, {}, NAMES, time.time() - 70 * DAY)
    await keep(api, due)
    api.refuse_writes = True
    async with replica(api) as scheduler:
        await until(
            lambda: controller_of(scheduler).serves and "time to sign a new serving certificate" in controller_of(scheduler).trouble
        )
        ends = WebhookAuthority().ends_at(due)
        assert controller_of(scheduler).ends_at() == ends
        api.silent = True
        await until(lambda: "it is time" not in controller_of(scheduler).trouble)
        [line] = re.findall(r"^aliquot_scheduler_certificate_expiry\S+ (.+)$", (await status(scheduler, "metrics"))[1], re.MULTILINE)
        assert float(line) == ends
        assert "the one served meanwhile expires at" in caplog.text
        api.silent = api.refuse_writes = False
        await until(lambda: not controller_of(scheduler).trouble)
        assert await call(api, scheduler) == certificate(api)
        assert controller_of(scheduler).ends_at() > ends


@pytest.mark.parametrize("broken", ["ca.crt", "ca.key", "tls.crt", "tls.key"])
async def test_a_broken_secret_is_mended(api, broken):
    good = WebhookAuthority().carry_out(Step.START_AFRESH, {}, NAMES, time.time())
    await keep(api, good | {broken: b"rubbish"})
    async with replica(api) as scheduler:
        await until(lambda: trusted_everywhere(api) and controller_of(scheduler).serves)
        assert await call(api, scheduler) == certificate(api)


async def test_foreign_secret_is_left_alone_and_pod_is_not_ready(api):
    await keep(api, {"tls.crt": b"theirs", "tls.key": b"theirs"})
    async with replica(api) as scheduler:
        await until(lambda: controller_of(scheduler).trouble)
        code, text = await status(scheduler, "readyz")
        assert (code, secret(api)) == (503, {"tls.crt": b"theirs", "tls.key": b"theirs"})
        assert "another program fills it" in text


async def test_a_configuration_that_is_applied_later_is_trusted_then(api):
    theirs = api.objects["mutatingwebhookconfigurations"]["", "aliquot"]
    await api.delete("mutatingwebhookconfigurations", "aliquot")
    async with replica(api) as scheduler:
        await until(lambda: bundle(api, "validatingwebhookconfigurations") and "HTTP 404" in controller_of(scheduler).trouble)
        await call(api, scheduler)
        await api.put("mutatingwebhookconfigurations", theirs)
        await until(lambda: trusted_everywhere(api) and not controller_of(scheduler).trouble)


def test_the_manifests_name_what_the_scheduler_patches_and_may_read():
    scheduler = ROOT / "deploy/daemonset/scheduler"
    service, *configurations = yaml.safe_load_all((scheduler / "webhook.yaml").read_text())
    assert service["metadata"]["name"] == WEBHOOK_SERVICE
    assert [item["metadata"]["name"] for item in configurations] == [WEBHOOK_CONFIGURATION] * 2
    kept_in = yaml.safe_load((scheduler / "config.yaml").read_text())["webhookCertificateSecret"]
    rules = [rule for item in yaml.safe_load_all((scheduler / "rbac.yaml").read_text()) for rule in item.get("rules", ())]
    assert {"apiGroups": [""], "resources": ["secrets"], "resourceNames": [kept_in], "verbs": ["get", "patch"]} in rules
