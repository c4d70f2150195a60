# SPDX-License-Identifier: Apache-2.0
"""Builds of earlier commits beside today's in one container: a region that both write is judged by both alike.

A container that runs keeps the shim that it began with while the agent is upgraded, and nothing in the protocol relies on all its processes
having the same. The builds are made from this repository's history, which a tarball or a shallow clone does not have.
"""

import fcntl
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from aliquot import contract
from tests.conftest import ROOT
from tests.fakes.container import LIBRARY_DIR, MIB, Container, Node, Program, make_container

LIMIT_MIB = 4096
CONTEXT_MIB = 530
OUT_OF_MEMORY = 2
BUILDS = {
    "ABI 1.0, without virtual ledgers": "67bbf691ad4135b01a10cf4253bf55d57553436a",
    "ABI 1.1, which measures modules": "3bd3a90694a73823429b91ba15e023aa0a736616",
    "ABI 1.3, the first of it": "40ab706b059f51a9a2b658bd3f0a91ab5410dd88",
}


@pytest.fixture(params=list(BUILDS.values()), ids=list(BUILDS))
def old_front(request, build_dir) -> Path:
    """The front of an earlier commit, built once."""
    commit: str = request.param
    directory = build_dir / "old" / commit
    front = directory / "build/lib/shim" / contract.CUDA_SONAME
    if subprocess.run(["git", "-C", ROOT, "cat-file", "-e", f"{commit}:cuda_shim"], capture_output=True, check=False).returncode:
        pytest.skip(f"commit {commit[:7]} is not here: this is no clone with its history")
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not front.exists():
            archive = subprocess.run(["git", "-C", ROOT, "archive", commit, "cuda_shim"], capture_output=True, check=True)
            subprocess.run(["tar", "x", "-C", directory], input=archive.stdout, check=True)
            make = [
                "env",
                "-u",
                "MAKEFLAGS",
                "-u",
                "MAKELEVEL",
                "make",
                "-s",
                "-C",
                directory / "cuda_shim",
                f"BUILD={directory / 'build'}",
                front,
            ]
            subprocess.run(make, check=True)
    return front


@pytest.fixture
def sides(build_dir, sim_node, tmp_path, old_front) -> tuple[Container, Container]:
    """One container as programs see it that began with the new shim, and with the old one: limits and region are the same files."""
    node = Node(build_dir, sim_node("h200x8"), tmp_path)
    new = node.container(LIMIT_MIB)
    old = make_container(tmp_path / "old", build_dir, node.directory, new.limits())
    shutil.copy(old_front, (old.root / LIBRARY_DIR / contract.CUDA_SONAME).resolve(strict=True))
    for mine, shared in ((old.limits_path, new.limits_path), (old.region_path, new.region_path)):
        mine.unlink()
        mine.hardlink_to(shared)
    return new, old


@pytest.fixture(params=["the new one asks last", "the old one asks last"])
def programs(request, sides) -> Iterator[tuple[Program, Program]]:
    """One program of each, the one that asks first in front."""
    new, old = sides
    first, last = (old, new) if request.param == "the new one asks last" else (new, old)
    with first.repl() as one, last.repl() as other:
        yield one, other


def ask(program: Program, mib: int) -> int:
    result: int = program.ask(f"alloc alloc {mib * MIB}")["result"]
    return result


def test_both_builds_keep_limit_and_memory_of_killed_one_is_freed(sides, programs):
    new, _ = sides
    first, last = programs
    free_mib = LIMIT_MIB - 2 * CONTEXT_MIB
    assert ask(first, free_mib // 2) == 0
    assert ask(last, free_mib // 2) == 0
    assert new.line_bytes() == new.used_bytes() == LIMIT_MIB * MIB
    assert ask(first, 2) == ask(last, 2) == OUT_OF_MEMORY
    first.kill()
    assert new.used_bytes() == (LIMIT_MIB // 2) * MIB
    assert ask(last, free_mib // 2) == 0
    assert new.line_bytes() == new.used_bytes() == (CONTEXT_MIB + 2 * (free_mib // 2)) * MIB


def test_slot_left_by_dead_old_build_is_reusable_by_new_one(sides):
    new, old = sides
    with old.repl() as program:
        assert ask(program, 1000) == 0
        program.kill()
    with new.repl() as program:
        assert ask(program, LIMIT_MIB - CONTEXT_MIB) == 0
        assert new.line_bytes() == new.used_bytes() == LIMIT_MIB * MIB
        program.kill()
    with old.repl() as program:
        assert ask(program, LIMIT_MIB - CONTEXT_MIB) == 0
        assert new.line_bytes() == new.used_bytes() == LIMIT_MIB * MIB
