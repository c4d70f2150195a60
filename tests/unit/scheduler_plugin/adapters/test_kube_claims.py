# SPDX-License-Identifier: Apache-2.0
"""Writes of ResourceClaims: each states the version that it changes, and the gate is removed whatever the other gates are."""

import asyncio
import json
from collections.abc import Coroutine
from typing import Any

import pytest

from aliquot import contract
from aliquot.kube.errors import KubeApiError, KubeNotFoundError
from aliquot.kube.requests import MERGE_PATCH, STRATEGIC_PATCH
from scheduler_plugin.adapters.kube_claims import KubeClaims
from scheduler_plugin.core.claims.planned import FINALIZER
from scheduler_plugin.core.claims.stored import decode_claim
from tests.unit.scheduler_plugin.claim_builders import pod_of

STORED = {"metadata": {"name": "c", "namespace": "team", "uid": "u", "resourceVersion": "8", "finalizers": ["other"]}, "spec": {}}
CLAIM = decode_claim(json.dumps(STORED).encode())
PATH = "/apis/resource.k8s.io/v1/namespaces/team/resourceclaims/c"
EXPECTED = {"uid": "u", "resourceVersion": "8"}


class Connection:
    """Notes a request."""

    def __init__(self, reply: bytes | KubeApiError) -> None:
        self.reply = reply
        self.sent: tuple[str, str, Any, str] | None = None

    async def request(self, method: str, path: str, *, body: Any = None, content_type: str = "") -> bytes:
        self.sent = method, path, body, content_type
        if isinstance(self.reply, KubeApiError):
            raise self.reply
        return self.reply


def call(method: str, *args: Any, reply: bytes | KubeApiError | None = None) -> tuple[Any, Connection]:
    written = json.dumps(STORED | {"metadata": STORED["metadata"] | {"resourceVersion": "9"}}).encode()
    connection = Connection(written if reply is None else reply)
    asked: Coroutine[Any, Any, Any] = getattr(KubeClaims(connection), method)(*args)  # type: ignore[arg-type]
    return asyncio.run(asked), connection


@pytest.mark.parametrize(
    ("method", "args", "path", "patch"),
    [
        ("protect", (), PATH, {"metadata": {**EXPECTED, "finalizers": ["other", FINALIZER]}}),
        (
            "allocate",
            ({"devices": {}}, pod_of("p")),
            f"{PATH}/status",
            {
                "metadata": EXPECTED,
                "status": {"allocation": {"devices": {}}, "reservedFor": [{"resource": "pods", "name": "p", "uid": "p"}]},
            },
        ),
        ("free", (), f"{PATH}/status", {"metadata": EXPECTED, "status": {"allocation": None, "reservedFor": None, "devices": None}}),
    ],
)
def test_write_states_version_and_returns_the_new_one(method, args, path, patch):
    found, connection = call(method, CLAIM, *args)
    assert connection.sent == ("PATCH", path, patch, MERGE_PATCH)
    assert found.version == "9"


def test_only_our_gate_is_removed():
    _, connection = call("open_gate", pod_of("p"))
    patch = {"metadata": {"uid": "p"}, "spec": {"schedulingGates": [{"$patch": "delete", "name": contract.PLANNED}]}}
    assert connection.sent == ("PATCH", "/api/v1/namespaces/team/pods/p", patch, STRATEGIC_PATCH)


def test_claim_that_is_gone_is_none_and_unreadable_one_an_error():
    assert call("read", CLAIM, reply=KubeNotFoundError("gone"))[0] is None
    with pytest.raises(KubeApiError, match="cannot be read"):
        call("read", CLAIM, reply=b"{")
