"""What the Kubernetes API refuses, with its HTTP status and its word for the reason."""


class ClusterError(Exception):
    """A request the API refuses; ``code`` is its HTTP status and ``reason`` Kubernetes' word for it."""

    code = 500
    reason = "InternalError"


class NotFoundError(ClusterError):
    """No such object."""

    code = 404
    reason = "NotFound"


class AlreadyExistsError(ClusterError):
    """An object of that name is there already."""

    code = 409
    reason = "AlreadyExists"


class ConflictError(ClusterError):
    """The object changed since the caller read it, or has another UID."""

    code = 409
    reason = "Conflict"


class InvalidError(ClusterError):
    """The object or patch is not acceptable."""

    code = 422
    reason = "Invalid"


class GoneError(ClusterError):
    """The history no longer reaches back to the version asked for."""

    code = 410
    reason = "Expired"


class TooLargeVersionError(ClusterError):
    """What the server has in memory has not come to the version asked for."""

    code = 504
    reason = "Timeout"
