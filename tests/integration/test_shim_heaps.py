# SPDX-License-Identifier: Apache-2.0
"""Heap and print buffer of a context: the driver takes them when it loads the first code that calls malloc or printf, and keeps them.

They come without a call that names them, and stay when the code is unloaded. The shim charges them with that code, as measured, and keeps
the charge until the context ends. A raised limit is charged before the call. What contexts keep beside other programs of the node is in
test_shim_modules.py.
"""

import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.fakes.container import MIB, Container, Node
from tests.fakes.cuda import INVALID_VALUE, OUT_OF_MEMORY, SUCCESS

LIMIT_MIB = 1024
CONTEXT_MIB = 530  # of an H200 in the profile
HEAP_MIB, PRINT_MIB = 8, 4
"""Of the simulated driver. 8 and 1 MiB are documented."""
CODE_MIB = 2
"""Small code fills a page."""
ROUNDS = 30

PROGRAM = """
from tests.fakes.cuda import *
from tests.fakes.images import *
import ctypes, random, sys
PTX = {"malloc": ".extern .func (.param .b64 func_retval0) malloc", "vprintf": ".extern .func  (.param .b32 func_retval0) vprintf"}
def text(calls):
    return "\\n".join([".version 8.0", *map(PTX.get, calls), ".visible .entry work()", "{ ret; }", ".global .b8 one[4];\\n"]).encode()
def binary(calls, abi=7):
    return cubin(90, [Kernel("work")], [Variable("one", 4)], abi=abi, calls=calls)
FORMS = {
    "text": text,
    "cubin of CUDA 12": binary,
    "cubin of CUDA 13": lambda calls: binary(calls, 8),
    "LZ4": lambda calls: fatbin([Entry(90, binary(calls))], Compression.LZ4),
}
def module(image):
    return into("cuModuleLoadData", image)
def library(image, ask):
    result, handle = into("cuLibraryLoadData", image, 0, 0, 0, 0, 0, 0)
    return result or ask(handle), handle
def with_variable(image):
    return library(image, lambda handle: into("cuLibraryGetGlobal", 0, handle, b"one")[0])
def with_kernel(image):
    return library(image, lambda handle: into("cuLibraryGetKernel", handle, b"work")[0])
def linked(image):
    state, cubin, size = out(), out(), ctypes.c_size_t()
    must("cuLinkCreate_v2", 0, 0, 0, ctypes.byref(state))
    state = state.value
    must("cuLinkAddData_v2", state, 0 if image[:4] == b"\\x7fELF" else 1, image + bytes(1), len(image), b"", 0, 0, 0)
    must("cuLinkComplete", state, ctypes.byref(cubin), ctypes.byref(size))
    loaded = module(ctypes.string_at(cubin.value, size.value))
    must("cuLinkDestroy", state)
    return loaded
WAYS = {
    "module": (module, "cuModuleUnload"), "linked module": (linked, "cuModuleUnload"),
    "variable of a library": (with_variable, "cuLibraryUnload"), "kernel of a library": (with_kernel, "cuLibraryUnload"),
}
def said(**facts):
    tell(**facts)
    sys.stdin.readline()
start()
"""
FORMS = ["text", "cubin of CUDA 12", "cubin of CUDA 13", "LZ4"]
WAYS = ["module", "linked module", "variable of a library", "kernel of a library"]
CALLS = [("malloc",), ("vprintf",), ("malloc", "vprintf")]


@pytest.fixture
def node(build_dir, sim_node, tmp_path) -> Node:
    return Node(build_dir, sim_node("h200x8"), tmp_path)


@pytest.fixture
def container(node: Node) -> Container:
    return node.container(LIMIT_MIB)


def mib_of(calls: tuple[str, ...]) -> int:
    return (HEAP_MIB if "malloc" in calls else 0) + (PRINT_MIB if "vprintf" in calls else 0)


def charged_mib(node: Node, container: Container) -> float:
    """Return what is charged beyond the context, which is what the driver has taken."""
    assert container.line_bytes() == node.physical_used_bytes(node.uuids[0])
    return container.line_bytes() / MIB - CONTEXT_MIB


def every_load() -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yield each form as a module and each other way with text, for each kind of call."""
    for calls in CALLS:
        yield from (("module", form, calls) for form in FORMS)
        yield from ((way, "text", calls) for way in WAYS if way not in ("module", "linked module"))


@pytest.mark.parametrize(("way", "form", "calls"), list(every_load()))
def test_memory_that_code_brings_to_its_context_stays_charged(node, container, way, form, calls):
    script = f"""
load, unload = WAYS[{way!r}]
for _ in range(2):
    result, handle = load(FORMS[{form!r}]({calls!r}))
    said(result=result)
    must(unload, handle)
    said(unloaded=True)
must("cuDevicePrimaryCtxReset_v2", 0)
start()
said(reset=True)
"""
    with container.start_python(PROGRAM + script) as program:
        answer = program.listen()
        for _ in range(2):
            assert answer == {"result": SUCCESS}
            assert charged_mib(node, container) == mib_of(calls) + CODE_MIB
            assert program.ask("unload") == {"unloaded": True}
            assert charged_mib(node, container) == mib_of(calls)
            answer = program.ask("again")
        assert answer == {"reset": True}
        assert charged_mib(node, container) == 0


@pytest.mark.parametrize("calls", CALLS, ids="+".join)
@pytest.mark.parametrize("form", ["text", "cubin of CUDA 12"])
def test_code_that_was_linked_brings_the_same(node, container, form, calls):
    script = f"""
result, handle = linked(FORMS[{form!r}]({calls!r}))
said(result=result)
"""
    with container.start_python(PROGRAM + script) as program:
        assert program.listen() == {"result": SUCCESS}
        assert charged_mib(node, container) == mib_of(calls) + CODE_MIB


@pytest.mark.parametrize("way", WAYS)
def test_heap_without_room_is_counted_and_the_code_refused(node, container, way):
    """The driver keeps the heap of code that the shim unloads again."""
    script = f"""
must("cuMemAlloc_v2", ctypes.byref(out()), {LIMIT_MIB - CONTEXT_MIB - CODE_MIB - 2} * MIB)
load, unload = WAYS[{way!r}]
result, handle = load(text(["malloc"]))
said(result=result, more=alloc(MIB)[0], again=load(text(["malloc"]))[0])
"""
    with container.start_python(PROGRAM + script) as program:
        assert program.listen() == {"result": OUT_OF_MEMORY, "more": OUT_OF_MEMORY, "again": OUT_OF_MEMORY}
        assert container.line_bytes() >= node.physical_used_bytes(node.uuids[0])


def test_raised_heap_is_charged_once_and_stays(node, container):
    script = """
raised = call("cuCtxSetLimit", 2, 64 * MIB)
said(raised=raised)
result, handle = module(text(["malloc"]))
said(result=result, later=call("cuCtxSetLimit", 2, 128 * MIB), print=call("cuCtxSetLimit", 1, 8 * MIB))
must("cuModuleUnload", handle)
said(unloaded=True)
"""
    with container.start_python(PROGRAM + script) as program:
        assert program.listen() == {"raised": SUCCESS}
        assert charged_mib(node, container) == 64 - HEAP_MIB
        assert program.ask("load") == {"result": SUCCESS, "later": INVALID_VALUE, "print": SUCCESS}
        print_mib = 8 - PRINT_MIB
        assert charged_mib(node, container) == 64 + print_mib + CODE_MIB
        assert program.ask("unload") == {"unloaded": True}
        assert charged_mib(node, container) == 64 + print_mib


BESIDE_THREADS = """
import threading
must("cuModuleUnload", module(text(["malloc"]))[1])
said(unloaded=True)
context, is_over = out(), threading.Event()
must("cuCtxGetCurrent", ctypes.byref(context))
def take_and_free(size):
    must("cuCtxSetCurrent", context)
    while not is_over.is_set():
        must("cuMemFree_v2", alloc(size * MIB)[1])
threads = [threading.Thread(target=take_and_free, args=(size,)) for size in (6, 18)]
for thread in threads:
    thread.start()
for _ in range(ROUNDS):
    result, handle = module(text([]))
    must("cuModuleUnload", handle)
is_over.set()
for thread in threads:
    thread.join()
said(joined=True)
"""


def test_heap_stays_charged_while_other_threads_free_memory(node, container):
    """What they free during an unload must not pass for the heap."""
    with container.start_python(PROGRAM + BESIDE_THREADS.replace("ROUNDS", str(ROUNDS))) as program:
        assert program.listen() == {"unloaded": True}
        assert charged_mib(node, container) == HEAP_MIB
        assert program.ask("more") == {"joined": True}
        assert container.line_bytes() >= node.physical_used_bytes(node.uuids[0]) - CODE_MIB * MIB


RANDOM = """
rng, loaded, blocks = random.Random(SEED), [], []
for _ in range(ROUNDS):
    what = rng.choice(("load", "load", "unload", "unload", "take", "give", "limit", "reset"))
    if what == "load":
        load, unload = WAYS[rng.choice(sorted(WAYS))]
        form = rng.choice(sorted(FORMS)) if load is not linked else "text"
        result, handle = load(FORMS[form](rng.choice(([], ["malloc"], ["vprintf"], ["malloc", "vprintf"]))))
        assert result in (0, 2), result
        loaded += [(unload, handle)] if handle != UNTOUCHED else []
    elif what == "unload" and loaded:
        must(*loaded.pop(rng.randrange(len(loaded))))
    elif what == "take":
        result, block = alloc(rng.choice((2, 6, 64)) * MIB)
        blocks += [block] if result == 0 else []
    elif what == "give" and blocks:
        must("cuMemFree_v2", blocks.pop(rng.randrange(len(blocks))))
    elif what == "limit":
        assert call("cuCtxSetLimit", rng.choice((1, 2)), rng.choice((1, 4, 8, 16, 100)) * MIB) in (0, 1, 2)
    elif what == "reset" and rng.random() < 0.3:
        for unload, handle in loaded:
            must(unload, handle)
        must("cuDevicePrimaryCtxReset_v2", 0)
        loaded, blocks = [], []
        start()
    said(what=what)
"""


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 30))])
def test_random_histories_never_hold_more_than_is_charged(node, container, seed):
    script = RANDOM.replace("SEED", str(random.Random(seed).randrange(2**31))).replace("ROUNDS", str(ROUNDS))
    reported: list[Any] = []
    with container.start_python(PROGRAM + script) as program:
        for _ in range(ROUNDS):
            reported.append(program.listen())
            assert LIMIT_MIB * MIB >= container.line_bytes() >= node.physical_used_bytes(node.uuids[0]), reported
            program.tell("")
