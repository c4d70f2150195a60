# SPDX-License-Identifier: Apache-2.0
"""Paths of this source tree, and of the libraries and programs built in it."""

import os
from pathlib import Path

SOURCE_ROOT = Path(__file__).resolve().parent.parent


class NotBuiltError(Exception):
    """A library or program is not built."""


def build_dir() -> Path:
    """Return the build directory: that in ALIQUOT_BUILD_DIR, such as a sanitizer build, or the tree's ``build``."""
    return Path(os.environ.get("ALIQUOT_BUILD_DIR", SOURCE_ROOT / "build")).absolute()


def built(relative: str) -> Path:
    """Return the path of a built file. Raises NotBuiltError with the command that builds it."""
    path = build_dir() / relative
    if path.exists():
        return path
    if (SOURCE_ROOT / "cuda_shim").exists():
        raise NotBuiltError(f"{path} is missing; build it with: make -C {SOURCE_ROOT / 'cuda_shim'}")
    raise NotBuiltError(
        f"{path} is missing: an installed package has no native libraries. Run `make native` in the source tree or the unpacked sdist, "
        "and set ALIQUOT_BUILD_DIR to its directory build"
    )
