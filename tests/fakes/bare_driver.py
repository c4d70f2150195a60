# SPDX-License-Identifier: Apache-2.0
"""A driver that does nothing, compiled from ``bare_driver.c``: see there."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from aliquot import contract

SOURCE = Path(__file__).with_suffix(".c")
DEVICE_UUID = "GPU-11111111-1111-1111-1111-111111111111"


def compile_into(directory: Path) -> Mapping[str, Path]:
    """Compile the driver, and an NVML library without functions; return the files by SONAME."""
    compiler = os.environ.get("CC", "cc")
    empty = directory / "empty.c"
    empty.write_text("")
    files = {contract.CUDA_SONAME: SOURCE, contract.NVML_SONAME: empty}
    for soname, source in files.items():
        flags = ("-std=gnu11", "-O2", "-shared", "-fPIC", f"-Wl,-soname,{soname}")
        subprocess.run([compiler, *flags, "-o", str(directory / soname), str(source)], check=True)
    return {soname: directory / soname for soname in files}
