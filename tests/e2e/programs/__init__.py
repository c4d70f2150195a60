# SPDX-License-Identifier: Apache-2.0
"""Programs that try a limit in ways a CUDA program of the usual kind does not: static, against another C library, by fork, as root.

Built once for what they are made of, and kept below ``build/e2e/programs``.
"""

import hashlib
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.e2e.cluster.paths import BUILD, ROOT

_HERE = Path(__file__).parent
_SHIM = ROOT / "cuda_shim"
_SIM = ROOT / "simulated_driver"
_SIMULATED_DRIVER = tuple(sorted(file for file in _SIM.glob("*.c") if not file.name.startswith(("nvml", "simctl"))))
"""What libcuda.so.1 is made of."""
_WITH_DRIVER = (
    _HERE / "linked_driver.c",
    *(_SHIM / "client" / f"{name}.c" for name in ("driver_error", "main", "holdings", "work")),
    *_SIMULATED_DRIVER,
)
_FLAGS = ("-std=gnu11", "-O1", "-w", f"-I{_SHIM / 'abi'}", f"-I{_SHIM}", f"-I{ROOT}", "-pthread")
_MUSL = (
    "musl-gcc",
    "-idirafter", "/usr/include", "-idirafter", "/usr/include/x86_64-linux-gnu",  # the kernel's headers
    "-DPTHREAD_MUTEX_ADAPTIVE_NP=PTHREAD_MUTEX_NORMAL",
)  # fmt: skip


def static_client() -> Path:
    """aliquot-cuda-client as one static program with a driver of its own."""
    return _built("static-client", ("cc", "-static"), _WITH_DRIVER)


def musl_static_client() -> Path:
    """The same, with musl."""
    return _built("musl-static-client", (*_MUSL, "-static"), _WITH_DRIVER)


def forked() -> Path:
    """forked.c, which takes memory in several processes that come of fork alone."""
    return _built("forked", ("cc",), (_HERE / "forked.c",))


def musl_forked() -> Path:
    """The same, with musl."""
    return _built("musl-forked", _MUSL, (_HERE / "forked.c",))


def become_root() -> Path:
    """become_root.c, which does what sudo does."""
    return _built("become-root", ("cc",), (_HERE / "become_root.c",))


def _built(name: str, compiler: Sequence[str], sources: Sequence[Path]) -> Path:
    digest = hashlib.sha256("\0".join((*compiler, *_FLAGS)).encode())
    headers = sorted(header for folder in (_SHIM, _SIM) for kind in ("h", "def") for header in folder.glob(f"**/*.{kind}"))
    for file in (*sources, *headers):
        digest.update(file.read_bytes())
    program = BUILD / "programs" / f"{name}-{digest.hexdigest()[:16]}"
    if not program.exists():
        program.parent.mkdir(parents=True, exist_ok=True)
        unfinished = program.with_suffix(".unfinished")
        done = subprocess.run([*compiler, *_FLAGS, "-o", unfinished, *sources], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{name} does not compile:\n{done.stderr[-2000:]}")
        for outdated in program.parent.glob(f"{name}-{'?' * 16}"):
            outdated.unlink()
        unfinished.rename(program)
    return program
