# SPDX-License-Identifier: Apache-2.0
"""Draws dashboard.png: the dashboard's own pages over an example cluster of twelve nodes, in Chromium (Debian: ``chromium``).

Run it again after a change of the pages: ``.venv/bin/python docs/figures/make_dashboard.py``.
"""

import asyncio
import math
import random
import shutil
import sys
import time
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from aliquot import contract
from aliquot.contract import codec, units
from aliquot.contract.gpunode import GpuDevice, GpuNode
from aliquot.contract.model import ContainerAssignment, ContainerSpec, Device, DeviceShare, Link, LinkKind, Pod, PodAssignment
from aliquot.placement.request import pod_request
from scheduler_plugin.adapters.http import HttpServer
from scheduler_plugin.core.cluster.decisions import Decision
from scheduler_plugin.core.cluster.pods import PodFacts
from scheduler_plugin.core.cluster.reasons import NodeReason
from scheduler_plugin.core.cluster.state import ClusterState
from scheduler_plugin.dashboard.history import History
from scheduler_plugin.dashboard.pages import Dashboard
from scheduler_plugin.dashboard.picture import Painter

TARGET = Path(__file__).parent / "dashboard.png"
NODES = 12
MODELS = (("NVIDIA H200", 143_771), ("NVIDIA A100-SXM4-80GB", 81_920), ("NVIDIA L40S", 46_068))
SIZES_MIB = (4096, 8192, 10_240, 20_480, 40_960)
NAMESPACES = ("research", "serving", "batch", "ci")
WORK = ("train", "llm", "notebook", "embed")


def make_node(number: int) -> GpuNode:
    """Make a node of eight GPUs; the first two kinds are on an NVSwitch. The third node has a sick and a cordoned GPU."""
    name, (model, mib) = f"gpu-{number:03d}", MODELS[number % len(MODELS)]
    devices = [
        GpuDevice(Device(f"GPU-{name}-{minor}", model, minor, f"00000000:{minor:02X}:00.0", mib * units.MIB, minor // 4))
        for minor in range(8)
    ]
    uuids = [entry.device.uuid for entry in devices]
    links = [Link(a, b, LinkKind.NVLINK, 18) for place, a in enumerate(uuids) for b in uuids[place + 1 :]] if number % 3 < 2 else []
    if number == 2:
        devices[0] = replace(devices[0], trouble="XID 79: GPU has fallen off the bus")
    return GpuNode(name, tuple(devices), tuple(links), cordoned_devices=(uuids[5],) if number == 2 else ())


def make_pod(number: int, rng: random.Random, node: str, device: str, mib: int) -> PodFacts:
    """Make a pod that holds so much of a device."""
    namespace, name, uid = rng.choice(NAMESPACES), f"{rng.choice(WORK)}-{number}", str(number)
    share = DeviceShare(device, mib * units.MIB, rng.choice((None, 20, 30)))
    text = codec.encode_assignment(PodAssignment(uid, (ContainerAssignment("main", (share,)),)))
    return waiting_pod(namespace, name, uid, node, mib, annotations={contract.ANNOTATION_ASSIGNMENT: text})


def waiting_pod(namespace: str, name: str, uid: str, node: str, mib: int, vgpus: int = 1, *, annotations: dict[str, str]) -> PodFacts:
    """Make a pod of one container."""
    limits = {contract.RESOURCE_VGPU: str(vgpus), contract.RESOURCE_VGPU_MEMORY: str(vgpus * mib)}
    gpu = Pod(namespace, name, uid, node, "Running" if node else "Pending", annotations, (ContainerSpec("main", limits),))
    return PodFacts(uid, namespace, name, node, True, False, 0, 0, 0, gpu)


def fill(state: ClusterState) -> None:
    """Put pods on all nodes, the same ones every time."""
    rng, number = random.Random(1), 0  # noqa: S311 - an example, no secret
    for position in range(NODES):
        node = make_node(position)
        state.set_gpu_node(node)
        for entry in node.devices:
            free = entry.device.memory_bytes // units.MIB
            for mib in rng.choices(SIZES_MIB, k=rng.randint(0, 5)):
                if mib <= free and not entry.trouble:
                    free, number = free - mib, number + 1
                    state.set_pod(make_pod(number, rng, node.name, entry.device.uuid, mib))


def waiting() -> list[Decision]:
    """Two pods that fit nowhere."""
    pods = [
        waiting_pod("research", "pretrain-0", "w1", "", 140_000, 8, annotations={}),
        waiting_pod("serving", "llm-70b-3", "w2", "", 143_000, annotations={}),
    ]
    failed = {NodeReason.MEMORY: NODES - 1, NodeReason.UNAVAILABLE: 1}
    return [Decision(pod, pod_request(pod.gpu), time.time(), 0, 0, failed) for pod in pods if pod.gpu is not None]


class ExamplePast:
    """A past for every question, the same one every time."""

    async def query_range(self, query: str, start: float, end: float, step_seconds: float) -> Sequence[tuple[float, float]]:
        """See ``MetricStore``."""
        words = {"memory_total": 1.0, "limit": 1.0, "allocated": 0.62, "utilization": 0.7, "throttled": 0.12, "waiting": 3.0}
        height = next((height for word, height in words.items() if word in query), 0.41)
        unit = (
            units.MIB * (20_480 if "container" in query else 143_771 if "device_uuid" in query else 8_696_000) if "memory" in query else 1.0
        )
        sway, phase = (0.0 if height == 1.0 else 0.18), zlib.crc32(query.encode()) % 628 / 100
        count = int((end - start) / step_seconds) + 1
        return [(start + step_seconds * n, unit * height * (1 - sway + sway * math.sin(phase + n / 9))) for n in range(count)]


async def main() -> int:
    """Serve the example, take the picture."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        print("needs Chromium, which is not installed (Debian: apt-get install chromium)", file=sys.stderr)
        return 1
    state = ClusterState()
    fill(state)
    painter, pods = Painter(state), waiting()
    dashboard = Dashboard(lambda: painter.draw(pods, leads=True, trouble="", history=True), History(ExamplePast(), time.time))
    server = HttpServer("127.0.0.1", 0, pages=dashboard.pages())
    address = await server.start()
    flags = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1400,900", "--virtual-time-budget=3000")
    process = await asyncio.create_subprocess_exec(browser, *flags, f"--screenshot={TARGET}", f"http://{address}/#gpu=GPU-gpu-000-6")
    try:
        return await process.wait()
    finally:
        await server.stop()


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
