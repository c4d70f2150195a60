"""The sockets of servers that listen on every address of the machine, and how their addresses are written.

Clusters are IPv4-only, IPv6-only or both, and kubelet probes a pod at its first address. ``0.0.0.0`` in a setting therefore means every
address of either family, as ``[::]`` does. It is one socket for both: asyncio alone would take ``[::]`` for IPv6 only.
"""

import errno
import socket
from typing import Final

WILDCARDS: Final = frozenset({"", "0.0.0.0", "::"})  # noqa: S104 - the names of every address
_NO_IPV6: Final = frozenset({errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL})
"""What a kernel without IPv6 says: it has no such sockets, or no such addresses."""


def listening_socket(host: str, port: int, backlog: int) -> socket.socket:
    """Listen on an address, on both families where it is a wildcard and the kernel has IPv6. Raises OSError."""
    if host not in WILDCARDS:
        return _listen(socket.AF_INET6 if ":" in host else socket.AF_INET, host, port, backlog)
    try:
        return _listen(socket.AF_INET6, "::", port, backlog)
    except OSError as exc:
        if exc.errno not in _NO_IPV6:
            raise
    return _listen(socket.AF_INET, "", port, backlog)


def listening_address(host: str, listening: tuple[str, int]) -> str:
    """Write an address that is listened on as ``host:port``; a wildcard as the setting has it.

    Args:    host: of the setting. listening: what the socket says, of which the port counts where the setting chose none.
    """
    bound, port = listening
    if bound == "::" and host != "::":
        return f"0.0.0.0:{port}"
    return f"[{bound}]:{port}" if ":" in bound else f"{bound}:{port}"


def peer_address(address: str) -> str:
    """Write a client's address in its own family: one of IPv4 appears as ``::ffff:10.0.0.1`` to a socket for both."""
    return address.removeprefix("::ffff:")


def _listen(family: socket.AddressFamily, host: str, port: int, backlog: int) -> socket.socket:
    listening = socket.socket(family)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if host == "::":
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # whatever net.ipv6.bindv6only says
        listening.bind((host, port))
        listening.listen(backlog)
    except OSError:
        listening.close()
        raise
    return listening
