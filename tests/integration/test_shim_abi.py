# SPDX-License-Identifier: Apache-2.0
"""Every form of every wrapped function is handed out when the driver hands out that form, and ends in that form.

The questions come from the table of the headers (cuda-abi.txt): each name, at each version where its answer changes and just before, in
each flavour. The drivers are the simulated one and one that records what reaches it (tests/fakes/recording_driver.py). A bare container
says what is right; the front and the preload must say the same with their wrappers in place.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from agent.core.region_layout import DeviceLimit, Limits
from aliquot import contract
from cuda_shim.coverage.tables import INLINE_SYMBOLS, read_abi, read_hooks
from tests.fakes.container import LIBRARY_DIR, MIB, Container, Node
from tests.fakes.cuda import INVALID_VALUE, NOT_PERMITTED, OUT_OF_MEMORY, SUCCESS
from tests.fakes.recording_driver import VERSION_NODE, build_recording_driver

LIMIT_MIB = 4096
ROWS = read_abi()
WRAPPED = {hook.symbol for hook in read_hooks()}
DECLARED = WRAPPED - INLINE_SYMBOLS
"""Those that every new driver has."""
FLAGS = (0, 1, 2, 3)
"""Default, legacy, per-thread, and the two together, which a driver refuses."""
NOT_SUPPORTED = 801
NO_NAMES = ("", "cu", "cuNoSuchThing", "curl_easy_init", "cudnnCreate", "cuMemAlloc_v3")


@pytest.fixture
def node(build_dir, sim_node, tmp_path) -> Node:
    return Node(build_dir, sim_node("h200x8"), tmp_path)


@pytest.fixture(scope="session")
def recorder(tmp_path_factory) -> Path:
    library = tmp_path_factory.mktemp("recorder") / "recording.so"
    build_recording_driver(ROWS, library)
    return library


def driver_path(container: Container) -> Path:
    if container.interposition == "front":
        return container.root / "run/aliquot/driver" / contract.CUDA_DRIVER_SONAME
    return container.root / LIBRARY_DIR / contract.CUDA_SONAME


def shim_path(container: Container) -> Path | None:
    if container.interposition == "none":
        return None
    inside = f"/{LIBRARY_DIR}/{contract.CUDA_SONAME}" if container.interposition == "front" else contract.CONTAINER_PRELOAD
    return container.root / inside.lstrip("/")


def open_container(node: Node, interposition, driver: Path | None = None) -> Container:
    """A container that cannot be limited, with a policy that lets it run: arguments have no effect and every call goes through."""
    limits = Limits((DeviceLimit(node.uuids[0], LIMIT_MIB * MIB),), fail_open=True)
    container = node.container_with(limits, interposition=interposition)
    container.region_path.unlink()
    if driver is not None:
        replace_driver(container, driver)
    return container


def replace_driver(container: Container, driver: Path) -> None:
    """Put another driver in place; the container's may be a link to the one of the build directory."""
    driver_path(container).unlink()
    shutil.copy(driver, driver_path(container))


# --- where an address lies ----------------------------------------------------------------------------------------

Place = tuple[str, int]
"""A library's path and an offset in it."""

PROBE = """
import ctypes, functools, json, sys

def extents():
    found = {}
    for line in open("/proc/self/maps"):
        words = line.split(maxsplit=5)
        if len(words) == 6 and ".so" in words[5]:
            low, high = (int(part, 16) for part in words[0].split("-"))
            path = words[5].strip()
            first, last = found.get(path, (low, high))
            found[path] = min(first, low), max(last, high)
    return found

@functools.cache
def place(address):
    if not address:
        return None
    for path, (low, high) in known.items():
        if low <= address < high:
            return path, address - low
    return "elsewhere", address

library = ctypes.CDLL("libcuda.so.1")
known = extents()
asked = json.load(sys.stdin)
ctypes_lookup = ctypes.CDLL(None)
ctypes_lookup.dlvsym.restype = ctypes_lookup.dlsym.restype = ctypes.c_void_p
handle = ctypes.c_void_p(library._handle)

def get_v2(name, version, flags):
    address, status = ctypes.c_void_p(0), ctypes.c_int(-1)
    result = library.cuGetProcAddress_v2(name.encode(), ctypes.byref(address), version, ctypes.c_uint64(flags), ctypes.byref(status))
    return result, status.value, place(address.value)

def get_v1(name, version, flags):
    address = ctypes.c_void_p(0)
    result = library.cuGetProcAddress(name.encode(), ctypes.byref(address), version, ctypes.c_uint64(flags))
    return result, place(address.value)

def by_dlsym(name):
    return place(ctypes_lookup.dlsym(handle, name.encode()))

def by_dlvsym(name, version):
    return place(ctypes_lookup.dlvsym(handle, name.encode(), version.encode()))

forms = dict(get_v2=get_v2, get_v1=get_v1, by_dlsym=by_dlsym, by_dlvsym=by_dlvsym)
print(json.dumps({form: [forms[form](*question) for question in questions] for form, questions in asked.items()}))
"""


def ask(container: Container, questions: Mapping[str, Sequence[tuple[object, ...]]]) -> dict[str, list[Any]]:
    """The answers of a program in the container, by the way of asking."""
    answer = container.run([sys.executable, "-c", PROBE], stdin=json.dumps(questions))
    assert answer.status == 0, answer.stderr
    return answer.last


def names_by_offset(library: Path) -> dict[int, set[str]]:
    """The exported functions of a library, by where they lie in it; of the recording driver's internal ones, what they are."""
    output = subprocess.run(["readelf", "-W", "--dyn-syms", library], check=True, capture_output=True, text=True).stdout
    names: dict[int, set[str]] = {}
    for words in (line.split() for line in output.splitlines()):
        if len(words) > 7 and words[3] == "FUNC" and words[6] != "UND":
            names.setdefault(int(words[1], 16), set()).add(words[7].split("@")[0].split("_is_")[-1])
    return names


class Names:
    """Turns the places a container answers with into what they are."""

    def __init__(self, container: Container) -> None:
        self._driver, self._shim = driver_path(container).resolve(), shim_path(container)
        self._in_driver = names_by_offset(self._driver)
        self._in_shim = names_by_offset(self._shim) if self._shim else {}

    def of(self, place: Place | None) -> tuple[str, frozenset[str]] | None:
        """("driver" or "shim", the names of the function), or None for no function."""
        if place is None:
            return None
        path, offset = place
        if path == str(self._shim):
            return "shim", frozenset(self._in_shim[offset])
        assert path == str(self._driver), place
        return "driver", frozenset(self._in_driver[offset])


def questions_of_table() -> Iterator[tuple[str, int, int]]:
    """Each name at each version where its answer changes, just before, and at the ends."""
    versions: dict[str, set[int]] = {}
    for row in ROWS:
        versions.setdefault(row.base, {0, 13000, 13050}).update((row.since - 1, row.since))
    for name in NO_NAMES:
        versions[name] = {0, 13000}
    return ((name, version, flags) for name in versions for version in sorted(versions[name]) for flags in FLAGS)


def differences(asked: Sequence[tuple[object, ...]], bare: list, bare_names: Names, shimmed: list, shim_names: Names) -> list[str]:
    """A sentence for each answer that is neither the driver's own function nor the wrapper of exactly that function."""
    wrong = []
    for question, (*facts, place), (*shim_facts, shim_place) in zip(asked, bare, shimmed, strict=True):
        real, got = bare_names.of(place), shim_names.of(shim_place)
        wrapped = real is not None and bool(real[1] & WRAPPED)
        right = got is not None and got[0] == "shim" and bool(got[1] & real[1]) if wrapped else got == real
        if facts != shim_facts or not right:
            wrong.append(f"{question}: bare {facts} {real}, shimmed {shim_facts} {got}")
    return wrong


DRIVERS = {
    "simulated": None,
    "recording": {},
    "recording, with internal addresses": {"RECORDED_INTERNAL": "1"},
    "recording, with internal addresses, of CUDA 11.8": {"RECORDED_INTERNAL": "1", "RECORDED_VERSION": "11080"},
}


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("interposition", ["front", "preload"])
def test_cu_get_proc_address_returns_wrapper_exactly_where_driver_has_function(node, recorder, interposition, driver):
    replaced = None if DRIVERS[driver] is None else recorder
    bare, shimmed = open_container(node, "none", replaced), open_container(node, interposition, replaced)
    for container in (bare, shimmed):
        container.settings.update(DRIVERS[driver] or {})
    asked = list(questions_of_table())
    questions = {"get_v2": asked, "get_v1": asked}
    expected, found = ask(bare, questions), ask(shimmed, questions)
    for form in questions:
        assert differences(asked, expected[form], Names(bare), found[form], Names(shimmed)) == []
    names = Names(bare)
    answered = {name for *_, place in expected["get_v2"] if place for name in names.of(place)[1]}
    least = {"cuMemAlloc_v2", "cuLaunchKernel_ptsz"} if driver == "simulated" or "of CUDA" in driver else DECLARED
    assert answered >= least, "the questions reach them all"


@pytest.mark.parametrize("driver", ["simulated", "recording"])
@pytest.mark.parametrize("interposition", ["front", "preload"])
def test_dlsym_returns_wrapper_for_wrapped_functions_and_driver_for_others(node, recorder, interposition, driver):
    replaced = recorder if driver == "recording" else None
    bare, shimmed = open_container(node, "none", replaced), open_container(node, interposition, replaced)
    asked = [(name,) for name in [*(row.symbol for row in ROWS), *sorted(INLINE_SYMBOLS), *NO_NAMES]]
    expected, found = (ask(container, {"by_dlsym": asked})["by_dlsym"] for container in (bare, shimmed))
    if interposition == "front":  # its table is what it exports, whichever driver lies behind; the next test says what such a name does
        known = [index for index, (name,) in enumerate(asked) if expected[index] is not None or name not in WRAPPED]
        asked, expected, found = ([each[index] for index in known] for each in (asked, expected, found))
    assert differences(asked, [[place] for place in expected], Names(bare), [[place] for place in found], Names(shimmed)) == []


def test_function_only_in_front_returns_not_supported(node):
    bare, front = open_container(node, "none"), open_container(node, "front")
    names = sorted(WRAPPED)
    places = ask(bare, {"by_dlsym": [(name,) for name in names]})["by_dlsym"]
    lacking = [name for name, place in zip(names, places, strict=True) if place is None]
    answer = front.run([sys.executable, "-c", RESULTS], stdin=json.dumps(lacking))
    assert answer.last == dict.fromkeys(lacking, NOT_SUPPORTED)


def test_dlvsym_returns_wrapper_where_versioned_driver_has_function(node, recorder):
    """Through the preload. NVIDIA's driver has no versions, so the front, which has no versions either, needs no more than dlsym."""
    bare, shimmed = open_container(node, "none", recorder), open_container(node, "preload", recorder)
    asked = [(row.symbol, version) for row in ROWS for version in (VERSION_NODE, "NO_SUCH_VERSION")]
    expected, found = (ask(container, {"by_dlvsym": asked})["by_dlvsym"] for container in (bare, shimmed))
    assert differences(asked, [[place] for place in expected], Names(bare), [[place] for place in found], Names(shimmed)) == []
    assert [version for (_, version), place in zip(asked, expected, strict=True) if place] == [VERSION_NODE] * len(ROWS)


# --- where a call ends --------------------------------------------------------------------------------------------

RESULTS = """
import ctypes, json, sys
library = ctypes.CDLL("libcuda.so.1")
library.cuInit(0)
print(json.dumps({symbol: getattr(library, symbol)(*[ctypes.c_uint64(0)] * 12) for symbol in json.load(sys.stdin)}))
"""

FORWARD = """
import ctypes, json, sys
library = ctypes.CDLL("libcuda.so.1")
recording = ctypes.CDLL(sys.argv[1])
recording.recording_at.restype = ctypes.c_char_p
def called():
    return [recording.recording_at(n).decode() for n in range(recording.recording_length())]
assert library.cuInit(0) == 0
reached = {}
for symbol in json.load(sys.stdin):
    function = getattr(library, symbol)
    recording.recording_clear()
    function(*[ctypes.c_uint64(0)] * 12)
    reached[symbol] = called()
print(json.dumps(reached))
"""


@pytest.mark.parametrize("interposition", ["front", "preload"])
def test_every_wrapper_ends_in_the_drivers_function_of_its_own_name(node, recorder, interposition):
    container = open_container(node, interposition, recorder)
    command: list[str | Path] = [sys.executable, "-c", FORWARD, driver_path(container)]
    answer = container.run(command, stdin=json.dumps(sorted(DECLARED)))
    assert answer.status == 0, answer.stderr
    assert {symbol: calls for symbol, calls in answer.last.items() if calls != [symbol]} == {}


# --- the same, doing real work under a limit ----------------------------------------------------------------------

FOLLOW = """
import ctypes, os
from tests.fakes.cuda import *
from tests.fakes.kernels import *

must("cuInit", 0)  # before the driver is opened by its path: it has the front's name, and would be found in its place
recording = ctypes.CDLL(os.environ["RECORDING"])
recording.recording_at.restype = ctypes.c_char_p
reached = {}

def follow(symbol, *arguments):
    recording.recording_clear()
    must(symbol, *arguments)
    reached[symbol] = [recording.recording_at(n).decode() for n in range(recording.recording_length())]

def follow_out(symbol, *arguments):
    variable = out()
    follow(symbol, ctypes.byref(variable), *arguments)
    return variable.value

def follow_submission(symbol, submit):
    recording.recording_clear()
    submit()
    reached[symbol] = [recording.recording_at(n).decode() for n in range(recording.recording_length())]

start()
function = load()
stream = make_stream()
result, pool = into("cuDeviceGetDefaultMemPool", 0)
for suffix in ("", "_ptsz"):
    follow("cuMemFreeAsync" + suffix, follow_out("cuMemAllocAsync" + suffix, MIB, stream), stream)
    must("cuMemFreeAsync", follow_out("cuMemAllocFromPoolAsync" + suffix, MIB, pool, stream), stream)
    follow_submission("cuLaunchKernel" + suffix, lambda: spin(function, 10, stream, suffix))
    follow_submission("cuLaunchKernelEx" + suffix, lambda: spin_ex(function, 10, stream, suffix))
    follow_submission("cuLaunchCooperativeKernel" + suffix, lambda: spin_cooperative(function, 10, stream, suffix))
    graph = out()
    follow("cuStreamBeginCapture_v2" + suffix, stream, 1)
    spin(function, 10, stream)
    follow("cuStreamEndCapture" + suffix, stream, ctypes.byref(graph))
    ready = instantiate(graph.value)
    follow("cuGraphUpload" + suffix, ready, stream)
    follow("cuGraphLaunch" + suffix, ready, stream)
    follow("cuStreamSynchronize" + suffix, stream)
    follow("cuGraphExecDestroy", ready)
linear = follow_out("cuMemAlloc_v2", MIB)
follow("cuMemFree_v2", linear)
event, pitch, pitched = into("cuEventCreate", 2)[1], out(), out()
follow("cuEventSynchronize", event)
follow("cuCtxSynchronize")
follow("cuCtxSynchronize_v2", 0)
follow("cuMemAllocPitch_v2", ctypes.byref(pitched), ctypes.byref(pitch), 64, 64, 4)
must("cuMemFree_v2", follow_out("cuMemAllocManaged", MIB, 1))
follow("cuMemPoolTrimTo", pool, 0)
follow("cuCtxDestroy_v2", follow_out("cuCtxCreate_v2", 0, 0))
must("cuCtxDestroy_v2", follow_out("cuCtxCreate_v3", None, 0, 0, 0))
must("cuCtxDestroy_v2", follow_out("cuCtxCreate_v4", None, 0, 0))
follow("cuDevicePrimaryCtxRelease_v2", 0)
tell(reached=reached)
"""


def run_recorded(node: Node, recorder: Path, script: str, *, refuses: str = "", memory_mib: int = LIMIT_MIB, **limits: Any):
    """What a program reports in a container where the driver is the simulated one and prints what reaches it."""
    container = node.container_with(Limits((DeviceLimit(node.uuids[0], memory_mib * MIB, **limits),)))
    replace_driver(container, recorder)
    simulated = node.build / "lib/sim" / contract.CUDA_SONAME
    told_to = {"RECORDED_DRIVER": str(simulated), "RECORDED_REFUSES": f" {refuses} ", "RECORDING": str(driver_path(container))}
    answer = container.python(script, env=told_to)
    assert answer.status == 0, answer
    return answer.last


@pytest.mark.parametrize("sm_percent", [0, 60], ids=["free", "paced"])
def test_work_under_limit_reaches_called_form_once_and_no_other(node, recorder, sm_percent):
    reached = run_recorded(node, recorder, FOLLOW, sm_percent=sm_percent)["reached"]
    base = {row.symbol: row.base for row in ROWS if not row.is_renamed}
    assert len(reached) > 25
    siblings = {symbol: [call for call in calls if base[call] == base[symbol]] for symbol, calls in reached.items()}
    assert {symbol: calls for symbol, calls in siblings.items() if calls != [symbol]} == {}


ENDING = """
import ctypes, os, threading, time
from tests.fakes.cuda import *
from tests.fakes.kernels import *

start()  # before the driver is opened by its path: it has the front's name, and would be found in its place
recording = ctypes.CDLL(os.environ["RECORDING"])
recording.recording_at.restype = ctypes.c_char_p
primary, ending = out(), out()
must("cuCtxGetCurrent", ctypes.byref(primary))
must("cuCtxCreate_v2", ctypes.byref(ending), 0, 0)
function, stream = load(), make_stream()
must("cuMemFreeAsync", alloc(MIB)[1], stream)
spin(function, 1_000_000, stream)
must("cuCtxSetCurrent", primary.value)
thread = threading.Thread(target=lambda: must("cuCtxDestroy_v2", ending.value))
thread.start()
time.sleep(0.3)
recording.recording_clear()
info()
during = [recording.recording_at(n).decode() for n in range(recording.recording_length())]
alive = thread.is_alive()
thread.join()
recording.recording_clear()
info()
after = [recording.recording_at(n).decode() for n in range(recording.recording_length())]
tell(alive=alive, during=during, after=after)
"""


def test_context_events_are_not_queried_during_or_after_its_end(node, recorder):
    """The free in its stream is pending until then, and is checked at each query of free memory."""
    reported = run_recorded(node, recorder, ENDING)
    assert reported["alive"], "the context ends when its work has"
    for calls in (reported["during"], reported["after"]):
        assert "cuMemGetInfo_v2" in calls
        assert "cuEventQuery" not in calls


ENDED_PAST_US = """
import ctypes, os
from tests.fakes.cuda import *
from tests.fakes.kernels import *

start()
recording = ctypes.CDLL(os.environ["RECORDING"])
recording.recording_at.restype = ctypes.c_char_p
stream = make_stream()
must("cuMemFreeAsync", alloc(MIB)[1], stream)
spin(load(), 10, stream)
recording.cuDevicePrimaryCtxReset_v2(0)
recording.recording_clear()
use(0)
spin(load(), 10)
calls = [recording.recording_at(n).decode() for n in range(recording.recording_length())]
tell(calls=[call for call in calls if "Event" in call])
"""


def test_events_of_a_context_that_ended_past_the_shim_are_not_touched(node, recorder):
    """One stands behind the free, two around the launch; the next context has events of its own."""
    reported = run_recorded(node, recorder, ENDED_PAST_US, sm_percent=60)
    assert reported["calls"] == ["cuEventCreate", "cuEventCreate", "cuEventRecord", "cuEventRecord"]


ENDED_BY_ANOTHER = """
import ctypes, os, threading
from tests.fakes.cuda import *
from tests.fakes.kernels import *

must("cuInit", 0)
result, ended = into("cuCtxCreate_v2", 0, 0)
function = load()
recording = ctypes.CDLL(os.environ["RECORDING"])
recording.recording_at.restype = ctypes.c_char_p

def destroy():
    must("cuCtxDestroy_v2", ended)
def end_elsewhere():
    thread = threading.Thread(target=destroy)
    thread.start()
    thread.join()
def calls_of(submit):
    recording.recording_clear()
    submit()
    calls = [recording.recording_at(n).decode() for n in range(recording.recording_length())]
    return [call for call in calls if call in ("cuLaunchKernel", "cuCtxDestroy_v2") or "Event" in call]

callback = ctypes.CFUNCTYPE(None)(end_elsewhere)
recording.recording_call_back(b"cuLaunchKernel", callback)
under_way = calls_of(lambda: spin(function, 10))
recording.recording_call_back(b"", callback)
for _ in range(3000):
    result, context = into("cuCtxCreate_v2", 0, 0)
    if context == ended:
        break
    must("cuCtxDestroy_v2", context)
function = load()
tell(under_way=under_way, again=context == ended, next=calls_of(lambda: spin(function, 10)))
"""


def test_launch_events_are_not_touched_after_other_thread_ends_context(node, recorder):
    """They are not treated as those of the next context that has its address either."""
    reported = run_recorded(node, recorder, ENDED_BY_ANOTHER, sm_percent=60, context_bytes=600 * MIB)
    begun = ["cuEventCreate", "cuEventCreate", "cuEventRecord", "cuLaunchKernel"]
    assert reported == {"under_way": [*begun, "cuCtxDestroy_v2"], "again": True, "next": [*begun, "cuEventRecord"]}


ASKED = """
import ctypes, os
from tests.fakes.cuda import *
from tests.fakes.kernels import *

start()
recording = ctypes.CDLL(os.environ["RECORDING"])
recording.recording_at.restype = ctypes.c_char_p
function, asked = load(), {}
for name, stream in {"default": None, "own": make_stream()}.items():
    for _ in range(10):  # each is timed
        spin(function, 1, stream)
    must("cuCtxSynchronize")
    recording.recording_clear()
    for _ in range(50):
        spin(function, 1, stream)
    calls = [recording.recording_at(n).decode() for n in range(recording.recording_length())]
    assert calls.count("cuLaunchKernel") == 50, calls
    asked[name] = len([call for call in calls if call in ("cuCtxGetCurrent", "cuStreamGetCtx")])
tell(**asked)
"""


def test_a_paced_launch_asks_for_no_context_where_there_is_one_device(node, recorder):
    """Very few of 50: only those that draw credit or are timed do."""
    asked = run_recorded(node, recorder, ASKED, sm_percent=60)
    assert max(asked.values()) < 25, asked


# --- what the simulated driver does not have ----------------------------------------------------------------------


@pytest.fixture
def recorded(node, recorder):
    """Run a program in a container with a driver that only succeeds where the simulated one has nothing to offer."""
    prelude = "from tests.fakes.cuda import *\nimport ctypes, os\nstart()\nrecording = ctypes.CDLL(os.environ['RECORDING'])\n"
    prelude += "recording.recording_at.restype = ctypes.c_char_p\n"
    return lambda script, **details: run_recorded(node, recorder, prelude + script, **details)


# --- drivers that do not say what a pool holds -----------------------------------------------------------------------

ILLEGAL_ADDRESS, CONTEXT_IS_DESTROYED = 700, 709

POOL_OF_512_MIB = """
before = info()[0]
pool, props = out(), PoolProps(type=1, location_type=DEVICE)
must("cuMemPoolCreate", ctypes.byref(pool), ctypes.byref(props))
result, address = into("cuMemAllocFromPoolAsync", 512 * MIB, pool.value, 0)
must("cuCtxSynchronize")
def fail(names, error):
    recording.recording_fail(names, error)
def taken():
    return before - info()[0]
"""


@pytest.mark.parametrize("error", [INVALID_VALUE, ILLEGAL_ADDRESS, CONTEXT_IS_DESTROYED])
def test_an_error_alone_leaves_memory_of_pool_charged(recorded, error):
    script = f"""
fail(b" cuMemPoolGetAttribute cuMemAllocFromPoolAsync ", {error})
failed = {{into("cuMemAllocFromPoolAsync", 64 * MIB, pool.value, 0)[0] for _ in range(3)}}
tell(failed=list(failed), taken=taken())
"""
    assert recorded(POOL_OF_512_MIB + script) == {"failed": [error], "taken": 512 * MIB}


def test_pool_is_credited_when_driver_forgot_it_with_its_context(recorded):
    """The simulated driver keeps pools across a reset; another one may not."""
    script = f"""
must("cuMemFree_v2", address)
fail(b" cuMemPoolGetAttribute ", {INVALID_VALUE})
held = taken()
must("cuDevicePrimaryCtxReset_v2", 0)
use(0)
tell(held=held, left=taken())
"""
    assert recorded(POOL_OF_512_MIB + script) == {"held": 512 * MIB, "left": 0}


def test_memory_from_pool_is_charged_although_driver_does_not_report_it(recorded):
    script = f"""
fail(b" cuMemPoolGetAttribute ", {ILLEGAL_ADDRESS})
result, _ = into("cuMemAllocFromPoolAsync", 512 * MIB, pool.value, 0)
unknown = taken()
fail(b"", 0)
tell(result=result, unknown=unknown, known=taken())
"""
    assert recorded(POOL_OF_512_MIB + script) == {"result": SUCCESS, "unknown": 1024 * MIB, "known": 1024 * MIB}


def test_destroyed_pool_with_unreported_memory_is_charged_until_driver_reports(recorded):
    script = f"""
fail(b" cuMemPoolGetAttribute ", {ILLEGAL_ADDRESS})
must("cuMemPoolDestroy", pool.value)
unknown = taken()
fail(b"", 0)
known = taken()
must("cuMemFree_v2", address)
recording.recording_clear()
left = taken()
calls = [recording.recording_at(n).decode() for n in range(recording.recording_length())]
tell(unknown=unknown, known=known, left=left, destroyed=calls.count("cuMemPoolDestroy"))
"""
    assert recorded(POOL_OF_512_MIB + script) == {"unknown": 512 * MIB, "known": 512 * MIB, "left": 0, "destroyed": 1}


# --- drivers that call back into the program ------------------------------------------------------------------------

CALLED_BACK = """
def asks():
    answers.append(info()[1])
def retains():
    answers.append(into("cuDevicePrimaryCtxRetain", 0)[0])
def allocates():
    answers.append(into("cuMemAllocAsync", 64 * MIB, 0)[0])
def with_callback(symbol, callback, run):
    answers.clear()
    called = ctypes.CFUNCTYPE(None)(callback)
    recording.recording_call_back(symbol, called)
    result = run()
    recording.recording_call_back(b"", called)
    return [result, answers[:]]
answers = []
"""


@pytest.mark.parametrize(
    ("symbol", "run"),
    [
        pytest.param("cuMemAllocAsync", "call('cuMemAllocAsync', ctypes.byref(out()), MIB, 0)", id="stream-ordered memory"),
        pytest.param("cuMemPoolTrimTo", "alloc(LIMIT - 600 * MIB)[0]", id="memory taken back"),
    ],
)
def test_a_program_that_the_driver_calls_back_may_ask_for_its_memory(recorded, symbol, run):
    pool_that_holds_what_is_freed = f"""
LIMIT = {LIMIT_MIB} * MIB
must("cuMemPoolSetAttribute", into("cuDeviceGetDefaultMemPool", 0)[1], 4, ctypes.byref(out(LIMIT)))
must("cuMemFreeAsync", into("cuMemAllocAsync", 256 * MIB, 0)[1], 0)
must("cuCtxSynchronize")
"""
    reported = recorded(
        CALLED_BACK + pool_that_holds_what_is_freed + f"tell(reported=with_callback({symbol.encode()!r}, asks, lambda: {run}))"
    )
    result, answers = reported["reported"]
    assert result == SUCCESS
    assert set(answers) == {LIMIT_MIB * MIB}


def test_a_callback_of_the_making_of_a_context_may_retain_it(recorded):
    script = """
must("cuDevicePrimaryCtxReset_v2", 0)
made = with_callback(b"cuDevicePrimaryCtxRetain", retains, lambda: into("cuDevicePrimaryCtxRetain", 0)[0])
use(0)
limited = with_callback(b"cuCtxSetLimit", retains, lambda: call("cuCtxSetLimit", 2, 8 * MIB))
tell(made=made, limited=limited, taken=info()[1] - info()[0])
"""
    reported = recorded(CALLED_BACK + script, context_bytes=500 * MIB)
    assert reported == {"made": [SUCCESS, [SUCCESS]], "limited": [SUCCESS, [SUCCESS]], "taken": 500 * MIB}


def test_memory_that_a_callback_takes_is_charged_with_the_call_around_it(recorded):
    script = """
before = info()[0]
reported = with_callback(b"cuMemAllocAsync", allocates, lambda: into("cuMemAllocAsync", 64 * MIB, 0)[0])
tell(reported=reported, taken=before - info()[0] >= 128 * MIB)
"""
    assert recorded(CALLED_BACK + script) == {"reported": [SUCCESS, [SUCCESS]], "taken": True}


def test_memory_of_context_that_outlives_destruction_is_credited_in_end(recorded):
    """The driver refuses to destroy it, and the program looks at its memory meanwhile, when the shim does not know the context."""
    script = """
before = info()[0]
result, context = into("cuCtxCreate_v2", 0, 0)
refused = with_callback(b"cuCtxDestroy", asks, lambda: call("cuCtxDestroy", context))[0]
must("cuMemAlloc_v2", ctypes.byref(out()), 64 * MIB)
must("cuCtxDestroy_v2", context)
use(0)
tell(refused=refused, left=before - info()[0])
"""
    assert recorded(CALLED_BACK + script, refuses="cuCtxDestroy") == {"refused": INVALID_VALUE, "left": 0}


def test_wait_for_device_does_not_wait_for_allocating_thread(recorded):
    """That thread may be waiting for the device too, and the device for what this one does next."""
    script = """
import threading
context, inside, done = out(), threading.Event(), threading.Event()
must("cuCtxGetCurrent", ctypes.byref(context))
must("cuMemFreeAsync", into("cuMemAllocAsync", 64 * MIB, 0)[1], 0)
def stays():
    inside.set()
    answers.append(done.wait(10))
def allocates_slowly():
    must("cuCtxSetCurrent", context.value)
    reported.append(with_callback(b"cuMemAllocAsync", stays, lambda: into("cuMemAllocAsync", 64 * MIB, 0)[0]))
reported = []
thread = threading.Thread(target=allocates_slowly)
thread.start()
inside.wait()
must("cuStreamSynchronize", 0)
done.set()
thread.join()
tell(reported=reported)
"""
    assert recorded(CALLED_BACK + script) == {"reported": [[SUCCESS, [True]]]}


@pytest.mark.parametrize("symbol", ["cuEventQuery", "cuEventDestroy_v2"])
@pytest.mark.parametrize("callback", ["asks", "frees"])
def test_callback_during_check_of_pending_frees_may_check_and_free(recorded, symbol, callback):
    script = f"""
def frees():
    answers.append(call("cuMemFreeAsync", other, 0))
before, other = info()[0], alloc(64 * MIB)[1]
must("cuMemFreeAsync", alloc(64 * MIB)[1], 0)
reported = with_callback({symbol.encode()!r}, {callback}, lambda: info()[1])
tell(reported=reported, answers=len(answers), left=before - info()[0])
"""
    reported = recorded(CALLED_BACK + script)
    result, answers = reported["reported"]
    assert result == LIMIT_MIB * MIB
    assert answers == [LIMIT_MIB * MIB if callback == "asks" else SUCCESS]
    assert reported["left"] == 64 * MIB, "what is freed in there is not looked at again, and never credited early"


@pytest.mark.parametrize("symbol", ["cuEventQuery", "cuEventCreate", "cuEventElapsedTime"])
def test_a_callback_of_what_times_a_launch_may_launch(recorded, symbol):
    script = f"""
from tests.fakes.kernels import *
function = load()
def launches():
    spin(function, 1000)
    answers.append(SUCCESS)
def work():
    for _ in range(20):
        spin(function, 1000)
        must("cuCtxSynchronize")
    return SUCCESS
tell(reported=with_callback({symbol.encode()!r}, launches, work))
"""
    result, answers = recorded(CALLED_BACK + script, sm_percent=60)["reported"]
    assert result == SUCCESS
    assert set(answers) == {SUCCESS}


SPARSE = """
class MapInfo(ctypes.Structure):  # CUarrayMapInfo
    _fields_ = (
        ("resource_type", ctypes.c_uint64), ("resource", ctypes.c_uint64), ("subresource", ctypes.c_uint64 * 5),
        ("operation", ctypes.c_uint), ("handle_type", ctypes.c_uint), ("handle", ctypes.c_uint64), ("rest", ctypes.c_uint64 * 3),
    )
class Shape(ctypes.Structure):  # CUDA_ARRAY3D_DESCRIPTOR
    _fields_ = (("size", ctypes.c_size_t * 3), ("format", ctypes.c_int), ("channels", ctypes.c_uint), ("flags", ctypes.c_uint))
def array():
    result, made = into("cuArray3DCreate_v2", ctypes.byref(Shape((ctypes.c_size_t * 3)(512, 1, 0), 1, 1, 0)))
    assert not result, result
    return made
def tiles(*handles, resource, operation=1):
    listed = (MapInfo * len(handles))(*(MapInfo(resource=resource, operation=operation, handle=handle) for handle in handles))
    must("cuMemMapArrayAsync" + SUFFIX, listed, len(handles), 0)
"""


@pytest.mark.parametrize("suffix", ["", "_ptsz"])
def test_memory_in_sparse_array_is_charged_until_array_is_destroyed(recorded, suffix):
    reported = recorded(
        f"SUFFIX = {suffix!r}\n"
        + SPARSE
        + """
one, other = array(), array()
before = info()[0]
handles = [create_physical(256 * MIB)[1] for _ in range(2)]
tiles(*handles, handles[0], resource=one)
tiles(handles[0], resource=other)
for handle in handles:
    must("cuMemRelease", handle)
released = before - info()[0]
tiles(*handles, resource=one, operation=2)
unmapped = before - info()[0]
must("cuArrayDestroy", one)
one_gone = before - info()[0]
must("cuArrayDestroy", other)
tell(released=released, unmapped=unmapped, one_gone=one_gone, left=before - info()[0])
"""
    )
    assert reported["released"] == reported["unmapped"] == 512 * MIB
    assert reported["one_gone"] == pytest.approx(256 * MIB, abs=4096), "the arrays themselves are small"
    assert reported["left"] <= 0


@pytest.mark.parametrize("suffix", ["", "_ptsz"])
def test_handle_released_during_map_of_array_leaves_memory_charged(recorded, suffix):
    """Another thread releases it while the driver maps; as a driver calls back, so that the order is sure."""
    reported = recorded(
        f"SUFFIX = {suffix!r}\n"
        + SPARSE
        + CALLED_BACK
        + """
one, before = array(), info()[0]
handle = create_physical(256 * MIB)[1]
def releases():
    answers.append(call("cuMemRelease", handle))
reported = with_callback(b"cuMemMapArrayAsync" + SUFFIX.encode(), releases, lambda: tiles(handle, resource=one))
held = before - info()[0]
must("cuArrayDestroy", one)
recording.recording_fail((" cuMemMapArrayAsync" + SUFFIX + " ").encode(), 1)
other, handle = array(), create_physical(256 * MIB)[1]
tried = call("cuMemMapArrayAsync" + SUFFIX, (MapInfo * 1)(MapInfo(resource=other, operation=1, handle=handle)), 1, 0)
must("cuMemRelease", handle)
tell(reported=reported, held=held, tried=tried, left=before - info()[0])
"""
    )
    assert reported["reported"] == [None, [SUCCESS]]
    assert reported["held"] == 256 * MIB
    assert reported["tried"] == INVALID_VALUE
    assert reported["left"] <= 4096, "a map that fails holds nothing"


@pytest.mark.parametrize("call", ["cuGLCtxCreate", "cuGLCtxCreate_v2", "cuVDPAUCtxCreate", "cuVDPAUCtxCreate_v2"])
def test_contexts_for_graphics_are_part_of_the_limit(recorded, call):
    reported = recorded(
        f"""
before = info()[0]
made = ctypes.c_uint64(0x1000)
result = call({call!r}, ctypes.byref(made), 0, 0, 0, 0)
taken = before - info()[0]
recording.recording_clear()
refused = call({call!r}, ctypes.byref(out()), 0, 0, 0, 0)
names = [recording.recording_at(position) for position in range(recording.recording_length())]
tell(result=result, taken=taken, refused=refused, reached=[name.decode() for name in names if b"CtxCreate" in name])
""",
        memory_mib=1024,
        context_bytes=500 * MIB,
    )
    assert reported == {"result": 0, "taken": 500 * MIB, "refused": OUT_OF_MEMORY, "reached": []}


def test_checkpointed_process_returns_only_to_its_former_device(recorded):
    reported = recorded(
        """
class Pair(ctypes.Structure):  # CUcheckpointGpuPair
    _fields_ = (("old", ctypes.c_ubyte * 16), ("new", ctypes.c_ubyte * 16))
class RestoreArgs(ctypes.Structure):  # CUcheckpointRestoreArgs
    _fields_ = (("pairs", ctypes.POINTER(Pair)), ("count", ctypes.c_uint), ("rest", ctypes.c_uint64 * 6))
here, there = (ctypes.c_ubyte * 16)(1), (ctypes.c_ubyte * 16)(2)
def restored(*pairs):
    listed = (Pair * len(pairs))(*(Pair(old, new) for old, new in pairs))
    return call("cuCheckpointProcessRestore", 1, ctypes.byref(RestoreArgs(listed, len(pairs))))
tell(results=[call("cuCheckpointProcessRestore", 1, None), restored((here, here)), restored((here, here), (here, there))])
"""
    )
    assert reported == {"results": [0, 0, NOT_PERMITTED]}
