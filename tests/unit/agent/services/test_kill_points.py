"""The agent is killed before and after every call of a port, while it starts a container and while it ends one; the next one heals it."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent.core.drift import Snapshot, find_drifts
from agent.services.grant_book import GrantBook
from agent.services.shared_call import SharedCall
from proto.model import ContainerSpec
from proto.units import MIB
from tests.unit.agent.builders import BOOT, assigned, ids, limits, pod, share
from tests.unit.agent.fakes import NO_SCANS, Disk, FakeClock, settle
from tests.unit.agent.services.test_allocator import Harness, placed

PORTS = ("held", "remembered", "installed", "host_spec", "read", "write", "prepare", "digest", "remove", "ids", "limits", "has_region")
IDS = ids("0:0")


class Killed(BaseException):
    """Here the process ended."""


class Fuse:
    """Kills at its last step; every call of a port is two steps."""

    def __init__(self, steps: int) -> None:
        self.left = steps
        self.at = ""

    def step(self, where: str) -> None:
        if self.left == 0:
            self.at = where
            raise Killed
        self.left -= 1


class Fused:
    """A port whose calls burn the fuse."""

    def __init__(self, port: Any, fuse: Fuse) -> None:
        self._port = port
        self._fuse = fuse

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._port, name)
        if name not in PORTS:
            return method
        return self._asynchronous(method, name) if name == "held" else self._synchronous(method, name)

    def _synchronous(self, method: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self._fuse.step(f"before {name}")
            result = method(*arguments)
            self._fuse.step(f"after {name}")
            return result

        return call

    def _asynchronous(self, method: Callable[..., Any], name: str) -> Callable[..., Any]:
        async def call(*arguments: Any) -> Any:
            self._fuse.step(f"before {name}")
            result = await method(*arguments)
            self._fuse.step(f"after {name}")
            return result

        return call


async def node_at(base: Path, fuse: Fuse | None = None) -> Harness:
    """An agent that has just started on this node, its ports fused or not."""
    node = Harness(base)
    if fuse is not None:
        disk = Disk(base)
        node.book.__init__(*(Fused(port, fuse) for port in (disk.store, disk.files, disk.cdi)), FakeClock(), NO_SCANS)  # type: ignore[misc]
        node.allocator._listing = SharedCall(Fused(node.pod_resources, fuse).held, 0.0)
        for name in ("_kubelet_memory", "_shim", "_cdi", "_files"):
            setattr(node.allocator, name, Fused(getattr(node.allocator, name), fuse))
    node.book.load(BOOT)
    return await node.ready(placed())


async def drifts_of(node: Harness) -> list[str]:
    survey = await node.book.survey()
    return [drift.sentence for drift in find_drifts(Snapshot(survey.grants, survey.files))]


async def start_killed_at(base: Path, step: int) -> str | None:
    """Start a container and be killed at this step; return where, or None when it was over before."""
    fuse = Fuse(step)
    node = await node_at(base, fuse)
    try:
        assert await node.start(placed(), IDS) is None
    except Killed:
        return fuse.at
    finally:
        node.book.close()
    return None


async def every_kill(tmp_path: Path, killed_at: Callable[[Path, int], Any], then: Callable[[Path], Any]) -> list[str]:
    """Do something over and over, killed one step later each time, and see to what comes then; return where it was killed."""
    places = []
    for step in itertools.count():
        base = tmp_path / str(step)
        base.mkdir()
        where = await killed_at(base, step)
        await then(base)
        if where is None:
            return places
        places.append(where)
    raise AssertionError("unreachable")


async def test_a_start_that_was_killed_anywhere_succeeds_at_kubelets_next_try(tmp_path):
    async def kubelet_tries_again(base: Path) -> None:
        node = await node_at(base)
        assert await node.start(placed(), IDS) is None
        assert [(one.uuid, one.memory_bytes) for one in node.limits(IDS).devices] == [("GPU-1", 100 * MIB)]
        assert await drifts_of(node) == []
        assert [grant.shares for grant in node.book.ledger.grants.values()] == [(share(1),)]
        node.book.close()

    places = await every_kill(tmp_path, start_killed_at, kubelet_tries_again)
    assert {"before held", "after remembered", "after installed", "before write", "after prepare", "after write"} <= set(places)


async def test_a_start_that_was_killed_anywhere_leaves_nothing_when_its_pod_is_gone(tmp_path):
    async def the_pod_is_deleted(base: Path) -> None:
        node = await node_at(base)
        await node.book.release(tuple(node.book.ledger.grants.values()))
        await node.book.sweep()
        assert not [*node.disk.store.ids(), *node.disk.files.ids(), *node.disk.cdi.ids()]
        assert await drifts_of(node) == []
        node.book.close()

    await every_kill(tmp_path, start_killed_at, the_pod_is_deleted)


@pytest.mark.parametrize("again", [True, False], ids=["and the container starts again", "and the pod is gone"])
async def test_an_end_that_was_killed_anywhere_is_made_good(tmp_path, again):
    async def end_killed_at(base: Path, step: int) -> str | None:
        assert await start_killed_at(base, 10_000) is None
        fuse = Fuse(step)
        disk = Disk(base)
        book = GrantBook(*(Fused(port, fuse) for port in (disk.store, disk.files, disk.cdi)), FakeClock(), NO_SCANS)  # type: ignore[arg-type]
        book.load(BOOT)
        try:
            await book.release(tuple(book.ledger.grants.values()))
        except Killed:
            return fuse.at
        finally:
            book.close()
        return None

    async def then(base: Path) -> None:
        node = await node_at(base)
        if again:
            assert await node.start(placed(), IDS) is None
            assert len(node.book.ledger.grants) == 1
        else:
            await node.book.release(tuple(node.book.ledger.grants.values()))
            await node.book.sweep()
            assert not [*node.disk.store.ids(), *node.disk.files.ids(), *node.disk.cdi.ids()]
        assert await drifts_of(node) == []
        node.book.close()

    assert len(await every_kill(tmp_path, end_killed_at, then)) >= 6


async def test_no_kill_gives_the_ids_of_a_container_to_another(tmp_path):
    """A row that is on disk binds the next agent, whatever else was lost."""

    async def another_asks_for_the_same_memory(base: Path) -> None:
        node = await node_at(base)
        promised = sum(one.memory_bytes for grant in node.book.ledger.grants.values() for one in grant.shares)
        rest_mib = 1000 - promised // MIB
        for mib, granted in ((rest_mib + 1, False), (rest_mib, True)):
            spec = ContainerSpec("main", limits(1, mib))
            other = pod("other", spec, annotations=assigned("uid-other", main=[share(1, mib)]))
            node.pods.pods_listed([placed(), other])
            await settle()
            refusal = await node.start(other, ids("0:1"))
            assert (refusal is None) == granted
        node.book.close()

    await every_kill(tmp_path, start_killed_at, another_asks_for_the_same_memory)
