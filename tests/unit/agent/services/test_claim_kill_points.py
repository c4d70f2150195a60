# SPDX-License-Identifier: Apache-2.0
"""The agent is killed before every change of a file while it prepares a claim with two requests, releases it, or goes on after an earlier
kill. The next agent answers the same, and leaves the same files.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, reduce
from pathlib import Path
from typing import Any

import pytest

from agent.adapters import spare_copies
from agent.adapters.durable import TEMPORARY_SUFFIX
from agent.core.cdi import SHIM_LIBRARIES
from agent.core.identity import claim_grant_id
from agent.core.ledger import Grant
from agent.core.region_layout import decode_limits
from agent.services.dra_plugin import DraPlugin
from aliquot import contract
from aliquot.contract.model import Isolation
from aliquot.kubelet_api import dra_pb2 as pb
from tests.unit.agent.builders import SECRET
from tests.unit.agent.claim_builders import FakeResourceApi, claim_object, result
from tests.unit.agent.fakes import Disk, FakeShim
from tests.unit.agent.services.test_claims import ClaimHarness, kubelets_call
from tests.unit.agent.services.test_kill_points import Fuse, Life, World, do, every_kill

CHANGES = ("mkdir", "open", "pwrite", "rename", "replace", "rmdir", "symlink", "unlink")
"""The calls of ``os`` at which an agent is killed. The others write a temporary file: what is in it when its agent is killed counts for
nothing."""
PLACES = ("state", "run", "cdi")
"""The directories where an agent leaves something."""
REQUESTS = ("a", "b")
NAMES = {claim_grant_id(SECRET, f"uid-{uid}", request): f"{uid}-{request}" for uid in ("train", "new") for request in REQUESTS}
"""What places and files are called here, by grant id."""
WRITTEN = {
    f"replace {file}"
    for name in ("train-a", "train-b")
    for file in (
        f"{name}/limits",
        f"{name}/region",
        f"{name}/grant.json",
        f"ledger/{name}.json",
        f"cdi/{contract.CDI_FILE_PREFIX}{name}.json",
    )
}
REMOVED = {
    change
    for name in ("train-a", "train-b")
    for change in (
        f"unlink cdi/{contract.CDI_FILE_PREFIX}{name}.json",
        "unlink limits",
        f"rmdir containers/{name}",
        f"unlink ledger/{name}.json",
    )
}
"""Some of the places where an agent is killed."""


class ClaimWorld(World):
    """What outlives an agent, with a claim in the API."""

    def __init__(self, base: Path, backend: Isolation = Isolation.SHIM) -> None:
        super().__init__(base, backend)
        self.resources = FakeResourceApi()
        self.allocate("train")
        shim = FakeShim(base / "shim").installed()
        for name in SHIM_LIBRARIES:
            (shim / name).write_text(name)

    def allocate(self, uid: str) -> None:
        """Have a claim ``train`` with this UID, in the place of an earlier one."""
        results = (result(number, mib=300 - 100 * number, request=request) for number, request in enumerate(REQUESTS))
        self.resources.put(claim_object("train", *results, uid=f"uid-{uid}"))

    def files(self) -> Mapping[str, Any]:
        """What the agent has on the disk, by name."""
        paths = [path for place in PLACES for path in (self.base / place).rglob("*") if not path.is_dir()]
        return {_named(str(path.relative_to(self.base))): self._content(path) for path in paths}

    def _content(self, path: Path) -> object:
        content = path.read_bytes()
        return decode_limits(content) if path.name == "limits" else content.replace(bytes(self.base), b"")


class ClaimLife(Life):
    """An agent that kubelet calls about claims."""

    node: ClaimHarness
    world: ClaimWorld

    def _harness(self) -> ClaimHarness:
        node = ClaimHarness(self.world.base, backends=self._backends, disk=Disk(self.world.base))
        node.resources.claims = self.world.resources.claims
        return node

    async def _rewrite(self, grant: Grant) -> None:
        await self.node.claims.rewrite(grant)

    async def prepare(self, uid: str = "train") -> pb.NodePrepareResourceResponse:
        """Prepare the claim with this UID."""
        request = pb.NodePrepareResourcesRequest(claims=[_claim(uid)])
        (reply,) = (await DraPlugin(self.node.claims).NodePrepareResources(request, kubelets_call(None))).claims.values()
        assert reply.error == ""
        return reply

    async def unprepare(self, uid: str = "train") -> None:
        """Release the claim with this UID."""
        request = pb.NodeUnprepareResourcesRequest(claims=[_claim(uid)])
        (reply,) = (await DraPlugin(self.node.claims).NodeUnprepareResources(request, None)).claims.values()
        assert reply.error == ""

    async def make_spares(self) -> None:
        """Make copies of the shim ahead, as an agent does that has had a claim before."""
        await self.prepare()
        while await self.manager.on_disk(self.node.disk.files.add_spare):
            pass
        await self.unprepare()


def _claim(uid: str) -> pb.Claim:
    return pb.Claim(namespace="default", name="train", uid=f"uid-{uid}")


def _named(text: str) -> str:
    return reduce(lambda known, identifier: known.replace(identifier, NAMES[identifier]), NAMES, text)


@contextmanager
def burning(fuse: Fuse, base: Path) -> Iterator[None]:
    """Let every change of an agent's file burn a fuse."""
    with pytest.MonkeyPatch.context() as patch:
        for name in CHANGES:
            patch.setattr(os, name, _fused(getattr(os, name), fuse, base))
        yield


def _fused(change: Callable[..., Any], fuse: Fuse, base: Path) -> Callable[..., Any]:
    def call(*arguments: Any, **settings: Any) -> Any:
        name = change.__name__
        target = Path(str(arguments[1 if name in ("rename", "replace", "symlink") else 0]))
        is_kept = not target.is_absolute() or any(target.is_relative_to(base / place) for place in PLACES)
        if is_kept and (name != "open" or arguments[1] & os.O_CREAT):
            fuse.step(_named(f"{name} {'/'.join(target.parts[-2:])}"))
        return change(*arguments, **settings)

    return call


class FuseTo(Fuse):
    """Kills at a place."""

    def __init__(self, place: str) -> None:
        super().__init__(float("inf"))
        self.place = place

    def step(self, where: str) -> None:
        if where == self.place:
            self.left = 0
        super().step(where)


# --- what happens ---


async def empty_world(base: Path, backend: Isolation) -> ClaimWorld:
    return ClaimWorld(base, backend)


async def prepared_world(base: Path, backend: Isolation) -> ClaimWorld:
    world = ClaimWorld(base, backend)
    assert await do(prepare, world, Fuse(float("inf"))) is None
    return world


async def prepare(world: ClaimWorld, fuse: Fuse) -> Life:
    """An agent begins, and prepares the claim."""
    with burning(fuse, world.base):
        life = ClaimLife(world)
        await life.began()
        await life.prepare()
    return life


async def prepare_with_spares(world: ClaimWorld, fuse: Fuse) -> Life:
    """An agent with copies that were made ahead prepares the claim."""
    life = ClaimLife(world)
    await life.began()
    await life.make_spares()
    with burning(fuse, world.base):
        await life.prepare()
    return life


async def unprepare(world: ClaimWorld, fuse: Fuse) -> Life:
    """An agent begins, and releases the claim."""
    with burning(fuse, world.base):
        life = ClaimLife(world)
        await life.began()
        await life.unprepare()
    return life


def killed_at(place: str) -> Callable[[Path, Isolation], Any]:
    """Make worlds in which an agent was killed at a place while it prepared the claim."""

    async def make(base: Path, backend: Isolation) -> ClaimWorld:
        world = ClaimWorld(base, backend)
        assert await do(prepare, world, FuseTo(place)) == place
        return world

    return make


# --- what comes then ---

Outcome = tuple[pb.NodePrepareResourceResponse, Mapping[str, Any]]
"""What an agent answers about the claim, and has on the disk then."""


async def unkilled(base: Path) -> Outcome:
    world = ClaimWorld(base)
    life = ClaimLife(world)
    await life.began()
    return await life.prepare(), world.files()


def of_claims(world: ClaimWorld) -> Mapping[str, Any]:
    """Return all files, without those partly written in a claim's directory. They are removed with the directory."""
    return {
        name: content
        for name, content in world.files().items()
        if not (name.startswith("run/containers/") and name.endswith(TEMPORARY_SUFFIX))
    }


async def kubelet_prepares_again(outcome: Outcome, world: ClaimWorld) -> None:
    """All is as without the kill, also after the loops of the new agent; and after a release nothing is left."""
    life = ClaimLife(world)
    await life.began()
    for _ in range(2):
        assert (await life.prepare(), of_claims(world)) == outcome
        await life.pass_once()
    assert of_claims(world) == outcome[1]
    await life.unprepare()
    await is_empty(life)


async def kubelet_releases(world: ClaimWorld) -> None:
    """Nothing is left of a claim that kubelet releases, whether it had an answer or not."""
    life = ClaimLife(world)
    await life.began()
    await life.unprepare()
    await life.pass_once()
    await is_empty(life)


async def kubelet_has_forgotten(world: ClaimWorld) -> None:
    """Nothing is left of a claim that is gone, without a call of kubelet."""
    world.resources.claims.clear()
    life = ClaimLife(world)
    await life.began()
    await life.pass_once()
    for _ in range(2):
        await life.node.sweep.step()
    await is_empty(life)


async def claim_has_another_uid(world: ClaimWorld) -> None:
    """A claim of the same name gets its own grants, and keeps them when the earlier one is released."""
    world.allocate("new")
    life = ClaimLife(world)
    await life.began()
    reply = await life.prepare("new")
    assert [(device.device_name, _named(device.cdi_device_ids[0]).rpartition("=")[2]) for device in reply.devices] == [
        ("gpu-0", "new-a"),
        ("gpu-1", "new-b"),
    ]
    await life.unprepare("train")
    await life.pass_once()
    assert {grant.owner_uid for grant in life.manager.ledger.grants.values()} == {"uid-new"}
    assert {name for name in world.files() if "train-" in name} == set()
    assert await life.prepare("new") == reply
    await life.unprepare("new")
    await is_empty(life)


async def is_empty(life: ClaimLife) -> None:
    await life.is_empty()
    assert life.world.files() == {}
    life.manager.close()


@pytest.fixture(autouse=True)
def hurried(monkeypatch):
    """Few copies are made ahead, and nothing is synced: a file outlives its process without it."""
    monkeypatch.setattr(spare_copies, "MOST", 3)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


async def every_file(tmp_path, make, deed, then) -> set[str]:
    """Do something over and over, killed at the next change of a file each time, and see to what comes then."""
    return await every_kill(tmp_path, Isolation.SHIM, make, deed, then)


@pytest.mark.parametrize("deed", [prepare, prepare_with_spares])
async def test_prepare_killed_anywhere_gives_same_answer_next_time(tmp_path, deed):
    outcome = await unkilled(tmp_path / "unkilled")
    places = await every_file(tmp_path, empty_world, deed, partial(kubelet_prepares_again, outcome))
    assert places >= WRITTEN
    assert ("rename containers-libraries/train-a.libcuda.so.1" in places) == (deed is prepare_with_spares)


@pytest.mark.parametrize(
    "place",
    [
        pytest.param("replace train-a/grant.json", marks=pytest.mark.soak),
        "replace ledger/train-b.json",
        pytest.param("replace cdi/aliquot.dev-vgpu-train-b.json", marks=pytest.mark.soak),
    ],
)
async def test_retry_killed_anywhere_gives_same_answer_next_time(tmp_path, place):
    outcome = await unkilled(tmp_path / "unkilled")
    places = await every_file(tmp_path, killed_at(place), prepare, partial(kubelet_prepares_again, outcome))
    assert "replace cdi/aliquot.dev-vgpu-train-b.json" in places
    assert any(one.startswith("pwrite") for one in places) == (place != "replace train-a/grant.json")  # limits that are complete are kept


@pytest.mark.parametrize("then", [kubelet_releases, kubelet_has_forgotten, claim_has_another_uid])
async def test_prepare_killed_anywhere_leaves_nothing_without_a_retry(tmp_path, then):
    assert await every_file(tmp_path, empty_world, prepare, then) >= WRITTEN


async def test_unprepare_killed_anywhere_is_finished_by_retry(tmp_path):
    assert await every_file(tmp_path, prepared_world, unprepare, kubelet_releases) >= REMOVED


async def test_claim_is_prepared_again_after_unprepare_killed_anywhere(tmp_path):
    outcome = await unkilled(tmp_path / "unkilled")
    assert await every_file(tmp_path, prepared_world, unprepare, partial(kubelet_prepares_again, outcome)) >= REMOVED
