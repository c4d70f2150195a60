# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import pytest

from aliquot.contract.units import GIB, MIB
from aliquot_cli.smi import Listing, VisibleDevice
from aliquot_lab.demo.checks import evaluate
from aliquot_lab.demo.evidence import CudaDevice, Evidence, Fill, Inside, PodState, Speed
from aliquot_lab.demo.metrics import DeviceMemory, Scrape, Share
from aliquot_lab.demo.plan import PlannedPod, Role, oversized

CARD = 80 * GIB
RUNNING = PodState("Running", "", "", started=True, restarts=0)
GREEDY_USED = 10 * GIB - 1000


def planned(name, memory_bytes, *, devices=1, role=Role.STEADY):
    return PlannedPod(name, role, {}, devices, memory_bytes, "true")


def seen(memory_bytes, devices=1):
    cuda = tuple(CudaDevice(f"u{number}", memory_bytes, memory_bytes, 0) for number in range(devices))
    nvml = tuple(VisibleDevice(number, f"u{number}", "GPU", memory_bytes, 0, memory_bytes, None, ()) for number in range(devices))
    return Inside(cuda, Listing("1", "1", nvml), "", ())


def scrape(*shares, allocated=0):
    return Scrape("", shares, {uuid: DeviceMemory(CARD, 0, allocated) for uuid in ("GPU-0", "GPU-1")})


def good_evidence():
    pods = (
        planned("train", 20 * GIB),
        planned("pair", 12 * GIB, devices=2),
        planned("mig", 9 * GIB, role=Role.HARDWARE),
        planned("greedy", 10 * GIB, role=Role.GREEDY),
    )
    too_big = oversized("GPU-0", 38 * GIB)
    shares = (
        Share("train", "cuda", "GPU-0", 20 * GIB, 5 * GIB, 0),
        Share("pair", "cuda", "GPU-0", 12 * GIB, 5 * GIB, 0),
        Share("pair", "cuda", "GPU-1", 12 * GIB, 5 * GIB, 0),
        Share("mig", "cuda", "MIG-0", 9 * GIB, None, None),
        Share("greedy", "cuda", "GPU-0", 10 * GIB, GREEDY_USED, 3),
    )
    message = f"asked {38 * 1024 + 1} MiB, {38 * 1024} MiB are free"
    driver_memory = {"train": 5 * GIB + 2 * MIB, "pair": 10 * GIB, "mig": 4 * GIB, "greedy": GREEDY_USED}
    return Evidence(
        pods=pods,
        too_big=too_big,
        states={**{pod.name: RUNNING for pod in pods}, "too-big": PodState("Pending", "CreateContainerConfigError", message, False, 0)},
        inside={pod.name: seen(pod.memory_bytes_per_device, pod.devices) for pod in pods},
        fill=Fill(9 * GIB, 4096, 1000, 10 * GIB, "CUDA_ERROR_OUT_OF_MEMORY", "GPU 0 has a total capacity of 10.00 GiB"),
        speeds={name: Speed(400.0, 390.0) for name in ("train", "pair", "mig")},
        scrape=scrape(*shares),
        refused_starts=3,
        free_at_request_bytes=38 * GIB,
        memory_bytes={"GPU-0": CARD, "GPU-1": CARD, "GPU-2": CARD, "MIG-0": 9 * GIB},
        parents={"GPU-0": "GPU-0", "GPU-1": "GPU-1", "GPU-2": "GPU-2", "MIG-0": "GPU-2"},
        driver_before=driver_memory,
        driver_after=driver_memory,
        after_deletion=scrape(),
    )


def with_state(evidence, pod, **changes):
    return replace(evidence, states={**evidence.states, pod: replace(evidence.states[pod], **changes)})


def with_inside(evidence, pod, **changes):
    return replace(evidence, inside={**evidence.inside, pod: replace(evidence.inside[pod], **changes)})


def with_share(evidence, pod, **changes):
    shares = tuple(replace(item, **changes) if item.pod == pod else item for item in evidence.scrape.shares)
    return replace(evidence, scrape=replace(evidence.scrape, shares=shares))


def with_fill(evidence, **changes):
    return replace(evidence, fill=replace(evidence.fill, **changes))


def with_driver_memory(evidence, pod, amount):
    return replace(evidence, driver_after={**evidence.driver_after, pod: amount})


def card_in_nvml(evidence):
    return with_inside(evidence, "train", nvml=seen(CARD).nvml)


BREAKAGES = [
    pytest.param(lambda e: with_state(e, "train", phase="Pending"), {"every pod that fits runs"}, id="not running"),
    pytest.param(lambda e: with_state(e, "mig", restarts=1), {"every pod that fits runs"}, id="restarted"),
    pytest.param(lambda e: with_share(e, "train", device_uuid="GPU-1"), {"pods share a GPU"}, id="spread"),
    pytest.param(
        lambda e: with_share(e, "train", limit_bytes=CARD), {"no device has more allocated than its memory"}, id="allocated too much"
    ),
    pytest.param(
        lambda e: with_share(e, "mig", limit_bytes=10 * GIB), {"no device has more allocated than its memory"}, id="more than the instance"
    ),
    pytest.param(lambda e: with_share(e, "pair", device_uuid="GPU-0"), {"pair: each vGPU on its own GPU"}, id="both on one GPU"),
    pytest.param(
        lambda e: with_inside(e, "train", cuda=(CudaDevice("u", CARD, 20 * GIB, 0),)),
        {"train: cuDeviceTotalMem shows the share"},
        id="total is the card",
    ),
    pytest.param(
        lambda e: with_inside(e, "train", cuda=(CudaDevice("u", 20 * GIB, CARD, 0),)),
        {"train: cuMemGetInfo shows the share"},
        id="info is the card",
    ),
    pytest.param(
        lambda e: with_inside(e, "mig", cuda=()),
        {"mig: cuDeviceTotalMem shows the share", "mig: cuMemGetInfo shows the share"},
        id="no device",
    ),
    pytest.param(card_in_nvml, {"train: NVML shows the share"}, id="NVML shows the card"),
    pytest.param(lambda e: with_inside(e, "pair", nvml=seen(12 * GIB, 8).nvml), {"pair: NVML shows the share"}, id="NVML shows all GPUs"),
    pytest.param(lambda e: with_inside(e, "greedy", nvml=None, nvml_error="gone"), {"greedy: NVML shows the share"}, id="no NVML"),
    pytest.param(lambda e: replace(e, fill=None), {"greedy: refused at its limit"}, id="never refused"),
    pytest.param(lambda e: with_fill(e, result_name="CUDA_ERROR_UNKNOWN"), {"greedy: refused at its limit"}, id="another error"),
    pytest.param(lambda e: with_fill(e, smallest_refused_bytes=1000), {"greedy: exactly at its limit"}, id="refused too early"),
    pytest.param(lambda e: with_share(e, "greedy", used_bytes=10 * GIB + 1), {"greedy: exactly at its limit"}, id="one byte over"),
    pytest.param(
        lambda e: with_driver_memory(e, "greedy", 10 * GIB + 1),
        {"greedy: not above its limit by the driver's count"},
        id="over by the driver",
    ),
    pytest.param(
        lambda e: with_driver_memory(e, "greedy", 0),
        {"greedy: not above its limit by the driver's count", "greedy: agent and driver report the same memory"},
        id="unknown to the driver",
    ),
    pytest.param(
        lambda e: with_share(e, "train", used_bytes=4 * GIB), {"train: agent and driver report the same memory"}, id="too little reported"
    ),
    pytest.param(
        lambda e: with_fill(e, text="GPU 0 has a total capacity of 80.00 GiB"),
        {"greedy: PyTorch's message names the share"},
        id="PyTorch names the card",
    ),
    pytest.param(lambda e: with_share(e, "greedy", refusals=0), {"greedy: its refusals are counted"}, id="no refusal counted"),
    pytest.param(lambda e: with_inside(e, "train", errors=("cuMemAlloc: OOM",)), {"train: no call fails"}, id="a neighbour's call fails"),
    pytest.param(lambda e: with_share(e, "pair", refusals=1), {"pair: no call fails"}, id="a neighbour is refused"),
    pytest.param(
        lambda e: replace(e, speeds={**e.speeds, "train": Speed(400, 200)}), {"train: keeps its speed"}, id="a neighbour slows down"
    ),
    pytest.param(
        lambda e: replace(e, speeds={**e.speeds, "train": Speed(0, 0)}), {"train: keeps its speed"}, id="a neighbour never worked"
    ),
    pytest.param(lambda e: with_driver_memory(e, "pair", 10 * GIB - MIB), {"pair: keeps its memory"}, id="a neighbour loses memory"),
    pytest.param(lambda e: with_state(e, "too-big", started=True), {"too-big: stays refused"}, id="too-big ran"),
    pytest.param(lambda e: with_state(e, "too-big", phase="Failed"), {"too-big: stays refused"}, id="too-big failed for good"),
    pytest.param(
        lambda e: with_state(e, "too-big", message="no"), {"too-big: the reason names the requested and the free memory"}, id="no reason"
    ),
    pytest.param(lambda e: replace(e, refused_starts=1), {"too-big: kubelet retries"}, id="given up"),
    pytest.param(lambda e: replace(e, after_deletion=scrape(allocated=1)), {"deleted pods free their shares"}, id="leaked share"),
    pytest.param(lambda e: replace(e, after_deletion=scrape(*e.scrape.shares)), {"deleted pods free their shares"}, id="leaked shares"),
]


def test_good_evidence_passes_every_check():
    assert [check.name for check in evaluate(good_evidence()) if not check.passed] == []


@pytest.mark.parametrize(("breakage", "broken"), BREAKAGES)
def test_wrong_fact_fails_its_check_only(breakage, broken):
    assert {check.name for check in evaluate(breakage(good_evidence())) if not check.passed} == broken


def test_every_kind_of_check_can_fail():
    def kinds(names):
        return {name.partition(": ")[2] or name for name in names}

    broken: set[str] = set()
    for case in BREAKAGES:
        names = case.values[1]
        assert isinstance(names, set)
        broken |= names
    assert kinds(check.name for check in evaluate(good_evidence())) == kinds(broken)


def test_kept_pods_have_no_check_of_deletion():
    names = {check.name for check in evaluate(replace(good_evidence(), after_deletion=None))}
    assert "deleted pods free their shares" not in names


def test_expected_and_found_values_are_reported():
    (check,) = [item for item in evaluate(card_in_nvml(good_evidence())) if not item.passed]
    assert check.expected == "1 × 20 GiB (whole GPU: 80 GiB)"
    assert check.found == "80 GiB"


def test_a_size_that_is_no_round_number_is_written_in_mib():
    evidence = with_driver_memory(good_evidence(), "pair", 10 * GIB + MIB)
    assert next(item for item in evaluate(evidence) if item.name == "pair: keeps its memory").found == "10241 MiB"
