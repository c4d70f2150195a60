"""Which devices the next container is likely meant for, to advise kubelet while it allocates."""

from agent.core.planning import Node
from agent.core.steering import Waiting, devices_for, waiting_containers
from agent.ports import KubeletMemory
from agent.services.driver_watch import DriverWatch
from agent.services.grant_book import GrantBook
from agent.services.injection import Injection
from agent.services.pod_cache import PodCache
from proto.model import Policy

POD_WAIT_SECONDS = 0.25
"""Advice is worth a short wait and no more: kubelet admits no other pod meanwhile."""


class PendingPods:
    """Looks at the pods of this node that have no grant yet."""

    def __init__(
        self,
        shares_per_gpu: int,
        local_policy: Policy | None,
        *,
        watch: DriverWatch,
        pods: PodCache,
        book: GrantBook,
        kubelet_memory: KubeletMemory,
        injection: Injection,
    ) -> None:
        self._watch = watch
        self._pods = pods
        self._book = book
        self._shares_per_gpu = shares_per_gpu
        self._local_policy = local_policy
        self._kubelet_memory = kubelet_memory
        self._injection = injection

    @property
    def packing(self) -> bool:
        """Whether local placement puts containers together on the fullest device."""
        return self._local_policy is Policy.BINPACK

    def held_ids(self, resource: str) -> frozenset[str]:
        """Return the IDs that grants stand for."""
        return self._book.ledger.held_ids(resource)

    async def wanted_devices(self, resource: str, size: int) -> tuple[str, ...]:
        """Return the devices of the container that this allocation is for, or none when it cannot be told.

        Kubelet and this agent hear of a pod at the same time; when kubelet was faster, the pod is waited for a moment. Where the IDs decide
        on the GPUs, the likeliest answer is better than none.
        """
        remembered = await self._book.on_disk(self._kubelet_memory.remembered)
        decides = not await self._injection.by_cdi()

        def waiting() -> list[Waiting]:
            return waiting_containers(self._pods.by_uid.values(), self._book.ledger, resource, size, remembered)

        if self._pods.fresh and not waiting():
            await self._pods.wait_until(lambda: bool(waiting()), POD_WAIT_SECONDS)
        node = Node(self._watch.board, self._book.ledger, self._shares_per_gpu, "", self._local_policy, self._pods.is_active)
        return devices_for(waiting(), node, first_come=decides)
