# SPDX-License-Identifier: Apache-2.0
"""Usage regions as other versions or a tenant could write them: one table of unusual ones, with the expected result of both readers.

The rules are in cuda_shim/region/layout.h. The shim's reader is cuda_shim/region/region.c, the agent's is agent/core/region_layout.py.
"""

import struct
from collections.abc import Mapping
from typing import Any, Final

from agent.core import region_layout

UNKNOWN = 0xA5
"""Bytes of a newer version in places that this version does not know."""

HEADER_WORDS: Final = (
    "header_bytes", "device_offset", "device_stride", "device_count", "slot_offset", "slot_stride", "slot_count", "virtual_offset",
    "virtual_stride",
)  # fmt: skip
"""The fields of struct aq_region_header that locate the tables."""

_MAJOR_OFFSET, _HEADER_BYTES_OFFSET, _TABLES_OFFSET, _REGION_BYTES_OFFSET, _VIRTUAL_OFFSET = 8, 12, 16, 40, 64


def empty_region() -> bytes:
    """Return the bytes of a new region file."""
    return region_layout.fresh_region_header().ljust(region_layout.REGION_BYTES, b"\0")


def decoded(data: bytes) -> region_layout.RegionSnapshot:
    """Return what the agent decodes from the bytes of a region file."""
    return region_layout.decode_region(lambda offset, length: data[offset : offset + length], len(data))


def foreign_region(
    *, major: int = region_layout.ABI_MAJOR, minor: int = region_layout.ABI_MINOR, header_growth: int = 0, slot_growth: int = 0,
    device_growth: int = 0, devices: int = region_layout.MAX_DEVICES, slots: int = region_layout.SLOT_COUNT, gap: int = 0,
    trailing: int = 0, virtual: bool = True, virtual_growth: int = 0, virtual_gap: int = 0, **header_words: int,
) -> bytes:  # fmt: skip
    """Return an empty region file with tables of these sizes, one after the other.

    Args:
        header_growth, slot_growth, device_growth, virtual_growth: bytes by which a struct is longer than ours.
        gap, virtual_gap: bytes by which the slots, the virtual ledgers begin later.
        trailing: bytes behind the last table; negative: that many are cut off.
        header_words: fields of struct aq_region_header that say something else than what is so.
    """
    device_offset = max(region_layout.REGION_DEVICE_OFFSET, region_layout.REGION_HEADER.size + header_growth)
    words = {
        "header_bytes": region_layout.REGION_HEADER.size + header_growth,
        "device_offset": device_offset,
        "device_stride": region_layout.REGION_DEVICE.size + device_growth,
        "device_count": devices,
        "slot_offset": max(region_layout.REGION_SLOT_OFFSET, device_offset + devices * (region_layout.REGION_DEVICE.size + device_growth))
        + gap,
        "slot_stride": region_layout.SLOT_BYTES + slot_growth,
        "slot_count": slots,
    }
    virtual_offset = words["slot_offset"] + slots * words["slot_stride"] + virtual_gap
    virtual_stride = region_layout.VIRTUAL_ROW_BYTES + virtual_growth if virtual else 0
    size = max(virtual_offset + slots * virtual_stride, region_layout.REGION_HEADER.size)
    words |= {"virtual_offset": virtual_offset if virtual else 0, "virtual_stride": virtual_stride} | header_words
    header = bytearray(region_layout.fresh_region_header())
    struct.pack_into("<HH", header, _MAJOR_OFFSET, major, minor)
    struct.pack_into("<I", header, _HEADER_BYTES_OFFSET, words["header_bytes"])
    tables = ("device_offset", "device_stride", "device_count", "slot_offset", "slot_stride", "slot_count")
    struct.pack_into("<6I", header, _TABLES_OFFSET, *(words[name] for name in tables))
    struct.pack_into("<Q", header, _REGION_BYTES_OFFSET, size)
    struct.pack_into("<II", header, _VIRTUAL_OFFSET, words["virtual_offset"], words["virtual_stride"])
    data = bytes(header).ljust(size, b"\0")
    return data[:trailing] if trailing < 0 else data + bytes([UNKNOWN]) * trailing


TAKEN: Final[Mapping[str, Mapping[str, Any]]] = {
    "our own": {},
    "version 1.0, without virtual ledgers": {"minor": 0, "virtual": False},
    "version 1.1": {"minor": 1},
    "version 1.2": {"minor": 2},
    "a newer minor": {"minor": region_layout.ABI_MINOR + 1},
    "the last minor": {"minor": 0xFFFF},
    "a longer header": {"minor": 7, "header_growth": 128},
    "longer virtual ledgers": {"minor": 7, "virtual_growth": 192},
    "longer slots": {"minor": 7, "slot_growth": 128},
    "longer devices": {"minor": 7, "device_growth": 64},
    "more devices": {"minor": 7, "devices": 20},
    "later slots": {"minor": 7, "gap": 4096},
    "later virtual ledgers": {"minor": 7, "virtual_gap": 4096},
    "one slot": {"minor": 7, "slots": 1},
    "fewer slots": {"minor": 7, "slots": 3},
    "more slots": {"minor": 7, "slots": 1024},
    "as many slots as there may be": {"minor": 7, "slots": region_layout.SLOT_COUNT_MAX},
    "all of it, and a longer file": {"minor": 7, "slot_growth": 64, "device_growth": 64, "gap": 8192, "slots": 500, "trailing": 5000},
    "another size said than the file has": {"region_bytes": 1},
}
"""Regions that both readers accept: arguments of ``foreign_region``."""

REFUSED: Final[Mapping[str, tuple[Mapping[str, Any], str]]] = {
    "a newer major": ({"major": region_layout.ABI_MAJOR + 1}, "ABI version 2"),
    "an older major": ({"major": 0}, "ABI version 0"),
    "shorter slots": ({"slot_growth": -64}, "do not fit"),
    "shorter devices": ({"device_growth": -64}, "do not fit"),
    "shorter virtual ledgers": ({"virtual_growth": -64}, "do not fit"),
    "a shorter header": ({"header_bytes": region_layout.REGION_HEADER.size - 8}, "do not fit"),
    "fewer devices": ({"devices": region_layout.MAX_DEVICES - 1}, "do not fit"),
    "no slot": ({"slots": 0}, "do not fit"),
    "more slots than there may be": ({"slots": region_layout.SLOT_COUNT_MAX + 1, "virtual": False}, "do not fit"),
    "devices in the header": ({"device_offset": 192}, "do not fit"),
    "devices in a header that has grown": ({"header_bytes": 320}, "do not fit"),
    "devices at an odd place": ({"device_offset": 264}, "do not fit"),
    "devices of an odd length": ({"device_growth": 8}, "do not fit"),
    "slots among the devices": ({"slot_offset": 2240}, "do not fit"),
    "slots at an odd place": ({"slot_offset": 4104, "trailing": 64}, "do not fit"),
    "slots of an odd length": ({"slot_growth": 8}, "do not fit"),
    "virtual ledgers in the header": ({"virtual_offset": 64}, "do not fit"),
    "virtual ledgers among the slots": ({"virtual_offset": 8192}, "do not fit"),
    "virtual ledgers at an odd place": ({"virtual_gap": 32}, "do not fit"),
    "virtual ledgers of an odd length": ({"virtual_growth": 32}, "do not fit"),
    "virtual ledgers past the end": ({"virtual_gap": 64, "trailing": -64}, "do not fit"),
    "the last byte missing": ({"trailing": -1}, "do not fit"),
    "the last slot missing": ({"trailing": -region_layout.SLOT_BYTES, "virtual": False}, "do not fit"),
    "numbers whose product overflows 32 bits": ({"slot_stride": 0xFFFFFFC0, "slot_count": 4096}, "do not fit"),
    "a larger file than there may be": ({"trailing": region_layout.REGION_BYTES_MAX}, "bytes"),
}
"""Regions that both readers refuse, with a part of the error message."""
