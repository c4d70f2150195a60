"""What changes on the node is looked at when it changes, however long the period of looking is."""

import json

import pytest

from tests.integration.agent_nodes import eventually, make_node, manifest, running

SELDOM = "--reconcile-seconds=3600"


@pytest.mark.parametrize("lost", ["run-cdi/aliquot*.json", "state/ledger/*.json", "run/containers/*/region"])
async def test_a_lost_file_is_back_long_before_the_period(lost):
    async with make_node("t4x2", SELDOM) as node:
        node.create_pod(manifest("train"))
        await running(node, "train")
        (path,) = node.layout.base.glob(lost)
        path.unlink()
        await eventually(path.exists, f"{path.name} is written again", timeout_seconds=30)


async def test_files_of_nobody_are_removed_long_before_the_period():
    async with make_node("t4x2", SELDOM) as node:
        node.create_pod(manifest("train"))
        await running(node, "train")
        (own,) = node.layout.base.glob("run-cdi/aliquot*.json")
        spec = json.loads(own.read_text())
        stray = own.with_name(own.name.replace(own.stem[-12:], "f" * 12))
        stray.write_text(json.dumps(spec))
        await eventually(lambda: not stray.exists(), "the stray spec is removed", timeout_seconds=30)
        assert own.exists()
