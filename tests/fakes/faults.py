# SPDX-License-Identifier: Apache-2.0
"""Answers each question that the shim asks the driver with each error, while a program takes memory in every way.

The questions are the rows of the shim's own tables (hooks.def, driver_calls.def) and what it looks up in NVML (driver_nvml.c), so a new
call is asked about by itself. Each case is one process: an error that one function answers from some moment on, always or at every second
call. The driver is the recording one before the simulated one (tests/fakes/recording_driver.py, failing_nvml.py), and only the simulated
one is asked what is really held.

``Faults`` runs cases in a container; ``main`` is the program inside. What is right: after each call the process holds no byte that is not
charged, and no more than its limit. Where the driver does not take back what turned out too large, that one block stays, charged.
"""

import ctypes
import itertools
import json
import mmap
import os
import random
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from agent.core.region_layout import OWN_GEOMETRY, DeviceLimit, Limits
from aliquot import contract
from cuda_shim.coverage.tables import INTERPOSE_DIR, read_abi, read_hooks
from tests.fakes.container import MIB, Node
from tests.fakes.cuda import DEVICE, PoolProps, call, create_physical, into, out, reserve, use
from tests.fakes.failing_nvml import build_failing_nvml
from tests.fakes.kernels import capture, make_stream
from tests.fakes.recording_driver import build_recording_driver

ERRORS: Final = (
    1, 2, 3, 4, 36, 46, 100, 101, 201, 214, 400, 401, 500, 600, 700, 708, 709, 719, 800, 801, 802, 900, 901, 904, 905, 906, 908, 909, 999,
)  # fmt: skip
"""CUresult values that come in every way: one or more of every class (arguments, memory, start and end, devices, contexts, handles, not
found, not ready, sticky errors of kernels, permission, support, captures, time, unknown)."""

NVML_PREFIX: Final = "nvml"
"""Of a question to NVML."""

LIMIT_MIB, BLOCK_MIB, BLOCKS = 1536, 192, 8
"""The limit of the first device, where all is measured; memory can move there from the second one."""
CONTEXT_MIB = 530  # of an H200 in the profile
SLACK_BYTES = 2 * MIB
"""Small code shares a page of device memory."""

FROM_START, AFTER_START, PAST_SHIM = "from the start", "after the start", "started past the shim"
STARTS: Final = (FROM_START, AFTER_START, PAST_SHIM)
PERIODS: Final = (1, 2)


def questions() -> tuple[str, ...]:
    """Return every function of the driver that the shim calls, wrapped or not."""
    used = re.findall(r"^USE\((\w+)\)", (INTERPOSE_DIR / "driver_calls.def").read_text(), flags=re.MULTILINE)
    return tuple(dict.fromkeys([*used, *(hook.symbol for hook in read_hooks())]))


def nvml_questions() -> tuple[str, ...]:
    """Return every function of NVML that the shim calls for its own counting."""
    return tuple(dict.fromkeys(re.findall(r'"(nvml\w+)"', (INTERPOSE_DIR / "driver_nvml.c").read_text())))


def cuda_errors() -> tuple[int, ...]:
    """Return every error of CUDA."""
    return _numbers("cuda_abi.h", "CUDA_ERROR")


def nvml_errors() -> tuple[int, ...]:
    """Return every error of NVML."""
    return _numbers("nvml_abi.h", "NVML_ERROR")


def _numbers(header: str, prefix: str) -> tuple[int, ...]:
    text = (INTERPOSE_DIR.parent / "abi" / header).read_text()
    return tuple(int(number) for number in re.findall(rf"\b{prefix}_\w+ = (\d+)", text))


@dataclass(frozen=True, slots=True)
class Case:
    """One question answered with one error."""

    question: str
    error: int
    start: str
    period: int
    """1: each call fails; 2: every second one."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What a case came to, where it is not right."""

    case: Case
    way: str
    uncharged_bytes: int
    over_bytes: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of some cases."""

    cases: int
    asked: int
    """Cases with that question: some calls of the table no program here needs."""
    taken: int
    """Blocks of memory that a process got although a question failed."""
    refused: int
    """Attempts that ended with an error."""
    findings: tuple[Finding, ...]


def all_cases() -> list[Case]:
    """Return each question to CUDA with each error: those of ``ERRORS`` with each start and period, the others with one after another."""
    others = [error for error in cuda_errors() if error not in ERRORS]
    ways = itertools.cycle(itertools.product(STARTS, PERIODS))
    every_way = (Case(*parts) for parts in itertools.product(questions(), ERRORS, STARTS, PERIODS))
    return [*every_way, *(Case(question, error, *next(ways)) for question in questions() for error in others)]


def nvml_cases() -> list[Case]:
    """Return each question to NVML with each error of NVML, start and period."""
    return [Case(*parts) for parts in itertools.product(nvml_questions(), nvml_errors(), STARTS, PERIODS)]


def some_cases(seed: int, each: int = 1, of: Sequence[Case] = ()) -> list[Case]:
    """Return ``each`` cases of every question, drawn. Args: of: the cases to draw from; all of CUDA without any."""
    draw = random.Random(seed)
    by_question: dict[str, list[Case]] = {}
    for case in of or all_cases():
        by_question.setdefault(case.question, []).append(case)
    return [case for cases in by_question.values() for case in draw.sample(cases, each)]


class Faults:
    """A container with a driver that can be made to fail."""

    def __init__(self, node: Node, directory: Path, *, nvml: bool = True) -> None:
        recorder = directory / "recording.so"
        if not recorder.exists():
            build_recording_driver(read_abi(), recorder)
        devices = (DeviceLimit(node.uuids[0], LIMIT_MIB * MIB), DeviceLimit(node.uuids[1], BLOCKS * LIMIT_MIB * MIB))
        self.container = node.container_with(Limits(devices))
        self._driver = self.container.root / "run/aliquot/driver" / contract.CUDA_DRIVER_SONAME
        self._driver.unlink()
        shutil.copy(recorder, self._driver)
        self._nvml = self._driver.with_name(contract.NVML_DRIVER_SONAME)
        self._nvml.unlink()
        if nvml:
            failing = directory / "failing-nvml.so"
            if not failing.exists():
                build_failing_nvml(nvml_questions(), failing)
            shutil.copy(failing, self._nvml)
        self._simulated = node.build / "lib/sim"

    def run(self, cases: Sequence[Case]) -> Outcome:
        """Run the cases, one process for each."""
        asked = taken = refused = 0
        findings = []
        for answer in self._answers(cases):
            asked, taken, refused = asked + answer["asked"], taken + answer["taken"], refused + answer["refused"]
            case = Case(**answer["case"])
            findings += [Finding(case, **found) for found in answer["findings"]]
        return Outcome(len(cases), asked, taken, refused, tuple(findings))

    def _answers(self, cases: Sequence[Case]) -> Iterator[dict[str, Any]]:
        reported = {
            "RECORDED_DRIVER": str(self._simulated / contract.CUDA_SONAME), "RECORDING": str(self._driver),
            "FAILING_NVML": str(self._simulated / contract.NVML_SONAME), "FAULTS_NVML": str(self._nvml) if self._nvml.exists() else "",
            "FAULTS_REGION": str(self.container.region_path),
        }  # fmt: skip
        with self.container.start_python("from tests.fakes.faults import main; main()", env=reported) as program:
            for case in cases:
                answer = program.ask(json.dumps(asdict(case)))
                assert "findings" in answer, (case, answer)
                yield answer


# --- the program in the container ----------------------------------------------------------------------------------


class Way:
    """One way to take memory; ``take`` returns the driver's answer and remembers how to give it back."""

    def __init__(self) -> None:
        self._given_back: list[Callable[[], object]] = []

    def later(self, *call_and_arguments: object) -> None:
        """Remember a call that gives memory back."""
        name, *arguments = call_and_arguments
        self._given_back.append(lambda: call(str(name), *arguments))

    def give_back(self) -> None:
        for each in reversed(self._given_back):
            each()
        self._given_back.clear()


def _into(way: Way, free: str, name: str, *arguments: object, rest: tuple[object, ...] = ()) -> int:
    result, made = into(name, *arguments)
    if not result:
        way.later(free, made, *rest)
    return result


SIZE = BLOCK_MIB * MIB


class _Shape(ctypes.Structure):  # CUDA_ARRAY3D_DESCRIPTOR
    _fields_ = (("size", ctypes.c_size_t * 3), ("format", ctypes.c_int), ("channels", ctypes.c_uint), ("flags", ctypes.c_uint))


class _AllocNode(ctypes.Structure):  # CUDA_MEM_ALLOC_NODE_PARAMS
    _fields_ = (
        ("pool", PoolProps), ("access", ctypes.c_void_p), ("access_count", ctypes.c_size_t), ("size", ctypes.c_size_t),
        ("address", ctypes.c_uint64),
    )  # fmt: skip


def _shape() -> object:
    return ctypes.byref(_Shape((ctypes.c_size_t * 3)(65536, SIZE // (65536 * 4), 0), 0x20, 1, 0))


def _pool_memory(way: Way) -> int:
    pool, props = out(), PoolProps(type=1, location_type=DEVICE)
    result = call("cuMemPoolCreate", ctypes.byref(pool), ctypes.byref(props))
    if result:
        return result
    way.later("cuMemPoolDestroy", pool.value)
    return _into(way, "cuMemFreeAsync", "cuMemAllocFromPoolAsync", SIZE, pool.value, 0, rest=(0,))


def _prefetched(way: Way) -> int:
    """Memory of the second device, moved to the first."""
    current = out()
    if result := call("cuCtxGetCurrent", ctypes.byref(current)):
        return result
    use(1)
    result, address = into("cuMemAllocManaged", SIZE, 1)
    if not result:
        way.later("cuMemFree_v2", address)
        result = call("cuMemPrefetchAsync", address, SIZE, 0, 0)
    return result or call("cuCtxSetCurrent", current.value)


def _pitched(way: Way) -> int:
    address, pitch = out(), out()
    result = call("cuMemAllocPitch_v2", ctypes.byref(address), ctypes.byref(pitch), MIB, BLOCK_MIB, 4)
    if not result:
        way.later("cuMemFree_v2", address.value)
    return result


def _physical(way: Way) -> int:
    result, handle = create_physical(SIZE)
    if not result:
        way.later("cuMemRelease", handle)
    return result


def _mapped(way: Way) -> int:
    result, handle = create_physical(SIZE)
    if result:
        return result
    address = reserve(SIZE)
    result = call("cuMemMap", address, SIZE, 0, handle, 0)
    if not result:
        way.later("cuMemUnmap", address, SIZE)
    if call("cuMemRelease", handle):
        way.later("cuMemRelease", handle)
    return result


def _run_graph(way: Way, graph: int, address: int) -> int:
    result, ready = into("cuGraphInstantiateWithFlags", graph, 0)
    if result:
        return result
    way.later("cuGraphExecDestroy", ready)
    result = call("cuGraphLaunch", ready, 0)
    if not result:
        way.later("cuMemFreeAsync", address, 0)
    return result


def _graph(way: Way) -> int:
    node, graph = out(), out()
    if result := call("cuGraphCreate", ctypes.byref(graph), 0):
        return result
    params = _AllocNode(pool=PoolProps(type=1, location_type=DEVICE), size=SIZE)
    if result := call("cuGraphAddMemAllocNode", ctypes.byref(node), graph.value, None, 0, ctypes.byref(params)):
        return result
    return _run_graph(way, graph.value, params.address)


def _captured(way: Way) -> int:
    stream, made = make_stream(), [(0, 0)]

    def body() -> None:
        made[0] = into("cuMemAllocAsync", SIZE, stream)

    graph = capture(stream, body)
    result, address = made[0]
    return result or _run_graph(way, graph, address)


def _heap(way: Way) -> int:
    now = out()
    if result := call("cuCtxGetLimit", ctypes.byref(now), 2):
        return result
    way.later("cuCtxSetLimit", 2, 8 * MIB)
    return call("cuCtxSetLimit", 2, now.value + SIZE)


def _stacks(way: Way) -> int:
    way.later("cuCtxSetLimit", 0, 1024)
    return call("cuCtxSetLimit", 0, 8192)


def _context(way: Way) -> int:
    current, made = out(), out()
    call("cuCtxGetCurrent", ctypes.byref(current))
    if result := call("cuCtxCreate_v2", ctypes.byref(made), 0, 0):
        return result
    way.later("cuCtxDestroy_v2", made.value)
    return call("cuCtxSetCurrent", current.value)


def _image() -> bytes:
    return b".version 8.0\n.visible .entry work()\n{ ret; }\n.visible .global .align 4 .b8 large[%d];\n" % SIZE


def _module(way: Way) -> int:
    return _into(way, "cuModuleUnload", "cuModuleLoadData", _image())


def _lazy(way: Way) -> int:
    result, library = into("cuLibraryLoadData", _image(), 0, 0, 0, 0, 0, 0)
    if result:
        return result
    way.later("cuLibraryUnload", library)
    return call("cuLibraryGetGlobal", ctypes.byref(out()), ctypes.byref(out()), library, b"large")


WAYS: Final[dict[str, Callable[[Way], int]]] = {
    "cuMemAlloc": lambda way: _into(way, "cuMemFree_v2", "cuMemAlloc_v2", SIZE),
    "cuMemAlloc, 32 bits": lambda way: _into(way, "cuMemFree", "cuMemAlloc", SIZE),
    "cuMemAllocPitch": _pitched,
    "cuMemAllocManaged": lambda way: _into(way, "cuMemFree_v2", "cuMemAllocManaged", SIZE, 1),
    "cuMemPrefetchAsync": _prefetched,
    "cuMemAllocAsync": lambda way: _into(way, "cuMemFreeAsync", "cuMemAllocAsync", SIZE, 0, rest=(0,)),
    "cuMemAllocAsync_ptsz": lambda way: _into(way, "cuMemFreeAsync_ptsz", "cuMemAllocAsync_ptsz", SIZE, 0, rest=(0,)),
    "freed in stream order": lambda way: _into(way, "cuMemFreeAsync", "cuMemAlloc_v2", SIZE, rest=(0,)),
    "cuMemAllocFromPoolAsync": _pool_memory,
    "cuMemCreate": _physical,
    "cuMemMap": _mapped,
    "cuArray3DCreate": lambda way: _into(way, "cuArrayDestroy", "cuArray3DCreate_v2", _shape()),
    "cuMipmappedArrayCreate": lambda way: _into(way, "cuMipmappedArrayDestroy", "cuMipmappedArrayCreate", _shape(), 1),
    "graph": _graph,
    "captured graph": _captured,
    "device heap": _heap,
    "stacks": _stacks,
    "cuCtxCreate": _context,
    "cuLibraryGetGlobal": _lazy,
    "cuModuleLoadData": _module,
}


class Held:
    """What this process holds, as the driver counts it, and what it is charged."""

    def __init__(self) -> None:
        self._driver = ctypes.CDLL(os.environ["RECORDED_DRIVER"])
        with Path(os.environ["FAULTS_REGION"]).open("rb") as file:
            self._region = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)

    def charged(self) -> int:
        at = OWN_GEOMETRY.device_offset
        return int.from_bytes(self._region[at : at + 8], sys.byteorder)

    def _primary(self) -> ctypes.c_size_t | None:
        """Return the first device's primary context, or None without one."""
        context, flags, active = (ctypes.c_size_t(0) for _ in range(3))
        if self._driver.cuDevicePrimaryCtxGetState(0, ctypes.byref(flags), ctypes.byref(active)) or not active.value:
            return None
        assert self._driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
        self._driver.cuDevicePrimaryCtxRelease_v2(0)
        return context

    def physical(self) -> int:
        """Return bytes. The node has no other process."""
        free, total, context = ctypes.c_size_t(0), ctypes.c_size_t(0), self._primary()
        if context is None:
            return 0
        self._driver.cuCtxPushCurrent_v2(context)
        assert self._driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) == 0
        self._driver.cuCtxPopCurrent_v2(ctypes.byref(context))
        return total.value - free.value

    def use_first_device(self) -> None:
        """Whatever an attempt that failed left current."""
        if context := self._primary():
            self._driver.cuCtxSetCurrent(context)


def _fail(case: Case | None) -> None:
    """Let a question fail from now on. Without a case, the driver works again."""
    recording, nvml = ctypes.CDLL(os.environ["RECORDING"]), os.environ["FAULTS_NVML"]
    if case is None or not case.question.startswith(NVML_PREFIX):
        name = f" {case.question} " if case else ""
        recording.recording_fail_some(name.encode(), case.error if case else 0, case.period if case else 1)
    if nvml and (case is None or case.question.startswith(NVML_PREFIX)):
        name = case.question if case else ""
        ctypes.CDLL(nvml).failing_nvml_fail(name.encode(), case.error if case else 0, case.period if case else 1)


def _times_asked(case: Case) -> int:
    """Return the number of such questions since it began to fail."""
    if case.question.startswith(NVML_PREFIX):
        return int(ctypes.CDLL(os.environ["FAULTS_NVML"]).failing_nvml_asked())
    return int(ctypes.CDLL(os.environ["RECORDING"]).recording_asked())


def _start(case: Case) -> int:
    """Make the primary context current; the driver's answer."""
    if case.start != AFTER_START:
        variable = "FAILING_NVML_FAILS" if case.question.startswith(NVML_PREFIX) else "RECORDED_FAILS"
        os.environ[variable] = f"{case.error} {case.period} {case.question}"
    if case.start == PAST_SHIM:
        call("cuDriverGetVersion", ctypes.byref(out()))
        ctypes.CDLL(os.environ["RECORDED_DRIVER"]).cuInit(0)
    elif result := call("cuInit", 0):
        return result
    result, context = into("cuDevicePrimaryCtxRetain", 0)
    result = result or call("cuCtxSetCurrent", context)
    if not result and case.start == AFTER_START:
        _fail(case)
    return result


def _attempt(take: Callable[[Way], int], way: Way, held: Held) -> tuple[int, int, int, int]:
    """Take blocks until one is refused. Return how many it got, how many it was refused, and the worst bytes uncharged and over."""
    got = refused = uncharged = over = 0
    for _ in range(BLOCKS):
        try:
            result = take(way)
        except SystemExit:
            result = -1
        got, refused = got + (result == 0), refused + (result != 0)
        physical = held.physical()
        uncharged, over = max(uncharged, physical - held.charged()), max(over, physical - LIMIT_MIB * MIB)
        if result:
            break
    return got, refused, uncharged, over


def _run(case: Case) -> dict[str, Any]:
    asked = taken = refused = 0
    findings = []
    started = _start(case)
    held = Held()
    for name, take in WAYS.items():
        way = Way()
        if taken + refused:
            _fail(case)
        got, not_got, uncharged, over = _attempt(take, way, held)
        taken, refused = taken + got, refused + not_got
        if uncharged > SLACK_BYTES or over > SIZE:
            findings.append({"way": name, "uncharged_bytes": uncharged, "over_bytes": max(over, 0)})
        asked += _times_asked(case)
        _fail(None)
        way.give_back()
        held.use_first_device()
        call("cuCtxSynchronize")
    reported = {"started": started, "asked": asked > 0, "taken": taken, "refused": refused, "findings": findings}
    return {"case": asdict(case), **reported}


def _in_child(case: Case) -> dict[str, Any]:
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        with os.fdopen(writing, "w") as answer:
            json.dump(_run(case), answer)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else {"case": asdict(case), "died": True}


def main() -> None:
    """Read cases from stdin, one in a line as JSON; answer each."""
    for line in sys.stdin:
        print(json.dumps(_in_child(Case(**json.loads(line)))), flush=True)
