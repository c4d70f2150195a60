# SPDX-License-Identifier: Apache-2.0
"""A claim gets a MIG instance that the agent makes when it is prepared, and removes when it is released."""

import tempfile
from pathlib import Path

import pytest

from aliquot_lab.standin.hardware import SimulatedHardware
from tests.integration.dra_nodes import allocate, dra_node, offered
from tests.integration.mig_nodes import a100_topology, ctk, on_host
from tests.unit.agent.fakes import until

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("build_dir")]

INSTANCES = """
found = []
for index in range(nv.nvmlDeviceGetMaxMigDeviceCount(gpu)):
    try:
        found.append(nv.nvmlDeviceGetUUID(nv.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index)))
    except nv.NVMLError_NotFound:
        continue
result = found
"""


async def test_instance_exists_from_prepare_to_unprepare_and_none_overlaps_it(tmp_path):
    with tempfile.TemporaryDirectory() as directory:
        hardware = SimulatedHardware(a100_topology(tmp_path, whole=1, partitioned=1))
        flags = ("--mig-strategy=dynamic", "--feature-gates=AllAlpha=true", f"--nvidia-ctk={ctk(tmp_path)}")
        async with dra_node(Path(directory), *flags, hardware=hardware) as (node, kubelet):
            names = [device["name"] for device in offered(node)]
            assert names[0] == "gpu-0"
            assert {"gpu-1-mig-7g80gb-0", "gpu-1-mig-3g40gb-4", "gpu-1-mig-1g10gb-6"} <= set(names)
            places = {"first": "3g40gb-0", "over": "1g10gb-1", "beside": "1g10gb-4"}
            first, over, beside = (allocate(node, name, f"gpu-1-mig-{place}", None) for name, place in places.items())
            assert (await kubelet.prepare(first)).claims[first.uid].error == ""
            assert len(on_host(node, INSTANCES, gpu=1)) == 1
            refused = (await kubelet.prepare(over)).claims[over.uid].error
            assert "Already granted there" in refused
            assert (await kubelet.prepare(beside)).claims[beside.uid].error == ""
            assert len(on_host(node, INSTANCES, gpu=1)) == 2
            for claim in (first, beside):
                assert (await kubelet.unprepare(claim)).claims[claim.uid].error == ""
            await until(lambda: on_host(node, INSTANCES, gpu=1) == [])
