# SPDX-License-Identifier: Apache-2.0
"""Generates the host's NVIDIA CDI spec with ``nvidia-ctk cdi generate``, for hosts without a spec file.

Generating takes some tenths of a second, so a result is reused until it is old or lacks a requested device: the driver may have been
replaced, and MIG instances change. The program queries the driver, so it may hang, even after it was killed. Starting containers wait for
it once; after a failure, others get the same error for a while.
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
"""How long a failure is reused: containers that start together must not each wait for a program that does not end."""
ENDING_SECONDS = 1.0
"""How long a killed program may take to end. A program that hangs in the driver takes longer."""


class NvidiaCtk:
    """Generates the spec if the program is installed."""

    def __init__(self, program: str, timeout_seconds: float, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        """Args: program: a path, or a name to search on PATH."""
        self._program = program
        self._timeout_seconds = timeout_seconds
        self._monotonic = monotonic
        self._made_at = 0.0
        self._spec: HostSpec | None = None
        self._failed_at = -FAILED_SECONDS
        self._failure = ""
        self._stuck: subprocess.Popen[bytes] | None = None
        """A program that was killed and has not ended yet."""

    def host_spec(self, wanted: Collection[str] = ()) -> HostSpec | None:
        """Return the spec, including these devices if the driver knows them; None if the program is not installed.

        Raises: StorageError if the program fails or does not end in time.
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
        code, printed, messages = self._run(command, what)
        if code != 0:
            raise StorageError(f"{what} ended with {code}: {_last_line(messages)}")
        try:
            document = msgspec.json.decode(printed)
            if not is_host_spec(document):
                raise StorageError(f"{what} printed no CDI spec of NVIDIA GPUs: {document!r:.80}")
            return parse_host_spec(document, f"the output of {what}")
        except (msgspec.MsgspecError, UnicodeDecodeError, HostSpecError) as exc:
            raise StorageError(f"{what} printed no CDI spec: {exc}") from exc

    def _run(self, command: Sequence[str], what: str) -> tuple[int, bytes, bytes]:
        """Return the program's exit code, standard output and standard error.

        Raises: StorageError if the program cannot be started, or at the latest after the timeout.
        """
        if self._stuck is not None and self._stuck.poll() is None:
            raise StorageError(f"{what}: process {self._stuck.pid} of an earlier call was killed but has not ended: it hangs in the driver")
        try:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        except OSError as exc:
            raise StorageError(f"{what}: {exc.strerror}") from exc
        try:
            printed, messages = process.communicate(timeout=self._timeout_seconds)
        except subprocess.TimeoutExpired as exc:
            self._stuck = _end(process)
            raise StorageError(f"{what} did not end within {self._timeout_seconds:g} s") from exc
        return process.returncode, printed, messages


def _end(process: subprocess.Popen[bytes]) -> subprocess.Popen[bytes] | None:
    """Kill a program; return it if it does not end soon. Unlike leaving ``Popen`` as a context, this waits for a limited time."""
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
    return lines[-1] if lines else "without a message"
