# SPDX-License-Identifier: Apache-2.0
"""The files of the shim's interpose/ stand in layers: each uses only what lies below it.

A room is a source with its header. It uses another room when it includes its header, or when its object file needs a symbol that the other
defines. ``python -m tests.unit.cuda_shim.test_layers`` prints the arrows that run back up and how many there are; it needs a built tree.
``docs/development/measurements.py`` counts with the same functions.
"""

import re
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SHIM = ROOT / "cuda_shim"
SUFFIXES = (".c", ".h", ".S")
PROGRAMS = frozenset({"tests", "fuzz", "client", "sim"})
"""Folders with files that are not part of the shim."""

LAYERS = (
    # tools without a driver, and the names of events
    {"text"},
    {"object", "latch", "outputs", "image", "neighbours", "naming", "life_cycle", "unpaced", "hooks"},
    # the real libraries
    {"driver", "driver_nvml"},
    # single questions to them
    {"relax", "device", "measure", "own_use"},
    # the process as a whole: shim.c, which lies beside interpose/
    {"shim"},
    # which device and context a call counts for
    {"context", "capture"},
    # memory that the driver takes and gives back in its own time
    {"reservoir", "deferred"},
    # where managed memory may lie
    {"spread"},
    # what is held
    {"allocations", "vmm", "code"},
    {"prefetch"},
    # what is in force on a device, what is timed there, and who has to wait
    {"ceiling", "pacer", "work"},
    {"sample", "correction"},
    {"wait"},
    {"time_slot"},
    {"admission"},
    {"payer"},
    {"pace"},
    # the wrappers that programs call
    {"memory", "pool", "array", "launch", "submit", "module", "lazy", "managed"},
    # all parts, for the events: life_cycle finds this table by its section, so no reference runs up to it
    {"parts"},
    {"view", "synchronize"},
    # all wrappers, by name and by the address of the driver's own
    {"resolve", "nvml"},
    {"nvml_export"},
    {"nvml_table"},
    {"dlsym"},
)

ONE_ROOM = {"gate": "submit"}
"""The wrappers of launches are in C and, where arguments lie on the stack, in assembly."""


def room_of(file: Path) -> str:
    """Return the room of a source, header or object file."""
    stem = file.stem.removesuffix("-asm")
    return ONE_ROOM.get(stem, stem)


def folder_of(file: Path) -> str:
    """Return the folder of a file with a path that starts at cuda_shim/ or obj/; a file that is in no folder is a room by itself."""
    return file.parts[0] if len(file.parts) > 1 else room_of(file)


def sources(shim: Path = SHIM) -> list[Path]:
    """Return the C and assembly files of interpose/ and the shim's own."""
    return sorted(path for path in (*(shim / "interpose").iterdir(), *shim.glob("shim.[ch]")) if path.suffix in SUFFIXES)


def all_sources(shim: Path = SHIM) -> list[Path]:
    """Return the C and assembly files of the shim, without programs and tests."""
    found = (path for path in shim.rglob("*") if path.suffix in SUFFIXES)
    return sorted(path for path in found if path.relative_to(shim).parts[0] not in PROGRAMS)


def includes(files: Iterable[Path], shim: Path) -> Iterator[tuple[str, str]]:
    """Yield (room, room that it includes), for headers among the files."""
    headers = {*files}
    for source in headers:
        for name in re.findall(r'^#include "([\w/]+\.h)"', source.read_text(), re.MULTILINE):
            header = next((path for path in (source.parent / name, shim / name) if path in headers), None)
            if header:
                yield room_of(source), room_of(header)


def symbols(files: Iterable[Path], shim: Path, objects: Path, room: Callable[[Path], str]) -> Iterator[tuple[str, str]]:
    """Yield (room, room that defines a symbol it needs), from the object files of these sources.

    Raises: FileNotFoundError: the tree is not built.
    """
    stems = {file.relative_to(shim).with_suffix("") for file in files}
    defined: dict[str, str] = {}
    needed: list[tuple[str, str]] = []
    built = [path for path in sorted(objects.rglob("*.o")) if _source_of(path.relative_to(objects)) in stems]
    if not built:
        raise FileNotFoundError(f"no object file of {shim} in {objects}: run `make native` first")
    for file in built:
        here = room(file.relative_to(objects))
        listed = subprocess.run(["nm", "--format=posix", file], capture_output=True, text=True, check=True).stdout
        for symbol, kind in (line.split()[:2] for line in listed.splitlines()):
            if kind == "U":
                needed.append((here, symbol))
            elif kind.isupper():
                defined[symbol] = here
    for here, symbol in needed:
        if symbol in defined:
            yield here, defined[symbol]


def _source_of(file: Path) -> Path:
    """Return the path of an object file's source, without its suffix."""
    return file.with_name(file.stem.removesuffix("-asm"))


def arrows(objects: Path, shim: Path = SHIM, *, by_folder: bool = False) -> set[tuple[str, str]]:
    """Return (room, room that it uses): between the files of interpose/ and shim.c, or between the folders of cuda_shim/.

    Between folders only symbols count: a header with types or constants makes no folder need the other.
    """
    if by_folder:
        found = {*symbols(all_sources(shim), shim, objects, folder_of)}
    else:
        found = {*includes(sources(shim), shim), *symbols(sources(shim), shim, objects, room_of)}
    return {(here, other) for here, other in found if here != other}


def arrows_up(objects: Path) -> set[tuple[str, str]]:
    """Return the arrows between rooms that do not lead to a lower layer."""
    layer: Mapping[str, int] = {room: number for number, rooms in enumerate(LAYERS) for room in rooms}
    return {(room, other) for room, other in arrows(objects) if layer[other] >= layer[room]}


def test_every_file_has_one_layer() -> None:
    placed = [room for rooms in LAYERS for room in rooms]
    assert sorted(placed) == sorted({room_of(source) for source in sources()})


def test_no_arrow_runs_back_up(build_dir: Path) -> None:
    assert not arrows_up(build_dir / "obj")


if __name__ == "__main__":
    found = sorted(arrows_up(ROOT / "build/obj"))
    for room, other in found:
        print(f"{room} -> {other}")
    print(f"{len(found)} arrows run back up")
