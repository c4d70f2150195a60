# SPDX-License-Identifier: Apache-2.0
"""Whether the shim can load in images: the image's C library must have every symbol that the shim needs, with its version.

The check reads files and runs no code of an image (``elf`` says why). It covers the node's own system, and the images named with
``--image``. Without that option it takes one image with glibc and one with musl from those that the runtime has unpacked, and reports which
kind it does not find. NVIDIA builds CUDA for glibc; a finding says what musl means.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from aliquot import contract
from aliquot.paths import build_dir
from aliquot_cli.doctor.elf import ElfError, Library, read_library
from aliquot_cli.doctor.findings import Finding, error, info, ok
from aliquot_cli.doctor.host import Host
from aliquot_cli.doctor.options import DoctorOptions

_SHIMS = (contract.CUDA_SONAME, contract.NVML_SONAME, "libaliquot-preload.so")
_INSTALLED = Path("/usr/local/lib/aliquot")
_GLIBC = ("libc.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "libm.so.6")
_DIRECTORIES = (
    "/lib/x86_64-linux-gnu",
    "/lib/aarch64-linux-gnu",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/lib64",
    "/usr/lib64",
    "/lib",
    "/usr/lib",
)
_OVERLAYS = "io.containerd.snapshotter.v1.overlayfs/snapshots"
_LAYERS = (
    (f"/var/lib/containerd/{_OVERLAYS}", "fs"),
    (f"/var/lib/rancher/k3s/agent/containerd/{_OVERLAYS}", "fs"),
    (f"/var/lib/rancher/rke2/agent/containerd/{_OVERLAYS}", "fs"),
    (f"/var/lib/k0s/containerd/{_OVERLAYS}", "fs"),
    (f"/var/snap/microk8s/common/var/lib/containerd/{_OVERLAYS}", "fs"),
    ("/var/lib/containers/storage/overlay", "diff"),
    ("/var/lib/docker/overlay2", "diff"),
)
"""Directories with the unpacked layers of images, and the folder below each layer that contains its files."""
_KINDS = ("glibc", "musl")
_OWN_NAMES = ("cu", "nvml", "dcgm")
"""Prefixes of the symbols that the front takes from the real driver."""


@dataclass(frozen=True, slots=True)
class CLibrary:
    """The C library of an image. ``kind`` is ``glibc`` or ``musl``; ``offers`` has the symbols of all its parts."""

    kind: str
    machine: str
    offers: frozenset[str]


def check(host: Host, options: DoctorOptions) -> Iterator[Finding]:
    """Check the shim against each image."""
    directory = _shim_directory(host, options)
    try:
        shims = {name: read_library(directory / name) for name in _SHIMS}
    except (OSError, ElfError) as exc:
        yield error(
            "shim.files", f"the shim cannot be read: {exc}", f"install it, or name its directory with --shim-dir (looked in {directory})"
        )
        return
    yield _image("the node's own system", host, shims)
    found = {} if options.images else _found_images(host)
    for path in options.images or found.values():
        yield _image(f"image {path}", Host(Path(path)), shims)
    missing = [kind for kind in _KINDS if kind not in found] if not options.images else []
    if missing:
        yield info(
            "shim.images",
            f"no image with {' or '.join(missing)} is unpacked on this node",
            "unpack one and name its directory with --image",
        )


def _shim_directory(host: Host, options: DoctorOptions) -> Path:
    if options.shim_dir:
        return Path(options.shim_dir)
    installed = [f"{options.state_dir}/shim/{name}" for name in host.names(f"{options.state_dir}/shim")]
    on_node = next((host.path(name) for name in reversed(installed) if host.exists(f"{name}/{_SHIMS[0]}")), None)
    if on_node is not None:
        return on_node
    built = build_dir() / "lib/shim"
    return built if built.is_dir() else _INSTALLED


def _image(name: str, image: Host, shims: dict[str, Library]) -> Finding:
    library = c_library(image)
    if library is None:
        return info("shim.image", f"{name} has no known C library: only static programs run there, and the shim does not load in those")
    machines = {shim.machine for shim in shims.values()}
    if machines != {library.machine}:
        return error(
            "shim.image", f"{name} is for {library.machine}, the shim for {', '.join(sorted(machines))}", "install the matching agent"
        )
    missing = _missing_symbols(library, shims)
    if library.kind == "musl":
        found = f"the shim does not find {', '.join(missing)} there" if missing else "the shim finds all its symbols there"
        return info(
            "shim.image",
            f"{name} has musl: NVIDIA's CUDA libraries need glibc, and {found}",
            "use an image with glibc for CUDA programs; the audit finds a program from a musl image that reaches a GPU",
        )
    if missing:
        return error(
            "shim.image",
            f"the shim does not load in {name}: its glibc lacks {', '.join(missing[:3])}{' and more' if len(missing) > 3 else ''}",
            "use an image with glibc 2.17 or later",
        )
    return ok("shim.image", f"the glibc of {name} has all symbols and versions that the shim needs (read from the files, not loaded)")


def _missing_symbols(library: CLibrary, shims: dict[str, Library]) -> list[str]:
    """Return the symbols that the shim needs and the C library lacks, sorted; for musl without their versions."""
    missing = {symbol for shim in shims.values() for symbol in shim.needs if not _offered(symbol, library)}
    return sorted({symbol.partition("@")[0] for symbol in missing} if library.kind == "musl" else missing)


def _offered(symbol: str, library: CLibrary) -> bool:
    name = symbol.partition("@")[0]
    if name.startswith(_OWN_NAMES):
        return True
    return (name if library.kind == "musl" else symbol) in library.offers  # musl's loader ignores versions


def c_library(image: Host) -> CLibrary | None:
    """Read the C library of an image; None where it has no known one."""
    for directory in _DIRECTORIES:
        names = image.names(directory)
        musl = next((name for name in names if name.startswith("ld-musl-") and name.endswith(".so.1")), None)
        if musl is not None:
            return _read("musl", [image.path(f"{directory}/{musl}")])
        if _GLIBC[0] in names:
            return _read("glibc", [image.path(f"{directory}/{name}") for name in (*_GLIBC, *_loaders(names)) if name in names])
    return None


def _loaders(names: Sequence[str]) -> list[str]:
    return [name for name in names if name.startswith("ld-linux-")]


def _read(kind: str, paths: Sequence[Path]) -> CLibrary | None:
    try:
        libraries = [read_library(path) for path in paths]
    except (OSError, ElfError):  # such as a library in an unknown format
        return None
    return CLibrary(kind, libraries[0].machine, frozenset().union(*(library.offers for library in libraries)))


def _found_images(host: Host) -> dict[str, str]:
    """Return the root of one unpacked image of each kind."""
    found: dict[str, str] = {}
    for directory, below in _LAYERS:
        for name in host.names(directory):
            root = host.path(f"{directory}/{name}/{below}")
            library = c_library(Host(root))
            if library is not None:
                found.setdefault(library.kind, str(root))
            if len(found) == len(_KINDS):
                return found
    return found
