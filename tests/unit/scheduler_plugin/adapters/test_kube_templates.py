# SPDX-License-Identifier: Apache-2.0
import json
from typing import Any, cast

import pytest

from aliquot.contract.model import ContainerRequest, Preferences
from aliquot.kube.errors import KubeApiError, KubeNotFoundError
from scheduler_plugin.adapters.aiohttp_transport import KubeConnection
from scheduler_plugin.adapters.kube_templates import KubeTemplates
from scheduler_plugin.core.claims.templates import has_content, template_of

SHAPE = template_of(ContainerRequest("main", 2), Preferences(gpu_uuid=("GPU-1",)))
NAMESPACED = "/apis/resource.k8s.io/v1/namespaces/team/resourceclaimtemplates"


class Connection:
    """Stores what is posted, and returns replies by method and path."""

    def __init__(self, replies: dict[str, Any] | None = None) -> None:
        self.replies = replies or {}
        self.calls: list[tuple[str, str, Any, str]] = []

    async def request(self, method, path, *, body=None, content_type="application/json", seconds=3.0):
        self.calls.append((method, path, body, content_type))
        if method == "POST":
            stored = {**body, "metadata": {**body["metadata"], "resourceVersion": "7"}}
            self.replies[f"GET {path}/{body['metadata']['name']}"] = stored
        reply = self.replies.get(f"{method} {path}", {} if method != "GET" else None)
        if reply is None:
            raise KubeNotFoundError("not found", status=404)
        return reply if isinstance(reply, bytes) else json.dumps(reply).encode()


def templates_of(connection: Connection) -> KubeTemplates:
    return KubeTemplates(cast(KubeConnection, connection))


async def test_created_template_reads_back_with_content_and_time():
    connection = Connection()
    api = templates_of(connection)
    assert await api.read("team", SHAPE.name) is None
    await api.create("team", SHAPE, 1e9)
    assert connection.calls[-1][1] == NAMESPACED
    found = await api.read("team", SHAPE.name)
    assert (found.namespace, found.name, found.version, found.last_used) == ("team", SHAPE.name, "7", 1e9)
    assert has_content(found.spec, SHAPE.spec)


async def test_touch_changes_only_the_annotation():
    connection = Connection()
    await templates_of(connection).touch("team", "x", 1e9)
    method, path, body, content_type = connection.calls[0]
    assert (method, path, content_type) == ("PATCH", f"{NAMESPACED}/x", "application/merge-patch+json")
    assert body == {"metadata": {"annotations": {"aliquot.dev/last-used": "2001-09-09T01:46:40Z"}}}


async def test_deletion_is_of_the_version_that_was_seen():
    item = {"metadata": {"name": "x", "namespace": "team", "resourceVersion": "9", "annotations": {"aliquot.dev/last-used": "never"}}}
    path = "/apis/resource.k8s.io/v1/resourceclaimtemplates?labelSelector=aliquot.dev%2Ftranslated%3Dtrue"
    connection = Connection({f"GET {path}&limit=500": {"metadata": {}, "items": [item]}})
    [record] = await templates_of(connection).listed()
    assert (record.last_used, record.spec) == (0.0, None)
    await templates_of(connection).delete(record)
    method, path, body, _ = connection.calls[-1]
    assert (method, path, body["preconditions"]) == ("DELETE", f"{NAMESPACED}/x", {"resourceVersion": "9"})


async def test_names_that_pods_use_come_from_all_pages():
    def pods(*names: str, following: str = "") -> dict[str, Any]:
        claims = [{"name": "c", "resourceClaimTemplateName": name} for name in names]
        return {"metadata": {"continue": following}, "items": [{"spec": {"resourceClaims": claims}}, {"spec": {}}]}

    path = "/api/v1/namespaces/team/pods?limit=500"
    connection = Connection({f"GET {path}": pods("a", "b", following="next"), f"GET {path}&continue=next": pods("c")})
    assert await templates_of(connection).used("team") == {"a", "b", "c"}


async def test_reply_of_another_form_is_an_error_of_the_api():
    connection = Connection({f"GET {NAMESPACED}/x": b'{"metadata": 5}'})
    with pytest.raises(KubeApiError):
        await templates_of(connection).read("team", "x")
