# SPDX-License-Identifier: Apache-2.0
"""Access to the node's files and sockets below a root: ``/`` on the node itself, ``/host`` in a pod that mounts it there.

Links are resolved as on the node: an absolute link stays below the root. So a link never leads to the files of the container that runs the
doctor.

Invariant: read-only.
"""

import errno
import os
import socket
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_MOST_LINKS = 40
_ANSWER_SECONDS = 2.0


class UnreadableError(Exception):
    """A file or socket exists and cannot be read. The message has its name and the reason."""


@dataclass(frozen=True, slots=True)
class Host:
    """Reads files and sockets of a node."""

    root: Path

    @property
    def is_own(self) -> bool:
        """Whether the root is that of this process."""
        return self.root == Path("/")

    def path(self, name: str) -> Path:
        """Return the path of a node's file for this process. Links are resolved below the root."""
        done, rest, links = PurePosixPath("/"), list(PurePosixPath(name).parts[1:]), 0
        while rest:
            part = rest.pop(0)
            if part == "..":
                done = done.parent
                continue
            here = self._real(done / part)
            if not here.is_symlink():
                done /= part
                continue
            links += 1
            if links > _MOST_LINKS:
                raise UnreadableError(f"{name}: too many links")
            target = PurePosixPath(here.readlink())
            if target.is_absolute():
                done, target = PurePosixPath("/"), target.relative_to("/")
            rest = [*target.parts, *rest]
        return self._real(done)

    def exists(self, name: str) -> bool:
        """Whether the path exists."""
        return self._stat(name) is not None

    def mode(self, name: str) -> int | None:
        """Return the permission bits; None where the path does not exist."""
        found = self._stat(name)
        return None if found is None else stat.S_IMODE(found.st_mode)

    def selinux_type(self, name: str) -> str | None:
        """Return the type in a path's SELinux label; None where there is no such path or no label. Raises UnreadableError."""
        try:
            label = os.getxattr(self.path(name), "security.selinux")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as exc:
            if exc.errno in (errno.ENODATA, errno.ENOTSUP):
                return None
            raise UnreadableError(f"{name}: {exc.strerror}") from exc
        parts = label.rstrip(b"\0").decode(errors="replace").split(":")  # user:role:type:level
        return parts[2] if len(parts) > 2 else None

    def is_socket(self, name: str) -> bool:
        """Whether the path is a socket, with or without a listener."""
        found = self._stat(name)
        return found is not None and stat.S_ISSOCK(found.st_mode)

    def text(self, name: str) -> str | None:
        """Return a file's text, or None when there is no such file. Raises UnreadableError."""
        try:
            return self.path(name).read_text(errors="replace")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as exc:
            raise UnreadableError(f"{name}: {exc.strerror}") from exc

    def names(self, directory: str) -> Sequence[str]:
        """Return the sorted names in a directory; empty where it does not exist. Raises UnreadableError."""
        try:
            return sorted(os.listdir(self.path(directory)))  # noqa: PTH208 - names are wanted, not paths
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as exc:
            raise UnreadableError(f"{directory}: {exc.strerror}") from exc

    def answers(self, name: str) -> bool:
        """Whether a process listens on the socket. Connects without sending anything."""
        path = self.path(name)
        try:
            directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
                client.settimeout(_ANSWER_SECONDS)
                client.connect(f"/proc/self/fd/{directory}/{path.name}")  # a socket address is at most 107 bytes long
        except PermissionError as exc:
            raise UnreadableError(f"{name}: {exc.strerror}") from exc
        except OSError:
            return False
        finally:
            os.close(directory)
        return True

    def _stat(self, name: str) -> os.stat_result | None:
        try:
            return self.path(name).lstat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as exc:
            raise UnreadableError(f"{name}: {exc.strerror}") from exc

    def _real(self, name: PurePosixPath) -> Path:
        return self.root / name.relative_to("/")
