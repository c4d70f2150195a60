# SPDX-License-Identifier: Apache-2.0
"""Paths and bodies of requests that more than one program sends. Pure."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote, urlencode

JSON = "application/json"
ACCEPT = f"{JSON}, */*"
"""JSON from the API server; through its proxy, any format that a pod serves."""
JSON_PATCH = "application/json-patch+json"
MERGE_PATCH = "application/merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"
"""Server-side apply; JSON is YAML."""
STRATEGIC_PATCH = "application/strategic-merge-patch+json"
"""Merges the entries of a list by their key, for example conditions by their type. Works for built-in kinds only."""
MAX_EVENT_MESSAGE_CHARS = 1024
"""The API server refuses longer ones."""


def with_options(path: str, **options: str) -> str:
    """Append options to a path that may have some already."""
    return f"{path}{'&' if '?' in path else '?'}{urlencode(options)}" if options else path


def object_path(collection: str, name: str, subresource: str = "") -> str:
    """Return the path of one object, or of one of its subresources."""
    return f"{collection}/{quote(name, safe='')}{f'/{subresource}' if subresource else ''}"


def namespaced(plural: str, namespace: str, api: str = "api/v1") -> str:
    """Return the path of the objects of one kind in one namespace. Args: api: such as ``apis/policy/v1``."""
    return f"/{api}/namespaces/{quote(namespace, safe='')}/{plural}"


def pod_path(namespace: str, name: str, subresource: str = "") -> str:
    """Return the path of one pod, or of one of its subresources."""
    return object_path(namespaced("pods", namespace), name, subresource)


def eviction(namespace: str, name: str, uid: str, *, dry_run: bool = False) -> dict[str, Any]:
    """Return the body that evicts a pod as far as its disruption budgets allow, if the pod still has this UID."""
    return {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": name, "namespace": namespace},
        "deleteOptions": {"preconditions": {"uid": uid}, **({"dryRun": ["All"]} if dry_run else {})},
    }


def event(metadata: Mapping[str, str], involved: Mapping[str, str], component: str, happened_at: float, **fields: str) -> dict[str, Any]:
    """Return the body of an Event.

    Args: metadata: with ``name`` or ``generateName``. involved: reference to the object it is about. component: the program that reports.
          happened_at: in seconds since 1970. fields: ``type``, ``reason``, ``message``; a message that is too long is cut.
    """
    when = timestamp(happened_at)
    message = fields["message"]
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": dict(metadata),
        "involvedObject": dict(involved),
        "source": {"component": component},
        "reportingComponent": component,
        "firstTimestamp": when,
        "lastTimestamp": when,
        "count": 1,
        **fields,
        "message": message if len(message) <= MAX_EVENT_MESSAGE_CHARS else message[: MAX_EVENT_MESSAGE_CHARS - 1] + "…",
    }


def timestamp(seconds: float) -> str:
    """Return a moment, in seconds since 1970, as metav1.Time."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def micro_timestamp(seconds: float) -> str:
    """Return a moment, in seconds since 1970, as metav1.MicroTime."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def json_pointer(*keys: str) -> str:
    """Return the path of a value for a JSON patch (RFC 6901)."""
    return "".join("/" + key.replace("~", "~0").replace("/", "~1") for key in keys)
