# SPDX-License-Identifier: Apache-2.0
"""Guesses which devices the next container will get, to advise kubelet while it allocates."""

from agent.core.planning import Node
from agent.core.steering import Waiting, devices_for, waiting_containers
from agent.ports.kubelet import KubeletCheckpoint
from agent.services.injection import Injection
from agent.services.state import AgentState
from aliquot.contract.model import Policy

POD_WAIT_SECONDS = 0.25
"""Kubelet admits no other pod during this wait, so it is short."""


class PendingPods:
    """The pods of this node that have no grant yet."""

    def __init__(
        self,
        shares_per_gpu: int,
        local_policy: Policy | None,
        *,
        state: AgentState,
        checkpoint: KubeletCheckpoint,
        injection: Injection,
    ) -> None:
        self._watch = state.watch
        self._pods = state.pods
        self._manager = state.manager
        self._shares_per_gpu = shares_per_gpu
        self._local_policy = local_policy
        self._checkpoint = checkpoint
        self._injection = injection

    @property
    def packing(self) -> bool:
        """Whether local placement puts containers together on the fullest device."""
        return self._local_policy is Policy.BINPACK

    def held_ids(self, resource: str) -> frozenset[str]:
        """Return the IDs that have a grant."""
        return self._manager.ledger.held_ids(resource)

    async def wanted_devices(self, resource: str, size: int) -> tuple[str, ...]:
        """Return the devices of the container that this allocation is for; empty when several containers are possible.

        Kubelet and this agent receive a pod at the same time. If kubelet was faster, this waits a moment for the pod. Where the IDs decide
        on the GPUs, the most likely container is assumed.
        """
        remembered = await self._manager.on_disk(self._checkpoint.remembered)
        decides = not await self._injection.by_cdi()

        def waiting() -> list[Waiting]:
            return waiting_containers(self._pods.by_uid.values(), self._manager.ledger, resource, size, remembered)

        found = waiting()
        if self._pods.fresh and not found and await self._pods.wait_until(lambda: bool(waiting()), POD_WAIT_SECONDS):
            found = waiting()
        node = Node(self._watch.inventory, self._manager.ledger, self._shares_per_gpu, "", self._local_policy, self._pods.is_active)
        return devices_for(found, node, first_come=decides)
