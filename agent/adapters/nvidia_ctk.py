"""The host's NVIDIA CDI spec as ``nvidia-ctk cdi generate`` makes it, for hosts on which nobody wrote one.

Generating takes some tenths of a second, so an answer serves until it is old or lacks a device that is asked for: the driver may have
been replaced meanwhile, and MIG instances come and go.
"""

import shutil
import subprocess
import time
from collections.abc import Callable, Collection

import msgspec

from agent.core.cdi import HostSpec, HostSpecError, is_host_spec, parse_host_spec
from agent.errors import StorageError

FRESH_SECONDS = 60.0


class NvidiaCtk:
    """Generates the spec where the program is."""

    def __init__(self, program: str, timeout_seconds: float, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        """Args: program: a path, or a name to look for on PATH."""
        self._program = program
        self._timeout_seconds = timeout_seconds
        self._monotonic = monotonic
        self._made_at = 0.0
        self._spec: HostSpec | None = None

    def host_spec(self, wanted: Collection[str] = ()) -> HostSpec | None:
        """Return the spec, with these devices unless the driver does not know them; None where there is no such program.

        Raises: StorageError when the program fails, or does not end in time.
        """
        program = shutil.which(self._program)
        if program is None:
            return None
        spec = self._spec
        if spec is None or self._monotonic() - self._made_at > FRESH_SECONDS or any(uuid not in spec.devices for uuid in wanted):
            self._spec = spec = self._generate(program)
            self._made_at = self._monotonic()
        return spec

    def _generate(self, program: str) -> HostSpec:
        command = [program, "cdi", "generate", "--format=json", "--device-name-strategy=uuid"]
        what = " ".join(command)
        try:
            done = subprocess.run(command, capture_output=True, timeout=self._timeout_seconds, check=False)
        except subprocess.TimeoutExpired as exc:
            raise StorageError(f"{what} has not ended within {self._timeout_seconds:g} s") from exc
        except OSError as exc:
            raise StorageError(f"{what}: {exc.strerror}") from exc
        if done.returncode != 0:
            raise StorageError(f"{what} ended with {done.returncode}: {_last_line(done.stderr)}")
        try:
            document = msgspec.json.decode(done.stdout)
            if not is_host_spec(document):
                raise StorageError(f"{what} printed no CDI spec of NVIDIA GPUs: {document!r:.80}")
            return parse_host_spec(document, f"the output of {what}")
        except (msgspec.DecodeError, HostSpecError) as exc:
            raise StorageError(f"{what} printed no CDI spec: {exc}") from exc


def _last_line(output: bytes) -> str:
    lines = output.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"
