"""The records of MIG instances the agent made: ``<stateDir>/mig/<place>.json``, one durable file per instance."""

import logging
from collections.abc import Sequence
from pathlib import Path

from agent.adapters.durable import list_directory, make_directory, remove_file, remove_temporaries, sync_directory, write_whole
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
                # without its record the instance counts as somebody's layout: it is offered as it is, and never removed
                damaged = path.with_suffix(".damaged")
                logger.error("a MIG record is damaged and set aside as %s: %s", damaged, exc)  # noqa: TRY400 - the sentence says it all
                try:
                    path.replace(damaged)
                except OSError as failure:
                    logger.warning("it stays where it is: %s", failure)
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
    record = RECORD_ROWS.decode(path.read_bytes())
    if f"{record.place.replace('/', '_')}{_SUFFIX}" != path.name:
        raise StorageError(f"the record is for {record.place}")
    return record
