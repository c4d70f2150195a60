# SPDX-License-Identifier: Apache-2.0
"""The simulated runtime's tables and layouts agree with NVIDIA's installed headers, and a C test calls every exported name.

The headers are those of the development requirements: the last of CUDA 12 and the newest of CUDA 13. Their packages lack
``crt/host_defines.h``, which only defines the markers below, so an empty file replaces it.
"""

import os
import re
import subprocess
from pathlib import Path

import pytest

from cuda_shim.coverage import extract
from tests.rendering import ROOT

RUNTIME = ROOT / "simulated_runtime"
MARKERS = (
    "__device_builtin__", "__host__", "__device__", "__cudart_builtin__", "CUDARTAPI", "CUDARTAPI_CDECL", "__specialization_static",
    "__device_builtin_texture_type__", "__device_builtin_surface_type__", "__forceinline__=inline",
    "__builtin_align__(n)=__attribute__((aligned(n)))", "__align__(n)=__attribute__((aligned(n)))",
)  # fmt: skip
STRUCTURES = {
    "struct cudaDeviceProp": (),
    "struct cudaFuncAttributes": (),
    "struct cudaPointerAttributes": ("type", "device", "devicePointer", "hostPointer"),
    "cudaLaunchConfig_t": ("gridDim", "blockDim", "dynamicSmemBytes", "stream", "attrs", "numAttrs"),
    "struct cudaMemcpy3DParms": ("srcArray", "srcPos", "srcPtr", "dstArray", "dstPos", "dstPtr", "extent", "kind"),
    "struct cudaMemcpyNodeParams": ("flags", "copyParams"),
    "struct cudaKernelNodeParamsV2": ("func", "gridDim", "blockDim", "sharedMemBytes", "kernelParams", "extra"),
    "struct cudaConditionalNodeParams": ("handle", "type", "size", "phGraph_out"),
    "struct cudaGraphNodeParams": ("type", "kernel", "memcpy", "conditional"),
}
"""Structures with fields to compare; the fields of the first two come from the tables that fill them."""

NUMBERS = ("cudaMemcpyDefault", "cudaMemoryTypeHost", "cudaMemoryTypeDevice", "cudaMemoryTypeManaged", "cudaMemoryTypeUnregistered")


def read_table(name: str, macro: str) -> list[tuple[str, ...]]:
    """Return the arguments of each line ``macro(...)`` of a table."""
    lines = re.findall(rf"^{macro}\(([^)]*)\)", (RUNTIME / name).read_text(), re.MULTILINE)
    rows = [tuple(word.strip() for word in line.split(",")) for line in lines]
    if not rows:
        raise ValueError(f"{name}: want lines {macro}(...), found none")
    return rows


def exported_names(major: int) -> set[str]:
    return {name for name, first, last in read_table("names.def", "NAME") if int(first) <= major <= (int(last) or major)}


PACKAGES = {12: "nvidia-cuda-runtime-cu12", 13: "nvidia-cuda-runtime"}


@pytest.fixture(params=PACKAGES)
def major(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def our_flags(major: int) -> list[str]:
    return [f"-I{ROOT}", f"-I{ROOT / 'cuda_shim/abi'}", f"-DRUNTIME_MAJOR={major}"]


@pytest.fixture
def nvidia_include(major: int) -> Path:
    return extract.find_include_dir(PACKAGES[major], "cuda_runtime_api.h")[0]


@pytest.fixture
def nvidia_flags(nvidia_include: Path, tmp_path: Path) -> list[str]:
    (tmp_path / "crt").mkdir()
    (tmp_path / "crt/host_defines.h").touch()
    return [f"-I{tmp_path}", f"-I{nvidia_include}", *(f"-D{marker if '=' in marker else marker + '='}" for marker in MARKERS)]


def declared_errors(include: Path) -> set[tuple[str, str]]:
    """Return name and number of each error that NVIDIA's header declares."""
    body = re.search(r"enum __device_builtin__ cudaError\s*\{(.*?)\n\};", (include / "driver_types.h").read_text(), re.DOTALL)
    found = re.findall(r"^\s*(cuda\w+)\s*=\s*(\d+)", body[1], re.MULTILINE)
    return {(name, number) for name, number in found if name != "cudaErrorApiFailureBase"}


def compile_and_run(directory: Path, source: str, flags: list[str]) -> dict[str, int]:
    """Compile a C program that prints lines ``name=number``; return them."""
    program = directory / "program"
    subprocess.run([os.environ.get("CC", "cc"), *flags, "-xc", "-", "-o", str(program)], input=source, text=True, check=True)
    printed = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    return {name: int(number) for name, _, number in (line.partition("=") for line in printed.splitlines())}


def layout_program(header: str, fields: dict[str, tuple[str, ...]], numbers: list[str]) -> str:
    lines = []
    for structure, members in fields.items():
        lines.append(f'printf("{structure}=%zu\\n", sizeof({structure}));')
        lines += [f'printf("{structure}.{each}=%zu\\n", __builtin_offsetof({structure}, {each}));' for each in members]
    lines += [f'printf("{each}=%d\\n", (int){each});' for each in numbers]
    return f'#include "{header}"\n#include <stdio.h>\nint main(void)\n{{\n' + "\n".join(lines) + "\nreturn 0;\n}\n"


def test_layouts_and_numbers_are_those_of_nvidias_headers(major, our_flags, nvidia_flags, nvidia_include, tmp_path):
    properties = [row[0] for macro in ("PROPERTY", f"PROPERTY_{major}") for row in read_table("properties.def", macro)]
    attributes = re.findall(r"^\tFIELD\((\w+), CU_FUNC", (RUNTIME / "function.c").read_text(), re.MULTILINE)
    fields = STRUCTURES | {
        "struct cudaDeviceProp": ("name", "uuid", "totalGlobalMem", "reserved", *properties),
        "struct cudaFuncAttributes": tuple(attributes),
    }
    numbers = [*NUMBERS, *sorted(name for name, _ in declared_errors(nvidia_include))]
    ours = compile_and_run(tmp_path, layout_program("simulated_runtime/cudart_abi.h", fields, numbers), our_flags)
    theirs = compile_and_run(tmp_path, layout_program("cuda_runtime_api.h", fields, numbers), nvidia_flags)
    assert ours == theirs
    assert len(attributes) == 16
    assert len(properties) > 100
    assert len(numbers) > 130


@pytest.mark.parametrize("major", [13], indirect=True)
def test_error_table_is_that_of_the_newest_header(nvidia_include):
    assert {(row[0], row[1]) for row in read_table("errors.def", "ERROR")} == declared_errors(nvidia_include)


def parameter_counts(text: str, names: set[str]) -> dict[str, int]:
    """Return how many parameters each name is declared with."""
    flat = " ".join(text.split())
    found = {}
    for name in names:
        match = re.search(rf"\b{name}\s*\(([^;]*?)\)\s*;", flat)
        if match:
            found[name] = 0 if match[1].strip() in ("", "void") else match[1].count(",") + 1
    return found


def preprocess(header: str, flags: list[str]) -> str:
    command = [os.environ.get("CC", "cc"), "-E", "-P", *flags, "-xc", "-"]
    return subprocess.run(command, input=f'#include "{header}"\n', capture_output=True, text=True, check=True).stdout


def test_exported_names_have_the_headers_parameters(major, our_flags, nvidia_flags):
    names = {name for name in exported_names(major) if not name.startswith("__")}
    theirs = parameter_counts(preprocess("cuda_runtime_api.h", nvidia_flags), names)
    ours = parameter_counts(preprocess("simulated_runtime/cudart_abi.h", our_flags), names)
    in_another_package = {"cudaProfilerStart", "cudaProfilerStop"}
    assert names - theirs.keys() <= in_another_package
    assert {name: ours[name] for name in theirs} == theirs


def test_a_c_test_calls_every_exported_name(major):
    source = "".join(path.read_text() for path in (RUNTIME / "tests").glob("*.[ch]"))
    assert sorted(name for name in exported_names(major) if not re.search(rf"\b{name}\b", source)) == []
