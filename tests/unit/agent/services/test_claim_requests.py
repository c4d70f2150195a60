# SPDX-License-Identifier: Apache-2.0
import asyncio
import threading

import pytest

from agent.services import claim_requests as module
from agent.services.claim_requests import ClaimRequests
from tests.unit.agent.claim_builders import FakeResourceApi, claim_object, result
from tests.unit.agent.fakes import until


class SlowStatusApi(FakeResourceApi):
    """Holds every write of a status until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.writing = threading.Event()
        self.may_end = threading.Event()

    def report_devices(self, namespace, name, uid, devices) -> None:
        self.writing.set()
        assert self.may_end.wait(60)
        super().report_devices(namespace, name, uid, devices)


@pytest.fixture
def api():
    one = SlowStatusApi()
    one.put(claim_object("train", result(0)))
    yield one
    one.may_end.set()


async def test_reads_do_not_wait_for_writes_of_status(api):
    requests = ClaimRequests(api)
    report = asyncio.ensure_future(requests.report("default", "train", "uid", tuple))
    await until(api.writing.is_set)
    assert (await requests.read("default", "train")).allocated
    assert not report.done()
    api.may_end.set()
    await report
    requests.close()


async def test_status_is_written_after_claims_in_preparation(api):
    requests = ClaimRequests(api)
    with requests.first():
        report = asyncio.ensure_future(requests.report("default", "train", "uid", tuple))
        await requests.read("default", "train")
        assert not api.writing.is_set()
    api.may_end.set()
    await report
    requests.close()


async def test_status_does_not_wait_for_ever(api, monkeypatch):
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 0.01)
    requests = ClaimRequests(api)
    api.may_end.set()
    with requests.first():
        await requests.report("default", "train", "uid", tuple)
    requests.close()


async def test_closed_requests_drop_what_has_not_begun(api):
    requests = ClaimRequests(api)
    first = asyncio.ensure_future(requests.report("default", "train", "uid", tuple))
    await until(api.writing.is_set)
    second = asyncio.ensure_future(requests.report("default", "other", "uid", tuple))
    await until(lambda: len(requests._one_report._waiters or ()) == 1)
    requests.close()
    api.may_end.set()
    await asyncio.gather(first, second)
    assert [name for name, _ in api.reported] == ["train"]
