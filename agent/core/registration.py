# SPDX-License-Identifier: Apache-2.0
"""Decides when a plugin must serve and register again.

A starting kubelet removes the sockets in its plugin directory and creates a new ``kubelet.sock``; it remembers no plugin. So two files show
the state: our socket must still be the one we made, and ``kubelet.sock`` must be the one we registered with. There is a third sign: kubelet
opens ListAndWatch during the registration and keeps it open while it knows the plugin. A stream that ended and was not opened again means
that kubelet no longer knows the plugin.
"""

from dataclasses import dataclass
from enum import Enum, auto

STREAM_GRACE_SECONDS = 2.0
"""How long kubelet may take to open ListAndWatch again before the agent registers again."""


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """The file behind a path at a moment. The change time distinguishes a reused inode number from the old file."""

    device: int
    inode: int
    changed_ns: int


class Step(Enum):
    """What the registrar does next."""

    NOTHING = auto()
    SERVE = auto()
    """Listen on a fresh socket."""
    REGISTER = auto()


@dataclass(frozen=True, slots=True)
class PluginState:
    """What one plugin has done so far."""

    own_socket: FileIdentity | None = None
    """The socket it listens on; None before it does."""
    registered_with: FileIdentity | None = None
    """The ``kubelet.sock`` of its last successful registration."""
    stream_lost_at: float | None = None
    """Monotonic time since which no ListAndWatch stream is open, counted from the registration at the earliest."""
    forgotten: bool = False
    """Whether the node's status has no allocatable amount of the resource although the stream is open."""


@dataclass(frozen=True, slots=True)
class SocketsSeen:
    """The current sockets in the plugin directory."""

    own: FileIdentity | None
    kubelet: FileIdentity | None


def next_step(state: PluginState, seen: SocketsSeen, now: float) -> Step:
    """Return the next step; ``now`` is monotonic time in seconds."""
    if state.own_socket is None or seen.own != state.own_socket:
        return Step.SERVE
    if seen.kubelet is None:
        return Step.NOTHING
    if state.registered_with != seen.kubelet or state.forgotten:
        return Step.REGISTER
    if state.stream_lost_at is not None and now - state.stream_lost_at >= STREAM_GRACE_SECONDS:
        return Step.REGISTER
    return Step.NOTHING
