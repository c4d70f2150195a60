# SPDX-License-Identifier: Apache-2.0
"""What the agent's integration tests share: a stand-in node with a real agent process, and pods in few words."""

import asyncio
import json
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any

from aliquot import contract
from aliquot.contract import codec, gpunode
from aliquot.contract.gpunode import GpuNode
from aliquot.contract.model import ContainerAssignment, DeviceShare, PodAssignment
from aliquot.contract.units import MIB
from aliquot.paths import built
from aliquot_lab.standin.cluster import Kind
from aliquot_lab.standin.errors import NotFoundError
from aliquot_lab.standin.hardware import SimulatedHardware
from aliquot_lab.standin.node import Node, NodeOptions

QUICK = (
    "--reconcile-seconds=0.3",
    "--driver-poll-seconds=0.2",
    "--nvml-timeout-seconds=0.3",
    "--pod-wait-seconds=3",
    "--health-recovery-seconds=0.5",
    "--health-quarantine-seconds=1",
    "--health-max-recovery-seconds=2",
    "--log-format=text",
)
VGPU = contract.RESOURCE_VGPU
PATIENCE_SECONDS = 60.0
"""What comes at last takes longer on a busy machine; what never comes is a failure."""


def make_node(profile: str = "t4x2", *flags: str, **options: Any) -> Node:
    return Node(SimulatedHardware(profile), NodeOptions(agent_flags=(*QUICK, *flags), **options))


def container(name: str = "main", *, vgpus: int = 1, mib: int | None = 1024, cores: int | None = None, **extra: Any) -> dict[str, Any]:
    limits = {VGPU: str(vgpus)}
    if mib is not None:
        limits[contract.RESOURCE_VGPU_MEMORY] = str(mib)
    if cores is not None:
        limits[contract.RESOURCE_VGPU_CORES] = str(cores)
    return {"name": name, "command": ["sleep", "600"], "resources": {"limits": limits}, **extra}


def manifest(name: str, *containers: dict[str, Any], init: Sequence[dict[str, Any]] = (), **metadata: Any) -> dict[str, Any]:
    spec: dict[str, Any] = {"terminationGracePeriodSeconds": 0, "containers": list(containers) or [container()]}
    if init:
        spec["initContainers"] = list(init)
    return {"metadata": {"name": name, **metadata}, "spec": spec}


def assignment(uid: str, **shares: Sequence[DeviceShare]) -> str:
    return codec.encode_assignment(PodAssignment(uid, tuple(ContainerAssignment(name, tuple(given)) for name, given in shares.items())))


def assign(node: Node, name: str, text: str) -> None:
    """Write a pod's assignment after the fact; a real scheduler writes it together with the binding."""
    node.cluster.update(
        Kind.POD, "default", name, lambda pod: pod["metadata"].setdefault("annotations", {}).update({contract.ANNOTATION_ASSIGNMENT: text})
    )


def share(node: Node, index: int, mib: int = 1024, cores: int | None = None) -> DeviceShare:
    return DeviceShare(node.inventory.gpus[index].uuid, mib * MIB, cores)


def is_running(pod: Any) -> bool:
    return bool(pod["status"].get("phase") == "Running")


async def running(node: Node, *names: str, timeout_seconds: float = PATIENCE_SECONDS) -> None:
    for name in names:
        await node.wait_for_pod(name, is_running, timeout_seconds=timeout_seconds)


def waiting_message(pod: Any) -> str:
    """Why the pod's containers wait, as ``kubectl describe`` shows it."""
    status = pod["status"]
    states = [*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())]
    return " ".join(state["state"].get("waiting", {}).get("message", "") for state in states)


async def refused(node: Node, name: str, *words: str) -> str:
    """Wait until kubelet shows a refusal with these words; return it."""

    def shows(pod: Any) -> bool:
        return all(word in waiting_message(pod) for word in words)

    return waiting_message(await node.wait_for_pod(name, shows))


async def eventually(condition: Callable[[], object], what: str, timeout_seconds: float = PATIENCE_SECONDS) -> None:
    try:
        async with asyncio.timeout(timeout_seconds):
            while True:
                if condition():
                    return
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise AssertionError(f"not within {timeout_seconds:g} s: {what}") from None


async def usable_mib(node: Node) -> int:
    """What of the first GPU the agent offers to containers; all GPUs of a profile are alike."""
    await eventually(lambda: node.allocatable(contract.RESOURCE_VGPU_MEMORY), "the node offers memory")
    return node.allocatable(contract.RESOURCE_VGPU_MEMORY) // len(node.inventory.gpus)


def grants(node: Node) -> list[dict[str, Any]]:
    """The agent's ledger as it is on disk."""
    rows = []
    for path in (node.layout.state / "ledger").glob("*.json"):
        try:
            rows.append(json.loads(path.read_bytes())["grant"])
        except FileNotFoundError:  # released meanwhile
            continue
    return rows


def promised_mib(node: Node) -> dict[str, int]:
    """What the ledger promises per device."""
    total: dict[str, int] = {gpu.uuid: 0 for gpu in node.inventory.gpus}
    for grant in grants(node):
        for given in grant["shares"]:
            total[given["device_uuid"]] += given["memory_bytes"] // MIB
    return total


def published(node: Node) -> GpuNode | None:
    """The gpunodes object as the scheduler reads it; None before its status is there, which is a request of its own."""
    try:
        found = node.cluster.get(Kind.GPU_NODE, "", node.options.name)
    except NotFoundError:
        return None
    return gpunode.decode_gpu_node(json.dumps(found).encode()) if found.get("status") else None


def condition(node: Node) -> dict[str, Any]:
    """The node's condition that all its GPUs are healthy; empty before it is published."""
    every = node.status.get("conditions", ())
    return next((one for one in every if one["type"] == contract.NODE_CONDITION_GPUS_HEALTHY), {})


def inject(node: Node, *fault: str) -> None:
    """Make the simulated driver fail, or heal."""
    subprocess.run([built("bin/aliquot-sim"), "inject", *fault, "--dir", node.layout.base / "sim"], check=True)


async def page(node: Node, path: str) -> tuple[int, str]:
    """Ask the agent's status server."""
    url = f"{await node.agent.metrics_url(10)}{path}"

    def fetch() -> tuple[int, str]:
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as exc:
            with exc:
                return exc.code, exc.read().decode()

    return await asyncio.to_thread(fetch)


async def drift_page(node: Node) -> dict[str, Any]:
    """What /drift shows."""
    status, body = await page(node, "/drift")
    assert status == 200, body
    shown: dict[str, Any] = json.loads(body)
    return shown


async def page_shows(node: Node, part: str, *kinds: str) -> list[dict[str, Any]]:
    """Wait until this part of /drift has entries of exactly these kinds; return them."""
    wanted, found = sorted(kinds), [""]
    entries: list[dict[str, Any]] = []
    try:
        async with asyncio.timeout(60):
            while found != wanted:
                await asyncio.sleep(0.05)
                entries = (await drift_page(node))[part]
                found = sorted(entry["kind"] for entry in entries)
    except TimeoutError:
        raise AssertionError(f"{part}: want {wanted}, found {entries}") from None
    return entries


async def not_ready_because(node: Node, words: str) -> None:
    """Wait until /readyz gives this reason."""
    async with asyncio.timeout(60):
        while True:
            status, reason = await page(node, "/readyz")
            if status == 503 and words in reason:
                return
            await asyncio.sleep(0.05)


def log_of(node: Node) -> str:
    return node.layout.agent_log.read_text()
