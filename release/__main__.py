# SPDX-License-Identifier: Apache-2.0
"""``python -m release``: write everything that a release publishes into build/release, with SHA256SUMS.

A part that this machine cannot build is left out, and the last lines say so. With ``--complete`` that is a failure.
"""

import argparse
import hashlib
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from release import images, plugin
from release.chart import write_chart, write_chart_archive
from release.distributions import write_distributions
from release.dockerfile import DockerfileError
from release.inputs import InputError
from release.platforms import ALL, Platform
from release.progress import begin
from release.source import SourceError, export

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build"
SUMS = "SHA256SUMS"


def main(argv: Sequence[str]) -> int:
    """Build; return the exit status."""
    options = _parser().parse_args(argv)
    started = time.monotonic()
    try:
        files, left_out = build(options)
    except (SourceError, InputError, DockerfileError) as failed:
        sys.stderr.write(f"release: {failed}\n")
        return 1
    for path in files:
        sys.stdout.write(f"{path.stat().st_size / (1 << 20):9.1f} MiB  {os.path.relpath(path)}\n")
    for sentence in left_out:
        sys.stdout.write(f"LEFT OUT: {sentence}\n")
    sys.stdout.write(f"built in {time.monotonic() - started:.0f} s\n")
    return 1 if left_out and options.complete else 0


def build(options: argparse.Namespace) -> tuple[list[Path], list[str]]:
    """Write the release; return its files, and a sentence for each part that was left out."""
    out, work, inputs = (path.absolute() for path in (options.out, options.work, options.inputs))
    source = export(ROOT, work / "source")
    if source.changed:
        sys.stdout.write("the working tree differs from its commit: this is a trial, not a release\n")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    platforms = options.platforms
    begin("wheel, sdist and chart")
    sdist, wheel = write_distributions(source, out)
    chart = write_chart(source, out)
    files = [sdist, wheel, chart, write_chart_archive(source, chart, out)]
    files += plugin.write_plugin(source, wheel, inputs / "plugin", out, platforms, url=options.url, offline=options.offline)
    left_out = []
    if missing := images.missing_tools():
        left_out.append(f"the images: this machine lacks {missing}")
    elif not options.without_images:
        made, left_out = images.write_images(source, work, inputs, out, platforms, offline=options.offline)
        files += made
    sums = out / SUMS
    sums.write_text("".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(files)))
    return [*files, sums], left_out


def _platforms(text: str) -> list[Platform]:
    unknown = [name for name in text.split(",") if name not in ALL]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(map(repr, unknown))}; known: {', '.join(ALL)}")
    return [ALL[name] for name in text.split(",")]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m release", description="Build everything that a release publishes.")
    parser.add_argument("--out", type=Path, default=BUILD / "release", help="folder of the release, emptied first (%(default)s)")
    parser.add_argument("--work", type=Path, default=BUILD / "release-work", help="folder of intermediate files (%(default)s)")
    parser.add_argument("--inputs", type=Path, default=BUILD / "release-inputs", help="folder of fetched packages (%(default)s)")
    parser.add_argument("--platforms", type=_platforms, default=",".join(ALL), help="comma list for images and plugin (%(default)s)")
    parser.add_argument("--url", default=os.environ.get("RELEASE_URL", ""), help="where the files will be published ($RELEASE_URL)")
    parser.add_argument("--offline", action="store_true", help="fetch nothing: every input was fetched before")
    parser.add_argument("--without-images", action="store_true", help="leave the images out")
    parser.add_argument("--complete", action="store_true", help="fail when a part was left out")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
