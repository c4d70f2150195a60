# SPDX-License-Identifier: Apache-2.0
"""Templates are made before their pods are admitted, by any replica, and are deleted only when no pod can come to need them."""

from dataclasses import replace

import pytest

from aliquot.contract.model import ContainerRequest, Preferences
from aliquot.kube.errors import KubeApiError, KubeConflictError, KubeNotFoundError
from scheduler_plugin.core.claims.templates import KEEP_SECONDS, TOUCH_SECONDS, template_of
from scheduler_plugin.ports import TemplateRecord
from scheduler_plugin.services.claim_templates import KNOWN_SECONDS, ClaimTemplates

SHAPE = template_of(ContainerRequest("main", 1), Preferences())


class Clock:
    def __init__(self) -> None:
        self.time = 1e9

    def monotonic(self) -> float:
        return self.time

    def now(self) -> float:
        return self.time


class FakeTemplates:
    """Has templates and the names that pods use; other writers come between a read and the write after it."""

    def __init__(self) -> None:
        self.records: dict[tuple[str, str], TemplateRecord] = {}
        self.in_use: set[tuple[str, str]] = set()
        self.calls: list[str] = []
        self.outage = False
        self.between = lambda: None

    async def read(self, namespace, name):
        self._note("read")
        found = self.records.get((namespace, name))
        between, self.between = self.between, lambda: None
        between()
        return found

    async def create(self, namespace, template, now):
        self._note("create")
        if (namespace, template.name) in self.records:
            raise KubeConflictError("exists")
        self.put(namespace, now)

    async def touch(self, namespace, name, now):
        self._note("touch")
        if (namespace, name) not in self.records:
            raise KubeNotFoundError("gone")
        record = self.records[namespace, name]
        self.records[namespace, name] = replace(record, last_used=now, version=f"{record.version}1")

    async def listed(self):
        self._note("list")
        found = list(self.records.values())
        between, self.between = self.between, lambda: None
        between()
        return found

    async def used(self, namespace):
        return {name for where, name in self.in_use if where == namespace}

    async def delete(self, record):
        self._note("delete")
        if self.records.get((record.namespace, record.name)) != record:
            raise KubeConflictError("changed")
        del self.records[record.namespace, record.name]

    def put(self, namespace: str, last_used: float, name: str = SHAPE.name, spec: object = SHAPE.spec) -> None:
        self.records[namespace, name] = TemplateRecord(namespace, name, "1", last_used, spec)

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if self.outage:
            raise KubeApiError("the API server does not answer")


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def api():
    return FakeTemplates()


@pytest.fixture
def templates(api, clock):
    return ClaimTemplates(api, clock, lambda: True)


async def test_missing_template_is_made_once_for_a_burst_of_pods(api, templates, clock):
    for _ in range(5):
        assert await templates.ensure("team", [SHAPE]) == ""
    assert api.calls == ["read", "create"]
    assert set(api.records) == {("team", SHAPE.name)}
    clock.time += KNOWN_SECONDS + 1
    assert await templates.ensure("team", [SHAPE]) == ""
    assert api.calls == ["read", "create", "read"]


async def test_each_namespace_has_its_own(api, templates):
    await templates.ensure("a", [SHAPE])
    await templates.ensure("b", [SHAPE])
    assert set(api.records) == {("a", SHAPE.name), ("b", SHAPE.name)}


async def test_template_that_another_replica_makes_meanwhile_is_used(api, templates, clock):
    api.between = lambda: api.put("team", clock.now())
    assert await templates.ensure("team", [SHAPE]) == ""


async def test_template_deleted_between_read_and_touch_is_made_again(api, templates, clock):
    api.put("team", clock.now() - TOUCH_SECONDS - 1)
    api.between = api.records.clear
    assert await templates.ensure("team", [SHAPE]) == ""
    assert api.records["team", SHAPE.name].last_used == clock.now()


async def test_use_is_written_at_most_once_an_hour(api, templates, clock):
    api.put("team", clock.now() - TOUCH_SECONDS + 60)
    await templates.ensure("team", [SHAPE])
    assert api.calls == ["read"]
    clock.time += 120
    await templates.ensure("team", [SHAPE])
    assert api.calls == ["read", "read", "touch"]


async def test_template_of_other_content_refuses_the_pod_with_cure(api, templates, clock):
    api.put("team", clock.now(), spec={"devices": {"requests": []}})
    assert "delete it" in await templates.ensure("team", [SHAPE])
    assert "delete it" in await templates.ensure("team", [SHAPE])


async def test_failing_api_refuses_the_pod_with_reason(api, templates):
    api.outage = True
    assert "does not answer. Try again" in await templates.ensure("team", [SHAPE])
    api.outage = False
    assert await templates.ensure("team", [SHAPE]) == ""


async def test_only_old_unused_templates_of_ours_are_deleted(api, templates, clock):
    old = clock.now() - KEEP_SECONDS - 1
    api.put("unused", old)
    api.put("used", old)
    api.put("young", clock.now() - KEEP_SECONDS + 1)
    api.put("theirs", old, name="somebodys")
    api.in_use.add(("used", SHAPE.name))
    await templates.sweep()
    assert {namespace for namespace, _ in api.records} == {"used", "young", "theirs"}


async def test_template_used_since_the_look_stays(api, templates, clock):
    api.put("team", clock.now() - KEEP_SECONDS - 1)
    api.between = lambda: api.records.update({("team", SHAPE.name): TemplateRecord("team", SHAPE.name, "2", clock.now(), SHAPE.spec)})
    await templates.sweep()
    assert api.records["team", SHAPE.name].version == "2"


async def test_sweep_survives_an_outage(api, templates):
    api.outage = True
    await templates.sweep()
