# SPDX-License-Identifier: Apache-2.0
"""Old and new on one node during an upgrade: which limits and regions this shim takes, and that the agent's reader takes the same.

The contract is in cuda_shim/region/layout.h: one's own major version only; any minor; headers, devices and slots may have grown at their
ends and are stepped by the strides the header states. What does not fit is refused with a line that reports it (fail closed).
"""

import struct
import zlib

import pytest

from agent.core import region_layout
from agent.core.region_layout import DeviceLimit, Limits, RegionError
from tests.fakes import regions
from tests.fakes.container import MIB, Container, Node
from tests.fakes.regions import UNKNOWN

LIMIT_MIB = 2048
CONTEXT_MIB = 530
MAJOR_OFFSET, MINOR_OFFSET, HEADER_BYTES_OFFSET = 8, 10, 12
STRIDE_OFFSET = region_layout.CHECKED_FROM


@pytest.fixture
def node(build_dir, sim_node, tmp_path) -> Node:
    return Node(build_dir, sim_node("h200x8"), tmp_path)


@pytest.fixture
def container(node) -> Container:
    return node.container(LIMIT_MIB, 2 * LIMIT_MIB)


def limits_of(node: Node) -> Limits:
    return Limits(tuple(DeviceLimit(uuid, size * MIB) for uuid, size in zip(node.uuids, (LIMIT_MIB, 2 * LIMIT_MIB), strict=False)))


def foreign_limits(limits: Limits, *, major=None, minor=None, header_growth=0, device_growth=0, trailing=0) -> bytes:
    """A limits file as another version would write it: grown structures, the new fields filled."""
    data = region_layout.encode_limits(limits)
    header, size, count = bytearray(data[: region_layout.LIMITS_HEADER.size]), region_layout.LIMITS_DEVICE.size, len(limits.devices)
    devices = [data[len(header) + index * size : len(header) + (index + 1) * size] for index in range(count)]
    struct.pack_into("<H", header, MAJOR_OFFSET, region_layout.ABI_MAJOR if major is None else major)
    struct.pack_into("<H", header, MINOR_OFFSET, region_layout.ABI_MINOR if minor is None else minor)
    struct.pack_into("<I", header, HEADER_BYTES_OFFSET, len(header) + header_growth)
    struct.pack_into("<I", header, STRIDE_OFFSET, size + device_growth)
    body = bytes(header) + bytes([UNKNOWN]) * header_growth + b"".join(device + bytes([UNKNOWN]) * device_growth for device in devices)
    checksum = zlib.crc32(body[region_layout.CHECKED_FROM :])
    body = body[: region_layout.CHECKSUM_OFFSET] + struct.pack("<I", checksum) + body[region_layout.CHECKSUM_OFFSET + 4 :]
    return body.ljust(region_layout.LIMITS_BYTES, b"\0") + bytes([UNKNOWN]) * trailing


def write(path, data: bytes) -> None:
    path.unlink()
    path.write_bytes(data)


def assert_holds(container: Container) -> None:
    """Each device has its own limit, to the byte."""
    for device, size in enumerate((LIMIT_MIB, 2 * LIMIT_MIB)):
        filled = container.client("fill", "--device", str(device))
        assert filled.status == 0, filled
        assert filled.last["held_bytes"] == (size - CONTEXT_MIB) * MIB


def refusal_of(container: Container) -> str:
    """The one line with which a program gets no GPU."""
    answer = container.client("info")
    assert (answer.status, answer.last["result_name"]) == (1, "CUDA_ERROR_NOT_PERMITTED")
    [line] = answer.stderr.splitlines()
    assert line.endswith("refusing the GPU")
    return line


# --- limits ---------------------------------------------------------------------------------------------------------

TAKEN_LIMITS = {
    "our own": {},
    "an older minor": {"minor": 0},
    "a newer minor": {"minor": region_layout.ABI_MINOR + 1},
    "the last minor": {"minor": 0xFFFF},
    "a longer header": {"minor": 7, "header_growth": 64},
    "longer devices": {"minor": 7, "device_growth": 48},
    "devices of another alignment": {"minor": 7, "device_growth": 8},
    "both, and a longer file": {"minor": 7, "header_growth": 128, "device_growth": 240, "trailing": 8192},
}


@pytest.mark.parametrize("version", TAKEN_LIMITS)
def test_limits_of_any_minor_version_work_with_shim_and_agent(node, container, version):
    data = foreign_limits(limits_of(node), **TAKEN_LIMITS[version])
    assert region_layout.decode_limits(data) == limits_of(node)
    write(container.limits_path, data)
    assert_holds(container)


def shorter_devices(limits: Limits) -> bytes:
    return foreign_limits(limits, device_growth=-8)


REFUSED_LIMITS = {
    "a newer major": (lambda limits: foreign_limits(limits, major=region_layout.ABI_MAJOR + 1), "ABI version 2"),
    "an older major": (lambda limits: foreign_limits(limits, major=0), "ABI version 0"),
    "shorter devices": (shorter_devices, "do not fit"),
    "a shorter header": (lambda limits: foreign_limits(limits, header_growth=-8), "do not fit"),
    "devices beyond the end": (lambda limits: foreign_limits(limits, device_growth=4096), "do not fit"),
}


@pytest.mark.parametrize("version", REFUSED_LIMITS)
def test_other_limits_are_refused_by_the_shim_and_by_the_agent(node, container, version):
    make, says = REFUSED_LIMITS[version]
    data = make(limits_of(node))[: region_layout.LIMITS_BYTES]
    with pytest.raises(RegionError):
        region_layout.decode_limits(data)
    write(container.limits_path, data)
    assert says in refusal_of(container)


def test_limits_that_another_version_rewrites_while_a_program_runs_are_followed(node, container):
    """The agent is upgraded under a running container: the page grows in place, its generation goes on."""
    write(container.limits_path, bytes(region_layout.encode_limits(limits_of(node))))
    with container.repl() as program:
        raised = Limits(tuple(DeviceLimit(device.uuid, 2 * device.memory_bytes) for device in limits_of(node).devices))
        data = bytearray(foreign_limits(raised, minor=9, device_growth=80))
        struct.pack_into("<Q", data, region_layout.GENERATION_OFFSET, 4)
        with container.limits_path.open("r+b") as file:
            file.write(data)
        assert program.ask("info")["total_bytes"] == 2 * LIMIT_MIB * MIB


def test_a_page_of_another_major_version_does_not_change_a_running_program(node, container):
    with container.repl() as program:
        raised = Limits((DeviceLimit(node.uuids[0], 4 * LIMIT_MIB * MIB), DeviceLimit(node.uuids[1], 4 * LIMIT_MIB * MIB)))
        data = bytearray(foreign_limits(raised, major=region_layout.ABI_MAJOR + 1))
        struct.pack_into("<Q", data, region_layout.GENERATION_OFFSET, 4)
        with container.limits_path.open("r+b") as file:
            file.write(data)
        assert program.ask("info")["total_bytes"] == LIMIT_MIB * MIB


# --- region ---------------------------------------------------------------------------------------------------------

TAKEN_REGIONS = (
    "our own", "version 1.0, without virtual ledgers", "a newer minor", "longer virtual ledgers", "longer slots", "longer devices",
    "later slots", "fewer slots", "more slots", "all of it, and a longer file",
)  # fmt: skip
"""With a whole program each; the readers alone are tried on the whole table in tests/unit/agent/core/test_region_layout.py."""


@pytest.mark.parametrize("version", TAKEN_REGIONS)
def test_regions_of_any_minor_version_work_with_shim_and_agent(container, version):
    write(container.region_path, regions.foreign_region(**regions.TAKEN[version]))
    assert_holds(container)
    with container.repl() as program:
        assert program.ask(f"alloc alloc {1000 * MIB}")["result"] == 0
        snapshot = container.snapshot()
        assert snapshot.line_used_bytes[0] == (1000 + CONTEXT_MIB) * MIB
        assert region_layout.live_used_bytes(snapshot)[0] == snapshot.line_used_bytes[0]
        [slot] = [slot for slot in snapshot.slots if slot.pid == program.process.pid]
        assert slot.devices[0].context_bytes == CONTEXT_MIB * MIB


@pytest.mark.parametrize("version", ["a newer major", "shorter slots", "the last byte missing", "the last slot missing"])
def test_program_is_refused_gpu_for_region_that_reader_refuses(container, version):
    fields, says = regions.REFUSED[version]
    write(container.region_path, regions.foreign_region(**fields))
    assert says in refusal_of(container)


def test_an_open_policy_of_a_newer_major_version_is_honoured(node, container):
    """The flags are where every version has them, so that an agent that wants programs to run during an upgrade is obeyed."""
    limits = Limits(limits_of(node).devices, fail_open=True)
    write(container.limits_path, foreign_limits(limits, major=region_layout.ABI_MAJOR + 1))
    answer = container.client("info")
    assert answer.status == 0
    assert "without limits" in answer.stderr
