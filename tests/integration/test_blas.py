# SPDX-License-Identifier: Apache-2.0
"""The stand-in for cuBLAS: each of its routines launches exactly one kernel on the handle's stream."""

import json
import re
import sys

import pytest

from tests.fakes.container import SOURCE_TREE, Node
from tests.fakes.prototypes import preprocessed, read_prototypes

HANDLE_NAMES = re.compile(r"^cublas(Create|Destroy|Set|Get)")
ORDER = 64
CALL_EACH = f"""
import ctypes, json, sys
routines = json.loads(sys.argv[1])
cuda, blas = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL(sys.argv[2])
kind = {{"pointer": ctypes.c_void_p, "int": ctypes.c_int, "long": ctypes.c_longlong}}
handle, buffer, on_host = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.create_string_buffer(4096)
begin, end, ms = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_float()
assert blas.cublasCreate_v2(ctypes.byref(handle)) == 0
assert cuda.cuMemAlloc_v2(ctypes.byref(buffer), ctypes.c_size_t(1 << 20)) == 0
assert cuda.cuEventCreate(ctypes.byref(begin), 0) == 0 and cuda.cuEventCreate(ctypes.byref(end), 0) == 0
for name, parameters in routines.items():
    arguments = [handle]
    for parameter, type in parameters[1:]:
        value = on_host if parameter in ("info", "result") else {{"pointer": buffer.value, "int": {ORDER}, "long": 4096}}[type]
        arguments.append(value if value is on_host else kind[type](value))
    assert cuda.cuEventRecord(begin, None) == 0
    status = getattr(blas, name)(*arguments)
    assert cuda.cuEventRecord(end, None) == 0 and cuda.cuEventSynchronize(end) == 0
    assert cuda.cuEventElapsedTime(ctypes.byref(ms), begin, end) == 0
    print(json.dumps({{"name": name, "status": status, "microseconds": 1000 * ms.value}}))
"""


@pytest.fixture
def node(build_dir, sim_node, tmp_path) -> Node:
    return Node(build_dir, sim_node("h200x8"), tmp_path)


def test_each_routine_launches_work(node: Node) -> None:
    exported = read_prototypes(preprocessed("simulated_runtime/blas/calls.h", [SOURCE_TREE, SOURCE_TREE / "cuda_shim/abi"]))
    routines = {
        name: [(parameter.name, parameter.kind) for parameter in parameters]
        for name, parameters in exported.items()
        if not HANDLE_NAMES.match(name) and not name.startswith("cublasLt")
    }
    container = node.container(1024, interposition="none")
    library = node.build / "lib/runtime/libcublas.so.13"
    answer = container.run([sys.executable, "-c", CALL_EACH, json.dumps(routines), library])
    assert answer.status == 0, answer.stderr
    assert [event["name"] for event in answer.events] == list(routines)
    assert len(routines) > 150
    wrong = [event for event in answer.events if event["status"] != 0 or event["microseconds"] < 1.9]
    assert not wrong
