# SPDX-License-Identifier: Apache-2.0
"""Notifies when a process that is not the agent's child has ended, by its pidfd: at once, and never for a process that reused its pid."""

import asyncio
import os
from collections.abc import Callable

from agent.errors import ProcessError


class PidfdProcessEnds:
    """Implements ``ports.ProcessEnds``."""

    def watch(self, pid: int, notify: Callable[[], None]) -> Callable[[], None]:
        """See ``ports.ProcessEnds``."""
        loop = asyncio.get_running_loop()
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            return loop.call_soon(notify).cancel
        except OSError as exc:
            raise ProcessError(f"watching process {pid}: {exc.strerror}") from exc
        watching = True

        def stop() -> None:
            nonlocal watching
            if watching:
                watching = False
                loop.remove_reader(descriptor)
                os.close(descriptor)

        def end() -> None:
            stop()
            notify()

        loop.add_reader(descriptor, end)
        return stop
