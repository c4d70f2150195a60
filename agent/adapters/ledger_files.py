"""The ledger on disk: ``<stateDir>/ledger/<grant id>.json``, one durable file per grant.

A row that cannot be read is set aside in ``quarantine/`` and reported, never a reason not to start: the other containers of the node
must not wait for a disk error of one.
"""

from collections.abc import Sequence
from pathlib import Path

from agent.adapters.durable import (
    list_directory,
    make_directory,
    names_in,
    remove_file,
    remove_temporaries,
    sync_directory,
    write_whole,
)
from agent.adapters.unchanged import Unchanged
from agent.core.ledger import GRANT_ROWS, Grant
from agent.errors import StorageError
from agent.ports import LoadedGrants

_SUFFIX = ".json"


class LedgerFiles:
    """Implements ``ports.GrantStore``."""

    def __init__(self, directory: Path) -> None:
        self._directory = make_directory(directory, 0o700)
        self._rows = Unchanged(lambda path: _read_row(Path(path)))

    def load(self) -> LoadedGrants:
        """See ``ports.GrantStore``."""
        remove_temporaries(self._directory)
        grants, quarantined = [], []
        for path in list_directory(self._directory):
            if path.suffix != _SUFFIX:
                continue
            try:
                grants.append(_read_row(path))
            except (StorageError, OSError) as exc:
                quarantined.append(f"{self._set_aside(path)}: {exc}")
        return LoadedGrants(tuple(grants), tuple(quarantined))

    def write(self, grant: Grant) -> None:
        """See ``ports.GrantStore``."""
        write_whole(self._path(grant.grant_id), GRANT_ROWS.encode(grant), mode=0o600, durable=True)

    def read(self, grant_id: str) -> Grant | None:
        """See ``ports.GrantStore``."""
        try:
            return self._rows.of(f"{self._directory}/{grant_id}{_SUFFIX}")
        except (StorageError, OSError):
            return None

    def ids(self) -> Sequence[str]:
        """See ``ports.GrantStore``."""
        return [name.removesuffix(_SUFFIX) for name in names_in(self._directory) if name.endswith(_SUFFIX)]

    def remove(self, grant_id: str) -> None:
        """See ``ports.GrantStore``."""
        path = self._path(grant_id)
        self._rows.forget(str(path))
        if path.exists():
            remove_file(path)
            sync_directory(self._directory)

    def _path(self, grant_id: str) -> Path:
        return self._directory / f"{grant_id}{_SUFFIX}"

    def _set_aside(self, path: Path) -> str:
        """Move a row out of the way where the disk lets it go; return where it is."""
        target = self._directory / "quarantine" / path.name
        number = 0
        while target.exists():
            number += 1
            target = target.with_name(f"{path.name}.{number}")
        try:
            make_directory(target.parent, 0o700)
            path.replace(target)
        except (StorageError, OSError) as exc:
            return f"{path}, which cannot be set aside ({exc})"
        return str(target)


def _read_row(path: Path) -> Grant:
    grant = GRANT_ROWS.decode(path.read_bytes())
    if grant.grant_id != path.stem:
        raise StorageError(f"the row is for grant {grant.grant_id}")
    return grant
