# SPDX-License-Identifier: Apache-2.0
"""The measurements of the demo, and parsers for the output of the CUDA program in the containers. ``checks`` evaluates them."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from aliquot_cli.smi import Listing
from aliquot_lab.demo.metrics import Scrape
from aliquot_lab.demo.plan import PlannedPod

Event = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PodState:
    """A pod's state as kubectl shows it."""

    phase: str
    reason: str
    message: str
    started: bool
    """Whether its container ever ran."""
    restarts: int


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """A device as CUDA shows it inside a container: cuDeviceTotalMem and cuMemGetInfo."""

    uuid: str
    device_total_bytes: int
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Fill:
    """The end of the greedy program's attempt to allocate everything."""

    held_bytes: int
    smallest_refused_bytes: int
    free_bytes: int
    total_bytes: int
    result_name: str
    text: str = ""
    """The message of PyTorch's OutOfMemoryError; empty for other programs."""


@dataclass(frozen=True, slots=True)
class Inside:
    """What CUDA and NVML show in one container."""

    cuda: tuple[CudaDevice, ...]
    nvml: Listing | None
    """None when NVML failed; ``nvml_error`` has the reason."""
    nvml_error: str
    errors: tuple[str, ...]
    """The program's driver calls that failed."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Kernels per second of one steady pod, before and after the greedy pod started."""

    before: float
    during: float


@dataclass(frozen=True, slots=True)
class Evidence:
    """All measurements."""

    pods: tuple[PlannedPod, ...]
    """The pods that must run, with the greedy one."""
    too_big: PlannedPod
    states: Mapping[str, PodState]
    inside: Mapping[str, Inside]
    fill: Fill | None
    speeds: Mapping[str, Speed]
    scrape: Scrape
    refused_starts: int
    """Times the kubelet reported that the too-big pod could not start."""
    free_at_request_bytes: int
    """Free memory of the device that the too-big pod requests, from the agent, at the time when it was created."""
    memory_bytes: Mapping[str, int]
    """Memory of every GPU and MIG instance, from NVML on the host."""
    parents: Mapping[str, str]
    """The physical GPU of each GPU and MIG instance."""
    driver_before: Mapping[str, int]
    """Memory of each pod's processes before the greedy pod started, from the driver's list of processes."""
    driver_after: Mapping[str, int]
    """The same at the end."""
    after_deletion: Scrape | None
    """The agent's metrics after all pods were deleted; None with --keep."""


def parse_events(lines: Iterable[str]) -> list[Event]:
    """Parse the CUDA program's output: one JSON object on a line, other lines are skipped."""
    return [json.loads(line) for line in lines if line.startswith("{")]


def cuda_devices(events: Iterable[Event]) -> tuple[CudaDevice, ...]:
    """Return the devices that ``info`` reported."""
    return tuple(
        CudaDevice(event["uuid"], event["device_total_bytes"], event["total_bytes"], event["free_bytes"])
        for event in events
        if event["event"] == "device"
    )


def fill_result(events: Iterable[Event]) -> Fill | None:
    """Return the result of ``fill``; None before it ends."""
    for event in events:
        if event["event"] == "fill":
            return Fill(
                held_bytes=event["held_bytes"],
                smallest_refused_bytes=event["smallest_refused_bytes"],
                free_bytes=event["free_bytes"],
                total_bytes=event["total_bytes"],
                result_name=event["result_name"],
                text=event.get("text", ""),
            )
    return None


def failed_calls(events: Iterable[Event]) -> tuple[str, ...]:
    """Return the driver calls that failed, with the driver's error."""
    return tuple(f"{event['call']}: {event.get('result_name', event.get('reason'))}" for event in events if event["event"] == "error")


def progress_by_device(events: Iterable[Event]) -> dict[int, list[Event]]:
    """Return the progress reports of ``work`` by CUDA ordinal."""
    reports: dict[int, list[Event]] = {}
    for event in events:
        if event["event"] == "progress":
            reports.setdefault(event.get("device", 0), []).append(event)
    return reports


def kernels_per_second(before: Mapping[int, list[Event]], after: Mapping[int, list[Event]]) -> float:
    """Return the speed between two readings, summed over all devices.

    Each report counts the kernels since the previous one, so a span begins and ends with a report. A device without a report between
    the readings counts as 0.
    """
    speed = 0.0
    for device, reports in after.items():
        begin = len(before.get(device, ()))
        if fresh := reports[begin:]:
            start_seconds = reports[begin - 1]["seconds"] if begin else 0.0
            speed += sum(report["kernels"] for report in fresh) / (fresh[-1]["seconds"] - start_seconds)
    return speed


def pod_state(pod: Mapping[str, Any]) -> PodState:
    """Parse a pod's status."""
    status = pod.get("status", {})
    containers = status.get("containerStatuses", [])
    reason, message = status.get("reason", ""), status.get("message", "")
    for container in containers:
        if waiting := container["state"].get("waiting"):
            reason, message = waiting.get("reason", ""), waiting.get("message", "")
        elif terminated := container["state"].get("terminated"):
            reason, message = terminated.get("reason", ""), f"exit code {terminated['exitCode']}"
    return PodState(
        phase=status.get("phase", "Unknown"),
        reason=reason,
        message=message,
        started=any(container.get("containerID") for container in containers),
        restarts=sum(container.get("restartCount", 0) for container in containers),
    )
