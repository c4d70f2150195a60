# SPDX-License-Identifier: Apache-2.0
import pytest

from aliquot import contract
from aliquot.contract.units import GIB, MIB
from aliquot_lab.demo.plan import PlanError, Role, make_plan, oversized, size_unit, with_torch
from aliquot_lab.standin.inventory import Gpu, Inventory, MigDevice
from aliquot_lab.standin.pods import read_pod


def gpu(minor, *, gib=80, mig=()):
    devices = tuple(MigDevice(f"MIG-{minor}-{profile}", f"NVIDIA A100 MIG {profile}", 1, 0, memory) for profile, memory in mig)
    return Gpu(f"GPU-{minor}", "NVIDIA A100", minor, gib * GIB, bool(mig), devices)


def inventory(*gpus):
    return Inventory("580", gpus)


MIG = gpu(7, mig=(("1g.10gb", 9728 * MIB), ("2g.20gb", 19968 * MIB)))
OFFERED = {"nvidia.com/mig-2g.20gb": 1, "nvidia.com/mig-1g.10gb": 2, "nvidia.com/mig-1g.5gb": 0}


def names(plan):
    return [pod.name for pod in plan.steady]


def test_a_node_with_everything_needs_no_replacement():
    plan = make_plan(inventory(gpu(0), gpu(1), MIG), OFFERED)
    assert names(plan) == ["train", "infer", "pair", "mig"]
    assert plan.notes == ()


def test_the_smallest_offered_mig_profile_is_taken_with_its_memory():
    mig = make_plan(inventory(gpu(0), gpu(1), MIG), OFFERED).steady[-1]
    assert mig.limits == {"nvidia.com/mig-1g.10gb": 1}
    assert (mig.role, mig.memory_bytes_per_device) == (Role.HARDWARE, 9728 * MIB)


def test_without_mig_another_pod_replaces_it_with_note():
    plan = make_plan(inventory(gpu(0), gpu(1)), {})
    assert names(plan) == ["train", "infer", "pair", "fourth"]
    assert any("MIG" in note for note in plan.notes)


def test_with_one_gpu_no_pod_requests_two():
    plan = make_plan(inventory(gpu(0)), {})
    assert all(pod.devices == 1 for pod in plan.steady)
    assert any("one GPU" in note for note in plan.notes)


def test_at_least_four_pods_run_besides_the_greedy_one_on_any_node():
    for node in (inventory(gpu(0)), inventory(gpu(0), gpu(1)), inventory(gpu(0), MIG)):
        assert len(make_plan(node, OFFERED if MIG in node.gpus else {}).steady) == 4


def test_a_node_with_nothing_to_share_is_refused():
    with pytest.raises(PlanError, match="MIG mode"):
        make_plan(inventory(MIG), OFFERED)


@pytest.mark.parametrize("gib", [15, 16, 24, 44, 80, 141])
def test_sizes_fit_one_gpu_together_and_leave_room(gib):
    plan = make_plan(inventory(gpu(0, gib=gib), gpu(1, gib=gib)), {})
    together = sum(pod.memory_bytes_per_device for pod in (*plan.steady, plan.greedy))
    assert together <= gib * GIB * 0.8


def test_the_unit_is_whole_and_has_a_limit():
    assert size_unit(80 * GIB) == 2 * GIB
    assert size_unit(15 * GIB) == 256 * MIB
    assert size_unit(1 * GIB) == 256 * MIB
    assert size_unit(80 * GIB, 256 * MIB) == 256 * MIB


def test_two_vgpus_share_the_total_evenly():
    pair = make_plan(inventory(gpu(0), gpu(1)), {}).steady[2]
    assert pair.limits[contract.RESOURCE_VGPU] == 2
    assert pair.limits[contract.RESOURCE_VGPU_MEMORY] * MIB == 2 * pair.memory_bytes_per_device


def test_too_big_requests_one_mib_more_than_free():
    pod = oversized("GPU-0", 38 * GIB + 5)
    assert pod.limits[contract.RESOURCE_VGPU_MEMORY] == 38 * 1024 + 1
    assert pod.annotations == {contract.ANNOTATION_GPU_UUID: "GPU-0"}


def test_manifests_are_pods_that_the_kubelet_reads():
    plan = make_plan(inventory(gpu(0), gpu(1)), {})
    for pod in (*plan.steady, plan.greedy):
        manifest = pod.manifest("/bin/client")
        manifest["metadata"].update(namespace="default", uid="u")
        (container,) = read_pod(manifest).containers
        assert dict(container.limits) == dict(pod.limits)
        assert ("CLIENT", "/bin/client") in container.env


def test_pytorch_replaces_the_programs_of_two_pods_only():
    plan = make_plan(inventory(gpu(0), gpu(1), MIG), OFFERED)
    changed = with_torch(plan, "exec python program.py")
    commands = {pod.name: pod.command for pod in (*changed.steady, changed.greedy)}
    assert commands["train"] == "$CLIENT info && exec python program.py train"
    assert commands["greedy"] == "$CLIENT info && exec python program.py fill"
    others = {pod.name: pod.command for pod in plan.steady if pod.name != "train"}
    assert {name: commands[name] for name in others} == others
