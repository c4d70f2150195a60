# SPDX-License-Identifier: Apache-2.0
"""Sockets of servers that listen on every address of the machine, and the text form of addresses.

Clusters are IPv4-only, IPv6-only or both, and kubelet probes a pod at its first address. So ``0.0.0.0`` in a setting means every address
of both families, like ``[::]``. One socket serves both: asyncio by itself would use ``[::]`` for IPv6 only.
"""

import errno
import socket
from typing import Final

WILDCARDS: Final = frozenset({"", "0.0.0.0", "::"})  # noqa: S104 - the names of every address
_NO_IPV6: Final = frozenset({errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL})
"""Errors of a kernel without IPv6: it has no such sockets, or no such addresses."""


def listening_socket(host: str, port: int, backlog: int) -> socket.socket:
    """Listen on an address; on both families if it is a wildcard and the kernel has IPv6. Raises OSError."""
    if host not in WILDCARDS:
        return _listen(socket.AF_INET6 if ":" in host else socket.AF_INET, host, port, backlog)
    try:
        return _listen(socket.AF_INET6, "::", port, backlog)
    except OSError as exc:
        if exc.errno not in _NO_IPV6:
            raise
    return _listen(socket.AF_INET, "", port, backlog)


def listening_address(host: str, listening: tuple[str, int]) -> str:
    """Return the address of a listening socket as ``host:port``; a wildcard in the family of the setting.

    Args:    host: from the setting. listening: address and port of the socket; the kernel chose the port if the setting has 0.
    """
    bound, port = listening
    if bound == "::" and host != "::":
        return f"0.0.0.0:{port}"
    return f"[{bound}]:{port}" if ":" in bound else f"{bound}:{port}"


def peer_address(address: str) -> str:
    """Return a client's address in its own family: a socket for both families shows 10.0.0.1 as ``::ffff:10.0.0.1``."""
    return address.removeprefix("::ffff:")


def _listen(family: socket.AddressFamily, host: str, port: int, backlog: int) -> socket.socket:
    listening = socket.socket(family)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if host == "::":
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # also if net.ipv6.bindv6only is set
        listening.bind((host, port))
        listening.listen(backlog)
    except OSError:
        listening.close()
        raise
    return listening
