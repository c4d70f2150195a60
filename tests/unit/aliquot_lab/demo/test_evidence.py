# SPDX-License-Identifier: Apache-2.0
import pytest

from aliquot_lab.demo.evidence import (
    cuda_devices,
    failed_calls,
    fill_result,
    kernels_per_second,
    parse_events,
    pod_state,
    progress_by_device,
)

LINES = [
    "warning: not ours",
    '{"event":"info","pid":1,"devices":1}',
    '{"event":"device","ordinal":0,"name":"GPU","uuid":"u","device_total_bytes":10,"total_bytes":11,"free_bytes":12}',
    '{"event":"progress","seconds":1.0,"kernels":5}',
    '{"event":"progress","seconds":2.0,"kernels":7}',
    '{"event":"fill","held_bytes":9,"smallest_refused_bytes":4,"free_bytes":1,"total_bytes":11,"result_name":"CUDA_ERROR_OUT_OF_MEMORY"}',
    '{"event":"error","call":"cuLaunchKernel","result":719,"result_name":"CUDA_ERROR_LAUNCH_FAILED"}',
]


def test_program_output_is_parsed_for_the_checks():
    events = parse_events(LINES)
    (device,) = cuda_devices(events)
    assert (device.device_total_bytes, device.total_bytes, device.free_bytes) == (10, 11, 12)
    assert fill_result(events).held_bytes == 9
    assert failed_calls(events) == ("cuLaunchKernel: CUDA_ERROR_LAUNCH_FAILED",)


def progress(device, *reports):
    return {device: [{"event": "progress", "seconds": seconds, "kernels": kernels} for seconds, kernels in reports]}


def test_reports_are_sorted_by_device():
    tagged = parse_events(['{"device":1,"event":"progress","seconds":1.0,"kernels":3}'])
    assert {device: len(reports) for device, reports in progress_by_device([*parse_events(LINES), *tagged]).items()} == {0: 2, 1: 1}


def test_speed_counts_kernels_between_two_reports():
    before, after = progress(0, (1.0, 100)), progress(0, (1.0, 100), (2.5, 300), (3.0, 100))
    assert kernels_per_second(before, after) == 200


def test_speed_sums_devices_and_starts_with_process():
    assert kernels_per_second({}, progress(0, (2.0, 100)) | progress(1, (1.0, 30))) == 80


def test_program_without_reports_has_speed_zero():
    assert kernels_per_second(progress(0, (1.0, 100)), progress(0, (1.0, 100))) == 0


def test_there_is_no_fill_result_before_the_refusal():
    assert fill_result(parse_events(LINES[:5])) is None


@pytest.mark.parametrize(
    ("status", "phase", "started"),
    [
        pytest.param({"phase": "Pending"}, "Pending", False, id="new"),
        pytest.param(
            {"phase": "Pending", "containerStatuses": [{"state": {"waiting": {"reason": "CreateContainerConfigError", "message": "m"}}}]},
            "Pending",
            False,
            id="refused",
        ),
        pytest.param(
            {"phase": "Running", "containerStatuses": [{"state": {"running": {}}, "containerID": "x"}]}, "Running", True, id="running"
        ),
        pytest.param({"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": "m"}, "Failed", False, id="failed"),
    ],
)
def test_a_pods_state_is_read_as_kubectl_shows_it(status, phase, started):
    state = pod_state({"status": status})
    assert (state.phase, state.started) == (phase, started)
