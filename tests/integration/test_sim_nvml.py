# SPDX-License-Identifier: Apache-2.0
"""The simulated libnvidia-ml, driven by the real nvidia-ml-py.

A library is mapped once per process and its node comes from the environment, so every case runs in a Python process of its own: a function
of this module, sent there as source (``run_on``). It finds there what PRELUDE gives it and returns JSON.
"""

import ctypes
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pynvml as nv
import pytest

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
PROFILE_1G, PROFILE_1G_MEDIA, PROFILE_1G_DOUBLE, PROFILE_2G, PROFILE_3G, PROFILE_4G, PROFILE_7G = 19, 20, 15, 14, 9, 5, 0

Node = Callable[..., Path]
Run = Callable[..., Any]
Start = Callable[..., subprocess.Popen[str]]
Sim = Callable[..., subprocess.CompletedProcess[str]]

PRELUDE = """
import ctypes, json, os, sys, threading, time
import pynvml as nv
MIB = 1 << 20
PROFILE_1G, PROFILE_1G_MEDIA, PROFILE_1G_DOUBLE, PROFILE_2G, PROFILE_3G, PROFILE_4G, PROFILE_7G = 19, 20, 15, 14, 9, 5, 0
"""


def failure(call: Callable[..., object], *args: object) -> int:
    """The NVML error code that a call ends with; 0 when it succeeds."""
    try:
        call(*args)
    except nv.NVMLError as error:
        return error.value
    return 0


def gpus() -> list[Any]:
    nv.nvmlInit()
    return [nv.nvmlDeviceGetHandleByIndex(index) for index in range(nv.nvmlDeviceGetCount())]


def mig_devices(gpu: Any) -> list[Any]:
    found = []
    for index in range(nv.nvmlDeviceGetMaxMigDeviceCount(gpu)):
        try:
            found.append(nv.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index))
        except nv.NVMLError_NotFound:
            continue
    return found


def gpu_instance(gpu: Any, profile: int, start: int | None = None) -> Any:
    if start is None:
        return nv.nvmlDeviceCreateGpuInstance(gpu, profile)
    size = {PROFILE_1G: 1, PROFILE_2G: 2, PROFILE_3G: 4, PROFILE_4G: 4, PROFILE_7G: 8}[profile]
    return nv.nvmlDeviceCreateGpuInstanceWithPlacement(gpu, profile, ctypes.byref(nv.c_nvmlGpuInstancePlacement_t(start, size)))


class Cuda:
    """A CUDA program in the raw: a context on one device, memory in it, and kernels of a known length."""

    PTX = b".version 7.0\n.target sm_50\n.address_size 64\n.visible .entry aliquot_spin(.param .u64 microseconds) { ret; }\n"

    def __init__(self, ordinal: int = 0) -> None:
        self.lib = ctypes.CDLL("libcuda.so.1")
        device, self.context = ctypes.c_int(), ctypes.c_void_p()
        self.check(self.lib.cuInit(0))
        self.check(self.lib.cuDeviceGet(ctypes.byref(device), ordinal))
        self.check(self.lib.cuDevicePrimaryCtxRetain(ctypes.byref(self.context), device))
        self.check(self.lib.cuCtxSetCurrent(self.context))

    def check(self, status: int) -> None:
        if status:
            raise RuntimeError(f"CUDA error {status}")

    def allocate(self, size: int) -> int:
        pointer = ctypes.c_uint64()
        self.check(self.lib.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(size)))
        return pointer.value

    def load_spin(self) -> None:
        module, self.spin_kernel = ctypes.c_void_p(), ctypes.c_void_p()
        self.check(self.lib.cuModuleLoadData(ctypes.byref(module), self.PTX))
        self.check(self.lib.cuModuleGetFunction(ctypes.byref(self.spin_kernel), module, b"aliquot_spin"))

    def spin(self, microseconds: int) -> None:
        """Keep the SMs busy for this long, and wait for it."""
        argument = ctypes.c_uint64(microseconds)
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
        self.check(self.lib.cuLaunchKernel(self.spin_kernel, 1, 1, 1, 1, 1, 1, 0, None, arguments, None))
        self.check(self.lib.cuCtxSynchronize())


HELPERS = (failure, gpus, mig_devices, gpu_instance, Cuda)


def program(function: Callable[..., object]) -> str:
    """A Python program that calls ``function`` with the JSON in its first argument and prints the result as its last line."""
    sources = [textwrap.dedent(inspect.getsource(piece)) for piece in (*HELPERS, function)]
    call = f"print(json.dumps({function.__name__}(*json.loads(sys.argv[1]))))"
    return "\n".join(["from __future__ import annotations", PRELUDE, *sources, call])


def environment(build_dir: Path, node: Path, extra: dict[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ALIQUOT_SIM_", "CUDA_"))}
    return {**kept, "LD_LIBRARY_PATH": str(build_dir / "lib/sim"), "ALIQUOT_SIM_DIR": str(node), **extra}


@pytest.fixture
def run_on(build_dir: Path) -> Run:
    """``run_on(node, function, *args, **environment)`` calls the function in a fresh process on that node and returns what it returns."""

    def run(node: Path, function: Callable[..., object], *args: object, **extra: str) -> Any:
        command = [sys.executable, "-c", program(function), json.dumps(args)]
        finished = subprocess.run(command, env=environment(build_dir, node, extra), capture_output=True, text=True, timeout=60, check=False)
        assert finished.returncode == 0, finished.stderr
        return json.loads(finished.stdout.splitlines()[-1])

    return run


@pytest.fixture
def start_on(build_dir: Path) -> Iterator[Start]:
    """Like run_on, for a process that stays: it prints a line when it is ready, and is killed at the end of the test."""
    started: list[subprocess.Popen[str]] = []

    def start(node: Path, function: Callable[..., object], *args: object, **extra: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-u", "-c", program(function), json.dumps(args)]
        process = subprocess.Popen(
            command, env=environment(build_dir, node, extra), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def sim(build_dir: Path) -> Sim:
    """``sim("inject", "lost", "--dir", node, "--gpu", 0)`` runs aliquot-sim."""

    def run(*words: object) -> subprocess.CompletedProcess[str]:
        command = [str(build_dir / "bin/aliquot-sim"), *map(str, words)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    return run


# ---- life cycle --------------------------------------------------------------------------------------------------------


def life_cycle() -> dict[str, Any]:
    before = failure(nv.nvmlDeviceGetCount)
    nv.nvmlInit()
    nv.nvmlInitWithFlags(0)
    versions = [nv.nvmlSystemGetDriverVersion(), nv.nvmlSystemGetNVMLVersion(), nv.nvmlSystemGetCudaDriverVersion_v2()]
    nv.nvmlShutdown()
    still = failure(nv.nvmlDeviceGetCount)
    nv.nvmlShutdown()
    return {
        "before": before,
        "versions": versions,
        "still": still,
        "after": failure(nv.nvmlDeviceGetCount),
        "again": failure(nv.nvmlShutdown),
    }


def test_init_is_counted_and_versions_come_from_the_topology(sim_node: Node, run_on: Run) -> None:
    seen = run_on(sim_node("h200x8"), life_cycle)
    assert seen["before"] == seen["after"] == seen["again"] == nv.NVML_ERROR_UNINITIALIZED
    assert seen["still"] == 0
    assert seen["versions"] == ["580.159.03", "13.580.159.03", 13000]


def initialise() -> int:
    return failure(nv.nvmlInit)


def test_missing_node_looks_like_driver_that_is_not_loaded(tmp_path: Path, run_on: Run) -> None:
    assert run_on(tmp_path / "nothing", initialise) == nv.NVML_ERROR_DRIVER_NOT_LOADED


def error_texts() -> list[str]:
    nv.nvmlInit()
    return [nv.nvmlErrorString(code) for code in (0, nv.NVML_ERROR_GPU_IS_LOST, nv.NVML_ERROR_NOT_FOUND, 12345)]


def test_errors_have_the_driver_s_words(sim_node: Node, run_on: Run) -> None:
    assert run_on(sim_node("t4x2"), error_texts) == ["Success", "GPU is lost", "Not Found", "Unknown Error"]


# ---- the binary interface ----------------------------------------------------------------------------------------------

STRUCTS = {  # ours: theirs in nvidia-ml-py
    "nvmlPciInfo_t": "nvmlPciInfo_t",
    "nvmlPciInfo_v2_t": "nvmlPciInfo_v2_t",
    "nvmlPciInfoExt_v1_t": "nvmlPciInfoExt_v1_t",
    "nvmlMemory_t": "c_nvmlMemory_t",
    "nvmlMemory_v2_t": "c_nvmlMemory_v2_t",
    "nvmlBAR1Memory_t": "c_nvmlBAR1Memory_t",
    "nvmlUtilization_t": "c_nvmlUtilization_t",
    "nvmlProcessInfo_v2_t": "c_nvmlProcessInfo_v2_t",
    "nvmlProcessInfo_v3_t": "c_nvmlProcessInfo_v3_t",
    "nvmlProcessDetail_v1_t": "c_nvmlProcessDetail_v1_t",
    "nvmlProcessDetailList_v1_t": "c_nvmlProcessDetailList_v1_t",
    "nvmlProcessUtilizationSample_t": "c_nvmlProcessUtilizationSample_t",
    "nvmlProcessUtilizationInfo_v1_t": "c_nvmlProcessUtilizationInfo_v1_t",
    "nvmlProcessesUtilizationInfo_v1_t": "c_nvmlProcessesUtilizationInfo_v1_t",
    "nvmlEventData_t": "c_nvmlEventData_t",
    "nvmlSample_t": "c_nvmlSample_t",
    "nvmlGpuInstanceProfileInfo_t": "c_nvmlGpuInstanceProfileInfo_t",
    "nvmlGpuInstanceProfileInfo_v2_t": "c_nvmlGpuInstanceProfileInfo_v2_t",
    "nvmlGpuInstancePlacement_t": "c_nvmlGpuInstancePlacement_t",
    "nvmlGpuInstanceInfo_t": "c_nvmlGpuInstanceInfo_t",
    "nvmlComputeInstanceProfileInfo_t": "c_nvmlComputeInstanceProfileInfo_t",
    "nvmlComputeInstanceProfileInfo_v2_t": "c_nvmlComputeInstanceProfileInfo_v2_t",
    "nvmlComputeInstanceInfo_t": "c_nvmlComputeInstanceInfo_t",
    "nvmlDeviceAttributes_t": "c_nvmlDeviceAttributes",
    "nvmlGpuFabricInfo_t": "c_nvmlGpuFabricInfo_t",
    "nvmlGpuFabricInfo_v2_t": "c_nvmlGpuFabricInfo_v2_t",
    "nvmlGpuFabricInfo_v3_t": "c_nvmlGpuFabricInfo_v3_t",
    "nvmlFieldValue_t": "c_nvmlFieldValue_t",
    "nvmlEccErrorCounts_t": "c_nvmlEccErrorCounts_t",
    "nvmlRowRemapperHistogramValues_t": "c_nvmlRowRemapperHistogramValues",
    "nvmlTemperature_v1_t": "c_nvmlTemperature_v1_t",
    "nvmlSetMemoryLimits_v1_t": "c_nvmlSetMemoryLimits_v1_t",
    "nvmlGetMemoryLimits_v1_t": "c_nvmlGetMemoryLimits_v1_t",
    "nvmlAccountingStats_t": "c_nvmlAccountingStats_t",
    "nvmlGpmMetric_t": "c_nvmlGpmMetric_t",
    "nvmlViolationTime_t": "c_nvmlViolationTime_t",
}


def test_our_structs_have_the_sizes_of_nvidia_ml_py(tmp_path: Path) -> None:
    source, binary = tmp_path / "sizes.c", tmp_path / "sizes"
    lines = "".join(f'printf("{name} %zu\\n", sizeof({name}));' for name in STRUCTS)
    source.write_text(f'#include <stdio.h>\n#include "nvml_abi.h"\nint main(void) {{ {lines} return 0; }}\n')
    subprocess.run(["cc", "-std=gnu11", "-Werror", f"-I{ROOT}/cuda_shim/abi", "-o", binary, source], check=True)
    printed = subprocess.run([binary], check=True, capture_output=True, text=True).stdout
    ours = {name: int(size) for name, size in (line.split() for line in printed.splitlines())}
    assert ours == {name: ctypes.sizeof(getattr(nv, theirs)) for name, theirs in STRUCTS.items()}


def exported(build_dir: Path) -> set[str]:
    text = subprocess.run(
        ["nm", "-D", "--defined-only", build_dir / "lib/sim/libnvidia-ml.so.1"], check=True, capture_output=True, text=True
    ).stdout
    return {line.split()[-1] for line in text.splitlines()}


def test_only_nvml_names_leave_the_library(build_dir: Path) -> None:
    assert [name for name in exported(build_dir) if not re.match(r"nvml[A-Z]", name)] == []


LEGACY = [
    "nvmlInit",
    "nvmlInit_v2",
    "nvmlDeviceGetCount",
    "nvmlDeviceGetHandleByIndex",
    "nvmlDeviceGetHandleByPciBusId",
    "nvmlDeviceGetPciInfo",
    "nvmlDeviceGetPciInfo_v2",
    "nvmlDeviceGetNvLinkRemotePciInfo",
    "nvmlEventSetWait",
    "nvmlDeviceGetAttributes",
    "nvmlComputeInstanceGetInfo",
    "nvmlDeviceGetComputeRunningProcesses",
    "nvmlDeviceGetComputeRunningProcesses_v2",
    "nvmlDeviceGetGraphicsRunningProcesses_v2",
    "nvmlDeviceGetMPSComputeRunningProcesses_v2",
    "nvmlDeviceGetGpuInstancePossiblePlacements",
    "nvmlSystemGetCudaDriverVersion",
]


def test_names_that_old_callers_bind_are_there(build_dir: Path) -> None:
    assert [name for name in LEGACY if name not in exported(build_dir)] == []


def wrong_version_words() -> dict[str, int]:
    gpu = gpus()[0]

    def call(function: str, struct: type[ctypes.Structure], *args: object) -> int:
        argument = struct()
        argument.version = 0x7000123
        return nv._nvmlGetFunctionPointer(function)(gpu, *args, ctypes.byref(argument))

    return {
        "memory": call("nvmlDeviceGetMemoryInfo_v2", nv.c_nvmlMemory_v2_t),
        "profile": call("nvmlDeviceGetGpuInstanceProfileInfoV", nv.c_nvmlGpuInstanceProfileInfo_v2_t, 0),
        "fabric": call("nvmlDeviceGetGpuFabricInfoV", nv.c_nvmlGpuFabricInfo_v3_t),
        "temperature": call("nvmlDeviceGetTemperatureV", nv.c_nvmlTemperature_v1_t),
        "utilisation": call("nvmlDeviceGetProcessesUtilizationInfo", nv.c_nvmlProcessesUtilizationInfo_v1_t),
        "details": call("nvmlDeviceGetRunningProcessDetailList", nv.c_nvmlProcessDetailList_t),
        "pci": call("nvmlDeviceGetPciInfoExt", nv.nvmlPciInfoExt_v1_t),
    }


def test_a_struct_of_another_version_is_refused(sim_node: Node, run_on: Run) -> None:
    assert set(run_on(sim_node("h200x8"), wrong_version_words).values()) == {25}


def bad_arguments() -> dict[str, int]:
    gpu = gpus()[0]
    name = ctypes.create_string_buffer(4)
    return {
        "index": failure(nv.nvmlDeviceGetHandleByIndex, 99),
        "uuid": failure(nv.nvmlDeviceGetHandleByUUID, b"GPU-00000000-0000-0000-0000-000000000000"),
        "bus": failure(nv.nvmlDeviceGetHandleByPciBusId, b"nonsense"),
        "handle": failure(nv.nvmlDeviceGetName, ctypes.cast(name, nv.c_nvmlDevice_t)),
        "buffer": nv._nvmlGetFunctionPointer("nvmlDeviceGetName")(gpu, name, 4),
        "null": nv._nvmlGetFunctionPointer("nvmlDeviceGetMemoryInfo")(gpu, None),
    }


def test_bad_arguments_get_the_driver_s_errors(sim_node: Node, run_on: Run) -> None:
    assert run_on(sim_node("h200x8"), bad_arguments) == {
        "index": nv.NVML_ERROR_INVALID_ARGUMENT,
        "uuid": nv.NVML_ERROR_NOT_FOUND,
        "bus": nv.NVML_ERROR_INVALID_ARGUMENT,
        "handle": nv.NVML_ERROR_INVALID_ARGUMENT,
        "buffer": nv.NVML_ERROR_INSUFFICIENT_SIZE,
        "null": nv.NVML_ERROR_INVALID_ARGUMENT,
    }


# ---- inventory ---------------------------------------------------------------------------------------------------------


def inventory() -> list[dict[str, Any]]:
    found = []
    for gpu in gpus():
        pci = nv.nvmlDeviceGetPciInfo(gpu)
        uuid, serial = nv.nvmlDeviceGetUUID(gpu), nv.nvmlDeviceGetSerial(gpu)
        by_other_names = [
            nv.nvmlDeviceGetHandleByUUID(uuid),
            nv.nvmlDeviceGetHandleByPciBusId(pci.busId),
            nv.nvmlDeviceGetHandleBySerial(serial),
        ]
        found.append(
            {
                "uuid": uuid,
                "serial": serial,
                "name": nv.nvmlDeviceGetName(gpu),
                "minor": nv.nvmlDeviceGetMinorNumber(gpu),
                "index": nv.nvmlDeviceGetIndex(gpu),
                "same": [nv.nvmlDeviceGetIndex(other) for other in by_other_names],
                "bus": pci.busId,
                "legacy": pci.busIdLegacy,
                "device_id": pci.pciDeviceId,
                "brand": nv.nvmlDeviceGetBrand(gpu),
                "architecture": nv.nvmlDeviceGetArchitecture(gpu),
                "compute": nv.nvmlDeviceGetCudaComputeCapability(gpu),
                "memory_mib": nv.nvmlDeviceGetMemoryInfo(gpu).total // MIB,
            }
        )
    return found


@pytest.mark.parametrize(
    ("profile", "count", "name", "memory_mib", "architecture", "compute"),
    [
        ("h200x8", 8, "NVIDIA H200", 143771, nv.NVML_DEVICE_ARCH_HOPPER, [9, 0]),
        ("a100x8-mig", 8, "NVIDIA A100-SXM4-80GB", 81920, nv.NVML_DEVICE_ARCH_AMPERE, [8, 0]),
        ("l40sx4", 4, "NVIDIA L40S", 46068, nv.NVML_DEVICE_ARCH_ADA, [8, 9]),
        ("t4x2", 2, "Tesla T4", 15360, nv.NVML_DEVICE_ARCH_TURING, [7, 5]),
    ],
)
def test_inventory_of_every_profile(
    sim_node: Node, run_on: Run, profile: str, count: int, name: str, memory_mib: int, architecture: int, compute: list[int]
) -> None:
    seen = run_on(sim_node(profile), inventory)
    assert [gpu["minor"] for gpu in seen] == [gpu["index"] for gpu in seen] == list(range(count))
    assert all(gpu["same"] == [gpu["index"]] * 3 for gpu in seen)
    assert {gpu["name"] for gpu in seen} == {name}
    assert {gpu["memory_mib"] for gpu in seen} == {memory_mib}
    assert {gpu["architecture"] for gpu in seen} == {architecture}
    assert {tuple(gpu["compute"]) for gpu in seen} == {tuple(compute)}
    for key in ("uuid", "serial", "bus"):
        assert len({gpu[key] for gpu in seen}) == count
    assert all(re.fullmatch(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", gpu["uuid"]) for gpu in seen)
    assert all(gpu["bus"] == "0000" + gpu["legacy"] for gpu in seen)


def uuids() -> list[str]:
    return [nv.nvmlDeviceGetUUID(gpu) for gpu in gpus()]


def test_uuids_belong_to_a_profile_and_a_node_name(sim_node: Node, run_on: Run) -> None:
    first, again, other = (run_on(sim_node("t4x2", "--node", node), uuids) for node in ("a", "a", "b"))
    assert first == again
    assert set(first).isdisjoint(other)


@pytest.mark.parametrize(
    ("driver", "cuda"),
    [
        ("450.80.02", 11000),
        ("470.256.02", 11040),
        ("525.60", 12000),
        ("535.261.03", 12020),
        ("536.1", 12020),
        ("570.86", 12080),
        ("615.10", 13040),
    ],
)
def test_the_driver_version_can_be_chosen_and_sets_the_cuda_version(sim_node: Node, run_on: Run, driver: str, cuda: int) -> None:
    seen = run_on(sim_node("t4x2", "--driver", driver), life_cycle)["versions"]
    assert seen == [driver, f"{cuda // 1000}.{driver}", cuda]


# ---- what a process may see --------------------------------------------------------------------------------------------


def view() -> list[dict[str, Any]]:
    return [
        {
            "uuid": nv.nvmlDeviceGetUUID(gpu),
            "index": nv.nvmlDeviceGetIndex(gpu),
            "minor": nv.nvmlDeviceGetMinorNumber(gpu),
            "mig": [nv.nvmlDeviceGetUUID(device) for device in mig_devices(gpu)],
        }
        for gpu in gpus()
    ]


def test_a_container_sees_its_gpus_renumbered(sim_node: Node, run_on: Run) -> None:
    node = sim_node("h200x8")
    everything = run_on(node, uuids)
    seen = run_on(node, view, ALIQUOT_SIM_DEVICE_0=everything[5], ALIQUOT_SIM_DEVICE_1=everything[2])
    assert [(gpu["uuid"], gpu["index"], gpu["minor"]) for gpu in seen] == [(everything[2], 0, 2), (everything[5], 1, 5)]


def test_a_container_with_a_mig_device_sees_it_and_its_parent_only(sim_node: Node, run_on: Run) -> None:
    node = sim_node("a100x8-mig")
    host = run_on(node, view)
    chosen = host[7]["mig"][2]
    assert run_on(node, view, ALIQUOT_SIM_DEVICE_0=chosen) == [{"uuid": host[7]["uuid"], "index": 0, "minor": 7, "mig": [chosen]}]


def test_a_container_without_any_device_finds_no_gpu(sim_node: Node, run_on: Run) -> None:
    assert run_on(sim_node("t4x2"), initialise, ALIQUOT_SIM_DEVICE_0="none") == nv.NVML_ERROR_GPU_NOT_FOUND


# ---- memory ------------------------------------------------------------------------------------------------------------


def memory_both_ways() -> dict[str, Any]:
    gpu = gpus()[0]
    v1, v2 = nv.nvmlDeviceGetMemoryInfo(gpu), nv.nvmlDeviceGetMemoryInfo(gpu, version=nv.nvmlMemory_v2)
    bar1 = nv.nvmlDeviceGetBAR1MemoryInfo(gpu)
    return {
        "v1": [v1.total, v1.used, v1.free],
        "v2": [v2.total, v2.reserved, v2.used, v2.free],
        "bar1": [bar1.bar1Total, bar1.bar1Used, bar1.bar1Free],
    }


def test_the_old_memory_query_counts_the_reserve_as_used(sim_node: Node, run_on: Run) -> None:
    seen = run_on(sim_node("h200x8"), memory_both_ways)
    total, reserved = 143771 * MIB, 620 * MIB
    assert seen["v2"] == [total, reserved, 0, total - reserved]
    assert seen["v1"] == [total, reserved, total - reserved]
    assert seen["bar1"][0] == sum(seen["bar1"][1:]) == 262144 * MIB


def limits(cgroup: str) -> dict[str, Any]:
    gpu = gpus()[0]
    name = cgroup.encode()

    def set_limits(soft: int, hard: int, where: bytes = name) -> int:
        return failure(nv.nvmlDeviceSetMemoryLimits_v1, gpu, nv.c_nvmlSetMemoryLimits_v1_t(where, soft, hard))

    def get_limits() -> list[int]:
        wanted = nv.c_nvmlGetMemoryLimits_v1_t(name, 0, 0, 0)
        return [failure(nv.nvmlDeviceGetMemoryLimits_v1, gpu, wanted), wanted.softLimit, wanted.hardLimit, wanted.currentUsed]

    return {
        "before": get_limits(),
        "set": set_limits(1 * MIB, 2 * MIB),
        "after": get_limits(),
        "crossed": set_limits(2, 1),
        "too much": set_limits(0, 1 << 50),
        "no cgroup": set_limits(0, MIB, b"/nonexistent"),
        "removed": set_limits(0, 0xFFFFFFFFFFFFFFFF),
        "at last": get_limits(),
    }


def test_memory_limits_of_a_cgroup_need_r615(sim_node: Node, run_on: Run, tmp_path: Path) -> None:
    seen = run_on(sim_node("h200x8"), limits, str(tmp_path))
    assert seen["set"] == seen["before"][0] == nv.NVML_ERROR_FUNCTION_NOT_FOUND


def test_memory_limits_are_kept_per_cgroup(sim_node: Node, run_on: Run, tmp_path: Path) -> None:
    (tmp_path / "cgroup.procs").write_text("")
    seen = run_on(sim_node("h200x8", "--driver", "615.10"), limits, str(tmp_path))
    assert seen["before"][0] == seen["at last"][0] == nv.NVML_ERROR_NOT_FOUND
    assert seen["set"] == seen["removed"] == 0
    assert seen["after"] == [0, 1 * MIB, 2 * MIB, 0]
    assert seen["crossed"] == seen["too much"] == nv.NVML_ERROR_INVALID_ARGUMENT
    assert seen["no cgroup"] == nv.NVML_ERROR_OPERATING_SYSTEM


def fill_within(cgroup: str, soft: int, hard: int) -> dict[str, Any]:
    gpu = gpus()[0]
    with open(f"{cgroup}/cgroup.procs", "a") as procs:  # noqa: PTH123 - the program has no pathlib
        print(os.getpid(), file=procs)
    set_status = failure(nv.nvmlDeviceSetMemoryLimits_v1, gpu, nv.c_nvmlSetMemoryLimits_v1_t(cgroup.encode(), soft, hard))
    cuda, held = Cuda(), 0
    try:
        while held < 4 * hard:
            cuda.allocate(2 * MIB)
            held += 2 * MIB
    except RuntimeError as refused:
        error = str(refused)
    wanted = nv.c_nvmlGetMemoryLimits_v1_t(cgroup.encode(), 0, 0, 0)
    nv.nvmlDeviceGetMemoryLimits_v1(gpu, wanted)
    return {"set": set_status, "error": error, "used": wanted.currentUsed}


def test_memory_limit_of_a_cgroup_holds_for_its_processes_together(sim_node: Node, run_on: Run, start_on: Start, tmp_path: Path) -> None:
    node = sim_node("h200x8", "--driver", "615.10")
    limit = 2048 * MIB
    other = start_holder(start_on, node, 0, 256 * MIB)
    outside = start_holder(start_on, node, 0, 4096 * MIB)
    (tmp_path / "cgroup.procs").write_text(f"{other.pid}\n")
    seen = run_on(node, fill_within, str(tmp_path), 0, limit)
    assert (seen["set"], seen["error"]) == (0, "CUDA error 2")
    assert limit - 4 * MIB < seen["used"] <= limit
    assert outside.poll() is None


# ---- processes ---------------------------------------------------------------------------------------------------------


def hold(ordinal: int, size: int) -> None:
    cuda = Cuda(ordinal)
    cuda.allocate(size)
    print("ready", os.getpid(), flush=True)
    sys.stdin.read()


def start_holder(start_on: Start, node: Path, ordinal: int, size: int, **extra: str) -> subprocess.Popen[str]:
    process = start_on(node, hold, ordinal, size, **extra)
    assert process.stdout is not None
    assert process.stdout.readline().split() == ["ready", str(process.pid)]
    return process


def used_and_processes(index: int) -> dict[str, Any]:
    gpu = gpus()[index]
    processes = nv.nvmlDeviceGetComputeRunningProcesses_v3(gpu)
    count = ctypes.c_uint(0)
    size_query = nv._nvmlGetFunctionPointer("nvmlDeviceGetComputeRunningProcesses_v3")(gpu, ctypes.byref(count), None)
    return {
        "used": nv.nvmlDeviceGetMemoryInfo(gpu, version=nv.nvmlMemory_v2).used,
        "pids": sorted(process.pid for process in processes),
        "bytes": {process.pid: process.usedGpuMemory for process in processes},
        "v1": sorted(process.pid for process in nv.nvmlDeviceGetComputeRunningProcesses(gpu)),
        "v2": sorted(process.pid for process in nv.nvmlDeviceGetComputeRunningProcesses_v2(gpu)),
        "details": sorted(process.pid for process in nv.nvmlDeviceGetRunningProcessDetailList(gpu, nv.nvmlProcessDetailList_v1, 0)),
        "names": [nv.nvmlSystemGetProcessName(process.pid) for process in processes],
        "graphics": nv.nvmlDeviceGetGraphicsRunningProcesses_v3(gpu),
        "mps": nv.nvmlDeviceGetMPSComputeRunningProcesses_v3(gpu),
        "size query": [size_query, count.value],
        "instances": [[process.gpuInstanceId, process.computeInstanceId] for process in processes],
    }


def test_memory_of_two_processes_is_seen_and_comes_back(sim_node: Node, run_on: Run, start_on: Start) -> None:
    node = sim_node("h200x8")
    holders = [start_holder(start_on, node, 1, size) for size in (100 * MIB, 300 * MIB)]
    seen = run_on(node, used_and_processes, 1)
    pids = sorted(process.pid for process in holders)
    assert seen["pids"] == seen["v1"] == seen["v2"] == seen["details"] == pids
    assert seen["used"] == sum(seen["bytes"].values()) >= 400 * MIB
    assert seen["bytes"][str(holders[1].pid)] - seen["bytes"][str(holders[0].pid)] == 200 * MIB
    assert seen["size query"] == [nv.NVML_ERROR_INSUFFICIENT_SIZE, 2]
    assert seen["graphics"] == seen["mps"] == []
    assert all("python" in name for name in seen["names"])
    assert run_on(node, used_and_processes, 0)["pids"] == []
    for process in holders:
        process.kill()
        process.wait()
    assert run_on(node, used_and_processes, 1)["used"] == 0


def mig_view(index: int) -> dict[str, Any]:
    gpu = gpus()[index]
    devices = mig_devices(gpu)
    listed = nv.nvmlDeviceGetComputeRunningProcesses_v3(gpu)
    destroyed = []
    for device in devices:
        instance = nv.nvmlDeviceGetGpuInstanceById(gpu, nv.nvmlDeviceGetGpuInstanceId(device))
        compute = nv.nvmlGpuInstanceGetComputeInstanceById(instance, nv.nvmlDeviceGetComputeInstanceId(device))
        destroyed.append(failure(nv.nvmlComputeInstanceDestroy, compute))
    return {
        "parent": [[process.pid, process.gpuInstanceId, process.computeInstanceId] for process in listed],
        "destroyed": destroyed,
    }


def mig_memory(index: int) -> list[list[int]]:
    out = []
    for device in mig_devices(gpus()[index]):
        memory = nv.nvmlDeviceGetMemoryInfo(device)
        pids = [process.pid for process in nv.nvmlDeviceGetComputeRunningProcesses_v3(device)]
        out.append([memory.total // MIB, memory.used, pids])
    return out


def test_a_mig_device_in_use_shows_its_process_and_cannot_be_destroyed(sim_node: Node, run_on: Run, start_on: Start) -> None:
    node = sim_node("a100x8-mig")
    chosen = run_on(node, view)[7]["mig"][3]
    holder = start_holder(start_on, node, 0, 64 * MIB, ALIQUOT_SIM_DEVICE_0=chosen)
    memory = run_on(node, mig_memory, 7)
    assert [total for total, _, _ in memory] == [19968, 9728, 9728, 40192]
    assert [pids for _, _, pids in memory] == [[], [], [], [holder.pid]]
    assert [used > 0 for _, used, _ in memory] == [False, False, False, True]
    seen = run_on(node, mig_view, 7)
    assert seen["parent"] == [[holder.pid, 2, 0]]
    assert seen["destroyed"] == [0, 0, 0, nv.NVML_ERROR_IN_USE]


def change_mode(index: int, mode: int) -> list[Any]:
    gpu = gpus()[index]
    activation = nv.nvmlDeviceSetMigMode(gpu, mode)
    return [activation, nv.nvmlDeviceGetMigMode(gpu)]


def test_mig_mode_waits_for_a_busy_gpu(sim_node: Node, run_on: Run, start_on: Start, sim: Sim) -> None:
    node = sim_node("a100x8-mig")
    holder = start_holder(start_on, node, 0, MIB)
    assert run_on(node, change_mode, 0, 1) == [nv.NVML_ERROR_IN_USE, [0, 1]]
    assert sim("inject", "clear", "--dir", node, "--gpu", 0).returncode == 0
    assert run_on(node, modes)[0] == [0, 1], "a reset does not take a GPU from its clients"
    holder.kill()
    holder.wait()
    assert sim("inject", "clear", "--dir", node, "--gpu", 0).returncode == 0
    assert run_on(node, modes)[0] == [1, 1]


def modes() -> list[list[int]]:
    return [nv.nvmlDeviceGetMigMode(gpu) for gpu in gpus()]


# ---- utilisation -------------------------------------------------------------------------------------------------------


def keep_busy(ordinal: int) -> None:
    cuda = Cuda(ordinal)
    cuda.load_spin()
    print("ready", os.getpid(), flush=True)
    while True:
        cuda.spin(50_000)


def start_busy(start_on: Start, node: Path, ordinal: int, **extra: str) -> subprocess.Popen[str]:
    process = start_on(node, keep_busy, ordinal, **extra)
    assert next_line(process).split() == ["ready", str(process.pid)]
    return process


def utilisation(index: int) -> dict[str, Any]:
    gpu = gpus()[index]
    time.sleep(1.2)
    samples = nv.nvmlDeviceGetProcessUtilization(gpu, 0)
    newest = max(sample.timeStamp for sample in samples)
    kind, values = nv.nvmlDeviceGetSamples(gpu, nv.NVML_GPU_UTILIZATION_SAMPLES, newest - 500_000)
    stamps = [value.timeStamp for value in values]
    return {
        "gpu": nv.nvmlDeviceGetUtilizationRates(gpu).gpu,
        "processes": {sample.pid: sample.smUtil for sample in samples},
        "infos": {info.pid: info.smUtil for info in nv.nvmlDeviceGetProcessesUtilizationInfo(gpu, 0)},
        "age": time.time() - newest / 1e6,
        "seen all": failure(nv.nvmlDeviceGetProcessUtilization, gpu, newest + 10_000_000),
        "samples": [kind, len(values), max(value.sampleValue.uiVal for value in values)],
        "steps": [round((stamps[i + 1] - stamps[i]) / 1000) for i in range(len(stamps) - 1)],
        "power": nv.nvmlDeviceGetPowerUsage(gpu),
        "clock": nv.nvmlDeviceGetClockInfo(gpu, nv.NVML_CLOCK_SM),
        "reasons": nv.nvmlDeviceGetCurrentClocksEventReasons(gpu),
    }


def test_a_busy_process_shows_in_every_figure(sim_node: Node, run_on: Run, start_on: Start) -> None:
    node = sim_node("h200x8")
    process = start_busy(start_on, node, 2)
    seen = run_on(node, utilisation, 2)
    pid = str(process.pid)
    assert seen["gpu"] >= 40, "all that the process gets to submit, on a busy machine too"
    assert set(seen["processes"]) == set(seen["infos"]) == {pid}
    assert 40 <= seen["processes"][pid] <= 100
    assert 0 <= seen["age"] < 2
    assert seen["seen all"] == nv.NVML_ERROR_NOT_FOUND
    assert seen["samples"][0] == nv.NVML_VALUE_TYPE_UNSIGNED_INT
    assert seen["samples"][1] >= 5
    assert seen["samples"][2] >= 40
    assert set(seen["steps"]) == {100}, "one sample per bucket"
    assert seen["power"] > 300_000
    assert seen["clock"] == 1980
    assert not seen["reasons"] & nv.nvmlClocksEventReasonGpuIdle


def test_two_busy_processes_share_the_gpu(sim_node: Node, run_on: Run, start_on: Start) -> None:
    node = sim_node("h200x8")
    pids = {str(start_busy(start_on, node, 0).pid) for _ in range(2)}
    seen = run_on(node, utilisation, 0)
    assert set(seen["processes"]) == pids
    assert all(25 <= percent <= 70 for percent in seen["processes"].values()), seen["processes"]
    assert sum(seen["processes"].values()) <= 102


def mig_utilisation() -> list[Any]:
    gpu = gpus()[0]
    nv.nvmlDeviceSetMigMode(gpu, 1)
    instance = gpu_instance(gpu, PROFILE_3G, 0)
    nv.nvmlGpuInstanceCreateComputeInstance(instance, 2)
    os.environ["ALIQUOT_SIM_DEVICE_0"] = nv.nvmlDeviceGetUUID(mig_devices(gpu)[0])
    cuda = Cuda(0)
    cuda.load_spin()
    samples = [nv.nvmlGpmSampleAlloc() for _ in range(2)]
    nv.nvmlGpmMigSampleGet(gpu, 1, samples[0])
    cuda.spin(400_000)
    nv.nvmlGpmMigSampleGet(gpu, 1, samples[1])
    get = nv.c_nvmlGpmMetricsGet_t()
    get.version, get.numMetrics, get.sample1, get.sample2 = nv.NVML_GPM_METRICS_GET_VERSION, 1, *samples
    get.metrics[0].metricId = nv.NVML_GPM_METRIC_SM_UTIL
    nv.nvmlGpmMetricsGet(get)
    calls = (nv.nvmlDeviceGetUtilizationRates, lambda handle: nv.nvmlDeviceGetProcessUtilization(handle, 0))
    return [get.metrics[0].value, [failure(call, gpu) for call in calls]]


def test_under_mig_only_performance_monitoring_knows_utilisation(sim_node: Node, run_on: Run) -> None:
    value, refused = run_on(sim_node("h200x8"), mig_utilisation)
    assert value > 50
    assert refused == [nv.NVML_ERROR_NOT_SUPPORTED] * 2


# ---- MIG ---------------------------------------------------------------------------------------------------------------


def mig_devices_of(index: int) -> list[dict[str, Any]]:
    gpu = gpus()[index]
    found = []
    for device in mig_devices(gpu):
        attributes = nv.nvmlDeviceGetAttributes(device)
        found.append(
            {
                "uuid": nv.nvmlDeviceGetUUID(device),
                "name": nv.nvmlDeviceGetName(device),
                "gi": nv.nvmlDeviceGetGpuInstanceId(device),
                "ci": nv.nvmlDeviceGetComputeInstanceId(device),
                "sms": attributes.multiprocessorCount,
                "memory": attributes.memorySizeMB,
                "slices": [attributes.gpuInstanceSliceCount, attributes.computeInstanceSliceCount],
                "is mig": [nv.nvmlDeviceIsMigDeviceHandle(either).value for either in (device, gpu)],
                "parent": nv.nvmlDeviceGetIndex(nv.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(device)),
                "by uuid": nv.nvmlDeviceGetUUID(nv.nvmlDeviceGetHandleByUUID(nv.nvmlDeviceGetUUID(device))),
            }
        )
    return found


def test_instances_of_the_profile_exist_at_boot(sim_node: Node, run_on: Run) -> None:
    node = sim_node("a100x8-mig")
    assert run_on(node, modes) == [[0, 0]] * 6 + [[1, 1]] * 2
    small = run_on(node, mig_devices_of, 6)
    assert [device["name"] for device in small] == ["NVIDIA A100-SXM4-80GB MIG 1g.10gb"] * 7
    assert [device["gi"] for device in small] == list(range(7, 14))
    mixed = run_on(node, mig_devices_of, 7)
    assert [device["name"].rsplit(" ", 1)[-1] for device in mixed] == ["2g.20gb", "1g.10gb", "1g.10gb", "3g.40gb"]
    assert [(device["sms"], device["memory"], *device["slices"]) for device in mixed] == [
        (28, 19968, 2, 2),
        (14, 9728, 1, 1),
        (14, 9728, 1, 1),
        (42, 40192, 3, 3),
    ]
    assert all(device["is mig"] == [1, 0] and device["parent"] == 7 and device["by uuid"] == device["uuid"] for device in mixed)


def profiles() -> list[dict[str, Any]]:
    gpu = gpus()[0]
    found = []
    for index in range(nv.NVML_GPU_INSTANCE_PROFILE_COUNT):
        if failure(nv.nvmlDeviceGetGpuInstanceProfileInfo, gpu, index):
            continue
        v1 = nv.nvmlDeviceGetGpuInstanceProfileInfo(gpu, index)
        v2 = nv.nvmlDeviceGetGpuInstanceProfileInfo(gpu, index, version=2)
        count = ctypes.c_uint(8)
        placements = (nv.c_nvmlGpuInstancePlacement_t * 8)()
        nv.nvmlDeviceGetGpuInstancePossiblePlacements(gpu, v1.id, placements, ctypes.byref(count))
        found.append(
            {
                "index": index,
                "id": v1.id,
                "name": v2.name.decode() if isinstance(v2.name, bytes) else v2.name,
                "same": v1.id == v2.id,
                "slices": v1.sliceCount,
                "count": v1.instanceCount,
                "sms": v1.multiprocessorCount,
                "memory": v1.memorySizeMB,
                "starts": [placement.start for placement in placements[: count.value]],
                "sizes": sorted({p.size for p in placements[: count.value]}),
            }
        )
    return found


EIGHTHS = [0, 1, 2, 3, 4, 5, 6]
A100_PROFILES = {
    "MIG 1g.10gb": (19, EIGHTHS, [1], 7),
    "MIG 1g.10gb+me": (20, EIGHTHS, [1], 1),
    "MIG 1g.20gb": (15, [0, 2, 4, 6], [2], 4),
    "MIG 2g.20gb": (14, [0, 2, 4], [2], 3),
    "MIG 3g.40gb": (9, [0, 4], [4], 2),
    "MIG 4g.40gb": (5, [0], [4], 1),
    "MIG 7g.80gb": (0, [0], [8], 1),
}


def test_profiles_have_nvidia_s_ids_and_placements(sim_node: Node, run_on: Run) -> None:
    seen = run_on(sim_node("a100x8-mig"), profiles)
    assert {profile["name"]: (profile["id"], profile["starts"], profile["sizes"], profile["count"]) for profile in seen} == A100_PROFILES
    assert all(profile["same"] for profile in seen)


def test_profile_names_follow_the_memory_of_the_model(sim_node: Node, run_on: Run) -> None:
    names = {profile["name"] for profile in run_on(sim_node("h200x8"), profiles)}
    assert names == {f"MIG {name}" for name in ("1g.18gb", "1g.18gb+me", "1g.35gb", "2g.35gb", "3g.71gb", "4g.71gb", "7g.141gb")}


def profile_v3() -> list[Any]:
    class Info(ctypes.Structure):
        _fields_ = [
            *(
                (name, ctypes.c_uint)
                for name in ("version", "id", "slices", "instances", "sms", "copy", "decoder", "encoder", "jpeg", "ofa")
            ),
            ("memory", ctypes.c_ulonglong),
            ("name", ctypes.c_char * 96),
            ("capabilities", ctypes.c_uint),
        ]

    gpu = gpus()[0]
    info = Info(version=ctypes.sizeof(Info) | 3 << 24)
    status = nv._nvmlGetFunctionPointer("nvmlDeviceGetGpuInstanceProfileInfoV")(
        gpu, nv.NVML_GPU_INSTANCE_PROFILE_3_SLICE, ctypes.byref(info)
    )
    return [status, info.id, info.slices, info.sms, info.memory, info.name.decode()]


def test_version_three_of_the_profile_has_its_own_layout(sim_node: Node, run_on: Run) -> None:
    assert run_on(sim_node("a100x8-mig"), profile_v3) == [0, PROFILE_3G, 3, 42, 40192, "MIG 3g.40gb"]


def create_and_destroy() -> dict[str, Any]:
    gpu = gpus()[0]
    before = failure(nv.nvmlDeviceCreateGpuInstance, gpu, PROFILE_1G)
    nv.nvmlDeviceSetMigMode(gpu, 1)
    uuids, ids = [], []
    for _ in range(2):
        instance = nv.nvmlDeviceCreateGpuInstance(gpu, PROFILE_1G)
        info = nv.nvmlGpuInstanceGetInfo(instance)
        ids.append([info.id, info.profileId, info.placement.start, info.placement.size])
        compute = nv.nvmlGpuInstanceCreateComputeInstance(instance, 0)
        (device,) = mig_devices(gpu)
        uuids.append(nv.nvmlDeviceGetUUID(device))
        holds_ci = failure(nv.nvmlGpuInstanceDestroy, instance)
        nv.nvmlComputeInstanceDestroy(compute)
        stale = [failure(nv.nvmlDeviceGetUUID, device), failure(nv.nvmlComputeInstanceDestroy, compute)]
        nv.nvmlGpuInstanceDestroy(instance)
        stale.append(failure(nv.nvmlGpuInstanceGetInfo, instance))
    return {"before": before, "uuids": uuids, "ids": ids, "holds ci": holds_ci, "stale": stale, "left": len(mig_devices(gpu))}


def test_recreated_instance_has_new_uuid_and_old_handles_are_invalid(sim_node: Node, run_on: Run) -> None:
    seen = run_on(sim_node("h200x8"), create_and_destroy)
    assert seen["before"] == nv.NVML_ERROR_NOT_SUPPORTED, "MIG mode is off"
    assert seen["uuids"][0] != seen["uuids"][1]
    assert seen["ids"] == [[13, PROFILE_1G, 6, 1]] * 2
    assert seen["holds ci"] == nv.NVML_ERROR_IN_USE
    assert seen["stale"] == [nv.NVML_ERROR_NOT_FOUND] * 3
    assert seen["left"] == 0


def packing() -> dict[str, Any]:
    gpu = gpus()[0]
    nv.nvmlDeviceSetMigMode(gpu, 1)

    def remaining() -> dict[int, int]:
        return {
            profile: nv.nvmlDeviceGetGpuInstanceRemainingCapacity(gpu, profile)
            for profile in (PROFILE_1G, PROFILE_2G, PROFILE_3G, PROFILE_7G)
        }

    empty = remaining()
    large = gpu_instance(gpu, PROFILE_3G)
    where = nv.nvmlGpuInstanceGetInfo(large).placement.start
    beside = remaining()
    taken = failure(gpu_instance, gpu, PROFILE_3G, 4)
    odd = failure(gpu_instance, gpu, PROFILE_2G, 1)
    size = failure(nv.nvmlDeviceCreateGpuInstanceWithPlacement, gpu, PROFILE_2G, ctypes.byref(nv.c_nvmlGpuInstancePlacement_t(0, 1)))
    unknown = failure(nv.nvmlDeviceCreateGpuInstance, gpu, 77)
    order = []
    nv.nvmlGpuInstanceDestroy(large)
    while True:
        try:
            order.append(nv.nvmlGpuInstanceGetInfo(nv.nvmlDeviceCreateGpuInstance(gpu, PROFILE_1G)).id)
        except nv.NVMLError as error:
            full = error.value
            break
    return {
        "empty": empty,
        "where": where,
        "beside": beside,
        "taken": taken,
        "odd": odd,
        "size": size,
        "unknown": unknown,
        "order": order,
        "full": full,
    }


def test_placement_follows_the_driver(sim_node: Node, run_on: Run) -> None:
    seen = run_on(sim_node("h200x8"), packing)
    assert seen["empty"] == {"19": 7, "14": 3, "9": 2, "0": 1}
    assert seen["where"] == 4, "the half that leaves room for a 4g instance"
    assert seen["beside"] == {"19": 4, "14": 2, "9": 1, "0": 0}
    assert seen["taken"] == seen["full"] == nv.NVML_ERROR_INSUFFICIENT_RESOURCES
    assert seen["odd"] in (nv.NVML_ERROR_INVALID_ARGUMENT, nv.NVML_ERROR_INSUFFICIENT_RESOURCES)
    assert seen["size"] == seen["unknown"] == nv.NVML_ERROR_INVALID_ARGUMENT
    assert seen["order"] == [13, 11, 12, 7, 8, 9, 10], "the order in which a real driver fills a GPU"


def compute_instances() -> dict[str, Any]:
    gpu = gpus()[0]
    nv.nvmlDeviceSetMigMode(gpu, 1)
    instance = gpu_instance(gpu, PROFILE_3G, 0)
    infos = {}
    for profile in range(nv.NVML_COMPUTE_INSTANCE_PROFILE_COUNT):
        if failure(nv.nvmlGpuInstanceGetComputeInstanceProfileInfo, instance, profile, 0) == 0:
            info = nv.nvmlGpuInstanceGetComputeInstanceProfileInfo(instance, profile, 0, version=2)
            infos[info.name if isinstance(info.name, str) else info.name.decode()] = [info.id, info.sliceCount, info.multiprocessorCount]
    for _ in range(2):
        nv.nvmlGpuInstanceCreateComputeInstance(instance, 0)
    left = [nv.nvmlGpuInstanceGetComputeInstanceRemainingCapacity(instance, profile) for profile in (0, 1)]
    too_big = failure(nv.nvmlGpuInstanceCreateComputeInstance, instance, 1)
    absent = failure(nv.nvmlGpuInstanceCreateComputeInstance, instance, 4)
    devices = mig_devices(gpu)
    return {
        "infos": infos,
        "left": left,
        "too big": too_big,
        "absent": absent,
        "names": [nv.nvmlDeviceGetName(device) for device in devices],
        "ids": [[nv.nvmlDeviceGetGpuInstanceId(device), nv.nvmlDeviceGetComputeInstanceId(device)] for device in devices],
        "memory": [nv.nvmlDeviceGetMemoryInfo(device).total // MIB for device in devices],
    }


def test_compute_instances_share_their_gpu_instance(sim_node: Node, run_on: Run) -> None:
    seen = run_on(sim_node("a100x8-mig"), compute_instances)
    assert seen["infos"] == {"MIG 1c.3g.40gb": [0, 1, 14], "MIG 2c.3g.40gb": [1, 2, 28], "MIG 3g.40gb": [2, 3, 42]}
    assert seen["left"] == [1, 0]
    assert seen["too big"] == nv.NVML_ERROR_INSUFFICIENT_RESOURCES
    assert seen["absent"] == nv.NVML_ERROR_INVALID_ARGUMENT
    assert seen["names"] == ["NVIDIA A100-SXM4-80GB MIG 1c.3g.40gb"] * 2
    assert seen["ids"] == [[1, 0], [1, 1]]
    assert seen["memory"] == [40192, 40192]


def without_mig() -> list[int]:
    gpu = gpus()[0]
    calls = [nv.nvmlDeviceGetMigMode, nv.nvmlDeviceGetAttributes]
    return [
        *(failure(call, gpu) for call in calls),
        failure(nv.nvmlDeviceSetMigMode, gpu, 1),
        failure(nv.nvmlDeviceGetGpuInstanceProfileInfo, gpu, 0),
        nv.nvmlDeviceGetMaxMigDeviceCount(gpu),
    ]


def test_gpus_without_mig_say_so(sim_node: Node, run_on: Run) -> None:
    assert run_on(sim_node("l40sx4"), without_mig) == [nv.NVML_ERROR_NOT_SUPPORTED] * 4 + [0]


def test_leaving_mig_mode_takes_the_instances_with_it(sim_node: Node, run_on: Run) -> None:
    node = sim_node("a100x8-mig")
    assert run_on(node, change_mode, 7, 0) == [0, [0, 0]]
    assert run_on(node, change_mode, 7, 1) == [0, [1, 1]]
    assert run_on(node, mig_devices_of, 7) == []


# ---- topology ----------------------------------------------------------------------------------------------------------


def distances() -> dict[str, Any]:
    handles = gpus()
    cpu_words = 16
    return {
        "levels": [[nv.nvmlDeviceGetTopologyCommonAncestor(a, b) for b in handles] for a in handles],
        "near": [len(nv.nvmlDeviceGetTopologyNearestGpus(gpu, nv.NVML_TOPOLOGY_SINGLE)) for gpu in handles],
        "cpus": [list(nv.nvmlDeviceGetCpuAffinityWithinScope(gpu, cpu_words, nv.NVML_AFFINITY_SCOPE_NODE))[:3] for gpu in handles],
        "memory": [list(nv.nvmlDeviceGetMemoryAffinity(gpu, 1, nv.NVML_AFFINITY_SCOPE_NODE)) for gpu in handles],
        "cpu set": [len(nv.nvmlSystemGetTopologyGpuSet(cpu)) for cpu in (0, 16, 63)],
        "p2p": [
            [nv.nvmlDeviceGetP2PStatus(handles[0], handles[1], what), nv.nvmlDeviceGetP2PStatus(handles[0], handles[-1], what)]
            for what in (0, 2)
        ],
        "numa": failure(nv.nvmlDeviceGetNumaNodeId, handles[0]),
    }


def test_pcie_and_numa_of_the_l40s_node(sim_node: Node, run_on: Run) -> None:
    seen = run_on(sim_node("l40sx4"), distances)
    same, near, far = nv.NVML_TOPOLOGY_INTERNAL, nv.NVML_TOPOLOGY_SINGLE, nv.NVML_TOPOLOGY_SYSTEM
    assert seen["levels"] == [[same, near, far, far], [near, same, far, far], [far, far, same, near], [far, far, near, same]]
    assert seen["near"] == [1, 1, 1, 1]
    assert seen["cpus"][0] == [0x0000_FFFF_0000_FFFF, 0, 0]
    assert seen["cpus"][3] == [0xFFFF_0000_FFFF_0000, 0, 0]
    assert seen["memory"] == [[1], [1], [2], [2]]
    assert seen["cpu set"] == [2, 2, 2]
    ok, chipset, none = nv.NVML_P2P_STATUS_OK, nv.NVML_P2P_STATUS_CHIPSET_NOT_SUPPORED, nv.NVML_P2P_STATUS_NOT_SUPPORTED
    assert seen["p2p"] == [[ok, chipset], [none, none]]
    assert seen["numa"] == nv.NVML_ERROR_NOT_SUPPORTED, "only coherent platforms have GPU NUMA nodes"


def links(index: int) -> dict[str, Any]:
    handles = gpus()
    gpu = handles[index]
    states, remotes, kinds, versions = [], set(), set(), set()
    for link in range(nv.NVML_NVLINK_MAX_LINKS):
        try:
            states.append(nv.nvmlDeviceGetNvLinkState(gpu, link))
        except nv.NVMLError as error:
            end = [link, error.value]
            break
        remotes.add(nv.nvmlDeviceGetNvLinkRemotePciInfo(gpu, link).busId)
        kinds.add(nv.nvmlDeviceGetNvLinkRemoteDeviceType(gpu, link))
        versions.add(nv.nvmlDeviceGetNvLinkVersion(gpu, link))
    return {
        "states": states,
        "end": end,
        "remotes": sorted(remotes),
        "kinds": sorted(kinds),
        "versions": sorted(versions),
        "p2p": [nv.nvmlDeviceGetP2PStatus(gpu, other, nv.NVML_P2P_CAPS_INDEX_NVLINK) for i, other in enumerate(handles) if i != index],
        "capability": nv.nvmlDeviceGetNvLinkCapability(gpu, 0, nv.NVML_NVLINK_CAP_P2P_SUPPORTED),
    }


def test_nvlink_of_the_h200_node(sim_node: Node, run_on: Run) -> None:
    seen = run_on(sim_node("h200x8"), links, 3)
    assert seen["states"] == [1] * 18
    assert seen["end"] == [18, nv.NVML_ERROR_INVALID_ARGUMENT]
    assert seen["remotes"] == [f"00000000:{bus:02X}:00.0" for bus in (7, 8, 9, 10)]
    assert seen["kinds"] == [nv.NVML_NVLINK_DEVICE_TYPE_SWITCH]
    assert seen["versions"] == [6], "NVML counts versions of the protocol, not generations"
    assert seen["p2p"] == [nv.NVML_P2P_STATUS_OK] * 7
    assert seen["capability"] == 1


def test_a_gpu_in_mig_mode_has_no_peers(sim_node: Node, run_on: Run) -> None:
    ok, none = nv.NVML_P2P_STATUS_OK, nv.NVML_P2P_STATUS_NOT_SUPPORTED
    assert run_on(sim_node("a100x8-mig"), links, 0)["p2p"] == [ok] * 5 + [none] * 2


def test_a_pcie_node_has_no_nvlink(sim_node: Node, run_on: Run) -> None:
    def link_zero() -> int:
        return failure(nv.nvmlDeviceGetNvLinkState, gpus()[0], 0)

    assert run_on(sim_node("t4x2"), link_zero) == nv.NVML_ERROR_NOT_SUPPORTED


def fabric() -> Any:
    gpu = gpus()[0]
    info = nv.c_nvmlGpuFabricInfoV_t()
    try:
        nv.nvmlDeviceGetGpuFabricInfoV(gpu, ctypes.byref(info))
    except nv.NVMLError as error:
        return error.value
    return [info.state, info.status, info.cliqueId, bytes(info.clusterUuid).hex()]


def test_fabric_is_complete_on_hopper_and_unknown_before(sim_node: Node, run_on: Run) -> None:
    assert run_on(sim_node("h200x8"), fabric) == [nv.NVML_GPU_FABRIC_STATE_COMPLETED, 0, 0, "00" * 16]
    assert run_on(sim_node("a100x8-mig"), fabric) == nv.NVML_ERROR_NOT_SUPPORTED


# ---- events and health -------------------------------------------------------------------------------------------------


def watch(seconds: float) -> list[Any]:
    handles = gpus()
    events = nv.nvmlEventSetCreate()
    for gpu in handles:
        nv.nvmlDeviceRegisterEvents(gpu, nv.nvmlDeviceGetSupportedEventTypes(gpu), events)
    print("ready", flush=True)
    seen, end = [], time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            data = nv.nvmlEventSetWait_v2(events, int(max(0, end - time.monotonic()) * 1000))
        except nv.NVMLError_Timeout:
            break
        except nv.NVMLError as error:
            seen.append(["error", error.value])
            break
        seen.append(
            [nv.nvmlDeviceGetIndex(data.device) if data.eventData != 79 else "?", data.eventType, data.eventData, data.gpuInstanceId]
        )
        print("event", flush=True)
    nv.nvmlEventSetFree(events)
    return seen


def collect(process: subprocess.Popen[str]) -> Any:
    output, _ = process.communicate(timeout=30)
    return json.loads(output.splitlines()[-1])


def next_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


NO_INSTANCE = 0xFFFFFFFF


def test_a_waiting_process_gets_faults_as_they_happen(sim_node: Node, start_on: Start, sim: Sim) -> None:
    node = sim_node("a100x8-mig")
    assert sim("inject", "xid", 31, "--dir", node, "--gpu", 1).returncode == 0  # before anybody watched
    watcher = start_on(node, watch, 20.0)
    assert next_line(watcher) == "ready"
    assert sim("inject", "xid", 63, "--dir", node, "--gpu", 2).returncode == 0
    assert next_line(watcher) == "event"
    assert sim("inject", "ecc", "corrected", 3, "--dir", node, "--gpu", 4).returncode == 0
    assert next_line(watcher) == "event"
    assert sim("inject", "lost", "--dir", node, "--gpu", 5).returncode == 0
    assert collect(watcher) == [
        [2, nv.nvmlEventTypeXidCriticalError, 63, NO_INSTANCE],
        [4, nv.nvmlEventTypeSingleBitEccError, 0, NO_INSTANCE],
        ["?", nv.nvmlEventTypeXidCriticalError, 79, NO_INSTANCE],
        ["error", nv.NVML_ERROR_GPU_IS_LOST],
    ]


def test_an_uncorrected_error_is_an_xid_and_a_double_bit_error(sim_node: Node, start_on: Start, sim: Sim) -> None:
    node = sim_node("h200x8")
    watcher = start_on(node, watch, 2.0)
    assert next_line(watcher) == "ready"
    assert sim("inject", "ecc", "uncorrected", "--dir", node, "--gpu", 3).returncode == 0
    assert [event[:3] for event in collect(watcher)] == [
        [3, nv.nvmlEventTypeXidCriticalError, 48],
        [3, nv.nvmlEventTypeDoubleBitEccError, 0],
    ]


def test_an_xid_of_a_mig_device_names_it(sim_node: Node, run_on: Run, start_on: Start, sim: Sim) -> None:
    node = sim_node("a100x8-mig")
    chosen = run_on(node, view)[7]["mig"][3]
    watcher = start_on(node, watch, 1.5)
    assert next_line(watcher) == "ready"
    assert sim("inject", "xid", 43, "--dir", node, "--gpu", chosen).returncode == 0
    assert collect(watcher) == [[7, nv.nvmlEventTypeXidCriticalError, 43, 2]]


def test_a_change_of_instances_is_an_event(sim_node: Node, run_on: Run, start_on: Start) -> None:
    node = sim_node("a100x8-mig")
    watcher = start_on(node, watch, 3.0)
    assert next_line(watcher) == "ready"
    run_on(node, change_mode, 7, 0)
    assert next_line(watcher) == "event"
    watcher.kill()


def waiting_costs() -> dict[str, Any]:
    events = nv.nvmlEventSetCreate() if gpus() else None
    cpu, wall = time.process_time(), time.monotonic()
    status = failure(nv.nvmlEventSetWait_v2, events, 600)
    return {"status": status, "wall": time.monotonic() - wall, "cpu": time.process_time() - cpu}


def test_waiting_sleeps_until_the_time_is_out(sim_node: Node, run_on: Run) -> None:
    seen = run_on(sim_node("t4x2"), waiting_costs)
    assert seen["status"] == nv.NVML_ERROR_TIMEOUT
    assert 0.55 < seen["wall"] < 5
    assert seen["cpu"] < 0.3


def health(index: int) -> dict[str, Any]:
    gpu = gpus()[index]
    kinds, counters = (
        (nv.NVML_MEMORY_ERROR_TYPE_CORRECTED, nv.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
        (nv.NVML_VOLATILE_ECC, nv.NVML_AGGREGATE_ECC),
    )
    histogram = failure(nv.nvmlDeviceGetRowRemapperHistogram, gpu) or nv.nvmlDeviceGetRowRemapperHistogram(gpu)
    return {
        "totals": [[nv.nvmlDeviceGetTotalEccErrors(gpu, kind, counter) for counter in counters] for kind in kinds],
        "dram": nv.nvmlDeviceGetMemoryErrorCounter(gpu, kinds[1], counters[0], nv.NVML_MEMORY_LOCATION_DRAM),
        "rows": failure(nv.nvmlDeviceGetRemappedRows, gpu) or nv.nvmlDeviceGetRemappedRows(gpu),
        "histogram": histogram if isinstance(histogram, int) else [histogram.max, histogram.high],
        "pages": failure(nv.nvmlDeviceGetRetiredPages, gpu, 1) or len(nv.nvmlDeviceGetRetiredPages(gpu, 1)),
        "pending": failure(nv.nvmlDeviceGetRetiredPagesPendingStatus, gpu) or nv.nvmlDeviceGetRetiredPagesPendingStatus(gpu),
    }


def test_memory_errors_are_counted_and_rows_remapped(sim_node: Node, run_on: Run, sim: Sim) -> None:
    node = sim_node("a100x8-mig")
    assert run_on(node, health, 0) == {
        "totals": [[0, 0], [0, 0]],
        "dram": 0,
        "rows": [0, 0, 0, 0],
        "histogram": [640, 0],
        "pages": nv.NVML_ERROR_NOT_SUPPORTED,
        "pending": nv.NVML_ERROR_NOT_SUPPORTED,
    }
    sim("inject", "ecc", "uncorrected", "--dir", node, "--gpu", 0)
    sim("inject", "ecc", "corrected", 5, "--dir", node, "--gpu", 0)
    hurt = run_on(node, health, 0)
    assert (hurt["totals"], hurt["dram"], hurt["rows"], hurt["histogram"]) == ([[5, 5], [1, 1]], 1, [0, 1, 1, 0], [639, 1])
    sim("inject", "clear", "--dir", node, "--gpu", 0)
    healed = run_on(node, health, 0)
    assert (healed["totals"], healed["rows"]) == ([[0, 5], [0, 1]], [0, 1, 0, 0])


def test_before_ampere_pages_are_retired(sim_node: Node, run_on: Run, sim: Sim) -> None:
    node = sim_node("t4x2")
    sim("inject", "ecc", "uncorrected", "--dir", node, "--gpu", 1)
    seen = run_on(node, health, 1)
    assert (seen["pages"], seen["pending"], seen["rows"]) == (1, 1, nv.NVML_ERROR_NOT_SUPPORTED)


# ---- faults ------------------------------------------------------------------------------------------------------------


def ask_repeatedly() -> None:
    handles = gpus()
    print("ready", flush=True)
    for _ in sys.stdin:
        begin = time.monotonic()
        print(json.dumps([[failure(nv.nvmlDeviceGetMemoryInfo, gpu) for gpu in handles], time.monotonic() - begin]), flush=True)


def ask(process: subprocess.Popen[str]) -> Any:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return json.loads(next_line(process))


def test_a_running_process_meets_faults_and_their_end(sim_node: Node, run_on: Run, start_on: Start, sim: Sim) -> None:
    node = sim_node("t4x2")
    running = start_on(node, ask_repeatedly)
    assert next_line(running) == "ready"
    lost, mismatch, absent = nv.NVML_ERROR_GPU_IS_LOST, nv.NVML_ERROR_LIB_RM_VERSION_MISMATCH, nv.NVML_ERROR_DRIVER_NOT_LOADED
    assert ask(running)[0] == [0, 0]
    sim("inject", "lost", "--dir", node, "--gpu", 1)
    assert ask(running)[0] == [0, lost]
    sim("inject", "recover", "--dir", node, "--gpu", 1)
    assert ask(running)[0] == [0, 0]
    for fault, error in (("mismatch", mismatch), ("no-driver", absent)):
        sim("inject", fault, "on", "--dir", node)
        assert ask(running)[0] == [error, error]
        assert run_on(node, initialise) == error
        sim("inject", fault, "off", "--dir", node)
        assert ask(running)[0] == [0, 0]
        assert run_on(node, initialise) == 0


def test_a_hanging_gpu_delays_every_call(sim_node: Node, start_on: Start, sim: Sim) -> None:
    node = sim_node("t4x2")
    running = start_on(node, ask_repeatedly)
    assert next_line(running) == "ready"
    sim("inject", "hang", 400, "--dir", node, "--gpu", 0)
    assert 0.4 <= ask(running)[1] < 2
    sim("inject", "hang", 0, "--dir", node, "--gpu", 0)
    assert ask(running)[1] < 0.2


def test_ending_a_hang_lets_go_of_a_call_that_hangs(sim_node: Node, start_on: Start, sim: Sim) -> None:
    node = sim_node("t4x2")
    running = start_on(node, ask_repeatedly)
    assert next_line(running) == "ready"
    sim("inject", "hang", 60000, "--dir", node, "--gpu", 0)
    cure = threading.Timer(0.5, sim, ("inject", "clear", "--dir", node))
    cure.start()
    answer, seconds = ask(running)
    cure.join()
    assert answer == [0, 0]
    assert seconds < 10


# ---- sensors and settings ----------------------------------------------------------------------------------------------


def idle_sensors() -> dict[str, Any]:
    gpu = gpus()[0]
    names = {
        "speed": nv.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON,
        "links": nv.NVML_FI_DEV_NVLINK_LINK_COUNT,
        "power": nv.NVML_FI_DEV_POWER_INSTANT,
        "ecc": nv.NVML_FI_DEV_ECC_DBE_VOL_TOTAL,
        "unknown": 9999,
    }
    fields = dict(zip(names, nv.nvmlDeviceGetFieldValues(gpu, list(names.values())), strict=True))
    energy = nv.nvmlDeviceGetTotalEnergyConsumption(gpu)
    time.sleep(0.3)
    return {
        "util": nv.nvmlDeviceGetUtilizationRates(gpu).gpu,
        "temperature": nv.nvmlDeviceGetTemperatureV(gpu, nv.NVML_TEMPERATURE_GPU),
        "old": nv.nvmlDeviceGetTemperature(gpu, nv.NVML_TEMPERATURE_GPU),
        "power": nv.nvmlDeviceGetPowerUsage(gpu),
        "limit": nv.nvmlDeviceGetEnforcedPowerLimit(gpu),
        "energy": nv.nvmlDeviceGetTotalEnergyConsumption(gpu) - energy,
        "clocks": [nv.nvmlDeviceGetClockInfo(gpu, nv.NVML_CLOCK_SM), nv.nvmlDeviceGetMaxClockInfo(gpu, nv.NVML_CLOCK_SM)],
        "reasons": nv.nvmlDeviceGetCurrentClocksEventReasons(gpu),
        "fields": {name: [field.nvmlReturn, field.value.uiVal] for name, field in fields.items()},
        "samples": failure(nv.nvmlDeviceGetProcessUtilization, gpu, 0),
        "fan": failure(nv.nvmlDeviceGetFanSpeed, gpu),
        "accounting": [nv.nvmlDeviceGetAccountingMode(gpu), nv.nvmlDeviceGetAccountingPids(gpu)],
    }


def test_an_idle_gpu_shows_idle_figures(sim_node: Node, run_on: Run) -> None:
    seen = run_on(sim_node("h200x8"), idle_sensors)
    assert (seen["util"], seen["temperature"], seen["old"], seen["power"], seen["limit"]) == (0, 29, 29, 76000, 700000)
    assert seen["energy"] == pytest.approx(0.3 * 76000, rel=0.5)
    assert seen["clocks"] == [345, 1980]
    assert seen["reasons"] == nv.nvmlClocksEventReasonGpuIdle
    assert seen["fields"] == {
        "speed": [0, 26562],
        "links": [0, 18],
        "power": [0, 76000],
        "ecc": [0, 0],
        "unknown": [nv.NVML_ERROR_NOT_SUPPORTED, 0],
    }
    assert seen["samples"] == nv.NVML_ERROR_NOT_FOUND
    assert seen["fan"] == nv.NVML_ERROR_NOT_SUPPORTED
    assert seen["accounting"] == [0, []]


def settings() -> dict[str, Any]:
    gpu = gpus()[0]
    nv.nvmlDeviceSetComputeMode(gpu, nv.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS)
    nv.nvmlDeviceSetPersistenceMode(gpu, 0)
    nv.nvmlDeviceSetPowerManagementLimit(gpu, 300000)
    return {
        "mode": nv.nvmlDeviceGetComputeMode(gpu),
        "persistence": nv.nvmlDeviceGetPersistenceMode(gpu),
        "limit": nv.nvmlDeviceGetPowerManagementLimit(gpu),
        "too little": failure(nv.nvmlDeviceSetPowerManagementLimit, gpu, 1),
        "clocks": failure(nv.nvmlDeviceSetGpuLockedClocks, gpu, 300, 600),
    }


def test_an_administrator_can_set_modes_and_the_power_limit(sim_node: Node, run_on: Run) -> None:
    assert run_on(sim_node("h200x8"), settings) == {
        "mode": nv.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS,
        "persistence": 0,
        "limit": 300000,
        "too little": nv.NVML_ERROR_INVALID_ARGUMENT,
        "clocks": nv.NVML_ERROR_NOT_SUPPORTED,
    }


def setters() -> list[int]:
    os.setgid(65534)
    os.setuid(65534)
    gpu = gpus()[0]
    return [
        failure(nv.nvmlDeviceSetMigMode, gpu, 1),
        failure(nv.nvmlDeviceSetComputeMode, gpu, 0),
        failure(nv.nvmlDeviceSetPersistenceMode, gpu, 0),
        failure(nv.nvmlDeviceSetPowerManagementLimit, gpu, 300000),
        failure(nv.nvmlDeviceSetGpuLockedClocks, gpu, 300, 600),
        failure(nv.nvmlDeviceClearEccErrorCounts, gpu, 0),
    ]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody who does not own the node")
def test_setters_refuse_everybody_else(run_on: Run, sim: Sim) -> None:
    place = Path(tempfile.mkdtemp(prefix="aliquot-node-"))  # pytest's own directories are closed to other users
    try:
        place.chmod(0o755)
        assert sim("init", "h200x8", "--dir", place / "node").returncode == 0
        assert set(run_on(place / "node", setters)) == {nv.NVML_ERROR_NO_PERMISSION}
    finally:
        shutil.rmtree(place)


def gpm() -> list[Any]:
    gpu = gpus()[0]
    support = nv.nvmlGpmQueryDeviceSupport(gpu).isSupportedDevice
    if not support:
        return [support]
    get = nv.c_nvmlGpmMetricsGet_t()
    get.version, get.numMetrics = nv.NVML_GPM_METRICS_GET_VERSION, 2
    get.sample1, get.sample2 = nv.nvmlGpmSampleAlloc(), nv.nvmlGpmSampleAlloc()
    nv.nvmlGpmSampleGet(gpu, get.sample1)
    time.sleep(0.05)
    nv.nvmlGpmSampleGet(gpu, get.sample2)
    get.metrics[0].metricId, get.metrics[1].metricId = nv.NVML_GPM_METRIC_SM_UTIL, nv.NVML_GPM_METRIC_FP64_UTIL
    nv.nvmlGpmMetricsGet(get)
    return [support, get.metrics[0].nvmlReturn, get.metrics[0].value, get.metrics[1].nvmlReturn]


def test_performance_monitoring_exists_from_hopper_on(sim_node: Node, run_on: Run) -> None:
    assert run_on(sim_node("h200x8"), gpm) == [1, 0, 0.0, nv.NVML_ERROR_NOT_SUPPORTED]
    assert run_on(sim_node("a100x8-mig"), gpm) == [0]


# ---- aliquot-sim -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "expected a topology statement"),
        ("topology name=x\nbanana 3\n", ":2: expected topology, driver,"),
        ("topology name=x\nmodel m sms=many\n", ':2: sms: expected a number from 0 to 4294967295, found "many"'),
        ("topology name=x\nmodel m memory=80\n", ':2: memory: expected a size with unit KiB, MiB or GiB, found "80"'),
        ("topology name=x\nmodel m \\\n  colour=red\n", ':2: expected a key of a GPU, found "colour"'),
        ("topology name=x\ngpu 0 model=m\n", ':2: model: expected a model of an earlier line, found "m"'),
        ("topology name=x\nmodel m sms=4 memory=1GiB\ngpu 1 model=m\n", ":3: gpu: expected minor number 0 next, found 1"),
        ("topology name=x\nmodel m sms=4 memory=1GiB\ngpu 0 model=m numa=3\n", "gpu 0: expected a numa statement for its NUMA node 3"),
        ('topology name="x\n', ":1: expected a closing quote"),
    ],
)
def test_a_wrong_topology_is_refused_with_its_line(sim: Sim, tmp_path: Path, text: str, complaint: str) -> None:
    (tmp_path / "mine").write_text(text)
    refused = sim("init", tmp_path / "mine", "--dir", tmp_path / "node")
    assert refused.returncode == 1
    assert complaint in refused.stderr
    assert not (tmp_path / "node" / "state").exists()


MIG_TEXT = """
topology name=mine
numa 0 cpus=0-3
model m name=M architecture=ampere memory=80GiB sms=108 mig=7-slices mig-memory=9GiB,19GiB,39GiB,79GiB mig-sms=14,14,28,42,56,98
gpu 0 model=m pci=0000:01:00.0 numa=0 mig-mode=on
mig gpu=0 profile=3g.40gb start=4
"""


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("mig gpu=0 profile=3g.40gb start=4", ":7: start: expected a start where this profile fits"),
        ("mig gpu=0 profile=3g.40gb start=1", ":7: start: expected a start where this profile fits"),
        ("mig gpu=0 profile=9g.40gb start=0", ':7: profile: expected a MIG profile of M, found "9g.40gb"'),
        ("mig gpu=1 profile=1g.10gb start=0", ":7: gpu: expected"),
    ],
)
def test_mig_instances_of_a_topology_must_fit(sim: Sim, tmp_path: Path, line: str, complaint: str) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.write_text(MIG_TEXT)
    bad.write_text(MIG_TEXT + line + "\n")
    assert sim("init", good, "--dir", tmp_path / "node").returncode == 0
    refused = sim("init", bad, "--dir", tmp_path / "other")
    assert refused.returncode == 1
    assert complaint in refused.stderr


def test_the_topology_of_a_node_makes_the_same_node_again(sim: Sim, sim_node: Node, run_on: Run) -> None:
    node = sim_node("t4x2", "--node", "left", "--driver", "615.10")
    before = run_on(node, uuids)
    (node / "state").unlink()
    assert run_on(node, uuids) == before
    assert run_on(node, life_cycle)["versions"][0] == "615.10"


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["dance"],
        ["init"],
        ["init", "t4x2"],
        ["init", "t4x2", "--dir"],
        ["show", "--colour", "red"],
        ["inject"],
        ["inject", "flood"],
        ["inject", "lost"],
        ["inject", "mismatch", "maybe"],
        ["inject", "mismatch", "on", "--gpu", "0"],
        ["profiles", "x"],
    ],
    ids=" ".join,
)
def test_wrong_usage_exits_with_two(sim: Sim, sim_node: Node, words: list[str]) -> None:
    refused = sim(*words, *(["--dir", sim_node("t4x2")] if words[:1] == ["inject"] else []))
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith("aliquot-sim: ")


def test_help_profiles_and_show(sim: Sim, sim_node: Node) -> None:
    assert "inject FAULT" in sim("--help").stdout
    assert [line.split()[0] for line in sim("profiles").stdout.splitlines()] == ["a100x8-mig", "h200x8", "l40sx4", "t4x2"]
    node = sim_node("a100x8-mig")
    sim("inject", "lost", "--dir", node, "--gpu", 1)
    shown = sim("show", "--dir", node).stdout.splitlines()
    assert "faults lost, last xid 79" in shown[2]
    assert sum(line.strip().startswith("mig ") for line in shown) == 11
    assert sim("inject", "xid", 1, "--dir", node, "--gpu", 99).returncode == 1
    assert sim("show", "--dir", node / "nowhere").returncode == 1
