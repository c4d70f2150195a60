# SPDX-License-Identifier: Apache-2.0
import json

import pytest

from aliquot.kube import errors
from aliquot.kube.errors import (
    KubeApiError,
    KubeBehindError,
    KubeConflictError,
    KubeExpiredError,
    KubeNotFoundError,
    KubeRefusedError,
    error_of_event,
    error_of_reply,
)
from tests.unit.agent.test_errors import drawn_tree


def test_drawn_tree_equals_classes():
    classes = {name: one for name, one in vars(errors).items() if name.startswith("Kube")}
    assert drawn_tree(errors) == {name: "" if name == "KubeApiError" else one.__base__.__name__ for name, one in classes.items()}


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        *[(status, KubeRefusedError) for status in (400, 403, 405, 413, 415, 422)],
        *[(status, KubeApiError) for status in (301, 401, 408, 429, 500, 503, 599)],
        (404, KubeNotFoundError),
        (409, KubeConflictError),
        (410, KubeExpiredError),
        (504, KubeBehindError),
    ],
)
def test_status_chooses_kind_of_error(status, kind):
    assert type(error_of_reply("GET /x", status, b"")) is kind


@pytest.mark.parametrize("kind", [KubeNotFoundError, KubeConflictError])
def test_missing_or_changed_object_counts_as_refused(kind):
    assert issubclass(kind, KubeRefusedError)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"kind":"Status","message":"pods \\"a\\" not found"}', 'pods "a" not found'),
        (b" <html>Bad gateway</html>\n", "<html>Bad gateway</html>"),
        (b"x" * 5000, "x" * 200),
        (b"\xff", "\N{REPLACEMENT CHARACTER}"),
        (b"{}", "Not Found"),
        (b"", "Not Found"),
    ],
)
def test_reason_is_servers_sentence_or_start_of_its_text(body, reason):
    error = error_of_reply("GET /x", 404, body)
    assert (str(error), error.status, error.reason) == (f"GET /x: HTTP 404: {reason}", 404, reason)


def test_unknown_status_without_text_has_a_reason():
    assert str(error_of_reply("GET /x", 599, b"")) == "GET /x: HTTP 599: no reason given"


def test_error_carries_retry_after():
    assert error_of_reply("GET /x", 429, b"", "7").retry_after_seconds == 7
    assert error_of_reply("GET /x", 429, b"").retry_after_seconds == 0


@pytest.mark.parametrize(("code", "kind"), [(410, KubeExpiredError), (500, KubeApiError), (0, KubeApiError)])
def test_error_event_is_translated_like_a_reply(code, kind):
    error = error_of_event(json.dumps({"kind": "Status", "code": code, "message": "too old resource version: 1 (9)"}).encode())
    assert (type(error), str(error)) == (kind, f"the watch ended: too old resource version: 1 (9) ({code})")


def test_error_event_without_status_object_is_an_error():
    with pytest.raises(KubeApiError, match="cannot be read"):
        error_of_event(b"5")
