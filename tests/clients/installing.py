# SPDX-License-Identifier: Apache-2.0
"""Installs the clients of ``clients.toml`` into ``build/clients/NAME``, each by its own package manager.

An installed client is kept while its row stays the same, so a second run needs no network. Invariant: nothing outside ``build/clients`` and
the package managers' caches changes.
"""

import fcntl
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PIN_TABLE = Path(__file__).with_name("clients.toml")
STAMP = ".installed"
INSTALL_SECONDS = 540
COMPONENTS = "main contrib non-free"
"""Of Debian's archive; nvtop and nvidia-smi are not in main."""


class NotInstallableError(Exception):
    """A client cannot be installed here, because its module or a program is missing. A command that fails is no such reason."""


@dataclass(frozen=True)
class Pin:
    """A row of the table."""

    name: str
    kind: str
    version: str
    install: Sequence[str] = ()
    headers: Sequence[str] = ()
    heavy: bool = False
    why: str = ""


@dataclass(frozen=True)
class Client:
    """An installed client."""

    pin: Pin
    root: Path

    @property
    def python(self) -> Path:
        """The interpreter of its environment."""
        return self.root / "venv/bin/python"

    def program(self, name: str) -> Path:
        """Return the path of one of its programs. Raises: AssertionError with the folders searched."""
        folders = ("venv/bin", "bin", "usr/bin", "usr/lib/nvidia/current", "usr/lib/nvidia")
        found = next((path for folder in folders if (path := self.root / folder / name).is_file()), None)
        assert found is not None, f"{self.pin.name} has no program {name} in {', '.join(folders)} of {self.root}"
        return found


def read_pins() -> Mapping[str, Pin]:
    """Return the rows of the table by name."""
    return {name: Pin(name, **row) for name, row in tomllib.loads(PIN_TABLE.read_text()).items()}


def install_client(name: str, build: Path) -> Client:
    """Return the client, installed for the version in the table.

    Raises: NotInstallableError; AssertionError when a command of its package manager fails; KeyError for a name that is not in the table.
    """
    pin = read_pins()[name]
    if pin.kind == "missing":
        raise NotInstallableError(pin.why)
    root = build.absolute() / "clients" / name
    root.parent.mkdir(parents=True, exist_ok=True)
    with (root.parent / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two workers of pytest-xdist
        if not is_installed(name, build):
            shutil.rmtree(root, ignore_errors=True)
            root.mkdir()
            _INSTALLERS[pin.kind](pin, root)
            (root / STAMP).write_text(_stamp_of(pin))
    return Client(pin, root)


def is_installed(name: str, build: Path) -> bool:
    """Whether the version in the table is installed, for this Python."""
    stamp = build.absolute() / "clients" / name / STAMP
    return stamp.is_file() and stamp.read_text() == _stamp_of(read_pins()[name])


def _stamp_of(pin: Pin) -> str:
    return json.dumps([asdict(pin), sys.version])


def machine_client(name: str, build: Path, python: str | None = None) -> Client:
    """Return the client that this machine has: a program on the PATH, or a package of the Python. Otherwise install a small one.

    Raises: NotInstallableError: it is large and not installed, or installing failed; KeyError.
    """
    pin, root = read_pins()[name], build.absolute() / "clients" / f"machine-{name}"
    shutil.rmtree(root, ignore_errors=True)
    version = _link_program(name, root) if pin.kind != "python" else python and _wrap_python(name, root, python)
    if version:
        return Client(replace(pin, version=version), root)
    if pin.heavy and not is_installed(name, build):
        raise NotInstallableError(f"large and not installed: make clients ARGS='--client {name}', or a Python that has it")
    try:
        return install_client(name, build)
    except (AssertionError, subprocess.TimeoutExpired) as exc:  # a machine without a network is no failure of the client
        raise NotInstallableError(str(exc)) from exc


def _link_program(name: str, root: Path) -> str | None:
    """Make a client of the machine's program of that name; return a text for its version, or None without the program."""
    if (path := shutil.which(name)) is None:
        return None
    (root / "bin").mkdir(parents=True)
    (root / "bin" / name).symlink_to(path)
    return "of this machine"


def _wrap_python(name: str, root: Path, python: str) -> str | None:
    """Make a client of a Python and its program; return the version of the package there, or None without it."""
    script = f"import importlib.metadata as m; print(m.version({name!r}))"
    done = subprocess.run([python, "-c", script], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return None
    folder = root / "venv/bin"
    folder.mkdir(parents=True)
    # a link would not find the packages
    (folder / "python").write_text(f'#!/bin/sh\nexec {shlex.quote(str(Path(python).absolute()))} "$@"\n')
    (folder / "python").chmod(0o755)
    if (program := Path(python).with_name(name)).is_file():
        (folder / name).symlink_to(program.absolute())
    return done.stdout.strip()


def _install_wheels(pin: Pin, root: Path) -> None:
    uv, python = Path(sys.executable).parent / "uv", root / "venv/bin/python"
    _run([uv, "venv", "--quiet", "--python", sys.executable, root / "venv"])
    install: list[str | Path] = [uv, "pip", "install", "--quiet", "--python", python]
    if not pin.headers:
        _run([*install, "--only-binary", ":all:", *pin.install])
        return
    _run([*install, "--only-binary", ":all:", *pin.headers])
    _run([*install, *pin.install], _build_environment(root))


def _build_environment(root: Path) -> Mapping[str, str]:
    """Return the variables that let a package of CUDA bindings build without a CUDA toolkit."""
    include = next(path.parent for path in (root / "venv").rglob("cuda.h"))
    toolkit = root / "toolkit"
    (toolkit / "lib64").mkdir(parents=True)
    (toolkit / "include").symlink_to(include)
    (toolkit / "lib64/libcuda.so").symlink_to(root.parents[1] / "lib/sim/libcuda.so.1")
    (toolkit / ".aksetup-defaults.py").write_text("CUDA_ENABLE_CURAND = False\n")  # PyCUDA reads its settings from the home directory
    cache = os.environ.get("UV_CACHE_DIR", str(Path.home() / ".cache/uv"))
    paths = {"CUDA_ROOT": toolkit, "CPATH": toolkit / "include", "LIBRARY_PATH": toolkit / "lib64", "HOME": toolkit, "UV_CACHE_DIR": cache}
    return {name: str(path) for name, path in paths.items()}


def _install_modules(pin: Pin, root: Path) -> None:
    go = _found("go")
    environment = {"GOBIN": str(root / "bin"), "GOFLAGS": "-mod=mod -buildvcs=false", "GOTOOLCHAIN": "local", "CGO_ENABLED": "1"}
    for package in pin.install:
        _run([go, "install", f"{package}@{pin.version}"], environment)


def _install_packages(pin: Pin, root: Path) -> None:
    options = _private_archive(root.parent / ".apt")
    for package in pin.install:
        _run([_found("apt-get"), *options, "-q", "download", f"{package}={pin.version}"], directory=root)
    for archive in root.glob("*.deb"):
        _run([_found("dpkg-deb"), "-x", archive, root])


def _private_archive(root: Path) -> list[str]:
    """Return options that let apt see all components of the archive that this machine uses, without a change of the machine's settings."""
    form = "$(SITE) $(CODENAME) $(COMPONENT) $(ORIGIN)"
    listed = _run([_found("apt-get"), "indextargets", "--format", form, "Created-By: Packages"]).splitlines()
    main = [words for line in listed if (words := line.split())[2:] == ["main", "Debian"] and re.fullmatch("[a-z]+", words[1])]
    if not main:
        raise NotInstallableError("apt knows no archive of Debian's main component; run apt-get update")
    site, codename = main[0][:2]
    for directory in ("lists/partial", "cache/archives/partial"):
        (root / directory).mkdir(parents=True, exist_ok=True)
    keyring = "/usr/share/keyrings/debian-archive-keyring.gpg"
    (root / "sources.list").write_text(f"deb [signed-by={keyring}] {site} {codename} {COMPONENTS}\n")
    settings = {
        "Dir::Etc::sourcelist": root / "sources.list",
        "Dir::Etc::sourceparts": "/dev/null",
        "Dir::State::lists": root / "lists",
        "Dir::Cache": root / "cache",
        "APT::Sandbox::User": "root",
    }
    options = [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]
    _run([_found("apt-get"), *options, "-q", "update"])
    return options


def _found(program: str) -> str:
    path = shutil.which(program)
    if path is None:
        raise NotInstallableError(f"{program} is not on the PATH")
    return path


def _run(command: Sequence[str | Path], environment: Mapping[str, str] | None = None, directory: Path = ROOT) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        env={**os.environ, **(environment or {})},
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=INSTALL_SECONDS,
        check=False,
    )
    if done.returncode != 0:
        shown = " ".join(str(word) for word in command)
        raise AssertionError(
            f"expected the pinned version to be installed, found that {shown} ended with {done.returncode}: {done.stderr[-600:]}"
        )
    return done.stdout


_INSTALLERS = {"python": _install_wheels, "go": _install_modules, "debian": _install_packages}
