"""GPU health as a file, so that an agent that is restarted, or replaced by a newer one, does not forget what it had seen; and the cordon.

Times are those of the kernel's monotonic clock, which all processes of one boot share; the file does not outlive a boot. How long a GPU has
been clean is left out: nobody looked while no agent ran, so a clean time begins anew.
"""

from collections.abc import Mapping
from dataclasses import replace

import msgspec

from agent.core.health import GpuHealth, HealthTable
from agent.core.rows import RowFormat
from agent.errors import StorageError
from proto.gpunode import Cordon

RECORD_VERSION = 1


CORDON_ROWS = RowFormat("record of a cordon", "cordon", Cordon, version=1)


class _Record(msgspec.Struct, frozen=True):
    version: int
    gpus: dict[str, GpuHealth]


def lasting_part(table: HealthTable) -> Mapping[str, GpuHealth]:
    """Return what is worth remembering, which changes only when something happens to a GPU."""
    return {uuid: replace(gpu, clean_since=None) for uuid, gpu in table.gpus.items()}


def encode_health(gpus: Mapping[str, GpuHealth]) -> bytes:
    """Write what ``lasting_part`` returned."""
    return msgspec.json.encode(_Record(RECORD_VERSION, dict(gpus))) + b"\n"


def decode_health(content: bytes) -> HealthTable:
    """Read a table back. Raises StorageError when it is torn, damaged or of another version."""
    try:
        record = msgspec.json.decode(content, type=_Record)
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise StorageError(f"not a record of GPU health: {exc}") from exc
    if record.version != RECORD_VERSION:
        raise StorageError(f"want a record of GPU health of version {RECORD_VERSION}, found version {record.version}")
    return HealthTable(record.gpus)
