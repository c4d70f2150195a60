# SPDX-License-Identifier: Apache-2.0
"""Memory that no call of its holder brought: what a process imports stays when the exporter, which paid for it, has gone. Pages of managed
memory come to another device by faults.

CUDA gives no call at which it could be charged then. The driver counts it for the process, so the agent takes it from the limit.
"""

import sys
from typing import Any

import pytest

from agent.adapters.container_files import GrantFiles
from aliquot.contract.units import MIB
from tests.fakes.container import SOURCE_TREE
from tests.integration.agent_nodes import container, eventually, grants, make_node, manifest, running

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("build_dir")]
IMPORTED_MIB, LIMIT_MIB = 1024, 4096

PROGRAM = """
import array, ctypes, os, signal, socket, sys, time
from tests.fakes.cuda import *
SIZE = {mib} * MIB
here, there = socket.socketpair()
child = os.fork()
start()
if not child:  # the exporter
    {export}
    here.recv(1)
    os._exit(0)
{import_}
there.send(b"x")
os.waitpid(child, 0)
while True:
    signal.pause()
"""

DESCRIPTOR = (
    """
    prop, handle, descriptor = AllocationProp(type=1, handle_types=1, location_type=DEVICE), out(), ctypes.c_int()
    must("cuMemCreate", ctypes.byref(handle), SIZE, ctypes.byref(prop), 0)
    must("cuMemExportToShareableHandle", ctypes.byref(descriptor), handle.value, 1, 0)
    socket.send_fds(here, [b"x"], [descriptor.value])""",
    """
_, descriptors, _, _ = socket.recv_fds(there, 1, 1)
result, handle = into("cuMemImportFromShareableHandle", descriptors[0], 1)
assert not result, result
os.close(descriptors[0])
must("cuMemMap", reserve(SIZE), SIZE, 0, handle, 0)""",
)
IPC_HANDLE = (
    """
    handle = (ctypes.c_ubyte * 64)()
    must("cuIpcGetMemHandle", handle, alloc(SIZE)[1])
    here.send(bytes(handle))""",
    """
class Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * 64),)
handle = Handle.from_buffer_copy(there.recv(64))
must("cuIpcOpenMemHandle_v2", ctypes.byref(out()), handle, 1)""",
)


def running_python(program: str, vgpus: int = 1) -> dict[str, Any]:
    environment = [{"name": "PYTHONPATH", "value": str(SOURCE_TREE)}]
    return {**container(vgpus=vgpus, mib=LIMIT_MIB), "command": [sys.executable, "-c", program], "env": environment}


def pod(export: str, import_: str) -> dict[str, Any]:
    return running_python(PROGRAM.format(mib=IMPORTED_MIB, export=export.strip(), import_=import_))


@pytest.mark.parametrize(("export", "import_"), [DESCRIPTOR, IPC_HANDLE], ids=["descriptor", "IPC handle"])
async def test_import_is_deducted_from_limit_when_its_exporter_left(export, import_):
    async with make_node("t4x2") as node:
        node.create_pod(manifest("a", pod(export, import_)))
        await running(node, "a")
        (grant,) = grants(node)

        def deducted() -> int:
            limits = GrantFiles(node.layout.run / "containers").limits(grant["grant_id"])
            return limits.devices[0].overhead_bytes if limits else 0

        await eventually(lambda: deducted() >= IMPORTED_MIB * MIB, "the import is in the limits")
        assert deducted() < (IMPORTED_MIB + 64) * MIB


FAULTS = """
import ctypes, signal
from tests.fakes.cuda import *
start(0)
result, address = into("cuMemAllocManaged", {mib} * MIB, 1)
assert not result, result
use(1)
{fault}
while True:
    signal.pause()
"""
BY_FILL = """must("cuMemsetD2D8_v2", address, 2 * MIB, 1, 1, {mib} // 2)  # touches each page"""
KERNEL = """
from tests.fakes.kernels import capture, instantiate, make_stream
module, stream = into("cuModuleLoadData", b".version 7.0\\n.entry use(.param .u64 pointer)\\n{{ ret; }}\\n")[1], make_stream()
function, pointer = into("cuModuleGetFunction", module, b"use")[1], ctypes.c_uint64(address)
def launch():
    must("cuLaunchKernel", function, 1, 1, 1, 1, 1, 1, 0, stream, (ctypes.c_void_p * 1)(ctypes.addressof(pointer)), None)
"""
FAULTING = {
    "fill": BY_FILL,
    "kernel": KERNEL + "launch()",
    "graph": KERNEL + """must("cuGraphLaunch", instantiate(capture(stream, launch)), stream)""",
}


@pytest.mark.parametrize("fault", FAULTING.values(), ids=FAULTING)
async def test_managed_pages_that_faults_move_are_deducted_from_limit(fault):
    """No call could be refused: the device finds out while it works."""
    async with make_node("t4x2") as node:
        node.create_pod(manifest("a", running_python(FAULTS.format(mib=IMPORTED_MIB, fault=fault.format(mib=IMPORTED_MIB)), vgpus=2)))
        await running(node, "a")
        (grant,) = grants(node)

        def deducted() -> list[int]:
            limits = GrantFiles(node.layout.run / "containers").limits(grant["grant_id"])
            return [device.overhead_bytes for device in limits.devices] if limits else [0, 0]

        await eventually(lambda: deducted()[1] >= IMPORTED_MIB * MIB, "the pages are in the limits of the device where they lie")
        assert deducted()[0] < 64 * MIB
        assert deducted()[1] < (IMPORTED_MIB + 64) * MIB
