# SPDX-License-Identifier: Apache-2.0
"""Decides which requests of a claim form one grant: those that a container uses together.

A container can mount one limits file and one usage region, so all its GPUs belong to one grant. Requests that are used by separate
containers stay separate budgets. Kubelet prepares a claim once, for its first pod. So the use by that pod decides, and a later pod gets
what there is:

- it uses one request of a joint grant: all GPUs of that grant, with their limits;
- it uses several separate grants: the last one in the container replaces the limits of the others, and the shim refuses memory on GPUs that
  are not in the limits file.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from agent.core.claims import AllocatedClaim, ClaimRef, RequestGroup
from agent.core.ledger import Grant, requests_text
from agent.core.refusal import Reason, Refusal
from aliquot.contract.model import Pod


@dataclass(frozen=True, slots=True)
class _Use:
    """The requests of a claim that one container uses, in the order of the claim."""

    container: str
    names: tuple[str, ...]


def groups_of(ref: ClaimRef, claim: AllocatedClaim, pods: Mapping[str, Pod], prepared: Sequence[Grant]) -> Sequence[RequestGroup] | Refusal:
    """Return the claim's requests by grant, in the order of the claim.

    Args: pods: by UID. Those of a claim with several requests must be known.
          prepared: the claim's grants of this boot. If they are for all its requests, running containers may have them, so they stay.
    """
    kept = [grant.claim.names for grant in of_every_request(prepared) if grant.claim is not None]
    if kept:
        return _grouped(claim, kept)
    uses = list(_uses(ref, claim, pods))
    missing = [name for name, uid in claim.pods if uid not in pods]
    if len(claim.requests) > 1 and (missing or (claim.reserved and not claim.pods and not uses)):
        return _unknown(ref, missing)
    for one, other in combinations(sorted(uses, key=lambda use: -len(use.names)), 2):
        if one.names != other.names and not set(one.names).isdisjoint(other.names):
            return _mixed(ref, one, other)
    return _grouped(claim, [use.names for use in uses])


def _uses(ref: ClaimRef, claim: AllocatedClaim, pods: Mapping[str, Pod]) -> Iterator[_Use]:
    """Yield what the containers of the claim's pods use of it."""
    for pod in _users(ref, claim, pods):
        for spec in pod.containers if pod.active else ():
            wanted = {use.request for use in spec.claims if use.claim == ref.name}
            names = tuple(request.name for request in claim.requests if request.name in wanted or "" in wanted)
            if names:
                yield _Use(f"{pod.name}/{spec.name}", names)


def _users(ref: ClaimRef, claim: AllocatedClaim, pods: Mapping[str, Pod]) -> Sequence[Pod]:
    """Return the known pods that may use a claim. The members of a group are not listed in it: then all pods of its namespace."""
    if claim.pods:
        return [pods[uid] for _, uid in claim.pods if uid in pods]
    return [pod for pod in pods.values() if pod.namespace == ref.namespace]


def _unknown(ref: ClaimRef, missing: Sequence[str]) -> Refusal:
    which = f"pod {', '.join(missing)}" if missing else "a pod that uses it"
    return Refusal(
        Reason.NOT_READY,
        f"claim {ref} has several requests, and the agent has not seen {which} yet, so it does not know which of them a container uses "
        "together. The agent tries again when kubelet retries",
    )


def _grouped(claim: AllocatedClaim, together: Iterable[tuple[str, ...]]) -> Sequence[RequestGroup]:
    """Return the groups with these names; a request without any is one by itself."""
    by_name = {name: names for names in together for name in names}
    requests = {request.name: request for request in claim.requests}
    groups = dict.fromkeys(by_name.get(name, (name,)) for name in requests)
    return [RequestGroup(tuple(requests[name] for name in names if name in requests)) for names in groups]


def _mixed(ref: ClaimRef, one: _Use, other: _Use) -> Refusal:
    return Refusal(
        Reason.REQUEST_INVALID,
        f"claim {ref}: container {one.container} uses {requests_text(one.names)} together, and container {other.container} uses "
        f"{requests_text(other.names)}. Requests that a container uses together are one budget: let both containers use the same "
        f"requests, or write a request of its own for {other.container}",
    )


def of_every_request(grants: Sequence[Grant]) -> Sequence[Grant]:
    """Return the grants of one claim in the order of its requests, each once; empty if a request has no grant."""
    granted = {name: grant for grant in grants if grant.claim is not None for name in grant.claim.names}
    wanted = next((grant.claim.requests for grant in grants if grant.claim is not None), ())
    return list({granted[name].grant_id: granted[name] for name in wanted}.values()) if granted.keys() >= set(wanted) else ()
