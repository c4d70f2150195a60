# SPDX-License-Identifier: Apache-2.0
"""The files the agent keeps: whole or not at all, durable where they must be, and never a reason not to start."""

import ctypes
import errno
import fcntl
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import pytest

from agent.adapters.cdi_files import CdiDirectory
from agent.adapters.container_files import GrantFiles
from agent.adapters.durable import TEMPORARY_SUFFIX, make_directory, remove_tree, write_whole
from agent.adapters.ledger_files import LedgerFiles
from agent.adapters.node_files import PageFile, boot_id, load_secret
from agent.adapters.shim_store import CONTAINERS, ShimStore, install_shim
from agent.adapters.spare_copies import MOST
from agent.core.cdi import SHIM_LIBRARIES, CapabilityNode, file_name
from agent.core.limits import FailPolicy, limits_of
from agent.core.node_pages import PRIORITY, TURNS
from agent.core.region_layout import (
    OWN_GEOMETRY,
    REGION_BYTES,
    REGION_BYTES_KEPT,
    SLOT_COUNT_KEPT,
    SLOT_HEADER,
    SLOT_LIVE,
    decode_limits,
    limits_update,
)
from agent.core.slow_regions import REST_MOST_SECONDS
from agent.errors import ShimError, StorageError
from tests.fakes.damage import DAMAGES, damage
from tests.fakes.leases import REASON, can_be_leased, lease
from tests.fakes.regions import empty_region, foreign_region
from tests.unit.agent.builders import grant, ids, pod, share
from tests.unit.agent.fakes import FakeClock

ONE = grant(ids("0:0"), share(0, 100), of=pod("a"))


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


class TestWriteWhole:
    def test_file_mode_is_independent_of_umask(self, tmp_path):
        write_whole(tmp_path / "f", b"x", mode=0o666, durable=True)
        assert mode(tmp_path / "f") == 0o666

    def test_directory_that_disk_refuses_is_storage_error(self, tmp_path, monkeypatch):
        store = LedgerFiles(tmp_path)
        assert store.write([ONE]) == {}

        def broken(descriptor):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(os, "fsync", broken)
        assert "Input/output error" in str(store.write([ONE])[ONE.grant_id])
        with pytest.raises(StorageError, match="Input/output error"):
            store.remove(ONE.grant_id)

    def test_failure_leaves_old_content_and_no_leftovers(self, tmp_path):
        (tmp_path / "f").mkdir()  # a directory cannot be replaced by a file
        with pytest.raises(StorageError, match="writing"):
            write_whole(tmp_path / "f", b"x", mode=0o600, durable=False)
        assert [path.name for path in tmp_path.iterdir()] == ["f"]


def test_correct_directory_is_not_changed(tmp_path, monkeypatch):
    def read_only(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    directory = make_directory(tmp_path / "state", 0o700)
    monkeypatch.setattr(Path, "chmod", read_only)
    assert make_directory(directory, 0o700) == directory
    with pytest.raises(StorageError, match=r"creating .*/state: Read-only file system"):
        make_directory(directory, 0o755)


class TestLedgerFiles:
    def test_immovable_files_do_not_stop_the_start(self, tmp_path, caplog):
        LedgerFiles(tmp_path).write([ONE])
        (tmp_path / "bad.json").write_bytes(b"torn")
        (tmp_path / "quarantine").write_bytes(b"")  # no directory can be made there
        (tmp_path / f".x.json.1.0{TEMPORARY_SUFFIX}").mkdir()
        loaded = LedgerFiles(tmp_path).load()
        assert loaded.grants == (ONE,)
        assert f"{tmp_path}/bad.json, which cannot be moved to quarantine" in loaded.quarantined[0]
        assert "a partly written file cannot be removed and stays" in caplog.text

    def test_rows_come_back(self, tmp_path):
        store = LedgerFiles(tmp_path)
        store.write([ONE])
        assert LedgerFiles(tmp_path).load().grants == (ONE,)
        assert store.ids() == [ONE.grant_id]

    @pytest.mark.parametrize("content", [b"", b"{", b"\x00" * 4096, b'{"version":1}', b'{"version":1,"sha256":"\xff"}'])
    def test_unreadable_row_is_quarantined_and_named(self, tmp_path, content):
        (tmp_path / "bad.json").write_bytes(content)
        store = LedgerFiles(tmp_path)
        store.write([ONE])
        loaded = store.load()
        assert loaded.grants == (ONE,)
        assert "bad.json" in loaded.quarantined[0]
        assert (tmp_path / "quarantine/bad.json").read_bytes() == content
        assert store.load().quarantined == ()

    def test_row_under_another_name_is_quarantined(self, tmp_path):
        store = LedgerFiles(tmp_path)
        store.write([ONE])
        (tmp_path / f"{ONE.grant_id}.json").rename(tmp_path / "other.json")
        assert "found that of grant" in store.load().quarantined[0]

    def test_a_second_bad_row_of_the_name_does_not_overwrite_the_first(self, tmp_path):
        store = LedgerFiles(tmp_path)
        for content in (b"1", b"2"):
            (tmp_path / "bad.json").write_bytes(content)
            store.load()
        assert {path.read_bytes() for path in (tmp_path / "quarantine").iterdir()} == {b"1", b"2"}

    def test_partly_written_files_are_removed(self, tmp_path):
        (tmp_path / f".x.json.1.0{TEMPORARY_SUFFIX}").write_bytes(b"half")
        assert LedgerFiles(tmp_path).load().quarantined == ()
        assert list(tmp_path.iterdir()) == []

    def test_removing_twice_is_no_error(self, tmp_path):
        store = LedgerFiles(tmp_path)
        store.write([ONE])
        store.remove(ONE.grant_id)
        store.remove(ONE.grant_id)
        assert store.ids() == []


class TestTreesOfOthers:
    def test_tree_of_any_depth_is_removed(self, tmp_path):
        top = tmp_path / "left"
        top.mkdir()
        (top / "file").write_bytes(b"x")
        deeper = os.open(top, os.O_RDONLY)
        for _ in range(3000):  # deeper than a path can name, and than Python calls itself
            os.mkdir("d", dir_fd=deeper)
            inside = os.open("d", os.O_RDONLY, dir_fd=deeper)
            os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=inside))
            os.close(deeper)
            deeper = inside
        os.close(deeper)
        remove_tree(top)
        assert list(tmp_path.iterdir()) == []

    def test_target_of_a_link_stays(self, tmp_path):
        (tmp_path / "ours").mkdir()
        (tmp_path / "ours/file").write_bytes(b"x")
        (tmp_path / "left/inner").mkdir(parents=True)
        (tmp_path / "left/inner/link").symlink_to(tmp_path / "ours")
        (tmp_path / "left/link").symlink_to(tmp_path / "ours")
        remove_tree(tmp_path / "left")
        assert [path.name for path in tmp_path.rglob("*")] == ["ours", "file"]

    def test_missing_tree_is_no_error(self, tmp_path):
        remove_tree(tmp_path / "left")
        (tmp_path / "link").symlink_to(tmp_path)
        remove_tree(tmp_path / "link")
        assert (tmp_path / "link").is_symlink()


HOLD_LEASE = """
import fcntl, os, signal, sys
signal.signal(signal.SIGIO, signal.SIG_IGN)
descriptor = os.open(sys.argv[1], os.O_RDONLY)
fcntl.fcntl(descriptor, fcntl.F_SETLEASE, int(sys.argv[2]))
print("held", flush=True)
sys.stdin.read()
"""
"""What a tenant that owns a file may do with it; a process that opens the file waits until the lease is broken, by default for 45 s."""


HOLD_MANY_LOCKS = """
import fcntl, os, struct, sys
descriptor, count, slots, stride, first = os.open(sys.argv[1], os.O_RDWR), *map(int, sys.argv[2:])
for index in range(slots):
    os.pwrite(descriptor, struct.pack("<II", 1, index + 1), first + index * stride)

def lock(kind, start, length):
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, struct.pack("@hhqqi0q", kind, 0, start, length, 0))

base = 1 << 30
lock(fcntl.F_WRLCK, base, 2 * count)
for hole in reversed(range(count)):  # each splits one lock in two; from behind, where the kernel finds the place soonest
    lock(fcntl.F_UNLCK, base + 2 * hole, 1)
print("held", flush=True)
sys.stdin.read()
"""
"""What a tenant may do to its region: locks without end beyond it, and every slot made to look taken."""


HOLD_SLOT = """
import fcntl, os, struct, sys
descriptor = os.open(sys.argv[1], os.O_RDWR)
os.pwrite(descriptor, bytes.fromhex(sys.argv[3]), int(sys.argv[2]))
fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, struct.pack("@hhqqi0q", fcntl.F_WRLCK, 0, int(sys.argv[2]), 1, 0))
print("held", flush=True)
sys.stdin.read()
"""


class SlotHolder:
    """A process that holds slot 3 of a region, as the shim does."""

    def __init__(self, region: Path) -> None:
        header = SLOT_HEADER.pack(SLOT_LIVE, 4711, 0, 0, 0).hex()
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLD_SLOT, region, str(OWN_GEOMETRY.slot(3)), header], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self.process.stdout.readline() == b"held\n"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


@contextmanager
def many_locks(region: Path) -> Iterator[None]:
    """While a tenant holds 50,000 locks on its region."""
    numbers = (50_000, OWN_GEOMETRY.slot_count, OWN_GEOMETRY.slot_stride, OWN_GEOMETRY.slot(0))
    with subprocess.Popen(
        [sys.executable, "-c", HOLD_MANY_LOCKS, region, *map(str, numbers)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as tenant:
        assert tenant.stdout.readline() == b"held\n"
        yield
        tenant.kill()


@pytest.fixture
def holder():
    holders = []

    def hold(region: Path) -> SlotHolder:
        holders.append(SlotHolder(region))
        return holders[-1]

    yield hold
    for one in holders:
        one.kill()


class TestGrantFiles:
    def limits(self, mib: int = 100):
        return limits_of(grant(ids("0:0"), share(0, mib)), FailPolicy.CLOSED)

    def test_limits_are_read_only_and_the_region_is_the_containers_to_write(self, tmp_path):
        files = GrantFiles(tmp_path)
        files.prepare(ONE, self.limits())
        limits, region = (Path(path) for path in files.paths(ONE.grant_id))
        assert mode(limits) == 0o444
        assert mode(region) == 0o666
        assert region.stat().st_size == REGION_BYTES
        assert region.read_bytes() == empty_region()
        assert region.stat().st_blocks * 512 < 64 << 10  # a hole, not half a megabyte of zeros per container
        assert mode(limits.parent) == 0o700
        assert decode_limits(limits.read_bytes()) == self.limits()

    def test_a_fresh_region_has_no_process(self, tmp_path):
        files = GrantFiles(tmp_path)
        files.prepare(ONE, self.limits())
        view = files.region(ONE.grant_id)
        assert (view.snapshot.slots, view.dead) == ((), ())

    def test_living_process_is_distinguished_from_killed_one(self, tmp_path, holder):
        files = GrantFiles(tmp_path)
        files.prepare(ONE, self.limits())
        process = holder(Path(files.paths(ONE.grant_id)[1]))
        view = files.region(ONE.grant_id)
        assert ([slot.pid for slot in view.snapshot.slots], view.dead) == ([4711], ())
        process.kill()
        assert files.region(ONE.grant_id).dead == (3,)

    def test_a_container_that_starts_again_gets_a_fresh_region(self, tmp_path, holder):
        files = GrantFiles(tmp_path)
        files.prepare(ONE, self.limits())
        holder(Path(files.paths(ONE.grant_id)[1])).kill()
        files.prepare(ONE, self.limits())
        assert files.region(ONE.grant_id).snapshot.slots == ()

    def test_files_that_a_process_has_mapped_stay_and_limits_change_in_place(self, tmp_path, holder):
        files = GrantFiles(tmp_path)
        files.prepare(ONE, self.limits())
        limits, region = (Path(path) for path in files.paths(ONE.grant_id))
        holder(region)
        before = (limits.stat().st_ino, region.stat().st_ino)
        files.prepare(ONE, self.limits(200))
        assert (limits.stat().st_ino, region.stat().st_ino) == before
        assert decode_limits(limits.read_bytes()) == self.limits(200)
        assert mode(limits) == 0o444

    def test_files_that_a_process_of_another_pod_has_mapped_stay_its_own(self, tmp_path, holder):
        files = GrantFiles(tmp_path)
        files.prepare(ONE, self.limits())
        limits, region = (Path(path) for path in files.paths(ONE.grant_id))
        holder(region)
        before = (limits.stat().st_ino, region.stat().st_ino)
        files.prepare(replace(ONE, pod_uid="uid-following"), self.limits(200))
        assert limits.stat().st_ino != before[0]
        assert region.stat().st_ino != before[1]
        assert files.region(ONE.grant_id).snapshot.slots == ()

    def test_mounted_files_stay_before_any_process_maps_them(self, tmp_path):
        files = GrantFiles(tmp_path)
        files.prepare(ONE, self.limits())
        limits, region = (Path(path) for path in files.paths(ONE.grant_id))
        before = (limits.stat().st_ino, region.stat().st_ino)
        files.prepare(ONE, self.limits(200), mounted=True)
        assert (limits.stat().st_ino, region.stat().st_ino) == before
        assert (decode_limits(limits.read_bytes()), mode(limits)) == (self.limits(200), 0o444)
        files.prepare(ONE, self.limits(200))  # it starts again
        assert limits.stat().st_ino != before[0]
        assert region.stat().st_ino != before[1]

    @pytest.mark.parametrize("lost", ["limits", "region"])
    def test_lost_mounted_file_is_recreated_and_the_other_stays(self, tmp_path, lost):
        files = GrantFiles(tmp_path)
        files.prepare(ONE, self.limits())
        limits, region = (Path(path) for path in files.paths(ONE.grant_id))
        stays = region if lost == "limits" else limits
        before = stays.stat().st_ino
        limits.with_name(lost).unlink()
        files.prepare(ONE, self.limits(), mounted=True)
        assert stays.stat().st_ino == before
        assert files.limits(ONE.grant_id) == self.limits()
        assert files.region(ONE.grant_id) is not None

    def test_files_without_recorded_owner_are_recreated(self, tmp_path, holder):
        files = GrantFiles(tmp_path)
        files.prepare(ONE, self.limits())
        region = Path(files.paths(ONE.grant_id)[1])
        holder(region)
        (region.parent / "grant.json").unlink()
        files.prepare(ONE, self.limits())
        assert files.region(ONE.grant_id).snapshot.slots == ()

    def test_limits_are_amended_in_place_and_only_when_they_differ(self, tmp_path):
        files = GrantFiles(tmp_path)
        files.prepare(ONE, self.limits())
        path = Path(files.paths(ONE.grant_id)[0])
        before = path.read_bytes()
        assert files.amend_limits(ONE.grant_id, lambda limits: limits) == self.limits()
        assert path.read_bytes() == before
        inode = path.stat().st_ino
        assert files.amend_limits(ONE.grant_id, lambda _: self.limits(50)) == self.limits(50)
        assert (path.stat().st_ino, mode(path)) == (inode, 0o444)
        assert files.limits(ONE.grant_id) == self.limits(50)

    @pytest.mark.parametrize("writes_done", [1, 2, 3])
    def test_limits_half_written_by_dead_writer_are_repaired(self, tmp_path, writes_done):
        files = GrantFiles(tmp_path)
        files.prepare(ONE, self.limits())
        path = Path(files.paths(ONE.grant_id)[0])
        path.chmod(0o644)
        with path.open("r+b") as file:
            for write in limits_update(self.limits(50), current=path.read_bytes())[:writes_done]:
                file.seek(write.offset)
                file.write(write.data)
        found = files.amend_limits(ONE.grant_id, lambda limits: limits)
        assert found == self.limits(100 if writes_done == 1 else 50)
        assert decode_limits(path.read_bytes()) == found

    def test_missing_limits_cannot_be_changed(self, tmp_path):
        files = GrantFiles(tmp_path)
        assert files.limits(ONE.grant_id) is None
        with pytest.raises(StorageError, match="updating"):
            files.amend_limits(ONE.grant_id, lambda limits: limits)

    def test_host_pids_go_into_their_slots(self, tmp_path, holder):
        files = GrantFiles(tmp_path)
        files.prepare(ONE, self.limits())
        holder(Path(files.paths(ONE.grant_id)[1]))
        files.store_host_pids(ONE.grant_id, {3: 99})
        (slot,) = files.region(ONE.grant_id).snapshot.slots
        assert (slot.pid, slot.host_pid) == (4711, 99)

    def test_gpu_time_is_read_without_the_slots(self, tmp_path):
        files = GrantFiles(tmp_path)
        files.prepare(ONE, self.limits())
        assert [counters.paid_ns for counters in files.compute(ONE.grant_id)] == [0] * 16
        Path(files.paths(ONE.grant_id)[1]).write_bytes(b"short")
        assert files.compute(ONE.grant_id) is None

    @pytest.mark.parametrize("content", [b"", b"\xff" * 10, b"\xff" * REGION_BYTES])
    def test_corrupted_region_counts_as_missing(self, tmp_path, content):
        files = GrantFiles(tmp_path)
        files.prepare(ONE, self.limits())
        Path(files.paths(ONE.grant_id)[1]).write_bytes(content)
        assert files.region(ONE.grant_id) is None
        files.prepare(ONE, self.limits())
        assert files.region(ONE.grant_id) is not None

    def test_a_region_that_its_tenant_grew_is_read_as_before_and_cut(self, tmp_path, holder):
        files = GrantFiles(tmp_path)
        files.prepare(ONE, self.limits())
        region = Path(files.paths(ONE.grant_id)[1])
        holder(region)
        assert files.cut_region(ONE.grant_id) == 0
        with region.open("r+b") as file:
            file.truncate(REGION_BYTES_KEPT + 100)
        assert files.region(ONE.grant_id).live
        assert files.cut_region(ONE.grant_id) == 100
        assert region.stat().st_size == REGION_BYTES_KEPT
        assert files.region(ONE.grant_id).live

    @pytest.mark.timeout(30)
    @pytest.mark.parametrize("position", [0, 1], ids=["limits", "region"])
    def test_tenant_lease_delays_no_reader(self, tmp_path, position):
        files = GrantFiles(tmp_path)
        files.prepare(ONE, self.limits())
        leased = files.paths(ONE.grant_id)[position]
        with subprocess.Popen(
            [sys.executable, "-c", HOLD_LEASE, leased, str(fcntl.F_WRLCK)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as tenant:
            assert tenant.stdout.readline() == b"held\n"
            amend = partial(files.amend_limits, ONE.grant_id, lambda limits: limits)
            look, write = ((files.limits, amend), (files.region, partial(files.store_host_pids, ONE.grant_id, {0: 1})))[position]
            assert look(ONE.grant_id) is None
            with pytest.raises(StorageError):
                write()
            tenant.kill()
        assert look(ONE.grant_id) is not None

    @pytest.mark.timeout(120)
    def test_region_with_endless_locks_is_read_briefly_then_skipped(self, tmp_path, monkeypatch, caplog):
        clock = FakeClock()
        files = GrantFiles(tmp_path, clock.monotonic)
        files.prepare(ONE, self.limits())
        region = Path(files.paths(ONE.grant_id)[1])
        probes, opens = [], []
        ask, really_open = fcntl.fcntl, os.open

        def noted_fcntl(*given):
            probes.append(given)
            return ask(*given)

        monkeypatch.setattr(fcntl, "fcntl", noted_fcntl)

        def noted_open(*given):
            opens.append(given)
            return really_open(*given)

        monkeypatch.setattr(os, "open", noted_open)
        with many_locks(region):
            assert files.region(ONE.grant_id) is None
            assert len(probes) < SLOT_COUNT_KEPT // 4
            assert f"container {ONE.container} hold so many locks on its usage region" in caplog.text
            assert [(record.pod, record.pod_uid) for record in caplog.records] == [("default/a", "uid-a")]
            opens.clear()
            assert files.region(ONE.grant_id) is None
            assert files.compute(ONE.grant_id) is None
            with pytest.raises(StorageError, match="not read for"):
                files.store_host_pids(ONE.grant_id, {0: 1})
            assert opens == []
            assert files.limits(ONE.grant_id) == self.limits()
        clock.seconds += REST_MOST_SECONDS
        assert len(files.region(ONE.grant_id).snapshot.slots) == OWN_GEOMETRY.slot_count
        assert files.compute(ONE.grant_id) is not None

    @pytest.mark.timeout(120)
    @pytest.mark.parametrize("removed", [False, True])
    def test_regions_after_skipped_one_are_still_read(self, tmp_path, removed):
        files = GrantFiles(tmp_path, FakeClock().monotonic)
        files.prepare(ONE, self.limits())
        with many_locks(Path(files.paths(ONE.grant_id)[1])):
            assert files.region(ONE.grant_id) is None
            if removed:
                files.remove(ONE.grant_id)
            files.prepare(replace(ONE, pod_uid="uid-following"), self.limits())
            assert files.region(ONE.grant_id).snapshot.slots == ()

    @pytest.mark.timeout(120)
    def test_container_replaced_during_slow_reading_is_not_blamed(self, tmp_path, monkeypatch, caplog):
        files = GrantFiles(tmp_path, FakeClock().monotonic)
        files.prepare(ONE, self.limits())
        probe = fcntl.fcntl

        def follow(*arguments):
            monkeypatch.setattr(fcntl, "fcntl", probe)
            files.prepare(replace(ONE, pod_uid="uid-following"), self.limits())
            return probe(*arguments)

        with many_locks(Path(files.paths(ONE.grant_id)[1])):
            monkeypatch.setattr(fcntl, "fcntl", follow)
            files.region(ONE.grant_id)
            assert files.region(ONE.grant_id).snapshot.slots == ()
        assert not caplog.records

    @pytest.mark.timeout(120)
    def test_possibly_mapped_file_is_changed_in_place_while_check_is_impossible(self, tmp_path):
        files = GrantFiles(tmp_path, FakeClock().monotonic)
        files.prepare(ONE, self.limits())
        paths = [Path(path) for path in files.paths(ONE.grant_id)]
        inodes = [path.stat().st_ino for path in paths]
        with many_locks(paths[1]):
            files.prepare(ONE, self.limits(mib=50))  # finds out during this look
            assert ([path.stat().st_ino for path in paths], files.limits(ONE.grant_id)) == (inodes, self.limits(mib=50))
            files.prepare(ONE, self.limits(mib=70))
            assert ([path.stat().st_ino for path in paths], files.limits(ONE.grant_id)) == (inodes, self.limits(mib=70))

    def test_start_reads_no_region_of_another_pod(self, tmp_path, monkeypatch):
        files = GrantFiles(tmp_path)
        files.prepare(ONE, self.limits())
        monkeypatch.setattr(files, "region", lambda grant_id: pytest.fail("looked at the region"))
        files.prepare(replace(ONE, pod_uid="uid-following"), self.limits())

    @pytest.mark.parametrize("slots", [SLOT_COUNT_KEPT + 1, 4096])
    def test_region_with_more_slots_than_agent_creates_is_ignored(self, tmp_path, slots):
        files = GrantFiles(tmp_path)
        files.prepare(ONE, self.limits())
        Path(files.paths(ONE.grant_id)[1]).write_bytes(foreign_region(minor=7, slots=slots, virtual=False))
        assert files.region(ONE.grant_id) is None
        with pytest.raises(StorageError):
            files.store_host_pids(ONE.grant_id, {0: 1})

    def test_truncating_missing_region_or_link_truncates_nothing_else(self, tmp_path):
        files = GrantFiles(tmp_path / "containers")
        assert files.cut_region(ONE.grant_id) == 0
        files.prepare(ONE, self.limits())
        region = Path(files.paths(ONE.grant_id)[1])
        region.unlink()
        (tmp_path / "elsewhere").write_bytes(b"x" * (REGION_BYTES_KEPT + 1))
        region.symlink_to(tmp_path / "elsewhere")
        assert files.cut_region(ONE.grant_id) == 0

    def test_a_region_that_became_a_link_is_not_followed(self, tmp_path):
        files = GrantFiles(tmp_path / "containers")
        files.prepare(ONE, self.limits())
        region = Path(files.paths(ONE.grant_id)[1])
        region.rename(tmp_path / "elsewhere")
        region.symlink_to(tmp_path / "elsewhere")
        assert files.region(ONE.grant_id) is None

    def test_copies_of_grants_are_found_and_incomplete_ones_are_not(self, tmp_path):
        files = GrantFiles(tmp_path)
        files.prepare(ONE, self.limits())
        (tmp_path / "half").mkdir()
        (tmp_path / "torn").mkdir()
        (tmp_path / "torn/grant.json").write_bytes(b"{")
        assert files.copies() == [ONE]
        assert sorted(files.ids()) == sorted(["half", "torn", ONE.grant_id])

    def test_removing_twice_is_no_error(self, tmp_path):
        files = GrantFiles(tmp_path)
        files.prepare(ONE, self.limits())
        files.remove(ONE.grant_id)
        files.remove(ONE.grant_id)
        assert files.ids() == []


YAML_SPEC = """
cdiVersion: 0.5.0
kind: nvidia.com/gpu
devices:
- name: GPU-0
  containerEdits:
    deviceNodes:
    - path: /dev/nvidia0
containerEdits:
  mounts:
  - {hostPath: /h/libcuda.so.580, containerPath: /c/libcuda.so.580}
"""
PROC_DEVICES = """\
Character devices:
  1 mem
195 nvidia
195 nvidiactl
237 nvidia-caps
238 nvidia-caps-imex-channels

Block devices:
259 blkext
"""


class TestCdiDirectory:
    def make(self, tmp_path) -> CdiDirectory:
        (tmp_path / "static").mkdir(exist_ok=True)
        kernel = {"devices": tmp_path / "dev", "capabilities": tmp_path / "caps", "kernel_drivers": tmp_path / "proc-devices"}
        return CdiDirectory(tmp_path / "dynamic", tmp_path / "static", **kernel)

    def test_our_specs_are_listed_and_removed(self, tmp_path):
        cdi = self.make(tmp_path)
        cdi.write("abc", {"kind": "aliquot.dev/vgpu"})
        assert cdi.ids() == ["abc"]
        assert msgspec.json.decode((tmp_path / "dynamic" / file_name("abc")).read_bytes()) == {"kind": "aliquot.dev/vgpu"}
        cdi.remove("abc")
        cdi.remove("abc")
        assert cdi.ids() == []

    def test_spec_has_the_computed_digest(self, tmp_path):
        cdi, spec = self.make(tmp_path), {"kind": "aliquot.dev/vgpu", "devices": [{"name": "abc"}]}
        cdi.write("abc", spec)
        assert cdi.digest("abc") == cdi.digest_of(spec)
        assert cdi.digest_of({}) != cdi.digest_of(spec)

    def test_all_that_a_runtime_reads_is_counted(self, tmp_path):
        cdi = self.make(tmp_path)
        (tmp_path / "static/nvidia.yaml").write_bytes(b"x" * 1000)
        (tmp_path / "dynamic/other.json").write_bytes(b"x" * 100)
        (tmp_path / "dynamic/.other.json.1.aliquot-tmp").write_bytes(b"x" * 5000)
        cdi.write("abc", {})
        assert cdi.total_bytes() == 1102

    def test_host_spec_in_yaml_is_found_and_reread_after_change(self, tmp_path):
        cdi = self.make(tmp_path)
        assert cdi.host_spec() is None
        path = tmp_path / "static/nvidia.yaml"
        path.write_text(YAML_SPEC)
        first = cdi.host_spec()
        assert first.source == str(path)
        assert first.has_driver
        assert cdi.host_spec() is first
        path.write_text(YAML_SPEC.replace("GPU-0", "GPU-00"))
        assert list(cdi.host_spec().devices) == ["GPU-00"]

    def test_one_look_serves_all_inside_and_failed_look_is_repeated(self, tmp_path):
        cdi, path = self.make(tmp_path), tmp_path / "static/nvidia.yaml"
        path.write_text('{"cdiVersion":"0.5.0","kind":"nvidia.com/gpu","devices":7}')
        with cdi.one_look():
            with pytest.raises(StorageError):
                cdi.host_spec()
            path.write_text(YAML_SPEC)
            assert list(cdi.host_spec().devices) == ["GPU-0"]
            path.write_text(YAML_SPEC.replace("GPU-0", "GPU-00"))
            assert list(cdi.host_spec(["GPU-00"]).devices) == ["GPU-0"]
        assert list(cdi.host_spec().devices) == ["GPU-00"]

    def test_dynamic_directory_and_general_kind_take_precedence(self, tmp_path):
        cdi = self.make(tmp_path)
        (tmp_path / "dynamic/k8s.device-plugin.nvidia.com-gpu.json").write_text(
            '{"cdiVersion":"0.5.0","kind":"k8s.device-plugin.nvidia.com/gpu"}'
        )
        assert "device-plugin" in cdi.host_spec().source
        (tmp_path / "dynamic/management.nvidia.com-gpu.json").write_text(
            '{"cdiVersion":"0.5.0","kind":"management.nvidia.com/gpu","devices":[{"name":"all","containerEdits":{}}]}'
        )
        assert "management" in cdi.host_spec().source
        (tmp_path / "static/nvidia.yaml").write_text(YAML_SPEC)
        assert cdi.host_spec().source.endswith("static/nvidia.yaml")
        (tmp_path / "dynamic/nvidia.yaml").write_text(YAML_SPEC)
        assert cdi.host_spec().source.endswith("dynamic/nvidia.yaml")

    def test_valid_and_invalid_files_of_other_vendors_are_ignored(self, tmp_path):
        cdi = self.make(tmp_path)
        (tmp_path / "static/a.json").write_text('{"kind":"vendor.com/nic"}')
        (tmp_path / "static/b.yaml").write_text("{")
        (tmp_path / "static/c.json").write_bytes(b'{"kind":"vendor.com/caf\xe9"}')
        (tmp_path / "static/d.json").write_text("[" * 100_000)
        (tmp_path / "static/nvidia.yaml").write_text(YAML_SPEC)
        assert cdi.host_spec() is not None

    def test_a_malformed_nvidia_spec_is_named(self, tmp_path):
        cdi = self.make(tmp_path)
        (tmp_path / "static/nvidia.json").write_text('{"kind":"nvidia.com/gpu"}')
        with pytest.raises(StorageError, match=r"static/nvidia.json: want cdiVersion"):
            cdi.host_spec()

    @staticmethod
    def tell_of_instance(tmp_path, drivers: str) -> None:
        (tmp_path / "proc-devices").write_text(drivers)
        for name, minor in (("access", 21), ("ci0/access", 22)):
            path = tmp_path / "caps/gpu1/mig/gi2" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"DeviceFileMinor: {minor}\nDeviceFileMode: 292\nDeviceFileModify: 1\n")

    def test_nodes_of_a_mig_instance_are_read_from_the_kernels_files(self, tmp_path):
        self.tell_of_instance(tmp_path, PROC_DEVICES)
        assert self.make(tmp_path).capability_nodes(1, 2, 0) == (CapabilityNode(21, 237, 0o444), CapabilityNode(22, 237, 0o444))
        with pytest.raises(StorageError, match="gi3"):
            self.make(tmp_path).capability_nodes(1, 3, 0)

    def test_kernel_without_capabilities_driver_gives_no_major_number(self, tmp_path):
        self.tell_of_instance(tmp_path, PROC_DEVICES.replace("nvidia-caps\n", "nvidia-capsule\n"))
        assert {node.major for node in self.make(tmp_path).capability_nodes(1, 2, 0)} == {None}

    def test_unreadable_driver_list_is_an_error(self, tmp_path):
        self.tell_of_instance(tmp_path, "")
        (tmp_path / "proc-devices").unlink()
        with pytest.raises(StorageError, match="proc-devices: No such file"):
            self.make(tmp_path).capability_nodes(1, 2, 0)

    def test_only_nvidias_nodes_are_listed(self, tmp_path):
        (tmp_path / "dev").mkdir()
        for name in ("nvidia0", "nvidiactl", "null"):
            (tmp_path / "dev" / name).touch()
        assert [Path(path).name for path in self.make(tmp_path).present_nodes()] == ["nvidia0", "nvidiactl"]


class TestShimStore:
    @pytest.fixture
    def source(self, tmp_path) -> Path:
        directory = tmp_path / "source"
        directory.mkdir()
        for name in SHIM_LIBRARIES:
            (directory / name).write_bytes(name.encode())
        return directory

    def test_the_directory_is_named_by_its_content_and_complete(self, tmp_path, source):
        target = install_shim(source, tmp_path / "store")
        assert (target / "ld.so.preload").read_text() == "/run/aliquot/libaliquot-preload.so\n"
        assert {path.name for path in target.iterdir()} == {*SHIM_LIBRARIES, "ld.so.preload"}
        assert mode(target) == 0o755
        assert mode(target / "libcuda.so.1") == 0o555

    def test_an_installed_version_is_never_written_again(self, tmp_path, source):
        target = install_shim(source, tmp_path / "store")
        before = (target / "libcuda.so.1").stat()
        assert install_shim(source, tmp_path / "store") == target
        after = (target / "libcuda.so.1").stat()
        assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)

    def test_new_version_is_installed_next_to_old_one(self, tmp_path, source):
        old = install_shim(source, tmp_path / "store")
        (source / "libcuda.so.1").write_bytes(b"newer")
        new = install_shim(source, tmp_path / "store")
        assert new != old
        assert (old / "libcuda.so.1").read_bytes() == b"libcuda.so.1"

    def test_damaged_installation_is_renamed_and_replaced(self, tmp_path, source):
        target = install_shim(source, tmp_path / "store")
        (target / "libcuda.so.1").chmod(0o755)
        (target / "libcuda.so.1").write_bytes(b"damaged")
        assert install_shim(source, tmp_path / "store") == target
        assert (target / "libcuda.so.1").read_bytes() == b"libcuda.so.1"
        assert (target.with_name(f"{target.name}.damaged-0") / "libcuda.so.1").read_bytes() == b"damaged"

    def test_missing_artefact_is_named_with_what_to_do(self, tmp_path, source):
        (source / "libnvidia-ml.so.1").unlink()
        with pytest.raises(ShimError, match=r"libnvidia-ml.so.1 cannot be read.*make"):
            install_shim(source, tmp_path / "store")

    def test_a_running_agent_keeps_the_version_it_installed(self, tmp_path, source):
        store = ShimStore(source, tmp_path / "store")
        first = store.installed()
        (source / "libcuda.so.1").write_bytes(b"newer")
        assert store.installed() == first

    def test_unused_versions_are_removed_and_the_current_one_stays(self, tmp_path, source):
        cdi = CdiDirectory(tmp_path / "cdi", tmp_path / "etc-cdi")
        versions = []
        for number in range(3):
            (source / "libcuda.so.1").write_bytes(b"%d" % number)
            versions.append(install_shim(source, tmp_path / "store"))
        cdi.write("aaaa", {"hostPath": f"{versions[1]}/libcuda.so.1"})
        store = ShimStore(source, tmp_path / "store")
        assert store.sweep(cdi.mentioned) == [str(versions[0])]
        cdi.remove("aaaa")
        assert store.sweep(cdi.mentioned) == [str(versions[1])]
        assert store.sweep(cdi.mentioned) == []
        assert versions[2].is_dir()

    def test_copies_for_containers_are_no_version(self, tmp_path, source):
        store = ShimStore(source, tmp_path / "store")
        files = GrantFiles(tmp_path / "containers", libraries=tmp_path / "store" / CONTAINERS)
        copies = files.copy_shim("aaaa", store.installed(), SHIM_LIBRARIES)
        assert store.sweep(lambda _: set()) == []
        assert [name for name in SHIM_LIBRARIES if Path(copies[name]).is_file()] == list(SHIM_LIBRARIES)


class TestCopiesOfShim:
    """Each container's own libraries."""

    @pytest.fixture
    def version(self, tmp_path) -> Path:
        directory = tmp_path / "version"
        directory.mkdir()
        for name in SHIM_LIBRARIES:
            (directory / name).write_bytes(name.encode())
        return directory

    @pytest.fixture
    def files(self, tmp_path) -> GrantFiles:
        return GrantFiles(tmp_path / "containers", libraries=tmp_path / "libraries")

    def test_two_containers_share_no_inode_with_each_other_or_the_version(self, files, version):
        copies = [Path(copy) for owner in ("aaaa", "bbbb") for copy in files.copy_shim(owner, version, SHIM_LIBRARIES).values()]
        assert len({path.stat().st_ino for path in (*copies, *version.iterdir())}) == 3 * len(SHIM_LIBRARIES)
        assert {mode(path) for path in copies} == {0o555}
        assert mode(copies[0].parent) == 0o755

    def test_copy_is_kept_as_long_as_it_is_the_same(self, files, version):
        copy = Path(files.copy_shim("aaaa", version, ["libcuda.so.1"])["libcuda.so.1"])
        before = copy.stat().st_ino
        files.copy_shim("aaaa", version, ["libcuda.so.1"])
        assert copy.stat().st_ino == before
        (version / "libcuda.so.1").write_bytes(b"newer")
        files.copy_shim("aaaa", version, ["libcuda.so.1"])
        assert (copy.stat().st_ino == before, copy.read_bytes()) == (False, b"newer")

    @pytest.mark.parametrize("how", DAMAGES)
    def test_damaged_copy_is_replaced(self, files, version, how):
        copy = Path(files.copy_shim("aaaa", version, ["libcuda.so.1"])["libcuda.so.1"])
        damage(copy, how)
        files.copy_shim("aaaa", version, ["libcuda.so.1"])
        assert copy.is_file()
        assert not copy.is_symlink()
        assert copy.read_bytes() == b"libcuda.so.1"

    def test_copy_with_a_lease_is_replaced_without_waiting(self, files, version):
        copy = Path(files.copy_shim("aaaa", version, ["libcuda.so.1"])["libcuda.so.1"])
        if not can_be_leased(copy):
            pytest.skip(REASON)
        before = copy.stat().st_ino
        with lease(copy, "write") as held:
            assert held
            files.copy_shim("aaaa", version, ["libcuda.so.1"])
            assert copy.stat().st_ino != before

    def test_copies_go_with_their_grant(self, files, version, tmp_path):
        files.copy_shim("aaaa", version, SHIM_LIBRARIES)
        assert files.ids() == ["aaaa"], "known as a stray even without other files"
        files.remove("aaaa")
        assert files.ids() == []
        assert list((tmp_path / "libraries").iterdir()) == []

    def test_next_container_gets_copies_that_the_last_one_never_had(self, files, version, tmp_path):
        files.prepare(ONE, limits_of(ONE, FailPolicy.CLOSED))
        copy = Path(files.copy_shim(ONE.grant_id, version, ["libcuda.so.1"])["libcuda.so.1"])
        with copy.open() as held:  # open, so that its inode is not used again
            other = grant(ids("0:0"), share(0, 100), of=pod("b"))
            assert other.grant_id == ONE.grant_id
            files.prepare(other, limits_of(other, FailPolicy.CLOSED))
            files.copy_shim(other.grant_id, version, ["libcuda.so.1"])
            assert copy.stat().st_ino != os.fstat(held.fileno()).st_ino

    def test_files_of_others_and_parts_of_crashed_agent_are_no_copies(self, files, version, tmp_path):
        (tmp_path / "libraries").mkdir()
        for name in ("aaaa", "aaaa.notes", f".bbbb.libcuda.so.1.1.1{TEMPORARY_SUFFIX}", "libcuda.so.1"):
            (tmp_path / "libraries" / name).write_bytes(b"part")
        assert files.ids() == []
        assert GrantFiles(tmp_path / "containers", libraries=tmp_path / "libraries").ids() == []
        assert sorted(path.name for path in (tmp_path / "libraries").iterdir()) == ["aaaa", "aaaa.notes", "libcuda.so.1"]

    def test_directory_that_was_removed_is_made_again(self, files, version, tmp_path):
        files.copy_shim("aaaa", version, ["libcuda.so.1"])
        shutil.rmtree(tmp_path / "libraries")
        files.copy_shim("bbbb", version, ["libcuda.so.1"])
        assert files.ids() == ["bbbb"]

    def test_missing_version_is_named(self, files, tmp_path):
        with pytest.raises(StorageError, match=r"gone/libcuda.so.1: it is not there"):
            files.copy_shim("aaaa", tmp_path / "gone", ["libcuda.so.1"])


class TestSpareCopies:
    """Copies of the shim that no container has yet."""

    LIBRARY = "libcuda.so.1"

    @pytest.fixture
    def version(self, tmp_path) -> Path:
        directory = tmp_path / "version"
        directory.mkdir()
        (directory / self.LIBRARY).write_bytes(b"first")
        return directory

    @pytest.fixture
    def files(self, tmp_path) -> GrantFiles:
        return GrantFiles(tmp_path / "containers", libraries=tmp_path / "libraries")

    def spares(self, tmp_path) -> list[Path]:
        return [path for path in (tmp_path / "libraries").iterdir() if path.name.endswith(TEMPORARY_SUFFIX)]

    def copy(self, files, version, owner="aaaa") -> Path:
        return Path(files.copy_shim(owner, version, [self.LIBRARY])[self.LIBRARY])

    def test_next_container_gets_one(self, files, version, tmp_path):
        self.copy(files, version)
        assert files.add_spare()
        (spare,) = self.spares(tmp_path)
        inode = spare.stat().st_ino
        copy = self.copy(files, version, "bbbb")
        assert (copy.stat().st_ino, copy.read_bytes(), mode(copy)) == (inode, b"first", 0o555)
        assert self.spares(tmp_path) == []

    def test_there_are_none_before_a_container_asks(self, files):
        assert not files.add_spare()

    def test_there_are_enough_of_each_library(self, files, version, tmp_path):
        (version / "libnvidia-ml.so.1").write_bytes(b"other")
        files.copy_shim("aaaa", version, [self.LIBRARY, "libnvidia-ml.so.1"])
        while files.add_spare():
            assert len(self.spares(tmp_path)) <= 2 * MOST
        assert sorted(path.read_bytes() for path in self.spares(tmp_path)) == [b"first"] * MOST + [b"other"] * MOST

    def test_those_of_an_earlier_version_go(self, files, version, tmp_path):
        self.copy(files, version)
        assert all(files.add_spare() for _ in range(3))
        (version / self.LIBRARY).write_bytes(b"second")
        assert self.copy(files, version).read_bytes() == b"second"
        assert self.spares(tmp_path) == []

    def test_next_agent_removes_them(self, files, version, tmp_path):
        self.copy(files, version)
        assert files.add_spare()
        assert GrantFiles(tmp_path / "containers", libraries=tmp_path / "libraries").ids() == ["aaaa"]
        assert self.spares(tmp_path) == []

    def test_one_that_is_gone_does_no_harm(self, files, version, tmp_path):
        self.copy(files, version)
        assert all(files.add_spare() for _ in range(2))
        for path in self.spares(tmp_path):
            path.unlink()
        copies = [self.copy(files, version, owner) for owner in ("bbbb", "cccc", "dddd")]
        assert [copy.read_bytes() for copy in copies] == [b"first"] * 3

    @pytest.mark.parametrize("how", DAMAGES)
    def test_it_replaces_a_damaged_copy(self, files, version, how):
        copy = self.copy(files, version)
        assert files.add_spare()
        damage(copy, how)
        self.copy(files, version)
        assert copy.is_file()
        assert not copy.is_symlink()
        assert copy.read_bytes() == b"first"

    def test_disk_that_takes_none_is_named(self, files, version, tmp_path):
        self.copy(files, version)
        shutil.rmtree(tmp_path / "libraries")
        with pytest.raises(StorageError, match="libraries"):
            files.add_spare()


class TestSecret:
    def test_it_is_made_once_and_kept(self, tmp_path):
        path = tmp_path / "state/secret"
        secret = load_secret(path)
        assert len(secret) == 32
        assert load_secret(path) == secret
        assert mode(path) == 0o600

    def test_a_damaged_one_is_not_replaced_silently(self, tmp_path):
        (tmp_path / "secret").write_bytes(b"short")
        with pytest.raises(StorageError, match="want 32 bytes, found 5"):
            load_secret(tmp_path / "secret")


def test_the_boot_id_is_the_kernels():
    assert len(boot_id()) == 36


def truncated(path: Path) -> None:
    os.truncate(path, 0)


def half_gone(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2 + 1)


def scribbled_on(path: Path) -> None:
    path.write_bytes(b"\xa5" * path.stat().st_size)


def grown(path: Path) -> None:
    os.truncate(path, 2**30)


def filled_beyond_its_end(path: Path) -> None:
    with path.open("r+b") as file:
        keep_size, libc = 1, ctypes.CDLL(None, use_errno=True)
        if libc.fallocate(file.fileno(), keep_size, ctypes.c_long(path.stat().st_size), ctypes.c_long(8 << 20)):
            if ctypes.get_errno() != errno.EOPNOTSUPP:
                raise OSError(ctypes.get_errno(), "fallocate", str(path))
            pytest.skip("this file system cannot take room beyond the end of a file")


def without_its_mode(path: Path) -> None:
    path.chmod(0)


@pytest.mark.parametrize("form", [pytest.param(PRIORITY, id="priority"), pytest.param(TURNS, id="turns")])
class TestPageFile:
    def test_page_is_created_once_and_kept_for_open_readers(self, tmp_path, form):
        page = PageFile(tmp_path / "shared", form)
        assert page.make() == page.path
        assert (mode(page.path), mode(page.path.parent)) == (0o666, 0o700)
        assert page.path.read_bytes() == form.empty()
        before = page.path.stat().st_ino
        PageFile(tmp_path / "shared", form).make()
        assert page.path.stat().st_ino == before

    def test_complete_page_is_kept_with_any_line_content(self, tmp_path, form):
        page = PageFile(tmp_path / "shared", form)
        page.make()
        with page.path.open("r+b") as file:
            file.seek(form.line_bytes)
            file.write(b"\xa5" * form.line_bytes)
        before = page.path.read_bytes()
        assert not page.repair()
        assert page.path.read_bytes() == before

    @pytest.mark.parametrize("damage", [truncated, half_gone, scribbled_on, grown, filled_beyond_its_end, without_its_mode])
    def test_damaged_page_is_repaired_in_place(self, tmp_path, form, damage):
        page = PageFile(tmp_path / "shared", form)
        before = page.make().stat().st_ino
        damage(page.path)
        assert page.repair()
        found = page.path.stat()
        assert (found.st_ino, found.st_size, mode(page.path)) == (before, form.size_bytes, 0o666)
        assert found.st_blocks * 512 <= form.size_bytes + 2**20
        assert page.path.read_bytes()[:8] == form.empty()[:8]
        assert not page.repair()

    def test_missing_page_is_recreated(self, tmp_path, form):
        page = PageFile(tmp_path / "shared", form)
        page.make().unlink()
        assert page.repair()
        assert page.path.read_bytes() == form.empty()

    @pytest.mark.parametrize("damage", ["link", "pipe", "directory"])
    def test_page_that_is_no_file_is_replaced(self, tmp_path, form, damage):
        page = PageFile(tmp_path / "shared", form)
        page.make().unlink()
        {"link": lambda path: path.symlink_to("page"), "pipe": os.mkfifo, "directory": os.mkdir}[damage](page.path)
        assert page.repair()
        assert page.path.read_bytes() == form.empty()
        assert not page.repair()

    def test_unrepairable_page_is_reported(self, tmp_path, form):
        page = PageFile(tmp_path / "shared", form)
        page.make().unlink()
        page.path.parent.rmdir()
        with pytest.raises(StorageError, match="writing"):
            page.repair()


class TestPreloadList:
    """The file that the loader opens for every program of a container is the container's own."""

    def prepared(self, base: Path, of, library="libaliquot-preload.so", **options) -> Path:
        version = base / "version"
        version.mkdir(exist_ok=True)
        (version / library).write_bytes(b"library")
        files = GrantFiles(base / "containers")
        files.prepare(of, limits_of(of, FailPolicy.CLOSED), **options)
        files.copy_shim(of.grant_id, version, [library])
        return base / "containers" / of.grant_id / "ld.so.preload"

    def test_container_with_a_front_has_none(self, tmp_path):
        assert not self.prepared(tmp_path, ONE, "libcuda.so.1").exists()

    def test_each_container_has_its_own(self, tmp_path):
        other = grant(ids("0:1"), share(0, 100), of=pod("b"))
        paths = [self.prepared(tmp_path, ONE), self.prepared(tmp_path, other)]
        assert {path.read_text() for path in paths} == {"/run/aliquot/libaliquot-preload.so\n"}
        assert len({path.stat().st_ino for path in paths}) == 2
        assert {mode(path) for path in paths} == {0o444}

    def test_next_container_gets_another_file_and_a_restarted_one_keeps_it(self, tmp_path):
        with self.prepared(tmp_path, ONE).open() as first:  # open, so that its inode is not used again
            inode = os.fstat(first.fileno()).st_ino
            assert self.prepared(tmp_path, ONE).stat().st_ino == inode
            assert self.prepared(tmp_path, grant(ids("0:0"), share(0, 100), of=pod("b"))).stat().st_ino != inode

    def test_link_of_an_earlier_agent_is_replaced(self, tmp_path):
        path = self.prepared(tmp_path, ONE)
        path.unlink()
        path.symlink_to("/elsewhere")
        assert self.prepared(tmp_path, ONE, mounted=True).read_text() == "/run/aliquot/libaliquot-preload.so\n"
        assert not path.is_symlink()
