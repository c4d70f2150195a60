# SPDX-License-Identifier: Apache-2.0
"""Starts the agent: reads the settings, has the parts built (``agent.wiring``), and runs the services until SIGTERM.

An agent first waits until no other agent uses the node's directories. Where it serves claims, it asks the other one for its place; the
other one then stops its services and waits in turn. Then the driver is entered and the plugins are registered before
anything else: a node that reboots admits pods only once its devices are there.
On SIGTERM the plugins stop. The files stay, so running containers notice nothing.
"""

import asyncio
import gc
import logging
import os
import signal
import sys
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from agent.adapters.durable import write_whole
from agent.adapters.memory import use_one_heap
from agent.errors import AgentError, StorageError
from agent.services.standby import asked_to_leave
from agent.settings import Settings
from agent.wiring.parts import Parts, build_parts
from agent.wiring.setup import build_setup
from agent.wiring.standby import Place, build_place, wait_to_be_alone
from agent.wiring.watchers import Watchers, build_watchers
from aliquot.kube.errors import KubeApiError
from aliquot.process.log_format import configure_logging
from aliquot.process.settings import SettingsError

logger = logging.getLogger("agent")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the agent; return the exit code: 2 for wrong settings, 1 for a failure, 0 after a signal."""
    try:
        settings = Settings.load(sys.argv[1:] if argv is None else argv, os.environ)
        configure_logging(settings.log_level, settings.log_format)
        use_one_heap()
        asyncio.run(_run(settings, os.environ))
    except SettingsError as exc:
        print(f"aliquot agent: {exc}", file=sys.stderr)
        return 2
    except (AgentError, KubeApiError) as exc:
        logger.critical("%s", exc)
        return 1
    return 0


async def _run(settings: Settings, environ: Mapping[str, str]) -> None:
    """Run the agent once no other one runs on this node, until a signal comes or a service fails."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    gc.freeze()  # imported modules stay for good: collections need not look at them, and are short
    while not stop.is_set():
        place = build_place(settings, environ)
        try:
            if await wait_to_be_alone(settings, place, stop):
                await _run_alone(settings, environ, place, stop)
        finally:
            await place.leave()


async def _run_alone(settings: Settings, environ: Mapping[str, str], place: Place, stop: asyncio.Event) -> None:
    """Build the agent and run it until ``stop`` is set, another agent asks for its place, or a service fails."""
    parts = build_parts(build_setup(settings, environ, place.telemetry), place.front)
    watchers = build_watchers(parts)
    await _load(parts)
    services = _services(parts, watchers)
    _start_status_server(parts, watchers)
    parts.cluster.watcher.start(parts.cluster.pods)
    if parts.claims is not None:
        parts.claims.watcher.start(parts.claims.cache)
        parts.claims.open()
    tasks = [asyncio.ensure_future(service) for service in services]
    stopping, leaving = asyncio.ensure_future(stop.wait()), asyncio.ensure_future(_leave(parts, place))
    try:
        done, _ = await asyncio.wait([*tasks, stopping, leaving], return_when=asyncio.FIRST_COMPLETED)
        for task in done - {stopping}:
            await task  # a service ends only with an error
        logger.info("stopping: %s", "another agent of this node takes over" if leaving in done else "a signal came")
    finally:
        await _shut_down([*tasks, stopping, leaving], parts, watchers)


async def _leave(parts: Parts, place: Place) -> None:
    """Return when another agent has asked for the place and the calls about claims are finished. Kubelet sends new ones to that agent."""
    await asked_to_leave(place.succession)
    place.succession.retire()
    if parts.claims is not None:
        await parts.claims.front.drain()


async def _load(parts: Parts) -> None:
    """Read what an earlier agent on this node left. Raises StorageError."""
    parts.storage.manager.load(parts.setup.boot_id)
    parts.driver.health.load()
    parts.driver.cordons.load()
    parts.driver.mig.load()
    parts.grants.injection.load()
    await parts.grants.mps.load()


def _services(parts: Parts, watchers: Watchers) -> Sequence[Coroutine[Any, Any, None]]:
    """Return the loops of all services, in the order in which they start: the driver and the registration first."""
    storage, driver, grants, claims = parts.storage, parts.driver, parts.grants, parts.claims
    return [
        driver.watch.run(),
        parts.plugins.registrar.run(),
        *((claims.front.run(), claims.publisher.run(), claims.sweep.run()) if claims is not None else ()),
        grants.injection.run(),
        watchers.monitor.run(),
        storage.holder.run(),
        storage.shims.run(),
        storage.pages.run(),
        storage.spares.run(),
        storage.regions.run(),
        parts.cluster.events.run(),
        watchers.reconciler.run(),
        watchers.auditor.run(),
        watchers.sampler.run(),
        watchers.idle.run(),
        *((watchers.uses.run(),) if watchers.uses is not None else ()),
        grants.overhead.run(),
        driver.census.run(),
        grants.borrower.run(),
        grants.pauser.run(),
        watchers.publisher.run(),
        driver.cordons.run(),
        driver.health.run(),
        driver.mig.run(),
        grants.mps.run(),
        grants.limits.run(),
        storage.watchdog.run(),
        driver.watchdog.run(),
    ]


def _start_status_server(parts: Parts, watchers: Watchers) -> None:
    """Serve /metrics and the probes, and write down where, for programs of this node."""
    watchers.status.start()
    try:
        address = f"{watchers.address_from_node}\n".encode()
        write_whole(parts.setup.runtime / "metrics-address", address, mode=0o644, durable=False)
    except StorageError as exc:  # a program that knows the configured port still finds the server
        logger.error("the address of the status server is not written to its file: %s", exc)  # noqa: TRY400 - the sentence says it all
    logger.info("status server listens", extra={"address": watchers.status.address})


async def _shut_down(tasks: Sequence[asyncio.Future[Any]], parts: Parts, watchers: Watchers) -> None:
    """End the services, then what they use."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    parts.cluster.watcher.stop()
    parts.storage.changes.close()
    await parts.plugins.registrar.stop()
    if parts.claims is not None:
        parts.claims.watcher.stop()
        await parts.claims.front.stop()
        parts.claims.requests.close()
    await parts.kubelet.pod_resources.close()
    parts.storage.manager.close()
    watchers.status.stop()


if __name__ == "__main__":
    sys.exit(main())
