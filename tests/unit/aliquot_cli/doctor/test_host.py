# SPDX-License-Identifier: Apache-2.0
import errno
import os

import pytest

from aliquot_cli.doctor.host import Host, UnreadableError
from tests.unit.aliquot_cli.doctor.roots import Root


@pytest.fixture
def root():
    with Root() as made:
        yield made


def test_absolute_links_stay_below_the_root(root):
    root.write("/run/cdi/a.json", "inside")
    root.at("/var").mkdir()
    root.at("/var/run").symlink_to("/run")
    root.write("/etc/real", "x")
    root.at("/etc/link").symlink_to("../etc/real")
    host = Host(root.base)
    assert host.path("/var/run/cdi/a.json") == root.at("/run/cdi/a.json")
    assert host.text("/var/run/cdi/a.json") == "inside"
    assert host.text("/etc/link") == "x"


def test_links_never_leave_the_root(root):
    root.at("/out").symlink_to("../../../../../../etc/passwd")
    assert Host(root.base).text("/out") is None


def test_circular_links_are_reported_as_such(root):
    root.at("/a").symlink_to("b")
    root.at("/b").symlink_to("a")
    with pytest.raises(UnreadableError, match="too many links"):
        Host(root.base).text("/a")


def test_missing_file_is_none_and_unreadable_file_is_reported(root):
    host = Host(root.base)
    assert host.text("/nothing/here") is None
    assert host.names("/nothing") == []
    root.at("/directory").mkdir()
    with pytest.raises(UnreadableError, match="/directory"):
        host.text("/directory")


def test_socket_answers_only_while_a_process_listens(root):
    root.listen("/run/live.sock").listen("/run/dead.sock", alive=False).write("/run/file")
    host = Host(root.base)
    assert [host.is_socket(f"/run/{name}") for name in ("live.sock", "dead.sock", "file")] == [True, True, False]
    assert [host.answers(f"/run/{name}") for name in ("live.sock", "dead.sock", "none.sock")] == [True, False, False]


def test_socket_path_may_exceed_address_length(root):
    deep = "/".join("directory" for _ in range(20))
    root.at(deep).mkdir(parents=True)
    here = os.getcwd()  # noqa: PTH109
    os.chdir(root.at(deep))
    try:
        import socket

        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind("s")
            listener.listen()
            assert Host(root.base).answers(f"/{deep}/s")
    finally:
        os.chdir(here)


def test_a_label_of_selinux_is_read_by_its_type(root, monkeypatch):
    root.write("/run/x")
    host = Host(root.base)
    monkeypatch.setattr(os, "getxattr", lambda _path, _name: b"system_u:object_r:container_file_t:s0\0")
    assert host.selinux_type("/run/x") == "container_file_t"

    def refuse(number):
        def getxattr(_path, _name):
            raise OSError(number, os.strerror(number))

        return getxattr

    for number in (errno.ENODATA, errno.ENOTSUP, errno.ENOENT):
        monkeypatch.setattr(os, "getxattr", refuse(number))
        assert host.selinux_type("/run/x") is None
    monkeypatch.setattr(os, "getxattr", refuse(errno.EACCES))
    with pytest.raises(UnreadableError, match="/run/x"):
        host.selinux_type("/run/x")
