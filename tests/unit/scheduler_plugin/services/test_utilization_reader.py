# SPDX-License-Identifier: Apache-2.0
import asyncio
from dataclasses import replace

from aliquot.contract.gpunode import PodUtilization
from aliquot.contract.model import Policy, Utilization
from scheduler_plugin.core.cluster import state as state_module
from scheduler_plugin.core.cluster.state import ClusterState
from scheduler_plugin.core.score.cost import DEFAULT_WEIGHTS
from scheduler_plugin.services import utilization_reader
from scheduler_plugin.services.utilization_reader import UtilizationReader
from tests.unit.scheduler_plugin.builders import make_node, make_pod, make_share


async def test_reports_are_read_in_every_period_and_calls_are_served_between_pieces(monkeypatch):
    monkeypatch.setattr(utilization_reader, "PERIOD_SECONDS", 0.001)
    monkeypatch.setattr(state_module, "_PODS_PER_STEP", 1)
    state = ClusterState()
    state.utilizations.weigh({Policy.FRAG: replace(DEFAULT_WEIGHTS[Policy.FRAG], interference=1.0)})
    for name in ("n1", "n2"):
        state.set_gpu_node(make_node(name))
        state.set_pod(make_pod(f"u-{name}", node=name, shares={"main": [make_share(name, 0)]}, vgpu="1"))
    seen: list[list[int]] = []

    async def until(percent: int) -> None:
        """Note what is counted at each turn of the event loop, until both nodes have this much."""
        async with asyncio.timeout(60):
            while not seen or seen[-1] != [percent, percent]:
                seen.append(state.columns.busy_sm[:2, 0].tolist())
                await asyncio.sleep(0)

    running = asyncio.create_task(UtilizationReader(state).run())
    try:
        for percent in (80, 40):
            state.set_gpu_node(make_node("n1", utilization=(PodUtilization("u-n1", Utilization(percent, 0)),)))
            await until(percent)
    finally:
        running.cancel()
    assert [80, 0] in seen
