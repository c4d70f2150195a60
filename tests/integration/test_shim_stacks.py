# SPDX-License-Identifier: Apache-2.0
"""Local memory of kernels: the driver grows a context's stacks when a kernel is launched that needs more, for every thread that can be
resident, and keeps them. The shim charges that when the program gets the function, which is the last call that it can refuse.
"""

import random

import pytest

from tests.fakes.container import MIB, Container, Node
from tests.fakes.cuda import OUT_OF_MEMORY, SUCCESS

LIMIT_MIB = 4096
CONTEXT_MIB = 530  # of an H200 in the profile
THREADS = 132 * 2048
INCLUDED_BYTES = 1024
"""Of each thread's stack, in the cost of a context."""

PROGRAM = """
from tests.fakes.cuda import *
from tests.fakes.images import *
import ctypes, sys
def cubin_of(local):
    return cubin(90, [Kernel("deep", local_bytes=local), Kernel("flat")], [])
def text_of(local):
    return b".version 8.0\\n.entry deep()\\n{\\n.local .align 16 .b8 depot[%d];\\n}\\n.entry flat()\\n{ ret; }\\n" % local
def module(image):
    return into("cuModuleLoadData", image)[1]
def library(image):
    return into("cuLibraryLoadData", image, 0, 0, 0, 0, 0, 0)[1]
def kernel_of(image):
    return into("cuLibraryGetKernel", library(image), b"deep")
def function_of_kernel(image):
    result, kernel = kernel_of(image)
    return into("cuKernelGetFunction", kernel) if not result else (result, kernel)
def loaded_function(image):
    result, kernel = kernel_of(image)
    return (call("cuFuncLoad", kernel) if not result else result, kernel)
def enumerated(name, handle):
    handles = (ctypes.c_void_p * 4)()
    result = call(name, handles, 4, handle)
    return result, handles[0] or UNTOUCHED
WAYS = {
    "function": lambda image: into("cuModuleGetFunction", module(image), b"deep"),
    "kernel": kernel_of,
    "function of a kernel": function_of_kernel,
    "loaded function": loaded_function,
    "enumerated functions": lambda image: enumerated("cuModuleEnumerateFunctions", module(image)),
    "enumerated kernels": lambda image: enumerated("cuLibraryEnumerateKernels", library(image)),
}
def launch(function):
    return call("cuLaunchKernel", function, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0)
start()
"""
WAYS = ["function", "kernel", "function of a kernel", "loaded function", "enumerated functions", "enumerated kernels"]


@pytest.fixture
def node(build_dir, sim_node, tmp_path) -> Node:
    return Node(build_dir, sim_node("h200x8"), tmp_path)


@pytest.fixture
def container(node: Node) -> Container:
    return node.container(LIMIT_MIB)


def cost_bytes(local_bytes: int) -> int:
    """Return what stacks of that size cost beyond the context."""
    grown = max(0, (local_bytes + 15) // 16 * 16 - INCLUDED_BYTES) * THREADS
    return -(-grown // (2 * MIB)) * 2 * MIB


def without_code(container: Container) -> int:
    (slot,) = container.snapshot().slots
    return container.line_bytes() - slot.devices[0].module_bytes


@pytest.mark.parametrize("form", ["cubin_of", "text_of"])
@pytest.mark.parametrize("way", WAYS)
def test_stacks_are_charged_before_the_launch_that_grows_them(node, container, way, form):
    """Each size in a context of its own."""
    script = f"""
for local in map(int, sys.stdin):
    result, function = WAYS[{way!r}]({form}(local))
    tell(result=result)
    sys.stdin.readline()
    tell(result=launch(function))
    sys.stdin.readline()
    must("cuDevicePrimaryCtxReset_v2", 0)
    start()
"""
    with container.start_python(PROGRAM + script) as program:
        for local in (0, 1024, 1040, 4096, 12_288):
            assert program.ask(str(local)) == {"result": SUCCESS}, local
            assert without_code(container) == CONTEXT_MIB * MIB + cost_bytes(local), local
            assert program.ask("launch") == {"result": SUCCESS}, local
            assert without_code(container) == CONTEXT_MIB * MIB + cost_bytes(local), local
            assert container.line_bytes() == node.physical_used_bytes(node.uuids[0]), local
            program.tell("reset")


@pytest.mark.parametrize("way", WAYS)
def test_function_with_stacks_that_do_not_fit_is_refused(node, container, way):
    script = f"""
must("cuMemAlloc_v2", ctypes.byref(out()), 2048 * MIB)
result, function = WAYS[{way!r}](cubin_of(16_384))
tell(result=result, small=WAYS[{way!r}](cubin_of(2048))[0], flat=launch(into("cuModuleGetFunction", module(cubin_of(0)), b"flat")[1]))
sys.stdin.readline()
"""
    with container.start_python(PROGRAM + script) as program:
        assert program.listen() == {"result": OUT_OF_MEMORY, "small": SUCCESS, "flat": SUCCESS}
        assert LIMIT_MIB * MIB >= container.line_bytes() >= node.physical_used_bytes(node.uuids[0])


RANDOM = """
import random
rng = random.Random(SEED)
for _ in range(30):
    what = rng.choice(("launch", "launch", "limit", "unload", "reset"))
    if what == "launch":
        result, function = WAYS[rng.choice(sorted(WAYS))](cubin_of(rng.choice((0, 16, 1500, 3000, 6000, 9000))))
        assert result or launch(function) == 0
    elif what == "limit":
        call("cuCtxSetLimit", 0, rng.choice((512, 1024, 2048, 8192)))
    elif what == "unload":
        must("cuModuleUnload", module(cubin_of(4000)))
    else:
        must("cuDevicePrimaryCtxReset_v2", 0)
        start()
    tell(free=info()[0])
    sys.stdin.readline()
"""


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 20))])
def test_random_functions_and_stack_limits_never_exceed_the_charge(node, container, seed):
    script = RANDOM.replace("SEED", str(random.Random(seed).randrange(2**31)))
    with container.start_python(PROGRAM + script) as program:
        for _ in range(30):
            program.listen()
            assert LIMIT_MIB * MIB >= container.line_bytes() >= node.physical_used_bytes(node.uuids[0])
            program.tell("")


def test_functions_share_the_stacks_of_their_context(container):
    script = """
before = info()[0]
charged = []
for local in (2048, 4096, 3072, 4096):
    must("cuModuleGetFunction", ctypes.byref(out()), module(cubin_of(local)), b"deep")
    charged.append(before - info()[0])
must("cuDevicePrimaryCtxReset_v2", 0)
start()
tell(charged=charged, left=before - info()[0])
"""
    answer = container.python(PROGRAM + script)
    assert answer.status == 0, answer.stderr
    charged, code = answer.last["charged"], 8 * MIB
    expected = [cost_bytes(local) for local in (2048, 4096, 4096, 4096)]
    assert all(0 <= found - wanted <= code for found, wanted in zip(charged, expected, strict=True)), (charged, expected)
    assert answer.last["left"] == 0
