"""Kubelet's memory of who holds which device IDs: ``kubelet_internal_checkpoint`` in the device plugin directory.

It has what PodResources leaves out, the pods' UIDs, ordinary init containers and what Allocate answered, and is written before a
container can start. Its form is kubelet's own business, so it is a further witness and never the only one: a file that is not as expected
says nothing.
Source: allocateContainerResources and toCheckpointData, k8s.io/kubernetes/pkg/kubelet/cm/devicemanager
"""

from pathlib import Path

import msgspec
from google.protobuf.message import DecodeError

from agent.core.identity import RememberedDevices
from agent.core.injection import Answer
from proto.kubelet import deviceplugin_pb2 as pb

FILE_NAME = "kubelet_internal_checkpoint"


class _Entry(msgspec.Struct):
    pod_uid: str = msgspec.field(name="PodUID")
    container: str = msgspec.field(name="ContainerName")
    resource: str = msgspec.field(name="ResourceName")
    device_ids: dict[str, list[str] | None] | list[str] | None = msgspec.field(name="DeviceIDs")
    """By NUMA node; a plain list before Kubernetes 1.20."""
    answer: bytes | None = msgspec.field(name="AllocResp", default=None)
    """A ContainerAllocateResponse."""


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
        return tuple(
            RememberedDevices(one.pod_uid, one.container, one.resource, _ids(one.device_ids), one.answer or b"") for one in entries
        )

    def answer(self, kept: bytes) -> Answer | None:
        """See ``ports.KubeletMemory``."""
        try:
            found = pb.ContainerAllocateResponse.FromString(kept)
        except DecodeError:
            return None
        if not found.ListFields():
            return None
        return Answer(
            cdi_name=found.cdi_devices[0].name if found.cdi_devices else "",
            env=dict(found.envs),
            mounts=tuple((mount.host_path, mount.container_path, mount.read_only) for mount in found.mounts),
            nodes=tuple(node.host_path for node in found.devices),
        )

    def version(self) -> object:
        """See ``ports.KubeletMemory``. Kubelet replaces the file."""
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size


def _ids(by_node: dict[str, list[str] | None] | list[str] | None) -> frozenset[str]:
    if isinstance(by_node, dict):
        return frozenset(device_id for several in by_node.values() for device_id in several or ())
    return frozenset(by_node or ())
