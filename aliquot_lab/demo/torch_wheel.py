# SPDX-License-Identifier: Apache-2.0
"""Finds a Python with PyTorch, and what its programs need on the simulated driver.

NVIDIA's CUDA runtime does not start on the simulated driver, so PyTorch gets another one by LD_PRELOAD: a runtime and a stand-in for cuBLAS
by their public interfaces (``simulated_runtime/``). On a real GPU it gets NVIDIA's.
"""

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from aliquot.paths import SOURCE_ROOT, built

ENV_PYTHON = "ALIQUOT_TORCH_PYTHON"
"""Names a Python with PyTorch; it goes before the others."""
VERSION = "2.15.0"
"""The tested version. Its CUDA is the runtime's: 13."""
PLACE = SOURCE_ROOT / "build/clients/torch/venv"
"""Where ``make clients`` installs it."""
INSTALL = f"python3 -m venv {PLACE} && {PLACE}/bin/pip install torch=={VERSION} numpy"
RUNTIME_LIBRARIES = ("13.2/libcudart.so.13", "libcublas.so.13", "libcublasLt.so.13")
"""Of ``build/lib/runtime``; the runtime's version is that of the wheel."""
SIMULATED_ENV = {
    # cuDNN has NVIDIA's runtime inside. Where PyTorch would take its attention, it has others.
    "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1",
}
PROGRAM = Path(__file__).with_name("torch_program.py")
_START_SECONDS = 120


class NoTorchError(Exception):
    """There is no Python with PyTorch; the message says how to install it."""


def find_python() -> str | None:
    """Return the first Python that has PyTorch: of the environment, this one, of ``make clients``. None without one."""
    named = os.environ.get(ENV_PYTHON)
    places = [named] if named else [sys.executable, str(PLACE / "bin/python")]
    return next((place for place in places if torch_version(place)), None)


@cache
def torch_version(python: str) -> str | None:
    """Return the version of PyTorch in this Python; None without PyTorch or without this Python. PyTorch is not imported."""
    script = "import importlib.metadata as m; print(m.version('torch'))"
    try:
        done = subprocess.run([python, "-c", script], capture_output=True, text=True, check=False, timeout=_START_SECONDS)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def program_command(*, simulated: bool) -> str:
    """Return the shell command that becomes ``torch_program``; its argument follows.

    Raises: NoTorchError: no Python with PyTorch. NotBuiltError: the runtime is not built.
    """
    python = find_python()
    if python is None:
        raise NoTorchError(f"PyTorch is not installed; install it with: {INSTALL}")
    # the shell replaces the variable: a container may have a library of its own there
    env = simulated_environment({"LD_PRELOAD": "$LD_PRELOAD"}) if simulated else {}
    words = [*(f'{name}="{value}"' for name, value in env.items()), "exec", shlex.quote(python), shlex.quote(str(PROGRAM))]
    return " ".join(words)


def simulated_environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that PyTorch needs on the simulated driver, beside those that its container has.

    Raises: NotBuiltError: the runtime is not built.
    """
    libraries = [str(built(f"lib/runtime/{name}")) for name in RUNTIME_LIBRARIES]
    preloaded = [inherited["LD_PRELOAD"]] if inherited.get("LD_PRELOAD") else []
    return {**SIMULATED_ENV, "LD_PRELOAD": ":".join([*preloaded, *libraries])}
