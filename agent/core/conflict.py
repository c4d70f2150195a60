"""Whether another plugin holds one of our resource names.

Kubelet lets the last registration win, so two plugins of one name take the node from each other for ever, and pods get the wrong
devices. Kubelet does not say who registered a name; three signs do: IDs under our name that no agent of ours makes, a plugin that
answers on a socket named after the resource, and a second agent of ours. The node's capacity is no sign: it outlives our own restarts.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from agent.core.identity import device_uuid_of
from proto import codec, contract
from proto.errors import ContractError

SOCKET_PREFIX = f"{contract.PRODUCT}-"


@dataclass(frozen=True, slots=True)
class Evidence:
    """What was found before registering one resource."""

    answering_sockets: Sequence[str] = ()
    """Names of sockets in the plugin directory, other than our own and kubelet's, on which a device plugin answers."""
    allocatable_ids: Sequence[str] = ()
    """IDs that kubelet offers under our resource name at present."""


def socket_name(resource: str, instance: str) -> str:
    """Return a plugin's socket name; ``instance`` is unique per process and start.

    Unique because kubelet up to 1.35 takes the end of an old connection on the same endpoint for the end of the new one.
    """
    return f"{SOCKET_PREFIX}{_suffix(resource)}-{instance}.sock"


def is_our_socket(resource: str, name: str) -> bool:
    """Whether a socket belongs to an agent's plugin for this resource, of this process or another."""
    return re.fullmatch(re.escape(f"{SOCKET_PREFIX}{_suffix(resource)}-") + r"[0-9a-z-]+\.sock", name) is not None


def find_conflict(resource: str, evidence: Evidence) -> str | None:
    """Return the sentence that says who holds the resource and what to do, or None when it is free."""
    foreign = _foreign_ids(resource, evidence.allocatable_ids)
    holders = [name for name in evidence.answering_sockets if _named_after(resource, name)]
    cure = f"Only one plugin may serve {resource} on a node: stop the other one; this agent registers by itself once the name is free"
    if foreign:
        return (
            f"another device plugin holds {resource}: the kubelet offers {len(foreign)} IDs that this agent does not make, "
            f"such as {foreign[0]!r}. {cure}"
        )
    if twins := [name for name in evidence.answering_sockets if is_our_socket(resource, name)]:
        return f"another agent on this node serves {resource} on {', '.join(twins)}. {cure}"
    if holders:
        return f"another device plugin serves {resource} on {', '.join(holders)}. {cure}"
    return None


def _foreign_ids(resource: str, device_ids: Iterable[str]) -> list[str]:
    return [device_id for device_id in device_ids if not _may_be_ours(resource, device_id)]


def _may_be_ours(resource: str, device_id: str) -> bool:
    try:
        if resource == contract.RESOURCE_VGPU and not device_id.startswith("MIG-"):  # each vGPU may be an instance: migStrategy single
            codec.decode_replica(device_id)
        else:
            codec.check_device_uuid(device_uuid_of(device_id))
    except ContractError:
        return False
    return True


def _named_after(resource: str, socket: str) -> bool:
    return not socket.startswith(SOCKET_PREFIX) and socket.removesuffix(".sock").endswith(_suffix(resource))


def _suffix(resource: str) -> str:
    return resource.rpartition("/")[2]
