"""The file in which GPU health outlives the agent's process."""

from collections.abc import Mapping
from pathlib import Path

from agent.adapters.durable import write_whole
from agent.core.health import GpuHealth, HealthTable
from agent.core.health_record import decode_health, encode_health
from agent.errors import StorageError


class HealthFile:
    """Implements ``ports.HealthStore``."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self) -> HealthTable:
        """See ``ports.HealthStore``."""
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            return HealthTable()
        except OSError as exc:
            raise StorageError(f"reading {self._path}: {exc.strerror}") from exc
        return decode_health(content)

    def save(self, gpus: Mapping[str, GpuHealth]) -> None:
        """See ``ports.HealthStore``."""
        write_whole(self._path, encode_health(gpus), mode=0o600, durable=False)
