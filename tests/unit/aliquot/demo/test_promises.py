from dataclasses import replace

import pytest

from aliquot.demo.evidence import CudaDevice, Evidence, Fill, Inside, Pace, PodState
from aliquot.demo.metrics import DeviceMemory, Scrape, Slice
from aliquot.demo.plan import Part, PlannedPod, oversized
from aliquot.demo.promises import judge
from aliquot.demo.smi import Listing, VisibleDevice
from proto.units import GIB, MIB

CARD = 80 * GIB
RUNNING = PodState("Running", "", "", started=True, restarts=0)
GREEDY_USED = 10 * GIB - 1000


def planned(name, memory_bytes, *, devices=1, part=Part.STEADY):
    return PlannedPod(name, part, {}, devices, memory_bytes, "true")


def seen(memory_bytes, devices=1):
    cuda = tuple(CudaDevice(f"u{number}", memory_bytes, memory_bytes, 0) for number in range(devices))
    nvml = tuple(VisibleDevice(number, f"u{number}", "GPU", memory_bytes, 0, memory_bytes, None, ()) for number in range(devices))
    return Inside(cuda, Listing("1", "1", nvml), "", ())


def scrape(*slices, allocated=0):
    return Scrape("", slices, {uuid: DeviceMemory(CARD, 0, allocated) for uuid in ("GPU-0", "GPU-1")})


def good_evidence():
    pods = (
        planned("train", 20 * GIB),
        planned("pair", 12 * GIB, devices=2),
        planned("mig", 9 * GIB, part=Part.HARDWARE),
        planned("greedy", 10 * GIB, part=Part.GREEDY),
    )
    too_big = oversized("GPU-0", 38 * GIB)
    slices = (
        Slice("train", "cuda", "GPU-0", 20 * GIB, 5 * GIB, 0),
        Slice("pair", "cuda", "GPU-0", 12 * GIB, 5 * GIB, 0),
        Slice("pair", "cuda", "GPU-1", 12 * GIB, 5 * GIB, 0),
        Slice("mig", "cuda", "MIG-0", 9 * GIB, None, None),
        Slice("greedy", "cuda", "GPU-0", 10 * GIB, GREEDY_USED, 3),
    )
    message = f"asked {38 * 1024 + 1} MiB, {38 * 1024} MiB are free"
    books = {"train": 5 * GIB + 2 * MIB, "pair": 10 * GIB, "mig": 4 * GIB, "greedy": GREEDY_USED}
    return Evidence(
        pods=pods,
        too_big=too_big,
        states={**{pod.name: RUNNING for pod in pods}, "too-big": PodState("Pending", "CreateContainerConfigError", message, False, 0)},
        inside={pod.name: seen(pod.memory_bytes_per_device, pod.devices) for pod in pods},
        fill=Fill(9 * GIB, 4096, 1000, 10 * GIB, "CUDA_ERROR_OUT_OF_MEMORY"),
        paces={name: Pace(400.0, 390.0) for name in ("train", "pair", "mig")},
        scrape=scrape(*slices),
        refused_starts=3,
        free_when_asked_bytes=38 * GIB,
        memory_bytes={"GPU-0": CARD, "GPU-1": CARD, "GPU-2": CARD, "MIG-0": 9 * GIB},
        parents={"GPU-0": "GPU-0", "GPU-1": "GPU-1", "GPU-2": "GPU-2", "MIG-0": "GPU-2"},
        driver_before=books,
        driver_after=books,
        after_deletion=scrape(),
    )


def with_state(evidence, pod, **changes):
    return replace(evidence, states={**evidence.states, pod: replace(evidence.states[pod], **changes)})


def with_inside(evidence, pod, **changes):
    return replace(evidence, inside={**evidence.inside, pod: replace(evidence.inside[pod], **changes)})


def with_slice(evidence, pod, **changes):
    slices = tuple(replace(item, **changes) if item.pod == pod else item for item in evidence.scrape.slices)
    return replace(evidence, scrape=replace(evidence.scrape, slices=slices))


def with_fill(evidence, **changes):
    return replace(evidence, fill=replace(evidence.fill, **changes))


def with_books(evidence, pod, amount):
    return replace(evidence, driver_after={**evidence.driver_after, pod: amount})


def card_in_nvml(evidence):
    return with_inside(evidence, "train", nvml=seen(CARD).nvml)


BREAKAGES = [
    pytest.param(lambda e: with_state(e, "train", phase="Pending"), {"every pod that fits runs"}, id="not running"),
    pytest.param(lambda e: with_state(e, "mig", restarts=1), {"every pod that fits runs"}, id="restarted"),
    pytest.param(lambda e: with_slice(e, "train", device_uuid="GPU-1"), {"pods share a GPU"}, id="spread"),
    pytest.param(lambda e: with_slice(e, "train", limit_bytes=CARD), {"no device is promised more than it has"}, id="promised too much"),
    pytest.param(
        lambda e: with_slice(e, "mig", limit_bytes=10 * GIB), {"no device is promised more than it has"}, id="more than the instance"
    ),
    pytest.param(lambda e: with_slice(e, "pair", device_uuid="GPU-0"), {"pair: each vGPU on its own GPU"}, id="both on one GPU"),
    pytest.param(
        lambda e: with_inside(e, "train", cuda=(CudaDevice("u", CARD, 20 * GIB, 0),)),
        {"train: cuDeviceTotalMem shows the slice"},
        id="total is the card",
    ),
    pytest.param(
        lambda e: with_inside(e, "train", cuda=(CudaDevice("u", 20 * GIB, CARD, 0),)),
        {"train: cuMemGetInfo shows the slice"},
        id="info is the card",
    ),
    pytest.param(
        lambda e: with_inside(e, "mig", cuda=()),
        {"mig: cuDeviceTotalMem shows the slice", "mig: cuMemGetInfo shows the slice"},
        id="no device",
    ),
    pytest.param(card_in_nvml, {"train: NVML shows the slice"}, id="NVML shows the card"),
    pytest.param(lambda e: with_inside(e, "pair", nvml=seen(12 * GIB, 8).nvml), {"pair: NVML shows the slice"}, id="NVML shows all GPUs"),
    pytest.param(lambda e: with_inside(e, "greedy", nvml=None, nvml_error="gone"), {"greedy: NVML shows the slice"}, id="no NVML"),
    pytest.param(lambda e: replace(e, fill=None), {"greedy: refused at its limit"}, id="never refused"),
    pytest.param(lambda e: with_fill(e, result_name="CUDA_ERROR_UNKNOWN"), {"greedy: refused at its limit"}, id="another error"),
    pytest.param(lambda e: with_fill(e, smallest_refused_bytes=1000), {"greedy: exactly at its limit"}, id="refused too early"),
    pytest.param(lambda e: with_slice(e, "greedy", used_bytes=10 * GIB + 1), {"greedy: exactly at its limit"}, id="one byte over"),
    pytest.param(lambda e: with_books(e, "greedy", 10 * GIB + 1), {"greedy: no more by the driver's own books"}, id="over by the driver"),
    pytest.param(
        lambda e: with_books(e, "greedy", 0),
        {"greedy: no more by the driver's own books", "greedy: the agent's figure is the driver's"},
        id="unknown to the driver",
    ),
    pytest.param(lambda e: with_slice(e, "train", used_bytes=4 * GIB), {"train: the agent's figure is the driver's"}, id="too little told"),
    pytest.param(lambda e: with_slice(e, "greedy", refusals=0), {"greedy: its refusals are counted"}, id="no refusal counted"),
    pytest.param(lambda e: with_inside(e, "train", errors=("cuMemAlloc: OOM",)), {"train: no call fails"}, id="a neighbour's call fails"),
    pytest.param(lambda e: with_slice(e, "pair", refusals=1), {"pair: no call fails"}, id="a neighbour is refused"),
    pytest.param(lambda e: replace(e, paces={**e.paces, "train": Pace(400, 200)}), {"train: keeps its pace"}, id="a neighbour slows down"),
    pytest.param(lambda e: replace(e, paces={**e.paces, "train": Pace(0, 0)}), {"train: keeps its pace"}, id="a neighbour never worked"),
    pytest.param(lambda e: with_books(e, "pair", 10 * GIB - MIB), {"pair: keeps its memory"}, id="a neighbour loses memory"),
    pytest.param(lambda e: with_state(e, "too-big", started=True), {"too-big: stays refused"}, id="too-big ran"),
    pytest.param(lambda e: with_state(e, "too-big", phase="Failed"), {"too-big: stays refused"}, id="too-big failed for good"),
    pytest.param(
        lambda e: with_state(e, "too-big", message="no"), {"too-big: the reason names what was asked and what is free"}, id="no reason"
    ),
    pytest.param(lambda e: replace(e, refused_starts=1), {"too-big: it is tried again"}, id="given up"),
    pytest.param(lambda e: replace(e, after_deletion=scrape(allocated=1)), {"deleted pods leave nothing behind"}, id="leaked share"),
    pytest.param(lambda e: replace(e, after_deletion=scrape(*e.scrape.slices)), {"deleted pods leave nothing behind"}, id="leaked slices"),
]


def test_good_evidence_holds_every_promise():
    assert [promise.name for promise in judge(good_evidence()) if not promise.held] == []


@pytest.mark.parametrize(("breakage", "broken"), BREAKAGES)
def test_a_fact_that_is_wrong_breaks_its_promise_and_no_other(breakage, broken):
    assert {promise.name for promise in judge(breakage(good_evidence())) if not promise.held} == broken


def test_every_kind_of_promise_can_be_broken():
    def kinds(names):
        return {name.partition(": ")[2] or name for name in names}

    broken = {name for case in BREAKAGES for name in case.values[1]}
    assert kinds(promise.name for promise in judge(good_evidence())) == kinds(broken)


def test_kept_pods_make_no_promise_about_deletion():
    names = {promise.name for promise in judge(replace(good_evidence(), after_deletion=None))}
    assert "deleted pods leave nothing behind" not in names


def test_what_was_expected_and_found_is_said():
    (promise,) = [item for item in judge(card_in_nvml(good_evidence())) if not item.held]
    assert promise.expected == "1 × 20 GiB (card: 80 GiB)"
    assert promise.found == "80 GiB"


def test_a_size_that_is_no_round_number_is_written_in_mib():
    evidence = with_books(good_evidence(), "pair", 10 * GIB + MIB)
    assert next(item for item in judge(evidence) if item.name == "pair: keeps its memory").found == "10241 MiB"
