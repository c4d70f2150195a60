# SPDX-License-Identifier: Apache-2.0
"""The file that keeps GPU health across restarts of the agent."""

from collections.abc import Mapping
from pathlib import Path

from agent.adapters.durable import write_whole
from agent.adapters.regular_files import decoded, read_regular
from agent.core.health import GpuHealth, HealthTable
from agent.core.health_record import decode_health, encode_health


class HealthFile:
    """Implements ``ports.HealthStore``."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self) -> HealthTable:
        """See ``ports.HealthStore``."""
        try:
            content = read_regular(self._path)
        except FileNotFoundError:
            return HealthTable()
        return decoded(decode_health, content, self._path)

    def save(self, gpus: Mapping[str, GpuHealth]) -> None:
        """See ``ports.HealthStore``."""
        write_whole(self._path, encode_health(gpus), mode=0o600, durable=False)
