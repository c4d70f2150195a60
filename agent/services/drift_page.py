# SPDX-License-Identifier: Apache-2.0
"""The page ``/drift`` of the status server: the drifts and audit findings of this node, as JSON for ``aliquot drift``."""

from collections.abc import Mapping
from typing import Any

import msgspec

from agent.core.identity import Holder
from agent.ports.clock import Clock
from agent.ports.status_page import Page
from agent.services.audit import Auditor
from agent.services.reconciler import Reconciler


class DriftPage:
    """Makes the page in the HTTP server's threads, from values that are replaced as a whole."""

    def __init__(self, node_name: str, reconciler: Reconciler, auditor: Auditor, clock: Clock) -> None:
        self._node_name = node_name
        self._reconciler = reconciler
        self._auditor = auditor
        self._clock = clock

    def page(self, accept: str) -> Page:
        """Return the page."""
        del accept
        now, passed_at = self._clock.monotonic(), self._reconciler.passed_at
        body = {
            "node": self._node_name,
            "secondsSincePass": None if passed_at is None else round(now - passed_at, 1),
            "drifts": [
                {
                    "kind": one.drift.kind,
                    "cure": one.drift.cure,
                    "confirmed": one.confirmed,
                    "seconds": round(now - one.since, 1),
                    **_holder(one.drift.holder, one.drift.pod_uid),
                    "subject": one.drift.subject,
                    "message": one.drift.sentence,
                }
                for one in self._reconciler.open_drifts
            ],
            "findings": [
                {
                    "kind": one.finding.kind,
                    "seconds": round(now - one.since, 1),
                    **_holder(one.finding.holder, one.finding.pod_uid),
                    "deviceUuid": one.finding.device_uuid,
                    "pids": [process.pid for process in one.finding.processes],
                    "message": one.finding.sentence,
                }
                for one in self._auditor.confirmed
            ],
        }
        return Page(200, "application/json", msgspec.json.encode(body))


def _holder(holder: Holder | None, pod_uid: str) -> Mapping[str, Any]:
    if holder is None:
        return {"namespace": "", "pod": "", "container": "", "podUid": pod_uid}
    return {"namespace": holder.namespace, "pod": holder.pod, "container": holder.container, "podUid": pod_uid}
