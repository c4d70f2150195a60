# SPDX-License-Identifier: Apache-2.0
"""Builds an image from its Dockerfile without a container engine, on the platform the options name.

Each instruction that changes files is an overlay layer, made in a private mount namespace and kept in the options' folder
under a hash of everything it came from; a second build does nothing. ``debian:<suite>-slim`` is Debian's minimal system by
debootstrap. Instructions and forms that our Dockerfiles do not use are refused by name.
"""

import hashlib
import io
import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from release import archive
from release.platforms import Platform, host

_OPAQUE = "trusted.overlay.opaque"
_STEP_SECONDS = 3600
"""For one RUN. Under emulation, or at the lowest priority beside other work, a step that takes minutes alone takes most of an hour."""
_FROM_THE_MACHINE = ("/etc/resolv.conf", "/etc/ssl/certs")
"""What RUN needs of this machine to reach the package registries. A copy is mounted while it runs: packages' scripts write there."""
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
INPUTS_DIR = "/dev/inputs"
"""Where RUN finds the options' inputs."""
_SLIM = """\
path-exclude /usr/share/doc/*
path-include /usr/share/doc/*/copyright
path-exclude /usr/share/man/*
path-exclude /usr/share/locale/*
path-exclude /usr/share/info/*
path-exclude /usr/share/lintian/*
"""
"""dpkg's configuration in Debian's slim images: packages bring their license, and no other documentation."""
_SOURCES = """\
deb http://deb.debian.org/debian {suite} main
deb http://deb.debian.org/debian {suite}-updates main
deb http://deb.debian.org/debian-security {suite}-security main
"""
_RESIDUE = re.compile(
    r"(var/cache/apt|var/lib/apt/lists|run|tmp|dev|root/\.cache)/.+|root/\.cache|var/log/.*[^/]\.log(\..*)?|var/log/(btmp|wtmp|lastlog|faillog)"
    r"|var/log/apt/.+|var/cache/ldconfig/aux-cache|var/cache/debconf/.*-old|var/lib/dpkg/.*-old|etc/(resolv\.conf|hostname|machine-id|\.pwd\.lock)"
    r"|etc/(passwd|group|shadow|gshadow|subuid|subgid)-"
)
"""Files that differ from run to run or come from this machine. No image holds them."""


class DockerfileError(Exception):
    """A Dockerfile cannot be built here; the message names the instruction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How and where images are built."""

    folder: Path
    """Holds the layers; on a file system that overlayfs can stand on."""
    platform: Platform = field(default_factory=host)
    environment: Mapping[str, str] | None = None
    """All of the environment of RUN and debootstrap; None: this process's own."""
    inputs: Path | None = None
    """Mounted read-only at ``INPUTS_DIR`` while RUN runs."""
    epoch: int | None = None
    """No file of an image is newer, in seconds since 1970; the files of a layer depend on it."""
    updates: bool = False
    """Install Debian's updates and security updates, as Debian's own images do."""


@dataclass(frozen=True, slots=True)
class _Stage:
    """What the instructions so far amount to."""

    layers: tuple[Path, ...]
    environment: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
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
    options: Options
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


@dataclass(frozen=True, slots=True)
class Built:
    """An image that was built."""

    image: archive.Image
    files: tuple[Path, ...]
    """The folder of each layer, lowest first."""
    key: str
    """Names everything that the image was made of."""

    def read_text(self, path: str) -> str:
        """Return a file of the image that no later layer removed."""
        return next(text.read_text() for folder in reversed(self.files) if (text := folder / path).exists())


def build(dockerfile: Path, context: Path, targets: Sequence[str], options: Options) -> list[Built]:
    """Build the named stages as ``docker build --target stage -f dockerfile context`` would; return them in that order."""
    under_way = _Build(context, options)
    for keyword, rest in _instructions(dockerfile):
        handler = _HANDLERS.get(keyword)
        if handler is None:
            raise DockerfileError(f"{dockerfile}: {keyword} is not one of {', '.join(_HANDLERS)}, which is all this builder knows")
        handler(under_way, rest)
    built = [_built(under_way.stages[target], options) for target in targets]
    used = {layer for stage in under_way.stages.values() for layer in stage.layers}
    for layer in set(options.folder.iterdir()) - used:
        shutil.rmtree(layer)
    return built


def build_images(dockerfile: Path, context: Path, targets: Mapping[str, str], folder: Path, options: Options) -> list[Path]:
    """Build images for one platform into archives of their own, as ``docker build -t name`` would.

    Args:
        targets: stage of the Dockerfile -> name of its image.
        folder: holds only the archives.
    Returns: the OCI archives in the order of the targets; an archive is written only if its image changed.
    """
    archives = []
    for name, one in zip(targets.values(), build(dockerfile, context, list(targets), options), strict=True):
        configured = hashlib.sha256(repr((name, dict(one.image.configuration))).encode()).hexdigest()[:8]
        path = folder / f"{one.key}-{configured}.tar"
        if not path.exists():
            archive.write_archive(path, name, one.image.layers, one.image.configuration)
        archives.append(path)
    for outdated in set(folder.iterdir()) - set(archives):
        outdated.unlink()
    return archives


def _built(stage: _Stage, options: Options) -> Built:
    configuration = {
        "Env": list(stage.environment),
        "Labels": dict(label.split("=", 1) for label in stage.labels),
        "Entrypoint": list(stage.entrypoint),
        "WorkingDir": stage.workdir,
        "User": stage.user,
    }
    image = archive.Image(options.platform, [_layer_tar(layer, options.epoch) for layer in stage.layers], configuration)
    return Built(image, tuple(layer / "files" for layer in stage.layers), stage.key)


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
        build.advance(_debian(base.removeprefix("debian:").removesuffix("-slim"), build.options))
    else:
        raise DockerfileError(f"FROM {base}: this builder has debian:<suite>-slim and earlier stages only")


def _run(build: _Build, rest: str) -> None:
    stage = build.current
    exports = "".join(f"export {shlex.quote(setting)}; " for setting in stage.environment)
    script = f"{exports}mkdir -p {shlex.quote(stage.workdir)}; cd {shlex.quote(stage.workdir)} && {rest}"
    inside = f"chroot $ROOT /bin/sh -ec {shlex.quote(script)}"
    build.advance(_with_layer(stage, f"RUN {script}", build.options, lambda fresh: _in_overlay(stage, fresh, inside, build.options)))


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
        _in_overlay(origin or stage, None, f"{_COPY_FUNCTION}\n{copy}", build.options)

    content = origin.key if origin else _content_hash([build.context / source for source in sources])
    build.advance(_with_layer(stage, f"COPY {sources} {target} {content}", build.options, fill))


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


def _label(build: _Build, rest: str) -> None:
    build.advance(replace(build.current, labels=(*build.current.labels, *shlex.split(rest))))


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
    "LABEL": _label,
    "ENTRYPOINT": _entrypoint,
    "USER": _user,
}


# --- layers -------------------------------------------------------------------------------------------------------


def _with_layer(stage: _Stage, recipe: str, options: Options, fill: Callable[[Path], None]) -> _Stage:
    """The stage with one more layer, made unless the same was made before from the same."""
    key = "\n".join([stage.layers[-1].name if stage.layers else "", recipe, options.platform.architecture, str(options.epoch)])
    layer = options.folder / hashlib.sha256(key.encode()).hexdigest()[:24]
    if not layer.exists():
        _make_layer(layer, fill)
    return replace(stage, layers=(*stage.layers, layer))


def _make_layer(layer: Path, fill: Callable[[Path], None]) -> None:
    unfinished = layer.with_name(layer.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    (unfinished / "files").mkdir(parents=True)
    fill(unfinished / "files")
    unfinished.rename(layer)


def _debian(suite: str, options: Options) -> _Stage:
    """Debian's minimal system, without documentation, as the layers everything else stands on."""

    def fill(fresh: Path) -> None:
        with tempfile.TemporaryDirectory(dir=options.folder.parent) as scratch:
            written = f"lowerdir=/run,upperdir={fresh.with_name('run')},workdir={scratch}"  # mount(8) keeps notes below /run
            hide = f"mkdir {fresh.with_name('run')}; mount -n -t overlay overlay -o {shlex.quote(written)} /run"
            bootstrap = (
                f"debootstrap --arch={options.platform.architecture} --variant=minbase {shlex.quote(suite)} {shlex.quote(str(fresh))}"
            )
            _shell(f"{hide}; {bootstrap}", bootstrap, options)
        shutil.rmtree(fresh.with_name("run"))
        for name in ("archives", "lists"):
            shutil.rmtree(fresh / ("var/cache/apt" if name == "archives" else "var/lib/apt") / name)
        shutil.rmtree(fresh / "dev")
        (fresh / "dev").mkdir()
        (fresh / "etc/ssl/certs").mkdir(parents=True, exist_ok=True)  # where _FROM_THE_MACHINE mounts
        sources = _SOURCES.format(suite=suite).splitlines(keepends=True)
        (fresh / "etc/apt/sources.list").write_text("".join(sources if options.updates else sources[:1]))
        (fresh / "etc/dpkg/dpkg.cfg.d/slim").write_text(_SLIM)
        _remove_documentation(fresh / "usr/share")

    stage = _with_layer(_Stage(()), f"FROM debian:{suite}-slim {options.updates}", options, fill)
    if not options.updates:
        return stage
    upgrade = "chroot $ROOT /bin/sh -ec 'apt-get update -q && apt-get dist-upgrade -q -y --no-install-recommends'"
    return _with_layer(stage, upgrade, options, lambda fresh: _in_overlay(stage, fresh, upgrade, options))


def _remove_documentation(share: Path) -> None:
    """Remove what dpkg would not install by ``_SLIM``."""
    for name in ("man", "locale", "info", "lintian"):
        shutil.rmtree(share / name, ignore_errors=True)
    for path in sorted((share / "doc").rglob("*"), reverse=True):
        if path.is_dir() and not path.is_symlink():
            if not any(path.iterdir()):
                path.rmdir()
        elif path.name != "copyright":
            path.unlink()


def _in_overlay(stage: _Stage, fresh: Path | None, script: str, options: Options) -> None:
    """Run a shell script that sees the stage's files at $ROOT; what it changes there lands in ``fresh``, or nowhere."""
    with tempfile.TemporaryDirectory(dir=options.folder.parent) as scratch:
        for name in ("root", "work", "discarded"):
            Path(scratch, name).mkdir()
        lower = ":".join(str(layer / "files") for layer in reversed(stage.layers))
        written = f"lowerdir={lower},upperdir={fresh or Path(scratch, 'discarded')},workdir={scratch}/work"
        mounts = [
            f"ROOT={scratch}/root",
            f"mount -n -t overlay overlay -o {shlex.quote(written)} $ROOT",
            "mount -n -t proc proc $ROOT/proc",
        ]
        mounts += ["mount -n -t tmpfs tmpfs $ROOT/dev"]
        mounts += [f"touch $ROOT/dev/{device}; mount -n --bind /dev/{device} $ROOT/dev/{device}" for device in _DEVICES]
        if options.inputs is not None:
            at = f"$ROOT{INPUTS_DIR}"
            mounts.append(f"mkdir {at}; mount -n --bind {shlex.quote(str(options.inputs))} {at}; mount -n -o remount,bind,ro {at}")
        for path in _FROM_THE_MACHINE:
            copied = f"{scratch}/machine{path}"
            mounts.append(f"mkdir -p $(dirname {copied}); cp -aL {path} {copied}; mount -n --bind {copied} $ROOT{path}")
        _shell("\n".join(["set -e", *mounts, script]), script, options)


def _shell(script: str, shown: str, options: Options) -> None:
    """Run a shell script in mount and PID namespaces of its own: its mounts and stray processes end with it."""
    isolated = ["unshare", "--mount", "--pid", "--fork", "--propagation", "private"]
    done = subprocess.run(
        ["nice", "-n", "19", *isolated, "sh", "-ec", script],
        env=None if options.environment is None else dict(options.environment),
        capture_output=True,
        text=True,
        timeout=_STEP_SECONDS,
        check=False,
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


def _layer_tar(layer: Path, epoch: int | None) -> bytes:
    """A layer in the form images carry: what the overlay marks as removed becomes a ``.wh.`` file."""
    packed = layer / "layer.tar"
    if not packed.exists():
        unfinished = layer / "layer.unfinished"
        with tarfile.open(unfinished, "w", format=tarfile.GNU_FORMAT) as tar:
            for path in sorted((layer / "files").rglob("*")):
                name = str(path.relative_to(layer / "files"))
                if not _RESIDUE.fullmatch(name):
                    _add_layer_entry(tar, path, name, epoch)
        unfinished.rename(packed)
    return packed.read_bytes()


def _add_layer_entry(tar: tarfile.TarFile, path: Path, name: str, epoch: int | None) -> None:
    def normalised(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uname = member.gname = ""  # names of this machine's users
        member.mtime = int(member.mtime) if epoch is None else min(int(member.mtime), epoch)
        return member

    status = path.lstat()
    if stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:
        folder, _, removed = name.rpartition("/")
        tar.addfile(tarfile.TarInfo(f"{folder}/.wh.{removed}" if folder else f".wh.{removed}"), io.BytesIO())
        return
    tar.add(path, name, recursive=False, filter=normalised)
    if stat.S_ISDIR(status.st_mode) and _OPAQUE in os.listxattr(path, follow_symlinks=False):
        tar.addfile(tarfile.TarInfo(f"{name}/.wh..wh..opq"), io.BytesIO())
