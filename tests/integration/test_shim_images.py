# SPDX-License-Identifier: Apache-2.0
"""Code and variables of compiled images are charged when they come into device memory: at a module's load, at a library's first use.

The images are of the shape that compilers write (tests/fakes/images.py). Modules of text are in test_shim_modules.py.
"""

import pytest

from tests.fakes.container import MIB, Container, Node
from tests.fakes.cuda import OUT_OF_MEMORY, SUCCESS

LIMIT_MIB = 2048
CONTEXT_MIB = 530  # of an H200 in the profile
CODE_MIB, ZEROS_MIB, VALUES_MIB = 4, 64, 2
IMAGE_MIB = CODE_MIB + ZEROS_MIB + VALUES_MIB

PROGRAM = f"""
from tests.fakes.cuda import *
from tests.fakes.images import *
import ctypes, os, sys
KERNELS = [Kernel("first", code_bytes={CODE_MIB} * MIB), Kernel("second", code_bytes=128)]
VARIABLES = [Variable("zeros", {ZEROS_MIB} * MIB - 128), Variable("values", {VALUES_MIB} * MIB - 1024, b"x" * 1024)]
CUBIN = cubin(90, [KERNELS[0]], VARIABLES)
IMAGES = {{
    "cubin": CUBIN,
    "fatbin": fatbin([Entry(80, cubin(80, KERNELS)), Entry(90, CUBIN)]),
    "lz4": fatbin([Entry(90, CUBIN)], Compression.LZ4),
    "zstd": fatbin([Entry(90, CUBIN)], Compression.ZSTD),
}}
def library(form):
    result, handle = into("cuLibraryLoadData", IMAGES[form], 0, 0, 0, 0, 0, 0)
    return handle
def with_kernel(form, use):
    result, handle = into("cuLibraryGetKernel", library(form), b"first")
    return result or use(handle)
def launch(kernel):
    return call("cuLaunchKernel", kernel, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0)
def launch_of_enumerated(form):
    kernels = (ctypes.c_void_p * 2)()
    result = call("cuLibraryEnumerateKernels", kernels, 2, library(form))
    return result or launch(kernels[0])
WAYS = {{
    "launch of a kernel": lambda form: with_kernel(form, launch),
    "launch of an enumerated kernel": launch_of_enumerated,
    "module": lambda form: into("cuModuleLoadData", IMAGES[form])[0],
    "fat binary": lambda form: into("cuModuleLoadFatBinary", IMAGES[form])[0],
    "function": lambda form: with_kernel(form, lambda kernel: into("cuKernelGetFunction", kernel)[0]),
    "library's module": lambda form: into("cuLibraryGetModule", library(form))[0],
    "variable": lambda form: call("cuLibraryGetGlobal", ctypes.byref(out()), 0, library(form), b"values"),
    "loaded function": lambda form: with_kernel(form, lambda kernel: call("cuFuncLoad", kernel)),
}}
"""


@pytest.fixture
def node(build_dir, sim_node, tmp_path) -> Node:
    return Node(build_dir, sim_node("h200x8"), tmp_path)


@pytest.fixture
def container(node: Node) -> Container:
    return node.container(LIMIT_MIB)


WAYS = [
    "module",
    "fat binary",
    "function",
    "library's module",
    "variable",
    "loaded function",
    "launch of a kernel",
    "launch of an enumerated kernel",
]


@pytest.mark.parametrize("form", ["cubin", "fatbin", "lz4", "zstd"])
@pytest.mark.parametrize("way", WAYS)
def test_image_is_charged_what_it_takes(node, container, way, form):
    script = f"""
start()
before = info()[0]
result = WAYS[{way!r}]({form!r})
tell(result=result, taken=(before - info()[0]) // MIB)
sys.stdin.read()
"""
    with container.start_python(PROGRAM + script) as program:
        assert program.listen() == {"result": SUCCESS, "taken": IMAGE_MIB}
        assert container.line_bytes() == (CONTEXT_MIB + IMAGE_MIB) * MIB == node.physical_used_bytes(node.uuids[0])


@pytest.mark.parametrize("way", WAYS)
def test_image_that_does_not_fit_is_refused(node, container, way):
    script = f"""
start()
must("cuMemAlloc_v2", ctypes.byref(out()), info()[0] - {IMAGE_MIB - 2} * MIB)
tell(result=WAYS[{way!r}]("fatbin"))
sys.stdin.read()
"""
    with container.start_python(PROGRAM + script) as program:
        assert program.listen() == {"result": OUT_OF_MEMORY}
        assert container.line_bytes() >= node.physical_used_bytes(node.uuids[0])
