# SPDX-License-Identifier: Apache-2.0
"""What the Kubernetes API refuses, with its HTTP status and its word for the reason."""


class ClusterError(Exception):
    """A request that the API refuses. ``code`` is the HTTP status, ``reason`` the reason in Kubernetes' Status."""

    code = 500
    reason = "InternalError"


class NotFoundError(ClusterError):
    """No such object."""

    code = 404
    reason = "NotFound"


class AlreadyExistsError(ClusterError):
    """An object of that name exists."""

    code = 409
    reason = "AlreadyExists"


class ConflictError(ClusterError):
    """The object changed since the caller read it, or has another UID."""

    code = 409
    reason = "Conflict"


class InvalidError(ClusterError):
    """The object or patch is invalid."""

    code = 422
    reason = "Invalid"


class GoneError(ClusterError):
    """The history does not reach back to the requested version."""

    code = 410
    reason = "Expired"


class TooLargeVersionError(ClusterError):
    """The server's cache has not reached the requested version."""

    code = 504
    reason = "Timeout"


class MethodError(ClusterError):
    """The path has no such method."""

    code = 405
    reason = "MethodNotAllowed"


class PathError(ClusterError):
    """The path is not part of this API."""

    code = 404
    reason = "NotFound"


class MediaTypeError(ClusterError):
    """A patch of an unsupported type."""

    code = 415
    reason = "UnsupportedMediaType"
