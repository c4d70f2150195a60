# SPDX-License-Identifier: Apache-2.0
"""A child process with the simulated NVML that answers queries, because a process can load only one NVML."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


class NvmlChild:
    """Runs a script that answers each line of words with one line of JSON."""

    def __init__(self, script: str, library: Path, sim: Path) -> None:
        self.env = {**os.environ, "ALIQUOT_SIM_DIR": str(sim)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", script, str(library)], env=self.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, *words: object) -> Any:
        """Send one line and return the reply."""
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()
