# SPDX-License-Identifier: Apache-2.0
import socket
from contextlib import closing

import pytest

from aliquot.process.listening import listening_address, listening_socket, peer_address
from tests.fakes.networks import LOOPBACKS, WITHOUT_IPV6, needs_ipv6


def is_reached(listening: socket.socket, host: str) -> bool:
    try:
        socket.create_connection((host, listening.getsockname()[1]), 5).close()
    except ConnectionRefusedError:
        return False
    return True


@pytest.mark.parametrize("loopback", LOOPBACKS)
@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_a_wildcard_is_every_address_of_both_families(host, loopback):
    with closing(listening_socket(host, 0, 5)) as listening:
        assert is_reached(listening, loopback)


@pytest.mark.parametrize("kernel", WITHOUT_IPV6)
@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_a_wildcard_is_every_ipv4_address_where_the_kernel_has_no_ipv6(monkeypatch, host, kernel):
    monkeypatch.setattr(socket, "socket", kernel)
    with closing(listening_socket(host, 0, 5)) as listening:
        assert is_reached(listening, "127.0.0.1")
        assert listening_address(host, listening.getsockname()[:2]) == f"0.0.0.0:{listening.getsockname()[1]}"


@needs_ipv6
@pytest.mark.parametrize(("host", "other"), [("127.0.0.1", "::1"), ("::1", "127.0.0.1")])
def test_a_loopback_address_is_that_one_alone(host, other):
    with closing(listening_socket(host, 0, 5)) as listening:
        assert is_reached(listening, host)
        assert not is_reached(listening, other)


def test_port_in_use_is_reported_and_not_tried_for_one_family():
    with closing(listening_socket("127.0.0.1", 0, 5)) as taken, pytest.raises(OSError, match="in use"):
        listening_socket("0.0.0.0", taken.getsockname()[1], 5)


def test_a_port_is_listened_on_again_right_after_its_connections():
    with closing(listening_socket("0.0.0.0", 0, 5)) as listening:
        port = listening.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port), 5)
        listening.accept()[0].close()  # the server's end closes first, and waits
        client.close()
    with closing(listening_socket("0.0.0.0", port, 5)) as again:
        assert is_reached(again, "127.0.0.1")


@pytest.mark.parametrize(
    ("host", "bound", "want"),
    [
        ("0.0.0.0", "::", "0.0.0.0:80"),
        ("", "::", "0.0.0.0:80"),
        ("::", "::", "[::]:80"),
        ("::1", "::1", "[::1]:80"),
        ("localhost", "127.0.0.1", "127.0.0.1:80"),
    ],
)
def test_an_address_is_written_in_the_family_of_its_setting(host, bound, want):
    assert listening_address(host, (bound, 80)) == want


@pytest.mark.parametrize(
    ("address", "want"), [("::ffff:10.0.0.1", "10.0.0.1"), ("10.0.0.1", "10.0.0.1"), ("fd00::1", "fd00::1"), ("::1", "::1"), ("", "")]
)
def test_a_client_has_the_address_of_its_own_family(address, want):
    assert peer_address(address) == want
