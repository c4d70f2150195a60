"""Builds an image from its Dockerfile without a container engine, so that the image under test is the one users build.

Each instruction that changes files is an overlay layer, made in a private mount namespace and kept below
``build/e2e/layers`` under a hash of everything it came from; a second build does nothing. ``debian:<suite>-slim`` is
Debian's minimal system by debootstrap. Instructions and forms that our Dockerfiles do not use are refused by name.
"""

import hashlib
import io
import json
import os
import shlex
import shutil
import stat
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.e2e.cluster import images
from tests.e2e.cluster.paths import BUILD

_LAYERS = BUILD / "layers"
_OPAQUE = "trusted.overlay.opaque"
_STEP_SECONDS = 900
_FROM_THE_MACHINE = ("/etc/resolv.conf", "/etc/ssl/certs")
"""What RUN needs of this machine to reach the package registries. A copy is mounted while it runs: packages' scripts write there."""
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")


class DockerfileError(Exception):
    """A Dockerfile cannot be built here; the message names the instruction."""


@dataclass(frozen=True, slots=True)
class _Stage:
    """What the instructions so far amount to."""

    layers: tuple[Path, ...]
    environment: tuple[str, ...] = ()
    workdir: str = "/"
    entrypoint: tuple[str, ...] = ()
    user: str = ""

    @property
    def key(self) -> str:
        """Names everything that went into the files."""
        return self.layers[-1].name


@dataclass(slots=True)
class _Build:
    """A build under way."""

    context: Path
    stages: dict[str, _Stage] = field(default_factory=dict)
    name: str = ""
    """Of the stage being built."""

    @property
    def current(self) -> _Stage:
        """The stage being built."""
        if not self.name:
            raise DockerfileError("the first instruction must be FROM")
        return self.stages[self.name]

    def advance(self, stage: _Stage) -> None:
        """The stage being built has got so far."""
        self.stages[self.name] = stage


def build_images(dockerfile: Path, context: Path, targets: Mapping[str, str], folder: Path) -> list[Path]:
    """Build images as ``docker build -f dockerfile --target stage -t name context`` would, once for each.

    Args:
        targets: the name of each image, by the stage it is made of.
        folder: holds nothing but the archives.
    Returns: the OCI archives in the order of the targets; those whose image did not change are left as they are.
    """
    build = _Build(context)
    for keyword, rest in _instructions(dockerfile):
        handler = _HANDLERS.get(keyword)
        if handler is None:
            raise DockerfileError(f"{dockerfile}: {keyword} is not one of {', '.join(_HANDLERS)}, which is all this builder knows")
        handler(build, rest)
    archives = [_archive(build.stages[target], name, folder) for target, name in targets.items()]
    for outdated in set(folder.iterdir()) - set(archives):
        outdated.unlink()
    used = {layer for stage in build.stages.values() for layer in stage.layers}
    for layer in set(_LAYERS.iterdir()) - used:
        shutil.rmtree(layer)
    return archives


def _archive(stage: _Stage, name: str, folder: Path) -> Path:
    """The archive of an image, written unless the same image was written before."""
    configuration = {
        "Env": list(stage.environment),
        "Entrypoint": list(stage.entrypoint),
        "WorkingDir": stage.workdir,
        "User": stage.user,
    }
    archive = folder / f"{stage.key}-{hashlib.sha256(repr((name, configuration)).encode()).hexdigest()[:8]}.tar"
    if not archive.exists():
        images.write_archive(archive, name, [_layer_tar(layer) for layer in stage.layers], configuration)
    return archive


def _instructions(dockerfile: Path) -> list[tuple[str, str]]:
    lines = [line for line in dockerfile.read_text().splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [(keyword.upper(), rest.strip()) for keyword, _, rest in (line.strip().partition(" ") for line in joined)]


def _from(build: _Build, rest: str) -> None:
    base, *named = rest.split()
    build.name = named[1] if named else str(len(build.stages))
    if base in build.stages:
        build.advance(build.stages[base])
    elif base.startswith("debian:") and base.endswith("-slim"):
        build.advance(_Stage((_debian(base.removeprefix("debian:").removesuffix("-slim")),)))
    else:
        raise DockerfileError(f"FROM {base}: this builder has debian:<suite>-slim and earlier stages only")


def _run(build: _Build, rest: str) -> None:
    stage = build.current
    exports = "".join(f"export {shlex.quote(setting)}; " for setting in stage.environment)
    script = f"{exports}mkdir -p {shlex.quote(stage.workdir)}; cd {shlex.quote(stage.workdir)} && {rest}"
    inside = f"chroot $ROOT /bin/sh -ec {shlex.quote(script)}"
    build.advance(_with_layer(stage, f"RUN {script}", lambda fresh: _in_overlay(stage, fresh, inside)))


def _copy(build: _Build, rest: str) -> None:
    stage = build.current
    words = rest.split()
    origin = build.stages[words.pop(0).removeprefix("--from=")] if words[0].startswith("--from=") else None
    *sources, destination = words
    target = os.path.normpath(os.path.join(stage.workdir, destination)) + ("/" if destination.endswith("/") else "")  # noqa: PTH118

    def fill(fresh: Path) -> None:
        from_root = "$ROOT" if origin else shlex.quote(str(build.context))
        without = "" if origin else "--exclude=__pycache__"  # as Dockerfile.dockerignore says; and programs that run now write there
        pairs = [(f"{from_root}/{shlex.quote(source.lstrip('/'))}", shlex.quote(f"{fresh}{target}")) for source in sources]
        copy = "\n".join(f"copy {source} {at} {without}" for source, at in pairs)
        _in_overlay(origin or stage, None, f"{_COPY_FUNCTION}\n{copy}")

    content = origin.key if origin else _content_hash([build.context / source for source in sources])
    build.advance(_with_layer(stage, f"COPY {sources} {target} {content}", fill))


_COPY_FUNCTION = """\
copy() {
    if [ -d "$1" ]; then
        mkdir -p "$2" && tar -C "$1" $3 -cf "$2/.copied" --exclude=./.copied . && tar -C "$2" -xpf "$2/.copied" && rm "$2/.copied"
    else mkdir -p "$(dirname "$2x")" && cp -a "$1" "$2"; fi
}"""


def _workdir(build: _Build, rest: str) -> None:
    build.advance(replace(build.current, workdir=rest))


def _env(build: _Build, rest: str) -> None:
    build.advance(replace(build.current, environment=(*build.current.environment, *shlex.split(rest))))


def _entrypoint(build: _Build, rest: str) -> None:
    build.advance(replace(build.current, entrypoint=tuple(json.loads(rest))))


def _user(build: _Build, rest: str) -> None:
    build.advance(replace(build.current, user=rest))


_HANDLERS = {
    "FROM": _from,
    "RUN": _run,
    "COPY": _copy,
    "WORKDIR": _workdir,
    "ENV": _env,
    "ENTRYPOINT": _entrypoint,
    "USER": _user,
}


# --- layers -------------------------------------------------------------------------------------------------------


def _with_layer(stage: _Stage, recipe: str, fill: Callable[[Path], None]) -> _Stage:
    """The stage with one more layer, made unless the same was made before from the same."""
    layer = _LAYERS / hashlib.sha256(f"{stage.key}\n{recipe}".encode()).hexdigest()[:24]
    if not layer.exists():
        _make_layer(layer, fill)
    return replace(stage, layers=(*stage.layers, layer))


def _make_layer(layer: Path, fill: Callable[[Path], None]) -> None:
    unfinished = layer.with_name(layer.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    (unfinished / "files").mkdir(parents=True)
    fill(unfinished / "files")
    unfinished.rename(layer)


def _debian(suite: str) -> Path:
    """Debian's minimal system, as the layer everything else stands on."""
    layer = _LAYERS / f"debian-{suite}"
    if not layer.exists():

        def fill(fresh: Path) -> None:
            with tempfile.TemporaryDirectory(dir=BUILD) as scratch:
                written = f"lowerdir=/run,upperdir={fresh.with_name('run')},workdir={scratch}"  # mount(8) keeps notes below /run
                hide = f"mkdir {fresh.with_name('run')}; mount -n -t overlay overlay -o {shlex.quote(written)} /run"
                _shell(f"{hide}; debootstrap --variant=minbase {shlex.quote(suite)} {shlex.quote(str(fresh))}", f"debootstrap {suite}")
            shutil.rmtree(fresh.with_name("run"))
            for name in ("archives", "lists"):
                shutil.rmtree(fresh / ("var/cache/apt" if name == "archives" else "var/lib/apt") / name)
            shutil.rmtree(fresh / "dev")
            (fresh / "dev").mkdir()
            (fresh / "etc/ssl/certs").mkdir(parents=True, exist_ok=True)  # where _FROM_THE_MACHINE mounts

        _make_layer(layer, fill)
    return layer


def _in_overlay(stage: _Stage, fresh: Path | None, script: str) -> None:
    """Run a shell script that sees the stage's files at $ROOT; what it changes there lands in ``fresh``, or nowhere."""
    with tempfile.TemporaryDirectory(dir=BUILD) as scratch:
        for name in ("root", "work", "discarded"):
            Path(scratch, name).mkdir()
        lower = ":".join(str(layer / "files") for layer in reversed(stage.layers))
        options = f"lowerdir={lower},upperdir={fresh or Path(scratch, 'discarded')},workdir={scratch}/work"
        mounts = [
            f"ROOT={scratch}/root",
            f"mount -n -t overlay overlay -o {shlex.quote(options)} $ROOT",
            "mount -n -t proc proc $ROOT/proc",
        ]
        mounts += ["mount -n -t tmpfs tmpfs $ROOT/dev"]
        mounts += [f"touch $ROOT/dev/{device}; mount -n --bind /dev/{device} $ROOT/dev/{device}" for device in _DEVICES]
        for path in _FROM_THE_MACHINE:
            copied = f"{scratch}/machine{path}"
            mounts.append(f"mkdir -p $(dirname {copied}); cp -aL {path} {copied}; mount -n --bind {copied} $ROOT{path}")
        _shell("\n".join(["set -e", *mounts, script]), script)


def _shell(script: str, shown: str) -> None:
    """Run a shell script in mount and PID namespaces of its own: its mounts and stray processes end with it."""
    isolated = ["unshare", "--mount", "--pid", "--fork", "--propagation", "private"]
    done = subprocess.run(
        ["nice", "-n", "19", *isolated, "sh", "-ec", script], capture_output=True, text=True, timeout=_STEP_SECONDS, check=False
    )
    if done.returncode != 0:
        raise DockerfileError(f"{shown}\nexited with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")


def _content_hash(paths: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
        for file in files:
            if "__pycache__" not in file.parts:
                digest.update(f"{file.relative_to(path)} {file.stat().st_mode} {file.stat().st_size}\n".encode())
                digest.update(file.read_bytes())
    return digest.hexdigest()


def _layer_tar(layer: Path) -> bytes:
    """A layer in the form images carry: what the overlay marks as removed becomes a ``.wh.`` file."""
    packed = layer / "layer.tar"
    if not packed.exists():
        unfinished = layer / "layer.unfinished"
        with tarfile.open(unfinished, "w", format=tarfile.GNU_FORMAT) as tar:
            for path in sorted((layer / "files").rglob("*")):
                _add_layer_entry(tar, path, str(path.relative_to(layer / "files")))
        unfinished.rename(packed)
    return packed.read_bytes()


def _add_layer_entry(tar: tarfile.TarFile, path: Path, name: str) -> None:
    status = path.lstat()
    if stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:
        folder, _, removed = name.rpartition("/")
        tar.addfile(tarfile.TarInfo(f"{folder}/.wh.{removed}" if folder else f".wh.{removed}"), io.BytesIO())
        return
    tar.add(path, name, recursive=False)
    if stat.S_ISDIR(status.st_mode) and _OPAQUE in os.listxattr(path, follow_symlinks=False):
        tar.addfile(tarfile.TarInfo(f"{name}/.wh..wh..opq"), io.BytesIO())
