"""The promises of the demo, each judged from measurements alone: what was expected, what was found, and whether it held."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from aliquot.demo.evidence import Evidence, Inside
from aliquot.demo.plan import Part, PlannedPod
from proto.units import GIB, MIB

PACE_KEPT = 0.7
"""Part of its earlier pace that a steady pod must keep. Not more, because the machine that runs the demo has other work too."""
MIN_SHARING_PODS = 3
FIGURE_TOLERANCE = 0.02
"""Part of its limit by which the driver's count may differ from the agent's: the driver rounds what it takes for itself to pages."""


@dataclass(frozen=True, slots=True)
class Promise:
    """One promise and its outcome."""

    name: str
    expected: str
    found: str
    held: bool


def judge(evidence: Evidence) -> tuple[Promise, ...]:
    """Judge every promise."""
    return tuple(promise for judgement in JUDGEMENTS for promise in judgement(evidence))


def all_run(evidence: Evidence) -> Iterator[Promise]:
    """Every pod that fits runs, and none of its containers was started twice."""
    states = {pod.name: evidence.states[pod.name] for pod in evidence.pods}
    found = ", ".join(f"{name} {state.phase}" for name, state in states.items())
    held = all(state.phase == "Running" and state.restarts == 0 for state in states.values())
    yield Promise("every pod that fits runs", f"{len(states)} pods Running", found, held)


def sharing(evidence: Evidence) -> Iterator[Promise]:
    """Several pods are on one physical GPU, and no device is promised more than it has."""
    pods_of: dict[str, set[str]] = {}
    promised: dict[str, int] = {}
    for item in evidence.scrape.slices:
        pods_of.setdefault(evidence.parents.get(item.device_uuid, item.device_uuid), set()).add(item.pod)
        promised[item.device_uuid] = promised.get(item.device_uuid, 0) + item.limit_bytes
    crowd = max(pods_of.values(), key=len, default=set())
    yield Promise(
        "pods share a GPU", f"at least {MIN_SHARING_PODS} pods on one", ", ".join(sorted(crowd)) or "none", len(crowd) >= MIN_SHARING_PODS
    )
    over = [uuid for uuid, total in promised.items() if total > _device_bytes(evidence, uuid)]
    yield Promise(
        "no device is promised more than it has",
        "the limits on each device add up to its memory at most",
        f"{len(promised)} devices, {_size(sum(promised.values()))} promised" + (f"; too much on {', '.join(over)}" if over else ""),
        bool(promised) and not over,
    )


def different_gpus(evidence: Evidence) -> Iterator[Promise]:
    """A pod with several vGPUs has each on another physical GPU."""
    for pod in evidence.pods:
        if pod.devices > 1:
            gpus = {evidence.parents.get(item.device_uuid, item.device_uuid) for item in evidence.scrape.of(pod.name)}
            yield Promise(f"{pod.name}: each vGPU on its own GPU", f"{pod.devices} GPUs", f"{len(gpus)} GPUs", len(gpus) == pod.devices)


def slices_inside(evidence: Evidence) -> Iterator[Promise]:
    """CUDA and NVML inside every container show the slice and not the card."""
    for pod in evidence.pods:
        inside = evidence.inside[pod.name]
        cards = {evidence.memory_bytes[evidence.parents[item.device_uuid]] for item in evidence.scrape.of(pod.name)}
        expected = f"{pod.devices} × {_size(pod.memory_bytes_per_device)}"
        context = f" (card: {_size(max(cards))})" if cards else ""
        yield _seen(
            f"{pod.name}: cuDeviceTotalMem shows the slice", pod, expected + context, [item.device_total_bytes for item in inside.cuda]
        )
        yield _seen(f"{pod.name}: cuMemGetInfo shows the slice", pod, expected + context, [item.total_bytes for item in inside.cuda])
        yield _nvml_seen(pod, inside, expected + context)


def greedy_stopped(evidence: Evidence) -> Iterator[Promise]:
    """The greedy container gets out-of-memory exactly at its limit, and holds no byte more."""
    pod = next(pod for pod in evidence.pods if pod.part is Part.GREEDY)
    limit, fill = pod.memory_bytes_per_device, evidence.fill
    used = sum(item.used_bytes or 0 for item in evidence.scrape.of(pod.name))
    refusals = sum(item.refusals or 0 for item in evidence.scrape.of(pod.name))
    if fill is None:
        yield Promise("greedy: refused at its limit", "CUDA_ERROR_OUT_OF_MEMORY", "it never reported a refusal", held=False)
        return
    name = "greedy: refused at its limit"
    yield Promise(name, "CUDA_ERROR_OUT_OF_MEMORY", fill.result_name, fill.result_name == "CUDA_ERROR_OUT_OF_MEMORY")
    exact = 0 <= limit - used < fill.smallest_refused_bytes
    yield Promise(
        "greedy: exactly at its limit",
        f"{limit} bytes used, less than {fill.smallest_refused_bytes} free",
        f"{used} bytes used, {fill.free_bytes} free: {_size(fill.held_bytes)} allocated, the rest is its context",
        exact and fill.free_bytes < fill.smallest_refused_bytes,
    )
    found = evidence.driver_after[pod.name]
    yield Promise("greedy: no more by the driver's own books", f"0 < bytes <= {limit}", str(found), 0 < found <= limit)
    yield Promise("greedy: its refusals are counted", "at least 1", str(refusals), refusals >= 1)


def figures_agree(evidence: Evidence) -> Iterator[Promise]:
    """What the agent says a container uses is what the driver says its processes hold, where the shim counts."""
    for pod in evidence.pods:
        if pod.part is Part.HARDWARE:
            continue
        told = sum(item.used_bytes or 0 for item in evidence.scrape.of(pod.name))
        driver = evidence.driver_after[pod.name]
        tolerance = int(FIGURE_TOLERANCE * pod.memory_bytes_per_device * pod.devices)
        expected = f"{_size(driver)} ± {_size(tolerance // MIB * MIB)}"
        held = driver > 0 and abs(told - driver) <= tolerance
        yield Promise(f"{pod.name}: the agent's figure is the driver's", expected, _size(told), held)


def neighbours_undisturbed(evidence: Evidence) -> Iterator[Promise]:
    """The others fail no call, keep their memory and their pace, and are refused nothing."""
    for pod in evidence.pods:
        if pod.part is Part.GREEDY:
            continue
        errors = evidence.inside[pod.name].errors
        refusals = sum(item.refusals or 0 for item in evidence.scrape.of(pod.name))
        yield Promise(
            f"{pod.name}: no call fails",
            "0 errors, 0 refusals",
            f"{len(errors)} errors, {refusals} refusals" + "".join(f"; {error}" for error in errors),
            not errors and refusals == 0,
        )
        pace = evidence.paces[pod.name]
        kept = pace.during / pace.before if pace.before else 0.0
        yield Promise(
            f"{pod.name}: keeps its pace",
            f"at least {PACE_KEPT:.0%} of {pace.before:.0f} kernels/s",
            f"{pace.during:.0f} kernels/s ({kept:.0%})",
            kept >= PACE_KEPT,
        )
        before, after = evidence.driver_before[pod.name], evidence.driver_after[pod.name]
        yield Promise(f"{pod.name}: keeps its memory", _size(before), _size(after), 0 < before == after)


def too_big_refused(evidence: Evidence) -> Iterator[Promise]:
    """A pod that asks more than is free stays refused, with the reason in its status, and never starts."""
    state, asked = evidence.states[evidence.too_big.name], evidence.too_big.memory_bytes_per_device
    found = f"{state.phase}, {state.reason or 'no reason'}, " + ("it ran" if state.started else "never started")
    refused = state.phase == "Pending" and state.reason == "CreateContainerConfigError" and not state.started
    yield Promise("too-big: stays refused", "Pending, CreateContainerConfigError, never started", found, refused)
    words = (str(asked // MIB), str(evidence.free_when_asked_bytes // MIB))
    told = all(word in state.message.replace(",", "") for word in words)
    name = "too-big: the reason names what was asked and what is free"
    said = state.message.rpartition(" desc = ")[2] or "no message"
    yield Promise(name, f"{words[0]} and {words[1]} MiB in the message", said, told)
    yield Promise("too-big: it is tried again", "at least 2 refusals", str(evidence.refused_starts), evidence.refused_starts >= 2)


def nothing_left(evidence: Evidence) -> Iterator[Promise]:
    """When the pods are gone, so are their shares."""
    if evidence.after_deletion is not None:
        allocated = sum(device.allocated_bytes or 0 for device in evidence.after_deletion.devices.values())
        slices = len(evidence.after_deletion.slices)
        found = f"{allocated} bytes allocated, {slices} slices"
        yield Promise("deleted pods leave nothing behind", "0 bytes allocated, 0 slices", found, allocated == 0 and slices == 0)


JUDGEMENTS: tuple[Callable[[Evidence], Iterator[Promise]], ...] = (
    all_run,
    sharing,
    different_gpus,
    slices_inside,
    greedy_stopped,
    figures_agree,
    neighbours_undisturbed,
    too_big_refused,
    nothing_left,
)


def _seen(name: str, pod: PlannedPod, expected: str, totals: list[int]) -> Promise:
    held = totals == [pod.memory_bytes_per_device] * pod.devices
    return Promise(name, expected, ", ".join(map(_size, totals)) or "no device", held)


def _nvml_seen(pod: PlannedPod, inside: Inside, expected: str) -> Promise:
    name = f"{pod.name}: NVML shows the slice"
    if inside.nvml is None:
        return Promise(name, expected, inside.nvml_error, held=False)
    return _seen(name, pod, expected, [device.total_bytes for device in inside.nvml.devices])


def _device_bytes(evidence: Evidence, uuid: str) -> int:
    """What the device can promise: by the agent's account for a GPU, by the driver's for a MIG instance."""
    device = evidence.scrape.devices.get(uuid)
    return device.total_bytes if device is not None else evidence.memory_bytes[uuid]


def _size(amount: int) -> str:
    return f"{amount / GIB:g} GiB" if amount % (GIB // 4) == 0 else f"{amount / MIB:g} MiB"
