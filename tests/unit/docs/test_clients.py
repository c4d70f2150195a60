# SPDX-License-Identifier: Apache-2.0
"""The page of clients has what the pin table has."""

from tests.clients import page
from tests.clients.installing import ROOT, read_pins

ROWS = page.read_rows(ROOT / "docs/measurements/clients.md")


def test_page_has_every_client_of_the_pin_table():
    assert list(ROWS) == list(read_pins())


def test_every_row_has_the_pinned_version_and_no_failure():
    for name, pin in read_pins().items():
        for row in ROWS[name]:
            if pin.kind == "missing":
                assert pin.why in row
                continue
            assert row.startswith(f"| {name} | {pin.version} | "), row
            assert "failed" not in row, row
            assert "not run" not in row or pin.heavy, row
