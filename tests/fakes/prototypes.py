# SPDX-License-Identifier: Apache-2.0
"""Prototypes of C functions, read from preprocessed text: the kind of each parameter, as far as the calling convention sees it."""

import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["pointer", "int", "long"]

HANDLES = re.compile(r"^(cublasHandle_t|cudaStream_t|cublasLt(Handle|MatmulDesc|MatrixLayout|MatmulPreference)_t)$")
LONGS = {"size_t", "uint64_t", "int64_t", "long"}
PROTOTYPE = re.compile(r"\b(?:cublasStatus_t|size_t)\s+(?:CUBLASWINAPI\s+)?(cublas\w+)\s*\(([^)]*)\)\s*;")


@dataclass(frozen=True)
class Parameter:
    """One parameter."""

    name: str
    kind: Kind


def preprocessed(header: str, include: Sequence[Path]) -> str:
    """Return what the compiler sees of a header."""
    folders = [word for folder in include for word in ("-I", str(folder))]
    command = [os.environ.get("CC", "cc"), "-E", "-P", *folders, "-xc", "-"]
    return subprocess.run(command, input=f'#include "{header}"\n', capture_output=True, text=True, check=True).stdout


def without_comments(header: Path) -> str:
    """Return a header's own text, which need not compile: what it includes may be missing."""
    command = [os.environ.get("CC", "cc"), "-E", "-P", "-fpreprocessed", "-xc", str(header)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def read_prototypes(text: str) -> dict[str, list[Parameter]]:
    """Return the parameters of each cuBLAS function by its name."""
    found = PROTOTYPE.findall(" ".join(text.split()))
    return {name: [_parameter(one) for one in parameters.split(",") if one.strip() not in ("", "void")] for name, parameters in found}


def _parameter(text: str) -> Parameter:
    words = text.replace("*", " * ").replace("[]", " * ").split()
    name = next(word for word in reversed(words) if word != "*")
    types = [word for word in words if word not in ("const", "struct", "enum", name)]
    if "*" in types or any(HANDLES.match(word) for word in types):
        return Parameter(name, "pointer")
    return Parameter(name, "long" if LONGS & set(types) else "int")
