# SPDX-License-Identifier: Apache-2.0
import subprocess

import pytest

from aliquot import contract
from aliquot_lab.standin import hardware
from aliquot_lab.standin.cdi import DeviceNode
from aliquot_lab.standin.hardware import HardwareError, RealHardware
from aliquot_lab.standin.inventory import Gpu, Inventory, InventoryError

INVENTORY = Inventory("580.159.03", tuple(Gpu(f"GPU-{minor}", "NVIDIA H200", minor, 1, False, ()) for minor in (0, 1)))


@pytest.fixture
def driver(monkeypatch, tmp_path):
    """A machine with driver libraries, as its loader's cache lists them."""
    names = (
        "libcuda.so.580.159.03",
        "libnvidia-ml.so.580.159.03",
        "libnvidia-ptxjitcompiler.so.580.159.03",
        "libnvidia-glcore.so.580.159.03",
        "libc.so.6",
    )
    for name in names:
        (tmp_path / name).touch()
    (tmp_path / "libcuda.so.1").symlink_to(tmp_path / names[0])
    lines = [f"\t{name} (libc6,x86-64) => {tmp_path / name}" for name in ("libcuda.so.1", *names)]
    listing = subprocess.CompletedProcess([], 0, stdout="6 libs found in cache\n" + "\n".join(lines), stderr="")
    monkeypatch.setattr("aliquot_lab.standin.hardware.subprocess.run", lambda *_, **__: listing)
    monkeypatch.setattr("aliquot_lab.standin.hardware.ctypes.util.find_library", lambda _: "libnvidia-ml.so.1")
    monkeypatch.setattr(hardware, "read_inventory", lambda _: INVENTORY)
    return tmp_path


def test_real_spec_has_device_per_gpu_and_libraries_for_compute(driver):
    real = RealHardware()
    spec = real.cdi_spec(real.prepare(driver, "node"))
    assert spec.kind == contract.NVIDIA_CDI_KIND
    assert [(item.name, item.container_edits.device_nodes) for item in spec.devices] == [
        ("GPU-0", (DeviceNode("/dev/nvidia0"),)),
        ("GPU-1", (DeviceNode("/dev/nvidia1"),)),
    ]
    mounted = {mount.host_path.rpartition("/")[2] for mount in spec.container_edits.mounts}
    assert mounted == {"libcuda.so.580.159.03", "libnvidia-ml.so.580.159.03", "libnvidia-ptxjitcompiler.so.580.159.03"}


def test_container_sees_only_gpus_of_its_device_nodes(driver):
    real = RealHardware()
    real.prepare(driver, "node")
    nodes = [DeviceNode("/dev/nvidiactl"), DeviceNode("/dev/nvidia1")]
    assert real.visibility(nodes) == {contract.ENV_CUDA_VISIBLE_DEVICES: "GPU-1"}
    assert real.visibility([]) == {contract.ENV_CUDA_VISIBLE_DEVICES: ""}


def test_machine_without_driver_reports_that(monkeypatch, tmp_path):
    monkeypatch.setattr("aliquot_lab.standin.hardware.ctypes.util.find_library", lambda _: None)
    with pytest.raises(HardwareError, match="no NVIDIA driver on this machine"):
        RealHardware().prepare(tmp_path, "node")


def test_a_driver_that_does_not_answer_is_quoted(driver, monkeypatch):
    def fail(_):
        raise InventoryError("Driver/library version mismatch")

    monkeypatch.setattr(hardware, "read_inventory", fail)
    with pytest.raises(HardwareError, match="version mismatch"):
        RealHardware().prepare(driver, "node")


def test_a_driver_without_cuda_is_refused(driver):
    real = RealHardware()
    inventory = real.prepare(driver, "node")
    (driver / "libcuda.so.1").unlink()
    (driver / "libcuda.so.580.159.03").rename(driver / "libother.so.1")
    (driver / "libcuda.so.580.159.03").symlink_to(driver / "libother.so.1")
    with pytest.raises(HardwareError, match="without CUDA"):
        real.cdi_spec(inventory)
