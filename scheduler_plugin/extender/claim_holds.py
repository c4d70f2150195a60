# SPDX-License-Identifier: Apache-2.0
"""Counts the devices of allocated ResourceClaims in the state, each claim as a reservation of its own.

So all other decisions see these devices as taken: what is promised, free and fragmented does not depend on how a pod asked for it.
"""

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any

from aliquot.contract import units
from scheduler_plugin.core.claims.first_fit import Amounts, DeviceKey
from scheduler_plugin.core.claims.planned import CORES, MEMORY
from scheduler_plugin.core.claims.pools import Pools, node_of
from scheduler_plugin.core.claims.stored import ClaimKey, StoredClaim
from scheduler_plugin.core.cluster.hold_uids import claim_uid, is_of_claim
from scheduler_plugin.core.cluster.pods import Footprint, PodFacts, Use
from scheduler_plugin.core.cluster.state import ClusterState, Reservation, Stage
from scheduler_plugin.core.score.cost import HostDemand


class ClaimHolds:
    """Keeps the state equal to the claims."""

    def __init__(self, state: ClusterState, pools: Pools) -> None:
        self._state = state
        self._pools = pools
        self._unheld: dict[ClaimKey, StoredClaim] = {}
        """Allocated claims with a device of unknown GPU."""
        self._users: dict[str, tuple[str, ...]] = {}
        """UIDs of the pods that use an allocated claim, by the UID of its reservation."""

    def set_claim(self, claim: StoredClaim) -> None:
        """Store a new or changed claim. The watch may show a state from before our own write."""
        before = self._pools.claims.get(claim.key)
        if before is not None and claim.is_older_than(before):
            return
        if before is not None and before.uid != claim.uid:
            self.drop_claim(before)
        self._pools.set_claim(claim)
        if claim.parts is None:
            self._release(claim)
        elif before is None or before.parts != claim.parts:
            self._hold(claim)
        if claim.parts is not None:
            self._users[claim_uid(claim.uid)] = claim.reserved_for
            for uid in claim.reserved_for:
                self._settle(uid)

    def drop_claim(self, claim: StoredClaim) -> None:
        """Forget a claim, and free its devices."""
        self._pools.drop_claim(claim)
        self._release(claim)

    def replace_claims(self, claims: Iterable[StoredClaim]) -> None:
        """Store a full list."""
        listed = {claim.key: claim for claim in claims}
        for claim in [known for key, known in self._pools.claims.items() if key not in listed]:
            self.drop_claim(claim)
        for claim in listed.values():
            self.set_claim(claim)

    def set_slice(self, one: Mapping[str, Any]) -> None:
        """Store a new or changed ResourceSlice."""
        self._pools.set_slice(one)
        pool = one["spec"]["driver"], one["spec"]["pool"]["name"]
        for claim in [claim for claim in self._unheld.values() if any(part.device[:2] == pool for part in claim.parts or ())]:
            self._hold(claim)

    def drop_slice(self, one: Mapping[str, Any]) -> None:
        """Forget a ResourceSlice. The use of its devices still counts: running pods have them."""
        self._pools.drop_slice(one)

    def replace_slices(self, slices: Iterable[Mapping[str, Any]]) -> None:
        """Store a full list."""
        self._pools.replace_slices(slices)
        for claim in list(self._unheld.values()):
            self._hold(claim)

    def use(self, node: str, device: DeviceKey, amounts: Amounts | None, *, states_cores: bool) -> tuple[str, Use] | None:
        """Return a device's UUID and what amounts of it are, as the state counts them; None for a device of unknown GPU.

        Args: amounts: None for the whole device. states_cores: whether cores are reserved, and not only what others leave.
        """
        origin = self._pools.origins.get(device)
        if origin is None:
            return None
        memory, cores = (amounts or {}).get(MEMORY), (amounts or {}).get(CORES)
        whole_mib = origin.fixed_mib if origin.fixed_mib is not None else self._memory_mib(node, origin.gpu)
        memory_mib = whole_mib if memory is None else int(memory) // units.MIB
        return origin.counted_as, Use(memory_mib, int(cores or 0) if states_cores else 0, 1, int(not states_cores))

    def claims_without(self, ended: AbstractSet[str]) -> frozenset[str]:
        """Return the UIDs of the allocated claims that no pod uses once these pods have ended. Args: ended: UIDs of pods."""
        allocated = (claim for claim in self._pools.claims.values() if claim.parts is not None)
        return frozenset(claim.uid for claim in allocated if self._have_ended(claim.reserved_for, ended))

    def freed_on(self, node: str, ended: AbstractSet[str]) -> Sequence[str]:
        """Return the UIDs of the reservations on a node of such claims. Args: ended: UIDs of pods."""
        users = self._users
        if not users:
            return ()
        claims = filter(is_of_claim, self._state.footprints_on(node))
        return [claim for claim in claims if self._have_ended(users.get(claim, ()), ended)]

    def _have_ended(self, users: Iterable[str], ended: AbstractSet[str]) -> bool:
        """Whether each of these pods is among the ended ones or gone already."""
        return all(uid in ended or uid not in self._state.pods for uid in users)

    def footprint_of(self, pod: PodFacts) -> Footprint:
        """Return what becomes free of devices when a pod on a node ends, by the claims that only it uses too."""
        found = dict(self._state.footprint_of(pod.uid))
        claims = (self._pools.claims.get((pod.namespace, name)) for name in pod.claims)
        for claim in [claim for claim in claims if claim is not None and set(claim.reserved_for) == {pod.uid}]:
            for name, use in self._state.footprint_of(claim_uid(claim.uid)).items():
                add_use(found, name, use)
        return found

    def _hold(self, claim: StoredClaim) -> None:
        """Count a claim's devices on the node that has them."""
        self._unheld.pop(claim.key, None)
        nodes = sorted({node_of(part.device[:2]) for part in claim.parts or ()} - {""})
        if not nodes:
            self._release(claim)
            return
        uses: dict[str, Use] = {}
        for part in claim.parts or ():
            found = self.use(nodes[0], part.device, part.consumed, states_cores=_states_cores(claim.spec, part.request))
            if found is None:
                self._unheld[claim.key] = claim
            else:
                add_use(uses, *found)
        self._state.reserve(Reservation(claim_uid(claim.uid), nodes[0], uses, HostDemand(), Stage.BINDING))

    def _release(self, claim: StoredClaim) -> None:
        self._unheld.pop(claim.key, None)
        self._users.pop(claim_uid(claim.uid), None)
        self._state.release(claim_uid(claim.uid))

    def _memory_mib(self, node: str, uuid: str) -> int:
        gpu = self._state.gpu_node(node)
        entries = () if gpu is None else gpu.devices
        return next((entry.device.memory_bytes // units.MIB for entry in entries if entry.device.uuid == uuid), 0)

    def _settle(self, pod_uid: str) -> None:
        """Leave the devices of a pod to its claims, once all of them are allocated. Until then no other pod may get them."""
        known, pod = self._state.reservations.get(pod_uid), self._state.pods.get(pod_uid)
        if known is None or not known.footprint or pod is None or pod.gpu is not None:
            return
        found = [self._pools.claims.get((pod.namespace, name)) for name in pod.claims]
        if all(claim is not None and claim.parts is not None for claim in found):
            self._state.reserve(replace(known, footprint={}))


def add_use(uses: dict[str, Use], uuid: str, use: Use) -> None:
    """Add what a request has of a device to what others have."""
    uses[uuid] = uses.get(uuid, Use()).and_also(use)


def _states_cores(spec: Mapping[str, Any], request: str) -> bool:
    """Whether a request, or the alternative ``request/alternative``, reserves cores."""
    name, _, alternative = request.partition("/")
    for one in (spec.get("devices") or {}).get("requests") or ():
        if one["name"] == name:
            chosen = one.get("exactly") if not alternative else _alternative(one, alternative)
            return CORES in ((chosen or {}).get("capacity") or {}).get("requests", {})
    return False


def _alternative(request: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    return next((one for one in request.get("firstAvailable") or () if one["name"] == name), None)
