# SPDX-License-Identifier: Apache-2.0
"""A tenant that gives the shim other limits than its container's; see ``other_limits.c``."""

import os
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")


def build(directory: Path) -> Path:
    """Compile the library into ``directory``; return its path."""
    library = directory / "other_limits.so"
    compiler = os.environ.get("CC", "cc")
    command: list[str | Path] = [compiler, "-std=gnu11", "-Wall", "-Werror", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"]
    subprocess.run(command, check=True)
    return library


def environment(library: Path, limits: Path) -> str:
    """Return the variables of a shell command that give a program these limits."""
    return f"LD_PRELOAD={library}${{LD_PRELOAD:+:$LD_PRELOAD}} OTHER_LIMITS={limits}"
