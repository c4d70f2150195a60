# SPDX-License-Identifier: Apache-2.0
"""How a waiting agent asks the working one for its place, by files in the state directory that both see.

The waiting agent holds a lock on one file, which the kernel drops when it ends: a killed agent asks for nothing. The other file names the
pod that last gave its place away. That pod never asks for it back: the DaemonSet is about to delete it.
"""

import fcntl
import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Final

from agent.adapters.durable import write_whole
from agent.adapters.regular_files import read_regular
from agent.errors import StorageError

logger = logging.getLogger(__name__)

SUCCESSOR_FILE: Final = "agent-successor"
RETIRED_FILE: Final = "agent-retired"
_NAME_BYTES_MAX: Final = 1 << 10
_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


class Succession:
    """Implements ``ports.Succession``."""

    def __init__(self, state: Path, pod: str) -> None:
        """Args: pod: name of this agent's pod. The pod's later processes have it too."""
        self._successor = state / SUCCESSOR_FILE
        self._retired = state / RETIRED_FILE
        self._pod = pod
        self._held: int | None = None
        self._trouble = ""

    def ask(self) -> None:
        """See ``ports.Succession``."""
        if self._held is None:
            try:
                self._held = self._locked(fcntl.LOCK_EX)
            except BlockingIOError:  # a third agent asks, or the working one looks just now
                return
            except OSError as exc:
                self._report(f"{self._successor}: {exc.strerror}: this agent waits until the other one ends")

    def withdraw(self) -> None:
        """See ``ports.Succession``."""
        if self._held is not None:
            os.close(self._held)
            self._held = None

    def is_asked_for(self) -> bool:
        """See ``ports.Succession``."""
        try:
            os.close(self._locked(fcntl.LOCK_SH))
        except BlockingIOError:
            return True
        except OSError as exc:
            self._report(f"{self._successor}: {exc.strerror}: no other agent can take over before this one ends")
        return False

    def retire(self) -> None:
        """See ``ports.Succession``."""
        try:
            write_whole(self._retired, f"{self._pod}\n".encode(), mode=0o600, durable=False)
        except StorageError as exc:
            self._report(f"{exc}: this pod may ask for its place again")

    @property
    def retired(self) -> bool:
        """See ``ports.Succession``."""
        with suppress(OSError, StorageError):
            return read_regular(self._retired, _NAME_BYTES_MAX).decode(errors="replace").strip() == self._pod
        return False

    def _locked(self, kind: int) -> int:
        """Return a descriptor with the lock. Raises BlockingIOError when another process has it, and OSError."""
        descriptor = os.open(self._successor, _FLAGS, 0o600)
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def _report(self, trouble: str) -> None:
        if trouble != self._trouble:
            self._trouble = trouble
            logger.warning("%s", trouble)
