# SPDX-License-Identifier: Apache-2.0
"""The simulated libcuda: its table of entry points, its ABI against NVIDIA's header, and programs that run on a node.

What the library does is tested by programs in C (simulated_driver/tests, run by test_c_programs.py); what needs other processes, other
languages or the whole node is tested here, through ctypes in Python processes of their own.
"""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cuda_shim.coverage import extract, tables

ROOT = Path(__file__).resolve().parents[2]
SIM = ROOT / "simulated_driver"
ABI_HEADER = ROOT / "cuda_shim/abi/cuda_abi.h"
MIB = 1 << 20

NVIDIAS = tables.read_abi()

Node = Callable[..., Path]
Start = Callable[..., subprocess.Popen[str]]

PRELUDE = """
import ctypes as C, json, os, sys, time
cuda = C.CDLL("libcuda.so.1")
MIB = 1 << 20

class CudaError(Exception):
    pass

def call(name, *arguments):
    status = getattr(cuda, name)(*arguments)
    if status:
        raise CudaError(f"{name}: {status}")

def value(kind, name, *arguments):
    out = kind()
    call(name, C.byref(out), *arguments)
    return out.value

def context(device=0):
    call("cuInit", 0)
    return C.c_void_p(value(C.c_void_p, "cuCtxCreate_v2", 0, device))

def allocate(size):
    return value(C.c_uint64, "cuMemAlloc_v2", C.c_size_t(size))

def free_mib():
    free, total = C.c_size_t(), C.c_size_t()
    call("cuMemGetInfo_v2", C.byref(free), C.byref(total))
    return free.value // MIB

def spin():
    module = C.c_void_p(value(C.c_void_p, "cuModuleLoadData", b".entry aliquot_spin"))
    return C.c_void_p(value(C.c_void_p, "cuModuleGetFunction", module, b"aliquot_spin"))

def launch(kernel, microseconds):
    duration = C.c_uint64(microseconds)
    parameters = (C.c_void_p * 1)(C.addressof(duration))
    call("cuLaunchKernel", kernel, 1, 1, 1, 1, 1, 1, 0, None, parameters, None)

def say(what):
    print(json.dumps(what), flush=True)

def stay():
    say("ready")
    sys.stdin.readline()
"""


class Outcome(NamedTuple):
    """What a program printed, line by line, and how it ended."""

    said: list[Any]
    status: int


@pytest.fixture
def start(build_dir: Path) -> Iterator[Start]:
    """Start Python programs that call the simulated libcuda of a node; whatever still runs at the end is killed."""
    running: list[subprocess.Popen[str]] = []

    def start_one(node: Path, source: str, **environment: str) -> subprocess.Popen[str]:
        inherited = {name: text for name, text in os.environ.items() if not name.startswith(("ALIQUOT_SIM_", "CUDA_"))}
        process = subprocess.Popen(
            [sys.executable, "-c", PRELUDE + textwrap.dedent(source)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=inherited | {"LD_LIBRARY_PATH": str(build_dir / "lib/sim"), "ALIQUOT_SIM_DIR": str(node)} | environment,
        )
        running.append(process)
        return process

    yield start_one
    for process in running:
        process.kill()
        process.communicate()


@pytest.fixture
def run(start: Start) -> Callable[..., Outcome]:
    def run_one(node: Path, source: str, **environment: str) -> Outcome:
        process = start(node, source, **environment)
        out, _ = process.communicate(timeout=60)
        return Outcome([json.loads(line) for line in out.splitlines()], process.returncode)

    return run_one


def wait_until_ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert json.loads(process.stdout.readline()) == "ready"


def inject(build_dir: Path, node: Path, *words: str) -> None:
    subprocess.run([build_dir / "bin/aliquot-sim", "inject", *words, "--dir", node], check=True)


# --- the library's surface --------------------------------------------------------------------------------------


class TableRow(NamedTuple):
    symbol: str
    base: str
    since: int


def read_table() -> list[TableRow]:
    """Rows of cuda_entries.def in file order; a twin is a row of its own, behind its plain form."""
    rows = []
    for line in (SIM / "cuda_entries.def").read_text().splitlines():
        match = re.fullmatch(r'(?:ENTRY|TWINS)\((\w+), "(\w+)", (\d+)(?:, (\w+), (\d+))?\)', line)
        if not match:
            continue
        symbol, base, since, twin, twin_since = match.groups()
        rows.append(TableRow(symbol, base, int(since)))
        if twin:
            rows.append(TableRow(twin, base, int(twin_since)))
    return rows


@pytest.fixture(scope="module")
def exported(build_dir: Path) -> set[str]:
    """Names of the library's dynamic symbols that it defines."""
    listing = subprocess.run(
        ["nm", "--dynamic", "--defined-only", build_dir / "lib/sim/libcuda.so.1"], capture_output=True, text=True, check=True
    ).stdout
    return {line.split()[-1] for line in listing.splitlines()}


def test_only_the_drivers_names_are_exported(exported):
    assert [name for name in exported if not re.fullmatch(r"cu[A-Z]\w+", name)] == []


def test_every_exported_name_is_found_by_lookup(exported):
    assert exported == {row.symbol for row in read_table()}


def test_table_is_sorted_for_the_search():
    keys = [(row.base.encode(), row.since) for row in read_table() if not row.symbol.endswith(("_ptsz", "_ptds"))]
    assert keys == sorted(keys)


def test_versions_are_nvidias():
    include_dir, _ = extract.find_include_dir(extract.PACKAGES["cuda"], "cuda.h")
    theirs = {(row.symbol, row.base, row.since) for row in extract.cuda_abi(include_dir)}
    ours = {(row.symbol, row.base, row.since) for row in read_table()}
    assert ours - theirs == {("cuGetProcAddress_v2_ptsz", "cuGetProcAddress", 12000)}  # the header has it as a remap only


NEWER = "newer than the driver of the profiles (580, CUDA 13.0), which does not have them"


def read_missing() -> dict[str, list[str]]:
    """Names that the library lacks, by the reason that missing.txt gives."""
    groups: dict[str, list[str]] = {}
    for line in (SIM / "missing.txt").read_text().splitlines():
        if match := re.fullmatch(r"\[(.+)\]", line):
            names = groups.setdefault(match.group(1), [])
        elif line and not line.startswith("#"):
            names.append(line)
    return groups


def test_every_public_name_is_there_or_in_the_list_of_missing_ones():
    table, groups = read_table(), read_missing()
    bases, symbols = {row.base for row in table}, {row.symbol for row in table}
    lacking = {row.symbol if row.base in bases else row.base for row in NVIDIAS if row.symbol not in symbols}
    listed = [name for names in groups.values() for name in names]
    assert sorted(listed) == sorted(lacking)
    assert all(names == sorted(names) for names in groups.values())


def test_names_of_the_profiles_driver_are_not_called_newer():
    first: dict[str, int] = {}
    for row in NVIDIAS:
        first[row.base] = min(row.since, first.get(row.base, row.since))
        first[row.symbol] = row.since
    newer = {name for names in read_missing().values() for name in names if first[name] > 13000}
    assert newer == set(read_missing()[NEWER])


def test_library_never_calls_itself_through_names_that_a_preload_can_take(build_dir):
    relocations = subprocess.run(
        ["readelf", "--relocs", "--wide", build_dir / "lib/sim/libcuda.so.1"], capture_output=True, text=True, check=True
    ).stdout
    assert re.findall(r"\bcu[A-Z]\w+", relocations) == []


def test_soname_is_the_drivers(build_dir):
    dynamic = subprocess.run(
        ["readelf", "--dynamic", build_dir / "lib/sim/libcuda.so.1"], capture_output=True, text=True, check=True
    ).stdout
    assert "Library soname: [libcuda.so.1]" in dynamic


LOOK_UP = """
def look_up(name, version):
    address, status = C.c_void_p(), C.c_int(-1)
    result = cuda.cuGetProcAddress_v2(name.encode(), C.byref(address), version, C.c_uint64(0), C.byref(status))
    return result, status.value, bool(address.value)

version = value(C.c_int, "cuDriverGetVersion")
say([version, look_up("cuInit", version + 10), {name: look_up(name, version) for name in json.load(sys.stdin)}])
"""

FOUND, NOT_FOUND = [0, 0, True], [0, 1, False]


@pytest.mark.parametrize(("driver", "cuda"), [("470.256.02", 11040), ("535.261.03", 12020), ("580.159.03", 13000), ("615.10", 13040)])
def test_names_newer_than_the_driver_are_not_found(sim_node, start, driver, cuda):
    first_of: dict[str, int] = {}
    for row in read_table():
        first_of[row.base] = min(row.since, first_of.get(row.base, row.since))
    program = start(sim_node("t4x2", "--driver", driver), LOOK_UP)
    out, _ = program.communicate(json.dumps(list(first_of)))
    version, too_new, found = json.loads(out)
    assert (version, too_new[0]) == (cuda, 1)  # CUDA_ERROR_INVALID_VALUE
    assert found == {name: FOUND if since <= cuda else NOT_FOUND for name, since in first_of.items()}
    assert cuda >= 13000 or NOT_FOUND in found.values(), "the table has newer names"


# --- the ABI header against NVIDIA's ----------------------------------------------------------------------------

SAME_AS = {
    "CUDA_KERNEL_NODE_PARAMS": "CUDA_KERNEL_NODE_PARAMS_v2",
    "CUDA_MEMSET_NODE_PARAMS": "CUDA_MEMSET_NODE_PARAMS_v1",
    "CUDA_HOST_NODE_PARAMS": "CUDA_HOST_NODE_PARAMS_v1",
    "CUDA_MEM_ALLOC_NODE_PARAMS": "CUDA_MEM_ALLOC_NODE_PARAMS_v1",
    "CUDA_EVENT_NODE_PARAMS": "CUDA_EVENT_WAIT_NODE_PARAMS",
}
"""Where our name means another version than the plain name in NVIDIA's header; the header's plain names are the newest."""

GREW_LATER = {"CUgraphNodeParams.host", "CUgraphNodeParams.eventRecord"}
"""Union members that got longer after CUDA 13.0, inside a union that did not."""


def without_comments(text: str) -> str:
    return re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)


def fields_of(body: str, prefix: str = "") -> Iterator[str]:
    """Dotted names of the members of a struct body, those of nested structs with their own name in front."""
    while body.strip():
        nested = re.match(r"\s*(?:struct|union)\s*\{", body)
        if not nested:
            declaration, _, body = body.partition(";")
            for declarator in declaration.split(","):
                name = re.search(r"(\w+)(?:\[[^\]]*\])?\s*$", declarator)
                if name:
                    yield prefix + name.group(1)
            continue
        inner, rest = split_braces(body[nested.end() :])
        name_text, _, body = rest.partition(";")
        name_text = name_text.strip()
        if name_text:
            yield prefix + name_text
        yield from fields_of(inner, f"{prefix}{name_text}." if name_text else prefix)


def split_braces(text: str) -> tuple[str, str]:
    """What stands before the brace that closes, and after it."""
    depth = 1
    for position, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[:position], text[position + 1 :]
    raise AssertionError("unbalanced braces in cuda_abi.h")


def facts_of(header: str) -> tuple[list[str], dict[str, list[str]]]:
    """Constants and structs that a header in our style defines."""
    text = without_comments(header)
    constants = re.findall(r"\b((?:CU|CUDA)_[A-Z0-9_]+) = ", text) + re.findall(
        r"^#define ((?:CU|CUDA)_\w+) [0-9]", text, flags=re.MULTILINE
    )
    structs = {}
    for match in re.finditer(r"typedef (?:struct|union) \w+ \{", text):
        body, rest = split_braces(text[match.end() :])
        structs[rest.split(";")[0].strip()] = list(fields_of(body))
    return constants, structs


def facts_program(include: str, constants: list[str], structs: dict[str, list[str]], names: dict[str, str]) -> str:
    """A C program that prints every constant's value and every struct's layout as `header` has it."""
    lines = [f"#include {include}", "#include <stddef.h>", "#include <stdio.h>", "int main(void) {"]
    lines += [f'printf("{name} %lld\\n", (long long){name});' for name in constants]
    for struct, fields in structs.items():
        real = names.get(struct, struct)
        lines.append(f'printf("{struct} %zu %zu\\n", sizeof({real}), _Alignof({real}));')
        for field in fields:
            place = f"offsetof({real}, {field}), sizeof((({real} *)0)->{field})"
            lines.append(f'printf("{struct}.{field} %zu %zu\\n", {place});')
    return "\n".join([*lines, "}", ""])


def printed_facts(directory: Path, name: str, source: str, *flags: str) -> dict[str, str]:
    (directory / f"{name}.c").write_text(source)
    subprocess.run(["cc", "-std=gnu11", "-w", *flags, directory / f"{name}.c", "-o", directory / name], check=True)
    lines = subprocess.run([directory / name], capture_output=True, text=True, check=True).stdout.splitlines()
    return dict(line.split(" ", 1) for line in lines)


def prototypes(directory: Path, include: str, *flags: str) -> dict[str, str]:
    """Parameter types of every function a header declares, with version suffixes of type names that mean the same dropped."""
    source, listing = directory / "prototypes.c", directory / "prototypes.aux"
    source.write_text(f"#include {include}\n")
    subprocess.run(["gcc", "-std=gnu11", "-w", *flags, "-aux-info", listing, "-c", source, "-o", os.devnull], check=True)
    found = {}
    for match in re.finditer(r"extern CUresult (cu\w+) \((.*)\);", listing.read_text()):
        types = re.sub(r"\b(CU(?!deviceptr)\w+?)_v[12]\b", r"\1", match.group(2))
        found[match.group(1)] = types.replace("CUdeviceptr_v2", "CUdeviceptr")
    return found


def test_abi_header_agrees_with_nvidias(tmp_path):
    include_dir, _ = extract.find_include_dir(extract.PACKAGES["cuda"], "cuda.h")
    constants, structs = facts_of(ABI_HEADER.read_text())
    assert len(constants) > 350
    assert len(structs) > 30
    structs["CUmemPoolProps"].remove("reserved")  # later headers name a byte of it
    ours = printed_facts(tmp_path, "ours", facts_program(f'"{ABI_HEADER}"', constants, structs, {}))
    theirs = printed_facts(
        tmp_path, "theirs", facts_program("<cuda.h>", constants, structs, SAME_AS), f"-I{include_dir}", f"-D{extract.ALL_VERSIONS}"
    )
    differing = {name: (text, theirs[name]) for name, text in ours.items() if theirs[name] != text}
    assert differing.keys() == GREW_LATER, differing


def test_prototypes_agree_with_nvidias(tmp_path):
    include_dir, _ = extract.find_include_dir(extract.PACKAGES["cuda"], "cuda.h")
    ours = prototypes(tmp_path, f'"{ABI_HEADER}"')
    theirs = prototypes(tmp_path, "<cuda.h>", f"-I{include_dir}", f"-D{extract.ALL_VERSIONS}")
    elsewhere = {"cuGetProcAddress_v2_ptsz", "cuProfilerInitialize", "cuProfilerStart", "cuProfilerStop"}  # not in cuda.h itself
    elsewhere |= {"cuGLCtxCreate", "cuGLCtxCreate_v2", "cuVDPAUCtxCreate", "cuVDPAUCtxCreate_v2"}
    plain_ints = {"cuFlushGPUDirectRDMAWrites"}  # two enums that nobody here needs by name
    assert ours.keys() - theirs.keys() == elsewhere
    differing = {name: (types, theirs[name]) for name, types in ours.items() if name in theirs and theirs[name] != types}
    assert differing.keys() == plain_ints, differing


# --- programs on a node -----------------------------------------------------------------------------------------


def test_killed_processes_give_memory_back_to_those_that_run(sim_node, start):
    node = sim_node("t4x2")
    watcher = start(node, "context(); stay(); say(free_mib())")
    wait_until_ready(watcher)
    holders = [start(node, "context(); allocate(3 << 30); stay()") for _ in range(3)]
    for holder in holders:
        wait_until_ready(holder)
    for holder in holders:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    time.sleep(0.1)  # longer than cuMemGetInfo goes without a look for the dead
    out, _ = watcher.communicate("go\n")
    assert json.loads(out) == 15360 - 445 - 104


def test_many_processes_together_get_exactly_what_there_is(sim_node, start):
    node = sim_node("t4x2")
    grab = """
        context()
        stay()
        taken = 0
        try:
            while True:
                allocate(64 * MIB)
                taken += 64
        except CudaError as error:
            say([taken, str(error)])
        stay()
    """
    programs = [start(node, grab) for _ in range(8)]
    for program in programs:
        wait_until_ready(program)
    for program in programs:
        assert program.stdin is not None
        program.stdin.write("go\n")
        program.stdin.flush()
    shares = []
    for program in programs:
        assert program.stdout is not None
        taken, error = json.loads(program.stdout.readline())
        assert error.endswith("cuMemAlloc_v2: 2")
        shares.append(taken)
    room = 15360 - 445 - 8 * 104
    assert room - 64 < sum(shares) <= room


def test_nvml_sees_what_cuda_does(sim_node, start, run):
    node = sim_node("t4x2")
    worker = start(
        node,
        """
        context(); allocate(1 << 30); kernel = spin()
        for _ in range(1000):
            launch(kernel, 60000)  # a minute of work: it is looked at while there is some
        stay()
        """,
    )
    wait_until_ready(worker)
    time.sleep(1)
    look = """
        import pynvml as nv
        nv.nvmlInit()
        gpu = nv.nvmlDeviceGetHandleByIndex(0)
        processes = nv.nvmlDeviceGetComputeRunningProcesses(gpu)
        say([[process.pid, process.usedGpuMemory // MIB] for process in processes])
        say(nv.nvmlDeviceGetUtilizationRates(gpu).gpu)
    """
    processes, utilisation = run(node, look).said
    assert processes == [[worker.pid, 1024 + 104 + 2]]  # the module's code takes a 2 MiB segment
    assert utilisation > 50, "the device is busy; one whose process gets no processor for long stalls"
    worker.kill()
    worker.wait()
    assert run(node, look).said[0] == []


def test_cuda_and_nvml_live_in_one_process(sim_node, run):
    """Two libraries of one process map the state; the one that reaps must not take its own process for dead."""
    outcome = run(
        sim_node("t4x2"),
        """
        import pynvml as nv
        context(); allocate(100 * MIB)
        nv.nvmlInit()
        gpu = nv.nvmlDeviceGetHandleByIndex(0)
        for _ in range(3):
            say([process.pid == os.getpid() for process in nv.nvmlDeviceGetComputeRunningProcesses(gpu)])
            nv.nvmlShutdown(); nv.nvmlInit()
        say(nv.nvmlDeviceGetMemoryInfo(gpu).used // MIB)
        """,
    )
    assert outcome == Outcome([[True], [True], [True], 100 + 104 + 445], 0)


def test_faults_reach_running_programs(sim_node, start, build_dir):
    node = sim_node("t4x2")
    program = start(
        node,
        """
        def attempt():
            stay()
            begin = time.monotonic()
            try:
                allocate(1)
                error = ""
            except CudaError as failed:
                error = str(failed)
            say([error, time.monotonic() - begin > 0.25])
        context()
        for _ in range(4):
            attempt()
        """,
    )
    seen = []
    for words in (["hang", "300", "--gpu", "0"], ["hang", "0", "--gpu", "0"], ["lost", "--gpu", "1"], ["lost", "--gpu", "0"]):
        wait_until_ready(program)
        inject(build_dir, node, *words)
        assert program.stdin is not None
        assert program.stdout is not None
        program.stdin.write("go\n")
        program.stdin.flush()
        seen.append(json.loads(program.stdout.readline()))
    assert seen == [["", True], ["", False], ["", False], ["cuMemAlloc_v2: 999", False]]


@pytest.mark.parametrize(("fault", "status"), [("mismatch", 803), ("no-driver", 100)])
def test_a_node_without_a_working_driver_does_not_initialise(fault, status, sim_node, run, build_dir):
    node = sim_node("t4x2")
    inject(build_dir, node, fault, "on")
    assert run(node, "say(cuda.cuInit(0))").said == [status]
    inject(build_dir, node, fault, "off")
    assert run(node, "say(cuda.cuInit(0))").said == [0]


def test_state_is_created_from_topology_by_first_process(sim_node, start, run):
    node = sim_node("t4x2")
    (node / "state").unlink()
    programs = [start(node, "context(); allocate(MIB); stay()") for _ in range(6)]
    for program in programs:
        wait_until_ready(program)
    assert sorted(path.name for path in node.iterdir()) == ["state", "topology"]
    assert run(node, "context(); say(free_mib())").said == [15360 - 445 - 7 * 104 - 6 * 2]


def test_missing_node_is_no_device_and_says_why(start, tmp_path):
    process = start(tmp_path / "nowhere", "say(cuda.cuInit(0))")
    out, _ = process.communicate()
    assert json.loads(out) == 100


def gpu_uuids(node: Path, build_dir: Path) -> list[str]:
    shown = subprocess.run([build_dir / "bin/aliquot-sim", "show", "--dir", node], capture_output=True, text=True, check=True).stdout
    return re.findall(r"^gpu \d+\s+(GPU-\S+)", shown, flags=re.MULTILINE)


def test_container_devices_are_the_ones_its_environment_names(sim_node, run, build_dir):
    node = sim_node("h200x8")
    uuids = gpu_uuids(node, build_dir)
    count = 'call("cuInit", 0); say(value(C.c_int, "cuDeviceGetCount"))'
    assert run(node, count).said == [8]
    assert run(node, count, ALIQUOT_SIM_DEVICE_0=uuids[3], ALIQUOT_SIM_DEVICE_1=uuids[5]).said == [2]
    assert run(node, count, ALIQUOT_SIM_DEVICE_0=uuids[3], CUDA_VISIBLE_DEVICES="0").said == [1]
    assert run(node, "say(cuda.cuInit(0))", CUDA_VISIBLE_DEVICES="").said == [100]
    assert run(node, "say(cuda.cuInit(0))", CUDA_VISIBLE_DEVICES="0,0").said == [100]


def test_whole_gpus_come_before_mig_instances_and_a_process_gets_one_instance(sim_node, run, build_dir):
    node = sim_node("a100x8-mig")
    shown = subprocess.run([build_dir / "bin/aliquot-sim", "show", "--dir", node], capture_output=True, text=True, check=True).stdout
    instances = re.findall(r"MIG-[0-9a-f-]{36}", shown)
    names = """
        call("cuInit", 0)
        count = value(C.c_int, "cuDeviceGetCount")
        text = C.create_string_buffer(100)
        call("cuDeviceGetName", text, 100, count - 1)
        say([count, text.value.decode()])
    """
    assert run(node, names).said == [[6, "NVIDIA A100-SXM4-80GB"]]
    assert run(node, names, CUDA_VISIBLE_DEVICES=f"{instances[0]},{instances[1]}").said == [[1, "NVIDIA A100-SXM4-80GB MIG 1g.10gb"]]
    both = {f"ALIQUOT_SIM_DEVICE_{index}": uuid for index, uuid in enumerate(instances[:2])}
    assert run(node, names, **both).said == [[1, "NVIDIA A100-SXM4-80GB MIG 1g.10gb"]]


def test_kernels_on_a_mig_instance_take_longer(sim_node, run, build_dir):
    node = sim_node("a100x8-mig")
    shown = subprocess.run([build_dir / "bin/aliquot-sim", "show", "--dir", node], capture_output=True, text=True, check=True).stdout
    instance = re.findall(r"MIG-[0-9a-f-]{36}", shown)[0]
    measure = r"""
        context()
        module = C.c_void_p(value(C.c_void_p, "cuModuleLoadData", b".entry work\n// aliquot-sim: work duration_us=10000\n"))
        kernel = C.c_void_p(value(C.c_void_p, "cuModuleGetFunction", module, b"work"))
        for _ in range(5):
            begin = time.monotonic()
            for _ in range(5):
                call("cuLaunchKernel", kernel, 108, 1, 1, 256, 1, 1, 0, None, None, None)
            call("cuCtxSynchronize")
            say(time.monotonic() - begin)
    """
    whole = run(node, measure).said
    part = run(node, measure, CUDA_VISIBLE_DEVICES=instance).said
    assert min(whole) >= 0.05 * 0.95
    assert min(part) >= 0.05 * 108 / 14 * 0.95
    assert min(part) / min(whole) == pytest.approx(108 / 14, rel=0.5), "a busy machine makes every try longer, and the best one least"
