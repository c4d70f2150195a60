# SPDX-License-Identifier: Apache-2.0
"""Reads kubelet's checkpoint for the container that holds device IDs: ``kubelet_internal_checkpoint`` in the device plugin directory.

It has what PodResources omits: the pods' UIDs, ordinary init containers and the responses of Allocate. Kubelet writes it before a container
can start. Its format is internal to kubelet, so it is an additional source and never the only one: a file in an unexpected format counts
as empty.
Source: allocateContainerResources and toCheckpointData, k8s.io/kubernetes/pkg/kubelet/cm/devicemanager
"""

from pathlib import Path

import msgspec
from google.protobuf.message import DecodeError

from agent.adapters.regular_files import read_regular
from agent.core.identity import RememberedDevices
from agent.core.injection import Answer
from agent.errors import StorageError
from aliquot.kubelet_api import deviceplugin_pb2 as pb

FILE_NAME = "kubelet_internal_checkpoint"
_BYTES_MAX = 64 << 20


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


class KubeletCheckpointFile:
    """Implements ``ports.KubeletCheckpoint``."""

    def __init__(self, plugin_directory: Path) -> None:
        self._path = plugin_directory / FILE_NAME

    def remembered(self) -> tuple[RememberedDevices, ...]:
        """See ``ports.KubeletCheckpoint``."""
        try:
            checkpoint = msgspec.json.decode(read_regular(self._path, _BYTES_MAX), type=_Checkpoint)
        except (OSError, StorageError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return ()
        entries = checkpoint.data.entries or ()
        return tuple(
            RememberedDevices(one.pod_uid, one.container, one.resource, _ids(one.device_ids), one.answer or b"") for one in entries
        )

    def answer(self, kept: bytes) -> Answer | None:
        """See ``ports.KubeletCheckpoint``."""
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
        """See ``ports.KubeletCheckpoint``. Kubelet replaces the file."""
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size


def _ids(by_node: dict[str, list[str] | None] | list[str] | None) -> frozenset[str]:
    if isinstance(by_node, dict):
        return frozenset(device_id for several in by_node.values() for device_id in several or ())
    return frozenset(by_node or ())
