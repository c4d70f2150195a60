# SPDX-License-Identifier: Apache-2.0
"""Starts ``aliquot-mps``: reads the settings, constructs its adapters, and runs the MPS daemons until SIGTERM, which ends them."""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from agent.adapters.clock import SystemClock
from agent.adapters.directory_watch import DirectoryWatch
from agent.adapters.durable import make_directory
from agent.adapters.memory import use_one_heap
from agent.adapters.mps_files import MpsRequestFiles
from agent.adapters.node_abilities import mps_trouble
from agent.adapters.process_ends import PidfdProcessEnds
from agent.core.mps import DAEMONS_DIRECTORY, RECORDS_DIRECTORY
from agent.core.mps_records import SupervisorState
from agent.errors import AgentError
from agent.mps.control import MpsControlProgram
from agent.mps.settings import Settings
from agent.mps.supervisor import MpsSupervisor
from aliquot.process.log_format import configure_logging
from aliquot.process.settings import SettingsError

logger = logging.getLogger("mps")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the supervisor; return the exit code: 2 for wrong settings, 1 for a failure, 0 after a signal."""
    try:
        settings = Settings.load(sys.argv[1:] if argv is None else argv, os.environ)
        configure_logging(settings.log_level, settings.log_format)
        use_one_heap()
        asyncio.run(_run(settings))
    except SettingsError as exc:
        print(f"aliquot mps: {exc}", file=sys.stderr)
        return 2
    except AgentError as exc:
        logger.critical("%s", exc)
        return 1
    return 0


async def _run(settings: Settings) -> None:
    runtime = make_directory(Path(settings.runtime_dir), 0o755)
    shared_memory = make_directory(Path(settings.mps_shared_memory or runtime / "mps-shm"), 0o1777)
    own = shared_memory if shared_memory.is_relative_to(runtime) else None  # on the host it may be the /dev/shm of all programs
    requests = MpsRequestFiles(runtime / RECORDS_DIRECTORY)
    # a container waits for what is requested, and a request is two changes
    request_changes = DirectoryWatch([], nested=requests.wanted_directory, pace_seconds=0.01)
    supervisor = MpsSupervisor(
        SupervisorState(os.getpid(), str(shared_memory), mps_trouble(settings.mps_control)),
        control=MpsControlProgram(settings.mps_control, runtime / DAEMONS_DIRECTORY, shared_memory=own),
        requests=requests,
        ends=PidfdProcessEnds(),
        clock=SystemClock(),
    )
    stop = asyncio.Event()

    def end() -> None:
        stop.set()
        supervisor.changes.notify()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, end)
    request_changes.start(supervisor.changes.notify)
    try:
        await supervisor.run(stop)
    finally:
        request_changes.close()


if __name__ == "__main__":
    sys.exit(main())
