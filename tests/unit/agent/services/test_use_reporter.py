# SPDX-License-Identifier: Apache-2.0
from types import SimpleNamespace
from typing import cast

from agent.core.holdings import Holdings
from agent.core.overhead import GpuProcess
from agent.core.use_reports import LEAST_SAMPLES
from agent.services.state import AgentState
from agent.services.use_reporter import UseReporter
from aliquot.contract.gpunode import PodUtilization
from aliquot.contract.model import Utilization
from tests.unit.agent.builders import grant, ids, inventory, pod, share


async def test_reports_mean_of_samples_and_notifies_once():
    train = pod("train")
    one = grant(ids("0:0"), share(0), of=train)
    key = (one.grant_id, "GPU-0")
    state = SimpleNamespace(
        pods=SimpleNamespace(by_uid={train.uid: train}),
        manager=SimpleNamespace(ledger=SimpleNamespace(grants={one.grant_id: one})),
        watch=SimpleNamespace(inventory=inventory()),
    )
    holdings = Holdings({"GPU-0", "GPU-1"}, {key: [GpuProcess("GPU-0", 10, 0, 0.9, 0.4)]})
    reporter = UseReporter(30.0, state=cast(AgentState, state), sm_ratios=lambda: {key: 0.9}, holdings=lambda: holdings)
    for _ in range(LEAST_SAMPLES - 1):
        await reporter.look()
    assert (reporter.reports, reporter.changes.count) == ((), 0)
    for _ in range(3):
        await reporter.look()
    assert (reporter.reports, reporter.changes.count) == ((PodUtilization(train.uid, Utilization(90, 40)),), 1)
    state.pods.by_uid = {}
    await reporter.look()
    assert (reporter.reports, reporter.changes.count) == ((), 2)
