# SPDX-License-Identifier: Apache-2.0
"""The loop over a Secret in memory. The same over HTTP and TLS: tests/integration/test_webhook_certificate.py."""

import asyncio
from collections.abc import Mapping

import pytest

from aliquot.kube.errors import KubeApiError, KubeConflictError
from scheduler_plugin.adapters.authority import WebhookAuthority
from scheduler_plugin.core.certificate import Step, host_names
from scheduler_plugin.ports import SecretRecord, WebhookKind
from scheduler_plugin.services.certificate_controller import CertificateController

DAY = 86400.0
NAMES = host_names("aliquot-system")


class Clock:
    def __init__(self) -> None:
        self.time = 1_800_000_000.0

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.time


class Store:
    """The API as replicas share it. Every conflict is counted."""

    def __init__(self, data: Mapping[str, bytes] | None = None) -> None:
        self.data, self.version = data, 1
        self.trusted: dict[WebhookKind, bytes] = {}
        self.conflicts = 0
        self.away = self.busy = False
        self.first_reads: asyncio.Barrier | None = None

    async def read(self) -> SecretRecord | None:
        if self.away:
            raise KubeApiError("no connection")
        record = None if self.data is None else SecretRecord(dict(self.data), str(self.version))
        if self.first_reads is not None and record is None:
            await self.first_reads.wait()
        return record

    async def write(self, data: Mapping[str, bytes], version: str | None) -> None:
        if self.busy or version != (None if self.data is None else str(self.version)):
            self.conflicts += 1
            raise KubeConflictError("it changed")
        self.data, self.version = dict(data), self.version + 1

    async def trust(self, kind: WebhookKind, authorities: bytes) -> bool:
        if self.away:
            raise KubeApiError("no connection")
        news = self.trusted.get(kind) != authorities
        self.trusted[kind] = authorities
        return news


class Server:
    def __init__(self) -> None:
        self.served: list[bytes] = []

    def serve(self, certificate: bytes, key: bytes) -> None:
        self.served.append(certificate)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def keeper_of(store: Store, clock: Clock) -> tuple[CertificateController, Server]:
    server = Server()
    return CertificateController(store, WebhookAuthority(), server, clock, NAMES), server


async def test_of_two_replicas_creating_together_one_is_refused_and_follows(clock):
    store = Store()
    store.first_reads = asyncio.Barrier(2)
    (one, server_one), (two, server_two) = keeper_of(store, clock), keeper_of(store, clock)
    await asyncio.gather(one.step(), two.step())
    assert store.conflicts == 1
    assert server_one.served == server_two.served == [store.data["tls.crt"]]
    assert (one.trouble, two.trouble, one.ends_at()) == ("", "", clock.now() + 90 * DAY)


async def test_a_new_certificate_is_served_only_when_it_is_trusted(clock):
    store = Store()
    keeper, server = keeper_of(store, clock)
    await keeper.step()
    [first] = server.served
    afresh = WebhookAuthority().carry_out(Step.START_AFRESH, {}, NAMES, clock.now())
    store.data = afresh

    async def refuse(kind: WebhookKind, authorities: bytes) -> bool:
        raise KubeApiError(f"{kind.value}: no connection")

    trust, store.trust = store.trust, refuse
    await keeper.step()
    assert (server.served, keeper.trouble) == ([first], "mutatingwebhookconfigurations: no connection")
    store.trust = trust
    await keeper.step()
    assert (server.served, keeper.trouble) == ([first, afresh["tls.crt"]], "")


async def test_over_ten_years_every_authority_is_trusted_for_weeks_before_it_signs(clock):
    store = Store()
    keeper, server = keeper_of(store, clock)
    began_trusting: dict[bytes, float] = {}
    signers: set[bytes] = set()
    for _ in range(800):
        await keeper.step()
        assert keeper.trouble == ""
        assert keeper.ends_at() > clock.now() + 29 * DAY - 5 * DAY
        newest = store.data["ca.crt"].split(b"-----END CERTIFICATE-----\n")[0]
        began_trusting.setdefault(newest, clock.now())
        if server.served[-1] not in signers:
            signers.add(server.served[-1])
            signs = WebhookAuthority().inspect({**store.data, "ca.crt": newest + b"-----END CERTIFICATE-----\n"}).certificate is not None
            assert not signs or len(signers) == 1 or clock.now() - began_trusting[newest] > 14 * DAY
        clock.time += 5 * DAY
    assert len(began_trusting) == 2
    assert len(signers) > 60


async def test_outage_and_its_end_are_logged_once_each(clock, caplog):
    caplog.set_level("INFO")
    store = Store()
    keeper, server = keeper_of(store, clock)
    await keeper.step()
    store.away = True
    clock.time += 70 * DAY
    for _ in range(3):
        await keeper.step()
    assert len(server.served) == 1
    assert caplog.text.count("cannot be maintained: no connection; the one served meanwhile expires at") == 1
    store.away = False
    await keeper.step()
    assert caplog.text.count("is maintained again") == 1
    assert len(server.served) == 2


async def test_secret_changing_under_every_write_is_reported_without_endless_loop(clock):
    store = Store()
    store.busy = True
    keeper, server = keeper_of(store, clock)
    await keeper.step()
    assert (store.conflicts, server.served, keeper.serves) == (5, [], False)
    assert "check whether another program writes it" in keeper.trouble
