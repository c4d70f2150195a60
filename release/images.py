# SPDX-License-Identifier: Apache-2.0
"""The images of agent and scheduler for several platforms, each in one archive, with a bill of materials for each platform."""

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from release.archive import write_release_archive
from release.bom import write_bom
from release.dockerfile import INPUTS_DIR, Built, Options, build
from release.inputs import IMAGE_PYTHON, debian_hashes, debian_proxy, environment_of, fetch_wheels, locked
from release.platforms import Platform, PlatformError, runnable
from release.progress import begin
from release.source import Source

REGISTRY = "localhost"
"""The first part of our images' names in the manifests: no registry. The images are loaded into the nodes or pushed under another name."""
LOCKS = {"agent": "requirements.lock", "scheduler": "requirements-scheduler.lock"}
"""The lock file of each image, by the stage of the Dockerfile."""
_DOCKERFILE = "deploy/daemonset/Dockerfile"
_PROGRAMS = ("debootstrap", "unshare", "chroot", "mount")


def image_name(target: str, version: str) -> str:
    """Return the full name of an image as the manifests have it."""
    return f"{REGISTRY}/aliquot-{target}:{version}"


def missing_tools() -> str:
    """Return what this machine lacks to build images, or an empty text."""
    lacking = ["root"] if os.geteuid() != 0 else []
    lacking += [name for name in _PROGRAMS if shutil.which(name) is None]
    return ", ".join(lacking)


def write_images(
    source: Source, work: Path, inputs: Path, out: Path, platforms: Sequence[Platform], *, offline: bool
) -> tuple[list[Path], list[str]]:
    """Write an archive for each image; return the files, and a sentence for each platform that was left out."""
    built: dict[Platform, list[Built]] = {}
    left_out = []
    for platform in platforms:
        try:
            with runnable(platform):
                begin(f"images for {platform.architecture}: the longest part")
                built[platform] = _build(source, work, inputs, platform, offline=offline)
        except PlatformError as missing:
            left_out.append(f"the {platform.architecture} images: {missing}")
    if not built:
        return [], left_out
    hashes = debian_hashes(inputs / "debian")
    files = []
    begin("image archives and bills of materials")
    for place, (target, lock) in enumerate(LOCKS.items()):
        stem = f"aliquot-{target}-{source.version}"
        archive = out / f"{stem}.tar"
        images = [images[place].image for images in built.values()]
        write_release_archive(archive, image_name(target, source.version), images, epoch=source.epoch)
        files.append(archive)
        for platform, some in built.items():
            files.append(out / f"{stem}-{platform.architecture}.cdx.json")
            write_bom(source, some[place], lock, hashes, files[-1])
    return files, left_out


def _build(source: Source, work: Path, inputs: Path, platform: Platform, *, offline: bool) -> list[Built]:
    wheels = fetch_wheels(_requirements(source, platform), inputs / "wheels", platform, IMAGE_PYTHON, offline=offline)
    folder = work / f"layers-{platform.architecture}"
    folder.mkdir(parents=True, exist_ok=True)
    (wheels / "apt.conf").write_text('Acquire::Check-Valid-Until "false";\nAcquire::Languages "none";\nAPT::Sandbox::User "root";\n')
    with debian_proxy(inputs / "debian", offline=offline) as proxy:
        options = Options(
            folder=folder,
            platform=platform,
            environment=_environment(proxy, source.epoch),
            inputs=wheels,
            epoch=source.epoch,
            updates=True,
        )
        return build(source.root / _DOCKERFILE, source.root, list(LOCKS), options)


def _requirements(source: Source, platform: Platform) -> dict[str, str]:
    """Return what every stage installs; the scheduler's lock includes the agent's."""
    environment = environment_of(platform, IMAGE_PYTHON)
    locks = ("requirements-build.lock", *LOCKS.values())
    return {name: line for lock in locks for name, line in locked(source.root / lock, environment).items()}


def _environment(proxy: str, epoch: int) -> Mapping[str, str]:
    """Return the whole environment of a build, without any variable of this machine."""
    return {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/root",
        "LC_ALL": "C.UTF-8",
        "TZ": "UTC",
        "SOURCE_DATE_EPOCH": str(epoch),
        "PYTHONHASHSEED": "0",
        "DEBIAN_FRONTEND": "noninteractive",
        "APT_CONFIG": f"{INPUTS_DIR}/apt.conf",
        "http_proxy": proxy,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": INPUTS_DIR,
        "PIP_NO_CACHE_DIR": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_ROOT_USER_ACTION": "ignore",
    }
