# SPDX-License-Identifier: Apache-2.0
"""Every file that the agent reads, and everything that may be in its place: no reader waits, and each failure has a sentence."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from agent.adapters.cdi_files import CdiDirectory
from agent.adapters.container_files import GrantFiles
from agent.adapters.health_file import HealthFile
from agent.adapters.kubelet_checkpoint import FILE_NAME, KubeletCheckpointFile
from agent.adapters.ledger_files import LedgerFiles
from agent.adapters.mig_files import MigRecordFiles
from agent.adapters.mps_files import MpsDaemonFiles
from agent.adapters.node_files import PageFile, RowFile, load_secret
from agent.adapters.regular_files import read_regular
from agent.adapters.shim_store import install_shim
from agent.core.cdi import SHIM_LIBRARIES, file_name
from agent.core.health import HealthTable
from agent.core.injection import VERSION_ROWS, NodeVersions
from agent.core.limits import FailPolicy, limits_of
from agent.core.mps_records import DaemonRequest, file_of
from agent.core.node_pages import PRIORITY
from agent.errors import ShimError, StorageError
from tests.fakes.damage import DAMAGES, damage
from tests.fakes.leases import REASON, lease
from tests.unit.agent.builders import grant

ONE = grant(frozenset(("GPU-0::0",)))


@dataclass(frozen=True)
class Reader:
    """A file of the agent. ``read`` returns what the agent does with a damaged one."""

    path: str
    make: Callable[[Path], object]
    read: Callable[[Path], object]


def install(base: Path) -> object:
    source = base / "source"
    source.mkdir(exist_ok=True)
    for name in SHIM_LIBRARIES:
        (source / name).write_bytes(name.encode())
    return install_shim(source, base / "shim")


def installed_file(base: Path) -> Path:
    (directory,) = [one for one in (base / "shim").iterdir() if len(one.name) == 64]
    return directory / SHIM_LIBRARIES[0]


def prepare(base: Path) -> None:
    GrantFiles(base / "containers").prepare(ONE, limits_of(ONE, FailPolicy.CLOSED))


def read_container(base: Path) -> object:
    files = GrantFiles(base / "containers")
    return files.copies(), files.damaged_copies(), files.limits(ONE.grant_id), files.region(ONE.grant_id)


def cdi(base: Path) -> CdiDirectory:
    (base / "kernel").mkdir(exist_ok=True)
    return CdiDirectory(base / "cdi", base / "etc", devices=base / "kernel", capabilities=base / "kernel")


def make_mig_record(base: Path) -> None:
    MigRecordFiles(base / "mig")
    (base / "mig/x.json").touch()


def make_host_spec(base: Path) -> None:
    (base / "etc").mkdir()
    (base / "etc/nvidia.json").touch()


CONTAINER = f"containers/{ONE.grant_id}"
READERS = {
    "ledger row": Reader(
        f"ledger/{ONE.grant_id}.json",
        lambda base: LedgerFiles(base / "ledger").write([ONE]),
        lambda base: LedgerFiles(base / "ledger").load(),
    ),
    "copy of a row": Reader(f"{CONTAINER}/grant.json", prepare, read_container),
    "limits": Reader(f"{CONTAINER}/limits", prepare, read_container),
    "region": Reader(f"{CONTAINER}/region", prepare, read_container),
    "health": Reader("health", lambda base: HealthFile(base / "health").save({}), lambda base: HealthFile(base / "health").load()),
    "versions": Reader(
        "versions",
        lambda base: RowFile(base / "versions", VERSION_ROWS, NodeVersions()).save(NodeVersions()),
        lambda base: RowFile(base / "versions", VERSION_ROWS, NodeVersions()).load(),
    ),
    "secret": Reader("secret", lambda base: load_secret(base / "secret"), lambda base: load_secret(base / "secret")),
    "MIG record": Reader(
        "mig/x.json",
        make_mig_record,
        lambda base: MigRecordFiles(base / "mig").load(),
    ),
    "MPS request": Reader(
        f"mps/wanted/{file_of('GPU-0')}",
        lambda base: MpsDaemonFiles(base / "mps").want(DaemonRequest("GPU-0")),
        lambda base: MpsDaemonFiles(base / "mps").load(),
    ),
    "checkpoint of kubelet": Reader(
        FILE_NAME, lambda base: (base / FILE_NAME).touch(), lambda base: KubeletCheckpointFile(base).remembered()
    ),
    "CDI spec": Reader(
        f"cdi/{file_name(ONE.grant_id)}",
        lambda base: cdi(base).write(ONE.grant_id, {}),
        lambda base: (cdi(base).digest(ONE.grant_id), cdi(base).total_bytes(), cdi(base).ids()),
    ),
    "CDI spec of the host": Reader("etc/nvidia.json", make_host_spec, lambda base: cdi(base).host_spec()),
    "shared page": Reader("page", lambda base: PageFile(base, PRIORITY).make(), lambda base: PageFile(base, PRIORITY).repair()),
}


@pytest.mark.timeout(10)
@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("name", READERS)
def test_reader_neither_waits_nor_crashes(tmp_path, name, how):
    reader = READERS[name]
    reader.make(tmp_path)
    damage(tmp_path / reader.path, how)
    try:
        reader.read(tmp_path)
    except StorageError as exc:
        assert str(tmp_path) in str(exc)  # noqa: PT017 - whether it fails depends on the reader


@pytest.mark.timeout(10)
@pytest.mark.parametrize("how", DAMAGES)
def test_damaged_file_of_the_shim_is_installed_again(tmp_path, how):
    install(tmp_path)
    damage(installed_file(tmp_path), how)
    assert install(tmp_path) == installed_file(tmp_path).parent
    assert installed_file(tmp_path).read_bytes() == SHIM_LIBRARIES[0].encode()


@pytest.mark.timeout(10)
@pytest.mark.parametrize("how", DAMAGES)
def test_whatever_is_in_place_of_the_shims_directory_is_set_aside(tmp_path, how):
    install(tmp_path)
    damage(installed_file(tmp_path).parent, how)
    install(tmp_path)
    assert installed_file(tmp_path).read_bytes() == SHIM_LIBRARIES[0].encode()


@pytest.mark.timeout(10)
@pytest.mark.parametrize("how", ["pipe", "directory", "missing"])
def test_unreadable_source_of_the_shim_is_named(tmp_path, how):
    install(tmp_path)
    damage(tmp_path / "source" / SHIM_LIBRARIES[0], how)
    with pytest.raises(ShimError, match=f"{SHIM_LIBRARIES[0]}.*build it with make"):
        install_shim(tmp_path / "source", tmp_path / "other")


@pytest.mark.parametrize(
    "how", [how for how in DAMAGES if how not in ("missing", "empty", "nested", "nested-row", "wrong-types", "not-text")]
)
def test_error_says_what_was_found(tmp_path, how):
    path = tmp_path / "file"
    path.touch()
    damage(path, how)
    words = {"pipe": "a pipe", "directory": "a directory", "huge": "found 1099511627776"}.get(how, "a symbolic link")
    with pytest.raises(StorageError, match=words):
        read_regular(path)


def test_lease_of_another_program_is_not_waited_for(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"content")
    with lease(path, "write") as given:
        if not given:
            pytest.skip(REASON)
        with pytest.raises(StorageError, match="a program holds a lease on it"):
            read_regular(path)
    assert read_regular(path) == b"content"


def test_empty_health_table_is_what_no_file_means(tmp_path):
    assert HealthFile(tmp_path / "none").load() == HealthTable()
