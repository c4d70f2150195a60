# SPDX-License-Identifier: Apache-2.0
"""However a program finds the driver it finds the shim in front of it, and every version and flavour it asks for is the one it gets."""

import re
import shutil
import subprocess
import sys

import pytest

from tests.fakes.container import MIB, Node
from tests.fakes.cuda import INVALID_VALUE

LIMIT_MIB = 2048
CONTEXT_MIB = 530
ROUTES = ("dlsym", "getproc", "link", "dlvsym", "deepbind", "dlmopen")
FRONT_HOLDS = ROUTES
PRELOAD_HOLDS = ("dlsym", "getproc", "link", "dlvsym", "dlmopen")
"""A library opened with RTLD_DEEPBIND has libc's own dlsym: only a front is in its way."""

PROGRAM = "from tests.fakes.cuda import *\nimport ctypes, os\n"


@pytest.fixture
def node(build_dir, sim_node, tmp_path) -> Node:
    return Node(build_dir, sim_node("h200x8"), tmp_path)


@pytest.fixture(params=["front", "preload"])
def container(request, node):
    return node.container(LIMIT_MIB, interposition=request.param)


@pytest.mark.parametrize("route", FRONT_HOLDS)
def test_the_front_holds_the_limit_on_every_route(node, route):
    filled = node.container(LIMIT_MIB).client("fill", "--via", route).last
    assert filled["held_bytes"] == (LIMIT_MIB - CONTEXT_MIB) * MIB


@pytest.mark.parametrize("route", PRELOAD_HOLDS)
def test_the_preload_holds_the_limit_on_every_route_but_deepbind(node, route):
    filled = node.container(LIMIT_MIB, interposition="preload").client("fill", "--via", route).last
    assert filled["held_bytes"] == (LIMIT_MIB - CONTEXT_MIB) * MIB


def test_front_and_preload_together_charge_once(node):
    container = node.container(LIMIT_MIB)
    copy = container.root / "run/aliquot/libaliquot-preload.so"
    shutil.copy(container.build / "lib/shim/libaliquot-preload.so", copy)
    filled = container.client("fill", env={"LD_PRELOAD": str(copy)}).last
    assert filled["held_bytes"] == (LIMIT_MIB - CONTEXT_MIB) * MIB


# --- cuGetProcAddress -------------------------------------------------------------------------------------------

ASK = (
    PROGRAM
    + """
import json, sys
def ask(name, version, flags):
    address, status = out(0), ctypes.c_int(-1)
    result = call("cuGetProcAddress_v2", name.encode(), ctypes.byref(address), version, flags, ctypes.byref(status))
    return result, address.value, status.value
def exported(name):
    function = getattr(ctypes.CDLL("libcuda.so.1"), name, None)
    return ctypes.cast(function, ctypes.c_void_p).value if function else None
"""
)


def test_each_name_is_answered_with_the_wrapper_of_its_version_and_flavour(container):
    script = """
asked = [
    ("cuMemAlloc", 3020, 0, "cuMemAlloc_v2"), ("cuMemAlloc", 13000, 0, "cuMemAlloc_v2"),
    ("cuMemAllocAsync", 13000, 0, "cuMemAllocAsync"), ("cuMemAllocAsync", 13000, 2, "cuMemAllocAsync_ptsz"),
    ("cuMemAllocAsync", 13000, 1, "cuMemAllocAsync"), ("cuGraphLaunch", 13000, 2, "cuGraphLaunch_ptsz"),
    ("cuCtxCreate", 11000, 0, "cuCtxCreate_v2"), ("cuCtxCreate", 11040, 0, "cuCtxCreate_v3"), ("cuCtxCreate", 13000, 0, "cuCtxCreate_v4"),
    ("cuMemAdvise", 8000, 0, "cuMemAdvise"), ("cuMemAdvise", 13000, 0, "cuMemAdvise_v2"),
    ("cuGetProcAddress", 13000, 0, "cuGetProcAddress_v2"), ("cuGetProcAddress", 13000, 2, "cuGetProcAddress_v2_ptsz"),
]
tell(wrong=[[name, version, flags] for name, version, flags, symbol in asked if ask(name, version, flags)[1] != exported(symbol)])
"""
    assert container.python(ASK + script).last == {"wrong": []}


def test_per_thread_stream_program_gets_wrappers_of_its_flavour_from_lookup(container):
    script = """
lookup = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p)(
    ask("cuGetProcAddress", 13000, 2)[1])
def look_up(name, flags):
    address = out(0)
    result = lookup(name.encode(), ctypes.addressof(address), 13000, flags, None)
    return address.value or result
asked = [("cuMemAlloc", 0, "cuMemAlloc_v2"), ("cuMemAllocAsync", 0, "cuMemAllocAsync_ptsz"), ("cuMemAllocAsync", 2, "cuMemAllocAsync_ptsz"),
         ("cuMemAllocAsync", 1, "cuMemAllocAsync")]
tell(wrong=[[name, flags] for name, flags, symbol in asked if look_up(name, flags) != exported(symbol)], both=look_up("cuMemAlloc", 3))
"""
    assert container.python(ASK + script).last == {"wrong": [], "both": INVALID_VALUE}


def test_the_status_of_an_answer_is_the_drivers_own(node):
    script = """
asked = [("cuMemAlloc", 13000, 0), ("cuMemAllocAsync", 10000, 0), ("cuNoSuchThing", 13000, 0), ("curl_easy_init", 13000, 0)]
tell(answers=[[result, bool(address), status] for result, address, status in (ask(*question) for question in asked)])
"""
    bare = node.container(LIMIT_MIB, interposition="none").python(ASK + script).last
    for interposition in ("front", "preload"):
        assert node.container(LIMIT_MIB, interposition=interposition).python(ASK + script).last == bare


def test_names_the_shim_does_not_know_reach_the_driver(container):
    script = """
version = ctypes.c_int()
tell(result=call("cuDriverGetVersion", ctypes.byref(version)), version=version.value)
"""
    assert container.python(PROGRAM + script).last == {"result": 0, "version": 13000}


# --- a guest in other programs ------------------------------------------------------------------------------------


def make_program(directory, source, *flags):
    (directory / "program.c").write_text(source)
    subprocess.run(["cc", "-o", directory / "program", directory / "program.c", "-ldl", *flags], check=True)
    return directory / "program"


NEXT_USER = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
int main(void)
{
    void *first = dlsym(RTLD_NEXT, "malloc"), *second = dlsym(RTLD_NEXT, "malloc");
    void *whole = dlsym(RTLD_DEFAULT, "qsort"), *none = dlsym(RTLD_DEFAULT, "cuInit");
    const char *why = dlerror();
    printf("{\"next\": %d, \"same\": %d, \"default\": %d, \"cuda\": %d, \"said\": %d, \"curl\": %d, \"cudnn\": %d}\n", first != NULL,
           first == second, whole != NULL, none != NULL, why != NULL, dlsym(RTLD_DEFAULT, "curl_easy_init") != NULL,
           dlsym(RTLD_DEFAULT, "cudnnCreate") != NULL);
    return 0;
}
"""


def test_the_lookups_of_a_program_without_cuda_are_libcs_own(node, tmp_path):
    program = make_program(tmp_path, NEXT_USER)
    answers = [node.container(LIMIT_MIB, interposition=how).run([program]).last for how in ("none", "preload")]
    assert answers[0] == answers[1] == {"next": 1, "same": 1, "default": 1, "cuda": 0, "said": 1, "curl": 0, "cudnn": 0}


INTERPOSER = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
size_t strlen(const char *text);
__attribute__((visibility("default"))) int plain_next(void)
{
    /* From a library, RTLD_NEXT means behind this library: it must not find the library's own symbol. */
    return dlsym(RTLD_NEXT, "plain_next") == NULL;
}
"""


def test_rtld_next_means_behind_the_caller_and_not_behind_the_shim(node, tmp_path):
    (tmp_path / "next.c").write_text(INTERPOSER)
    library = tmp_path / "libnext.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "next.c", "-ldl"], check=True)
    container = node.container(LIMIT_MIB, interposition="preload")
    preload = f"{container.environment()['LD_PRELOAD']}:{library}"
    script = "import ctypes, json; print(json.dumps({'right': ctypes.CDLL(None).plain_next()}))"
    assert container.run([sys.executable, "-c", script], {"LD_PRELOAD": preload}).last == {"right": 1}


def test_a_program_that_never_uses_cuda_is_untouched(node, tmp_path):
    """No file is opened, created or mapped by the preload; umask, signal handlers and environment are as they were."""
    source = r"""
    #include <signal.h>
    #include <stdio.h>
    #include <sys/stat.h>
    #include <dirent.h>
    int main(void)
    {
        int files = 0, handlers = 0;
        DIR *open_files = opendir("/proc/self/fd");
        while (readdir(open_files)) files++;
        for (int signal_number = 1; signal_number < 32; signal_number++) {
            struct sigaction action;
            handlers += sigaction(signal_number, NULL, &action) == 0 && action.sa_handler != SIG_DFL;
        }
        printf("{\"files\": %d, \"handlers\": %d, \"umask\": %d}\n", files, handlers, (int)umask(0));
        return 0;
    }
    """
    program = make_program(tmp_path, source)
    answers = []
    for how in ("none", "preload"):
        container = node.container(LIMIT_MIB, interposition=how)
        answers.append(container.run([program]).last)
        assert container.snapshot().slots == ()
    assert answers[0] == answers[1]


def test_a_program_that_uses_cuda_keeps_its_umask_signals_and_environment(container):
    script = """
import signal
def state():
    mask = os.umask(0); os.umask(mask)
    handlers = [signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)]
    return mask, handlers, dict(os.environ)
before = state()
start(); alloc(MIB); info()
tell(same=state() == before)
"""
    assert container.python(PROGRAM + script).last == {"same": True}


def test_nothing_is_written_to_stdout_or_stderr(container):
    done = container.run([container.build / "bin/aliquot-cuda-client", "fill"])
    assert done.status == 0
    assert done.stderr == ""
    assert len(done.events) == 1


# --- the files themselves -------------------------------------------------------------------------------------------

ARTEFACTS = ("libcuda.so.1", "libnvidia-ml.so.1", "libaliquot-preload.so")
ALLOWED_NEEDED = {
    "libcuda.so.1": {"libc.so.6", "libcuda.aliquot-driver.so.1"},
    "libnvidia-ml.so.1": {"libc.so.6", "libnvidia-ml.aliquot-driver.so.1"},
    "libaliquot-preload.so": {"libc.so.6"},
}
EXPORTS = {
    "libcuda.so.1": re.compile(r"cu[A-Z]\w+"),
    "libnvidia-ml.so.1": re.compile(r"nvml[A-Z]\w+"),
    "libaliquot-preload.so": re.compile(r"cu[A-Z]\w+|nvml[A-Z]\w+|dlsym|dlvsym"),
}


def readelf(build_dir, artefact, *flags):
    path = build_dir / "lib/shim" / artefact
    return subprocess.run(["readelf", "-W", *flags, path], check=True, capture_output=True, text=True).stdout


def exports(build_dir, artefact):
    lines = (line.split() for line in readelf(build_dir, artefact, "--dyn-syms").splitlines())
    return {words[7] for words in lines if len(words) > 7 and words[4] in ("GLOBAL", "WEAK") and words[6] != "UND"}


@pytest.mark.parametrize("artefact", ARTEFACTS)
def test_no_symbol_is_exported_but_those_of_the_hook_table(build_dir, artefact):
    assert [name for name in exports(build_dir, artefact) if not EXPORTS[artefact].fullmatch(name)] == []


def test_the_preload_exports_what_both_fronts_export_and_the_lookups(build_dir):
    fronts = exports(build_dir, "libcuda.so.1") | exports(build_dir, "libnvidia-ml.so.1")
    assert exports(build_dir, "libaliquot-preload.so") == fronts | {"dlsym", "dlvsym"}


@pytest.mark.parametrize("artefact", ARTEFACTS)
def test_nothing_is_needed_but_libc_and_the_driver(build_dir, artefact):
    needed = set(re.findall(r"\(NEEDED\).*\[(.+)\]", readelf(build_dir, artefact, "-d")))
    assert needed == ALLOWED_NEEDED[artefact]


@pytest.mark.parametrize("artefact", ARTEFACTS)
def test_an_image_with_glibc_2_17_can_load_it(build_dir, artefact):
    versions = {tuple(map(int, found.split("."))) for found in re.findall(r"GLIBC_([\d.]+)", readelf(build_dir, artefact, "-V"))}
    assert max(versions) <= (2, 17)


@pytest.mark.parametrize("artefact", ARTEFACTS)
def test_it_stays_loaded_and_its_only_constructor_watches_forks(build_dir, artefact):
    dynamic = readelf(build_dir, artefact, "-d")
    assert "NODELETE" in dynamic
    [size] = re.findall(r"INIT_ARRAYSZ\)\s+(\d+)", dynamic)
    assert int(size) == 2 * 8, "the compiler's frame_dummy, and early.c's watch_forks"
