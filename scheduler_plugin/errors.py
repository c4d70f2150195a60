"""What can go wrong in the scheduler, as one small tree. Adapters translate into it; services and verbs decide what to do about it.

    SchedulerError
    ├── WireError                 a request is not what its sender's protocol says: HTTP 400, nothing changed
    ├── NotReadyError             decisions of this replica must not be acted upon now: said by filter and bind, else HTTP 503
    ├── CertificateError          the Secret of the webhook's certificate cannot be used, and why
    ├── HistoryError              Prometheus does not say what was, and why
    └── KubeApiError              the Kubernetes API; raised itself when no answer came, so that the outcome is open
        ├── KubeRefusedError      the API refused for good
        │   ├── KubeNotFoundError   there is no such object
        │   └── KubeConflictError   the object is not as the request assumes
        └── KubeExpiredError      the version a list or watch wants to go on from is too old (410): list again

That a pod fits nowhere is no error but a result: ``core.reasons.NodeReason`` or ``placement.refusal.Refusal``.
A wrong configuration is ``program.settings.SettingsError``: exit 2 with the sentence.
"""


class SchedulerError(Exception):
    """Base of everything the scheduler raises on purpose."""


class WireError(SchedulerError):
    """A request from outside cannot be read."""


class NotReadyError(SchedulerError):
    """Decisions of this replica must not be acted upon now; the message says why."""


class CertificateError(SchedulerError):
    """The webhook's certificate cannot be kept in the Secret it was to be kept in."""


class HistoryError(SchedulerError):
    """What is kept of the past cannot be had."""


class KubeApiError(SchedulerError):
    """The Kubernetes API did not answer, or not in a way that tells what happened."""

    def __init__(self, message: str, retry_after_seconds: float = 0.0) -> None:
        """Args: retry_after_seconds: how long the server wants to be left alone; 0 where it says nothing."""
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class KubeRefusedError(KubeApiError):
    """The API refused the request; nothing was changed."""


class KubeNotFoundError(KubeRefusedError):
    """The object does not exist."""


class KubeConflictError(KubeRefusedError):
    """The object exists and differs from what the request assumes."""


class KubeExpiredError(KubeApiError):
    """The API no longer knows the version to continue from."""
