# SPDX-License-Identifier: Apache-2.0
"""The ledger on disk: ``<stateDir>/ledger/<grant id>.json``, one durable file per grant.

A row that cannot be read is moved to ``quarantine/`` and reported. The agent starts anyway: a disk error in one container's row must not
block the node's other containers.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from agent.adapters.durable import (
    list_directory,
    make_directory,
    names_in,
    remove_anything,
    remove_temporaries,
    sync_directory,
    write_together,
)
from agent.adapters.regular_files import read_regular
from agent.core.ledger import GRANT_ROWS, Grant
from agent.errors import StorageError
from agent.ports.grants import LoadedGrants
from aliquot.file_cache import FileCache

_SUFFIX = ".json"


class LedgerFiles:
    """Implements ``ports.GrantStore``."""

    def __init__(self, directory: Path) -> None:
        self._directory = make_directory(directory, 0o700)
        self._rows = FileCache(lambda path: _read_row(Path(path)))

    def load(self) -> LoadedGrants:
        """See ``ports.GrantStore``."""
        remove_temporaries(self._directory)
        grants, quarantined, damaged = [], [], set[str]()
        for path in list_directory(self._directory):
            if path.suffix != _SUFFIX:
                continue
            try:
                grants.append(_read_row(path))
            except (StorageError, OSError) as exc:
                quarantined.append(f"{self._set_aside(path)}: {exc}")
                damaged.add(path.stem)
        return LoadedGrants(tuple(grants), tuple(quarantined), frozenset(damaged))

    def write(self, grants: Sequence[Grant]) -> Mapping[str, StorageError]:
        """See ``ports.GrantStore``."""
        rows = {self._path(grant.grant_id): GRANT_ROWS.encode(grant) for grant in grants}
        return {path.stem: error for path, error in write_together(rows, mode=0o600).items()}

    def read(self, grant_id: str) -> Grant | None:
        """See ``ports.GrantStore``."""
        try:
            return self._rows.read(f"{self._directory}/{grant_id}{_SUFFIX}")
        except (StorageError, OSError):
            return None

    def ids(self) -> Sequence[str]:
        """See ``ports.GrantStore``."""
        return [name.removesuffix(_SUFFIX) for name in names_in(self._directory) if name.endswith(_SUFFIX)]

    def remove(self, grant_id: str) -> None:
        """See ``ports.GrantStore``."""
        path = self._path(grant_id)
        self._rows.forget(str(path))
        if remove_anything(path):
            sync_directory(self._directory)

    def _path(self, grant_id: str) -> Path:
        return self._directory / f"{grant_id}{_SUFFIX}"

    def _set_aside(self, path: Path) -> str:
        """Move a row to quarantine if the disk allows it; return its path."""
        target = self._directory / "quarantine" / path.name
        number = 0
        while target.exists():
            number += 1
            target = target.with_name(f"{path.name}.{number}")
        try:
            make_directory(target.parent, 0o700)
            path.replace(target)
        except (StorageError, OSError) as exc:
            return f"{path}, which cannot be moved to quarantine ({exc})"
        return str(target)


def _read_row(path: Path) -> Grant:
    grant = GRANT_ROWS.decode(read_regular(path))
    if grant.grant_id != path.stem:
        raise StorageError(f"want the row of grant {path.stem}, found that of grant {grant.grant_id}")
    return grant
