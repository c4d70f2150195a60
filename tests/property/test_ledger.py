# SPDX-License-Identifier: Apache-2.0
"""Any history of starts, ends, retries and crashes at any step: no device is promised more than it has (I1), and nothing leaks (I3).

The machine plays kubelet and the API over the real planner, grant manager and files. A crash stops the agent before or after any one of
its file operations; the next agent starts from what is on the disk.
"""

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from agent.core.identity import HeldDevices
from agent.core.inventory import DeviceInventory
from agent.core.ledger import Grant
from agent.core.limits import FailPolicy, limits_of
from agent.core.planning import Node, Planned, plan_grant
from agent.core.reconciliation import NodeView, plan_releases
from agent.services.grant_manager import GrantManager
from aliquot.contract.model import ContainerSpec, Pod, Policy
from aliquot.contract.units import MIB, WHOLE_GPU_PERCENT
from tests.unit.agent.builders import BOOT, VGPU, ask, gpu, ids, inventory, limits, pod
from tests.unit.agent.fakes import NO_SCANS, Disk, FakeClock

GPUS = 2
GPU_MIB = 100
SHARES = 4
INVENTORY: DeviceInventory = inventory(*(gpu(minor, mib=GPU_MIB) for minor in range(GPUS)))
ALL_IDS = sorted(f"{minor}:{replica}" for minor in range(GPUS) for replica in range(SHARES))


class Crash(BaseException):
    """The agent is killed here."""


class Fuse:
    """Burns down by one at every step of a file operation and kills the agent at the end; None never does."""

    def __init__(self) -> None:
        self.steps: int | None = None

    def step(self) -> None:
        if self.steps is None:
            return
        if self.steps == 0:
            raise Crash
        self.steps -= 1


class Fused:
    """One of the agent's file adapters, with a step of the fuse before and after every change."""

    def __init__(self, adapter: object, fuse: Fuse) -> None:
        self._adapter = adapter
        self._fuse = fuse

    def __getattr__(self, name: str) -> Any:
        method: Callable[..., Any] = getattr(self._adapter, name)
        if name not in ("write", "remove", "prepare"):
            return method

        def fused(*arguments: object, **settings: object) -> Any:
            self._fuse.step()
            result = method(*arguments, **settings)
            self._fuse.step()
            return result

        return fused


class AgentHistory(RuleBasedStateMachine):
    """Pods come and go, kubelet gives IDs out, containers start, and the agent dies and comes back."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.loop = asyncio.new_event_loop()
        self.fuse = Fuse()
        self.pods: dict[str, Pod] = {}
        self.held: dict[str, frozenset[str]] = {}
        self.running: dict[str, Grant] = {}
        self.serial = 0

    @initialize()
    def start_agent(self) -> None:
        self.disk = Disk(Path(self.directory.name))
        store, files, cdi = (cast(Any, Fused(adapter, self.fuse)) for adapter in (self.disk.store, self.disk.files, self.disk.cdi))
        self.manager = GrantManager(store, files, cdi, FakeClock(), NO_SCANS)
        self.manager.load(BOOT)

    @rule(vgpus=st.integers(1, GPUS), mib=st.integers(1, GPU_MIB), cores=st.sampled_from([None, 10, 60]), picks=st.permutations(ALL_IDS))
    def admit(self, vgpus: int, mib: int, cores: int | None, picks: list[str]) -> None:
        """A pod is bound to the node and kubelet gives it IDs that no living pod holds."""
        taken = frozenset(device_id for held in self.held.values() for device_id in held)
        free = [pick for pick in picks if not ids(pick) <= taken]
        if len(free) < vgpus:
            return
        self.serial += 1
        spec = ContainerSpec("main", limits(vgpus, mib * vgpus, None if cores is None else cores * vgpus))
        one = pod(f"p{self.serial}", spec)
        self.pods[one.uid] = one
        self.held[one.uid] = ids(*free[:vgpus])

    @rule(data=st.data(), steps=st.none() | st.integers(0, 12))
    def start_container(self, data: st.DataObject, steps: int | None) -> None:
        """Kubelet calls PreStart, for the first time or again."""
        if not self.pods:
            return
        one = self.pods[data.draw(st.sampled_from(sorted(self.pods)))]
        node = Node(INVENTORY, self.manager.ledger, SHARES, BOOT, Policy.BINPACK, self.pods.__contains__)
        planned = plan_grant(ask(one, self.held[one.uid]), node)
        if not isinstance(planned, Planned):
            return
        commit = self.manager.commit(planned, limits_of(planned.grant, FailPolicy.CLOSED), dict, INVENTORY, SHARES)
        if self.survives(commit, steps):
            self.running[one.uid] = planned.grant

    @rule(data=st.data())
    def end_pod(self, data: st.DataObject) -> None:
        """A pod is deleted and its containers are gone; kubelet may give its IDs to others at once."""
        if self.pods:
            uid = data.draw(st.sampled_from(sorted(self.pods)))
            for known in (self.pods, self.held, self.running):
                known.pop(uid, None)

    @rule(steps=st.none() | st.integers(0, 12))
    def reconcile(self, steps: int | None) -> None:
        """One pass of the reconciler."""
        listing = [HeldDevices(one.namespace, one.name, "main", VGPU, self.held[uid]) for uid, one in self.pods.items()]
        plan = plan_releases(self.manager.ledger.grants.values(), NodeView(self.pods, listing, frozenset()), {})

        async def work() -> None:
            await self.manager.release(plan.release)
            await self.manager.sweep()

        if self.survives(work(), steps):
            self.check_nothing_leaks()

    @rule()
    def kill(self) -> None:
        """The agent is killed between two operations and starts again."""
        self.start_agent()

    @invariant()
    def promises_stay_within_the_devices(self) -> None:
        if not hasattr(self, "manager"):
            return
        for state in self.manager.ledger.states(INVENTORY, SHARES):
            assert state.used_memory_bytes <= GPU_MIB * MIB
            assert state.used_cores_percent <= WHOLE_GPU_PERCENT
            assert state.used_shares <= SHARES

    @invariant()
    def what_runs_is_promised(self) -> None:
        for grant in self.running.values():
            assert self.manager.ledger.grants[grant.grant_id] == grant

    @invariant()
    def what_runs_has_its_files(self) -> None:
        for grant in self.running.values():
            assert grant.grant_id in self.disk.store.ids()
            assert grant.grant_id in self.disk.cdi.ids()

    def check_nothing_leaks(self) -> None:
        alive = {grant.grant_id for grant in self.manager.ledger.grants.values() if grant.pod_uid in self.pods}
        assert set(self.manager.ledger.grants) == alive
        assert {*self.disk.store.ids(), *self.disk.files.ids(), *self.disk.cdi.ids()} <= alive

    def survives(self, work: Any, steps: int | None) -> bool:
        """Do the work with a fuse; when the agent dies in it, start the next one."""
        self.fuse.steps = steps
        try:
            self.loop.run_until_complete(work)
        except Crash:
            self.fuse.steps = None
            self.start_agent()
            return False
        self.fuse.steps = None
        return True

    def teardown(self) -> None:
        """When all pods are gone, one pass leaves nothing behind."""
        if hasattr(self, "manager"):
            for known in (self.pods, self.held, self.running):
                known.clear()
            self.reconcile(None)
            assert not self.manager.ledger.grants
            self.manager.close()
        self.loop.close()
        self.directory.cleanup()


TestAgentHistory = AgentHistory.TestCase
TestAgentHistory.settings = settings(stateful_step_count=30)
