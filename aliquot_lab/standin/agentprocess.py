# SPDX-License-Identifier: Apache-2.0
"""The agent as a child process: started as by a DaemonSet, stopped or killed."""

import asyncio
import os
import secrets
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from aliquot.paths import SOURCE_ROOT

STOP_SECONDS = 5.0
LOG_TAIL_LINES = 15
POLL_SECONDS = 0.02
CONTAINER_ENV = "ALIQUOT_STANDIN_CONTAINER"
"""Environment variable that marks a program and its children as one container."""


class AgentError(Exception):
    """The agent ended or did not become ready; the message has the end of its log."""


class AgentProcess:
    """One agent. It can be started again with the same flags after ``stop`` or ``kill``."""

    def __init__(self, flags: Sequence[str], env: Mapping[str, str], *, log_path: Path, address_file: Path, module: str = "agent") -> None:
        """Args: module: the Python module to run. Only the agent writes ``address_file``."""
        self._module = module
        self.flags = list(flags)
        self.log_path = log_path
        self._mark = f"{CONTAINER_ENV}={secrets.token_hex(8)}"
        self.env = {**os.environ, "PYTHONPATH": str(SOURCE_ROOT), **env, CONTAINER_ENV: self._mark.partition("=")[2]}
        self._address_file = address_file
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        """Return the pid of the running agent. Raises AgentError."""
        if self._process is None:
            raise AgentError("the agent is not running")
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process is alive."""
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Start the process; ``metrics_url`` waits until it serves."""
        self._address_file.unlink(missing_ok=True)
        with self.log_path.open("ab") as log_file:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                self._module,
                *self.flags,
                env=self.env,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log_file,
                stderr=log_file,
                start_new_session=True,
            )

    async def stop(self) -> int | None:
        """End it as Kubernetes does: SIGTERM, and SIGKILL after STOP_SECONDS. Return the exit code; None when it did not run."""
        if self._process is None:
            return None
        with suppress(ProcessLookupError):
            self._process.terminate()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), STOP_SECONDS)
        return await self.kill()

    async def kill(self) -> int | None:
        """Kill it, as the kernel's OOM killer does, and then all its children, as the container runtime does. Return the exit code."""
        if self._process is None:
            return None
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        code = await self._process.wait()
        for pid in self._children():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process = None
        return code

    def _children(self) -> list[int]:
        """Return the pids of its running children. They have its mark in their environment, as they are in its cgroup on a real node."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with suppress(OSError):  # the process has ended, or belongs to another user
                    if self._mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                        found.append(int(entry.name))
        return found

    async def metrics_url(self, timeout_seconds: float) -> str:
        """Wait until it has written the address of its metrics; return the URL. Raises AgentError."""
        async with self.deadline(timeout_seconds, "serve metrics"):
            while not (self._address_file.exists() and (address := self._address_file.read_text().strip())):
                self.check()
                await asyncio.sleep(POLL_SECONDS)
        return f"http://{address}"

    def check(self) -> None:
        """Raise AgentError when the process has ended."""
        if self._process is not None and self._process.returncode is not None:
            raise AgentError(f"the agent ended with exit code {self._process.returncode}:\n{self.log_tail()}")

    def deadline(self, timeout_seconds: float, purpose: str) -> "_Deadline":
        """Limit the time of a block that waits for the agent. The error has ``purpose`` and the end of the log."""
        return _Deadline(self, timeout_seconds, purpose)

    def log_tail(self) -> str:
        """Return the last lines of its log."""
        if not self.log_path.exists():
            return "(no log)"
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])


class _Deadline:
    def __init__(self, agent: AgentProcess, timeout_seconds: float, purpose: str) -> None:
        self._agent = agent
        self._purpose = purpose
        self._seconds = timeout_seconds
        self._timeout = asyncio.timeout(timeout_seconds)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: object) -> None:
        try:
            await self._timeout.__aexit__(exc_type, exc, traceback)  # type: ignore[arg-type]
        except TimeoutError as timeout:
            message = f"the agent did not {self._purpose} within {self._seconds:g} s:\n{self._agent.log_tail()}"
            raise AgentError(message) from timeout
