# SPDX-License-Identifier: Apache-2.0
"""The Python mirror of the shim's ABI is byte for byte what the C header says, and decodes anything a tenant may write without harm."""

import contextlib
import os
import struct
import subprocess
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.core import region_layout as layout
from agent.core.region_layout import DeviceLimit, Limits, RegionError, Write
from aliquot import contract
from tests.fakes import regions

ROOT = Path(__file__).resolve().parents[4]
UUIDS = ("GPU-00112233-4455-6677-8899-aabbccddeeff", "MIG-00112233-4455-6677-8899-aabbccddee00")

C_PROGRAM = """
#include <stdio.h>
#include "region/layout.h"
#define SIZE(name, type) printf("size %s %zu\\n", name, sizeof(type))
#define AT(name, type, field) printf("offset %s.%s %zu\\n", name, #field, offsetof(type, field))
#define IS(name) printf("value %s %llu\\n", #name, (unsigned long long)(name))
int main(void)
{
    SIZE("limits_header", struct aq_limits_header); SIZE("limits_device", struct aq_limits_device);
    SIZE("region_header", struct aq_region_header); SIZE("region_device", struct aq_region_device);
    SIZE("slot", struct aq_region_slot);
    SIZE("virtual_device", struct aq_virtual_device); SIZE("virtual_row", struct aq_virtual_row);
    SIZE("slot_device", struct aq_slot_device);
    @FIELDS@
    @CONSTANTS@
    return 0;
}
"""

C_READER = """
#include <stdio.h>
#include <string.h>
#include "region/region.h"
int main(void)
{
    char path[4096];
    setvbuf(stdout, NULL, _IOLBF, 0);
    while (fgets(path, sizeof(path), stdin)) {
        struct aq_region region;
        struct aq_fault fault;
        path[strcspn(path, "\\n")] = 0;
        if (aq_region_map(&region, path, AQ_REGION_READ, &fault))
            printf("refused %s\\n", fault.text);
        else
            printf("taken %u %u %u %u %u %u %u\\n", region.device_offset, region.device_stride, region.slot_offset, region.slot_stride,
                   region.slot_count, region.virtual_offset, region.virtual_stride);
        aq_region_unmap(&region);
    }
    return 0;
}
"""

CONSTANTS = (
    "LIMITS_MAGIC",
    "REGION_MAGIC",
    "ABI_MAJOR",
    "ABI_MINOR",
    "MAX_DEVICES",
    "SLOT_COUNT",
    "UUID_BYTES",
    "MEMORY_UNLIMITED",
    "LIMITS_BYTES",
    "REGION_BYTES",
    "REGION_DEVICE_OFFSET",
    "REGION_SLOT_OFFSET",
    "REGION_VIRTUAL_OFFSET",
    "REPAIR_LOCK_OFFSET",
    "LIMITS_BYTES_MAX",
    "REGION_BYTES_MAX",
    "SLOT_COUNT_MAX",
    "POLICY_FAIL_OPEN",
    "LOG_ERROR",
    "LOG_WARN",
    "LOG_DEBUG",
    "SLOT_FREE",
    "SLOT_LIVE",
)

FIELDS = {
    "limits_header": (
        "struct aq_limits_header",
        layout.LIMITS_HEADER,
        "magic abi_major abi_minor header_bytes generation checksum reserved0 device_stride device_count policy_flags log_level",
    ),
    "limits_device": (
        "struct aq_limits_device",
        layout.LIMITS_DEVICE,
        "uuid memory_bytes burst_bytes context_bytes overhead_bytes sm_percent sm_weight priority pause flags priority_line",
    ),
    "region_header": (
        "struct aq_region_header",
        layout.REGION_HEADER,
        (
            "magic abi_major abi_minor header_bytes device_offset device_stride device_count slot_offset slot_stride slot_count "
            "region_bytes reaped_slots repaired_bytes virtual_offset virtual_stride turns_owner"
        ),
    ),
    "region_device": ("struct aq_region_device", layout.REGION_DEVICE, "used_bytes context_bytes virtual_bytes"),
    "bucket": (
        "struct aq_bucket",
        layout.BUCKET,
        "balance_ns refilled_at_ns starved_at_ns lease_until_ns paid_ns gain_q16 integral_q16 measured_q16 regime spilled_ns",
    ),
    "slot": ("struct aq_region_slot", layout.SLOT_HEADER, "state pid host_pid reserved0 start_ticks"),
    "slot_device": (
        "struct aq_slot_device",
        layout.SLOT_DEVICE,
        (
            "intended charged uncharged settled context_bytes managed_bytes pool_bytes array_bytes refusals last_refused_bytes launches "
            "busy_ns throttled_ns contexts waiting module_bytes"
        ),
    ),
    "virtual_device": ("struct aq_virtual_device", layout.VIRTUAL_DEVICE, "intended charged uncharged settled"),
}


def python_offsets(form: struct.Struct) -> list[int]:
    """Offset of each field of a format without alignment: what the fields before it take."""
    offsets, consumed = [], ""
    for item in _items(form.format.removeprefix("<")):
        if not item.endswith("x"):
            offsets.append(struct.calcsize("<" + consumed))
        consumed += item
    return offsets


def _items(form: str) -> list[str]:
    items, count = [], ""
    for char in form:
        if char.isdigit():
            count += char
            continue
        items += [count + char] if char in "sx" else [char] * int(count or 1)
        count = ""
    return items


def compiled(source: Path, *parts: str) -> Path:
    program = source.with_suffix("")
    sources = [source, *(ROOT / "cuda_shim" / part for part in parts)]
    command: list[str | Path] = [os.environ.get("CC", "cc"), "-std=gnu11", f"-I{ROOT}/cuda_shim", "-o", program, *sources, "-pthread"]
    subprocess.run(command, check=True)
    return program


@pytest.fixture(scope="module")
def header(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """What a C compiler makes of layout.h."""
    directory = tmp_path_factory.mktemp("layout")
    fields = 'AT("region_device", struct aq_region_device, compute); '
    fields += "".join(f'AT("{name}", {kind}, {field}); ' for name, (kind, _, names) in FIELDS.items() for field in names.split())
    constants = "".join(f"IS(AQ_{name}); " for name in CONSTANTS)
    (directory / "print.c").write_text(C_PROGRAM.replace("@FIELDS@", fields).replace("@CONSTANTS@", constants))
    lines = subprocess.run([compiled(directory / "print.c")], check=True, capture_output=True, text=True).stdout.splitlines()
    return {key: int(value) for key, value in (line.split(" ", 1)[1].rsplit(" ", 1) for line in lines)}


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_lies_where_the_header_puts_it(header, name):
    _, form, names = FIELDS[name]
    assert python_offsets(form) == [header[f"{name}.{field}"] for field in names.split()]


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("limits_header", layout.LIMITS_HEADER.size),
        ("limits_device", layout.LIMITS_DEVICE.size),
        ("region_header", layout.REGION_HEADER.size),
        ("region_device", layout.REGION_DEVICE.size),
        ("slot", layout.SLOT_BYTES),
        ("slot_device", layout.SLOT_DEVICE.size),
        ("virtual_device", layout.VIRTUAL_DEVICE.size),
        ("virtual_row", layout.VIRTUAL_ROW_BYTES),
    ],
)
def test_every_struct_has_the_size_of_the_header(header, name, size):
    assert header[name] == size


@pytest.mark.parametrize("name", CONSTANTS)
def test_every_constant_is_that_of_the_header(header, name):
    assert getattr(layout, name) == header[f"AQ_{name}"]


def test_the_writer_knows_the_offsets_it_writes_by_hand(header):
    assert header["limits_header.generation"] == layout.GENERATION_OFFSET
    assert header["limits_header.checksum"] == layout.CHECKSUM_OFFSET
    assert header["limits_header.device_stride"] == layout.CHECKED_FROM
    assert header["slot.host_pid"] == layout.SLOT_HOST_PID_OFFSET
    assert header["region_device.compute"] == layout.BUCKET_OFFSET
    assert contract.MAX_DEVICES_PER_CONTAINER == layout.MAX_DEVICES


# --- limits -----------------------------------------------------------------------------------------------------


def make_limits(*memory_bytes: int, **changes) -> Limits:
    devices = tuple(DeviceLimit(uuid, amount) for uuid, amount in zip(UUIDS, memory_bytes, strict=False))
    return replace(Limits(devices), **changes)


def apply(data: bytes, writes: tuple[Write, ...]) -> bytes:
    for write in writes:
        data = data[: write.offset] + write.data + data[write.offset + len(write.data) :]
    return data


words = st.integers(0, 2**64 - 1)
device_limits = st.builds(
    DeviceLimit,
    uuid=st.uuids().map("GPU-{}".format),
    memory_bytes=words,
    burst_bytes=words,
    context_bytes=words,
    overhead_bytes=words,
    sm_percent=st.integers(0, 100),
    sm_weight=st.integers(0, 2**32 - 1),
    priority=st.integers(-(2**31), 2**31 - 1),
    paused=st.booleans(),
    priority_line=st.integers(0, 2**32 - 1),
)
all_limits = st.builds(
    Limits,
    devices=st.lists(device_limits, max_size=layout.MAX_DEVICES, unique_by=lambda device: device.uuid).map(tuple),
    fail_open=st.booleans(),
    log_level=st.integers(0, 2),
)


@given(all_limits)
def test_limits_survive_a_round_trip(limits):
    data = layout.encode_limits(limits)
    assert len(data) == layout.LIMITS_BYTES
    assert layout.decode_limits(data) == limits


@given(all_limits)
def test_update_changes_one_file_into_the_other(limits):
    before = make_limits()
    file = layout.encode_limits(before)
    after = apply(file, layout.limits_update(limits, current=file))
    assert layout.decode_limits(after) == limits
    assert layout._generation(after) == layout.FIRST_GENERATION + 2


def grown(limits: Limits, header_growth: int, device_growth: int) -> bytes:
    """The file as a newer minor version writes it: longer header, longer devices."""
    file, size = layout.encode_limits(limits), layout.LIMITS_DEVICE.size
    header = bytearray(file[: layout.LIMITS_HEADER.size] + b"\xa5" * header_growth)
    struct.pack_into("<HI", header, 10, 7, len(header))
    struct.pack_into("<I", header, layout.CHECKED_FROM, size + device_growth)
    first = layout.LIMITS_HEADER.size
    devices = [file[first + index * size :][:size] + b"\xa5" * device_growth for index in range(len(limits.devices))]
    body = bytes(header) + b"".join(devices)
    checksum = struct.pack("<I", zlib.crc32(body[layout.CHECKED_FROM :]))
    return apply(body, (Write(layout.CHECKSUM_OFFSET, checksum),)).ljust(layout.LIMITS_BYTES, b"\0")


@pytest.mark.parametrize(("header_growth", "device_growth"), [(64, 0), (0, 48), (128, 80)])
def test_an_update_takes_over_a_file_that_a_newer_minor_version_wrote(header_growth, device_growth):
    file = grown(make_limits(1, 2), header_growth, device_growth)
    assert layout.decode_limits(file) == make_limits(1, 2)
    after = apply(file, layout.limits_update(make_limits(3, 4), current=file))
    assert layout.decode_limits(after) == make_limits(3, 4)


def test_prefix_of_update_never_reads_as_complete_file():
    file = layout.encode_limits(make_limits(1, 2))
    writes = layout.limits_update(make_limits(3, 4), current=file)
    for taken in range(1, len(writes)):
        with pytest.raises(RegionError, match="odd"):
            layout.decode_limits(apply(file, writes[:taken]))


def test_an_update_finishes_what_a_dead_writer_left_half_done():
    file = layout.encode_limits(make_limits(1))
    half = apply(file, layout.limits_update(make_limits(2), current=file)[:2])
    assert layout.decode_limits(apply(half, layout.limits_update(make_limits(3), current=half))) == make_limits(3)


def test_devices_are_never_removed_or_reordered():
    file = layout.encode_limits(make_limits(1, 2))
    reversed_devices = replace(make_limits(1, 2), devices=make_limits(1, 2).devices[::-1])
    for changed in (make_limits(1), reversed_devices):
        with pytest.raises(RegionError, match="appended"):
            layout.limits_update(changed, current=file)


@pytest.mark.parametrize(
    ("limits", "says"),
    [
        pytest.param(make_limits(2**64), "out of range for its field", id="memory"),
        pytest.param(Limits((DeviceLimit("GPU-x", sm_percent=101),)), "sm_percent", id="percent"),
        pytest.param(Limits((DeviceLimit("x" * 96),)), "UUID", id="long uuid"),
        pytest.param(Limits((DeviceLimit(""),)), "UUID", id="no uuid"),
        pytest.param(Limits((DeviceLimit("GPU-x"), DeviceLimit("GPU-x"))), "twice", id="twice"),
        pytest.param(Limits(tuple(DeviceLimit(f"GPU-{i}") for i in range(17))), "at most 16", id="too many"),
    ],
)
def test_limits_that_cannot_be_written_are_refused(limits, says):
    with pytest.raises(RegionError, match=says):
        layout.encode_limits(limits)


@pytest.mark.parametrize(
    ("offset", "data", "says"),
    [
        pytest.param(0, b"x", "magic", id="magic"),
        pytest.param(8, b"\2", "ABI version 2", id="major"),
        pytest.param(16, b"\3", "odd", id="odd"),
        pytest.param(36, b"\x11", "do not fit", id="too many devices"),
        pytest.param(300, b"x", "checksum", id="content"),
    ],
)
def test_a_damaged_limits_file_is_refused(offset, data, says):
    file = layout.encode_limits(make_limits(1))
    with pytest.raises(RegionError, match=says):
        layout.decode_limits(apply(file, (Write(offset, data),)))


def test_a_truncated_limits_file_is_refused():
    with pytest.raises(RegionError, match="want at least"):
        layout.decode_limits(layout.encode_limits(make_limits(1))[:100])


def test_a_newer_minor_version_is_read():
    file = layout.encode_limits(make_limits(1))
    assert layout.decode_limits(apply(file, (Write(10, b"\7"),))) == make_limits(1)


# --- region -----------------------------------------------------------------------------------------------------


def make_region(*slots: tuple[int, dict[str, int]]) -> bytes:
    """A region in which each (index, {field: value}) is a taken slot that did something on device 0."""
    names = FIELDS["slot_device"][2].split()
    data = regions.empty_region()
    for index, values in slots:
        offset = layout.OWN_GEOMETRY.slot(index)
        device = layout.SLOT_DEVICE.pack(*(values.get(name, 0) for name in names))
        header = layout.SLOT_HEADER.pack(layout.SLOT_LIVE, values.get("pid", 1000 + index), 0, 0, 5)
        data = apply(data, (Write(offset, header), Write(offset + len(header), device)))
    return data


def test_an_empty_region_holds_nothing():
    snapshot = regions.decoded(regions.empty_region())
    assert len(regions.empty_region()) == layout.REGION_BYTES
    assert snapshot.slots == ()
    assert sum(layout.live_used_bytes(snapshot)) == 0


def test_slot_uses_charges_minus_uncharges():
    region = make_region((3, {"charged": 100, "uncharged": 30, "refusals": 2, "last_refused_bytes": 7, "contexts": 1}))
    (slot,) = regions.decoded(region).slots
    assert (slot.index, slot.pid, slot.start_ticks) == (3, 1003, 5)
    assert slot.devices[0].used_bytes == 70
    assert (slot.devices[0].refusals, slot.devices[0].last_refused_bytes, slot.devices[0].contexts) == (2, 7, 1)


def test_slot_has_the_number_of_threads_waiting_to_launch():
    (slot,) = regions.decoded(make_region((0, {"contexts": 1, "waiting": 5, "module_bytes": 9}))).slots
    assert (slot.devices[0].contexts, slot.devices[0].waiting, slot.devices[0].module_bytes) == (1, 5, 9)


def test_counters_may_wrap_and_a_refusal_in_progress_is_no_use():
    wrapped, refusing = make_region((0, {"charged": 5, "uncharged": 2**64 - 5})), make_region((0, {"charged": 0, "uncharged": 9}))
    assert regions.decoded(wrapped).slots[0].devices[0].used_bytes == 10
    assert regions.decoded(refusing).slots[0].devices[0].used_bytes == 0


def with_virtual(region: bytes, index: int, charged: int, uncharged: int) -> bytes:
    """The region with a virtual ledger of device 0 in one slot, and its judge."""
    ledger = layout.VIRTUAL_DEVICE.pack(charged, charged, uncharged, uncharged)
    region = apply(region, (Write(layout.REGION_VIRTUAL_OFFSET + index * layout.VIRTUAL_ROW_BYTES, ledger),))
    return apply(region, (Write(layout.REGION_DEVICE_OFFSET, layout.REGION_DEVICE.pack(0, 0, charged - uncharged)),))


def test_virtual_memory_is_counted_separately_from_device_memory():
    snapshot = regions.decoded(with_virtual(make_region((2, {"charged": 7, "module_bytes": 5})), 2, 100, 40))
    device = snapshot.slots[0].devices[0]
    assert (device.used_bytes, device.module_bytes, device.virtual_bytes) == (7, 5, 60)
    assert snapshot.line_virtual_bytes[0] == 60
    assert layout.live_used_bytes(snapshot)[0] == 7


def test_region_of_version_1_0_is_read_without_virtual_memory():
    region = with_virtual(make_region((2, {"charged": 9})), 2, 100, 40)[: layout.REGION_VIRTUAL_OFFSET]
    no_table = Write(64, bytes(8))
    (slot,) = regions.decoded(apply(region, (no_table,))).slots
    assert (slot.devices[0].used_bytes, slot.devices[0].virtual_bytes) == (9, 0)


def test_only_unlocked_slots_are_dead_and_their_memory_is_left_out():
    snapshot = regions.decoded(make_region((0, {"charged": 1}), (1, {"charged": 20}), (200, {"charged": 300})))
    dead = layout.dead_slots(snapshot, locked={0, 200})
    assert dead == (1,)
    assert layout.live_used_bytes(snapshot, dead)[0] == 301


def test_the_agent_writes_one_aligned_word_of_a_slot():
    write = layout.host_pid_write(layout.OWN_GEOMETRY, 2, 4242)
    assert write.offset % 4 == 0
    snapshot = regions.decoded(apply(make_region((2, {})), (write,)))
    assert snapshot.slots[0].host_pid == 4242


class ShimReader:
    """The shim's own reader of regions, as a program that takes paths."""

    def __init__(self, directory: Path) -> None:
        (directory / "reader.c").write_text(C_READER)
        program = compiled(directory / "reader.c", "region/region.c", "log.c", "limit/bucket.c", "limit/control.c", "limit/settle.c")
        self._path = directory / "region"
        self._process = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)

    def says(self, region: bytes) -> str:
        """``taken`` and where the tables are, or ``refused`` and why."""
        self._path.write_bytes(region)
        self._process.stdin.write(f"{self._path}\n")
        return self._process.stdout.readline().strip()

    def end(self) -> None:
        self._process.communicate()
        assert self._process.returncode == 0


@pytest.fixture(scope="module")
def shim_reader(tmp_path_factory):
    reader = ShimReader(tmp_path_factory.mktemp("reader"))
    yield reader
    reader.end()


def taken(geometry: layout.Geometry) -> str:
    numbers = (geometry.device_offset, geometry.device_stride, geometry.slot_offset, geometry.slot_stride, geometry.slot_count)
    return " ".join(["taken", *map(str, numbers), str(geometry.virtual_offset), str(geometry.virtual_stride)])


@pytest.mark.parametrize("name", regions.TAKEN)
def test_unusual_region_that_fits_is_accepted_by_shim_and_agent(shim_reader, name):
    data = regions.foreign_region(**regions.TAKEN[name])
    assert shim_reader.says(data) == taken(regions.decoded(data).geometry)


@pytest.mark.parametrize("name", regions.REFUSED)
def test_unusual_region_that_does_not_fit_is_refused_by_shim_and_agent(shim_reader, name):
    fields, says = regions.REFUSED[name]
    data = regions.foreign_region(**fields)
    with pytest.raises(RegionError, match=says):
        regions.decoded(data)
    answer = shim_reader.says(data)
    assert answer.startswith("refused")
    assert says in answer


near_words = st.sampled_from([0, 1, 8, 64, 128, 192, 256, 2176, 2304, 4096, 4160, 561152, 823296, 2**31, 2**32 - 64, 2**32 - 1])
odd_headers = st.dictionaries(
    st.sampled_from(regions.HEADER_WORDS),
    near_words | st.integers(0, 2**32 - 1),
    max_size=4,
)


@given(odd_headers, st.sampled_from([0, -1, -64, -262144, 64, 100_000]))
def test_both_readers_agree_on_every_header_that_a_tenant_can_write(shim_reader, words, trailing):
    data = regions.foreign_region(slots=64, trailing=trailing, **words)
    try:
        expected = taken(regions.decoded(data).geometry)
    except RegionError:
        expected = "refused"
    assert shim_reader.says(data).startswith(expected)


def test_a_slot_is_found_where_the_regions_own_header_has_it():
    data = bytearray(regions.foreign_region(minor=7, gap=4096, slot_growth=64, device_growth=64))
    geometry = regions.decoded(bytes(data)).geometry
    layout.SLOT_HEADER.pack_into(data, geometry.slot(5), layout.SLOT_LIVE, 77, 0, 0, 9)
    data = bytearray(apply(bytes(data), (layout.host_pid_write(geometry, 5, 4242),)))
    snapshot = regions.decoded(bytes(data))
    assert [(slot.index, slot.pid, slot.host_pid) for slot in snapshot.slots] == [(5, 77, 4242)]
    assert geometry == layout.decode_geometry(bytes(data[:256]), len(data))
    assert geometry.slot(5) != layout.OWN_GEOMETRY.slot(5)


@given(st.binary(min_size=0, max_size=300))
def test_any_header_a_tenant_can_write_at_most_raises(scribble):
    data = scribble + regions.empty_region()[len(scribble) :]
    with contextlib.suppress(RegionError):  # anything else fails the test
        regions.decoded(data)


@given(st.integers(0, layout.REGION_BYTES - 1))
def test_a_truncated_region_is_refused(length):
    with pytest.raises(RegionError, match="region"):
        regions.decoded(regions.empty_region()[:length])


class TestCompute:
    def test_the_buckets_of_a_region_are_read_from_its_first_page(self):
        data = bytearray(regions.empty_region()[: layout.REGION_SLOT_OFFSET])
        at = layout.REGION_DEVICE_OFFSET + 2 * layout.REGION_DEVICE.size + layout.BUCKET_OFFSET
        layout.BUCKET.pack_into(data, at, -5, 1, 7, 2, 90, 65536, 0, 3, 0, 0)
        counters = layout.decode_compute(bytes(data))
        assert len(counters) == layout.MAX_DEVICES
        assert counters[2] == layout.ComputeCounters(paid_ns=90, starved_at_ns=7)
        assert counters[1] == layout.ComputeCounters(0, 0)

    @given(st.binary(max_size=512))
    def test_what_a_tenant_writes_raises_nothing_but_a_region_error(self, scribble):
        data = bytearray(regions.empty_region()[: layout.REGION_SLOT_OFFSET])
        data[: len(scribble)] = scribble
        with contextlib.suppress(RegionError):
            layout.decode_compute(bytes(data))

    def test_a_truncated_region_is_refused(self):
        with pytest.raises(RegionError, match="do not fit"):
            layout.decode_compute(regions.empty_region()[:1000])
