"""What was measured during the demo, and how to read the output of the CUDA program in the containers. ``promises`` judges it."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from aliquot.demo.metrics import Scrape
from aliquot.demo.plan import PlannedPod
from aliquot.demo.smi import Listing

Event = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PodState:
    """A pod's state as kubectl would show it."""

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
    """How the greedy program's attempt to take everything ended."""

    held_bytes: int
    smallest_refused_bytes: int
    free_bytes: int
    total_bytes: int
    result_name: str


@dataclass(frozen=True, slots=True)
class Inside:
    """What was seen inside one container."""

    cuda: tuple[CudaDevice, ...]
    nvml: Listing | None
    """None when the listing could not be made; ``nvml_error`` says why."""
    nvml_error: str
    errors: tuple[str, ...]
    """Driver calls of the program that failed."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Kernels per second of one steady pod, before the greedy pod came and from then on."""

    before: float
    during: float


@dataclass(frozen=True, slots=True)
class Evidence:
    """Everything the promises are judged by."""

    pods: tuple[PlannedPod, ...]
    """Those that must run, the greedy one among them."""
    too_big: PlannedPod
    states: Mapping[str, PodState]
    inside: Mapping[str, Inside]
    fill: Fill | None
    paces: Mapping[str, Pace]
    scrape: Scrape
    refused_starts: int
    """Times the kubelet reported that the too-big pod could not start."""
    free_when_asked_bytes: int
    """Of the device the too-big pod wants, by the agent's account, when it was created."""
    memory_bytes: Mapping[str, int]
    """Memory of every GPU and MIG instance, as NVML tells the host."""
    parents: Mapping[str, str]
    """The physical GPU of each GPU and MIG instance."""
    driver_before: Mapping[str, int]
    """What each pod's processes held before the greedy pod came, by the driver's own list of processes."""
    driver_after: Mapping[str, int]
    """The same at the end."""
    after_deletion: Scrape | None
    """The agent's account after all pods were deleted; None when they were kept."""


def parse_events(lines: Iterable[str]) -> list[Event]:
    """Read the CUDA program's output: JSON objects, one a line, possibly among other text."""
    return [json.loads(line) for line in lines if line.startswith("{")]


def cuda_devices(events: Iterable[Event]) -> tuple[CudaDevice, ...]:
    """The devices that ``info`` reported."""
    return tuple(
        CudaDevice(event["uuid"], event["device_total_bytes"], event["total_bytes"], event["free_bytes"])
        for event in events
        if event["event"] == "device"
    )


def fill_result(events: Iterable[Event]) -> Fill | None:
    """The result of ``fill``, once it is there."""
    for event in events:
        if event["event"] == "fill":
            return Fill(
                held_bytes=event["held_bytes"],
                smallest_refused_bytes=event["smallest_refused_bytes"],
                free_bytes=event["free_bytes"],
                total_bytes=event["total_bytes"],
                result_name=event["result_name"],
            )
    return None


def failed_calls(events: Iterable[Event]) -> tuple[str, ...]:
    """The driver calls that failed, with the driver's word for why."""
    return tuple(f"{event['call']}: {event.get('result_name', event.get('reason'))}" for event in events if event["event"] == "error")


def progress_by_device(events: Iterable[Event]) -> dict[int, list[Event]]:
    """The progress reports of ``work``, by the device each of its processes works on."""
    reports: dict[int, list[Event]] = {}
    for event in events:
        if event["event"] == "progress":
            reports.setdefault(event.get("device", 0), []).append(event)
    return reports


def kernels_per_second(before: Mapping[int, list[Event]], after: Mapping[int, list[Event]]) -> float:
    """Return the pace between two readings, over all devices together.

    Each report counts the kernels since the one before, so a span begins and ends with a report; a device without a report between
    the readings adds nothing.
    """
    pace = 0.0
    for device, reports in after.items():
        begin = len(before.get(device, ()))
        if fresh := reports[begin:]:
            start_seconds = reports[begin - 1]["seconds"] if begin else 0.0
            pace += sum(report["kernels"] for report in fresh) / (fresh[-1]["seconds"] - start_seconds)
    return pace


def pod_state(pod: Mapping[str, Any]) -> PodState:
    """Read a pod's status."""
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
