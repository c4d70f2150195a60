# SPDX-License-Identifier: Apache-2.0
"""What must be true of a node at any moment, whatever happens to it: invariants I1 to I5 of docs/development/architecture.md.

Observed from outside the agent: its ledger on disk, the runtime's containers with the files they see, and the simulated driver's own
account of processes and MIG instances.
"""

import asyncio
import contextlib
import os
import re
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from agent.adapters.container_files import read_region
from agent.core.limits import PRIORITY_VALUES
from agent.core.region_layout import RegionError, decode_limits
from aliquot import contract
from aliquot.contract import codec
from aliquot.contract.codec import MigPlace
from aliquot.contract.gpunode import GpuNode
from aliquot.contract.model import DeviceShare, Isolation, Priority
from aliquot.contract.units import MIB, WHOLE_GPU_PERCENT
from aliquot.paths import built
from aliquot_lab.standin.cluster import Kind
from aliquot_lab.standin.node import Node
from aliquot_lab.standin.runtime import RunningContainer
from tests.integration.agent_nodes import grants

SHOWN_GPU = re.compile(r"gpu \d+ +(GPU-\S+)")
SHOWN_INSTANCE = re.compile(r" +mig \d+ +(MIG-\S+) +(\S+) +gi \d+ +ci \d+ +slices (\d+)\.\.\d+")
SHOWN_PROCESS = re.compile(r"pid (\d+) +gpu (\d+) +(\d+) MiB")
MPS_LIMIT, MPS_PIPE, DRIVER_LIMIT = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "CUDA_MPS_PIPE_DIRECTORY", "NVIDIA_GPU_MEMORY_LIMIT"
SLACK_MIB = 3
"""Of a figure that is rounded to MiB, and of 2 MiB pages."""
LOOKS = 5
LEAK_SECONDS = 20.0
"""How long the share of a pod that is gone may be held by an agent with a period of a fraction of a second, killed now and then."""


@dataclass(frozen=True, slots=True)
class DriverView:
    """The simulated driver's account."""

    instances: Mapping[str, str]
    """UUIDs of MIG instances, by place."""
    used_mib: Mapping[tuple[int, int], int]
    """By session and GPU minor; of processes on whole GPUs."""


def look_at_driver(node: Node) -> DriverView:
    """Ask the simulated driver."""
    command: list[str | Path] = [built("bin/aliquot-sim"), "show", "--dir", node.layout.base / "sim"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    instances: dict[str, str] = {}
    used_mib: dict[tuple[int, int], int] = defaultdict(int)
    gpu = ""
    for line in shown.splitlines():
        if found := SHOWN_GPU.match(line):
            gpu = found[1]
        elif found := SHOWN_INSTANCE.match(line):
            instances[str(MigPlace(gpu, found[2], int(found[3])))] = found[1]
        elif found := SHOWN_PROCESS.match(line):
            with contextlib.suppress(ProcessLookupError):
                used_mib[os.getsid(int(found[1])), int(found[2])] += int(found[3])
    return DriverView(instances, used_mib)


class Invariants:
    """What each container was assigned on one node, and the checks of it."""

    def __init__(self, node: Node, gpu_node: GpuNode) -> None:
        """Args: gpu_node: the node as it was published while all its GPUs were healthy."""
        self.node = node
        self.usable_mib = {entry.device.uuid: entry.device.memory_bytes // MIB for entry in gpu_node.devices}
        self.places = {one.uuid: one for entry in gpu_node.devices for one in entry.device.mig_instances if one.on_demand}
        self.assigned: dict[str, Mapping[str, tuple[DeviceShare, ...]]] = {}
        """By pod UID and container."""
        self.priorities: dict[str, Priority] = {}
        """By pod UID, of the pods that have one; so are the next two."""
        self.isolations: dict[str, Isolation] = {}
        self.bursts: dict[str, float] = {}
        self.killed: set[str] = set()
        """Ids of containers that somebody killed."""
        self.checked: Counter[str] = Counter()
        """How often a container was found to have what it was assigned, by what that was."""
        self._gone_at: dict[str, float] = {}
        """Since when pods are gone (monotonic), by UID."""

    def know(self, uid: str, priority: Priority | None, isolation: Isolation | None, burst: float | None) -> None:
        """Take note of what a pod requests in addition to its devices."""
        wants: list[tuple[dict[str, Any], Any]] = [(self.priorities, priority), (self.isolations, isolation), (self.bursts, burst)]
        for known, value in wants:
            if value is not None:
                known[uid] = value

    def pods(self) -> list[Any]:
        """All pods of the node."""
        return list(self.node.cluster.list(Kind.POD)[1])

    async def check(self) -> None:
        """Check everything that holds at any moment."""
        await self._check_promises()
        self._check_ends()
        self._check_leaks()
        driver = look_at_driver(self.node)  # nothing on the event loop happens between this look and the end
        for one in list(self.node.runtime.containers):
            if one.exit_code is None:
                self._check_container(one, driver)
        self._check_memory(driver)

    # --- I1: no device is promised more than it has ---

    async def _check_promises(self) -> None:
        """Rows are read one after another while the agent writes: what is seen once may be of two moments."""
        for look in range(LOOKS):
            too_much = self._promised_twice()
            if not too_much:
                return
            await asyncio.sleep(0.05 * (look + 1))
        raise AssertionError(f"more is promised than there is: {too_much}")

    def _promised_twice(self) -> str:
        promised: Counter[str] = Counter()
        percent: Counter[str] = Counter()
        holders: Counter[str] = Counter()
        for grant in grants(self.node):
            for given in grant["shares"]:
                promised[given["device_uuid"]] += given["memory_bytes"] // MIB
                percent[given["device_uuid"]] += given["cores_percent"] or 0
                holders[given["device_uuid"]] += 1
        places = [self.places[name] for name in holders if name in self.places]
        over = [f"{a.uuid} and {b.uuid} overlap" for a, b in combinations(places, 2) if a.overlaps(b)]
        over += [f"{place.uuid} is promised {holders[place.uuid]} times" for place in places if holders[place.uuid] > 1]
        for uuid, usable in self.usable_mib.items():
            if promised[uuid] > usable or holders[uuid] > 16:
                over.append(f"{promised[uuid]} of {usable} MiB of {uuid} by {holders[uuid]} containers")
        over += [f"{asked} percent of the cores of {uuid}" for uuid, asked in percent.items() if asked > WHOLE_GPU_PERCENT]
        return "; ".join(over)

    # --- I2: a container has what its pod was assigned;  I4: and uses no more ---

    def _check_container(self, one: RunningContainer, driver: DriverView) -> None:
        config = one.config
        visible = {value for name, value in one.env.items() if name.startswith(contract.ENV_SIM_DEVICE_PREFIX)}
        if not config.cdi_devices:  # a kubelet that has lost its checkpoint and meets no plugin gives none
            assert not visible
            return
        shares = self.assigned[config.pod_uid][config.container]
        places = [share.device_uuid for share in shares if codec.decode_place(share.device_uuid)]
        assert visible == ({driver.instances.get(place) for place in places} or {share.device_uuid for share in shares}), config
        isolation = self.isolations.get(config.pod_uid)
        self.checked[isolation or ("instance" if places else "share")] += 1
        if isolation is not None:
            self._check_other_backend(one, shares, isolation)
        elif not places:
            self._check_limits(one, shares)

    def _check_other_backend(self, one: RunningContainer, shares: tuple[DeviceShare, ...], isolation: Isolation) -> None:
        """The amounts are those of the spec, in the backend's own form, and the shim is not there."""
        amounts = {share.memory_bytes // MIB for share in shares}
        reported = {name: one.env.get(name) for name in (MPS_LIMIT, DRIVER_LIMIT)}
        wanted = {
            MPS_LIMIT: {f"0={mib}M" for mib in amounts} if isolation is Isolation.MPS else {None},
            DRIVER_LIMIT: {str(mib) for mib in amounts} if isolation is Isolation.DRIVER else {None},
        }
        assert {name: {value} for name, value in reported.items()} == wanted, one.config
        assert (MPS_PIPE in one.env) == (isolation is Isolation.MPS), one.config
        for path in (contract.CONTAINER_LIMITS, contract.CONTAINER_REGION):
            assert not (one.root / path.lstrip("/")).exists(), one.config

    def _check_limits(self, one: RunningContainer, shares: tuple[DeviceShare, ...]) -> None:
        """The amounts are those of the spec; use, by the container's own account, is within them."""
        limits = decode_limits((one.root / contract.CONTAINER_LIMITS.lstrip("/")).read_bytes(), interrupted_too=True)
        found = [(device.uuid, device.memory_bytes, device.sm_percent) for device in limits.devices]
        assert found == [(share.device_uuid, share.memory_bytes, share.cores_percent or 0) for share in shares], one.config
        priority = self.priorities.get(one.config.pod_uid)
        assert {device.priority for device in limits.devices} == {PRIORITY_VALUES[priority]}, one.config
        ceilings = [self._ceiling_bytes(one, share) for share in shares]
        burst = one.config.pod_uid in self.bursts
        assert [device.burst_bytes for device in limits.devices] == (ceilings if burst else [0] * len(shares)), one.config
        self.checked["burst"] += burst
        self.checked["cores"] += any(share.cores_percent for share in shares)
        self.checked["priority"] += priority is not None
        try:
            slots = read_region(one.root / contract.CONTAINER_REGION.lstrip("/")).snapshot.slots
        except (OSError, RegionError):
            assert one.exit_code is not None, f"the region of {one.config} cannot be read"
            return
        for position, ceiling in enumerate(ceilings):
            assert sum(slot.devices[position].used_bytes for slot in slots) <= ceiling, one.config

    def _ceiling_bytes(self, one: RunningContainer, share: DeviceShare) -> int:
        """How much a container may hold of a device, with what may leave it."""
        return int(share.memory_bytes * self.bursts.get(one.config.pod_uid, 1.0)) // MIB * MIB

    def _check_memory(self, driver: DriverView) -> None:
        """I4 by the driver's account."""
        sessions = {one.pid: one for one in self.node.runtime.containers}
        for (session, minor), mib in driver.used_mib.items():
            if (one := sessions.get(session)) is None:
                continue
            uuid = self.node.inventory.gpus[minor].uuid
            shares = self.assigned[one.config.pod_uid][one.config.container]
            limit = next(self._ceiling_bytes(one, share) // MIB for share in shares if share.device_uuid == uuid)
            assert mib <= limit + SLACK_MIB, f"{one.config} uses {mib} MiB of {uuid}, and may use {limit}"

    # --- I3: nothing leaks ---

    def _check_leaks(self) -> None:
        now, present = time.monotonic(), {pod["metadata"]["uid"] for pod in self.pods()}
        for uid in self.assigned.keys() - present:
            self._gone_at.setdefault(uid, now)
        for grant in grants(self.node):
            held_seconds = now - self._gone_at.get(grant["pod_uid"], now)
            assert held_seconds < LEAK_SECONDS, f"pod {grant['pod']} is gone for {held_seconds:.0f} s, and its share is held"

    # --- I5: what runs goes on running ---

    def _check_ends(self) -> None:
        lasting = {pod["metadata"]["uid"] for pod in self.pods() if _lasts(pod)}
        for one in self.node.runtime.history:
            ended_by_itself = one.exit_code is not None and one.config.container != "init" and one.id not in self.killed
            assert not ended_by_itself or one.config.pod_uid not in lasting, f"{one.config} ended with {one.exit_code}, and nobody ended it"


def _lasts(pod: Any) -> bool:
    """Whether a pod goes on: it was not deleted, and kubelet did not fail it.

    A kubelet that starts admits its pods again, and fails those that have a container to be started while the plugin is away.
    """
    return "deletionTimestamp" not in pod["metadata"] and pod["status"].get("reason") != "UnexpectedAdmissionError"
