# SPDX-License-Identifier: Apache-2.0
"""GPU health and the cordon as files, so that a restarted or upgraded agent remembers them.

Times come from the kernel's monotonic clock, which all processes of one boot share. The file does not outlive a boot. It omits how long a
GPU has been clean: the GPU was not observed while no agent ran, so the clean time restarts.
"""

from collections.abc import Mapping
from dataclasses import replace

import msgspec

from agent.core.health import GpuHealth, HealthTable
from agent.core.rows import RowFormat
from agent.errors import StorageError
from aliquot.contract.gpunode import Cordon

RECORD_VERSION = 1


CORDON_ROWS = RowFormat("record of a cordon", "cordon", Cordon, version=1)


class _Record(msgspec.Struct, frozen=True):
    version: int
    gpus: dict[str, GpuHealth]


def lasting_part(table: HealthTable) -> Mapping[str, GpuHealth]:
    """Return what the file stores. It changes only when a GPU's state changes."""
    return {uuid: replace(gpu, clean_since=None) for uuid, gpu in table.gpus.items()}


def encode_health(gpus: Mapping[str, GpuHealth]) -> bytes:
    """Encode the result of ``lasting_part``."""
    return msgspec.json.encode(_Record(RECORD_VERSION, dict(gpus))) + b"\n"


def decode_health(content: bytes) -> HealthTable:
    """Decode a table. Raises StorageError when it is incomplete, damaged or of another version."""
    try:
        record = msgspec.json.decode(content, type=_Record)
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise StorageError(f"not a record of GPU health: {exc}") from exc
    except RecursionError as exc:
        raise StorageError("not a record of GPU health: its values are nested too deeply") from exc
    if record.version != RECORD_VERSION:
        raise StorageError(f"want a record of GPU health of version {RECORD_VERSION}, found version {record.version}")
    return HealthTable(record.gpus)
