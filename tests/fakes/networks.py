# SPDX-License-Identifier: Apache-2.0
"""Kernels with and without IPv6, for servers that listen on every address."""

import errno
import socket

import pytest


class SocketWithoutIpv6(socket.socket):
    """Simulate a kernel with ``ipv6.disable=1``."""

    def __init__(self, family=-1, *rest, **options):
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        super().__init__(family, *rest, **options)


class SocketWithoutIpv6Addresses(socket.socket):
    """Simulate a kernel with IPv6 and without an IPv6 address."""

    def bind(self, address):
        if self.family == socket.AF_INET6:
            raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")
        super().bind(address)


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as one:
            one.bind(("::1", 0))
    except OSError:
        return False
    return True


WITHOUT_IPV6 = [pytest.param(SocketWithoutIpv6, id="no family"), pytest.param(SocketWithoutIpv6Addresses, id="no address")]
needs_ipv6 = pytest.mark.skipif(not _has_ipv6(), reason="the kernel has no IPv6 address ::1")
LOOPBACKS = ["127.0.0.1", pytest.param("::1", marks=needs_ipv6)]
