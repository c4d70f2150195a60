"""Kubelet's memory of who holds which device IDs: ``kubelet_internal_checkpoint`` in the device plugin directory.

It has what PodResources leaves out, the pods' UIDs and ordinary init containers, and is written before a container can start. Its form is
kubelet's own business, so it is a further witness and never the only one: a file that is not as expected says nothing.
"""

from pathlib import Path

import msgspec

from agent.core.identity import RememberedDevices

FILE_NAME = "kubelet_internal_checkpoint"


class _Entry(msgspec.Struct):
    pod_uid: str = msgspec.field(name="PodUID")
    container: str = msgspec.field(name="ContainerName")
    resource: str = msgspec.field(name="ResourceName")
    device_ids: dict[str, list[str] | None] | list[str] | None = msgspec.field(name="DeviceIDs")
    """By NUMA node; a plain list before Kubernetes 1.20."""


class _Data(msgspec.Struct):
    entries: list[_Entry] | None = msgspec.field(name="PodDeviceEntries", default=None)


class _Checkpoint(msgspec.Struct):
    data: _Data = msgspec.field(name="Data", default_factory=_Data)


class KubeletCheckpoint:
    """Implements ``ports.KubeletMemory``."""

    def __init__(self, plugin_directory: Path) -> None:
        self._path = plugin_directory / FILE_NAME

    def remembered(self) -> tuple[RememberedDevices, ...]:
        """See ``ports.KubeletMemory``."""
        try:
            checkpoint = msgspec.json.decode(self._path.read_bytes(), type=_Checkpoint)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return ()
        entries = checkpoint.data.entries or ()
        return tuple(RememberedDevices(one.pod_uid, one.container, one.resource, _ids(one.device_ids)) for one in entries)


def _ids(by_node: dict[str, list[str] | None] | list[str] | None) -> frozenset[str]:
    if isinstance(by_node, dict):
        return frozenset(device_id for several in by_node.values() for device_id in several or ())
    return frozenset(by_node or ())
