# SPDX-License-Identifier: Apache-2.0
"""Fakes of the agent's ports: the driver, the kubelet's sockets and the Kubernetes API as plain objects a test can steer."""

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from agent.adapters.cdi_files import CdiDirectory
from agent.adapters.container_files import GrantFiles
from agent.adapters.kubelet_checkpoint import KubeletCheckpointFile
from agent.adapters.ledger_files import LedgerFiles
from agent.adapters.node_files import RowFile
from agent.core.cdi import SHIM_LIBRARIES
from agent.core.cdi_scans import ScanPace
from agent.core.conflict import Evidence
from agent.core.health import HealthRules
from agent.core.identity import HeldDevices, RememberedDevices
from agent.core.injection import VERSION_ROWS, Answer, DeviceInjection, NodeVersions
from agent.core.inventory import DeviceEvent, DriverReading, OverdueCall
from agent.core.overhead import GpuProcess, HostProcess, ProcessList
from agent.core.publishing import NodeCondition
from agent.core.registration import FileIdentity
from agent.errors import DriverLeftError, DriverTimeoutError, KubeletError
from agent.ports.clock import Clock
from agent.ports.kube import NodeEvent, PodEvent
from agent.services.driver_watch import DriverWatch
from agent.services.events import EventRecorder
from agent.services.grant_manager import GrantManager
from agent.services.injection import Injection
from agent.services.pod_cache import PodCache
from agent.services.state import AgentState
from aliquot import contract
from aliquot.contract.model import Link
from aliquot.kube.errors import KubeApiError
from aliquot.kubelet_api.deviceplugin_pb2_grpc import DevicePluginServicer


class FakeClock:
    """Time that stands still until it is moved."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def monotonic(self) -> float:
        return self.seconds

    def now(self) -> float:
        return 1_700_000_000 + self.seconds


AT_ONCE = HealthRules(recovery_seconds=0, quarantine_seconds=0)
"""A GPU is healthy again with its first clean answer."""


NO_SCANS = ScanPace(0, 0, 0)
"""A container runtime that knows what is in a CDI directory at once."""


class FakeDriver:
    """Returns the reply that the test set, or raises it."""

    def __init__(self, answer: DriverReading | Exception) -> None:
        self.answer = answer
        self.link_list: Sequence[Link] = ()
        self.link_reads = 0
        self.restarts = 0
        self.kept_out = ""
        self.stays = False
        """Whether leaving it fails."""
        self.in_new_session: Set[str] | Exception = frozenset()
        self.searches = 0
        self.reported: list[DeviceEvent] = []
        self.process_list: Sequence[GpuProcess] | Exception = ()
        self.unknown: frozenset[str] = frozenset()
        self.out: Sequence[OverdueCall] = ()
        """The calls that have not come back: it cannot be left meanwhile."""

    async def read(self) -> DriverReading:
        if self.kept_out:
            raise DriverLeftError(self.kept_out)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    async def events(self) -> Sequence[DeviceEvent]:
        reported, self.reported = self.reported, []
        return reported

    async def links(self) -> Sequence[Link]:
        self.link_reads += 1
        return self.link_list

    async def restart(self) -> None:
        if self.out:
            raise DriverTimeoutError(f"{self.out[0].name} has not returned for 5.0 s", self.out[0].device_uuid)
        self.restarts += 1

    async def keep_out(self, reason: str) -> None:
        self.kept_out = reason
        if reason and self.stays:
            raise DriverTimeoutError("nvmlShutdown has not returned for 5.0 s")

    async def processes(self) -> ProcessList:
        if isinstance(self.process_list, Exception):
            raise self.process_list
        return ProcessList(tuple(self.process_list), self.unknown)

    async def busy(self, device_uuids: Set[str], lookback_seconds: float) -> Mapping[str, Mapping[int, float]]:
        if isinstance(self.process_list, Exception):
            raise self.process_list
        return {
            uuid: {one.pid: one.utilization_ratio for one in self.process_list if one.device_uuid == uuid and one.utilization_ratio}
            for uuid in device_uuids
        }

    async def found_in_new_session(self) -> Set[str]:
        self.searches += 1
        if isinstance(self.in_new_session, Exception):
            raise self.in_new_session
        return self.in_new_session

    def overdue(self) -> Sequence[OverdueCall]:
        return self.out


class FakePodResources:
    """Lists what the test set; None means a kubelet that does not answer."""

    def __init__(self, *listing: HeldDevices) -> None:
        self.listing: list[HeldDevices] | None = list(listing)
        self.offered: Sequence[str] = ()

    async def held(self) -> Sequence[HeldDevices]:
        if self.listing is None:
            raise KubeletError("PodResources does not answer")
        return list(self.listing)

    async def allocatable_ids(self, resource: str) -> Sequence[str]:
        return self.offered


class FakeKubeletCheckpoint:
    """Remembers what it received."""

    def __init__(self) -> None:
        self.entries: list[RememberedDevices] = []
        self.writes: int | None = None
        """How often it was written; None when it cannot be read."""

    def remembered(self) -> Sequence[RememberedDevices]:
        return list(self.entries)

    def answer(self, kept: bytes) -> Answer | None:
        return KubeletCheckpointFile(Path()).answer(kept)

    def version(self) -> object:
        return self.writes


class FakeServer:
    def __init__(self, kubelet: "FakeKubelet", name: str) -> None:
        self._kubelet = kubelet
        self._name = name
        self.stopped = False

    async def stop(self) -> None:
        self.stopped = True
        self._kubelet.files.pop(self._name, None)


class FakeKubelet:
    """A plugin directory in memory: names and which file each is."""

    def __init__(self) -> None:
        self.files: dict[str, FileIdentity] = {}
        self.registrations: list[tuple[str, str]] = []
        self.refusal: str | None = None
        self.evidence_found = Evidence()
        self.servers: list[FakeServer] = []
        self._inode = 0

    def touch(self, name: str) -> None:
        self._inode += 1
        self.files[name] = FileIdentity(1, self._inode, self._inode)

    def restart(self) -> None:
        """Wipe the directory and make a new kubelet.sock, as kubelet does when it starts."""
        self.files.clear()
        self.touch(contract.KUBELET_SOCKET_NAME)

    async def serve(self, socket_name: str, plugin: DevicePluginServicer) -> FakeServer:
        self.touch(socket_name)
        self.servers.append(FakeServer(self, socket_name))
        return self.servers[-1]

    async def register(self, socket_name: str, resource: str) -> None:
        if self.refusal is not None:
            raise KubeletError(self.refusal)
        self.registrations.append((socket_name, resource))

    def identity(self, socket_name: str) -> FileIdentity | None:
        return self.files.get(socket_name)

    async def evidence(self, resource: str, own_sockets: frozenset[str]) -> Evidence:
        return self.evidence_found

    async def remove_dead_sockets(self, prefix: str) -> None:
        return None


class FakeKubeApi:
    """Remembers what was published and posted; fails as long as ``outage`` is set."""

    def __init__(self) -> None:
        self.published: list[Mapping[str, int]] = []
        self.conditions: list[tuple[NodeCondition, bool]] = []
        self.gpu_nodes_created: list[tuple[str, str]] = []
        self.statuses: list[Mapping[str, object]] = []
        self.pruned: set[str] = set()
        """Fields of a gpunodes object's status that this API drops."""
        self.events: list[PodEvent | NodeEvent] = []
        self.event_times: list[float] = []
        self.answers: list[KubeApiError] = []
        """What the next events are answered, one each."""
        self.evicted: list[tuple[str, str, str]] = []
        self.outage = False

    def publish_capacity(self, node_name: str, capacity: Mapping[str, int]) -> None:
        self._check()
        self.published.append(dict(capacity))

    def publish_condition(self, node_name: str, condition: NodeCondition, *, turned: bool) -> None:
        self._check()
        self.conditions.append((condition, turned))

    def create_gpu_node(self, node_name: str, node_uid: str) -> None:
        self._check()
        self.gpu_nodes_created.append((node_name, node_uid))

    def publish_gpu_node(self, node_name: str, status: Mapping[str, object]) -> Mapping[str, object]:
        self._check()
        self.statuses.append(status)
        return {key: value for key, value in status.items() if key not in self.pruned}

    def post_event(self, event: PodEvent | NodeEvent, happened_at: float) -> None:
        self._check()
        if self.answers:
            raise self.answers.pop(0)
        self.events.append(event)
        self.event_times.append(happened_at)

    def evict_pod(self, namespace: str, name: str, uid: str) -> None:
        self._check()
        self.evicted.append((namespace, name, uid))

    def _check(self) -> None:
        if self.outage:
            raise KubeApiError("the API is down")


class FakeShim:
    """A shim that is always installed."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def installed(self) -> Path:
        self._directory.mkdir(parents=True, exist_ok=True)
        for name in SHIM_LIBRARIES:
            (self._directory / name).touch()
        return self._directory

    def sweep(self, mentioned: Callable[[Iterable[str]], Set[str]]) -> Sequence[str]:
        return []


class Disk:
    """The agent's real file adapters below one directory, made again for each life of the agent."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.store = LedgerFiles(base / "state/ledger")
        self.files = GrantFiles(base / "run/containers")
        kernel: dict[str, Any] = {"devices": base / "dev", "capabilities": base / "capabilities", "kernel_drivers": base / "proc-devices"}
        self.cdi = CdiDirectory(base / "cdi", base / "etc-cdi", **kernel)
        kernel["kernel_drivers"].touch()
        self.versions = RowFile(base / "state/node-versions", VERSION_ROWS, NodeVersions())

    def manager(
        self, clock: Clock | None = None, pace: ScanPace = NO_SCANS, pause: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> GrantManager:
        return GrantManager(self.store, self.files, self.cdi, clock or FakeClock(), pace, pause)


def make_injection(
    manager: GrantManager,
    disk: Disk,
    pods: PodCache,
    watch: DriverWatch,
    mode: DeviceInjection = DeviceInjection.CDI,
    clock: Clock | None = None,
) -> Injection:
    """How devices enter containers, over the real files."""
    return Injection(
        mode, state=AgentState(watch, pods, manager), files=disk.files, cdi=disk.cdi, versions=disk.versions, clock=clock or FakeClock()
    )


class FakeProcesses:
    """The processes of the host, as a test says."""

    def __init__(self, *processes: HostProcess) -> None:
        self.there = {process.pid: process for process in processes}

    def read(self, pids: Iterable[int]) -> Sequence[HostProcess]:
        return [self.there[pid] for pid in set(pids) if pid in self.there]

    def cgroups(self) -> Collection[str]:
        return {process.cgroup for process in self.there.values()}

    def own_cgroup(self) -> str:
        return "0::/\n"

    def maps(self, pid: int, path: str) -> bool | None:
        return False

    def kill(self, process: HostProcess) -> bool:
        return False


async def until(condition: Callable[[], object]) -> None:
    """Wait for something to become true, however slow the machine is."""
    async with asyncio.timeout(60):
        while True:
            if condition():
                return
            await asyncio.sleep(0.01)


async def posted(recorder: EventRecorder, api: FakeKubeApi) -> Sequence[PodEvent | NodeEvent]:
    """Have everything posted that was recorded so far, however slow the machine is; return all that was ever posted.

    Events are posted in order, in threads. One of our own goes last through the queue, so what is not there after it was never recorded.
    """
    last = NodeEvent("test", "", "Last", uuid.uuid4().hex, warning=False)
    recorder.record(last)
    running = asyncio.ensure_future(recorder.run())
    await until(lambda: last in api.events)
    running.cancel()
    api.events.remove(last)
    return api.events


async def posted_on_pods(recorder: EventRecorder, api: FakeKubeApi) -> Sequence[PodEvent]:
    """Do as ``posted`` does, where every event is about a pod."""
    on_pods = []
    for event in await posted(recorder, api):
        assert isinstance(event, PodEvent), event
        on_pods.append(event)
    return on_pods


async def settle() -> None:
    """Let everything that is ready to run, run."""
    for _ in range(20):
        await asyncio.sleep(0)
