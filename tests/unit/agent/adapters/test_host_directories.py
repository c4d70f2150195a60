# SPDX-License-Identifier: Apache-2.0
import os
from pathlib import Path

import pytest

from agent.adapters.host_directories import HostDirectories


@pytest.fixture
def held(tmp_path):
    """A path that leads to a directory whatever becomes of its name, as a mount's does, and the directory."""
    directory = tmp_path / "device-plugins"
    directory.mkdir()
    descriptor = os.open(directory, os.O_RDONLY)
    yield Path(f"/proc/self/fd/{descriptor}"), directory
    os.close(descriptor)


def test_removed_directory_is_reported_even_when_recreated_in_place(held):
    path, directory = held
    directories = HostDirectories([path])
    assert directories.removed() == []
    (directory / "kubelet.sock").touch()
    assert directories.removed() == []
    (directory / "kubelet.sock").unlink()
    directory.rmdir()
    directory.mkdir()
    assert directories.removed() == [path]


def test_directory_that_is_no_mount_is_current_one(tmp_path):
    directory = tmp_path / "cdi"
    directory.mkdir()
    directories = HostDirectories([directory])
    directory.rmdir()
    assert directories.removed() == []
    directory.mkdir()
    assert directories.removed() == []


def test_missing_directory_or_one_without_links_is_left_out(held, tmp_path):
    path, directory = held
    directory.rmdir()
    assert HostDirectories([path, tmp_path / "none"]).removed() == []
