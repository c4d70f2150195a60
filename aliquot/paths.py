"""Where the parts of this source tree are: the built libraries and programs, and the tree itself."""

import os
from pathlib import Path

SOURCE_ROOT = Path(__file__).resolve().parent.parent


class NotBuiltError(Exception):
    """Something that ``make`` builds is not there."""


def build_dir() -> Path:
    """Return the build directory; ALIQUOT_BUILD_DIR names another, such as a sanitizer build."""
    return Path(os.environ.get("ALIQUOT_BUILD_DIR", SOURCE_ROOT / "build")).absolute()


def built(relative: str) -> Path:
    """Return the path of something built, or raise NotBuiltError saying how to build it."""
    path = build_dir() / relative
    if not path.exists():
        raise NotBuiltError(f"{path} is missing; build it with: make -C {SOURCE_ROOT / 'cuda_shim'}")
    return path
