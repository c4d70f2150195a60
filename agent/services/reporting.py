# SPDX-License-Identifier: Apache-2.0
"""Where services report to: events for ``kubectl describe``, counters for /metrics."""

from dataclasses import dataclass

from agent.services.events import EventRecorder
from agent.services.telemetry import Telemetry


@dataclass(frozen=True, slots=True)
class Reporting:
    """Both at once."""

    events: EventRecorder
    telemetry: Telemetry
