# SPDX-License-Identifier: Apache-2.0

import itertools

import pytest

from aliquot.contract.errors import ContractError
from scheduler_plugin.core.claims.versions import parse_version

IN_ORDER = ["1.0.0-1", "1.0.0-2", "1.0.0-10", "1.0.0--", "1.0.0-alpha", "1.0.0-alpha.1", "1.0.0-alpha.beta", "1.0.0-beta", "1.0.0", "1.2.0"]


def test_versions_are_in_the_order_of_semver() -> None:
    assert all(parse_version(one) < parse_version(other) for one, other in itertools.pairwise(IN_ORDER))


def test_build_does_not_count() -> None:
    assert parse_version("9.0.0+a.01") == parse_version("9.0.0+b-c") == parse_version("9.0.0")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "9",
        "9.0",
        "v9.0.0",
        "09.0.0",
        "9.0.0-",
        "9.0.0-01",
        "9.0.0+",
        "9.0.0-a..b",
        "9.0.0 ",
        "9.0.\u0660",
        "9.0.0-\u00e4",
        f"{1 << 64}.0.0",
    ],
)
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ContractError):
        parse_version(text)
