# SPDX-License-Identifier: Apache-2.0
"""The errors of the scheduler, as one small tree. Adapters translate into it; services and verbs handle them.

    SchedulerError
    ├── WireError                 a request does not follow its protocol: HTTP 400, nothing changed
    ├── NotReadyError             this replica does not decide now: an error in the replies of filter and bind, else HTTP 503
    ├── CertificateError          the Secret of the webhook's certificate cannot be used, and why
    └── HistoryError              Prometheus gives no history, and why

A failed request to the Kubernetes API is ``aliquot.kube.errors.KubeApiError``.
A pod that fits nowhere is a result, not an error: ``core.cluster.reasons.NodeReason`` or ``aliquot.placement.refusal.Refusal``.
An invalid setting is ``aliquot.process.settings.SettingsError``: exit code 2 with its message.
"""


class SchedulerError(Exception):
    """Base of all errors that the scheduler raises itself."""


class WireError(SchedulerError):
    """A request from outside cannot be decoded."""


class NotReadyError(SchedulerError):
    """This replica does not decide now; the message says why."""


class CertificateError(SchedulerError):
    """The Secret of the webhook's certificate cannot be used."""


class HistoryError(SchedulerError):
    """The history cannot be read."""
