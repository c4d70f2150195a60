# SPDX-License-Identifier: Apache-2.0
from aliquot.contract.units import GIB
from aliquot_cli.smi import Listing, VisibleDevice, VisibleProcess, render


def test_the_listing_has_driver_devices_memory_and_processes():
    device = VisibleDevice(0, "GPU-0", "NVIDIA A100", 20 * GIB, 10 * GIB, 10 * GIB, 37, (VisibleProcess(1, 5),))
    text = render(Listing("580.1", "13.0", (device, VisibleDevice(1, "MIG-1", "MIG 1g.10gb", GIB, 0, GIB, None, ()))))
    for words in ("Driver Version: 580.1", "CUDA Version: 13.0", "10240MiB / 20480MiB", "37%", "1 process ", "N/A", "0 processes"):
        assert words in text
    assert len({len(line) for line in text.splitlines()}) == 1
