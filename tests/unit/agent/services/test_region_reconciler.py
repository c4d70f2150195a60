# SPDX-License-Identifier: Apache-2.0
import asyncio
import os
import threading

import pytest

from agent.core.drift import Snapshot, find_drifts
from agent.core.limits import FailPolicy, limits_of
from agent.core.planning import Planned
from agent.errors import StorageError
from agent.services.region_reconciler import RegionReconciler
from aliquot.contract.model import Preferences
from tests.unit.agent.builders import grant, ids, inventory, pod, share
from tests.unit.agent.fakes import Disk

ONE = grant(ids("0:0"), share(0, 600), of=pod("a"))
OTHER = grant(ids("0:1"), share(0, 400), of=pod("b"))


@pytest.fixture
def disk(tmp_path) -> Disk:
    return Disk(tmp_path)


async def manager_of(disk, *grants):
    manager = disk.manager()
    for one in grants:
        await manager.commit(Planned(one, (), Preferences()), limits_of(one, FailPolicy.CLOSED), lambda: {"kind": "x"}, inventory(), 16)
    return manager


async def test_region_grown_by_tenant_is_cut_and_owner_logged(disk, caplog):
    manager = await manager_of(disk, ONE, OTHER)
    _, region = disk.files.paths(ONE.grant_id)
    os.truncate(region, 200 << 20)
    await RegionReconciler(60.0, manager=manager, files=disk.files).look()
    assert disk.files.cut_region(ONE.grant_id) == 0
    assert [record.pod for record in caplog.records if "usage region" in record.getMessage()] == ["default/a"]
    survey = await manager.survey()
    assert find_drifts(Snapshot(survey.grants, survey.files)) == ()


async def test_a_region_that_cannot_be_cut_keeps_no_other_from_it(disk, monkeypatch, caplog):
    manager = await manager_of(disk, ONE, OTHER)
    asked = []

    def cut(grant_id):
        asked.append(grant_id)
        if grant_id == ONE.grant_id:
            raise StorageError("cutting its region: Permission denied")
        return 0

    monkeypatch.setattr(disk.files, "cut_region", cut)
    await RegionReconciler(60.0, manager=manager, files=disk.files).look()
    assert set(asked) == {ONE.grant_id, OTHER.grant_id}
    assert [record.pod_uid for record in caplog.records if "Permission denied" in record.getMessage()] == [ONE.pod_uid]


async def test_files_are_checked_while_tenant_delays_truncation(disk, monkeypatch):
    manager = await manager_of(disk, ONE)
    written, cutting = threading.Event(), threading.Event()

    def cut(grant_id):
        cutting.set()
        written.wait(30)
        return 0

    monkeypatch.setattr(disk.files, "cut_region", cut)
    looking = asyncio.ensure_future(RegionReconciler(60.0, manager=manager, files=disk.files).look())
    await asyncio.to_thread(cutting.wait, 30)
    assert set((await asyncio.wait_for(manager.survey(), 60)).files) == {ONE.grant_id}
    assert not looking.done()
    written.set()
    await looking
