# SPDX-License-Identifier: Apache-2.0
import asyncio
import shutil
from pathlib import Path

import pytest

from agent.adapters.clock import SystemClock
from agent.adapters.spare_copies import MOST
from agent.core.cdi_scans import ScanPace
from agent.core.limits import FailPolicy, limits_of
from agent.core.planning import Planned
from agent.services.spare_copies import SpareMaker
from aliquot.contract.model import Preferences
from tests.unit.agent.builders import grant, ids, inventory, pod, share
from tests.unit.agent.fakes import Disk, until

ONE = grant(ids("0:0"), share(0, 600), of=pod("a"))
LIBRARY = "libcuda.so.1"


@pytest.fixture
def disk(tmp_path) -> Disk:
    disk = Disk(tmp_path)
    (tmp_path / "version").mkdir()
    (tmp_path / "version" / LIBRARY).write_bytes(b"library")
    return disk


def spares(disk: Disk) -> list[Path]:
    return list((disk.base / "run/containers-libraries").glob(".*.spare.*"))


def spec_with_copy(disk: Disk, one=ONE):
    disk.files.copy_shim(one.grant_id, disk.base / "version", [LIBRARY])
    return {"kind": "x"}


async def start(manager, disk: Disk, ready=None, one=ONE) -> None:
    planned = Planned(one, (), Preferences())
    await manager.commit(planned, limits_of(one, FailPolicy.CLOSED), lambda: spec_with_copy(disk, one), inventory(), 16, ready)


async def test_after_a_start_copies_are_made_for_the_next_ones(disk):
    manager = disk.manager()
    task = asyncio.ensure_future(SpareMaker(manager, disk.files).run())
    await start(manager, disk)
    await until(lambda: len(spares(disk)) == MOST)
    task.cancel()


async def test_copies_are_made_after_many_starts_at_once(disk):
    manager = disk.manager(SystemClock(), ScanPace(seconds_per_byte=0.01))
    others = [grant(ids(f"0:{number}"), share(0, 1), of=pod(f"p{number}")) for number in range(1, 6)]
    task = asyncio.ensure_future(SpareMaker(manager, disk.files).run())
    await asyncio.gather(*(start(manager, disk, one=one) for one in (ONE, *others)))
    await until(lambda: len(spares(disk)) == MOST)
    task.cancel()


async def test_nearly_full_disk_gets_no_copies(disk, monkeypatch):
    manager = disk.manager()
    await start(manager, disk)
    monkeypatch.setattr("agent.adapters.spare_copies.LEAST_FREE_BYTES", shutil.disk_usage(disk.base).total)
    assert await SpareMaker(manager, disk.files).fill()
    assert spares(disk) == []


async def test_no_copy_is_made_while_a_container_starts(disk):
    manager, going_on = disk.manager(), asyncio.Event()
    maker = SpareMaker(manager, disk.files)
    await start(manager, disk)
    starting = asyncio.ensure_future(start(manager, disk, going_on.wait))
    await asyncio.sleep(0)
    assert not manager.settled
    assert not await maker.fill()
    assert spares(disk) == []
    going_on.set()
    await starting
    await maker.fill()
    assert len(spares(disk)) == MOST


async def test_disk_that_takes_none_is_reported_once(disk, caplog):
    manager = disk.manager()
    maker = SpareMaker(manager, disk.files)
    await start(manager, disk)
    shutil.rmtree(disk.base / "run/containers-libraries")
    for _ in range(3):
        await maker.fill()
    assert caplog.text.count("no copy of the shim is made ahead") == 1
