# SPDX-License-Identifier: Apache-2.0
"""The simulated CUDA runtime: what it exports, programs without or with an old driver, and its C tests bare and under the shim.

Each C test program runs with the runtimes of CUDA 12 and of CUDA 13, in a container with two devices.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.container import MIB, SOURCE_TREE, Node
from tests.unit.simulated_runtime.test_tables import exported_names

LIBRARIES = {"12.9": "libcudart.so.12", "13.2": "libcudart.so.13", "13.5": "libcudart.so.13"}
PROGRAMS = sorted(path.stem for path in (SOURCE_TREE / "simulated_runtime/tests").glob("test_*.c"))
FOLDERS = {"12.9": "tests/runtime-12.9", "13.2": "tests"}
INSUFFICIENT_DRIVER = 35
OUT_OF_MEMORY = 2


def library_path(build_dir: Path, version: str) -> Path:
    return build_dir / "lib/runtime" / version / LIBRARIES[version]


def defined_symbols(library: Path) -> set[tuple[str, str]]:
    """Return name and version node of each function that a library exports."""
    text = subprocess.run(["readelf", "--dyn-syms", "--wide", library], capture_output=True, text=True, check=True).stdout
    rows = (line.split() for line in text.splitlines())
    names = {row[7] for row in rows if len(row) > 7 and row[3] == "FUNC" and row[6] != "UND"}
    return {(name, node) for name, _, node in (each.partition("@@") for each in names)}


@pytest.mark.parametrize("version", LIBRARIES)
def test_exports_are_the_table_and_twins(build_dir, version):
    names = exported_names(int(version.split(".")[0]))
    symbols = defined_symbols(library_path(build_dir, version))
    assert {node for _, node in symbols} == {LIBRARIES[version]}
    twins = {name for name, _ in symbols if name.endswith(("_ptsz", "_ptds"))}
    assert {name for name, _ in symbols} - twins == names
    assert {name.rsplit("_", 1)[0] for name in twins} <= names
    assert len(twins) > 25


@pytest.mark.parametrize("version", LIBRARIES)
def test_library_needs_no_driver_to_load(build_dir, version):
    dynamic = subprocess.run(["readelf", "--dynamic", library_path(build_dir, version)], capture_output=True, text=True, check=True).stdout
    assert "libcuda.so" not in dynamic
    assert LIBRARIES[version] in dynamic


def count_devices(library: Path, **environment: str) -> list[int]:
    """Return status of cudaGetDeviceCount, status and value of cudaRuntimeGetVersion, as a new process sees them."""
    script = (
        "import ctypes, sys; c = ctypes.c_int(); r = ctypes.CDLL(sys.argv[1])\n"
        "print(r.cudaGetDeviceCount(ctypes.byref(c)), r.cudaRuntimeGetVersion(ctypes.byref(c)), c.value)"
    )
    done = subprocess.run([sys.executable, "-c", script, library], env=environment, capture_output=True, text=True, check=True)
    return [int(word) for word in done.stdout.split()]


@pytest.mark.parametrize("version", LIBRARIES)
def test_without_a_driver_calls_fail_and_versions_are_known(build_dir, version):
    major, minor = version.split(".")
    assert count_devices(library_path(build_dir, version)) == [INSUFFICIENT_DRIVER, 0, int(major) * 1000 + int(minor) * 10]


@pytest.mark.parametrize(("version", "status"), [("12.9", 0), ("13.2", INSUFFICIENT_DRIVER)])
def test_driver_of_cuda_12_serves_the_runtime_of_cuda_12_only(build_dir, sim_node, version, status):
    directory = sim_node("l40sx4", "--driver", "570.86.15")
    found = count_devices(library_path(build_dir, version), ALIQUOT_SIM_DIR=str(directory), LD_LIBRARY_PATH=str(build_dir / "lib/sim"))
    assert found[0] == status


@pytest.mark.parametrize("interposition", ["none", "front", "preload"])
@pytest.mark.parametrize("version", FOLDERS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_c_program_passes_in_a_container(build_dir, sim_node, tmp_path, program, version, interposition):
    node = Node(build_dir, sim_node("h200x8"), tmp_path)
    container = node.container(8192, 8192, interposition=interposition)
    answer = container.run([build_dir / FOLDERS[version] / program])
    assert answer.status == 0, answer.stderr


@pytest.mark.parametrize("interposition", ["front", "preload"])
@pytest.mark.parametrize("version", LIBRARIES)
def test_the_shim_holds_the_share_under_the_runtime(build_dir, sim_node, tmp_path, version, interposition):
    script = (
        "import ctypes, json, sys; r = ctypes.CDLL(sys.argv[1]); size, by = ctypes.c_size_t, ctypes.byref\n"
        "free, total, pointer = size(), size(), ctypes.c_void_p()\n"
        "assert r.cudaMemGetInfo(by(free), by(total)) == 0\n"
        "print(json.dumps({'total': total.value, 'more': r.cudaMalloc(by(pointer), size(free.value + 1)),"
        " 'all': r.cudaMalloc(by(pointer), free)}))"
    )
    container = Node(build_dir, sim_node("h200x8"), tmp_path).container(2048, interposition=interposition)
    answer = container.run([sys.executable, "-c", script, library_path(build_dir, version)])
    assert answer.events == ({"total": 2048 * MIB, "more": OUT_OF_MEMORY, "all": 0},), answer.stderr
