# SPDX-License-Identifier: Apache-2.0
"""docs/use/gangs-from-owners.md names every kind and every PodGroup of the code."""

from pathlib import Path

import pytest

from scheduler_plugin.webhook.owner_groups import OWNERS
from scheduler_plugin.webhook.pod_groups import POD_GROUPS

PAGE = (Path(__file__).parents[3] / "docs/use/gangs-from-owners.md").read_text()


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("|").split("|")]


ROWS = [cells(line) for line in PAGE.splitlines() if line.startswith("|")]


@pytest.mark.parametrize("owner", OWNERS, ids=lambda owner: owner.kind)
def test_page_says_what_is_a_gang_of_each_kind(owner):
    [gang] = [row[1] for row in ROWS if owner.kind in row[0].split(", ")]
    assert gang == owner.gang


@pytest.mark.parametrize("api", POD_GROUPS, ids=lambda api: api.word)
def test_page_says_where_each_pod_group_is_read(api):
    [read_from] = [row[2] for row in ROWS if len(row) == 3 and row[0] == api.system and f"`{api.word}`" in row[1]]
    assert all(version.rpartition("/")[2] in read_from for version in api.api_versions)
    assert api.api_versions[0].rpartition("/")[0] in read_from
