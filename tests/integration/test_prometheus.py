# SPDX-License-Identifier: Apache-2.0
"""Dashboards, alerts and history in a real Prometheus over a real agent and scheduler, and every alert over a cluster gone wrong."""

import itertools
import time
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from scheduler_plugin.adapters.prometheus import Prometheus as HistoryStore
from scheduler_plugin.dashboard.history import History
from tests.integration.agent_nodes import inject, make_node, manifest, running
from tests.integration.prometheus import Prometheus, Target, needs_prometheus, running_prometheus
from tests.integration.test_agent_usage import cuda, until_used
from tests.integration.test_extender import api, create  # noqa: F401 - a fixture
from tests.integration.test_extender import running as running_scheduler
from tests.integration.test_monitoring import EVENTUAL, FOREIGN, MONITORING, alert_queries, dashboard_queries, parsed, selectors
from tests.integration.test_webhook import make_certificate

pytestmark = [pytest.mark.usefixtures("build_dir"), needs_prometheus]

RULES = (MONITORING / "alerts.yaml").read_text()
OF_AGENT = {"node": "node-1", "namespace": "aliquot-system", "pod": "aliquot-agent-x", "container": "agent"}
OF_SCHEDULER = {"namespace": "aliquot-system", "pod": "aliquot-scheduler-x", "container": "extender"}
EMPTY_WHEN_WELL = {"Containers without enforced limits"}
"""Panels without a line on a cluster without faults, besides those over families of EVENTUAL."""


def concrete(query: str) -> str:
    """A dashboard's query with its variables as Grafana fills them in."""
    return query.replace("$__rate_interval", "5m").replace("$node", ".*").replace("$namespace", ".*").replace("$pod", ".*")


async def test_dashboards_alerts_and_history_over_a_real_scrape(api, tmp_path):  # noqa: F811
    certificate, key = make_certificate(tmp_path, "webhook")
    async with make_node("t4x2") as node, running_scheduler(api, tls_cert_file=str(certificate), tls_key_file=str(key)) as extender:
        node.create_pod(manifest("a", cuda("work", "--mib", "64", "--seconds", "120", mib=1024, cores=20)))
        await running(node, "a")
        await until_used(node, "a", 64 << 20)
        await extender.schedule(await create(api, "p", vgpu="1", vgpu_memory="400"), "n1", "n2")
        agent = Target("aliquot-agent", (await node.agent.metrics_url(10)).removeprefix("http://"), OF_AGENT)
        scheduler = Target("aliquot-scheduler", extender.scheduler.addresses["status"], OF_SCHEDULER)
        async with running_prometheus(tmp_path, [agent, scheduler], RULES) as prometheus:
            await prometheus.until(lambda: scraped(prometheus, 4), "some scrapes of both")
            await prometheus.until_it_is(EMPTY_WHEN_WELL, lambda: empty_panels(prometheus))
            for name, query, _ in alert_queries():
                assert await prometheus.query(query) is not None, name
            await prometheus.until_it_is({"AliquotCertificateNearExpiry"}, lambda: firing(prometheus))  # it ends in two days
            store = HistoryStore(prometheus.url)
            await prometheus.until_it_is(({"limit", "used", "busy", "throttled"}, 1024 << 20), lambda: past(store))
            await store.close()
            inject(node, "lost", "--gpu", "1")
            await prometheus.until(lambda: fires(prometheus, "AliquotGpuOutOfService"), "the lost GPU to be reported")
            await node.agent.kill()
            await prometheus.until(lambda: fires(prometheus, "AliquotAgentDown"), "the dead agent to be reported")


async def scraped(prometheus: Prometheus, times: int) -> bool:
    counts = [int(one["value"][1]) for one in await prometheus.query("sum by (job) (count_over_time((up == 1)[5m:1s]))")]
    return len(counts) == 2 and min(counts) >= times


async def firing(prometheus: Prometheus) -> set[str]:
    return set(await prometheus.firing())


async def past(store: HistoryStore) -> tuple[set[str], float | None]:
    """The lines of a pod's history, and where the first of them ends."""
    lines = (await History(store, lambda: time.time() + 15).ask({"pod": "default/a"})).lines
    return {line.name for line in lines}, lines[0].points[-1][1] if lines and lines[0].points else None


async def fires(prometheus: Prometheus, name: str) -> bool:
    return name in await prometheus.firing()


async def empty_panels(prometheus: Prometheus) -> set[str]:
    """Titles of the panels without a line, of those with families that are always there."""
    empty = set()
    for where, query, _ in dashboard_queries():
        found = await prometheus.query(concrete(query))
        eventual = {selector.name for selector in selectors(parsed(query))} & {*EVENTUAL, *FOREIGN}
        if not found and not eventual:
            empty.add(where.partition(": ")[2])
    return empty


BROKEN = """
aliquot_audit_findings{{kind="over-limit",{slice}}} 1
aliquot_audit_findings{{kind="shim-missing",{slice}}} 1
aliquot_audit_findings{{kind="shim-unknown",{slice}}} 1
aliquot_container_enforcement_in_force{{backend="shim",{slice}}} 0
aliquot_drift{{node="n",kind="lost-spec"}} 2
aliquot_device_health_state{{node="n",device_uuid="GPU-1",state="quarantined"}} 1
aliquot_device_ecc_errors_total{{node="n",device_uuid="GPU-1",type="uncorrected"}} {count}
aliquot_nvml_errors_total{{node="n",call="nvmlInit",code="9"}} {count}
aliquot_nvml_call_overdue_seconds{{node="n",call="nvmlInitWithFlags",device_uuid=""}} 61
aliquot_mps_supervisor_up{{node="n"}} 0
aliquot_scheduler_leader 0
aliquot_scheduler_watch_lag_seconds{{source="pods"}} 100
aliquot_scheduler_verbs_total{{verb="bind",outcome="error"}} {count}
aliquot_scheduler_certificate_expiry_timestamp_seconds {soon}
kube_daemonset_status_number_unavailable{{namespace="aliquot-system",daemonset="aliquot-agent"}} 1
apiserver_admission_webhook_rejection_count{{name="normalise.aliquot.dev",error_type="calling_webhook_error"}} {count}
"""
SLICE = 'node="n",namespace="team",pod="train",container="main",device_uuid="GPU-1"'


@pytest.fixture
async def broken() -> AsyncIterator[str]:
    """A page on which everything that can be wrong is wrong; what counts, counts on."""
    counts = itertools.count(0, 10)

    async def page(_: web.Request) -> web.Response:
        return web.Response(text=BROKEN.format(slice=SLICE, count=next(counts), soon=time.time() + 86400))

    application = web.Application()
    application.router.add_get("/metrics", page)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


async def test_every_alert_fires_on_its_cause_with_complete_text(broken, tmp_path):
    gone = "127.0.0.1:9"
    targets = [
        Target("crafted", broken, {}),
        Target("aliquot-agent", gone, OF_AGENT),
        Target("aliquot-scheduler", gone, OF_SCHEDULER),
    ]
    every = {name for name, _, _ in alert_queries()}
    async with running_prometheus(tmp_path, targets, RULES) as prometheus:

        async def all_fire() -> bool:
            return set(await prometheus.firing()) == every

        try:
            await prometheus.until(all_fire, "every alert to fire")
        except AssertionError as late:
            late.add_note(f"silent: {sorted(every - set(await prometheus.firing()))}")
            raise
        for name, alert in (await prometheus.firing()).items():
            text = " ".join(alert["annotations"].values())
            assert "<no value>" not in text, name
            assert "{{" not in text, name
            assert "error executing template" not in text, name
