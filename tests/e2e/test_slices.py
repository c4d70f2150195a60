# SPDX-License-Identifier: Apache-2.0
"""Slices of several sizes share the GPUs, and every limit holds inside the real container."""

import pytest

from tests.e2e.kubectl import Kubectl
from tests.e2e.product import BECOME_ROOT, CLIENT, FORKED, MIB, SETUID_CLIENT, Client, Slice, parse_events, slice_pod

pytestmark = pytest.mark.usefixtures("product")

CUDA_ERROR_NOT_INITIALIZED = 3
SIZES_MIB = (1024, 3333, 10240, 71885)


@pytest.mark.parametrize("memory_mib", SIZES_MIB)
def test_a_program_fills_its_slice_exactly_and_is_refused_the_byte_above(kubectl: Kubectl, memory_mib: int) -> None:
    kubectl.apply(slice_pod("filler", Slice(memory_mib)))
    kubectl.wait_for_phase("filler", "Running")
    client = Client(kubectl, "filler")
    _, before, filled, refused, after = client.converse("info", *_fill_exactly(client), "info")
    assert before["total_bytes"] == memory_mib * MIB
    assert filled["result_name"] == "CUDA_SUCCESS"
    assert refused["result_name"] == "CUDA_ERROR_OUT_OF_MEMORY"
    assert after["free_bytes"] == 0


def test_program_that_fills_its_share_does_not_affect_same_gpu_neighbour(kubectl: Kubectl, shared_gpu: str) -> None:
    together = {"aliquot.dev/gpu-uuid": shared_gpu}
    kubectl.apply(slice_pod("neighbour", Slice(4096), ["/bin/aliquot-cuda-client", "hold", "--mib", "2048"], together))
    kubectl.apply(slice_pod("greedy", Slice(8192), annotations=together))
    for pod in ("neighbour", "greedy"):
        kubectl.wait_for_phase(pod, "Running")
    before = Client(kubectl, "neighbour").devices()
    filled = Client(kubectl, "greedy").fill()
    assert f"GPU-{before[0]['uuid']}" == shared_gpu
    assert Client(kubectl, "greedy").devices()[0]["uuid"] == before[0]["uuid"]
    assert filled["total_bytes"] == 8192 * MIB
    assert filled["free_bytes"] < 512
    assert Client(kubectl, "neighbour").devices() == before


def test_two_processes_of_a_container_share_one_limit(kubectl: Kubectl) -> None:
    kubectl.apply(slice_pod("pair", Slice(4096), ["/bin/aliquot-cuda-client", "hold", "--mib", "2048"]))
    kubectl.wait_for_phase("pair", "Running")
    second = Client(kubectl, "pair").fill()
    assert second["held_bytes"] < 2048 * MIB
    assert second["result_name"] == "CUDA_ERROR_OUT_OF_MEMORY"


def test_the_limit_holds_without_any_environment(kubectl: Kubectl) -> None:
    """``env -i``; what stays are the names of the simulated hardware, which on a real node are device files."""
    kubectl.apply(slice_pod("bare", Slice(2048)))
    kubectl.wait_for_phase("bare", "Running")
    said = kubectl.exec("bare", "sh", "-c", "env -i $(env | grep ^ALIQUOT_SIM_) /bin/aliquot-cuda-client fill")
    assert parse_events(said)[-1]["total_bytes"] == 2048 * MIB


@pytest.mark.parametrize(
    ("ways", "program"),
    [
        pytest.param("sh -c", CLIENT, id="child of a shell"),
        pytest.param("setsid sh -c", CLIENT, id="session of its own"),
        pytest.param("env LD_PRELOAD= LD_LIBRARY_PATH= ALIQUOT_LIMIT=0 sh -c", CLIENT, id="environment that would lift a limit"),
        pytest.param("chroot / sh -c", CLIENT, id="chroot"),
        pytest.param("sh -c", SETUID_CLIENT, id="setuid program"),
        pytest.param("sh -c", f"{BECOME_ROOT} {CLIENT}", id="as sudo does"),
    ],
)
def test_limit_holds_for_every_way_to_start_program(kubectl: Kubectl, ways: str, program: str) -> None:
    kubectl.apply(slice_pod("started", Slice(2048)))
    kubectl.wait_for_phase("started", "Running")
    filled = parse_events(kubectl.exec("started", *ways.split(), f"{program} fill; true"))[-1]
    assert filled["total_bytes"] == 2048 * MIB
    assert filled["result_name"] == "CUDA_ERROR_OUT_OF_MEMORY"


def test_setuid_program_of_non_root_user_has_same_limit(kubectl: Kubectl) -> None:
    pod = slice_pod("nobody", Slice(2048))
    pod["spec"]["securityContext"] = {"runAsUser": 65534}
    kubectl.apply(pod)
    kubectl.wait_for_phase("nobody", "Running")
    for program in ((CLIENT,), (SETUID_CLIENT,), (BECOME_ROOT, CLIENT)):
        filled = parse_events(kubectl.exec("nobody", *program, "fill"))[-1]
        assert (filled["total_bytes"], filled["result_name"]) == (2048 * MIB, "CUDA_ERROR_OUT_OF_MEMORY"), program


def test_processes_that_come_of_fork_alone_share_one_limit(kubectl: Kubectl) -> None:
    """Four processes request more than the limit together. No exec started them. A driver belongs to the process that initialised it."""
    kubectl.apply(slice_pod("forking", Slice(8192)))
    kubectl.wait_for_phase("forking", "Running")
    *held, after = parse_events(kubectl.exec("forking", FORKED, "3072", "3"))
    total = sum(event["held_bytes"] for event in held)
    assert len(held) == 4
    assert 3072 * MIB < total <= 8192 * MIB, "each process's context counts too"
    assert after["result"] == CUDA_ERROR_NOT_INITIALIZED


def test_two_vgpus_are_two_gpus_with_half_of_the_memory_each(kubectl: Kubectl) -> None:
    kubectl.apply(slice_pod("double", Slice(8192, vgpus=2)))
    kubectl.wait_for_phase("double", "Running")
    devices = Client(kubectl, "double").devices()
    assert len({device["uuid"] for device in devices}) == 2
    assert [device["total_bytes"] for device in devices] == [4096 * MIB] * 2


def _fill_exactly(client: Client) -> tuple[str, str]:
    """Commands that take what is free in one piece, and then one byte."""
    [device] = client.devices()
    return f"alloc alloc {device['free_bytes']}", "alloc alloc 1"
