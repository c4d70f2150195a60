# SPDX-License-Identifier: Apache-2.0
"""Encodes a container's ``limits`` file and decodes its ``region`` file.

cuda_shim/region/layout.h defines and explains the ABI. This module is its mirror (version 1.3; it also reads regions of version 1.0), and a
test compiles the header and compares the two. The module is pure: bytes in, values out. The adapter opens files, writes in the given order
and probes locks.

Invariant: what a tenant writes into ``region`` can only make its own numbers wrong. Every field is bounds-checked, no offset in a slot is
followed, and a broken header raises RegionError with a message.
"""

import struct
import zlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, fields
from typing import Final, NamedTuple, TypeAlias

ABI_MAJOR: Final = 1
ABI_MINOR: Final = 6
LIMITS_MAGIC: Final = 0x314D494C51414C41
REGION_MAGIC: Final = 0x314E474551414C41
MAX_DEVICES: Final = 16
SLOT_COUNT: Final = 256
UUID_BYTES: Final = 96
MEMORY_UNLIMITED: Final = 2**64 - 1

LIMITS_HEADER: Final = struct.Struct("<QHHIQIIIIII208x")
LIMITS_DEVICE: Final = struct.Struct(f"<{UUID_BYTES}sQQQQIIiIII88x")
REGION_HEADER: Final = struct.Struct("<QHHIIIIIIIQQQIIQ176x")
REGION_DEVICE: Final = struct.Struct("<QQQ104x")
BUCKET: Final = struct.Struct("<qqqqQIiIIq")
BUCKET_OFFSET: Final = 64
"""Offset of the compute bucket (cuda_shim/limit/bucket.h) in a region's device line."""
SLOT_HEADER: Final = struct.Struct("<IIIIQ104x")
SLOT_DEVICE: Final = struct.Struct("<QQQQQQQQQQQQQIIQ8x")
VIRTUAL_DEVICE: Final = struct.Struct("<QQQQ32x")

LIMITS_BYTES: Final = LIMITS_HEADER.size + MAX_DEVICES * LIMITS_DEVICE.size
REGION_DEVICE_OFFSET: Final = 256
REGION_SLOT_OFFSET: Final = 4096
SLOT_BYTES: Final = SLOT_HEADER.size + MAX_DEVICES * SLOT_DEVICE.size
VIRTUAL_ROW_BYTES: Final = MAX_DEVICES * VIRTUAL_DEVICE.size
REGION_VIRTUAL_OFFSET: Final = REGION_SLOT_OFFSET + SLOT_COUNT * SLOT_BYTES
REGION_BYTES: Final = REGION_VIRTUAL_OFFSET + SLOT_COUNT * VIRTUAL_ROW_BYTES
REPAIR_LOCK_OFFSET: Final = 0
LIMITS_BYTES_MAX: Final = 2**20
REGION_BYTES_MAX: Final = 2**25
SLOT_COUNT_MAX: Final = 4096
REGION_BYTES_KEPT: Final = 2**21
"""The longest region that the agent reads. This version and earlier ones make less than half of it, so a later one may double the size. The
ABI allows more, but a tenant can append any amount to its region; bytes beyond this length come from the tenant."""
SLOT_COUNT_KEPT: Final = 512
"""The most slots that the agent reads: a tenant may write a header with more, and each slot takes time to decode."""
REGION_HEAD_BYTES: Final = 2**14
"""The part of a region that ``decode_compute`` needs, in this version and in a later one with device lines up to eight times as long."""

VERSION_OFFSET: Final = 8
GENERATION_OFFSET: Final = 16
CHECKSUM_OFFSET: Final = 24
CHECKED_FROM: Final = 32
SLOT_HOST_PID_OFFSET: Final = 8

POLICY_FAIL_OPEN: Final = 1
LOG_ERROR: Final = 0
LOG_WARN: Final = 1
LOG_DEBUG: Final = 2
SLOT_FREE: Final = 0
SLOT_LIVE: Final = 1

_STATE_BYTES: Final = 4
"""Size of a slot's first word, its state: free or taken."""
_PIECE_BYTES: Final = 2**15
"""Slots are read in pieces of this size. The memory of larger pieces comes from the kernel each time, page by page."""

Read: TypeAlias = Callable[[int, int], bytes]
"""Reads a file at an offset, up to a number of bytes; returns fewer at the file's end."""
FIRST_GENERATION: Final = 2
_WORD: Final = 2**64


class RegionError(ValueError):
    """A limits or region file does not follow the ABI. The message has what was expected and what was found."""


@dataclass(frozen=True, slots=True)
class DeviceLimit:
    """What a container may use of one device."""

    uuid: str
    """In NVML's spelling, ``GPU-…`` or ``MIG-…``. The shim finds its devices by UUID, never by ordinal."""
    memory_bytes: int = MEMORY_UNLIMITED
    """Limit of all device memory of the container's processes together, including contexts."""
    burst_bytes: int = 0
    """Limit of device memory and managed memory together; not above ``memory_bytes`` = no oversubscription."""
    context_bytes: int = 0
    """Measured memory of one context on this device; 0 = the shim measures it."""
    overhead_bytes: int = 0
    """What the driver uses for the container beyond what the shim can count; subtracted from the limit."""
    sm_percent: int = 0
    """SM limit, 1..99; 0 and 100 = no limit."""
    sm_weight: int = 0
    priority: int = 0
    """Above 0: high, below 0: low; effective only with a ``priority_line``."""
    paused: bool = False
    """Submit no new work until this is False again. For pausing a pod only: time slots and priorities use the node's pages."""
    priority_line: int = 0
    """The device's line in the node's priority page (cuda_shim/limit/priority.h), from 1; 0 = no line."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The content of a ``limits`` file. A device has the same position in ``region``, and keeps it while the container lives."""

    devices: tuple[DeviceLimit, ...]
    fail_open: bool = False
    """If the shim cannot work: let the program run without limits instead of failing cuInit."""
    log_level: int = LOG_ERROR


@dataclass(frozen=True, slots=True)
class Write:
    """One write into an existing file. The adapter performs writes in order."""

    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Geometry:
    """The positions of a region's tables, from its own header. Other minor versions may have other positions."""

    device_offset: int
    device_stride: int
    slot_offset: int
    slot_stride: int
    slot_count: int
    virtual_offset: int
    """0 = the region has no virtual ledgers."""
    virtual_stride: int

    def slot(self, index: int) -> int:
        """Return the offset of a slot in the file. The slot's owner holds a lock on the byte at this offset."""
        return self.slot_offset + index * self.slot_stride


OWN_GEOMETRY: Final = Geometry(
    REGION_DEVICE_OFFSET, REGION_DEVICE.size, REGION_SLOT_OFFSET, SLOT_BYTES, SLOT_COUNT, REGION_VIRTUAL_OFFSET, VIRTUAL_ROW_BYTES
)
"""The geometry of the regions that this version makes."""


@dataclass(frozen=True, slots=True)
class SlotDevice:
    """What one process holds on one device, and the work it has done there."""

    used_bytes: int
    context_bytes: int
    managed_bytes: int
    pool_bytes: int
    array_bytes: int
    contexts: int
    refusals: int
    last_refused_bytes: int
    launches: int
    busy_ns: int
    throttled_ns: int
    module_bytes: int = 0
    """Part of the bytes in use: code and variables of loaded modules, as measured by the shim."""
    virtual_bytes: int = 0
    """Managed memory that the driver may move to the host (oversubscription). Not part of ``used_bytes``."""
    waiting: int = 0
    """Threads that were waiting to launch when the region was read."""


_UNUSED: Final = SlotDevice(*(0,) * len(fields(SlotDevice)))
_UNUSED_DEVICE: Final = bytes(SLOT_DEVICE.size)
_UNUSED_LEDGER: Final = bytes(VIRTUAL_DEVICE.size)


@dataclass(frozen=True, slots=True)
class Slot:
    """One process of the container. Only its lock shows whether it still lives: see ``dead_slots``."""

    index: int
    pid: int
    """Pid in the container's pid namespace."""
    host_pid: int
    """0 until the agent has stored it."""
    start_ticks: int
    devices: tuple[SlotDevice, ...]


@dataclass(frozen=True, slots=True)
class RegionSnapshot:
    """A region as it was read. Each word is consistent; the words together are not from one moment."""

    line_used_bytes: tuple[int, ...]
    """Per device, the sum that the shim compares with the limit: at least the sum over live slots. A killed process stays in it until the
    shim reaps its slot."""
    measured_context_bytes: tuple[int, ...]
    """Per device, the memory of one context as measured by the shim; 0 = not measured."""
    slots: tuple[Slot, ...]
    """The taken slots, in slot order, including those of dead processes."""
    reaped_slots: int
    repaired_bytes: int
    line_virtual_bytes: tuple[int, ...] = (0,) * MAX_DEVICES
    """Per device, the virtual memory that the shim checks new requests against: at least the sum over live slots."""
    geometry: Geometry = OWN_GEOMETRY


@dataclass(frozen=True, slots=True)
class ComputeCounters:
    """GPU time of all processes of a container on one device, including dead ones. Counted only under an SM limit."""

    paid_ns: int
    starved_at_ns: int
    """When a process last had to wait for compute, by CLOCK_MONOTONIC; 0 = never."""


def encode_limits(limits: Limits, *, generation: int = FIRST_GENERATION) -> bytes:
    """Return the content of a new ``limits`` file. The adapter writes it under another name and renames it, so no container sees half a
    file.

    Raises: RegionError: more devices than the ABI allows, a UUID that is too long or repeated, a number out of range, an odd generation.
    """
    if generation < FIRST_GENERATION or generation % 2:
        raise RegionError(f"generation {generation}: want an even number from {FIRST_GENERATION}")
    if len(limits.devices) > MAX_DEVICES:
        raise RegionError(f"{len(limits.devices)} devices: a container has at most {MAX_DEVICES}")
    if len({device.uuid for device in limits.devices}) != len(limits.devices):
        raise RegionError(f"want different devices, found one twice: {[device.uuid for device in limits.devices]}")
    devices = b"".join(_encode_device(device) for device in limits.devices)
    flags = POLICY_FAIL_OPEN if limits.fail_open else 0
    header = (LIMITS_MAGIC, ABI_MAJOR, ABI_MINOR, LIMITS_HEADER.size, generation)
    policy = (LIMITS_DEVICE.size, len(limits.devices), flags, limits.log_level)
    checksum = zlib.crc32(LIMITS_HEADER.pack(*header, 0, 0, *policy)[CHECKED_FROM:] + devices)
    return (LIMITS_HEADER.pack(*header, checksum, 0, *policy) + devices).ljust(LIMITS_BYTES, b"\0")


def limits_update(limits: Limits, *, current: bytes) -> tuple[Write, ...]:
    """Return the writes, in order, that change a ``limits`` file from ``current`` to ``limits`` while programs read it.

    This also works after a writer died half way; the generation is then odd.
    Raises: RegionError: as ``encode_limits``; or the update would remove or reorder devices that running programs know by position.
    """
    generation = _generation(current)
    if generation % 2 == 0:
        known = [device.uuid for device in decode_limits(current).devices]
        if [device.uuid for device in limits.devices][: len(known)] != known:
            raise RegionError(f"devices may only be appended: the file has {known}")
    dirty, clean = generation | 1, (generation | 1) + 1
    data = encode_limits(limits, generation=clean)
    dirty_word = struct.pack("<Q", dirty)
    return (
        Write(GENERATION_OFFSET, dirty_word),
        Write(VERSION_OFFSET, data[VERSION_OFFSET:GENERATION_OFFSET] + dirty_word + data[CHECKSUM_OFFSET:]),
        Write(GENERATION_OFFSET, struct.pack("<Q", clean)),
    )


def is_interrupted(data: bytes) -> bool:
    """Whether a writer of a ``limits`` file is working or died half way. Raises RegionError."""
    return _generation(data) % 2 == 1


def decode_limits(data: bytes, *, interrupted_too: bool = False) -> Limits:
    """Decode a ``limits`` file that no program is writing.

    Args:   interrupted_too: accept a file from a writer that died. Only for the single writer, which knows that no other is working. All
                content is in one write, so it is complete, either old or new.
    Raises: RegionError: wrong magic or major version, truncated, mid-write, or the checksum does not match.
    """
    if not LIMITS_HEADER.size <= len(data) <= LIMITS_BYTES_MAX:
        raise RegionError(f"limits: {len(data)} bytes, want at least {LIMITS_HEADER.size} and at most {LIMITS_BYTES_MAX}")
    magic, major, _, header_bytes, generation, checksum, _, stride, count, flags, log_level = LIMITS_HEADER.unpack_from(data)
    _check_version("limits", LIMITS_MAGIC, magic, major)
    end = header_bytes + count * stride
    if header_bytes < LIMITS_HEADER.size or stride < LIMITS_DEVICE.size or count > MAX_DEVICES or end > len(data):
        raise RegionError(f"limits: header of {header_bytes} and {count} devices of {stride} bytes do not fit {len(data)} bytes")
    interrupted = generation % 2 == 1
    if interrupted and not interrupted_too:
        raise RegionError(f"limits: generation {generation} is odd: a writer is working or died")
    if not interrupted and zlib.crc32(data[CHECKED_FROM:end]) != checksum:
        raise RegionError("limits: the checksum does not match the content")
    devices = tuple(_decode_device(data, header_bytes + index * stride) for index in range(count))
    return Limits(devices, fail_open=bool(flags & POLICY_FAIL_OPEN), log_level=log_level)


def fresh_region_header() -> bytes:
    """Return the beginning of a new ``region`` file. The rest is zero up to REGION_BYTES: no process and no use."""
    return REGION_HEADER.pack(
        REGION_MAGIC, ABI_MAJOR, ABI_MINOR, REGION_HEADER.size,
        REGION_DEVICE_OFFSET, REGION_DEVICE.size, MAX_DEVICES,
        REGION_SLOT_OFFSET, SLOT_BYTES, SLOT_COUNT, REGION_BYTES, 0, 0,
        REGION_VIRTUAL_OFFSET, VIRTUAL_ROW_BYTES, 0,
    )  # fmt: skip


def decode_region(read: Read, size: int) -> RegionSnapshot:
    """Decode a region into an immutable snapshot, piece by piece, because the file is long and few slots are taken.

    Args:
        read: reads the file with pread. A mapping would kill its reader when a tenant truncates the file.
        size: the file's size in bytes.
    Raises: RegionError: wrong magic or major version, or table positions that break the rules of the ABI.
    """
    fields = _region_fields(read(0, REGION_HEADER.size))
    geometry = _geometry(fields, size)
    table = read(geometry.device_offset, MAX_DEVICES * geometry.device_stride)
    lines = [_unpack(REGION_DEVICE, table, index * geometry.device_stride) for index in range(MAX_DEVICES)]
    return RegionSnapshot(
        line_used_bytes=tuple(used for used, _, _ in lines), measured_context_bytes=tuple(context for _, context, _ in lines),
        slots=tuple(_taken_slots(read, geometry)), reaped_slots=fields.reaped_slots, repaired_bytes=fields.repaired_bytes,
        line_virtual_bytes=tuple(pageable for _, _, pageable in lines), geometry=geometry,
    )  # fmt: skip


def decode_geometry(header: bytes | memoryview, size: int) -> Geometry:
    """Return the positions of the tables in a region of ``size`` bytes. Raises RegionError, as ``decode_region``.

    Args: header: the region's first bytes, REGION_HEADER.size or more.
    """
    return _geometry(_region_fields(header), size)


def decode_compute(data: bytes | memoryview) -> tuple[ComputeCounters, ...]:
    """Decode the compute buckets of a region, by device.

    Args:   data: the first REGION_HEAD_BYTES of the file.
    Raises: RegionError: wrong magic or major version, or device lines that do not fit the data.
    """
    fields = _region_fields(data)
    end = fields.device_offset + MAX_DEVICES * fields.device_stride
    if fields.device_count < MAX_DEVICES or fields.device_stride < REGION_DEVICE.size or end > len(data):
        raise RegionError(
            f"region: {fields.device_count} devices of {fields.device_stride} bytes at {fields.device_offset} do not fit {len(data)} bytes"
        )
    offsets = (fields.device_offset + index * fields.device_stride + BUCKET_OFFSET for index in range(MAX_DEVICES))
    buckets = (BUCKET.unpack_from(data, offset) for offset in offsets)
    return tuple(ComputeCounters(paid_ns, starved_at_ns) for _, _, starved_at_ns, _, paid_ns, *_ in buckets)


def host_pid_write(geometry: Geometry, index: int, host_pid: int) -> Write:
    """Return the only write of the agent into a live slot: 4 aligned bytes, so that one pwrite is one store."""
    return Write(geometry.slot(index) + SLOT_HOST_PID_OFFSET, struct.pack("<I", host_pid))


def dead_slots(snapshot: RegionSnapshot, locked: Collection[int]) -> tuple[int, ...]:
    """Return the slots of dead processes: they are taken, but no process holds their lock.

    Args: locked: indexes of slots that F_OFD_GETLK reported as locked, probed *after* the snapshot was read. If a slot is taken in the
        snapshot and unlocked later, its owner died before the probe; a slot taken after the snapshot is not in it.
    """
    return tuple(slot.index for slot in snapshot.slots if slot.index not in locked)


def live_used_bytes(snapshot: RegionSnapshot, dead: Collection[int] = ()) -> tuple[int, ...]:
    """Return what the live processes hold, per device."""
    living = [slot for slot in snapshot.slots if slot.index not in dead]
    return tuple(sum(slot.devices[index].used_bytes for slot in living) for index in range(MAX_DEVICES))


def _encode_device(device: DeviceLimit) -> bytes:
    uuid = device.uuid.encode()
    if not uuid or len(uuid) >= UUID_BYTES:
        raise RegionError(f"device UUID {device.uuid!r}: want 1 to {UUID_BYTES - 1} bytes")
    if not 0 <= device.sm_percent <= 100:
        raise RegionError(f"{device.uuid}: sm_percent {device.sm_percent}, want 0 to 100")
    try:
        return LIMITS_DEVICE.pack(
            uuid, device.memory_bytes, device.burst_bytes, device.context_bytes, device.overhead_bytes,
            device.sm_percent, device.sm_weight, device.priority, int(device.paused), 0, device.priority_line,
        )  # fmt: skip
    except struct.error as exc:
        raise RegionError(f"{device.uuid}: a number is out of range for its field: {exc}") from exc


def _decode_device(data: bytes, offset: int) -> DeviceLimit:
    uuid, memory, burst, context, overhead, percent, weight, priority, pause, _, line = LIMITS_DEVICE.unpack_from(data, offset)
    name = uuid.split(b"\0", 1)[0].decode(errors="replace")
    return DeviceLimit(name, memory, burst, context, overhead, percent, weight, priority, bool(pause), line)


class _RegionFields(NamedTuple):
    """REGION_HEADER, by the names of struct aq_region_header."""

    magic: int
    abi_major: int
    abi_minor: int
    header_bytes: int
    device_offset: int
    device_stride: int
    device_count: int
    slot_offset: int
    slot_stride: int
    slot_count: int
    region_bytes: int
    reaped_slots: int
    repaired_bytes: int
    virtual_offset: int
    virtual_stride: int
    turns_owner: int


def _region_fields(data: bytes | memoryview) -> _RegionFields:
    if len(data) < REGION_HEADER.size:
        raise RegionError(f"region: {len(data)} bytes, want at least {REGION_HEADER.size}")
    fields = _RegionFields(*REGION_HEADER.unpack_from(data))
    _check_version("region", REGION_MAGIC, fields.magic, fields.abi_major)
    return fields


def _geometry(fields: _RegionFields, size: int) -> Geometry:
    """Check the rules of cuda_shim/region/layout.h; ``tables_fit`` in region.c is the same check."""
    devices_end = fields.device_offset + fields.device_stride * fields.device_count
    slots_end = fields.slot_offset + fields.slot_stride * fields.slot_count
    virtual_end = fields.virtual_offset + fields.virtual_stride * fields.slot_count if fields.virtual_offset else slots_end
    fits = (
        size <= REGION_BYTES_MAX and fields.header_bytes >= REGION_HEADER.size and fields.device_count >= MAX_DEVICES
        and 0 < fields.slot_count <= SLOT_COUNT_MAX
        and _is_placed(fields.device_offset, fields.device_stride, fields.header_bytes, REGION_DEVICE.size)
        and _is_placed(fields.slot_offset, fields.slot_stride, devices_end, SLOT_BYTES)
        and (not fields.virtual_offset or _is_placed(fields.virtual_offset, fields.virtual_stride, slots_end, VIRTUAL_ROW_BYTES))
        and virtual_end <= size
    )  # fmt: skip
    if not fits:
        raise RegionError(
            f"region: {fields.device_count} devices of {fields.device_stride} bytes at {fields.device_offset}, {fields.slot_count} slots "
            f"of {fields.slot_stride} bytes at {fields.slot_offset} and their ledgers of {fields.virtual_stride} bytes at "
            f"{fields.virtual_offset} do not fit {size} bytes"
        )
    return Geometry(
        fields.device_offset, fields.device_stride, fields.slot_offset, fields.slot_stride, fields.slot_count,
        fields.virtual_offset, fields.virtual_stride,
    )  # fmt: skip


def _is_placed(offset: int, stride: int, least_offset: int, least_stride: int) -> bool:
    return offset >= least_offset and stride >= least_stride and (offset | stride) % 64 == 0


def _taken_slots(read: Read, geometry: Geometry) -> Iterator[Slot]:
    """Decode the taken slots only, because few are taken and every scrape reads all slots of every container."""
    stride, at_once = geometry.slot_stride, max(1, _PIECE_BYTES // geometry.slot_stride)
    for first in range(0, geometry.slot_count, at_once):
        piece = read(geometry.slot(first), min(at_once, geometry.slot_count - first) * stride)
        states = memoryview(piece)[: len(piece) // _STATE_BYTES * _STATE_BYTES].cast("I")[:: stride // _STATE_BYTES]
        for position in [position for position, state in enumerate(states) if state != SLOT_FREE]:
            index = first + position
            row = read(geometry.virtual_offset + index * geometry.virtual_stride, VIRTUAL_ROW_BYTES) if geometry.virtual_offset else b""
            yield _decode_slot(index, piece[position * stride : (position + 1) * stride], row)


def _decode_slot(index: int, slot: bytes, row: bytes) -> Slot:
    """Args: row: the slot's ledgers of virtual memory; empty in a region without them."""
    _, pid, host_pid, _, start_ticks = _unpack(SLOT_HEADER, slot, 0)
    devices = (
        _decode_slot_device(
            _part(slot, SLOT_HEADER.size + position * SLOT_DEVICE.size, SLOT_DEVICE.size),
            _part(row, position * VIRTUAL_DEVICE.size, VIRTUAL_DEVICE.size),
        )
        for position in range(MAX_DEVICES)
    )
    return Slot(index, pid, host_pid, start_ticks, tuple(devices))


def _decode_slot_device(data: bytes, ledger: bytes) -> SlotDevice:
    if data == _UNUSED_DEVICE and ledger == _UNUSED_LEDGER:
        return _UNUSED  # a shortcut: a process uses few of its sixteen devices
    words: tuple[int, ...] = SLOT_DEVICE.unpack(data)
    _, charged, uncharged, _, context, managed, pool, array, refusals, last_refused, launches, busy, throttled, *counts = words
    contexts, waiting, module = counts
    _, virtual_charged, virtual_uncharged, _ = VIRTUAL_DEVICE.unpack(ledger)
    return SlotDevice(
        used_bytes=_in_use(charged, uncharged), module_bytes=module, virtual_bytes=_in_use(virtual_charged, virtual_uncharged),
        context_bytes=context, managed_bytes=managed, pool_bytes=pool, array_bytes=array, contexts=contexts,
        refusals=refusals, last_refused_bytes=last_refused, launches=launches, busy_ns=busy, throttled_ns=throttled, waiting=waiting,
    )  # fmt: skip


def _unpack(form: struct.Struct, data: bytes, offset: int) -> tuple[int, ...]:
    return form.unpack(_part(data, offset, form.size))


def _part(data: bytes, offset: int, size: int) -> bytes:
    """Return a part of the data, with zeros beyond its end: a tenant may have truncated the file after its size was read."""
    return data[offset : offset + size].ljust(size, b"\0")


def _in_use(charged: int, uncharged: int) -> int:
    used = (charged - uncharged) % _WORD
    return used if used < _WORD // 2 else 0  # during a refused charge, the difference is negative for a moment


def _generation(data: bytes) -> int:
    if len(data) < LIMITS_BYTES:
        raise RegionError(f"limits: {len(data)} bytes, want {LIMITS_BYTES}")
    magic, major, *_ = LIMITS_HEADER.unpack_from(data)
    _check_version("limits", LIMITS_MAGIC, magic, major)
    generation: int = struct.unpack_from("<Q", data, GENERATION_OFFSET)[0]
    return generation


def _check_version(name: str, want_magic: int, magic: int, major: int) -> None:
    if magic != want_magic:
        raise RegionError(f"{name}: magic {magic:#x}, want {want_magic:#x}")
    if major != ABI_MAJOR:
        raise RegionError(f"{name}: ABI version {major}, want {ABI_MAJOR}")
