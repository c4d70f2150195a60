# SPDX-License-Identifier: Apache-2.0
"""Starts the scheduler: reads the settings, constructs all parts (``wiring``), and runs the loops and servers until SIGTERM or SIGINT."""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence

from aliquot.kube.api_server import find_api_server
from aliquot.kube.errors import KubeApiError
from aliquot.process.log_format import configure_logging
from aliquot.process.settings import SettingsError
from scheduler_plugin.adapters.aiohttp_transport import KubeConnection
from scheduler_plugin.adapters.kube import KubeObjects
from scheduler_plugin.errors import SchedulerError
from scheduler_plugin.settings import Settings
from scheduler_plugin.wiring.cluster import make_cluster
from scheduler_plugin.wiring.kueue import make_kueue
from scheduler_plugin.wiring.leaders import make_leaders
from scheduler_plugin.wiring.scheduling import make_scheduling
from scheduler_plugin.wiring.servers import Servers, make_certificates, watch_certificates

logger = logging.getLogger("scheduler_plugin")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the scheduler; return the exit code: 2 for invalid settings, 1 for a failure, 0 after a signal."""
    try:
        settings = Settings.load(sys.argv[1:] if argv is None else argv, os.environ)
        configure_logging(settings.log_level, settings.log_format)
        asyncio.run(_run(settings, os.environ))
    except SettingsError as exc:
        print(f"aliquot scheduler: {exc}", file=sys.stderr)
        return 2
    except (SchedulerError, KubeApiError) as exc:
        logger.critical("%s", exc)
        return 1
    return 0


async def _run(settings: Settings, environ: Mapping[str, str]) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    server = find_api_server(settings.kube_api_url, settings.kube_token_file, settings.kube_ca_file, environ)
    connection = KubeConnection(server)
    try:
        await Scheduler(settings, connection).run(stop)
    finally:
        await connection.close()


class Scheduler:
    """All parts of one scheduler."""

    def __init__(self, settings: Settings, connection: KubeConnection) -> None:
        self.addresses: dict[str, str] = {}
        """Where each server listens, once it does."""
        self.cluster = make_cluster(settings, connection)
        self.leaders = make_leaders(settings, connection, self.cluster)
        self.scheduling = make_scheduling(settings, connection, self.cluster, self.leaders)
        self.kueue = make_kueue(settings, connection, self.cluster, self.leaders, self.scheduling.telemetry)
        self.certificates = make_certificates(settings, connection, self.cluster)
        watch_certificates(self.certificates, self.scheduling.telemetry)
        objects = KubeObjects(connection)
        self._servers = Servers(settings, self.cluster, self.leaders, self.scheduling, self.certificates, objects, self.kueue)
        self._linger_seconds = settings.linger_seconds

    @property
    def ready(self) -> bool:
        """Whether this replica may be called."""
        return self.leaders.ready

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until ``stop``, or until a loop ends with an error, which is raised."""
        await self._listen()
        await self.leaders.look_up()  # beside a kube-scheduler that leads, the first list of pods is enough to decide
        tasks = self._start_loops()
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait([stopping, *tasks], return_when=asyncio.FIRST_COMPLETED)
        finally:
            results = await self._end(tasks, linger=stop.is_set())
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def _listen(self) -> None:
        for name, server in self._servers.by_name.items():
            self.addresses[name] = await server.start()
            logger.info("%s listens on %s", name, self.addresses[name])

    def _start_loops(self) -> list["asyncio.Task[None]"]:
        loops = [*(stream.run() for stream in self.cluster.streams), *self.scheduling.loops(), *self.leaders.loops()]
        if self.kueue is not None:
            loops += self.kueue.loops()
        if self.certificates.controller is not None:
            loops.append(self.certificates.controller.run())
        return [asyncio.create_task(loop) for loop in loops]

    async def _end(self, tasks: Sequence["asyncio.Task[None]"], *, linger: bool) -> list[BaseException | None]:
        """End the loops, then the servers. Args: linger: whether the webhook serves on for a while first."""
        self.leaders.is_ending = True
        await self.scheduling.binder.stop()
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        if linger and "webhook" in self._servers.by_name:
            await asyncio.sleep(self._linger_seconds)
        await self._servers.stop()
        return results


if __name__ == "__main__":
    sys.exit(main())
