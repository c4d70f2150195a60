# SPDX-License-Identifier: Apache-2.0
"""Parses the agent's metrics page."""

from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from aliquot.contract import METRIC_PREFIX


@dataclass(frozen=True, slots=True)
class Share:
    """One container's share of one device, as the agent reports it."""

    pod: str
    container: str
    device_uuid: str
    limit_bytes: int
    used_bytes: int | None
    refusals: int | None
    """None for a MIG instance: the hardware refuses, and the shim does not count."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """One device's memory, as the agent reports it."""

    total_bytes: int
    used_bytes: int | None
    allocated_bytes: int | None


@dataclass(frozen=True, slots=True)
class Scrape:
    """One reading of the page."""

    text: str
    shares: tuple[Share, ...]
    devices: Mapping[str, DeviceMemory]

    def of(self, pod: str) -> tuple[Share, ...]:
        """Return the shares of one pod."""
        return tuple(item for item in self.shares if item.pod == pod)


def parse(text: str) -> Scrape:
    """Parse the text of the page."""
    values: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = sample.labels
            key = (labels.get("namespace", ""), labels.get("pod", ""), labels.get("container", ""), labels.get("device_uuid", ""))
            values.setdefault(sample.name.removeprefix(METRIC_PREFIX), {})[key] = sample.value
    limits, used, refusals = (
        values.get(name, {}) for name in ("container_memory_limit_bytes", "container_memory_used_bytes", "container_refusals_total")
    )
    shares = tuple(
        Share(pod, container, uuid, int(limit), _whole(used.get(key)), _whole(refusals.get(key)))
        for key, limit in limits.items()
        for _, pod, container, uuid in [key]
    )
    totals, device_used, allocated = (values.get(f"device_memory_{name}_bytes", {}) for name in ("total", "used", "allocated"))
    devices = {key[3]: DeviceMemory(int(total), _whole(device_used.get(key)), _whole(allocated.get(key))) for key, total in totals.items()}
    return Scrape(text, shares, devices)


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
