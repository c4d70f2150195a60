# SPDX-License-Identifier: Apache-2.0
"""The records of the MIG instances that the agent made: ``<stateDir>/mig/<place>.json``, one durable file per instance."""

import logging
from collections.abc import Sequence
from pathlib import Path

from agent.adapters.durable import list_directory, make_directory, remove_file, remove_temporaries, sync_directory, write_whole
from agent.adapters.regular_files import read_regular
from agent.core.mig import RECORD_ROWS, MigRecord
from agent.errors import StorageError

logger = logging.getLogger(__name__)

_SUFFIX = ".json"


class MigRecordFiles:
    """Implements ``ports.MigRecords``."""

    def __init__(self, directory: Path) -> None:
        self._directory = make_directory(directory, 0o700)

    def load(self) -> Sequence[MigRecord]:
        """See ``ports.MigRecords``."""
        remove_temporaries(self._directory)
        records = []
        for path in list_directory(self._directory):
            if path.suffix != _SUFFIX:
                continue
            try:
                records.append(_read(path))
            except (StorageError, OSError) as exc:
                # without its record the instance counts as another owner's: the agent offers it unchanged and never removes it
                damaged = path.with_suffix(".damaged")
                logger.error("a MIG record is damaged and is moved to %s: %s", damaged, exc)  # noqa: TRY400 - the message is complete
                try:
                    path.replace(damaged)
                except OSError as failure:
                    logger.warning("the damaged MIG record cannot be moved: %s", failure)
        return records

    def write(self, record: MigRecord) -> None:
        """See ``ports.MigRecords``."""
        write_whole(self._path(record.place), RECORD_ROWS.encode(record), mode=0o600, durable=True)

    def remove(self, place: str) -> None:
        """See ``ports.MigRecords``."""
        remove_file(self._path(place))
        sync_directory(self._directory)

    def _path(self, place: str) -> Path:
        return self._directory / f"{place.replace('/', '_')}{_SUFFIX}"


def _read(path: Path) -> MigRecord:
    record = RECORD_ROWS.decode(read_regular(path))
    if f"{record.place.replace('/', '_')}{_SUFFIX}" != path.name:
        raise StorageError(f"want the record of the place in its name, found that of {record.place}")
    return record
