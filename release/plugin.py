# SPDX-License-Identifier: Apache-2.0
"""The kubectl plugin ``kubectl vgpu``: an archive for each platform with all Python packages in it, and the manifest for krew.

The archive needs a Python of the workstation, of one of the versions in ``PYTHONS``, on a Linux with glibc.
"""

import hashlib
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from release.inputs import environment_of, fetch_wheels, locked
from release.platforms import Platform
from release.progress import begin
from release.source import Source
from release.tarball import Entry, write_tarball

PYTHONS = ("3.11", "3.12", "3.13")
"""The versions of CPython that the archive has compiled packages for."""
_ALSO = ("numpy",)
"""Packages of the scheduler's lock that the command line needs besides the agent's: `why` and `what-if` decide as the scheduler does."""

_LAUNCHER = """\
#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# kubectl vgpu: start the program with the packages beside this file.
here=$(dirname "$(readlink -f "$0")")
for python in python3 {candidates}; do
    version=$("$python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])' 2>/dev/null) || continue
    [ -d "$here/lib/$version" ] && exec "$python" -I "$here/lib/start.py" "$@"
done
echo "kubectl vgpu needs Python {first} to {last}, but {pythons} are other versions or not on the PATH: install one" >&2
exit 1
"""

_START = """\
# SPDX-License-Identifier: Apache-2.0
import sys
from pathlib import Path

here = Path(__file__).parent
sys.path[:0] = [str(here / "cp{}{}".format(*sys.version_info)), str(here / "common")]
from aliquot_cli.__main__ import kubectl_vgpu

kubectl_vgpu()
"""

_MANIFEST = """\
# For krew: kubectl krew install --manifest={name}.yaml --archive=ARCHIVE
apiVersion: krew.googlecontainertools.github.com/v1alpha2
kind: Plugin
metadata:
  name: {name}
spec:
  version: v{version}
  shortDescription: Show GPU shares, and explain why a pod waits
  description: |
    Lists GPUs and their shares, shows their use, explains why a pod waits, and keeps new work off a GPU.
    The cluster needs Aliquot.
  caveats: |
    Needs Python {first} to {last} on a Linux with glibc.
  platforms:
"""
_PLATFORM = """\
    - selector:
        matchLabels: {{os: linux, arch: {architecture}}}
      uri: {uri}
      sha256: {sha256}
      bin: kubectl-vgpu
"""


def write_plugin(
    source: Source, wheel: Path, inputs: Path, out: Path, platforms: Sequence[Platform], *, url: str, offline: bool
) -> list[Path]:
    """Write an archive for each platform, and the manifest that names them; return the paths.

    Args:
        url: where the files of the release will be; empty: the manifest has their names only.
    """
    archives = {}
    for platform in platforms:
        begin(f"kubectl plugin for {platform.architecture}")
        wheels = {python: _wheels(source, inputs, platform, python, offline=offline) for python in PYTHONS}
        archives[platform] = out / f"kubectl-vgpu-{source.version}-linux-{platform.architecture}.tar.gz"
        write_tarball(archives[platform], _entries(source, wheel, wheels), epoch=source.epoch)
    manifest = out / "vgpu.yaml"
    manifest.write_text(_manifest(source.version, archives, url))
    return [*archives.values(), manifest]


def _wheels(source: Source, inputs: Path, platform: Platform, python: str, *, offline: bool) -> list[Path]:
    environment = environment_of(platform, f"{python}.0")
    also = locked(source.root / "requirements-scheduler.lock", environment)
    requirements = locked(source.root / "requirements.lock", environment) | {name: also[name] for name in _ALSO}
    return sorted(fetch_wheels(requirements, inputs, platform, f"{python}.0", offline=offline).glob("*.whl"))


def _entries(source: Source, wheel: Path, wheels: Mapping[str, list[Path]]) -> dict[str, Entry]:
    """Return the archive's files. A wheel that serves every Python is in ``common`` once."""
    words = {"first": PYTHONS[0], "last": PYTHONS[-1], "candidates": " ".join(f"python{python}" for python in reversed(PYTHONS))}
    launcher = _LAUNCHER.format(**words, pythons=f"python3 {words['candidates']}")
    entries = {
        "kubectl-vgpu": Entry(launcher.encode(), executable=True),
        "LICENSE": Entry((source.root / "LICENSE").read_bytes()),
        "lib/start.py": Entry(_START.encode()),
        **_unpacked(wheel, "lib/common"),
    }
    names = [{path.name for path in some} for some in wheels.values()]
    everywhere = set.intersection(*names)
    for python, paths in wheels.items():
        for path in paths:
            folder = "lib/common" if path.name in everywhere else f"lib/cp{python.replace('.', '')}"
            entries |= _unpacked(path, folder)
    return entries


def _unpacked(wheel: Path, prefix: str) -> dict[str, Entry]:
    """Return the packages in a wheel, without its scripts."""
    with zipfile.ZipFile(wheel) as content:
        names = [name for name in content.namelist() if not name.endswith("/") and ".data/" not in name]
        return {f"{prefix}/{name}": Entry(content.read(name)) for name in names}


def _manifest(version: str, archives: Mapping[Platform, Path], url: str) -> str:
    parts = [_MANIFEST.format(name="vgpu", version=version, first=PYTHONS[0], last=PYTHONS[-1])]
    for platform, path in archives.items():
        uri = f"{url.rstrip('/')}/{path.name}" if url else path.name
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        parts.append(_PLATFORM.format(architecture=platform.architecture, uri=uri, sha256=digest))
    return "".join(parts)
