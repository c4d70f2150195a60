# SPDX-License-Identifier: Apache-2.0
"""The scenario of the demo: start pods on a node, add a greedy pod and one that is too big, and measure.

Invariant: all evidence comes from outside this program. Its sources are the agent's metrics, pod status and events, the output of the CUDA
program and of NVML in the containers, and the driver's list of processes.
"""

import asyncio
import os
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec

from aliquot.contract.units import format_memory
from aliquot.paths import SOURCE_ROOT, built
from aliquot_cli.smi import Listing, render
from aliquot_lab.demo.evidence import (
    Event,
    Evidence,
    Fill,
    Inside,
    PodState,
    Speed,
    cuda_devices,
    failed_calls,
    fill_result,
    kernels_per_second,
    parse_events,
    pod_state,
    progress_by_device,
)
from aliquot_lab.demo.metrics import Scrape, parse
from aliquot_lab.demo.plan import Plan, PlannedPod, Role, oversized
from aliquot_lab.standin.errors import NotFoundError
from aliquot_lab.standin.inventory import Inventory
from aliquot_lab.standin.node import Node

MEASURE_SECONDS = 2.2
"""How long the speed of the steady pods is measured, before and after the greedy pod starts. They report once a second."""
START_SECONDS = 60.0
FILL_SECONDS = 60.0
"""Longer than the import of PyTorch takes on a busy machine."""
REFUSAL_SECONDS = 10.0
RELEASE_SECONDS = 10.0
REFRESH_SECONDS = 0.25
POLL_SECONDS = 0.05
LISTING = ("env", f"PYTHONPATH={SOURCE_ROOT}", sys.executable, "-m", "aliquot_cli.smi", "--json")
"""Command that prints NVML's listing, in a container or on the host."""


class ScenarioError(Exception):
    """The demo cannot continue; the message says what did not happen."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: a pod on a device, or a pod without a device."""

    pod: str
    device: str
    limit_bytes: int
    used_bytes: int | None
    refusals: int | None
    state: PodState


class Screen(Protocol):
    """Shows the demo's progress."""

    def say(self, sentence: str) -> None:
        """Show what happens next."""
        ...

    def show(self, rows: Sequence[Row]) -> None:
        """Show the current state of all pods."""
        ...

    def quote(self, title: str, text: str) -> None:
        """Show the output of another program."""
        ...


class Scenario:
    """One run of the demo on a running node."""

    def __init__(self, node: Node, plan: Plan, screen: Screen, *, seconds: float, keep: bool) -> None:
        self._node = node
        self._plan = plan
        self._screen = screen
        self._seconds = seconds
        self._keep = keep
        self._client = str(built("bin/aliquot-cuda-client"))
        self._created: list[PlannedPod] = []
        self._titles = device_titles(node.inventory)

    async def run(self) -> Evidence:
        """Run from the first pod to the last measurement. Raises ScenarioError."""
        watcher = asyncio.create_task(self.watch())
        try:
            return await self._run()
        finally:
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)

    async def _run(self) -> Evidence:
        steady, greedy = self._plan.steady, self._plan.greedy
        self._screen.say(f"{', '.join(pod.name for pod in steady)}: pods of different sizes share the GPUs and work all the time.")
        for pod in steady:
            self._create(pod)
        await asyncio.gather(*(self._working(pod) for pod in steady))
        speeds_before, driver_before = await self._speeds(steady), await self._memory_by_driver()

        self._screen.say("greedy: a program on the same GPU that allocates until it is refused.")
        self._create(greedy)
        fill = await self._filled(greedy)
        self._screen.say(f"greedy: holds {format_memory(fill.held_bytes)} and its context, then gets {fill.result_name}.")
        if fill.text:
            self._screen.quote("PyTorch in pod greedy", fill.text)
        speeds_during = await self._speeds(steady)

        too_big, free_bytes = await self._request_too_much(greedy)
        self._screen.say(f"All pods work for {self._seconds:g} s.")
        await asyncio.sleep(self._seconds)
        self._screen.say("Inside the containers, NVML through nvidia-ml-py lists shares, not whole GPUs.")
        granted = (await self._scrape()).of
        inside = {pod.name: await self._inside(pod, {item.device_uuid for item in granted(pod.name)}) for pod in (*steady, greedy)}
        evidence = Evidence(
            pods=(*steady, greedy),
            too_big=too_big,
            states={pod.name: self._state(pod.name) for pod in self._created},
            inside=inside,
            fill=fill,
            speeds={pod.name: Speed(speeds_before[pod.name], speeds_during[pod.name]) for pod in steady},
            scrape=await self._scrape(),
            refused_starts=sum(event["reason"] == "Failed" for event in self._node.events(too_big.name)),
            free_at_request_bytes=free_bytes,
            memory_bytes=_memory_bytes(self._node.inventory),
            parents=_parents(self._node.inventory),
            driver_before=driver_before,
            driver_after=await self._memory_by_driver(),
            after_deletion=None,
        )
        self._screen.show(evidence_rows(evidence, self._node.inventory))
        return evidence if self._keep else replace(evidence, after_deletion=await self._delete_all())

    # --- steps ---

    def _create(self, pod: PlannedPod) -> None:
        self._created.append(pod)
        self._node.create_pod(pod.manifest(self._client))

    async def _working(self, pod: PlannedPod) -> None:
        """Wait until a steady pod has reported progress from every device."""

        def ready() -> bool:
            return len(progress_by_device(self._events(pod))) == pod.devices

        await self._until(ready, START_SECONDS, f"pod {pod.name} did not start to work", pod)

    async def _filled(self, greedy: PlannedPod) -> Fill:
        found: list[Fill] = []

        def refused() -> bool:
            result = fill_result(self._events(greedy))
            found.extend([result] if result is not None else [])
            return bool(found)

        await self._until(refused, FILL_SECONDS, f"pod {greedy.name} was never refused memory", greedy)
        return found[0]

    async def _request_too_much(self, greedy: PlannedPod) -> tuple[PlannedPod, int]:
        """Create a pod that requests one MiB more than the greedy pod's device has free; wait until it is refused."""
        scrape = await self._scrape()
        shares = scrape.of(greedy.name)
        if not shares:
            raise ScenarioError("the agent's metrics have no share of the greedy pod, so its device is unknown")
        uuid = shares[0].device_uuid
        free_bytes = scrape.devices[uuid].total_bytes - (scrape.devices[uuid].allocated_bytes or 0)
        pod = oversized(uuid, free_bytes)
        requested, free = format_memory(pod.memory_bytes_per_device), format_memory(free_bytes)
        self._screen.say(f"too-big: requests {requested} of {self._titles[uuid]}, which has {free} free.")
        self._create(pod)

        def refused() -> bool:
            return bool(self._state(pod.name).message)

        await self._until(refused, REFUSAL_SECONDS, "pod too-big was neither started nor refused", pod)
        return pod, free_bytes

    async def _delete_all(self) -> Scrape:
        """Delete the pods; return the agent's metrics when their shares are free, or at the end of RELEASE_SECONDS."""
        self._screen.say("The pods are deleted, which frees their shares.")
        for pod in self._created:
            self._node.delete_pod(pod.name)
        for pod in self._created:
            await self._node.wait_gone(pod.name, timeout_seconds=RELEASE_SECONDS)
        deadline = time.monotonic() + RELEASE_SECONDS
        scrape = await self._scrape()
        while scrape.shares and time.monotonic() < deadline:
            await asyncio.sleep(POLL_SECONDS)
            scrape = await self._scrape()
        return scrape

    # --- measurements ---

    async def _speeds(self, pods: Sequence[PlannedPod]) -> Mapping[str, float]:
        """Measure the kernels per second of each pod for MEASURE_SECONDS, from the pods' reports."""
        before = {pod.name: progress_by_device(self._events(pod)) for pod in pods}
        await asyncio.sleep(MEASURE_SECONDS)
        return {pod.name: kernels_per_second(before[pod.name], progress_by_device(self._events(pod))) for pod in pods}

    def _events(self, pod: PlannedPod) -> list[Event]:
        try:
            return parse_events(self._node.container(pod.name).lines())
        except NotFoundError:
            return []

    async def _inside(self, pod: PlannedPod, granted: Collection[str]) -> Inside:
        """Read what CUDA and NVML show in a container. Where the hardware does not isolate containers, ignore GPUs that are not granted."""
        container, events = self._node.container(pod.name), self._events(pod)
        code, output = await self._node.runtime.execute(container, LISTING)
        if code != 0:
            return Inside(cuda_devices(events), None, output.strip(), failed_calls(events))
        listing = msgspec.json.decode(output, type=Listing)
        if not self._node.hardware.isolates:
            listing = replace(listing, devices=tuple(device for device in listing.devices if device.uuid in granted))
        if pod.devices > 1 or pod.role is not Role.STEADY:
            self._screen.quote(f"A listing like nvidia-smi's, through nvidia-ml-py, in pod {pod.name}", render(listing))
        return Inside(cuda_devices(events), listing, "", failed_calls(events))

    async def _memory_by_driver(self) -> Mapping[str, int]:
        """Return the memory of each pod's processes, from the driver outside of all containers."""
        env = {**os.environ, **self._node.hardware.host_environment()}
        process = await asyncio.create_subprocess_exec(*LISTING, env=env, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE)
        output, error = await process.communicate()
        if process.returncode != 0:
            raise ScenarioError(f"the driver does not list its processes: {error.decode().strip()}")
        pods = {self._node.container(pod.name).pid: pod.name for pod in self._created if self._state(pod.name).started}
        memory_bytes = dict.fromkeys(pods.values(), 0)
        for device in msgspec.json.decode(output, type=Listing).devices:
            for item in device.processes:
                if (group := _process_group(item.pid)) in pods:
                    memory_bytes[pods[group]] += item.memory_bytes or 0
        return memory_bytes

    async def _scrape(self) -> Scrape:
        return parse(await self._node.metrics())

    def _state(self, name: str) -> PodState:
        return pod_state(self._node.pod(name))

    async def _until(self, condition: Callable[[], bool], seconds: float, error: str, pod: PlannedPod) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            state = self._state(pod.name)
            if time.monotonic() > deadline or state.phase in ("Failed", "Succeeded"):
                output = "\n".join(self._node.container(pod.name).lines()[-5:]) if state.started else ""
                raise ScenarioError(f"{error}: {state.phase} {state.reason} {state.message}\n{output}".rstrip())
            await asyncio.sleep(POLL_SECONDS)

    # --- the table ---

    async def watch(self) -> None:
        """Show the table repeatedly, until cancelled."""
        while True:
            scrape, states = await self._scrape(), {}
            for pod in self._created:
                with suppress(NotFoundError):
                    states[pod.name] = self._state(pod.name)
            self._screen.show(make_rows(self._created, states, scrape, self._titles))
            await asyncio.sleep(REFRESH_SECONDS)


def evidence_rows(evidence: Evidence, inventory: Inventory) -> list[Row]:
    """Return the table of the last measurement."""
    return make_rows((*evidence.pods, evidence.too_big), evidence.states, evidence.scrape, device_titles(inventory))


def make_rows(pods: Sequence[PlannedPod], states: Mapping[str, PodState], scrape: Scrape, titles: Mapping[str, str]) -> list[Row]:
    """Combine pods, their states and the agent's metrics. A deleted pod has no row; a pod without a share has one row."""
    rows: list[Row] = []
    for pod in pods:
        if (state := states.get(pod.name)) is None:
            continue
        shares = scrape.of(pod.name)
        for item in shares:
            title = titles.get(item.device_uuid, item.device_uuid)
            rows.append(Row(pod.name, title, item.limit_bytes, item.used_bytes, item.refusals, state))
        if not shares:
            rows.append(Row(pod.name, "", pod.memory_bytes_per_device * pod.devices, None, None, state))
    return rows


def device_titles(inventory: Inventory) -> dict[str, str]:
    """Return short names of all GPUs and MIG instances."""
    titles = {gpu.uuid: f"GPU {gpu.minor}" for gpu in inventory.gpus}
    for gpu in inventory.gpus:
        for mig in gpu.mig_devices:
            titles[mig.uuid] = f"GPU {gpu.minor} {mig.name.rpartition(' ')[2]}"
    return titles


def _memory_bytes(inventory: Inventory) -> dict[str, int]:
    memory_bytes = {gpu.uuid: gpu.memory_bytes for gpu in inventory.gpus}
    memory_bytes.update({mig.uuid: mig.memory_bytes for gpu in inventory.gpus for mig in gpu.mig_devices})
    return memory_bytes


def _parents(inventory: Inventory) -> dict[str, str]:
    parents = {gpu.uuid: gpu.uuid for gpu in inventory.gpus}
    parents.update({mig.uuid: gpu.uuid for gpu in inventory.gpus for mig in gpu.mig_devices})
    return parents


def _process_group(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None
