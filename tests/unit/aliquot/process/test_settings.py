# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass, field
from typing import Annotated

import pytest

from aliquot.process.settings import FileOnly, Row, SettingsError, Table, split_address


def _pairs(value, source):
    if not isinstance(value, dict):
        raise SettingsError(f"{source}: want pairs")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    wait_seconds: Annotated[float, Row("how long", 0.5, 60)] = 5.0
    price_list: Annotated[dict[str, int], FileOnly(_pairs)] = field(default_factory=dict)


TABLE = Table(Example, program="example", purpose="Shows how.", config_env="EXAMPLE_CONFIG")


def test_only_what_is_set_is_returned(tmp_path):
    assert TABLE.read([], {}) == {}
    assert TABLE.read(["--wait-seconds", "2"], {"ALIQUOT_WAIT_SECONDS": "3"}) == {"wait_seconds": 2.0}


def test_file_only_setting_is_read_from_file_and_has_no_flag(tmp_path):
    path = tmp_path / "example.yaml"
    path.write_text("priceList: {a: 1}\nwaitSeconds: 1\n")
    assert TABLE.read([], {"EXAMPLE_CONFIG": str(path)}) == {"price_list": {"a": 1}, "wait_seconds": 1.0}
    with pytest.raises(SettingsError, match="unrecognized arguments"):
        TABLE.read(["--price-list", "a"], {})


def test_a_file_only_setting_says_where_it_is_wrong(tmp_path):
    path = tmp_path / "example.json"
    path.write_text('{"priceList": 1}')
    with pytest.raises(SettingsError, match=rf"configuration file {path}: want pairs"):
        TABLE.read([f"--config={path}"], {})


def test_a_file_that_is_no_text_is_named(tmp_path):
    path = tmp_path / "example.json"
    path.write_bytes(b'{"waitSeconds": "\xff"}')
    with pytest.raises(SettingsError, match=f"configuration file {path}: .*utf-8"):
        TABLE.read([f"--config={path}"], {})


def test_a_misspelt_file_only_setting_is_recognised(tmp_path):
    path = tmp_path / "example.json"
    path.write_text('{"pricelist": {}}')
    with pytest.raises(SettingsError, match="did you mean priceList"):
        TABLE.read([f"--config={path}"], {})


@pytest.mark.parametrize(("address", "want"), [("0.0.0.0:1", ("0.0.0.0", 1)), ("[::1]:80", ("::1", 80)), (":0", ("", 0))])
def test_an_address_is_split_at_its_last_colon(address, want):
    assert split_address("exampleAddress", address) == want


@pytest.mark.parametrize("address", ["9402", "host:", "host:65536", "host:http"])
def test_a_wrong_address_names_its_setting(address):
    with pytest.raises(SettingsError, match=r"exampleAddress .*want host:port"):
        split_address("exampleAddress", address)
