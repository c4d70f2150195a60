"""The ledger on disk: ``<stateDir>/ledger/<grant id>.json``, one durable file per grant.

A row that cannot be read is set aside in ``quarantine/`` and reported, never a reason not to start: the other containers of the node
must not wait for a disk error of one.
"""

from collections.abc import Sequence
from pathlib import Path

from agent.adapters.durable import list_directory, make_directory, remove_file, remove_temporaries, sync_directory, write_whole
from agent.core.ledger import Grant, decode_row, encode_row
from agent.errors import StorageError
from agent.ports import LoadedGrants


class LedgerFiles:
    """Implements ``ports.GrantStore``."""

    def __init__(self, directory: Path) -> None:
        self._directory = make_directory(directory, 0o700)

    def load(self) -> LoadedGrants:
        """See ``ports.GrantStore``."""
        remove_temporaries(self._directory)
        grants, quarantined = [], []
        for path in list_directory(self._directory):
            if path.suffix != ".json":
                continue
            try:
                grants.append(_read_row(path))
            except (StorageError, OSError) as exc:
                quarantined.append(f"{self._set_aside(path)}: {exc}")
        return LoadedGrants(tuple(grants), tuple(quarantined))

    def write(self, grant: Grant) -> None:
        """See ``ports.GrantStore``."""
        write_whole(self._path(grant.grant_id), encode_row(grant), mode=0o600, durable=True)

    def ids(self) -> Sequence[str]:
        """See ``ports.GrantStore``."""
        return [path.stem for path in list_directory(self._directory) if path.suffix == ".json"]

    def remove(self, grant_id: str) -> None:
        """See ``ports.GrantStore``."""
        path = self._path(grant_id)
        if path.exists():
            remove_file(path)
            sync_directory(self._directory)

    def _path(self, grant_id: str) -> Path:
        return self._directory / f"{grant_id}.json"

    def _set_aside(self, path: Path) -> Path:
        quarantine = make_directory(self._directory / "quarantine", 0o700)
        target = quarantine / path.name
        number = 0
        while target.exists():
            number += 1
            target = quarantine / f"{path.name}.{number}"
        try:
            path.replace(target)
        except OSError as exc:
            raise StorageError(f"setting {path} aside: {exc.strerror}") from exc
        return target


def _read_row(path: Path) -> Grant:
    grant = decode_row(path.read_bytes())
    if grant.grant_id != path.stem:
        raise StorageError(f"the row is for grant {grant.grant_id}")
    return grant
