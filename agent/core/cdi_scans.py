"""How far a container runtime is behind its CDI directories: an estimate, because no runtime tells.

The CDI library of containerd and CRI-O keeps the specs in memory. Each change in a directory makes it scan all of them again, one scan
after another, under the lock that a container's devices are looked up with; a lookup does not look into the directory itself. So what was
there when the last scan began is what a container gets: one that is made right after a spec was replaced may get the earlier one, without
an error.
Source: ``watch`` and ``InjectDevices``, https://github.com/cncf-tags/container-device-interface/blob/main/pkg/cdi/cache.go
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ScanPace:
    """How long scans take."""

    seconds_per_byte: float = 0.6e-6
    """Of all specs together. The library needs 2 ms of CPU for 12 kB (measured), and three times as long on a machine that is busy."""
    least_forgetting_seconds: float = 0.1
    most_forgetting_seconds: float = 5.0
    """Kubelet waits 30 s for the answer of PreStartContainer."""

    def scan_seconds(self, spec_bytes: int) -> float:
        """Return how long one scan may take."""
        return min(spec_bytes * self.seconds_per_byte, self.most_forgetting_seconds / 2)

    def forgetting_seconds(self, spec_bytes: int) -> float:
        """Return after what time no container gets a spec that was removed: the scan that ran then, and the whole of the one after it."""
        return max(2 * self.scan_seconds(spec_bytes), self.least_forgetting_seconds)


@dataclass(frozen=True, slots=True)
class ScanBacklog:
    """The scans that our changes have brought about. Times are monotonic, in seconds."""

    busy_until: float = -math.inf

    def changed(self, now: float, scan_seconds: float) -> "ScanBacklog":
        """Return the backlog after a change: it brings about one more scan."""
        return ScanBacklog(max(now, self.busy_until) + scan_seconds)

    def seen_from(self, now: float, scan_seconds: float) -> float:
        """Return from when on containers get what is changed now, by the backlog before that change.

        From then on the scan that sees it runs, and lookups wait for it: at once, or when the scan that has begun is over.
        """
        return max(now, min(self.busy_until, now + scan_seconds))
