"""MPS control daemons: one per GPU, started with ``nvidia-cuda-mps-control -d`` and spoken to with the same program.

Each has its own pipe and log directory below ``<runtimeDir>/mps``. Clients of a daemon may write in its pipe directory, so nothing that
is found there is believed, its pid file least of all: a daemon and its servers are recognised by the environment they were started in.
A client may even take the daemon's place there, so that what the program prints may be a tenant's words: bytes of any kind, any amount.
And it may leave there what we, who have no capability to go past file modes, cannot remove: a daemon's directories are moved aside
before their place is used again, which needs rights in ours only, and then removed as far as that goes.

Daemons and servers belong to whatever ``aliquot-mps`` runs in. In a pod that is its container: when it ends, the container runtime ends
every process in it, and MPS clients lose their connection.
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
"""More than the program ever prints; what prints more is not believed to be it."""
_MOST_SERVERS = 64
"""A daemon has one server for each user of its GPU; more are not looked at, because each is a question that may take long."""
_MOST_PID_DIGITS = 7
"""The kernel's largest process id has as many."""
_ASIDE = "aside"
_MOST_ASIDE = 64
"""Directories that could not be removed; the tenant that makes more has to be found by somebody."""
_MOST_LOG_BYTES = 1 << 20
"""What one log may occupy, in memory where the runtime directory is a tmpfs. A daemon writes five lines for each command it is given."""
_BLOCK_BYTES = 512
"""The unit of st_blocks."""
_QUOTED_CHARACTERS = 300
"""How much of what was printed goes into an error's sentence."""


class MpsControlProgram:
    """Implements ``ports.MpsControl``."""

    def __init__(self, program: str, directory: Path, timeout_seconds: float = 5.0, *, shared_memory: Path | None = None) -> None:
        """Args: shared_memory: the /dev/shm of daemons and clients, where nobody else uses it; None where it must be left alone."""
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
            raise MpsError(
                f"{self._program} -d for {device_uuid} ended well, and its daemon does not answer; see {self._logs(device_uuid)}"
            )
        return next(iter(self._daemons(device_uuid)), None)  # it has no clients yet, and therefore no servers

    def servers(self, device_uuid: str) -> Mapping[int, str] | None:
        """See ``ports.MpsControl``."""
        pids = self._server_pids(device_uuid)
        if pids is None:
            return None
        return {pid: self._run(device_uuid, [], f"get_server_status {pid}\n").strip() for pid in pids[:_MOST_SERVERS]}

    def trim_logs(self, device_uuid: str) -> None:
        """See ``ports.MpsControl``.

        What counts is the room a log takes and not its length: one that writes on where it was leaves a hole, which takes none.
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
        with suppress(MpsError):  # it is gone, or hangs: what is left of it is ended below
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
        """See ``ports.MpsControl``. A directory in which a client took the rights away stays."""
        for left in list_directory(self._shared_memory) if self._shared_memory is not None else ():
            try:
                if left.is_dir() and not left.is_symlink():
                    remove_tree(left)
                else:
                    left.unlink(missing_ok=True)
            except OSError as exc:
                raise StorageError(f"removing {left}, which MPS clients have left: {exc.strerror}") from exc

    def _clear(self, device_uuid: str) -> None:
        """Free the place of a daemon's directories, whatever its clients have left in them. Raises MpsError, StorageError."""
        aside = make_directory(self._directory / _ASIDE, 0o700)
        for left in list_directory(aside):
            remove_tree(left)
        if len(list_directory(aside)) >= _MOST_ASIDE:
            raise MpsError(
                f"{_MOST_ASIDE} directories of MPS daemons cannot be removed: their clients took the rights away. Remove {aside}"
            )
        place = aside / f"{device_uuid}.{time.monotonic_ns()}"
        try:
            (self._directory / device_uuid).rename(place)
        except FileNotFoundError:
            return
        except OSError as exc:
            raise MpsError(f"moving the directories of the MPS daemon of {device_uuid} aside: {exc.strerror}") from exc
        remove_tree(place)

    def _server_pids(self, device_uuid: str) -> Sequence[int] | None:
        """Return the processes a daemon tells as its servers; None where no daemon answers."""
        try:
            told = self._run(device_uuid, [], "get_server_list\n")
        except MpsError:
            return None
        return [int(word) for word in told.split() if _is_pid(word)]

    def _pipes(self, device_uuid: str) -> str:
        return pipe_directory(str(self._directory), device_uuid)

    def _logs(self, device_uuid: str) -> Path:
        return self._directory / device_uuid / "log"

    def _environment(self, device_uuid: str) -> dict[str, str]:
        return daemon_environment(device_uuid, self._pipes(device_uuid), str(self._logs(device_uuid)))

    def _run(self, device_uuid: str, arguments: Sequence[str], commands: str) -> str:
        """Run the program; return what it printed, as text whatever it was. Raises MpsError."""
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
                    process.kill()  # does nothing to one that has ended
        except OSError as exc:
            raise MpsError(f"{what}: {exc.strerror}") from exc
        if len(printed) > _MOST_OUTPUT_BYTES:
            raise MpsError(f"{what} printed more than {_MOST_OUTPUT_BYTES} bytes, and was ended")
        text = printed.decode(errors="replace")
        if process.returncode != 0:
            raise MpsError(f"{what} ended with {process.returncode}: {text.strip()[:_QUOTED_CHARACTERS] or 'it printed nothing'}")
        return text

    def _daemons(self, device_uuid: str) -> Sequence[int]:
        """Return the processes in the environment of this GPU's daemon: itself, and the servers it started."""
        wanted = {f"{name}={value}".encode() for name, value in self._environment(device_uuid).items()}
        found = []
        for entry in list_directory(_PROC):
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            try:
                environment = (entry / "environ").read_bytes()
            except OSError:  # it ended, or is not ours to look at
                continue
            if wanted <= set(environment.split(b"\0")):
                found.append(int(entry.name))
        return found


def _is_pid(word: str) -> bool:
    """Whether a word can be a process id; other scripts have digits as well, and int() takes no number of any length."""
    return word.isascii() and word.isdigit() and len(word) <= _MOST_PID_DIGITS


def _talk(process: subprocess.Popen[bytes], commands: str, timeout_seconds: float) -> bytes:
    """Give a process that has pipes its input, and return what it prints until it ends, or until that is more than anybody should print.

    Raises: subprocess.TimeoutExpired; OSError.
    """
    give, take = cast(IO[bytes], process.stdin), cast(IO[bytes], process.stdout)
    deadline = time.monotonic() + timeout_seconds
    printed = bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(take, selectors.EVENT_READ)
        with suppress(BrokenPipeError):  # it has ended already; what it printed says why
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
