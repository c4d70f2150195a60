"""The node's file system and sockets, below a root: ``/`` on the node itself, ``/host`` in a pod that mounts it there.

Links are followed as the node would follow them: an absolute link stays below the root, so that a mounted root is never mixed with the
files of the container that looks at it. Nothing is written.
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
    """Something is there and may not be read, or cannot; the text says what and why."""


@dataclass(frozen=True, slots=True)
class Host:
    """What can be read of a node."""

    root: Path

    @property
    def is_own(self) -> bool:
        """Whether the node is the one this process runs on."""
        return self.root == Path("/")

    def path(self, name: str) -> Path:
        """Return where a path of the node is for this process, all links followed below the root."""
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
        """Whether there is anything of that name."""
        return self._stat(name) is not None

    def mode(self, name: str) -> int | None:
        """Return the permission bits, or None."""
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
        """Whether it is a socket, alive or not."""
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
        """Return the names in a directory, sorted; none when there is no such directory. Raises UnreadableError."""
        try:
            return sorted(os.listdir(self.path(directory)))  # noqa: PTH208 - names are wanted, not paths
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as exc:
            raise UnreadableError(f"{directory}: {exc.strerror}") from exc

    def answers(self, name: str) -> bool:
        """Whether somebody listens on a socket. Connects and says nothing."""
        path = self.path(name)
        try:
            directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
                client.settimeout(_ANSWER_SECONDS)
                client.connect(f"/proc/self/fd/{directory}/{path.name}")  # a socket's name may not be long, its directory's may
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
