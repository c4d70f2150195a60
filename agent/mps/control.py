# SPDX-License-Identifier: Apache-2.0
"""Starts and queries MPS control daemons, one per GPU, with the program ``nvidia-cuda-mps-control``.

Each daemon has its own pipe and log directory below ``<runtimeDir>/mps``. Clients may write in the pipe directory, so nothing there is
trusted, not even the pid file: a daemon and its servers are recognised by their environment. A client may also take the daemon's place
there, so the output of the program may come from a tenant: any bytes, any amount. And a client may leave files there that this program
cannot remove, since it has no capability to override file modes. So a daemon's directories are first moved aside, which needs rights only
in our own directory, and then removed as far as possible.

Daemons and servers run in the container of ``aliquot-mps``. When it ends, the container runtime ends all its processes, and MPS clients
lose their connection.
"""

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, cast

from agent.adapters.durable import list_directory, make_directory, remove_tree
from agent.core.mps import daemon_environment, pipe_directory
from agent.errors import MpsError, StorageError

_PROC = Path("/proc")
_MOST_OUTPUT_BYTES = 64 << 10
"""More than the program ever prints. Longer output does not come from it."""
_MOST_SERVERS = 64
"""A daemon has one server per user of its GPU. More are not queried, because each query may take long."""
_MOST_PID_DIGITS = 7
"""Digits of the kernel's largest process id."""
_ASIDE = "aside"
_MOST_ASIDE = 64
"""Limit of directories that could not be removed. Beyond it, an administrator has to find the tenant that creates them."""
_MOST_LOG_BYTES = 1 << 20
"""Bytes that one log may occupy, in memory where the runtime directory is a tmpfs. A daemon writes five lines per command."""
_BLOCK_BYTES = 512
"""The unit of st_blocks."""
_QUOTED_CHARACTERS = 300
"""Characters of the output that an error quotes."""


class MpsControlProgram:
    """Implements ``ports.MpsControl``."""

    def __init__(self, program: str, directory: Path, timeout_seconds: float = 5.0, *, shared_memory: Path | None = None) -> None:
        """Args: shared_memory: the /dev/shm of daemons and clients; None where other programs use it too, so that it stays untouched."""
        self._program = program
        self._directory = make_directory(directory, 0o755)
        self._timeout_seconds = timeout_seconds
        self._shared_memory = shared_memory

    def start(self, device_uuid: str) -> int | None:
        """See ``ports.MpsControl``."""
        pipes = Path(self._pipes(device_uuid))
        self._clear(device_uuid)
        make_directory(pipes, 0o755)
        make_directory(self._logs(device_uuid), 0o700)
        self._run(device_uuid, ["-d"], "")
        if self._server_pids(device_uuid) is None:
            raise MpsError(f"{self._program} -d for {device_uuid} succeeded, but its daemon does not reply; see {self._logs(device_uuid)}")
        return next(iter(self._daemons(device_uuid)), None)  # without clients it has no servers yet

    def servers(self, device_uuid: str) -> Mapping[int, str] | None:
        """See ``ports.MpsControl``."""
        pids = self._server_pids(device_uuid)
        if pids is None:
            return None
        return {pid: self._run(device_uuid, [], f"get_server_status {pid}\n").strip() for pid in pids[:_MOST_SERVERS]}

    def trim_logs(self, device_uuid: str) -> None:
        """See ``ports.MpsControl``.

        The used blocks count, not the length: a log that is written on after truncation has a hole, which takes no space.
        """
        for path in list_directory(self._logs(device_uuid)):
            try:
                if path.lstat().st_blocks * _BLOCK_BYTES > _MOST_LOG_BYTES:
                    os.truncate(path, 0)
            except OSError as exc:
                raise StorageError(f"emptying {path}, a log of the MPS daemon of {device_uuid}: {exc.strerror}") from exc

    def shut_down_server(self, device_uuid: str, pid: int) -> None:
        """See ``ports.MpsControl``."""
        self._run(device_uuid, [], f"shutdown_server {pid} -f\n")

    def stop(self, device_uuid: str) -> None:
        """See ``ports.MpsControl``."""
        with suppress(MpsError):  # it has ended, or hangs: its processes are ended below
            self._run(device_uuid, [], "quit -t 0\n")
        for pid in self._daemons(device_uuid):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            except OSError as exc:
                raise MpsError(f"ending the MPS daemon of {device_uuid}, process {pid}: {exc.strerror}") from exc
        self._clear(device_uuid)

    def known(self) -> Sequence[str]:
        """See ``ports.MpsControl``."""
        return [path.name for path in list_directory(self._directory) if path.name.startswith("GPU-")]

    def clear_shared_memory(self) -> None:
        """See ``ports.MpsControl``. A directory without rights for us stays."""
        for left in list_directory(self._shared_memory) if self._shared_memory is not None else ():
            try:
                if left.is_dir() and not left.is_symlink():
                    remove_tree(left)
                else:
                    left.unlink(missing_ok=True)
            except OSError as exc:
                raise StorageError(f"removing {left}, left by MPS clients: {exc.strerror}") from exc

    def _clear(self, device_uuid: str) -> None:
        """Move a daemon's directories aside and remove them as far as possible. Raises MpsError, StorageError."""
        aside = make_directory(self._directory / _ASIDE, 0o700)
        for left in list_directory(aside):
            remove_tree(left)
        if len(list_directory(aside)) >= _MOST_ASIDE:
            raise MpsError(f"{_MOST_ASIDE} directories of MPS daemons cannot be removed: clients took the rights away. Remove {aside}")
        place = aside / f"{device_uuid}.{time.monotonic_ns()}"
        try:
            (self._directory / device_uuid).rename(place)
        except FileNotFoundError:
            return
        except OSError as exc:
            raise MpsError(f"moving the directories of the MPS daemon of {device_uuid} aside: {exc.strerror}") from exc
        remove_tree(place)

    def _server_pids(self, device_uuid: str) -> Sequence[int] | None:
        """Return the processes that a daemon reports as its servers; None when no daemon replies."""
        try:
            printed = self._run(device_uuid, [], "get_server_list\n")
        except MpsError:
            return None
        return [int(word) for word in printed.split() if _is_pid(word)]

    def _pipes(self, device_uuid: str) -> str:
        return pipe_directory(str(self._directory), device_uuid)

    def _logs(self, device_uuid: str) -> Path:
        return self._directory / device_uuid / "log"

    def _environment(self, device_uuid: str) -> dict[str, str]:
        return daemon_environment(device_uuid, self._pipes(device_uuid), str(self._logs(device_uuid)))

    def _run(self, device_uuid: str, arguments: Sequence[str], commands: str) -> str:
        """Run the program; return its output, invalid UTF-8 replaced. Raises MpsError."""
        what = f"{self._program} {' '.join(arguments) or commands.strip()} for {device_uuid}"
        try:
            with subprocess.Popen(
                [self._program, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self._environment(device_uuid)},
                bufsize=0,
            ) as process:
                try:
                    printed = _talk(process, commands, self._timeout_seconds)
                except subprocess.TimeoutExpired as exc:
                    raise MpsError(f"{what} has not ended within {self._timeout_seconds:g} s") from exc
                finally:
                    process.kill()  # no effect after its end
        except OSError as exc:
            raise MpsError(f"{what}: {exc.strerror}") from exc
        if len(printed) > _MOST_OUTPUT_BYTES:
            raise MpsError(f"{what} printed more than {_MOST_OUTPUT_BYTES} bytes and was killed")
        text = printed.decode(errors="replace")
        if process.returncode != 0:
            raise MpsError(f"{what} ended with {process.returncode}: {text.strip()[:_QUOTED_CHARACTERS] or 'no output'}")
        return text

    def _daemons(self, device_uuid: str) -> Sequence[int]:
        """Return the processes with the environment of this GPU's daemon: the daemon and its servers."""
        wanted = {f"{name}={value}".encode() for name, value in self._environment(device_uuid).items()}
        found = []
        for entry in list_directory(_PROC):
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            try:
                environment = (entry / "environ").read_bytes()
            except OSError:  # it has ended, or may not be read
                continue
            if wanted <= set(environment.split(b"\0")):
                found.append(int(entry.name))
        return found


def _is_pid(word: str) -> bool:
    """Whether a word can be a process id. isdigit() also accepts digits of other scripts, and int() has a length limit."""
    return word.isascii() and word.isdigit() and len(word) <= _MOST_PID_DIGITS


def _talk(process: subprocess.Popen[bytes], commands: str, timeout_seconds: float) -> bytes:
    """Write a process's input and return its output, until it ends or prints too much.

    Raises: subprocess.TimeoutExpired; OSError.
    """
    give, take = cast(IO[bytes], process.stdin), cast(IO[bytes], process.stdout)
    deadline = time.monotonic() + timeout_seconds
    printed = bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(take, selectors.EVENT_READ)
        with suppress(BrokenPipeError):  # it has ended already; its output says why
            give.write(commands.encode())
            give.close()
        while selector.select(deadline - time.monotonic()):
            chunk = os.read(take.fileno(), _MOST_OUTPUT_BYTES)
            printed += chunk
            if len(printed) > _MOST_OUTPUT_BYTES:
                return bytes(printed)
            if not chunk:
                process.wait(max(0.0, deadline - time.monotonic()))
                return bytes(printed)
    raise subprocess.TimeoutExpired(process.args, timeout_seconds)
