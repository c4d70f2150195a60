# SPDX-License-Identifier: Apache-2.0
"""The agent is killed before and after every call that leaves something behind, and in the middle of those that take two steps, while it
starts a container, ends one, and cures what differs, for each backend that has something to make ready. The next comes to the same end.
"""

import inspect
import itertools
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest

from agent.adapters.cdi_files import CdiDirectory
from agent.adapters.container_files import GrantFiles
from agent.adapters.directory_watch import DirectoryWatch
from agent.adapters.ledger_files import LedgerFiles
from agent.core.backends import Abilities
from agent.core.drift import DriftPolicy, Snapshot, find_drifts
from agent.core.ledger import Grant
from agent.core.limits import FailPolicy, limits_of
from agent.core.mps_records import DaemonRequest
from agent.errors import PartitionError
from agent.services.backends import Backends
from agent.services.events import EventRecorder
from agent.services.evictor import Evictor
from agent.services.mig_controller import MigController
from agent.services.mps_controller import MpsController
from agent.services.reconciler import Cures, Reconciler, ReconcilerOptions, Witnesses
from agent.services.reporting import Reporting
from aliquot.contract.codec import MigPlace
from aliquot.contract.model import ContainerSpec, Isolation, MigInstance, Policy
from aliquot.contract.units import MIB
from tests.unit.agent.builders import BOOT, VGPU, assigned, ids, limits, pod, reading, share
from tests.unit.agent.fakes import Disk, FakeClock, FakeKubeApi, settle
from tests.unit.agent.partitions import FakeMpsDaemons, FakePartitions, FakeRecords, dynamic_gpu
from tests.unit.agent.services.test_allocator import Harness, placed
from tests.unit.agent.services.test_backends import MIG_RESOURCE, isolated, make_capabilities, on_demand

STEPS = {
    "pod_resources": ("held",),
    "checkpoint": ("remembered",),
    "shim": ("installed",),
    "store": ("write", "remove"),
    "files": ("prepare", "copy_shim", "remove", "link_shim"),
    "cdi": ("write", "remove"),
    "records": ("write", "remove"),
    "partitions": ("create", "destroy"),
    "mps": ("want", "withdraw"),
}
"""The calls at which an agent is killed, by port: all that leave something behind. What a kill at one that only looks leaves is what
the call before it left."""
IDS = ids("0:0")
BACKENDS = (Isolation.SHIM, Isolation.MPS, Isolation.MIG)
CONTAINERS = {
    Isolation.SHIM: (placed(), VGPU, None),
    Isolation.MPS: (isolated("mps"), VGPU, Policy.BINPACK),
    Isolation.MIG: (on_demand(), MIG_RESOURCE, Policy.BINPACK),
}
"""A pod of each backend, the resource it asks for, and how its node places."""


class Killed(BaseException):
    """Here the process ended."""


class Fuse:
    """Kills at its last step; every call of a port is two steps or more."""

    def __init__(self, steps: float) -> None:
        self.left = steps
        self.at = ""

    def step(self, where: str) -> None:
        if self.left <= 0:
            self.at = self.at or where
            raise Killed
        self.left -= 1


class Fused:
    """A port with calls that burn the fuse."""

    def __init__(self, port: Any, name: str, fuse: Fuse) -> None:
        self._port = port
        self._name = name
        self._fuse = fuse

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._port, name)
        if name not in STEPS[self._name]:
            return method
        return self._asynchronous(method, name) if inspect.iscoroutinefunction(method) else self._synchronous(method, name)

    def _synchronous(self, method: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **settings: Any) -> Any:
            self._fuse.step(f"before {self._name}.{name}")
            result = method(*arguments, **settings)
            self._fuse.step(f"after {self._name}.{name}")
            return result

        return call

    def _asynchronous(self, method: Callable[..., Any], name: str) -> Callable[..., Any]:
        async def call(*arguments: Any) -> Any:
            self._fuse.step(f"before {self._name}.{name}")
            result = await method(*arguments)
            self._fuse.step(f"after {self._name}.{name}")
            return result

        return call


class TwoStepPartitions(FakePartitions):
    """Makes and removes as the driver does: an instance is two, one in the other, and a place that is taken is no place."""

    fuse = Fuse(float("inf"))

    async def create(self, place: MigPlace, size: int) -> MigInstance:
        if str(place) in self.instances:
            raise PartitionError(f"no room at {place}")
        self.put(place, size, uuid="")
        self.fuse.step("within partitions.create")
        return await super().create(place, size)

    async def destroy(self, place: MigPlace) -> None:
        if (found := self.instances.get(str(place))) is not None:
            self.instances[str(place)] = replace(found, uuid="")
            self.fuse.step("within partitions.destroy")
        await super().destroy(place)


class MpsFiles(FakeMpsDaemons):
    """Requests on the disk: they outlive an agent, as the supervisor does."""

    def load(self) -> Mapping[str, DaemonRequest]:
        return dict(self.wishes)


class World:
    """What outlives an agent: the disk, the GPUs' instances, MPS daemons; and the container that kubelet wants to run."""

    def __init__(self, base: Path, backend: Isolation = Isolation.SHIM) -> None:
        base.mkdir()
        self.base = base
        self.backend = backend
        self.pod, self.resource, self.policy = CONTAINERS[backend]
        self.partitions = TwoStepPartitions()
        self.records = FakeRecords()
        self.mps = MpsFiles()
        make_capabilities(base)


class FusedDisk(Disk):
    """The disk through fused ports."""

    def __init__(self, base: Path, fuse: Fuse) -> None:
        super().__init__(base)
        # Fused passes every call on to the port it wraps.
        self.store = cast(LedgerFiles, Fused(self.store, "store", fuse))
        self.files = cast(GrantFiles, Fused(self.files, "files", fuse))
        self.cdi = cast(CdiDirectory, Fused(self.cdi, "cdi", fuse))


class Life:
    """An agent from its start on, killed by its fuse; without one it lives on."""

    def __init__(self, world: World, fuse: Fuse | None = None) -> None:
        self.world = world
        self.fuse = world.partitions.fuse = fuse or Fuse(float("inf"))
        self.node = self._harness()
        for owner, name in ((self.node.finder, "pod_resources"), (self.node.finder, "checkpoint"), (self.node.contents, "shim")):
            setattr(owner, f"_{name}", Fused(getattr(owner, f"_{name}"), name, self.fuse))
        self.manager = self.node.manager
        pod_resources = Fused(self.node.pod_resources, "pod_resources", self.fuse)
        self.reconciler = Reconciler(
            ReconcilerOptions("node-1", 10.0, world.policy is None, DriftPolicy.REPORT),
            state=self.node.state,
            witnesses=Witnesses(
                pod_resources,
                self.node.liveness,
                DirectoryWatch((), nested=world.base),
                lambda: {VGPU, MIG_RESOURCE},
                self.node.allocator.grant_id,
            ),
            cures=Cures(self._rewrite, Evictor(self.node.api, self.node.clock)),
            reporting=Reporting(self.node.events, self.node.telemetry), clock=self.node.clock,
        )  # fmt: skip

    def _harness(self) -> Harness:
        return Harness(self.world.base, self.world.policy, self._backends, disk=FusedDisk(self.world.base, self.fuse))

    async def _rewrite(self, grant: Grant) -> None:
        await self.node.allocator.rewrite(grant)

    def _backends(self, manager: Any) -> Backends:
        partitions, records, mps = (Fused(getattr(self.world, name), name, self.fuse) for name in ("partitions", "records", "mps"))
        self.mig = MigController(partitions, records, manager=manager, labels=dict, boot_id=BOOT, offering=True)
        events = EventRecorder(FakeKubeApi(), FakeClock())
        self.mps = MpsController("node-1", mps, "/run/aliquot/mps", manager=manager, models=dict, events=events)
        return Backends(Abilities(), self.mig, self.mps, "")

    async def began(self, *pods: Any) -> "Life":
        """Let it start on a node with these pods, as kubelet lists them."""
        if self.world.backend is Isolation.MIG:
            self.node.driver.answer = reading(dynamic_gpu(0))
        self.manager.load(BOOT)
        self.mig.load()
        await self.mps.load()
        await self.node.ready(*pods)
        self.node.census.latest = await self.node.census.take()
        return self

    async def start(self) -> None:
        """Start the container."""
        assert await self.node.start(self.world.pod, IDS, resource=self.world.resource) is None

    async def pass_once(self) -> None:
        """Do what the loops of an agent do over and over."""
        await self.reconciler.reconcile()
        await self.mig.clean()
        await self.mps.look()

    async def drifts(self) -> list[str]:
        survey = await self.manager.survey()
        return [drift.sentence for drift in find_drifts(Snapshot(survey.grants, survey.files))]

    def files(self) -> list[set[str]]:
        """The grant ids that lie on the disk, by place."""
        return [set(port.ids()) for port in (self.node.disk.store, self.node.disk.files, self.node.disk.cdi)]

    async def is_whole(self) -> None:
        """One grant, files that agree with it, what enforces it, and nothing else."""
        assert await self.drifts() == []
        (grant,) = self.manager.ledger.grants.values()
        assert self.files() == [{grant.grant_id}] * 3
        (given,) = grant.shares
        world = self.world
        assert grant.backend is world.backend
        assert set(world.partitions.instances) == ({given.device_uuid} if world.backend is Isolation.MIG else set())
        made = {name: (grant.grant_id, instance.uuid) for name, instance in world.partitions.instances.items()}
        assert {name: (record.grant_id, record.uuid) for name, record in world.records.records.items()} == made
        assert all(uuid for _, uuid in made.values())
        clients = {wish.device_uuid: dict(wish.clients) for wish in world.mps.wishes.values()}
        running = {device_uuid: {grant.grant_id: state.generation} for device_uuid, state in world.mps.states.items()}
        assert clients == running
        assert set(running) == ({given.device_uuid} if world.backend is Isolation.MPS else set())

    async def is_empty(self) -> None:
        """No part of any container is left."""
        assert await self.drifts() == []
        assert not self.manager.ledger.grants
        assert self.files() == [set()] * 3
        assert not self.world.partitions.instances
        assert not self.world.records.records
        assert not self.world.mps.wishes
        assert not self.world.mps.states


SomeWorld = TypeVar("SomeWorld", bound=World)
Deed = Callable[[SomeWorld, Fuse], Awaitable[Life]]


async def do(deed: Deed[SomeWorld], world: SomeWorld, fuse: Fuse) -> str | None:
    """Let an agent do something until its fuse kills it; return where, or None when it was over before."""
    try:
        life = await deed(world, fuse)
    except Killed:
        return fuse.at
    life.manager.close()
    return None


async def start(world: World, fuse: Fuse) -> Life:
    """The agent begins, and the container starts."""
    life = await Life(world, fuse).began(world.pod)
    await life.start()
    return life


async def end(world: World, fuse: Fuse) -> Life:
    """The agent begins on a node after its only pod has gone."""
    life = await Life(world, fuse).began()
    await life.pass_once()
    return life


async def cure(world: World, fuse: Fuse) -> Life:
    """The agent begins on a node with a container, and puts right what differs."""
    life = await Life(world, fuse).began(world.pod)
    await life.pass_once()
    return life


def world_with_container(deed: Callable[[World], Awaitable[None]] | None = None) -> Callable[[Path, Isolation], Awaitable[World]]:
    """Make worlds in which the container runs, and then something happens."""

    async def make(base: Path, backend: Isolation) -> World:
        world = World(base, backend)
        assert await do(start, world, Fuse(float("inf"))) is None
        if deed is not None:
            await deed(world)
        return world

    return make


async def empty_world(base: Path, backend: Isolation) -> World:
    return World(base, backend)


async def every_kill(
    tmp_path: Path,
    backend: Isolation,
    make: Callable[[Path, Isolation], Awaitable[SomeWorld]],
    deed: Deed[SomeWorld],
    then: Callable[[SomeWorld], Awaitable[None]],
) -> set[str]:
    """Do something over and over, killed one step later each time, and see to what comes then; return where it was killed."""
    places: set[str] = set()
    for step in itertools.count():
        world = await make(tmp_path / str(step), backend)
        where = await do(deed, world, Fuse(step))
        try:
            await then(world)
        except BaseException as exc:
            exc.add_note(f"killed {where}")
            raise
        if where is None:
            return places
        places.add(where)
    raise AssertionError("unreachable")


async def kubelet_tries_again(world: World) -> None:
    """The container starts, whether the loops of the new agent come first or not, and nothing changes any more."""
    life = await Life(world).began(world.pod)
    await life.start()
    await life.is_whole()
    await life.pass_once()
    await life.is_whole()
    life.manager.close()


async def the_pod_is_gone(world: World) -> None:
    life = await Life(world).began()
    await life.pass_once()
    await life.is_empty()
    life.manager.close()


STARTED = {
    Isolation.SHIM: {"before pod_resources.held", "after checkpoint.remembered", "after shim.installed", "after files.link_shim"},
    Isolation.MPS: {"before mps.want", "after mps.want"},
    Isolation.MIG: {
        "before partitions.create", "within partitions.create", "after partitions.create", "before records.write", "after records.write",
    },
}  # fmt: skip
ENDED = {
    Isolation.SHIM: {"after cdi.remove", "after files.remove", "before store.remove"},
    Isolation.MPS: {"before mps.withdraw", "after mps.withdraw"},
    Isolation.MIG: {"before partitions.destroy", "within partitions.destroy", "after partitions.destroy", "before records.remove"},
}


@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_start_that_was_killed_anywhere_succeeds_at_kubelets_next_try(tmp_path, backend):
    places = await every_kill(tmp_path, backend, empty_world, start, kubelet_tries_again)
    assert {"before files.prepare", "after files.prepare", "after store.write", "after cdi.write"} | STARTED[backend] <= places


async def test_start_killed_anywhere_grants_assigned_memory_on_retry(tmp_path):
    async def limits_are_as_assigned(world: World) -> None:
        life = await Life(world).began(world.pod)
        await life.start()
        assert [(one.uuid, one.memory_bytes) for one in life.node.limits(IDS).devices] == [("GPU-1", 100 * MIB)]
        assert [grant.shares for grant in life.manager.ledger.grants.values()] == [(share(1),)]
        life.manager.close()

    await every_kill(tmp_path, Isolation.SHIM, empty_world, start, limits_are_as_assigned)


@pytest.mark.parametrize("backend", BACKENDS)
async def test_start_killed_anywhere_leaves_nothing_after_pod_is_deleted(tmp_path, backend):
    await every_kill(tmp_path, backend, empty_world, start, the_pod_is_gone)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("then", [kubelet_tries_again, the_pod_is_gone])
async def test_an_end_that_was_killed_anywhere_is_made_good(tmp_path, backend, then):
    places = await every_kill(tmp_path, backend, world_with_container(), end, then)
    assert ENDED[Isolation.SHIM] | ENDED[backend] <= places


async def break_everything(world: World) -> None:
    """Lose or change each file of the grant, leave strays, and take away what enforces it."""
    disk = Disk(world.base)
    (identifier,) = disk.store.ids()
    grant = disk.store.read(identifier)
    assert grant is not None
    more = replace(grant, shares=tuple(replace(one, memory_bytes=2 * one.memory_bytes) for one in grant.shares))
    disk.files.prepare(grant, limits_of(more, FailPolicy.CLOSED))
    (world.base / "run/containers" / identifier / "region").unlink()
    disk.store.remove(identifier)
    disk.cdi.remove(identifier)
    disk.cdi.write("stray-spec", {})
    (world.base / "run/containers/stray-files").mkdir()
    (world.base / "state/ledger/stray-row.json").write_text("{}")
    world.partitions.instances.clear()  # as a reset of the GPU does
    world.mps.wishes.clear()
    world.mps.states.clear()


@pytest.mark.parametrize("backend", BACKENDS)
async def test_cures_that_were_killed_anywhere_are_finished(tmp_path, backend):
    async def a_pass_later(world: World) -> None:
        life = await Life(world).began(world.pod)
        await life.pass_once()
        await life.is_whole()
        life.manager.close()

    places = await every_kill(tmp_path, backend, world_with_container(break_everything), cure, a_pass_later)
    assert {"after files.prepare", "after store.write", "after cdi.write", "after cdi.remove", "after files.remove"} <= places
    assert STARTED[backend] - STARTED[Isolation.SHIM] <= places


async def test_no_kill_gives_the_ids_of_a_container_to_another(tmp_path):
    """A row that is on disk binds the next agent, even if all else was lost."""

    async def another_asks_for_the_same_memory(world: World) -> None:
        life = await Life(world).began(world.pod)
        promised = sum(one.memory_bytes for grant in life.manager.ledger.grants.values() for one in grant.shares)
        rest_mib = 1000 - promised // MIB
        for mib, granted in ((rest_mib + 1, False), (rest_mib, True)):
            spec = ContainerSpec("main", limits(1, mib))
            other = pod("other", spec, annotations=assigned("uid-other", main=[share(1, mib)]))
            life.node.pods.pods_listed([world.pod, other])
            await settle()
            refusal = await life.node.start(other, ids("0:1"))
            assert (refusal is None) == granted
        life.manager.close()

    await every_kill(tmp_path, Isolation.SHIM, empty_world, start, another_asks_for_the_same_memory)
