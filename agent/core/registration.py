"""When a plugin must serve and register again, from what is seen on the node.

A kubelet that starts wipes the sockets in its plugin directory and makes a new ``kubelet.sock``; it remembers no plugin. So two
files tell everything: our socket must still be the one we made, and ``kubelet.sock`` must be the one we registered with. As a third
sign, kubelet opens ListAndWatch while it registers us and holds it for as long as it knows us: a stream that has ended and has not come
back means that it no longer does.
"""

from dataclasses import dataclass
from enum import Enum, auto

STREAM_GRACE_SECONDS = 2.0
"""How long kubelet may take to open ListAndWatch anew before we register again."""


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """Which file a path named at a moment. The change time tells a reused inode number from the old file."""

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
    """The node's status says that kubelet offers nothing of the resource although the stream is open."""


@dataclass(frozen=True, slots=True)
class SocketsSeen:
    """What the plugin directory shows now."""

    own: FileIdentity | None
    kubelet: FileIdentity | None


def next_step(state: PluginState, seen: SocketsSeen, now: float) -> Step:
    """Decide; ``now`` is monotonic time in seconds."""
    if state.own_socket is None or seen.own != state.own_socket:
        return Step.SERVE
    if seen.kubelet is None:
        return Step.NOTHING
    if state.registered_with != seen.kubelet or state.forgotten:
        return Step.REGISTER
    if state.stream_lost_at is not None and now - state.stream_lost_at >= STREAM_GRACE_SECONDS:
        return Step.REGISTER
    return Step.NOTHING
