"""The host's NVIDIA CDI spec as ``nvidia-ctk cdi generate`` makes it, for hosts on which nobody wrote one.

Generating takes some tenths of a second, so an answer serves until it is old or lacks a device that is asked for: the driver may have
been replaced meanwhile, and MIG instances come and go. The program asks the driver, and so it may hang, even when it was killed: containers
that start wait for it once, and are told of the failure for a while after.
"""

import shutil
import subprocess
import time
from collections.abc import Callable, Collection, Sequence

import msgspec

from agent.core.cdi import HostSpec, HostSpecError, is_host_spec, parse_host_spec
from agent.errors import StorageError

FRESH_SECONDS = 60.0
FAILED_SECONDS = 5.0
"""How long a failure serves: containers that start together must not each wait for a program that does not end."""
ENDING_SECONDS = 1.0
"""How long a program that was killed may take to go. One that the driver holds stays for longer."""


class NvidiaCtk:
    """Generates the spec where the program is."""

    def __init__(self, program: str, timeout_seconds: float, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        """Args: program: a path, or a name to look for on PATH."""
        self._program = program
        self._timeout_seconds = timeout_seconds
        self._monotonic = monotonic
        self._made_at = 0.0
        self._spec: HostSpec | None = None
        self._failed_at = -FAILED_SECONDS
        self._failure = ""
        self._stuck: subprocess.Popen[bytes] | None = None
        """A program that was killed and has not gone yet."""

    def host_spec(self, wanted: Collection[str] = ()) -> HostSpec | None:
        """Return the spec, with these devices unless the driver does not know them; None where there is no such program.

        Raises: StorageError when the program fails, or does not end in time.
        """
        program = shutil.which(self._program)
        if program is None:
            return None
        spec = self._spec
        if spec is None or self._monotonic() - self._made_at > FRESH_SECONDS or any(uuid not in spec.devices for uuid in wanted):
            if self._monotonic() - self._failed_at < FAILED_SECONDS:
                raise StorageError(self._failure)
            try:
                self._spec = spec = self._generate(program)
            except StorageError as exc:
                self._failed_at, self._failure = self._monotonic(), str(exc)
                raise
            self._made_at = self._monotonic()
        return spec

    def _generate(self, program: str) -> HostSpec:
        command = [program, "cdi", "generate", "--format=json", "--device-name-strategy=uuid"]
        what = " ".join(command)
        code, printed, said = self._run(command, what)
        if code != 0:
            raise StorageError(f"{what} ended with {code}: {_last_line(said)}")
        try:
            document = msgspec.json.decode(printed)
            if not is_host_spec(document):
                raise StorageError(f"{what} printed no CDI spec of NVIDIA GPUs: {document!r:.80}")
            return parse_host_spec(document, f"the output of {what}")
        except (msgspec.MsgspecError, UnicodeDecodeError, HostSpecError) as exc:
            raise StorageError(f"{what} printed no CDI spec: {exc}") from exc

    def _run(self, command: Sequence[str], what: str) -> tuple[int, bytes, bytes]:
        """Return the program's exit code, and what it printed on either side. Raises StorageError in time, whatever the program does."""
        if self._stuck is not None and self._stuck.poll() is None:
            raise StorageError(f"{what}: process {self._stuck.pid} of an earlier call was killed and is still there: the driver holds it")
        try:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        except OSError as exc:
            raise StorageError(f"{what}: {exc.strerror}") from exc
        try:
            printed, said = process.communicate(timeout=self._timeout_seconds)
        except subprocess.TimeoutExpired as exc:
            self._stuck = _end(process)
            raise StorageError(f"{what} has not ended within {self._timeout_seconds:g} s") from exc
        return process.returncode, printed, said


def _end(process: subprocess.Popen[bytes]) -> subprocess.Popen[bytes] | None:
    """Kill a program; return it if that does not help. Unlike leaving it as a context, this waits for it no longer than it is worth."""
    process.kill()
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
    try:
        process.wait(ENDING_SECONDS)
    except subprocess.TimeoutExpired:
        return process
    return None


def _last_line(output: bytes) -> str:
    lines = output.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"
