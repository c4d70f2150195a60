# SPDX-License-Identifier: Apache-2.0
"""A node on which everything happens at once: the invariants I1 to I5 hold after every step, and at rest no leftovers remain.

Pods come and go, containers die, agent and kubelet are killed at any moment, and aliquot-mps with all its daemons; the API falls silent,
files are lost, GPUs fall ill and recover, are cordoned and uncordoned, the driver is changed underneath, an administrator and mig-manager
partition a GPU. Pods are of every backend, and some may burst. The test plays the scheduler, a bad one at times: it assigns devices, and
now and then more than there is. ALIQUOT_CHAOS_SEED runs a history again.
"""

import asyncio
import contextlib
import os
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agent.core.mps import DAEMONS_DIRECTORY, RECORDS_DIRECTORY
from aliquot import contract
from aliquot.contract import codec
from aliquot.contract.model import ContainerAssignment, DeviceShare, Isolation, PodAssignment, Priority
from aliquot.contract.units import MIB, WHOLE_GPU_PERCENT
from aliquot.paths import built
from aliquot.placement import mig
from aliquot_lab.standin.cluster import Kind
from aliquot_lab.standin.errors import NotFoundError
from aliquot_lab.standin.node import Node
from tests.bench.agent_churn import hurried_node, live_hours
from tests.integration.agent_invariants import Invariants, look_at_driver
from tests.integration.agent_nodes import (
    VGPU,
    condition,
    container,
    drift_page,
    eventually,
    grants,
    inject,
    is_running,
    make_node,
    manifest,
    published,
)
from tests.integration.mig_nodes import DRIVER_WITH_LIMITS, a100_topology, ctk, mps_program, on_host

pytestmark = [pytest.mark.usefixtures("build_dir")]
SEED_ENV = "ALIQUOT_CHAOS_SEED"
SECONDS_ENV = "ALIQUOT_SOAK_SECONDS"
HOURS_ENV = "ALIQUOT_SOAK_HOURS"
"""How long the soak tests go on: of the clock, and of a node's life at a minute each."""
MOST_PODS = 14
BURST = 1.5
GIVEN_SECONDS = 3.0
"""How long an administrator waits for the pod that wants a GPU alone."""
LEAST_CHECKED = {"share": 20, "instance": 2, "cores": 3, "priority": 3, "burst": 2, "mps": 2, "driver": 2, "exclusive": 1}
"""How often containers of each kind were checked, at least."""
REST_SECONDS = 40.0
WHOLE_GPUS = 2
MIG_GPU = WHOLE_GPUS
MIG_LABEL = "nvidia.com/mig.config.state"
HANG_SECONDS = 15
"""Less than an administrator's tool is waited for: it waits for the driver too."""
GPU_FAULTS = (
    ("xid", "31"),
    ("xid", "92"),
    ("xid", "62"),
    ("xid", "79"),
    ("lost",),
    ("hang", str(HANG_SECONDS * 1000)),
    ("ecc", "uncorrected"),
    ("ecc", "corrected", "9"),
)
MAKE_INSTANCE = """
try:
    instance = nv.nvmlDeviceCreateGpuInstance(gpu, 19)
    nv.nvmlGpuInstanceCreateComputeInstance(instance, 0)
    result = nv.nvmlGpuInstanceGetInfo(instance).id
except nv.NVMLError_InsufficientResources:
    result = None
"""
"""Of one slice, wherever the driver likes."""
REMOVE_INSTANCE = """
instance = nv.nvmlDeviceGetGpuInstanceById(gpu, {number})
nv.nvmlComputeInstanceDestroy(nv.nvmlGpuInstanceGetComputeInstanceById(instance, 0))
nv.nvmlGpuInstanceDestroy(instance)
result = None
"""


class Chaos:
    """One node, and everything that can happen to it."""

    def __init__(self, node: Node, seed: int, invariants: Invariants) -> None:
        self.node = node
        self.random = random.Random(seed)
        self.invariants = invariants
        self.happened: Counter[str] = Counter()
        self._serial = 0
        self._ill: set[int] = set()
        """Minors of GPUs with a fault."""
        self._foreign: int | None = None
        """The GPU instance that an administrator made."""

    @property
    def seen_enough(self) -> bool:
        """Whether containers of all kinds were there to be checked, however slow this machine is."""
        return all(map(self.seen, LEAST_CHECKED))

    def seen(self, what: str) -> bool:
        """Whether containers of a kind were there to be checked."""
        return self.invariants.checked[what] >= LEAST_CHECKED[what]

    async def step(self) -> None:
        """Let something happen, and see that all invariants hold."""
        events: dict[Callable[[], Awaitable[None] | None], int] = {
            self.create_pod: 16,
            self.create_urgent_or_patient_pod: 4 if self.seen("priority") else 12,
            self.create_pod_without_shim: 8,
            self.create_bursting_pod: 4 if self.seen("burst") else 12,
            self.give_a_whole_gpu: 3,
            self.delete_pod: 4,
            self.replace_pod: 2,
            self.kill_container: 3,
            self.kill_agent: 2,
            self.kill_mps: 2,
            self.restart_kubelet: 1,
            self.lose_checkpoint: 1,
            self.silence_api: 1,
            self.break_watches: 2,
            self.lose_a_file: 4,
            self.make_a_gpu_ill: 3,
            self.break_the_driver: 1,
            self.heal_all: 6,
            self.cordon_a_gpu: 2,
            self.uncordon_all: 4,
            self.let_mig_manager_work: 1,
            self.partition: 1,
        }
        happening = self.random.choices(list(events), list(events.values()))[0]
        self.happened[happening.__name__] += 1
        outcome = happening()
        if outcome is not None:
            await outcome
        await asyncio.sleep(self.random.choice((0.0, 0.05, 0.2)))
        await self.invariants.check()

    # --- pods ---

    def create_urgent_or_patient_pod(self) -> None:
        self.create_pod(priority=self.random.choice(list(Priority)))

    def create_pod_without_shim(self) -> None:
        self.create_pod(isolation=self.random.choice((Isolation.MPS, Isolation.DRIVER)))

    def create_bursting_pod(self) -> None:
        self.create_pod(burst=BURST)

    async def give_a_whole_gpu(self) -> None:
        """An administrator takes everybody else off a GPU that works for a pod that wants it alone, and after a while that one too."""
        taken = self.taken_whole()
        uuid = next(iter(taken), self.random.choice(self.node.inventory.gpus[:WHOLE_GPUS]).uuid)
        for pod in self.invariants.pods():
            given = self.invariants.assigned[pod["metadata"]["uid"]].values()
            if any(share.device_uuid == uuid for shares in given for share in shares):
                self.node.delete_pod(pod["metadata"]["name"])
        if not taken:
            self.heal_all()
            self.uncordon_all()
            name = f"whole{self._serial}"
            self.create_pod(name, isolation=Isolation.EXCLUSIVE, alone_on=uuid)
            with contextlib.suppress(TimeoutError, NotFoundError):  # it may be late, and what was drawn before may come to nothing
                await self.node.wait_for_pod(name, is_running, timeout_seconds=GIVEN_SECONDS)

    def taken_whole(self) -> set[str]:
        """The GPU of the pod that wants one alone, if there is such a pod."""
        present = {pod["metadata"]["uid"] for pod in self.invariants.pods()}
        alone = [uid for uid, isolation in self.invariants.isolations.items() if isolation is Isolation.EXCLUSIVE and uid in present]
        return {share.device_uuid for uid in alone for given in self.invariants.assigned[uid].values() for share in given}

    def create_pod(
        self,
        name: str | None = None,
        *,
        priority: Priority | None = None,
        isolation: Isolation | None = None,
        burst: float | None = None,
        alone_on: str = "",
    ) -> None:
        """``alone_on``: the GPU of a pod with isolation exclusive."""
        for pod in self.invariants.pods():
            if pod["status"].get("phase") == "Failed":  # whoever owns it makes another
                self.node.delete_pod(pod["metadata"]["name"])
        if len(self.invariants.pods()) >= MOST_PODS:
            return
        self._serial += 1
        uid = f"{self.random.getrandbits(128):032x}"
        annotations = {
            contract.ANNOTATION_PRIORITY: priority,
            contract.ANNOTATION_ISOLATION: isolation,
            contract.ANNOTATION_MEMORY_BURST: None if burst is None else str(burst),
        }
        of_whole_gpus = any(annotations.values())
        if alone_on:
            drawn, init = [self.whole(alone_on)], []
        else:
            letters = "ab"[: self.random.choice((1, 1, 2))]
            drawn = [self.draw_container(letter, of_whole_gpus=of_whole_gpus, isolation=isolation) for letter in letters]
            with_init = self.random.random() < 0.3
            init = [self.draw_container("init", of_whole_gpus=of_whole_gpus, isolation=isolation)] if with_init else []
        for spec, _ in init:
            spec["command"] = ["sh", "-c", "sleep 0.05"]
        shares = {spec["name"]: given for spec, given in (*init, *drawn)}
        self.invariants.assigned[uid] = shares
        text = codec.encode_assignment(PodAssignment(uid, tuple(ContainerAssignment(*item) for item in shares.items())))
        chosen = {annotation: value for annotation, value in annotations.items() if value is not None}
        metadata: dict[str, Any] = {"uid": uid, "annotations": {contract.ANNOTATION_ASSIGNMENT: text, **chosen}}
        self.invariants.know(uid, priority, isolation, burst)
        specs = [spec for spec, _ in drawn]
        self.node.create_pod(manifest(name or f"p{self._serial}", *specs, init=[spec for spec, _ in init], **metadata))

    def whole(self, uuid: str) -> tuple[dict[str, Any], tuple[DeviceShare, ...]]:
        """A container that has a GPU alone, and uses more of it than any share has."""
        share = DeviceShare(uuid, self.invariants.usable_mib[uuid] * MIB, WHOLE_GPU_PERCENT)
        program = f"{built('bin/aliquot-cuda-client')} hold --mib {self.invariants.usable_mib[uuid] * 4 // 5}"
        return {**container("a", mib=None), "command": ["sh", "-c", f"{program}; exec sleep 600"]}, (share,)

    def draw_container(
        self, name: str, *, of_whole_gpus: bool = False, isolation: Isolation | None = None
    ) -> tuple[dict[str, Any], tuple[DeviceShare, ...]]:
        """A container, and devices assigned without a look at what is free. ``of_whole_gpus``: not of those that are partitioned."""
        if not of_whole_gpus and self.random.random() < 0.3:
            place = self.random.choice(sorted(self.invariants.places.values(), key=lambda one: one.uuid))
            limits = {mig.resource_of_profile(place.profile): "1"}
            spec = {"name": name, "command": ["sleep", "600"], "resources": {"limits": limits}}
            return spec, (DeviceShare(place.uuid, place.memory_bytes),)
        taken = self.taken_whole() if self.random.random() < 0.8 else set()
        free = [gpu for gpu in self.node.inventory.gpus[:WHOLE_GPUS] if gpu.uuid not in taken]
        count = 1 if isolation is Isolation.MPS else self.random.choice((1, 1, 2))
        gpus = self.random.sample(free, min(count, len(free)))
        usable_mib = min(self.invariants.usable_mib[gpu.uuid] for gpu in gpus)
        each_percent = None if isolation is Isolation.DRIVER else self.random.choice((None, None, 20, 45, 70))
        # who asks for cores asks for little memory, so that now and then it is the cores that are short
        each_mib = self.random.randrange(usable_mib // 20, usable_mib * 3 // 5 if each_percent is None else usable_mib // 5)
        cores = None if each_percent is None else each_percent * len(gpus)
        spec = container(name, vgpus=len(gpus), mib=each_mib * len(gpus), cores=cores)
        if self.random.random() < 0.4:
            # the second is refused by the shim, and nobody stands in for what refuses it elsewhere
            asked_mib = self.random.choice((each_mib // 2, each_mib + 100)) if isolation is None else each_mib // 2
            program = f"{built('bin/aliquot-cuda-client')} hold --mib {asked_mib}"
            spec["command"] = ["sh", "-c", f"{program}; exec sleep 600"]
        return spec, tuple(DeviceShare(gpu.uuid, each_mib * MIB, each_percent) for gpu in gpus)

    def any_pod(self) -> Any | None:
        pods = self.invariants.pods()
        return self.random.choice(pods) if pods else None

    def delete_pod(self) -> None:
        if (pod := self.any_pod()) is not None:
            self.node.delete_pod(pod["metadata"]["name"])

    def replace_pod(self) -> None:
        """As when kubectl delete --force meets a StatefulSet."""
        if (pod := self.any_pod()) is not None:
            name = pod["metadata"]["name"]
            self.node.cluster.delete(Kind.POD, "default", name)
            self.create_pod(name)

    def kill_container(self) -> None:
        if self.node.runtime.containers:
            one = self.random.choice(self.node.runtime.containers)
            self.invariants.killed.add(one.id)
            one.signal_group(9)

    # --- programs of the node ---

    async def kill_agent(self) -> None:
        await self.node.agent.kill()
        await asyncio.sleep(self.random.choice((0.0, 0.3)))
        await self.node.agent.start()
        if self.random.random() < 0.7:  # else what follows meets it while it starts
            await self.node.agent.metrics_url(REST_SECONDS)

    async def kill_mps(self) -> None:
        """With all daemons of the node, as when its container ends."""
        await self.node.mps.kill()
        await asyncio.sleep(self.random.choice((0.0, 0.3)))
        await self.node.mps.start()

    async def restart_kubelet(self) -> None:
        await self.node.kubelet.restart(downtime_seconds=self.random.choice((0.0, 0.2)))

    async def lose_checkpoint(self) -> None:
        await self.node.kubelet.restart(wipe_checkpoint=True)

    async def silence_api(self) -> None:
        with self.node.api.outage():
            await asyncio.sleep(0.3)

    def break_watches(self) -> None:
        self.node.api.break_watches()
        if self.random.random() < 0.5:
            self.node.cluster.compact()

    def lose_a_file(self) -> None:
        places = (
            self.node.layout.cdi_dynamic.glob("*.json"),
            (self.node.layout.state / "ledger").glob("*.json"),
            (self.node.layout.run / "containers").glob("*/grant.json"),
        )
        found = sorted(self.random.choice(places))
        if found:
            with contextlib.suppress(FileNotFoundError):
                self.random.choice(found).unlink()

    # --- GPUs ---

    def make_a_gpu_ill(self) -> None:
        minor = self.random.randrange(len(self.node.inventory.gpus))
        self._ill.add(minor)
        inject(self.node, *self.random.choice(GPU_FAULTS), "--gpu", str(minor))

    def break_the_driver(self) -> None:
        self._ill.add(MIG_GPU)
        inject(self.node, self.random.choice(("mismatch", "no-driver")), "on")

    def heal_all(self) -> None:
        self._ill.clear()
        inject(self.node, "clear")

    def cordon_a_gpu(self) -> None:
        """What is there stays and may restart. An agent may hear of it late, so that what comes new is no matter of invariants."""
        self.set_cordon(cordonedDevices=[self.random.choice(self.node.inventory.gpus).uuid])

    def uncordon_all(self) -> None:
        self.set_cordon()

    def set_cordon(self, **spec: Any) -> None:
        self.node.cluster.update(Kind.GPU_NODE, "", self.node.options.name, lambda item: item.update(spec=spec))

    async def let_mig_manager_work(self) -> None:
        def label(state: str, one: dict[str, Any]) -> None:
            one["metadata"].setdefault("labels", {})[MIG_LABEL] = state

        for state in ("pending", "success"):
            self.node.cluster.update(Kind.NODE, "", self.node.options.name, partial(label, state))
            await asyncio.sleep(0.3)

    async def partition(self) -> None:
        """An administrator makes an instance that is not ours, or removes it."""
        if MIG_GPU in self._ill:
            return
        script = MAKE_INSTANCE if self._foreign is None else REMOVE_INSTANCE.format(number=self._foreign)
        self._foreign = await asyncio.to_thread(on_host, self.node, script, MIG_GPU)

    # --- the end ---

    async def rest(self) -> None:
        """I3: once all is quiet, what is held is what runs, and no drift is left but of what kubelet forgot."""
        self.heal_all()
        self.uncordon_all()
        if self._foreign is not None:
            await self.partition()
        await self.node.wait_ready(REST_SECONDS)
        await eventually(lambda: self.node.allocatable(VGPU) == 16 * WHOLE_GPUS, "every GPU is healthy again", REST_SECONDS)
        await eventually(lambda: condition(self.node)["status"] == "True", "the node says so", REST_SECONDS)

        def running_with_devices() -> set[tuple[str, str]]:
            return {(one.config.pod_uid, one.config.container) for one in self.node.runtime.containers if one.config.cdi_devices}

        def settled() -> bool:
            held = {(grant["pod_uid"], grant["container"]) for grant in grants(self.node)}
            live = {pod["metadata"]["uid"] for pod in self.invariants.pods() if pod["status"].get("phase") not in ("Failed", "Succeeded")}
            return running_with_devices() <= held and {uid for uid, _ in held} <= live

        await eventually(settled, "what is held is what runs", REST_SECONDS)
        async with asyncio.timeout(REST_SECONDS):
            while (left := await self.drifts()) - {"unlisted", "ids-differ", "ungranted"}:
                assert left
                await asyncio.sleep(0.1)
        await self.invariants.check()

    async def drifts(self) -> set[str]:
        return {drift["kind"] for drift in (await drift_page(self.node))["drifts"]}

    async def clear(self) -> None:
        """I3: when every pod is gone, so is everything of them."""
        for pod in self.invariants.pods():
            self.node.delete_pod(pod["metadata"]["name"])
        await eventually(lambda: not self.invariants.pods(), "all pods are gone", REST_SECONDS)
        await eventually(lambda: not grants(self.node), "nothing is held", REST_SECONDS)
        layout = self.node.layout
        places = (layout.cdi_dynamic, layout.run / "containers", layout.state / "mig", layout.run / RECORDS_DIRECTORY / "wanted")
        await eventually(lambda: not any(list(place.iterdir()) for place in places), "no file is left", REST_SECONDS)
        await eventually(lambda: not list((layout.run / DAEMONS_DIRECTORY).glob("GPU-*")), "no MPS daemon is left", REST_SECONDS)
        ledger = {path.name for path in (layout.state / "ledger").iterdir()} - {"quarantine"}
        assert not ledger
        assert not look_at_driver(self.node).instances


def limits_by_driver(directory: Path) -> tuple[str, ...]:
    """What the agent looks for on a node with a driver that limits control groups; here the containers have no control group."""
    hook, cgroups = directory / "node/usr/bin/nvidia-cdi-hook", directory / "cgroup"
    for path in (hook, cgroups / "cgroup.controllers"):
        path.parent.mkdir(parents=True)
        path.touch(0o755)
    return "--driver-limits-hook=/usr/bin/nvidia-cdi-hook", f"--host-dir={directory}/node", f"--cgroup-dir={cgroups}"


async def play(directory: Path, seed: int, seconds: float) -> Chaos:
    """Play one history, of so many seconds at least, on a node of two GPUs that are shared and one that is partitioned."""
    print(f"chaos seed: {seed}; {SEED_ENV}={seed} runs it again")
    # without capacity in the node's status, kubelet admits more than there is, and only the ledger stands in the way
    sharing = ("--placement=assigned", "--pod-wait-seconds=2", "--publish-node-capacity=false", f"--memory-oversubscription={BURST}")
    flags = (*sharing, "--mig-strategy=dynamic", f"--nvidia-ctk={ctk(directory)}", *limits_by_driver(directory))
    topology = a100_topology(directory, whole=WHOLE_GPUS, driver=DRIVER_WITH_LIMITS)
    async with make_node(topology, *flags, mps_control=mps_program(directory)) as node:
        await eventually(lambda: (found := published(node)) is not None and len(found.devices) == WHOLE_GPUS + 1, "the node is published")
        gpu_node = published(node)
        assert gpu_node is not None
        chaos = Chaos(node, seed, Invariants(node, gpu_node))
        try:
            end = time.monotonic() + seconds
            while time.monotonic() < end or not chaos.seen_enough:
                await chaos.step()
            await chaos.rest()
            await chaos.clear()
        except BaseException as exc:
            exc.add_note(f"chaos seed: {seed}; happened: {dict(chaos.happened)}\n{node.agent.log_tail()}")
            raise
        return chaos


@pytest.mark.timeout(180)
async def test_invariants_hold_under_all_faults(tmp_path):
    await play(tmp_path, int(os.environ.get(SEED_ENV, "20261121")), seconds=6.0)


@pytest.mark.soak
@pytest.mark.timeout(3600)
async def test_they_hold_for_long_from_any_seed(tmp_path):
    end = time.monotonic() + float(os.environ.get(SECONDS_ENV, "600"))
    while time.monotonic() < end:
        seed = int(os.environ.get(SEED_ENV, random.SystemRandom().getrandbits(32)))
        await play(tmp_path, seed, seconds=60.0)


@pytest.mark.soak
@pytest.mark.timeout(5400)
async def test_the_agent_does_not_grow_in_a_day_of_a_busy_node():
    """What has a bound fills up in the first half: pools of threads, the events of the last minutes. Only a leak goes on."""
    hours = int(os.environ.get(HOURS_ENV, "24"))
    async with hurried_node() as node:
        after = await live_hours(node, hours)
    print("; ".join(f"hour {number}: {one}" for number, one in enumerate(after, 1)))
    filled, last = after[hours // 2 - 1], after[-1]
    assert last.resident_kib - filled.resident_kib < 1024
    assert last.threads - filled.threads < 4
    assert last.files - filled.files < 4
