# SPDX-License-Identifier: Apache-2.0
import json
import os

import pytest
from click.testing import CliRunner

from agent.core.region_layout import (
    BUCKET_OFFSET,
    REGION_DEVICE_OFFSET,
    REGION_SLOT_OFFSET,
    SLOT_HEADER,
    SLOT_LIVE,
    DeviceLimit,
    Limits,
    encode_limits,
)
from aliquot.contract.units import MIB
from aliquot_cli.__main__ import main
from aliquot_cli.region import RegionDumpError, directory_of_process, document, lines, read_files
from tests.fakes.regions import empty_region

UUID = "GPU-00112233-4455-6677-8899-aabbccddeeff"
LIMIT = DeviceLimit(UUID, 1024 * MIB, overhead_bytes=6 * MIB, sm_percent=40, sm_weight=30, priority=-1, priority_line=3)


@pytest.fixture
def directory(tmp_path):
    """A container with one process that is dead: no process holds its slot's lock."""
    (tmp_path / "limits").write_bytes(encode_limits(Limits((LIMIT,))))
    region = bytearray(empty_region())
    SLOT_HEADER.pack_into(region, REGION_SLOT_OFFSET, SLOT_LIVE, 4711, 0, 0, 0)
    first = REGION_SLOT_OFFSET + SLOT_HEADER.size
    words = {"charged": 100 * MIB, "uncharged": 40 * MIB, "context": 30 * MIB, "refusals": 2, "last_refused": 12345, "launches": 9}
    for index, name in ((1, "charged"), (2, "uncharged"), (4, "context"), (8, "refusals"), (9, "last_refused"), (10, "launches")):
        region[first + 8 * index : first + 8 * index + 8] = words[name].to_bytes(8, "little")
    region[REGION_DEVICE_OFFSET : REGION_DEVICE_OFFSET + 8] = (60 * MIB).to_bytes(8, "little")
    assert BUCKET_OFFSET == 64
    (tmp_path / "region").write_bytes(region)
    return tmp_path


def test_document_has_all_fields_of_both_files(directory):
    found = document(read_files(directory))
    (device,), (process,) = found["devices"], found["processes"]
    assert (device["memory_bytes"], device["overhead_bytes"], device["sm_weight"]) == (1024 * MIB, 6 * MIB, 30)
    assert device["line_used_bytes"] == 60 * MIB
    assert (process["pid"], process["host_pid"], process["alive"]) == (4711, None, False)
    held = process["devices"][UUID]
    assert (held["used_bytes"], held["context_bytes"], held["refusals"], held["last_refused_bytes"]) == (60 * MIB, 30 * MIB, 2, 12345)


def test_the_text_names_amounts_with_their_units(directory):
    text = "\n".join(lines(read_files(directory)))
    for words in (
        "1 GiB, less 6 MiB driver overhead, 40 percent of the cores, weight 30, priority low, line 3",
        "process  4711 in the container (slot 0, dead, not yet reaped)",
        "60 MiB (context 30 MiB)",
        "2 allocations, the last of 12345 bytes",
        "9 launches",
    ):
        assert words in text
    assert "not counted" not in text


@pytest.mark.parametrize(
    ("limit", "is_counted"),
    [
        (DeviceLimit(UUID), False),
        (DeviceLimit(UUID, sm_percent=100), False),
        (DeviceLimit(UUID, priority=1), False),
        (DeviceLimit(UUID, sm_percent=99), True),
        (DeviceLimit(UUID, paused=True), True),
        (DeviceLimit(UUID, priority=1, priority_line=1), True),
        (DeviceLimit(UUID, burst_bytes=MIB, priority_line=1), True),
    ],
)
def test_unlimited_launches_are_shown_as_not_counted(directory, limit, is_counted):
    (directory / "limits").write_bytes(encode_limits(Limits((limit,))))
    text = "\n".join(lines(read_files(directory)))
    assert ("not counted now" not in text) is is_counted


def test_the_command_prints_either_form(directory):
    assert UUID in CliRunner().invoke(main, ["region", "dump", str(directory)]).output
    assert json.loads(CliRunner().invoke(main, ["region", "dump", str(directory), "--json"]).output)["devices"][0]["uuid"] == UUID


@pytest.mark.parametrize(
    ("arguments", "words"),
    [([], "one of the two"), (["x", "--pid", "1"], "one of the two"), (["/nowhere"], "/nowhere/limits"), (["--pid", "4194304"], "4194304")],
)
def test_unavailable_region_is_reported(arguments, words):
    result = CliRunner().invoke(main, ["region", "dump", *arguments])
    assert result.exit_code != 0
    assert words in result.output


def test_corrupted_region_is_reported_as_such(directory):
    (directory / "region").write_bytes(b"\xff" * 5000)
    with pytest.raises(RegionDumpError, match="magic"):
        read_files(directory)


def test_a_process_is_found_by_the_region_it_has_mapped(tmp_path):
    process = tmp_path / "77"
    process.mkdir()
    mapped = "7f00-7f01 rw-s 00000000 00:1b 99    /srv/root of a/run/aliquot/region"
    (process / "maps").write_text(f"5500-5501 r-xp 00000000 00:1b 12    /bin/sh\n5600-5601 rw-p 00000000 00:00 0\n{mapped}\n")
    assert directory_of_process(77, tmp_path) == process / "root/srv/root of a/run/aliquot"


def test_process_without_mapping_is_searched_in_its_root(tmp_path):
    assert directory_of_process(os.getpid()).parts[-3:] == ("root", "run", "aliquot")
