# SPDX-License-Identifier: Apache-2.0
"""A change on the node is checked when it happens, and not only once every period.

The period is ten seconds at most, so one look soon after a change proves nothing. Each test therefore makes the same change several times,
each time after the agent has looked: passes of the period alone would need nearly a period for each but the first.
"""

import asyncio
import json
from collections.abc import Callable

import pytest

from tests.integration.agent_nodes import eventually, make_node, manifest, running

PERIOD_SECONDS = 10.0
SELDOM = f"--reconcile-seconds={PERIOD_SECONDS:.0f}"
TIMES = 6
SETTLED_SECONDS = 0.5
"""After a repair; the repair's own writing wakes no loop."""


async def cured_each_time(change: Callable[[], object], is_cured: Callable[[], bool], what: str) -> None:
    async with asyncio.timeout((TIMES - 1) * (PERIOD_SECONDS - SETTLED_SECONDS)):
        for _ in range(TIMES):
            await asyncio.sleep(SETTLED_SECONDS)
            change()
            await eventually(is_cured, what, timeout_seconds=60)


@pytest.mark.parametrize("lost", ["run-cdi/aliquot*.json", "state/ledger/*.json", "run/containers/*/region"])
async def test_a_lost_file_is_back_long_before_the_period(lost):
    async with make_node("t4x2", SELDOM) as node:
        node.create_pod(manifest("train"))
        await running(node, "train")
        (path,) = node.layout.base.glob(lost)
        await cured_each_time(path.unlink, path.exists, f"{path.name} is written again")


async def test_files_without_owner_are_removed_long_before_period():
    async with make_node("t4x2", SELDOM) as node:
        node.create_pod(manifest("train"))
        await running(node, "train")
        (own,) = node.layout.base.glob("run-cdi/aliquot*.json")
        spec = json.dumps(json.loads(own.read_text()))
        stray = own.with_name(own.name.replace(own.stem[-12:], "f" * 12))
        await cured_each_time(lambda: stray.write_text(spec), lambda: not stray.exists(), "the stray spec is removed")
        assert own.exists()
