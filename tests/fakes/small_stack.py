# SPDX-License-Identifier: Apache-2.0
"""Finds the smallest stack of a thread that can call NVML; see ``small_stack.c``."""

import os
import subprocess
from pathlib import Path

from tests.fakes.container import LIBRARY_DIR, Container

SOURCE = Path(__file__).with_suffix(".c")
LEAST_KIB, MOST_KIB, STEP_KIB = 16, 128, 2


class SmallStack:
    """The program that calls NVML."""

    def __init__(self, directory: Path, container: Container) -> None:
        """Compile the program into ``directory``; it links with the container's NVML."""
        self._program = directory / "small_stack"
        compiler, library = os.environ.get("CC", "cc"), container.root / LIBRARY_DIR / "libnvidia-ml.so.1"
        subprocess.run([compiler, "-std=gnu11", "-Wall", "-Werror", "-o", self._program, SOURCE, library, "-lpthread"], check=True)

    def needed_kib(self, container: Container, call: str) -> int:
        """Return the smallest stack in bytes with which a call succeeds in a container."""
        for kib in range(LEAST_KIB, MOST_KIB, STEP_KIB):
            if container.run([self._program, call, str(kib * 1024)]).status == 0:
                return kib
        raise AssertionError(f"{call} does not succeed with {MOST_KIB} KiB")
