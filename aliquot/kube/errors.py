# SPDX-License-Identifier: Apache-2.0
"""How a request to the Kubernetes API fails, as one small tree.

    KubeApiError                  no reply, 401, 408, 429 or 5xx: a later try may succeed; the server may have written without replying
    ├── KubeRefusedError          any other 4xx: the server changed nothing, and the same request will fail again
    │   ├── KubeNotFoundError     404: no such object, or no such kind of object
    │   └── KubeConflictError     409: the object exists already, or is not as the request requires
    ├── KubeExpiredError          410: the server has dropped the version that a watch or page continues from: list again
    └── KubeBehindError           504: the server's cache has not reached the version that a list requires

401 may pass because kubelet rotates the token: the next request has the new one.
"""

from http import HTTPStatus
from typing import TypeVar

import msgspec

from aliquot.contract.errors import AliquotError
from aliquot.kube.backoff import retry_after_seconds

T = TypeVar("T")

MAX_REASON_CHARS = 200
"""Of a reply that is not a Status object, such as a proxy's error page."""


class KubeApiError(AliquotError):
    """A request to the Kubernetes API failed; the outcome of a write is unknown."""

    def __init__(self, message: str, retry_after_seconds: float = 0.0, *, status: int = 0, reason: str = "") -> None:
        """Make it.

        Args: retry_after_seconds: how long the server wants to be left alone; 0 if it does not say. status: of HTTP; 0 without a reply.
              reason: the server's sentence, or what kept it from replying; without method and path.
        """
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds
        self.status = status
        self.reason = reason or message


class KubeRefusedError(KubeApiError):
    """The server refused the request and changed nothing."""


class KubeNotFoundError(KubeRefusedError):
    """The object, or its kind, does not exist."""


class KubeConflictError(KubeRefusedError):
    """The object is not in the state that the request requires."""


class KubeExpiredError(KubeApiError):
    """The server no longer has the version to continue from."""


class KubeBehindError(KubeApiError):
    """The server cannot reply from the required version yet."""


_RETRYABLE = (401, 408, 429)
_BY_STATUS = {404: KubeNotFoundError, 409: KubeConflictError, 410: KubeExpiredError, 504: KubeBehindError}


class _Status(msgspec.Struct):
    """A Kubernetes Status object."""

    message: str = ""
    code: int = 0


def error_of_reply(request: str, status: int, body: bytes, retry_after: str | None = None) -> KubeApiError:
    """Translate a reply of status 300 or above.

    Args: request: method and path, for the message. retry_after: the header of that name.
    """
    reason = _reason(status, body)
    message = f"{request}: HTTP {status}: {reason}"
    return _kind(status)(message, retry_after_seconds(retry_after), status=status, reason=reason)


def error_of_event(body: bytes | msgspec.Raw) -> KubeApiError:
    """Translate the object of an ERROR event, which ends a watch. Raises KubeApiError: it is not a Status object."""
    status = decode_reply(body, _Status, "an error in a watch")
    return _kind(status.code)(f"the watch ended: {status.message} ({status.code})", status=status.code, reason=status.message)


def decode_reply(body: bytes | msgspec.Raw, kind: type[T], what: str) -> T:
    """Decode a reply, or a part of one. Raises KubeApiError. Args: what: for the message."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise KubeApiError(f"the API replied with {what} that cannot be read: {exc}") from exc


def _kind(status: int) -> type[KubeApiError]:
    refused = 400 <= status < 500 and status not in _RETRYABLE
    return _BY_STATUS.get(status, KubeRefusedError if refused else KubeApiError)


def _reason(status: int, body: bytes) -> str:
    """Return the server's sentence; else the start of the text it sent; else what the status means."""
    try:
        message = msgspec.json.decode(body, type=_Status).message
    except (msgspec.DecodeError, UnicodeDecodeError):
        message = body[:MAX_REASON_CHARS].decode(errors="replace").strip()
    if message:
        return message
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "no reason given"
