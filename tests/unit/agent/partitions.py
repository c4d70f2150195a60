# SPDX-License-Identifier: Apache-2.0
"""MIG GPUs in memory, and what services need that look at them: fakes of the ports of partitions, records and MPS daemons."""

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import count

from agent.core.backends import Abilities
from agent.core.inventory import DriverReading
from agent.core.ledger import Ledger
from agent.core.mig import MigRecord
from agent.core.mps_records import DaemonRequest, DaemonState, SupervisorState
from agent.errors import MpsError, PartitionError, PartitionInUseError, StorageError
from agent.services.backends import Backends
from agent.services.changes import Changes
from agent.services.driver_watch import DriverWatch
from agent.services.events import EventRecorder
from agent.services.grant_manager import GrantManager
from agent.services.mig_controller import MigController
from agent.services.mps_controller import MpsController
from agent.services.offering import Offering
from aliquot.contract.codec import MigPlace
from aliquot.contract.model import Allocation, Device, MigInstance
from aliquot.contract.units import MIB
from tests.unit.agent.builders import BOOT, gpu, reading
from tests.unit.agent.fakes import FakeClock, FakeKubeApi

PROFILES: Mapping[str, tuple[int, int, int, Collection[int]]] = {
    "1g.10gb": (1, 7, 9728, range(7)),
    "1g.10gb+me": (1, 1, 9728, range(7)),
    "2g.20gb": (2, 3, 19968, (0, 2, 4)),
    "3g.40gb": (4, 2, 40192, (0, 4)),
    "7g.80gb": (8, 1, 80640, (0,)),
}
"""Of an A100: size in memory slices, how many at most, MiB, and where they may begin."""


def place(start: int, profile: str = "1g.10gb", device: int = 0) -> MigInstance:
    size, most, mib, _ = PROFILES[profile]
    uuid = f"GPU-{device}"
    return MigInstance(str(MigPlace(uuid, profile, start)), uuid, profile, mib * MIB, 0, 0, start, size, most)


def places(device: int = 0) -> tuple[MigInstance, ...]:
    """Every place on an empty GPU."""
    return tuple(place(start, profile, device) for profile, (_, _, _, starts) in PROFILES.items() for start in starts)


def dynamic_gpu(minor: int = 0, *existing: MigInstance) -> Device:
    """A GPU as the inventory shows it where instances are made on demand."""
    return gpu(minor, mib=80_000, mig=[*existing, *places(minor)])


class FakePartitions:
    """GPUs that hold the instances they were made to hold; every making yields another UUID."""

    def __init__(self) -> None:
        self.instances: dict[str, MigInstance] = {}
        self.busy: set[str] = set()
        self.stuck: set[str] = set()
        """Where a removal comes half way: the compute instance goes, the GPU instance stays."""
        self.made = 0
        self.failure: Exception | None = None
        self.calls: list[str] = []

    async def places(self, device_uuid: str) -> Sequence[MigInstance]:
        return places(int(device_uuid.removeprefix("GPU-")))

    async def instance_at(self, place: MigPlace) -> MigInstance | None:
        return self.instances.get(str(place))

    async def create(self, place: MigPlace, size: int) -> MigInstance:
        self.calls.append(f"create {place}")
        if self.failure is not None:
            raise self.failure
        return self.put(place, size)

    def put(self, place: MigPlace, size: int = 1, uuid: str | None = None) -> MigInstance:
        """Have an instance there."""
        self.made += 1
        named = f"MIG-made-{self.made}" if uuid is None else uuid
        self.instances[str(place)] = MigInstance(named, place.device_uuid, place.profile, 0, 7 + place.start, 0, place.start, size)
        return self.instances[str(place)]

    async def destroy(self, place: MigPlace) -> None:
        self.calls.append(f"destroy {place}")
        if str(place) in self.busy:
            raise PartitionInUseError(f"removing the MIG instance at {place}: processes still use it")
        if str(place) in self.stuck and str(place) in self.instances:
            self.instances[str(place)] = replace(self.instances[str(place)], uuid="")
            raise PartitionError(f"removing the MIG instance at {place}: Unknown Error")
        self.instances.pop(str(place), None)

    def reading(self, minor: int = 0) -> DriverReading:
        """What the driver alone would say of the GPU."""
        found = [replace(instance, memory_bytes=9728 * MIB) for instance in self.instances.values() if instance.uuid]
        return reading(gpu(minor, mib=80_000, mig=found))


class FakeRecords:
    """Records in memory, as if on disk: they outlive a controller."""

    def __init__(self) -> None:
        self.records: dict[str, MigRecord] = {}

    def load(self) -> Sequence[MigRecord]:
        return list(self.records.values())

    def write(self, record: MigRecord) -> None:
        self.records[record.place] = record

    def remove(self, place: str) -> None:
        self.records.pop(place, None)


class FakeMps:
    """MPS daemons as names in a set."""

    def __init__(self) -> None:
        self.running: set[str] = set()
        self.states: dict[int, str] = {}
        self.failure: MpsError | StorageError | None = None
        """Of starting and stopping."""
        self.unlisted: StorageError | None = None
        self.calls: list[str] = []
        self.cleared = 0
        self.uncleared: StorageError | None = None
        self.trimmed: list[str] = []
        self.untrimmed: StorageError | None = None

    def clear_shared_memory(self) -> None:
        if self.uncleared is not None:
            raise self.uncleared
        self.cleared += 1

    def start(self, device_uuid: str) -> int | None:
        self.calls.append(f"start {device_uuid}")
        if self.failure is not None:
            raise self.failure
        self.running.add(device_uuid)
        return 100 + sum(call.startswith("start") for call in self.calls)

    def servers(self, device_uuid: str) -> Mapping[int, str] | None:
        return dict(self.states) if device_uuid in self.running else None

    def trim_logs(self, device_uuid: str) -> None:
        if self.untrimmed is not None:
            raise self.untrimmed
        self.trimmed.append(device_uuid)

    def shut_down_server(self, device_uuid: str, pid: int) -> None:
        self.calls.append(f"shut down {pid}")
        del self.states[pid]

    def stop(self, device_uuid: str) -> None:
        self.calls.append(f"stop {device_uuid}")
        if self.failure is not None:
            raise self.failure
        self.running.discard(device_uuid)

    def known(self) -> Sequence[str]:
        if self.unlisted is not None:
            raise self.unlisted
        return sorted(self.running)


class FakeMpsDaemons:
    """A supervisor that immediately starts what is wanted, and goes through the states that the test sets."""

    def __init__(self, about: SupervisorState | None = SupervisorState(50, "/host/shm")) -> None:  # noqa: B008 - it is frozen
        self.about = about
        self.wishes: dict[str, DaemonRequest] = {}
        self.left: dict[str, DaemonRequest] = {}
        """What ``load`` finds."""
        self.states: dict[str, DaemonState] = {}
        self.trouble = ""
        """Of starting daemons."""
        self.failure: StorageError | None = None
        self.writes = 0

    def supervisor(self) -> SupervisorState | None:
        if self.failure is not None:
            raise self.failure
        return self.about

    def load(self) -> Mapping[str, DaemonRequest]:
        return self.left

    def want(self, wish: DaemonRequest) -> None:
        self.writes += 1
        self.wishes[wish.device_uuid] = wish
        if self.about is not None and wish.device_uuid not in self.states:
            self.restart(wish.device_uuid)

    def wanted(self) -> Set[str]:
        return self.wishes.keys()

    def withdraw(self, device_uuid: str) -> None:
        self.wishes.pop(device_uuid, None)
        self.states.pop(device_uuid, None)

    def state(self, device_uuid: str) -> DaemonState | None:
        return self.states.get(device_uuid)

    def restart(self, device_uuid: str) -> None:
        """Have another daemon, or no daemon while there is trouble."""
        generation = "" if self.trouble else f"generation {next(_generations)}"
        self.states[device_uuid] = DaemonState(device_uuid, generation, trouble=self.trouble)


_generations = count(1)


@dataclass
class EmptyManager:
    """A manager without grants, for readers."""

    ledger: Ledger = field(default_factory=Ledger)
    changes: Changes = field(default_factory=Changes)


def make_offering(
    watch: DriverWatch,
    shares_per_gpu: int = 16,
    abilities: Abilities | None = None,
    manager: object = None,
    allocation: Allocation = Allocation.PLUGIN,
) -> Offering:
    return Offering(watch, manager or EmptyManager(), shares_per_gpu, lambda: abilities or Abilities(), allocation)  # type: ignore[arg-type]


def make_controller(
    manager: GrantManager,
    partitions: FakePartitions | None = None,
    records: FakeRecords | None = None,
    *,
    labels: Mapping[str, str] | None = None,
    offering: bool = True,
) -> MigController:
    return MigController(
        partitions or FakePartitions(),
        records or FakeRecords(),
        manager=manager,
        labels=lambda: labels or {},
        boot_id=BOOT,
        offering=offering,
    )


def make_backends(
    manager: GrantManager, controller: MigController | None = None, mps: MpsController | None = None, **abilities: object
) -> Backends:
    mps = mps or MpsController(
        "node-1", FakeMpsDaemons(None), "/run/aliquot/mps", manager=manager, models=dict, events=EventRecorder(FakeKubeApi(), FakeClock())
    )
    return Backends(Abilities(**abilities), controller or make_controller(manager), mps, "/usr/bin/nvidia-cdi-hook")  # type: ignore[arg-type]
