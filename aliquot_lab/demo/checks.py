# SPDX-License-Identifier: Apache-2.0
"""The checks of the demo. Each uses measurements only, and has what was expected, what was found, and whether it passed."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from aliquot.contract.units import GIB, MIB
from aliquot_lab.demo.evidence import Evidence, Inside
from aliquot_lab.demo.plan import PlannedPod, Role

SPEED_KEPT = 0.7
"""Part of its earlier speed that a steady pod must keep. It is not higher because the machine also runs other programs."""
MIN_SHARING_PODS = 3
FIGURE_TOLERANCE = 0.02
"""Largest difference between the driver's count and the agent's, as a part of the limit: the driver rounds its own memory to pages."""


@dataclass(frozen=True, slots=True)
class Check:
    """One check and its outcome."""

    name: str
    expected: str
    found: str
    passed: bool


def evaluate(evidence: Evidence) -> tuple[Check, ...]:
    """Return the results of all checks."""
    return tuple(result for check in CHECKS for result in check(evidence))


def all_run(evidence: Evidence) -> Iterator[Check]:
    """Every pod that fits runs, and its container has started once."""
    states = {pod.name: evidence.states[pod.name] for pod in evidence.pods}
    found = ", ".join(f"{name} {state.phase}" for name, state in states.items())
    held = all(state.phase == "Running" and state.restarts == 0 for state in states.values())
    yield Check("every pod that fits runs", f"{len(states)} pods Running", found, held)


def sharing(evidence: Evidence) -> Iterator[Check]:
    """Several pods are on one physical GPU, and the limits on a device never exceed its memory."""
    pods_of: dict[str, set[str]] = {}
    allocated: dict[str, int] = {}
    for item in evidence.scrape.shares:
        pods_of.setdefault(evidence.parents.get(item.device_uuid, item.device_uuid), set()).add(item.pod)
        allocated[item.device_uuid] = allocated.get(item.device_uuid, 0) + item.limit_bytes
    largest = max(pods_of.values(), key=len, default=set())
    yield Check(
        "pods share a GPU",
        f"at least {MIN_SHARING_PODS} pods on one",
        ", ".join(sorted(largest)) or "no pod",
        len(largest) >= MIN_SHARING_PODS,
    )
    over = [uuid for uuid, total in allocated.items() if total > _device_bytes(evidence, uuid)]
    yield Check(
        "no device has more allocated than its memory",
        "the limits on each device sum up to at most its memory",
        f"{len(allocated)} devices, {_size(sum(allocated.values()))} allocated" + (f"; too much on {', '.join(over)}" if over else ""),
        bool(allocated) and not over,
    )


def different_gpus(evidence: Evidence) -> Iterator[Check]:
    """Each vGPU of a pod is on another physical GPU."""
    for pod in evidence.pods:
        if pod.devices > 1:
            gpus = {evidence.parents.get(item.device_uuid, item.device_uuid) for item in evidence.scrape.of(pod.name)}
            yield Check(f"{pod.name}: each vGPU on its own GPU", f"{pod.devices} GPUs", f"{len(gpus)} GPUs", len(gpus) == pod.devices)


def shares_inside(evidence: Evidence) -> Iterator[Check]:
    """CUDA and NVML in every container show the share and not the whole GPU."""
    for pod in evidence.pods:
        inside = evidence.inside[pod.name]
        whole = {evidence.memory_bytes[evidence.parents[item.device_uuid]] for item in evidence.scrape.of(pod.name)}
        expected = f"{pod.devices} × {_size(pod.memory_bytes_per_device)}"
        context = f" (whole GPU: {_size(max(whole))})" if whole else ""
        yield _seen(
            f"{pod.name}: cuDeviceTotalMem shows the share", pod, expected + context, [item.device_total_bytes for item in inside.cuda]
        )
        yield _seen(f"{pod.name}: cuMemGetInfo shows the share", pod, expected + context, [item.total_bytes for item in inside.cuda])
        yield _nvml_seen(pod, inside, expected + context)


def greedy_stopped(evidence: Evidence) -> Iterator[Check]:
    """The greedy container gets out-of-memory exactly at its limit, and never holds more."""
    pod = next(pod for pod in evidence.pods if pod.role is Role.GREEDY)
    limit, fill = pod.memory_bytes_per_device, evidence.fill
    used = sum(item.used_bytes or 0 for item in evidence.scrape.of(pod.name))
    refusals = sum(item.refusals or 0 for item in evidence.scrape.of(pod.name))
    if fill is None:
        yield Check("greedy: refused at its limit", "CUDA_ERROR_OUT_OF_MEMORY", "no refusal reported", passed=False)
        return
    name = "greedy: refused at its limit"
    yield Check(name, "CUDA_ERROR_OUT_OF_MEMORY", fill.result_name, fill.result_name == "CUDA_ERROR_OUT_OF_MEMORY")
    exact = 0 <= limit - used < fill.smallest_refused_bytes
    yield Check(
        "greedy: exactly at its limit",
        f"{limit} bytes used, less than {fill.smallest_refused_bytes} free",
        f"{used} bytes used, {fill.free_bytes} free: {_size(fill.held_bytes)} allocated, the rest is its context",
        exact and fill.free_bytes < fill.smallest_refused_bytes,
    )
    found = evidence.driver_after[pod.name]
    yield Check("greedy: not above its limit by the driver's count", f"0 < bytes <= {limit}", str(found), 0 < found <= limit)
    yield Check("greedy: its refusals are counted", "at least 1", str(refusals), refusals >= 1)
    if fill.text:
        shown = f"{limit / GIB:.2f} GiB"
        yield Check(
            "greedy: PyTorch's message names the share", f"a total capacity of {shown}", fill.text, f"capacity of {shown}" in fill.text
        )


def figures_agree(evidence: Evidence) -> Iterator[Check]:
    """The usage that the agent reports is what the driver reports for the processes, where the shim counts."""
    for pod in evidence.pods:
        if pod.role is Role.HARDWARE:
            continue
        reported = sum(item.used_bytes or 0 for item in evidence.scrape.of(pod.name))
        driver = evidence.driver_after[pod.name]
        tolerance = int(FIGURE_TOLERANCE * pod.memory_bytes_per_device * pod.devices)
        expected = f"{_size(driver)} ± {_size(tolerance // MIB * MIB)}"
        held = driver > 0 and abs(reported - driver) <= tolerance
        yield Check(f"{pod.name}: agent and driver report the same memory", expected, _size(reported), held)


def neighbours_undisturbed(evidence: Evidence) -> Iterator[Check]:
    """The other pods have no failed call and no refusal, and keep their memory and their speed."""
    for pod in evidence.pods:
        if pod.role is Role.GREEDY:
            continue
        errors = evidence.inside[pod.name].errors
        refusals = sum(item.refusals or 0 for item in evidence.scrape.of(pod.name))
        yield Check(
            f"{pod.name}: no call fails",
            "0 errors, 0 refusals",
            f"{len(errors)} errors, {refusals} refusals" + "".join(f"; {error}" for error in errors),
            not errors and refusals == 0,
        )
        speed = evidence.speeds[pod.name]
        kept = speed.during / speed.before if speed.before else 0.0
        yield Check(
            f"{pod.name}: keeps its speed",
            f"at least {SPEED_KEPT:.0%} of {speed.before:.0f} kernels/s",
            f"{speed.during:.0f} kernels/s ({kept:.0%})",
            kept >= SPEED_KEPT,
        )
        before, after = evidence.driver_before[pod.name], evidence.driver_after[pod.name]
        yield Check(f"{pod.name}: keeps its memory", _size(before), _size(after), 0 < before == after)


def too_big_refused(evidence: Evidence) -> Iterator[Check]:
    """A pod that requests more than is free stays refused, with the reason in its status, and never starts."""
    state, requested = evidence.states[evidence.too_big.name], evidence.too_big.memory_bytes_per_device
    found = f"{state.phase}, {state.reason or 'no reason'}, " + ("it ran" if state.started else "never started")
    refused = state.phase == "Pending" and state.reason == "CreateContainerConfigError" and not state.started
    yield Check("too-big: stays refused", "Pending, CreateContainerConfigError, never started", found, refused)
    words = (str(requested // MIB), str(evidence.free_at_request_bytes // MIB))
    named = all(word in state.message.replace(",", "") for word in words)
    name = "too-big: the reason names the requested and the free memory"
    message = state.message.rpartition(" desc = ")[2] or "no message"
    yield Check(name, f"{words[0]} and {words[1]} MiB in the message", message, named)
    yield Check("too-big: kubelet retries", "at least 2 refusals", str(evidence.refused_starts), evidence.refused_starts >= 2)


def nothing_left(evidence: Evidence) -> Iterator[Check]:
    """The shares are free after the pods are deleted."""
    if evidence.after_deletion is not None:
        allocated = sum(device.allocated_bytes or 0 for device in evidence.after_deletion.devices.values())
        shares = len(evidence.after_deletion.shares)
        found = f"{allocated} bytes allocated, {shares} shares"
        yield Check("deleted pods free their shares", "0 bytes allocated, 0 shares", found, allocated == 0 and shares == 0)


CHECKS: tuple[Callable[[Evidence], Iterator[Check]], ...] = (
    all_run,
    sharing,
    different_gpus,
    shares_inside,
    greedy_stopped,
    figures_agree,
    neighbours_undisturbed,
    too_big_refused,
    nothing_left,
)


def _seen(name: str, pod: PlannedPod, expected: str, totals: list[int]) -> Check:
    held = totals == [pod.memory_bytes_per_device] * pod.devices
    return Check(name, expected, ", ".join(map(_size, totals)) or "no device", held)


def _nvml_seen(pod: PlannedPod, inside: Inside, expected: str) -> Check:
    name = f"{pod.name}: NVML shows the share"
    if inside.nvml is None:
        return Check(name, expected, inside.nvml_error, passed=False)
    return _seen(name, pod, expected, [device.total_bytes for device in inside.nvml.devices])


def _device_bytes(evidence: Evidence, uuid: str) -> int:
    """Return the memory that the device can allocate: of a GPU from the agent, of a MIG instance from the driver."""
    device = evidence.scrape.devices.get(uuid)
    return device.total_bytes if device is not None else evidence.memory_bytes[uuid]


def _size(amount: int) -> str:
    return f"{amount / GIB:g} GiB" if amount % (GIB // 4) == 0 else f"{amount / MIB:g} MiB"
