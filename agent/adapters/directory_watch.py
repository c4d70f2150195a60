# SPDX-License-Identifier: Apache-2.0
"""Notifies when files are created, removed or replaced in a few directories, by inotify(7).

Containers have mounted some of these files, and open and write them. That is no change here, so that no tenant can keep the agent busy. If
the kernel has no more watches, there are no notifications, and the agent notices changes at its next periodic check.

The start of a container changes a dozen files. So the first change is reported at once, and those that follow it are reported together.
"""

import asyncio
import ctypes
import logging
import os
import struct
from collections.abc import Callable, Iterable
from pathlib import Path

logger = logging.getLogger(__name__)

PACE_SECONDS = 0.25
"""The least time between two notifications."""

_EVENT = struct.Struct("iIII")
"""wd, mask, cookie, and the length of the name that follows."""
_BUFFER_BYTES = 64 << 10
_MOVED_FROM, _MOVED_TO, _CREATE, _DELETE = 0x40, 0x80, 0x100, 0x200
_CLOSE_WRITE = 0x8
_ONLY_DIRECTORIES = 0x01000000
_IGNORED, _IS_DIRECTORY = 0x8000, 0x40000000
_COMING_AND_GOING = _MOVED_FROM | _MOVED_TO | _CREATE | _DELETE


class DirectoryWatch:
    """Implements ``ports.FileChanges``."""

    def __init__(self, flat: Iterable[Path], nested: Path, pace_seconds: float = PACE_SECONDS) -> None:
        """Prepare; watching begins with ``start``.

        Args: flat: directories in which a file written in place counts as changed, too.
              nested: a directory with subdirectories that are watched, each after its creation.
              pace_seconds: the least time between two notifications.
        """
        self._flat = tuple(flat)
        self._nested = nested
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._pace_seconds = pace_seconds
        self._descriptor: int | None = None
        self._rest: asyncio.TimerHandle | None = None
        """The timer after which events are read again."""
        self._paths: dict[int, Path] = {}
        self._trouble = ""
        self._notify: Callable[[], None] = _ignore

    def start(self, notify: Callable[[], None]) -> None:
        """See ``ports.FileChanges``."""
        descriptor = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if descriptor < 0:
            self._complain("inotify_init1", "fs.inotify.max_user_instances")
            return
        self._descriptor, self._notify = descriptor, notify
        self.forget()
        self._listen()

    def forget(self) -> None:
        """See ``ports.FileChanges``."""
        if self._descriptor is None:
            return
        for path in self._flat:
            self._watch(path, _COMING_AND_GOING | _CLOSE_WRITE)
        self._watch_nested()
        self._take(self._descriptor)

    def close(self) -> None:
        """See ``ports.FileChanges``."""
        if self._descriptor is not None:
            asyncio.get_running_loop().remove_reader(self._descriptor)
            if self._rest is not None:
                self._rest.cancel()
            os.close(self._descriptor)
            self._descriptor = None

    def _listen(self) -> None:
        if self._descriptor is not None:
            asyncio.get_running_loop().add_reader(self._descriptor, self._read)

    def _read(self) -> None:
        if self._descriptor is None:
            return
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._descriptor)
        self._rest = loop.call_later(self._pace_seconds, self._listen)
        if self._take(self._descriptor):
            self._notify()

    def _take(self, descriptor: int) -> bool:
        """Read all pending events; return whether one of them is a change."""
        changed = False
        while True:
            try:
                events = os.read(descriptor, _BUFFER_BYTES)
            except BlockingIOError:
                return changed
            at = 0
            while at < len(events):
                watch, mask, _, length = _EVENT.unpack_from(events, at)
                name = events[at + _EVENT.size : at + _EVENT.size + length].rstrip(b"\0")
                at += _EVENT.size + length
                changed |= self._is_change(watch, mask, name)

    def _is_change(self, watch: int, mask: int, name: bytes) -> bool:
        if mask & _IGNORED:  # the directory is gone
            self._paths.pop(watch, None)
        elif mask & _IS_DIRECTORY and mask & (_CREATE | _MOVED_TO) and self._paths.get(watch) == self._nested:
            self._watch(self._nested / os.fsdecode(name), _COMING_AND_GOING)
        return not mask & _IGNORED

    def _watch_nested(self) -> None:
        if self._watch(self._nested, _COMING_AND_GOING):
            for entry in os.scandir(self._nested):
                if entry.is_dir(follow_symlinks=False):
                    self._watch(Path(entry.path), _COMING_AND_GOING)

    def _watch(self, path: Path, mask: int) -> bool:
        """Watch a directory; return whether it was not watched before. A directory that no longer exists is ignored."""
        watch = self._libc.inotify_add_watch(self._descriptor, os.fsencode(path), mask | _ONLY_DIRECTORIES)
        if watch < 0:
            if path.is_dir():
                self._complain(f"inotify_add_watch {path}", "fs.inotify.max_user_watches")
            return False
        new = watch not in self._paths
        self._paths[watch] = path
        return new

    def _complain(self, call: str, limit: str) -> None:
        reason = os.strerror(ctypes.get_errno())
        if reason != self._trouble:
            self._trouble = reason
            logger.warning(
                "changes of files are noticed only at the next periodic check: %s: %s; raise %s on the node", call, reason, limit
            )


def _ignore() -> None:
    """Do nothing."""
