# SPDX-License-Identifier: Apache-2.0
"""Detects another device plugin that serves one of our resource names.

In kubelet the last registration wins. So two plugins with the same name displace each other again and again, and pods get the wrong
devices. Kubelet does not report which plugin registered a name. Three signs do: device IDs under our name that this agent does not make, a
plugin that answers on a socket named after the resource, and a second Aliquot agent. The node's capacity is no sign: it outlives restarts.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from agent.core.identity import device_uuid_of
from aliquot import contract
from aliquot.contract import codec
from aliquot.contract.errors import ContractError

SOCKET_PREFIX = f"{contract.PRODUCT}-"


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the agent found before it registers a resource."""

    answering_sockets: Sequence[str] = ()
    """Names of sockets in the plugin directory, other than our own and kubelet's, on which a device plugin answers."""
    allocatable_ids: Sequence[str] = ()
    """IDs that kubelet now offers under our resource name."""


def socket_name(resource: str, instance: str) -> str:
    """Return a plugin's socket name; ``instance`` is unique per process and start.

    Unique because kubelet up to 1.35 mistakes the end of an old connection on the same endpoint for the end of the new one.
    """
    return f"{SOCKET_PREFIX}{_suffix(resource)}-{instance}.sock"


def is_our_socket(resource: str, name: str) -> bool:
    """Whether a socket belongs to an agent's plugin for this resource, of this process or another."""
    return re.fullmatch(re.escape(f"{SOCKET_PREFIX}{_suffix(resource)}-") + r"[0-9a-z-]+\.sock", name) is not None


def find_conflict(resource: str, evidence: Evidence) -> str | None:
    """Return a message with the conflicting plugin and what to do, or None if the resource is free."""
    foreign = _foreign_ids(resource, evidence.allocatable_ids)
    holders = [name for name in evidence.answering_sockets if _named_after(resource, name)]
    cure = f"Only one plugin may serve {resource} on a node: stop the other one. This agent then registers by itself"
    if foreign:
        return (
            f"another device plugin holds {resource}: kubelet offers {len(foreign)} IDs that this agent does not make, "
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
