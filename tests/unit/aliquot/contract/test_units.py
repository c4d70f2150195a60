# SPDX-License-Identifier: Apache-2.0
from fractions import Fraction

import pytest

from aliquot.contract import units
from aliquot.contract.errors import QuantityError
from aliquot.contract.units import GIB, MIB


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("0", 0),
        ("4", 4),
        ("+4", 4),
        ("-4", -4),
        ("4.", 4),
        (".5", Fraction(1, 2)),
        ("0.1", Fraction(1, 10)),
        ("1500m", Fraction(3, 2)),
        ("1u", Fraction(1, 10**6)),
        ("1n", Fraction(1, 10**9)),
        ("1k", 1000),
        ("2M", 2 * 10**6),
        ("1E", 10**18),
        ("1e3", 1000),
        ("1E3", 1000),
        ("12e-1", Fraction(12, 10)),
        ("1Ki", 1024),
        ("1.5Gi", 3 * GIB // 2),
        ("1Ei", 1 << 60),
    ],
)
def test_a_quantity_is_read_exactly_as_kubernetes_reads_it(text, want):
    assert units.parse_quantity(text) == want


@pytest.mark.parametrize(
    "text",
    ["", " 4", "4 ", "4\n", "four", "0x10", "4gi", "4GiB", "4ki", "1K", "--1", "1e", "1e+", "1.2.3", ".", "٤", "inf", "nan", "1_000"],
)
def test_what_is_no_quantity_is_refused(text):
    with pytest.raises(QuantityError, match="not a Kubernetes quantity"):
        units.parse_quantity(text)


@pytest.mark.parametrize("text", ["9223372036854775808", "8Ei", "1e99", "9" * 64])
def test_a_quantity_beyond_64_bits_is_refused(text):
    with pytest.raises(QuantityError, match="larger than any"):
        units.parse_quantity(text)


def test_a_quantity_of_unreasonable_length_is_refused_without_being_shown_whole():
    with pytest.raises(QuantityError) as refused:
        units.parse_quantity("1" * 100_000)
    assert len(str(refused.value)) < 200


@pytest.mark.parametrize(
    ("text", "want_bytes"),
    [
        pytest.param("4096", 4 * GIB, id="plain numbers count MiB"),
        pytest.param("4Gi", 4 * GIB, id="a binary suffix means what it says"),
        pytest.param("512Mi", 512 * MIB, id="Mi"),
        pytest.param("0.5Gi", 512 * MIB, id="a fraction of a GiB"),
        pytest.param("2048Ki", 2 * MIB, id="Ki"),
        pytest.param("4k", 4000 * MIB, id="4k is how the API server writes 4000"),
        pytest.param("1M", 1_000_000 * MIB, id="1M is how the API server writes 1000000"),
        pytest.param("1e3", 1000 * MIB, id="exponent"),
        pytest.param("2000m", 2 * MIB, id="whole after all"),
    ],
)
def test_memory_is_read_in_mib_unless_its_suffix_is_binary(text, want_bytes):
    assert units.parse_memory_bytes(text) == want_bytes


@pytest.mark.parametrize("text", ["0", "-1", "0.5", "1.5", "1500m", "1Ki", "1536Ki", "-4Gi"])
def test_memory_that_is_not_whole_mib_is_refused_with_an_example(text):
    with pytest.raises(QuantityError, match="write 4096 or 4Gi for 4 GiB"):
        units.parse_memory_bytes(text)


def test_decimal_gigabytes_are_refused_because_they_would_count_a_billion_mib():
    with pytest.raises(QuantityError, match="write 16384 or 16Gi for 16 GiB"):
        units.parse_memory_bytes("16G")


@pytest.mark.parametrize(("text", "want"), [("50", 50), ("100", 100), ("250", 250), ("1e2", 100)])
def test_percent_is_a_whole_number(text, want):
    assert units.parse_percent(text) == want


@pytest.mark.parametrize("text", ["0", "-5", "0.5", "50%", "500m"])
def test_percent_that_is_not_a_whole_number_is_refused_with_an_example(text):
    with pytest.raises(QuantityError, match="write 50 for half"):
        units.parse_percent(text)


def test_bytes_that_are_not_whole_mib_are_refused_rather_than_rounded():
    with pytest.raises(QuantityError, match="1 more than 3 MiB"):
        units.bytes_to_mib(3 * MIB + 1)


def test_floor_to_mib_never_gives_more():
    assert units.floor_to_mib(3 * MIB + 5) == 3 * MIB
    assert units.floor_to_mib(3 * MIB) == 3 * MIB


def test_the_resource_form_is_a_plain_number_of_mib():
    assert units.format_mib(4 * GIB) == "4096"


@pytest.mark.parametrize(
    ("memory_bytes", "want"), [(0, "0 MiB"), (MIB - 1, "0 MiB"), (1536 * MIB, "1536 MiB"), (4 * GIB, "4 GiB"), (4 * GIB + 1, "4 GiB")]
)
def test_memory_for_people_is_rounded_down(memory_bytes, want):
    assert units.format_memory(memory_bytes) == want
