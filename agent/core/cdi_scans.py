# SPDX-License-Identifier: Apache-2.0
"""Estimates how far a container runtime is behind its CDI directories, because no runtime reports it.

The CDI library of containerd and CRI-O caches the specs in memory. After each change in a directory it scans all of them again, one scan
after another. A scan holds the lock that a device lookup needs, and a lookup does not read the directory itself. So a container gets the
specs that existed when the last scan began. One that starts right after a spec was replaced may get the old spec without an error.
Source: ``watch`` and ``InjectDevices``, https://github.com/cncf-tags/container-device-interface/blob/main/pkg/cdi/cache.go
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ScanPace:
    """How long scans take."""

    seconds_per_byte: float = 0.6e-6
    """For the size of all specs together. The library needs 2 ms of CPU for 12 kB (measured), and three times as long on a busy machine."""
    least_forgetting_seconds: float = 0.1
    most_forgetting_seconds: float = 5.0
    """Kubelet waits 30 s for the response of PreStartContainer."""

    def scan_seconds(self, spec_bytes: int) -> float:
        """Return how long one scan may take."""
        return min(spec_bytes * self.seconds_per_byte, self.most_forgetting_seconds / 2)

    def forgetting_seconds(self, spec_bytes: int) -> float:
        """Return the time after which no container gets a removed spec: the scan that was running, plus one whole scan after it."""
        return max(2 * self.scan_seconds(spec_bytes), self.least_forgetting_seconds)


@dataclass(frozen=True, slots=True)
class ScanBacklog:
    """The scans that the agent's changes have caused. Times are monotonic, in seconds."""

    busy_until: float = -math.inf

    def changed(self, now: float, scan_seconds: float) -> "ScanBacklog":
        """Return the backlog after a change: it causes one more scan."""
        return ScanBacklog(max(now, self.busy_until) + scan_seconds)

    def seen_from(self, now: float, scan_seconds: float) -> float:
        """Return the time from which containers get a change made now, given the backlog before that change.

        It is the start of the scan that sees the change: at once, or when the running scan ends. Lookups wait for that scan.
        """
        return max(now, min(self.busy_until, now + scan_seconds))
